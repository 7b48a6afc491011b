"""Failures during the recovery of another failure, and many failures in one job."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import assert_recovered
from tests.support.injected import killed
from tests.support.job import Agents

# By the script: `swiftctl inject` knows no moments of a recovery, and the second fault comes after this one.
FIRST = {"at": "backward", "iteration": 5, "rank": 1, "scope": "worker"}


# Only a replacement passes through init and begin again.
PLACES = [
    ("init", 1),
    ("begin", 1),
    *((at, victim) for at in ("rebuild", "transfer", "verify") for victim in (0, 1, 2)),
]


@pytest.mark.parametrize(("at", "victim"), PLACES)
def test_second_failure_during_recovery(
    at: str, victim: int, make_agents: Callable[..., Agents], undisturbed: Callable[..., str]
) -> None:
    """Rank 1 dies in a backward; while it is being replaced, the source (0), the replacement (1) or a bystander (2)
    dies.
    """
    second = {"at": at, "rank": victim, "scope": "worker", "after": 0}
    agents = make_agents(orders={"faults": [FIRST, second]}, max_restarts=5)
    for node in ("a", "b"):
        agents.start(node)
    outcome = agents.wait()
    assert_recovered(outcome, undisturbed(), {1, victim}, num_faults=2)
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()


def test_node_lost_during_the_recovery_of_another(
    make_agents: Callable[..., Agents], undisturbed: Callable[..., str]
) -> None:
    """Two spares; the node of rank 0 is lost while the node of rank 2 is being replaced."""
    faults = [
        {"at": "backward", "iteration": 5, "rank": 2, "scope": "node"},
        {"at": "transfer", "rank": 1, "scope": "worker", "after": 0},
    ]
    agents = make_agents(orders={"faults": faults}, options=("--spares", "1"))
    for node in ("a", "b", "c"):
        agents.start(node)
    outcome = agents.wait()
    assert_recovered(outcome, undisturbed(), {1, 2, 3}, num_faults=2)


@pytest.mark.parametrize(("kind", "rank"), [("two", 1), ("accumulate", 0), ("metric", 2)])
def test_models(kind: str, rank: int, make_agents: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    """Two optimizers, gradient accumulation, and a collective after the update, each with two kills."""
    injected = [killed(rank, 3, "step"), killed((rank + 1) % 4, 7, "backward")]
    outcome = make_agents(orders={"model": kind}).run("ab", injected)
    assert_recovered(outcome, undisturbed(model=kind), {rank, (rank + 1) % 4}, num_faults=0)


def test_fifty_kills(make_agents: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    """Fifty workers killed at random moments of one job: equal state at the end, and the survivors do not grow."""
    iterations, kills = 400, 50
    expected = undisturbed(iterations=iterations)
    agents = make_agents(orders={"iterations": iterations, "pause_s": 0.02, "faults": []}, max_restarts=kills + 5)
    for node in ("a", "b"):
        agents.start(node)
    survivor = 3
    sizes: list[tuple[int, int, float]] = []
    killed = 0
    deadline_s = time.monotonic() + 100
    reached = -1
    while killed < kills:
        assert time.monotonic() < deadline_s, agents.outcome(0).text()
        latest = _iteration(agents.directory, survivor)
        if latest < reached + 4 or latest < 3:
            time.sleep(0.01)
            continue
        reached = latest
        victim = killed % 3
        pids = [int(line) for line in (agents.directory / f"pids.{victim}").read_text().split()]
        if killed in (10, kills - 1):  # all ranks train: nothing comes and goes
            pid = int((agents.directory / f"pids.{survivor}").read_text().split()[-1])
            sizes.append((len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd")), _rss_mb(pid)))
        os.kill(pids[-1], signal.SIGKILL)
        killed += 1
    outcome = agents.wait(100)
    assert outcome.hashes == {expected}, outcome.text()
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()
    assert len(outcome.pids[survivor]) == 1, outcome.text()
    early, late = sizes
    assert late[0] <= early[0] + 2 and late[1] <= early[1] + 4, f"threads and files of the survivor grew: {sizes}"
    assert late[2] < early[2] + 40, f"the memory of the survivor grew: {sizes}"
    print(json.dumps({"kills": killed, "threads, files and MB after 10 and 49 kills": sizes}))


def _rss_mb(pid: int) -> float:
    return int((Path("/proc") / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _iteration(directory: Path, rank: int) -> int:
    try:
        lines = (directory / f"times.{rank}").read_text().splitlines()
    except FileNotFoundError:
        return -1
    return int(lines[-1].split()[0]) if lines else -1
