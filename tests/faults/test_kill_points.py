"""SIGKILL of a worker and of a whole node at every named moment of an iteration, and at the edges of a run.

Each test asserts that its fault fired, that the survivors kept their processes and all their ranks, and that
parameters, buffers and optimizer state at the end are bit for bit those of an undisturbed run. Rank 0, whose node
hosts the c10d store, is among the victims.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.conftest import assert_recovered
from tests.support.job import Agents

POINTS = {
    "data loading": {"at": "data", "iteration": 5},
    "forward": {"at": "forward", "iteration": 5},
    "backward, before any all-reduce": {"at": "backward", "iteration": 5},
    "backward, inside the all-reduces": {"at": "backward", "iteration": 5, "delay_s": 0.001},
    "after the last all-reduce, before the step": {"at": "before_step", "iteration": 5},
    "inside the step of the victim only": {"at": "step", "iteration": 5},
    "after the step": {"at": "after_step", "iteration": 5},
    "between iterations": {"at": "between", "iteration": 5},
    "first iteration": {"at": "forward", "iteration": 0},
    "first iteration, backward": {"at": "backward", "iteration": 0},
    "second iteration, where DDP settles its buckets": {"at": "forward", "iteration": 1},
    "last iteration": {"at": "backward", "iteration": 11},
    "evaluation": {"at": "evaluate"},
    "end of the evaluation": {"at": "evaluated"},
    "end of the run": {"at": "close"},
    "inside swift.init": {"at": "init"},
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("victim", [0, 1])
def test_worker(point: str, victim: int, make_agents: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    agents = make_agents(orders={"faults": [{**POINTS[point], "rank": victim, "scope": "worker"}]})
    for node in ("a", "b"):
        agents.start(node)
    outcome = agents.wait()
    assert_recovered(outcome, undisturbed(), {victim})
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()


@pytest.mark.parametrize("point", POINTS)
def test_node(point: str, make_agents: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    """The node of rank 0 is lost: agent, workers, the c10d store, and often the coordinator."""
    agents = make_agents(orders={"faults": [{**POINTS[point], "rank": 0, "scope": "node"}]}, options=("--spares", "1"))
    for node in ("a", "b", "c"):
        agents.start(node)
    outcome = agents.wait()
    assert_recovered(outcome, undisturbed(), {0, 1})
    assert sorted(outcome.exit_codes.values()) == [-9, 0, 0], outcome.text()
