"""SIGKILL of a worker and of a whole node at every named moment of an iteration, and at the edges of a run.

Each test asserts that its fault fired, that the survivors kept their processes and all their ranks, and that
parameters, buffers and optimizer state at the end are bit for bit those of an undisturbed run. Rank 0, whose node
hosts the c10d store, is among the victims. Moments that have a "phase" are those of `swiftctl inject`; the script
itself kills at the others ("at"), as the product knows no order for what is outside of an iteration's own phases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.conftest import assert_recovered
from tests.support.injected import killed, node_killed
from tests.support.job import Agents

POINTS: dict[str, dict[str, Any]] = {
    "data loading": {"at": "data", "iteration": 5},
    "forward": {"phase": "forward", "iteration": 5},
    "backward, before any all-reduce": {"at": "backward", "iteration": 5},
    "backward, inside the all-reduces": {"phase": "backward", "iteration": 5},
    "after the last all-reduce, before the step": {"phase": "step", "iteration": 5},
    "inside the step of the victim only": {"at": "step", "iteration": 5},
    "after the step": {"phase": "after-step", "iteration": 5},
    "between iterations": {"at": "between", "iteration": 5},
    "first iteration": {"phase": "forward", "iteration": 0},
    "first iteration, backward": {"phase": "backward", "iteration": 0},
    "second iteration, where DDP settles its buckets": {"phase": "forward", "iteration": 1},
    "last iteration": {"phase": "backward", "iteration": 11},
    "evaluation": {"at": "evaluate", "iteration": 3},
    "end of the evaluation": {"at": "evaluated", "iteration": 3},
    "end of the run": {"at": "close"},
    "inside swift.init": {"at": "init"},
}

# Agents are real interpreters here; elsewhere they are forked, which takes half the time.
AS_THE_COMMAND_DOES = {"backward, inside the all-reduces", "inside swift.init"}

# Where a later iteration has the same moment both workers of a node are lost in one job, one after the other.
LATER = {3: 7, 5: 8}
REPEATED = [name for name, place in POINTS.items() if place.get("iteration") in LATER]


@pytest.mark.parametrize("point", REPEATED)
def test_both_workers(point: str, make_agents: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    place = POINTS[point]
    later = {**place, "iteration": LATER[place["iteration"]]}
    assert_survived([(place, 0), (later, 1)], {0, 1}, make_agents, undisturbed)


@pytest.mark.parametrize("point", [name for name in POINTS if name not in REPEATED])
@pytest.mark.parametrize("victim", [0, 1])
def test_worker(point: str, victim: int, make_agents: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    assert_survived([(POINTS[point], victim)], {victim}, make_agents, undisturbed)


def assert_survived(
    kills: list[tuple[dict[str, Any], int]], lost: set[int], make_agents: Callable[..., Agents],
    undisturbed: Callable[..., str],
) -> None:  # fmt: skip
    """*kills*: places, and ranks."""
    faults = [{**place, "rank": rank, "scope": "worker"} for place, rank in kills if "at" in place]
    injected = [killed(rank, **place) for place, rank in kills if "phase" in place]
    outcome = make_agents(orders={"faults": faults}).run("ab", injected)
    assert_recovered(outcome, undisturbed(), lost, num_faults=len(faults))
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()


@pytest.mark.parametrize("point", POINTS)
def test_node(point: str, make_agents: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    """The node of rank 0 is lost: agent, workers, the c10d store, and often the coordinator."""
    place = POINTS[point]
    faults = [{**place, "rank": 0, "scope": "node"}] if "at" in place else []
    injected = [node_killed(0, **place)] if "phase" in place else []
    start_method = "spawn" if point in AS_THE_COMMAND_DOES else "forkserver"
    agents = make_agents(start_method=start_method, orders={"faults": faults}, options=("--spares", "1"))
    outcome = agents.run("abc", injected)
    assert_recovered(outcome, undisturbed(), {0, 1}, num_faults=len(faults))
    assert sorted(outcome.exit_codes.values()) == [-9, 0, 0], outcome.text()
