"""A process that has no thread left, for a moment, goes on."""

from __future__ import annotations

import gc
import itertools
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from swift_agent.agent.presence import Presence
from swift_agent.wire.store_server import StoreServer
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.node.liveness import Liveness
from swift_rendezvous.node.suspicion import Limits
from swift_rendezvous.roster.records import NodeRecord
from swift_rendezvous.store import _etcd_child
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.private_etcd import PrivateEtcd
from swift_rendezvous.threads import NoThread, has_started, only_logged, start, thread


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


def test_a_lease_that_nothing_can_keep_is_given_back_and_another_one_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread of its keep-alive may be the one that cannot be started."""
    revoked: list[int] = []
    told: list[str] = []

    class Lease:
        def __init__(self, number: int) -> None:
            self.id = number

        def keep_alive(self, lost: Callable[[str], None]) -> Any:
            start(thread(f"keeps-{self.id}", lambda: None, told.append))
            return SimpleNamespace(stop=lambda: None)

        def revoke(self) -> None:
            revoked.append(self.id)

    numbers = itertools.count(1)
    monkeypatch.setattr("swift_agent.agent.presence.reclaim_place", lambda *args: Lease(next(numbers)))
    begin = threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda self: refused(self) if self.name in ("keeps-1", "keeps-2") else begin(self)
    )
    presence: Any = object.__new__(Presence)
    presence._lock, presence._stopped, presence._reclaiming = threading.Lock(), False, True
    presence._store = presence._keys = presence.job = presence._ttl_s = None
    presence.me, presence.coordinator = SimpleNamespace(incarnation="i"), SimpleNamespace(lease_id=0)
    presence._keep_alive = SimpleNamespace(stop=lambda: None)
    presence._listeners = SimpleNamespace(reclaimed=told.append)
    presence._reclaim()
    assert told == ["i"] and revoked == [1, 2] and presence.coordinator.lease_id == 3 and not presence._reclaiming
    assert caplog.text.count("cannot get another lease yet: the thread keeps-1 cannot be started") == 1
    assert caplog.text.count("cannot get another lease yet") == 1


@pytest.mark.parametrize("name", ["swift-liveness-accept", "swift-liveness"])
def test_who_cannot_watch_others_leaves_no_port(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    begin, before = threading.Thread.start, set(threading.enumerate())  # tests before this one may have left some
    monkeypatch.setattr(threading.Thread, "start", lambda self: refused(self) if self.name == name else begin(self))
    liveness = Liveness("127.0.0.1", lambda *rest: None)
    with pytest.raises(NoThread):
        liveness.start(NodeRecord("a", "a", "127.0.0.1", liveness.port, 1))
    liveness.stop()
    assert not any(one.name.startswith("swift-liveness") for one in set(threading.enumerate()) - before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", liveness.port), 5.0)


def test_a_store_that_has_no_thread_leaves_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []
    create = socket.create_server

    def noted(*args: Any, **options: Any) -> socket.socket:
        made = create(*args, **options)
        ports.append(made.getsockname()[1])
        return made

    monkeypatch.setattr(socket, "create_server", noted)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        StoreServer("127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]), 5.0)


def test_etcd_is_followed_again_when_there_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch ended the thread that followed the job, and so the agent; and was never looked after again."""
    with PrivateEtcd() as server, EtcdStore(server.config) as store:
        revision = store.put("/a", b"1")
        with store.watch_prefix("/", revision) as watch:
            for short in ("etcd-watchdog", ""):
                begin = threading.Thread.start
                with monkeypatch.context() as patch:
                    patch.setattr(
                        threading.Thread, "start",
                        lambda self, short=short, begin=begin: refused(self) if short in self.name else begin(self),
                    )  # fmt: skip
                    with pytest.raises(NoThread):
                        next(watch)
            assert next(watch).events[0].kv.value == b"1"
            begin_s = time.monotonic()
            gc.collect()  # the end of a channel whose thread was not started would wait for ever
            assert time.monotonic() - begin_s < 10.0
        assert any(one.name == "etcd-watchdog" for one in threading.enumerate())


def test_a_private_etcd_without_a_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(NoThread, match="the thread private-etcd cannot be started"), PrivateEtcd():
        pass


def test_a_private_etcd_whose_start_fails_oddly_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(command: list[str]) -> list[str]:
        raise ValueError("odd")

    monkeypatch.setattr(_etcd_child, "guarded", odd)
    with pytest.raises(RendezvousError, match="cannot be started: odd"), PrivateEtcd():
        pass
