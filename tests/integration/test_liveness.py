"""Agent-to-agent liveness with real sockets and processes: what is a loss, how soon it is seen, and what is none."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from swift_rendezvous.node._handshake import TIMEOUT_S
from swift_rendezvous.node.liveness import Liveness
from swift_rendezvous.node.suspicion import Limits, ring_targets
from swift_rendezvous.roster.records import NodeRecord
from tests.support.etcd_cluster import wait_for
from tests.support.limits import without_descriptors
from tests.support.network import Network

STARVED_S = float(os.environ.get("SWIFT_TEST_STARVED_S", "15"))
PEER = Path(__file__).parents[1] / "support" / "liveness_peer.py"
ROOT = Path(__file__).parents[2]


class Process:
    """A peer in a process of its own."""

    def __init__(
        self, name: str, key: str = "secret", host: str = "127.0.0.1", prefix: tuple[str, ...] = ()
    ) -> None:
        path = os.pathsep.join([str(ROOT / "rendezvous"), *sys.path])
        self.popen = subprocess.Popen([*prefix, sys.executable, str(PEER), name, key, host], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
        assert self.popen.stdin is not None and self.popen.stdout is not None
        self.port = int(json.loads(self.popen.stdout.readline())["port"])
        self.record = NodeRecord(name, name, host, self.port, 1)

    def tell(self, *peers: NodeRecord) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps([[p.incarnation, p.watch_port, p.host] for p in peers]) + "\n")
        self.popen.stdin.flush()

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def leave(self) -> None:
        """End in an orderly way; returns once it has."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        assert self.popen.wait(5.0) == 0

    def close(self) -> None:
        if self.popen.poll() is None:
            self.kill()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                stream.close()


class Node:
    """A peer in this process."""

    def __init__(
        self, name: str, key: str = "secret", host: str = "127.0.0.1", ask: Callable[[], None] | None = None
    ) -> None:
        self.lost: queue.Queue[tuple[str, str, float]] = queue.Queue()
        self.dead: set[str] = set()
        """Those whose machine said so."""
        self.liveness = Liveness(host, self._on_lost, key=key.encode(), ask=ask)
        self.record = NodeRecord(name, name, host, self.liveness.port, 1)
        self.liveness.start(self.record)

    def _on_lost(self, who: str, why: str, is_dead: bool) -> None:
        if is_dead:
            self.dead.add(who)
        self.lost.put((who, why, time.monotonic()))

    def connected(self) -> set[str]:
        return {peer.incarnation for peer in list(self.liveness._peers.values())}

    def wait_connections(self, num: int, names: set[str], what: str) -> None:
        wait_for(lambda: len(self.liveness._peers) == num and self.connected() == names, 5.0, what)

    def next_lost(self, timeout_s: float = 5.0) -> tuple[str, str, float]:
        return self.lost.get(timeout=timeout_s)

    def close(self) -> None:
        self.liveness.stop()  # for a second time, perhaps


@pytest.fixture
def start() -> Iterator[Callable[..., Node | Process]]:
    made: list[Node | Process] = []

    def make(kind: type[Node] | type[Process], name: str, key: str = "secret", **where: Any) -> Node | Process:
        made.append(kind(name, key, **where))
        return made[-1]

    yield make
    for peer in reversed(made):
        peer.close()


def test_the_ring() -> None:
    assert ring_targets("a", ["a", "b", "c", "d"]) == ["b", "c"]
    assert ring_targets("d", ["a", "b", "c", "d"]) == ["a", "b"]
    assert ring_targets("b", ["a"]) == ["a"] and ring_targets("a", ["a"]) == [] and ring_targets("a", []) == []
    # Whoever dies is watched by two.
    names = [f"n{i}" for i in range(7)]
    watchers = [target for name in names for target in ring_targets(name, names)]
    assert all(watchers.count(name) == 2 for name in names)


def test_a_killed_peer_is_seen_within_a_second(start: Callable[..., Node | Process]) -> None:
    me, peer, other = start(Node, "a"), start(Process, "b"), start(Process, "c")
    assert isinstance(me, Node)
    me.liveness.update([me.record, peer.record, other.record])
    wait_for(lambda: me.connected() == {"b", "c"}, 5.0, "connections")
    killed_s = time.monotonic()
    peer.kill()  # type: ignore[union-attr]
    who, why, seen_s = me.next_lost()
    assert who == "b" and seen_s - killed_s < 1.0 and "refused" in why
    assert me.dead == {"b"}  # its machine says so
    assert me.lost.empty() and me.connected() == {"c"}


