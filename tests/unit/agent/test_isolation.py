"""When workers stand still because their places may be another node's, and when they go on."""

from __future__ import annotations

import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swift_agent import lifecycle as lc
from swift_agent import lifecycle_messages as msg
from swift_agent.agent import Agent
from swift_agent.isolation import MAX_DELAY_S, pausing, rejoin_delay_s
from swift_rendezvous.keys import (
    FailureRecord,
    GenerationRecord,
    JobRecord,
    NodeRecord,
    Owner,
    PlanRecord,
    StoreRecord,
)
from swift_rendezvous.view import View


@pytest.mark.parametrize(
    ("paused", "holds", "is_away", "expected"),
    [
        (False, True, False, ""), (False, True, True, ""), (False, False, False, "pause"), (True, False, False, ""),
        (True, True, False, "ask"), (True, True, True, "resume"),
    ],
)  # fmt: skip
def test_what_follows_from_what_holds(paused: bool, holds: bool, is_away: bool, expected: str) -> None:
    assert pausing(paused, holds, is_away) == expected


def test_paused_once_and_on_only_when_etcd_says_that_nothing_has_changed() -> None:
    state = lc.AgentState("n0", "n0.1", view=View(revision=7, generation_revision=7))
    given = []
    for event in (
        msg.Tick(), msg.PlaceRead(7), msg.Tick(False, why="etcd is silent"), msg.Tick(False, why="etcd is silent"),
        msg.Tick(), msg.PlaceRead(8), msg.Tick(), msg.PlaceRead(7), msg.PlaceRead(7), msg.Tick(),
    ):  # fmt: skip
        step = lc.on_event(state, event, now_s=1.0)
        state = step.state
        given.append([c for c in step.commands if isinstance(c, (lc.PauseWorkers, lc.ResumeWorkers, lc.ReadPlace))])
    pause, ask, resume = [lc.PauseWorkers("etcd is silent")], [lc.ReadPlace()], [lc.ResumeWorkers()]
    assert given == [[], [], pause, [], ask, [], ask, resume, [], []]


@pytest.mark.parametrize("how", ["asked", "away"])
def test_who_stands_still_is_not_ended_for_not_stopping(how: str) -> None:
    owners = tuple(Owner(node, f"{node}.1", "127.0.0.1") for node in ("n0", "n1"))
    generation = GenerationRecord(2, "replace", owners, 1, 0, "n2 was lost")
    failure = FailureRecord("workers", 1, "n1.1", (0,), "rank 1 was killed", "n1", 0)
    view = View(
        revision=9, job=JobRecord(2, 1, "f", -1), job_created=1, tracked=True, generation=generation,
        generation_revision=5, nodes={node: NodeRecord(node, f"{node}.1", "127.0.0.1", 1, 1) for node in ("n0", "n1")},
        plan=PlanRecord(2, {"kind": "copy"}, ""), store=StoreRecord("127.0.0.1", 1), failures={1: failure},
    )  # fmt: skip
    worker = lc.Worker(0, 1, pid=9, hello=True, current=2, resumed=2, holds=True)
    state = lc.AgentState("n0", "n0.1", view=replace(view, failures={}), workers={0: worker}, store_started=2)

    def after(event: msg.Event, now_s: float) -> list[type]:
        nonlocal state
        step = lc.on_event(state, event, now_s=now_s)
        state = step.state
        return [type(command) for command in step.commands if not isinstance(command, lc.WriteResumed)]

    assert after(msg.Tick(False, why="etcd is silent"), 100.0) == [lc.PauseWorkers]
    assert after(msg.ViewChanged(view), 101.0) == [lc.SendStop]
    assert after(msg.Tick(False, why="etcd is silent"), 150.0) == []
    if how == "away":
        assert after(msg.Tick(is_away=True), 200.0) == [lc.ResumeWorkers]
    else:
        assert after(msg.Tick(), 200.0) == [lc.ReadPlace]
        assert after(msg.PlaceRead(5), 200.0) == [lc.ResumeWorkers]
    assert after(msg.Tick(), 209.0) == []
    assert after(msg.Tick(), 211.0) == [lc.KillWorkers], "from then on it has its time"


def test_a_worker_that_comes_up_meanwhile_stands_still_as_well() -> None:
    sent = []
    worker = lc.Worker(0, 2)
    agent: Any = SimpleNamespace(
        _selector=SimpleNamespace(register=lambda *args: None),
        _event_log=SimpleNamespace(started=lambda *args: None),
        _event=lambda event: None,
        _state=lc.AgentState("n0", "n0.1", workers={0: worker}),
        _workers=SimpleNamespace(signal_process=lambda process, signum: sent.append(signum)),
    )
    process: Any = SimpleNamespace(pidfd=0, rank=0, pid=9, local_rank=0, generation=2)
    Agent._watch_process(agent, process)
    assert sent == []
    agent._state = replace(agent._state, paused=True)
    Agent._watch_process(agent, process)
    assert sent == [signal.SIGSTOP]


def test_a_node_that_is_given_up_at_once_stays_away_longer_and_longer() -> None:
    delay_s, waited = 0.0, []
    for _ in range(8):
        delay_s = rejoin_delay_s(delay_s, stayed_s=0.5)
        waited.append(delay_s)
    assert waited[:4] == [1.0, 2.0, 4.0, 8.0] and waited[-1] == MAX_DELAY_S
    assert rejoin_delay_s(delay_s, stayed_s=60.0) == 0.0
