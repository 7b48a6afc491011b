"""Data parallel in one dimension of a mesh, tensor or pipeline parallel in the other: the mesh says who replaces whom.

Nodes hold one replica each. Each test asserts that its faults fired, that survivors kept their processes, and that each
rank's part of the state at the end is bit for bit that of an undisturbed run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.agent_forks import ForkServer
from tests.support.job import ROOT, Agents, Outcome

SCRIPT = ROOT / "tests" / "support" / "mesh_train.py"
LAYOUTS = ("tensor", "dtensor", "pipeline")
# A node is lost at the first place, and later another at the second.
PLACES = [("forward", "before_step"), ("backward", "after_step"), ("agree", "agreed")]
Start = Callable[..., Outcome]


@pytest.fixture
def run(make_agents: Callable[..., Agents]) -> Start:
    def train(
        layout: str, faults: list[dict[str, Any]], nodes: str = "ab", *, overlap: bool = False, **options: Any
    ) -> Outcome:
        orders = {"model": layout, "faults": faults, "overlap": overlap}
        return make_agents(orders=orders, script=SCRIPT, **options).run(nodes)

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
    faults = [
        {"at": "forward", "iteration": 0, "rank": 1, "scope": "worker"},
        {"at": "backward", "iteration": 1, "rank": 2, "scope": "worker"},
        {"at": "before_step", "iteration": 5, "rank": 0, "scope": "worker"},
        {"at": "after_step", "iteration": 8, "rank": 3, "scope": "worker"},
    ]
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
@pytest.mark.parametrize("places", PLACES, ids=" and ".join)
def test_nodes(
    places: tuple[str, str], layout: str, run: Start, undisturbed: Callable[..., dict[int, str]]
) -> None:
    """Every rank of a node gets its part from the other node, first those of one, then those of the other."""
    faults = [
        {"at": places[0], "iteration": 4, "rank": 2, "scope": "node"},
        {"at": places[1], "iteration": 7, "rank": 1, "scope": "node"},
    ]
    outcome = run(layout, faults, nodes="abcd", options=("--spares", "2"))
    assert_same(outcome, undisturbed(layout), {0, 1, 2, 3})
