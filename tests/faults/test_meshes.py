"""Data parallel in one dimension of a mesh, tensor or pipeline parallel in the other: the mesh says who replaces whom.

Nodes hold one replica each. Each test asserts that its faults fired, that survivors kept their processes, and that each
rank's part of the state at the end is bit for bit that of an undisturbed run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from swift_agent.wire.injected import Fault, Phase
from tests.support.agent_forks import ForkServer
from tests.support.injected import apart, killed, node_killed
from tests.support.job import ROOT, Agents, Outcome

SCRIPT = ROOT / "tests" / "support" / "mesh_train.py"
LAYOUTS = ("tensor", "dtensor", "pipeline")
# A node is lost at the first place, and later another at the second.
PLACES: list[tuple[Phase, Phase]] = [("forward", "step"), ("backward", "after-step")]
Start = Callable[..., Outcome]


@pytest.fixture
def run(make_agents: Callable[..., Agents]) -> Start:
    def train(
        layout: str, faults: Sequence[dict[str, Any] | Fault], nodes: str = "ab", *, overlap: bool = False,
        **options: Any,
    ) -> Outcome:  # fmt: skip
        of_script, injected = apart(faults)
        orders = {"model": layout, "faults": of_script, "overlap": overlap}
        return make_agents(orders=orders, script=SCRIPT, **options).run(nodes, injected)

    return train


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, etcd: str, forks: ForkServer
) -> Callable[..., dict[int, str]]:
    """By rank, the hash of its part of the state after a run without failure."""

    @functools.cache
    def run(layout: str, overlap: bool = False) -> dict[int, str]:
        agents = Agents(
            tmp_path_factory.mktemp(layout), etcd, job_id=f"mesh-{layout}-{overlap}",
            orders={"model": layout, "overlap": overlap}, script=SCRIPT, forks=forks,
        )  # fmt: skip
        outcome = agents.run()
        assert set(outcome.exit_codes.values()) == {0} and len(outcome.results) == 4, outcome.text()
        hashes = {rank: result["hash"] for rank, result in outcome.results.items()}
        # Ranks 0 and 2 hold one part, 1 and 3 the other.
        assert hashes[0] == hashes[2] != hashes[1] == hashes[3]
        return hashes

    return run


def assert_same(outcome: Outcome, expected: dict[int, str], lost: set[int]) -> None:
    text = outcome.text()
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == lost, text
    assert {rank: result["hash"] for rank, result in outcome.results.items()} == expected, text
    assert "replicas have equal checksums" in text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_workers(layout: str, run: Start, undisturbed: Callable[..., dict[int, str]]) -> None:
    """Each rank once, in the first iterations too."""
    faults = [killed(1, 0, "forward"), killed(2, 1, "backward"), killed(0, 5, "step"), killed(3, 8, "after-step")]
    assert_same(run(layout, faults, max_restarts=6), undisturbed(layout), {0, 1, 2, 3})


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_updates_in_the_backward(layout: str, run: Start, undisturbed: Callable[..., dict[int, str]]) -> None:
    """A rank is lost while others are in the backward, or through with their updates."""
    faults = [
        {"at": "backward", "iteration": 2, "rank": 1, "scope": "worker"},
        {"at": "before_step", "iteration": 5, "rank": 0, "scope": "worker"},
        {"at": "after_step", "iteration": 8, "rank": 3, "scope": "worker"},
    ]
    outcome = run(layout, faults, overlap=True, max_restarts=6)
    # Of layers split by hand it is the same update; a pipeline has its loss scaled otherwise.
    assert_same(outcome, undisturbed(layout, overlap=layout == "pipeline"), {0, 1, 3})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("places", [*PLACES, ("agree", "agreed")], ids=" and ".join)
def test_nodes(
    places: tuple[Any, Any], layout: str, run: Start, undisturbed: Callable[..., dict[int, str]]
) -> None:
    """Every rank of a node gets its part from the other node, first those of one, then those of the other. The moment
    right before all agree is the script's: where the backward ends depends on the layout."""
    faults: list[dict[str, Any] | Fault] = [
        node_killed(rank, number, place) if places in PLACES else
        {"at": place, "iteration": number, "rank": rank, "scope": "node"}
        for place, number, rank in ((places[0], 4, 2), (places[1], 7, 1))
    ]  # fmt: skip
    outcome = run(layout, faults, nodes="abcd", options=("--spares", "2"))
    assert_same(outcome, undisturbed(layout), {0, 1, 2, 3})
