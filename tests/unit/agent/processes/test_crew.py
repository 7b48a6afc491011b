"""The crew of a node: what becomes of a process while its node waits, and of one that does not end."""

from __future__ import annotations

import logging
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swift_agent.agent.lifecycle.events import Event, HelperExited, HelperStarted
from swift_agent.agent.lifecycle.state import AgentState, HelperProcess, Worker
from swift_agent.agent.processes.crew import Crew
from swift_agent.agent.processes.late_starts import NotStarted, no_room
from swift_agent.wire.environment import helper_number
from swift_rendezvous.roster.records import ResultRecord, WorkerExit


class Played:
    """A crew whose processes only note the signals that they get."""

    def __init__(self) -> None:
        self.state = AgentState("n0", "n0.1", workers={0: Worker(0, 2)})
        self.events: list[Event] = []
        self.sent: list[Any] = []
        self.process: Any = SimpleNamespace(pidfd=0, rank=0, pid=9, local_rank=0, generation=2, exit_code=None)
        config: Any = SimpleNamespace(launch=SimpleNamespace(shutdown_timeout=30))
        workers: Any = SimpleNamespace(
            processes={0: self.process}, signal_process=lambda process, signum: self.sent.append(signum)
        )
        selector: Any = SimpleNamespace(register=lambda *args: None)
        event_log: Any = SimpleNamespace(started=lambda *args: None, waits=lambda: None)
        self.crew = Crew(
            config, workers, selector, event_log, lambda: self.state, self.events.append, lambda local_rank: None
        )


def test_a_worker_that_comes_up_while_others_are_paused_stands_still_as_well() -> None:
    played = Played()
    played.crew._watch(played.process)
    assert played.sent == []
    played.state = replace(played.state, paused=True)
    played.crew._watch(played.process)
    assert played.sent == [signal.SIGSTOP]


def test_a_worker_that_is_paused_has_its_time_to_end_when_it_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played()
    monkeypatch.setattr("swift_agent.agent.processes.crew.time", SimpleNamespace(monotonic=lambda: 80.0))
    played.crew.end(0, graceful=True)
    assert played.sent == [signal.SIGTERM]
    played.state = replace(played.state, paused=True)
    for now_s in (100.0, 200.0):
        played.crew._insist_on_ends(now_s)
    played.state = replace(played.state, paused=False)
    played.crew._insist_on_ends(229.0)
    assert played.sent == [signal.SIGTERM]
    played.crew._insist_on_ends(230.0)
    assert played.sent == [signal.SIGTERM, signal.SIGKILL] and played.crew._insist == []


NUMBER = helper_number(1, 0)


class Helped(Played):
    """It has a helper beside its worker."""

    def __init__(self) -> None:
        super().__init__()
        self.state = replace(self.state, helpers={NUMBER: HelperProcess(3, 2)})
        self.helper: Any = SimpleNamespace(pidfd=1, rank=3, pid=77, local_rank=NUMBER, generation=2, exit_code=None)
        workers: Any = self.crew._workers
        workers.processes[NUMBER] = self.helper
        workers.signal = lambda number, signum: self.sent.append((number, signum))
        workers.forget = lambda process: None
        workers.host = "h"
        workers.end_all = lambda *args: None
        self.ended: list[int] = []
        events: Any = self.crew._event_log
        events.ended = lambda succeeded, ended: self.ended.extend(one.local_rank for one in ended)
        selector: Any = self.crew._selector
        selector.unregister = lambda fd: None

    def end(self, code: int, place: str = "") -> None:
        workers: Any = self.crew._workers
        workers.collect = lambda process: WorkerExit(3, NUMBER, 77, code, "h", place=place)
        self.crew._on_exit(self.helper)


def test_a_helper_is_no_worker_to_anybody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    played = Helped()
    played.crew._watch(played.helper)
    assert played.events == [HelperStarted(NUMBER, 2, 77)] and played.sent == []
    played.state = replace(played.state, helpers={NUMBER: HelperProcess(3, 2, killed=True)})
    played.crew._watch(played.helper)
    assert played.sent == [(NUMBER, signal.SIGKILL)]
    assert caplog.messages == ["process 77 is helper 1 of rank 3"] * 2
    played.crew.dismiss(ResultRecord("succeeded", "done"), 1.0, lambda: False)
    assert played.ended == [0] and played.sent == [(NUMBER, signal.SIGKILL)] * 2


@pytest.mark.parametrize(
    ("code", "place", "killed", "said"),
    [
        (0, "", False, ["helper 1 of rank 3 (pid 77) has done its share"]),
        (1, "ValueError at t.py:3", False,
         ["helper 1 of rank 3 (pid 77) exited with code 1 (ValueError at t.py:3); the others go on without it"]),
        (-9, "", False, ["helper 1 of rank 3 (pid 77) killed by signal 9 (SIGKILL); the others go on without it"]),
        (-9, "", True, []),
    ],
)  # fmt: skip
def test_the_end_of_a_helper_is_told_and_forgotten(
    code: int, place: str, killed: bool, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    played = Helped()
    played.state = replace(played.state, helpers={NUMBER: HelperProcess(3, 2, killed=killed)})
    played.end(code, place)
    assert played.events == [HelperExited(NUMBER, 77)] and caplog.messages == said
    assert list(played.crew.processes) == [0]


def test_a_helper_needs_room_beside_the_workers_of_its_node(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement and the others go on without it; no worker is killed for it."""
    sizes = {9: 900 << 20, 78: 300 << 20}
    free = 1000 << 20
    monkeypatch.setattr("swift_agent.agent.processes.crew.resident_bytes", lambda pid: sizes.get(pid, 0))
    monkeypatch.setattr("swift_agent.agent.processes.crew.free_memory", lambda: free)
    played, place = Helped(), cast(Any, SimpleNamespace(generation=2, rank=lambda number: 3))
    started: list[int] = []
    workers: Any = played.crew._workers
    workers.can_fork, workers.server = True, None
    workers.start_helper = lambda place, number: started.append(number) or []
    played.crew.start_helper(place, NUMBER)
    assert started == [NUMBER] and played.events == []
    # Another one there may still grow by 600 MiB.
    other = helper_number(2, 0)
    played.state = replace(played.state, helpers={**played.state.helpers, other: HelperProcess(3, 2, pid=78)})
    played.crew.start_helper(place, NUMBER)
    assert started == [NUMBER] and played.events == [HelperExited(NUMBER, 0)]
    assert caplog.messages[-1] == (
        "helper 1 of rank 3: its node has 1000 MiB of memory left, and a worker takes 900 MiB; the others go on "
        "without it"
    )


@pytest.mark.parametrize(("free", "workers", "helpers", "fits"), [
    (10, (9, 3), (), True), (9, (9, 3), (), False), (10, (9,), (9,), True), (10, (9,), (8,), False),
    (None, (9,), (), True), (0, (), (5,), True), (0, (0,), (), True),
])  # fmt: skip
def test_room_for_a_helper(free: int | None, workers: tuple[int, ...], helpers: tuple[int, ...], fits: bool) -> None:
    assert (no_room(free, workers, helpers) == "") == fits


def test_a_helper_that_cannot_be_started_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    played = Helped()
    place: Any = SimpleNamespace(generation=2)
    played.crew._take([NotStarted(place, True, WorkerExit(3, NUMBER, 0, 127, "h", "it cannot be started: no"), True)])
    assert played.events == [HelperExited(NUMBER, 0)]
    assert caplog.messages == ["helper 1 of rank 3: it cannot be started: no; the others go on without it"]
    assert played.crew._late_starts.take_due({}) == ([], [])