def test_both_ends_see_a_death_whoever_dialled(start: Callable[..., Node | Process]) -> None:
    me, peer = start(Node, "a"), start(Process, "b")
    assert isinstance(me, Node) and isinstance(peer, Process)
    peer.tell(me.record)  # it dials; this side only knows it
    wait_for(lambda: "b" in me.connected(), 5.0, "its connection")
    with me.liveness._lock:
        me.liveness._suspicion.known = {"b": peer.record}  # not update(): this side shall not dial
    peer.kill()
    assert me.next_lost()[0] == "b"


def test_a_kernel_that_is_still_closing_is_no_life(start: Callable[..., Node | Process]) -> None:
    """It closes the listener of a dead process last: a probe may come just before."""
    me = start(Node, "a")
    assert isinstance(me, Node)
    listener = socket.create_server(("127.0.0.1", 0))
    record = NodeRecord("b", "b", "127.0.0.1", listener.getsockname()[1], 1)
    with ThreadPoolExecutor(1) as pool:
        # Nobody accepts, but it is kept: a process that is starved.
        assert me.liveness._answer_of(record) == (None, False)
        listener.accept()[0].close()
        answer = pool.submit(me.liveness._answer_of, record)
        assert select.select([listener], [], [], 5.0)[0]  # it is connected
        listener.close()
        # Reset in the middle of connect(), or after it and then refused.
        assert answer.result(5.0) in (("Connection refused", True), ("Connection reset by peer", False))


def test_goodbye_is_no_loss(start: Callable[..., Node | Process]) -> None:
    me, leaver, victim = start(Node, "a"), start(Process, "b"), start(Process, "c")
    assert isinstance(me, Node) and isinstance(leaver, Process) and isinstance(victim, Process)
    me.liveness.update([me.record, leaver.record, victim.record])
    wait_for(lambda: me.connected() == {"b", "c"}, 5.0, "connections")
    leaver.leave()
    wait_for(lambda: me.connected() == {"c"}, 5.0, "the goodbye")
    # Its record is still there, as it is for a moment in a job: to dial it again and find nobody is no loss, either.
    me.liveness.update([me.record, leaver.record, victim.record])
    victim.kill()
    assert me.next_lost()[0] == "c"
    assert me.lost.empty()


def test_a_record_that_was_lost_for_a_moment_is_no_goodbye(start: Callable[..., Node | Process]) -> None:
    """Etcd was away and all leases were over: the nodes vanish from each other's view, and come back as they were."""
    me, peer = start(Node, "a"), start(Process, "b")
    assert isinstance(me, Node) and isinstance(peer, Process)
    me.liveness.update([me.record, peer.record])
    peer.tell(me.record, peer.record)
    me.wait_connections(2, {"b"}, "one connection each way")
    peer.tell(peer.record)
    me.wait_connections(1, {"b"}, "the end of the one that it had made")
    peer.tell(me.record, peer.record)
    me.wait_connections(2, {"b"}, "both connections again")
    peer.kill()
    assert me.next_lost()[0] == "b"


def test_a_node_that_was_never_there_is_lost(
    start: Callable[..., Node | Process], free_port: Callable[[], int]
) -> None:
    me = start(Node, "a")
    assert isinstance(me, Node)
    me.liveness.update([me.record, NodeRecord("b", "b", "127.0.0.1", free_port(), 1)])
    assert me.next_lost()[0] == "b"


def test_two_that_dial_at_once_both_connect(start: Callable[..., Node | Process]) -> None:
    for round_ in range(5):
        nodes = [start(Node, f"{name}{round_}") for name in "abc"]
        records = [node.record for node in nodes]
        began_s = time.monotonic()
        for node in nodes:
            node.liveness.update(records)  # type: ignore[union-attr]
        for node in nodes:
            others = {r.incarnation for r in records} - {node.record.incarnation}
            assert isinstance(node, Node)
            node.wait_connections(4, others, "all connections")
        assert time.monotonic() - began_s < 1.5  # less than the time-out of a handshake
        assert all(node.lost.empty() for node in nodes)  # type: ignore[union-attr]


