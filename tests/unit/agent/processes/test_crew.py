"""The crew of a node: what becomes of a process while its node waits, and of one that does not end."""

from __future__ import annotations

import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swift_agent.agent.lifecycle.events import Event
from swift_agent.agent.lifecycle.state import AgentState, Worker
from swift_agent.agent.processes.crew import Crew


class Played:
    """A crew whose processes only note the signals that they get."""

    def __init__(self) -> None:
        self.state = AgentState("n0", "n0.1", workers={0: Worker(0, 2)})
        self.events: list[Event] = []
        self.sent: list[int] = []
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
