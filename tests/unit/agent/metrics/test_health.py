"""What probes are told in each situation of a node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swift_agent.agent.lifecycle import events as evt
from swift_agent.agent.lifecycle.state import AgentState
from swift_agent.agent.metrics.health import STUCK_S, Stage, why_not_alive, why_not_ready
from tests.support.records import view
from tests.unit.agent.lifecycle.test_machine import next_generation, planned, training


def ready(state: AgentState, **changes: Any) -> str:
    told: dict[str, Any] = {"stage": "runs", "is_warm": True, "is_away": False, **changes}
    return why_not_ready(told["stage"], state, told["is_warm"], told["is_away"])


def test_its_workers_train() -> None:
    assert ready(training().state) == ""


@pytest.mark.parametrize("stage", ["joins", "comes back", "leaves"])
def test_stages_in_which_it_does_nothing_for_the_job(stage: Stage) -> None:
    assert ready(training().state, stage=stage).startswith("it ")


def test_it_leaves() -> None:
    noticed = training()
    noticed.tell(evt.Noticed("SIGTERM", 15.0, 115.0))
    assert ready(noticed.state) == "it leaves: it got SIGTERM"


def test_etcd_does_not_answer() -> None:
    state = training().state
    assert ready(state, is_away=True) == "etcd does not answer"
    assert ready(replace(state, paused=True)).startswith("its workers are paused")


def test_it_waits_for_others() -> None:
    assert ready(AgentState("n0", "n0.1", view=view(generation=None))) == "it waits for other nodes: 2 are there"


def test_a_spare_is_ready_when_it_is_warm() -> None:
    spare = AgentState("n2", "n2.1", view=view())
    assert ready(spare) == ""
    assert ready(spare, is_warm=False) == "it is a spare, and its standbys are not ready yet"
    assert ready(replace(spare, paused=True)) == "etcd does not answer", "it has no workers"


def test_a_recovery_step_by_step() -> None:
    agent = training()
    agent.exit(1, -9)
    assert ready(agent.state) == "a worker has failed: local rank 1"
    next_generation(agent, lost={0: (1,)})
    assert "local rank 1 not there yet" in ready(agent.state)
    agent.start((1,), first_pid=500)
    agent.report(0, 1)
    assert ready(agent.state) == "its workers enter generation 2: local ranks 0, 1 not there yet"
    planned(agent)
    assert ready(agent.state) == "it recovers in generation 2: local ranks 0, 1 at it"
    agent.tell(evt.WorkerResumed(0, agent.pid(0), 2, 6, {}))
    assert ready(agent.state) == "it recovers in generation 2: local rank 1 at it"
    agent.tell(evt.WorkerResumed(1, agent.pid(1), 2, 6, {}))
    assert ready(agent.state) == ""


def test_a_script_of_which_nothing_is_known_is_ready_when_it_runs() -> None:
    state = AgentState("n0", "n0.1", view=view())
    assert ready(state) == "its workers start: local ranks 0, 1 not there yet"
    agent = training()
    assert ready(replace(agent.state, view=replace(agent.state.view, tracked=False))) == ""


def test_workers_that_are_done_are_no_fault() -> None:
    agent = training()
    for local_rank in (0, 1):
        agent.finish(local_rank, 1)
        assert ready(agent.state) == ""
        agent.exit(local_rank, 0)
    assert ready(agent.state) == ""


def test_alive_is_who_turns_or_says_why_not() -> None:
    assert why_not_alive("runs", 100.0, 100.0 + STUCK_S) == ""
    assert why_not_alive("runs", 100.0, 101.0 + STUCK_S) == "the loop of this agent has stood still for 61 s"
    for stage in ("joins", "comes back", "leaves"):
        assert why_not_alive(stage, 0.0, 1e6) == ""  # type: ignore[arg-type]