def _hello(sender: str, target: NodeRecord, key: str, greeting: bytes) -> bytes:
    nonce = "0" * 32
    said = ["hello", sender, target.incarnation, nonce, json.loads(greeting)["nonce"]]
    mac = hmac.new(key.encode(), json.dumps(said).encode(), hashlib.sha256).hexdigest()
    return json.dumps({"from": sender, "to": target.incarnation, "nonce": nonce, "mac": mac}).encode() + b"\n"


def _dial(target: NodeRecord, data: Callable[[bytes], bytes]) -> tuple[socket.socket, bytes]:
    """Connect, say *data* of what is said first, and return the answer to it."""
    sock = socket.create_connection(("127.0.0.1", target.watch_port), timeout=5.0)
    sock.sendall(data(sock.recv(4096)))
    return sock, sock.recv(4096)


def _dial_as(sender: str, target: NodeRecord, key: str) -> tuple[socket.socket, bytes]:
    return _dial(target, lambda greeting: _hello(sender, target, key, greeting))


@pytest.mark.parametrize("data", [
    pytest.param(None, id="wrong key"), pytest.param(b"GET / HTTP/1.1\r\n", id="another protocol"),
    pytest.param(b"[1]\n", id="no object"), pytest.param(b"[" * 3000 + b"\n", id="nested"),
    pytest.param("{\"from\": \"x\", \"nonce\": \"1\", \"mac\": \"\u00fc\"}\n".encode(), id="not ASCII"),
    pytest.param(b"\xff" * 4096, id="too long"),
])  # fmt: skip
def test_a_stranger_is_refused_and_does_no_harm(start: Callable[..., Node | Process], data: bytes | None) -> None:
    me = start(Node, "a")
    assert isinstance(me, Node)
    sock, answer = _dial_as("b", me.record, "guess") if data is None else _dial(me.record, lambda _: data)
    assert answer == b"" and me.connected() == set()
    sock.close()
    sock, answer = _dial_as("b", me.record, "secret")
    assert len(json.loads(answer.partition(b"\n")[0])["mac"]) == 64  # it still answers those who know
    wait_for(lambda: me.connected() == {"b"}, 5.0, "the connection")
    sock.close()


def test_strangers_who_say_nothing_keep_nobody_out(start: Callable[..., Node | Process]) -> None:
    me, peer = start(Node, "a"), start(Process, "b")
    assert isinstance(me, Node) and isinstance(peer, Process)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(socket.create_connection(("127.0.0.1", me.record.watch_port)))
        began_s = time.monotonic()
        peer.tell(me.record)
        wait_for(lambda: me.connected() == {"b"}, 5.0, "its connection")
        assert time.monotonic() - began_s < TIMEOUT_S  # each stranger has that long to prove itself


RENEWED = """
import selectors, socket, sys
selector = selectors.DefaultSelector()
def connect():
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(("127.0.0.1", int(sys.argv[1])))
    selector.register(sock, selectors.EVENT_READ)
for _ in range(int(sys.argv[2])):
    connect()
print("all", flush=True)
while True:
    for key, _ in selector.select(1.0):
        try:
            if key.fileobj.recv(4096):
                continue  # the greeting
        except OSError:
            pass
        selector.unregister(key.fileobj)
        key.fileobj.close()
        connect()
"""


def test_strangers_who_come_again_and_again_make_nobody_look_lost(start: Callable[..., Node | Process]) -> None:
    """More than are received at once, and a new one for each that is sent away."""
    me, new_node = start(Process, "a"), start(Node, "b")
    assert isinstance(me, Process) and isinstance(new_node, Node)
    me.tell(me.record)
    command = [sys.executable, "-c", RENEWED, str(me.port), "400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as strangers:
        try:
            assert strangers.stdout is not None and strangers.stdout.readline()
            new_node.liveness.update([me.record, new_node.record])
            wait_for(lambda: new_node.connected() == {"a"}, 10.0, "the connection among 400 strangers")
            with pytest.raises(queue.Empty):
                new_node.next_lost(1.0)
        finally:
            strangers.kill()
    me.kill()
    assert new_node.next_lost()[0] == "a"


def test_a_queue_that_is_full_is_no_death(start: Callable[..., Node | Process]) -> None:
    """Nobody accepts, and the kernel drops what comes: as silent as a machine that is gone, but it is not."""
    me = start(Node, "a")
    assert isinstance(me, Node)
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))

        def is_full() -> bool:
            try:
                stack.enter_context(socket.create_connection(full.getsockname(), timeout=0.5))
            except TimeoutError:
                return True
            return False

        wait_for(is_full, 10.0, "a full queue")
        me.liveness.update([me.record, NodeRecord("b", "b", "127.0.0.1", full.getsockname()[1], 1)])
        with pytest.raises(queue.Empty):
            me.next_lost(TIMEOUT_S + 1.5)
    # Its process ends: the port is refused now.
    assert me.next_lost()[0] == "b"


