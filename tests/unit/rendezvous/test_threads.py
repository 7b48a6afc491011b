"""A process that has no thread left, for a moment, goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from swift_agent.presence import Presence
from swift_rendezvous.keys import NodeRecord
from swift_rendezvous.liveness import Limits, Liveness
from swift_rendezvous.threads import has_started, only_logged, thread


def refused(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_node_short_of_threads_goes_on_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    lost: list[str] = []
    asked = threading.Event()
    tries: list[str] = []

    def short(self: threading.Thread) -> None:
        tries.append(self.name)
        refused(self)

    liveness = Liveness(
        "127.0.0.1", lambda who, *rest: lost.append(who), Limits(0.05), ask=asked.set, on_failure=told.append
    )
    here = Liveness("127.0.0.1", lambda *rest: None)
    me, peer = (NodeRecord(name, name, "127.0.0.1", one.port, 1) for name, one in (("a", liveness), ("b", here)))
    here.start(peer)
    here.update([me, peer])
    liveness.start(me)
    try:
        liveness.update([me, peer])
        until(lambda: any(one.watched for one in tuple(liveness._peers.values())))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", short)
            here._listener.close()
            for one in tuple(here._peers.values()):  # as a kernel closes them
                one.sock.shutdown(2)
            until(lambda: {"swift-liveness-dial", "swift-liveness-probe"} <= set(tries))
            count = len(tries)
            time.sleep(0.3)
            assert len(tries) - count < 100 and not lost  # it waits between two tries
        until(lambda: lost == ["b"])
        assert told == []
    finally:
        here.stop(goodbye=False)
        liveness.stop()


def test_a_thread_that_cannot_be_started_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threading.Thread, "start", refused)
    for _ in range(2):
        assert not has_started(thread("of-this-test", lambda: None, only_logged))
    assert caplog.text.count("the thread of-this-test cannot be started (can't start new thread)") == 1


def test_a_place_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    presence: Any = object.__new__(Presence)
    presence._lock = threading.Lock()
    presence._stopped = presence._reclaiming = presence._reclaim_due = presence._reading_place = False
    calls: list[str] = []
    presence._reclaim = lambda: calls.append("reclaim")
    presence._read_place = lambda: calls.append("read")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        presence.reclaim()
        presence.read_place()
        presence.tick()
    assert not calls
    presence.tick()
    presence.read_place()
    until(lambda: sorted(calls) == ["read", "reclaim"])
    presence.tick()
    assert len(calls) == 2
