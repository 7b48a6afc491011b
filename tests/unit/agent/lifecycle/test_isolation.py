"""When workers stand still because their places may be another node's, and when they go on."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swift_agent.agent.executor import Executor
from swift_agent.agent.lifecycle import commands
from swift_agent.agent.lifecycle import events as msg
from swift_agent.agent.lifecycle import machine as lc
from swift_agent.agent.lifecycle import state as state_module
from swift_agent.agent.lifecycle.isolation import MAX_DELAY_S, ending_grace_s, pausing, rejoin_delay_s
from swift_agent.agent.loop import Agent
from swift_agent.agent.record_writer import Write
from swift_rendezvous.roster.records import (
    FailureRecord,
    GenerationRecord,
    JobRecord,
    NodeRecord,
    Owner,
    PlanRecord,
    ResultRecord,
    StoreRecord,
)
from swift_rendezvous.roster.view import View


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
    state = state_module.AgentState("n0", "n0.1", view=View(revision=7, generation_revision=7))
    given = []
    for event in (
        msg.Tick(), msg.PlaceRead(7), msg.Tick(False, why="etcd is silent"), msg.Tick(False, why="etcd is silent"),
        msg.Tick(), msg.PlaceRead(8), msg.Tick(), msg.PlaceRead(7), msg.PlaceRead(7), msg.Tick(),
    ):  # fmt: skip
        step = lc.on_event(state, event, now_s=1.0)
        state = step.state
        given.append(
            [
                c
                for c in step.commands
                if isinstance(c, (commands.PauseWorkers, commands.ResumeWorkers, commands.ReadPlace))
            ]
        )
    pause, ask, resume = [commands.PauseWorkers("etcd is silent")], [commands.ReadPlace()], [commands.ResumeWorkers()]
    assert given == [[], [], pause, [], ask, [], ask, resume, [], []]


@pytest.mark.parametrize("begun", [True, False])
def test_a_spare_that_etcd_answers_again_takes_places_as_before(begun: bool) -> None:
    """It has none that another could have got meanwhile."""
    owners = tuple(Owner(node, f"{node}.1", "127.0.0.1") for node in ("n0", "n1"))
    view = View(
        revision=9, job=JobRecord(2, 1, "f", -1), job_created=1,
        generation=GenerationRecord(1, "start", owners, 0, 0, "") if begun else None,
        generation_revision=5 if begun else 0,
        nodes={node: NodeRecord(node, f"{node}.1", "127.0.0.1", 1, 1) for node in ("n0", "n1", "n2")},
    )  # fmt: skip
    state = state_module.AgentState("n2", "n2.1", view=view)
    given = []
    for event in (msg.Tick(False, why="etcd is silent"), msg.Tick(), msg.PlaceRead(view.generation_revision)):
        step = lc.on_event(state, event, now_s=1.0)
        state = step.state
        given += step.commands
    assert given == [commands.PauseWorkers("etcd is silent"), commands.ReadPlace(), commands.ResumeWorkers()]
    assert not state.paused and lc.on_event(state, msg.Tick(), now_s=2.0).commands == ()


def test_who_was_given_up_does_not_go_on() -> None:
    """Its workers are ended, once it knows; they do not move before."""
    owners = (Owner("n1", "n1.1", "127.0.0.1"),)
    view = View(revision=9, generation=GenerationRecord(2, "replace", owners, 0, 0, ""), generation_revision=5)
    state = state_module.AgentState("n0", "n0.1", view=view, workers={0: state_module.Worker(0, 1)}, paused=True)
    step = lc.on_event(state, msg.PlaceRead(5), now_s=1.0)
    assert step.state.paused and commands.ResumeWorkers() not in step.commands


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
    worker = state_module.Worker(0, 1, pid=9, hello=True, current=2, resumed=2, holds=True)
    state = state_module.AgentState("n0", "n0.1", view=replace(view, failures={}), workers={0: worker}, store_started=2)

    def after(event: msg.Event, now_s: float) -> list[type]:
        nonlocal state
        step = lc.on_event(state, event, now_s=now_s)
        state = step.state
        return [type(command) for command in step.commands if not isinstance(command, commands.WriteResumed)]

    assert after(msg.Tick(False, why="etcd is silent"), 100.0) == [commands.PauseWorkers]
    assert after(msg.ViewChanged(view), 101.0) == [commands.SendStop]
    assert after(msg.Tick(False, why="etcd is silent"), 150.0) == []
    if how == "away":
        assert after(msg.Tick(is_away=True), 200.0) == [commands.ResumeWorkers]
    else:
        assert after(msg.Tick(), 200.0) == [commands.ReadPlace]
        assert after(msg.PlaceRead(5), 200.0) == [commands.ResumeWorkers]
    assert after(msg.Tick(), 209.0) == []
    assert after(msg.Tick(), 211.0) == [commands.KillWorkers], "from then on it has its time"


@pytest.mark.parametrize(
    ("paused", "is_told", "left_s", "expected"),
    [
        (False, True, -5.0, 30.0), (True, True, -5.0, 30.0), (False, False, 4.0, 4.0), (False, False, math.inf, 30.0),
        (False, False, -1.0, 0.0), (True, False, 4.0, 0.0),
    ],
)  # fmt: skip
def test_how_long_workers_may_take_to_end(paused: bool, is_told: bool, left_s: float, expected: float) -> None:
    assert ending_grace_s(30.0, paused=paused, is_told=is_told, left_s=left_s) == expected


class Etcd:
    """As the store and the writer of an agent that ends. *holds*: the answer to its last write, None: none comes."""

    def __init__(self, holds: bool | None, result: bytes | None = None) -> None:
        self._holds, self._result = holds, result

    def submit(self, write: Write) -> None:
        if self._holds is not None:
            write.answered(self._holds)

    def flush(self, timeout_s: float) -> bool:
        return self._holds is not None

    def get(self, key: str) -> bytes | None:
        return self._result


@pytest.mark.parametrize(
    ("etcd", "paused", "lives_s"),
    [
        (Etcd(None), True, 0.0), (Etcd(None), False, 4.0), (Etcd(True), True, 30.0), (Etcd(False, b"{}"), False, 30.0),
        (Etcd(False), False, 4.0), (Etcd(False), True, 0.0),
    ],
)  # fmt: skip
def test_who_is_asked_to_end_wakes_no_worker_whose_place_may_be_anothers(
    etcd: Etcd, paused: bool, lives_s: float
) -> None:
    """SIGTERM to an agent that is cut off: its scripts' handlers would write over what their successors have."""
    woken: list[int] = []
    graces: list[float] = []
    me = NodeRecord("n0", "n0.1", "127.0.0.1", 1, 1, "command")
    owner = Owner("n0", "n0.1", "127.0.0.1")
    view = View(job=JobRecord(1, 1, "c"), generation=GenerationRecord(1, "start", (owner,), 1, 0, "why"))
    state = state_module.AgentState("n0", "n0.1", view=view, paused=paused)
    presence: Any = SimpleNamespace(me=me, acts_until_s=lambda: time.monotonic() + 4.0, leave=lambda: None)
    config: Any = SimpleNamespace(on_etcd_loss="pause", job_id="job")
    crew: Any = SimpleNamespace(
        grace_s=30.0, vouch=lambda until_s: None, signal=woken.append,
        dismiss=lambda end, grace_s, in_hurry: graces.append(grace_s),
    )  # fmt: skip
    parts: dict[str, Any] = {
        "store": etcd, "writer": etcd, "directories": SimpleNamespace(socket="", messages=""), "channels": None,
        "stores": None,
    }  # fmt: skip
    executor = Executor(
        config, crew=crew, **parts, state=lambda: state, presence=lambda: presence, doubt=lambda peer: None, timers=""
    )
    agent: Any = SimpleNamespace(
        _config=config, _state=state, _presence=presence, _crew=crew, _executor=executor,
        _signals=SimpleNamespace(is_ending=True, is_in_hurry=False),
    )  # fmt: skip
    Agent._leave(agent, ResultRecord("stopped", "signal 15"))
    assert graces == [pytest.approx(lives_s, abs=0.5)] and woken == ([signal.SIGCONT] if lives_s else [])


def test_a_node_that_is_given_up_at_once_stays_away_longer_and_longer() -> None:
    delay_s, waited = 0.0, []
    for _ in range(8):
        delay_s = rejoin_delay_s(delay_s, stayed_s=0.5)
        waited.append(delay_s)
    assert waited[:4] == [1.0, 2.0, 4.0, 8.0] and waited[-1] == MAX_DELAY_S
    assert rejoin_delay_s(delay_s, stayed_s=60.0) == 0.0
