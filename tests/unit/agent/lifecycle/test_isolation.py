"""When workers stand still because their places may be another node's, and when they go on."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swift_agent.agent.lifecycle import commands
from swift_agent.agent.lifecycle import events as msg
from swift_agent.agent.lifecycle import machine as lc
from swift_agent.agent.lifecycle import state as state_module
from swift_agent.agent.lifecycle.isolation import MAX_DELAY_S, ending_grace_s, pausing, rejoin_delay_s
from swift_agent.agent.loop import STORE_TIMEOUT_S, Agent
from swift_agent.agent.record_writer import Write
from swift_agent.agent.store_hosting import GenerationStores
from swift_agent.agent.transactions import Transaction
from swift_rendezvous.node.job_key import JobKey
from swift_rendezvous.roster.keys import Keys
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
from tests.support.limits import without_descriptors


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


def test_a_worker_that_comes_up_meanwhile_stands_still_as_well() -> None:
    sent = []
    worker = state_module.Worker(0, 2)
    agent: Any = SimpleNamespace(
        _selector=SimpleNamespace(register=lambda *args: None),
        _event_log=SimpleNamespace(started=lambda *args: None),
        _event=lambda event: None,
        _state=state_module.AgentState("n0", "n0.1", workers={0: worker}),
        _workers=SimpleNamespace(signal_process=lambda process, signum: sent.append(signum)),
    )
    process: Any = SimpleNamespace(pidfd=0, rank=0, pid=9, local_rank=0, generation=2)
    Agent._watch_process(agent, process)
    assert sent == []
    agent._state = replace(agent._state, paused=True)
    Agent._watch_process(agent, process)
    assert sent == [signal.SIGSTOP]


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
    agent: Any = SimpleNamespace(
        _end=ResultRecord("stopped", "signal 15"), _grace_s=lambda: 30.0, _host="h", _keys=Keys("job"), _store=etcd,
        _writer=etcd, _config=SimpleNamespace(on_etcd_loss="pause"), _event_log=SimpleNamespace(ended=lambda *a: None),
        _state=state_module.AgentState("n0", "n0.1", view=view, paused=paused), _signal_workers=woken.append,
        _signals=SimpleNamespace(first=signal.SIGTERM, count=1),
        _presence=SimpleNamespace(me=me, acts_until_s=lambda: time.monotonic() + 4.0, leave=lambda: None),
        _workers=SimpleNamespace(
            vouch=lambda until_s: None, processes={}, end_all=lambda grace_s, in_hurry: graces.append(grace_s)
        ),
    )  # fmt: skip
    agent._publish_stop = lambda result: Agent._publish_stop(agent, result)
    Agent._leave(agent)
    assert graces == [pytest.approx(lives_s, abs=0.5)] and woken == ([signal.SIGCONT] if lives_s else [])


def test_evidence_that_has_aged_while_workers_were_started_is_not_written() -> None:
    """The command to write it was given before that; it counts from when it was seen, not from then."""
    writes: list[Write] = []
    agent: Any = SimpleNamespace(
        _state=state_module.AgentState("n0", "n0.1", view=View(job=JobRecord(2, 2, "c"))),
        _event_s=5.0, _keys=Keys("job"),
        _writer=SimpleNamespace(submit=writes.append), _post=lambda action: None, _doubt=lambda peer: None,
    )  # fmt: skip
    transaction = Transaction("failure", [], [], "n1.1")
    Agent._write(agent, transaction)
    assert writes == []
    agent._state = replace(agent._state, lost_peers={"n1.1": state_module.Suspicion("silent", False, 5.0)})
    Agent._write(agent, transaction)
    assert [write.what for write in writes] == ["failure"] and writes[0].wanted()


def test_a_host_without_descriptors_tries_on_and_then_leaves_the_stores_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[object] = []
    rejoined: list[str] = []
    stores = GenerationStores("127.0.0.1", JobKey.of_one_node())
    agent: Any = SimpleNamespace(
        _stores=stores, _no_store=None, _rejoin=rejoined.append, _write=written.append, _keys=Keys("job"),
        _state=state_module.AgentState("n0", "n0.1"),
        _presence=SimpleNamespace(me=NodeRecord("n0", "n0.1", "127.0.0.1", 1, 1, "command")),
    )  # fmt: skip
    agent._on_no_store = lambda generation, error: Agent._on_no_store(agent, generation, error)
    try:
        with without_descriptors():
            Agent._host_store(agent, 1)
            Agent._host_store(agent, 1)
        assert agent._no_store[0] == 1 and not written and not rejoined
        Agent._host_store(agent, 1)
        assert len(written) == 1 and agent._no_store is None
        with without_descriptors():
            Agent._host_store(agent, 2)
            agent._no_store = (2, agent._no_store[1] - STORE_TIMEOUT_S - 1.0)
            Agent._host_store(agent, 2)
        assert len(rejoined) == 1 and "the stores of generation 2 cannot be started" in rejoined[0]
    finally:
        stores.close()


def test_a_node_that_is_given_up_at_once_stays_away_longer_and_longer() -> None:
    delay_s, waited = 0.0, []
    for _ in range(8):
        delay_s = rejoin_delay_s(delay_s, stayed_s=0.5)
        waited.append(delay_s)
    assert waited[:4] == [1.0, 2.0, 4.0, 8.0] and waited[-1] == MAX_DELAY_S
    assert rejoin_delay_s(delay_s, stayed_s=60.0) == 0.0
