"""FSDP2 on a mesh of two replicas of two shards: a lost rank gets its shards from the rank that holds the same ones.

Each test asserts that its faults fired, that survivors kept their processes, and that the whole model and optimizer
state at the end are bit for bit those of an undisturbed run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_agent.wire.injected import Fault, Phase
from tests.support.agent_forks import ForkServer
from tests.support.etcd_cluster import wait_for
from tests.support.injected import killed, node_killed
from tests.support.job import ROOT, Agents, Outcome

SCRIPT = ROOT / "tests" / "support" / "hsdp_train.py"
Start = Callable[..., Outcome]

# Moments of an iteration; a node is lost at each pair of them in one job, first ranks 2 and 3, then 0 and 1. The end of
# the backward is right before, and the step right after all ranks agree to make it.
PLACES: list[tuple[tuple[Phase, float], tuple[Phase, float]]] = [
    (("backward", 0.5), ("after-step", 0.0)), (("backward", 1.0), ("step", 0.0))
]  # fmt: skip
# Of the job in which nodes are lost at any moment: iterations, seconds of each, lost nodes.
ITERATIONS, PACE_S, NUM_LOST = 100, 0.25, 10


@pytest.fixture
def run(make_agents: Callable[..., Agents]) -> Start:
    def train(injected: list[Fault], model: str = "hsdp", nodes: str = "ab", **options: Any) -> Outcome:
        return make_agents(orders={"model": model}, script=SCRIPT, **options).run(nodes, injected)

    return train


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, etcd: str, forks: ForkServer) -> str:
    return hash_of_undisturbed(tmp_path_factory.mktemp("hsdp"), etcd, forks)


def hash_of_undisturbed(directory: Path, etcd: str, forks: ForkServer, **orders: Any) -> str:
    orders = {"model": "hsdp", **orders}
    agents = Agents(directory, etcd, job_id=directory.name, orders=orders, script=SCRIPT, forks=forks)
    outcome = agents.run()
    assert set(outcome.exit_codes.values()) == {0} and len(outcome.hashes) == 1, outcome.text()
    return outcome.hashes.pop()


def assert_same(outcome: Outcome, expected: str, lost: set[int]) -> None:
    text = outcome.text()
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == lost, text
    assert sorted(outcome.results) == [0, 1, 2, 3] and outcome.hashes == {expected}, text
    assert "replicas have equal checksums" in text


def test_workers(run: Start, undisturbed: str) -> None:
    """Each rank once, in the first iterations too."""
    injected = [
        killed(1, 0, "forward"), killed(2, 1, "backward"), killed(0, 5, "backward", 1.0), killed(3, 8, "after-step")
    ]  # fmt: skip
    outcome = run(injected, max_restarts=6)
    assert_same(outcome, undisturbed, {0, 1, 2, 3})


@pytest.mark.parametrize("places", PLACES, ids=["backward and after the step", "its end and the step"])
def test_nodes(places: tuple[tuple[Phase, float], tuple[Phase, float]], run: Start, undisturbed: str) -> None:
    injected = [node_killed(2, 4, *places[0]), node_killed(0, 7, *places[1])]
    outcome = run(injected, nodes="abcd", options=("--spares", "2"))
    assert_same(outcome, undisturbed, {0, 1, 2, 3})
    assert sorted(outcome.exit_codes.values()) == [-9, -9, 0, 0], outcome.text()


def test_either_node_at_random_moments(
    make_agents: Callable[..., Agents], etcd: str, forks: ForkServer, tmp_path: Path
) -> None:
    """Ten nodes are lost, each at any moment after the recovery from the one before."""
    seed = random.SystemRandom().randrange(1_000_000)
    print(f"seed {seed}")
    choose = random.Random(seed)
    agents = make_agents(
        orders={"model": "hsdp", "iterations": ITERATIONS, "stretch_s": PACE_S}, script=SCRIPT, max_restarts=3,
        options=("--spares", "2"),
    )  # fmt: skip
    names = iter(f"n{number}" for number in range(4 + NUM_LOST))
    for _ in range(4):
        agents.start(next(names))
    # A loss while they set up restarts all.
    wait_for(lambda: len(list(agents.directory.glob("begun.*"))) == 4, 60, "training")
    for number in range(NUM_LOST):
        time.sleep(choose.uniform(0.0, 2 * PACE_S))
        pid = int((agents.directory / f"pids.{choose.choice((0, 2))}").read_text().split()[-1])
        agent = psutil.Process(pid).ppid()
        agents.kill_node(next(name for name, process in agents.running.items() if process.pid == agent))
        agents.start(next(names))
        # Of a coordinator that is lost the lines stay.
        recovered = lambda: agents.outcome(0).text().count("] recovered: generation ")  # noqa: E731
        wait_for(lambda: recovered() > number, 60, f"recovery {number}\n{agents.outcome(0).text()}")  # noqa: B023
    assert not list(agents.directory.glob("result.*")), "the job has ended too early to lose all of them"
    agents.hurry()
    outcome = agents.wait()
    text = outcome.text()
    assert sorted(code or 0 for code in outcome.exit_codes.values()) == [-9] * NUM_LOST + [0] * 4, text
    assert "all workers restart" not in text and "replicas have equal checksums" in text, text
    (reference := tmp_path / "undisturbed").mkdir()
    assert outcome.hashes == {hash_of_undisturbed(reference, etcd, forks, iterations=ITERATIONS)}, text


def test_shards_without_replicas_are_told_at_the_start(run: Start) -> None:
    """And a loss restarts all workers, as under torchrun."""
    outcome = run([killed(1, 4, "backward")], model="fsdp")
    text = outcome.text()
    assert "the model is sharded, and no rank holds a replica of another one's shards" in text
    assert "all workers restart: ranks [1] are lost" in text
    # The first replacement of rank 1 may or may not have got to the script before all were ended.
    starts = {rank: len(pids) for rank, pids in outcome.pids.items()}
    assert set(outcome.exit_codes.values()) == {0} and starts in ({0: 2, 1: n, 2: 2, 3: 2} for n in (2, 3)), text


def test_shards_without_replicas_come_back_from_a_checkpoint(
    make_agents: Callable[..., Agents], tmp_path: Path
) -> None:
    """Each rank's from its own part."""
    (tmp_path / "undisturbed").mkdir()
    expected = make_agents(
        tmp_path / "undisturbed", orders={"model": "fsdp", "evaluates": True}, script=SCRIPT
    ).run()
    orders = {"model": "fsdp", "checkpoint": 3, "patient": True, "evaluates": True}
    injected = [killed(1, 4, "backward"), node_killed(2, 8, "after-step")]
    outcome = make_agents(orders=orders, script=SCRIPT, options=("--spares", "1")).run("abc", injected)
    text = outcome.text()
    for iteration in (3, 6):
        assert f"all ranks begin with the checkpoint of iteration {iteration}" in text
    assert "MB in 4 parts" in text
    assert sorted(outcome.results) == [0, 1, 2, 3] and outcome.hashes == expected.hashes, text