def test_no_descriptors_for_a_moment_keep_nobody_out_for_ever(
    start: Callable[..., Node | Process], caplog: pytest.LogCaptureFixture
) -> None:
    me, peer = start(Node, "a"), start(Process, "b")
    assert isinstance(me, Node) and isinstance(peer, Process)
    with socket.socket() as stranger:
        with without_descriptors():
            stranger.connect(("127.0.0.1", me.record.watch_port))
            wait_for(lambda: "cannot be accepted" in caplog.text, 5.0, "the line")
            # Nor is anybody called lost whom this process has no descriptor to ask.
            assert me.liveness._answer_of(peer.record) == (None, False)
        peer.tell(me.record, peer.record)
        wait_for(lambda: me.connected() == {"b"}, 5.0, "the connection")
    assert caplog.text.count("cannot be accepted") == 1 and me.lost.empty()


def test_a_thread_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that ended without a word would leave nobody to watch the others."""
    told: queue.Queue[str] = queue.Queue()
    liveness = Liveness("127.0.0.1", lambda *lost: None, on_failure=told.put)
    record = NodeRecord("a", "a", "127.0.0.1", liveness.port, 1)
    liveness.start(record)

    def refuse(*args: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("swift_rendezvous.node.liveness.thread", refuse)
    liveness.update([record, NodeRecord("b", "b", "127.0.0.1", 9, 1)])
    assert "swift-liveness has ended by RuntimeError: can't start new thread" in told.get(timeout=5.0)
    liveness.stop()


def test_what_was_recorded_is_of_no_use_again(start: Callable[..., Node | Process]) -> None:
    me = start(Node, "a")
    assert isinstance(me, Node)
    recorded: list[bytes] = []

    def record(greeting: bytes) -> bytes:
        recorded.append(_hello("b", me.record, "secret", greeting))
        return recorded[0]

    sock, answer = _dial(me.record, record)
    assert answer
    wait_for(lambda: me.connected() == {"b"}, 5.0, "the connection")  # it counts after the answer only
    sock.close()
    wait_for(lambda: me.connected() == set(), 5.0, "the end of the connection")
    sock, answer = _dial(me.record, lambda _: recorded[0])
    assert answer == b"" and me.connected() == set()
    sock.close()


def test_a_wrong_key_is_no_loss_and_no_connection(start: Callable[..., Node | Process]) -> None:
    me, peer, victim = start(Node, "a"), start(Process, "b", "its own"), start(Process, "c")
    assert isinstance(me, Node) and isinstance(victim, Process)
    me.liveness.update([me.record, peer.record, victim.record])
    wait_for(lambda: "c" in me.connected(), 5.0, "the other connection")
    victim.kill()
    assert me.next_lost()[0] == "c"
    assert "b" not in me.connected() and me.lost.empty()


def test_an_impostor_that_answers_garbage_is_not_trusted_and_does_no_harm(start: Callable[..., Node | Process]) -> None:
    me, victim = start(Node, "a"), start(Process, "c")
    assert isinstance(me, Node) and isinstance(victim, Process)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        impostor.settimeout(5.0)
        record = NodeRecord("b", "b", "127.0.0.1", impostor.getsockname()[1], 1)
        me.liveness.update([me.record, record, victim.record])
        for _ in range(2):  # the dial and the probe after it
            conn, _ = impostor.accept()
            with conn:
                conn.sendall("\u00fc\u00fc\n".encode())
        wait_for(lambda: "c" in me.connected(), 5.0, "the other connection")
        victim.kill()
        assert me.next_lost()[0] == "c" and "b" not in me.connected()


def test_a_reset_connection_with_a_living_listener_is_no_loss(start: Callable[..., Node | Process]) -> None:
    """Somebody between the two resets the connection; then the peer is even frozen: its kernel still answers."""
    me, peer = start(Node, "a"), start(Process, "b")
    assert isinstance(me, Node) and isinstance(peer, Process)
    me.liveness.update([me.record, peer.record])
    wait_for(lambda: me.connected() == {"b"}, 5.0, "the connection")
    for frozen in (False, True):
        if frozen:
            peer.popen.send_signal(signal.SIGSTOP)
        num_before = len(me.liveness._peers)
        sock, answer = _dial_as("b", me.record, "secret")
        assert answer
        me.wait_connections(num_before + 1, {"b"}, "the second connection")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()  # a reset
        me.wait_connections(num_before, {"b"}, "the reset")
    peer.popen.send_signal(signal.SIGCONT)
    peer.kill()
    # The real death is the first and only thing that is reported.
    assert me.next_lost()[0] == "b"
    assert me.lost.empty()


def test_a_loss_is_reported_once(start: Callable[..., Node | Process]) -> None:
    me, peer, victim = start(Node, "a"), start(Process, "b"), start(Process, "c")
    assert isinstance(me, Node) and isinstance(peer, Process) and isinstance(victim, Process)
    peer.tell(me.record)
    me.liveness.update([me.record, peer.record, victim.record])
    wait_for(lambda: len(me.liveness._peers) == 3, 5.0, "a connection in each direction, and one more")
    peer.kill()
    assert me.next_lost()[0] == "b"
    me.liveness.update([me.record, peer.record, victim.record])
    victim.kill()
    assert me.next_lost()[0] == "c" and me.lost.empty()


def test_stop_ends_threads_and_sockets(start: Callable[..., Node | Process]) -> None:
    me, other = start(Node, "a"), start(Node, "b")
    assert isinstance(me, Node) and isinstance(other, Node)
    me.liveness.update([me.record, other.record])
    wait_for(lambda: other.connected() == {"a"}, 5.0, "the connection")
    me.liveness.stop()
    assert not me.liveness._thread.is_alive() and not me.liveness._acceptor.is_alive()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", me.record.watch_port), timeout=1.0)
    wait_for(lambda: other.connected() == set(), 5.0, "the goodbye")
    assert other.lost.empty()
    me.liveness.update([me.record])  # late, and without effect


def test_stop_at_any_moment(start: Callable[..., Node | Process]) -> None:
    """Stopped while connections come in, and one that was never started."""
    for round_ in range(15):
        me, other = start(Node, f"a{round_}"), start(Node, f"b{round_}")
        assert isinstance(me, Node) and isinstance(other, Node)
        for node in (me, other):
            node.liveness.update([me.record, other.record])
        me.liveness.stop()
        other.liveness.stop()
        assert not me.liveness._thread.is_alive()
    never = Liveness("127.0.0.1", lambda *lost: None)
    never.stop()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", never.port), timeout=1.0)


# ---- machines that are cut off ----


def connected_in(network: Network, start: Callable[..., Node | Process]) -> tuple[Node, dict[str, Process]]:
    """A node outside, which watches one in each of two hosts of the network."""
    me = start(Node, "a", host=network.address)
    peers = {name: start(Process, name, host=host.address, prefix=host.prefix)
             for name, host in zip("bc", network.hosts, strict=True)}  # fmt: skip
    records = [me.record, *(peer.record for peer in peers.values())]
    assert isinstance(me, Node)
    for peer in peers.values():
        assert isinstance(peer, Process)
        peer.tell(*records)
    me.liveness.update(records)
    wait_for(lambda: len(me.liveness._peers) == 4, 10.0, "all connections")
    return me, peers  # type: ignore[return-value]


@pytest.mark.parametrize("way", ["link down", "it cannot send", "it cannot receive"])
def test_a_machine_that_is_cut_off_is_lost_before_its_lease_is(
    way: str, make_network: Callable[[int], Network], start: Callable[..., Node | Process]
) -> None:
    network = make_network(2)
    me, _ = connected_in(network, start)
    cut_s = time.monotonic()
    match way:
        case "link down":
            network.hosts[0].cut()
        case "it cannot send":
            network.hosts[0].deafen(network.address, from_inside=True)
        case "it cannot receive":
            network.hosts[0].deafen(network.address, from_inside=False)
    who, why, seen_s = me.next_lost()
    assert who == "b" and "silent" in why
    assert not me.dead  # it may live, for all that is known
    least_s, most_s = Limits().detection_s
    # The limits are those of an idle machine; the least one holds on any.
    assert least_s - 0.05 < seen_s - cut_s < most_s + 2.0
    assert me.lost.empty() and "c" in me.connected()


def test_a_short_cut_is_no_loss(make_network: Callable[[int], Network], start: Callable[..., Node | Process]) -> None:
    network = make_network(2)
    me, _ = connected_in(network, start)
    for from_inside in (True, False, True):
        network.hosts[0].deafen(network.address, from_inside=from_inside)
        time.sleep(0.2)
        network.hosts[0].undeafen(network.address, from_inside=from_inside)
        time.sleep(1.0)
    assert me.lost.empty()
    network.hosts[0].cut()
    assert me.next_lost()[0] == "b"


def test_who_is_cut_off_finds_nobody_lost(
    make_network: Callable[[int], Network], start: Callable[..., Node | Process]
) -> None:
    """Its own cable is out, so that all are silent: what it thinks of them meanwhile must not outlive the cut."""
    network = make_network(3)

    def ask() -> None:
        """Somebody who is no peer, at the other end of the same cable."""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((network.hosts[2].address, 9), timeout=0.2)

    me = start(Node, "a", host=network.address, ask=ask)
    peers = {name: start(Process, name, host=host.address, prefix=host.prefix)
             for name, host in zip("bc", network.hosts[:2], strict=True)}  # fmt: skip
    assert isinstance(me, Node)
    records = [me.record, *(peer.record for peer in peers.values())]
    for peer in peers.values():
        peer.tell(*records)  # type: ignore[union-attr]
    me.liveness.update(records)
    wait_for(lambda: len(me.liveness._peers) == 4, 10.0, "all connections")
    for cut_s in (0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.9):
        network.cut()
        time.sleep(cut_s)
        network.heal()
        time.sleep(1.5)
        assert me.lost.empty(), (cut_s, me.lost.get())
    # One of them is gone, while the other is heard; then that one too, of which only the third can tell.
    for name, host in zip("bc", network.hosts, strict=False):
        began_s = time.monotonic()
        host.cut()
        who, why, seen_s = me.next_lost()
        assert who == name and "silent" in why
        least_s, most_s = Limits().detection_s
        assert least_s - 0.05 < seen_s - began_s < most_s + 2.0


def test_a_loss_that_is_over_can_be_looked_at_again(
    make_network: Callable[[int], Network], start: Callable[..., Node | Process]
) -> None:
    network = make_network(2)
    me, _ = connected_in(network, start)
    network.hosts[0].cut()
    assert me.next_lost()[0] == "b"
    network.hosts[0].heal()
    me.liveness.reconsider("b")
    wait_for(lambda: "b" in me.connected(), 10.0, "a new connection")
    assert me.lost.empty()
    network.hosts[0].cut()
    assert me.next_lost()[0] == "b"


@pytest.mark.timeout(120)
def test_starved_processors_are_no_loss(start: Callable[..., Node | Process]) -> None:
    """Every core is busy several times over, and one peer even stands still."""
    me, busy, frozen = start(Node, "a"), start(Process, "b"), start(Process, "c")
    assert isinstance(me, Node) and isinstance(busy, Process) and isinstance(frozen, Process)
    records = [me.record, busy.record, frozen.record]
    for peer in (busy, frozen):
        peer.tell(*records)
    me.liveness.update(records)
    wait_for(lambda: len(me.liveness._peers) == 4, 10.0, "all connections")
    spin = "while True: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(4 * (os.cpu_count() or 1))]
    frozen.popen.send_signal(signal.SIGSTOP)
    try:
        time.sleep(STARVED_S)
        assert me.lost.empty()
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
        frozen.popen.send_signal(signal.SIGCONT)
    busy.kill()
    assert me.next_lost()[0] == "b"
