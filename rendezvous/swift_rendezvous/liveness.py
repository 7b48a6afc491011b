"""Agents watch each other's life over TCP, faster than a lease can.

Every agent keeps a connection to the next few nodes of a ring. When a process dies its kernel closes its sockets, and
both ends of a connection learn of it in milliseconds; when a machine or a link dies the kernel's own probes fail after
about three seconds. Both are answered by the kernel, so a starved process is never taken for a dead one. Before a node
is called lost its listener is probed once more: a connection that was merely reset proves nothing.

The lease in etcd stays the backstop (frozen processes). A connection is accepted only from who can read the job's
records: both sides prove that they know the other's token (HMAC, fresh nonces). Nothing received is ever executed or
unpickled.

This module must never decide what follows from a loss.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swift_rendezvous.keys import NodeRecord

log = logging.getLogger(__name__)

NUM_WATCHED = 2
PROBE_TIMEOUT_S = 0.5
_HANDSHAKE_TIMEOUT_S = 2.0
_GOODBYE = b"bye\n"
_MAX_LINE_BYTES = 4096


def ring_targets(me: str, incarnations: Iterable[str], num_watched: int = NUM_WATCHED) -> list[str]:
    """The *num_watched* successors of *me* in the ring of all incarnations. Pure."""
    ring = sorted({*incarnations, me})
    start = ring.index(me)
    return [ring[(start + step) % len(ring)] for step in range(1, min(num_watched, len(ring) - 1) + 1)]


def _mac(token: str, *parts: str) -> str:
    return hmac.new(token.encode(), "|".join(parts).encode(), hashlib.sha256).hexdigest()


def _same(proof: str, expected: str) -> bool:
    # As bytes: compare_digest refuses text that is not ASCII, and *proof* may be anything.
    return hmac.compare_digest(proof.encode(), expected.encode())


@dataclass
class _Peer:
    incarnation: str
    sock: socket.socket
    said_goodbye: bool = False


class Liveness:
    """Runs in one daemon thread. `on_lost(incarnation, evidence)` is called from it, once per lost incarnation."""

    def __init__(self, host: str, on_lost: Callable[[str, str], None]) -> None:
        self._on_lost = on_lost
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._me: NodeRecord | None = None
        self._known: dict[str, NodeRecord] = {}
        self._peers: dict[socket.socket, _Peer] = {}
        self._dialled: dict[str, socket.socket] = {}
        self._reported: set[str] = set()
        self._departed: set[str] = set()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._accepted: queue.SimpleQueue[_Peer] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._stopped = False
        self._farewell = _GOODBYE
        # Two threads, because two agents that dial each other at once must each be able to answer meanwhile.
        self._thread = threading.Thread(target=self._run, name="swift-liveness", daemon=True)
        self._acceptor = threading.Thread(target=self._accept_all, name="swift-liveness-accept", daemon=True)

    def start(self, me: NodeRecord) -> None:
        self._me = me
        self._acceptor.start()
        self._thread.start()

    def update(self, nodes: Iterable[NodeRecord]) -> None:
        """Tell which nodes are in the job now; connections follow."""
        with self._lock:
            self._known = {node.incarnation: node for node in nodes}
        if not self._stopped:
            self._wake()

    def stop(self, goodbye: bool = True) -> None:
        """Say goodbye to all peers, so that they do not take the closed connections for a death; or let them."""
        if self._stopped:
            return
        self._farewell = _GOODBYE if goodbye else b""
        self._stopped = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        if self._me is None:
            self._listener.close()
        if not self._thread.is_alive():
            os.close(self._wake_fd)  # here, so that nobody wakes through a number that is somebody else's by then

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        while not self._stopped:
            for key, _ in self._selector.select(timeout=1.0):
                if key.fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                    while not self._accepted.empty():
                        self._admit(self._accepted.get())
                elif key.fileobj in self._peers:
                    self._read(self._peers[key.fileobj])  # only sockets are left
            if not self._stopped:
                self._dial()
        for peer in list(self._peers.values()):
            with contextlib.suppress(OSError):
                peer.sock.sendall(self._farewell)
            self._drop(peer)
        self._selector.close()
        # Wakes the acceptor, whose accept() then fails.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(timeout=_HANDSHAKE_TIMEOUT_S + 1.0)
        self._listener.close()
        while not self._accepted.empty():
            peer = self._accepted.get()
            with contextlib.suppress(OSError):
                peer.sock.sendall(self._farewell)
            peer.sock.close()

    def _dial(self) -> None:
        assert self._me is not None
        with self._lock:
            known = dict(self._known)
        for incarnation in [i for i in self._dialled if i not in known]:
            self._drop_dialled(incarnation)
        for incarnation in ring_targets(self._me.incarnation, known):
            node = known[incarnation]
            if incarnation in self._dialled or incarnation in self._reported or incarnation in self._departed:
                continue
            try:
                sock = self._connect(node)
            except OSError as error:
                self._suspect(incarnation, f"cannot connect to its agent: {error.strerror or error}")
                continue
            self._dialled[incarnation] = sock
            self._admit(_Peer(incarnation, sock))

    def _connect(self, node: NodeRecord) -> socket.socket:
        assert self._me is not None
        sock = socket.create_connection((node.host, node.watch_port), timeout=_HANDSHAKE_TIMEOUT_S)
        try:
            nonce = secrets.token_hex(16)
            hello = {"from": self._me.incarnation, "to": node.incarnation, "nonce": nonce,
                     "mac": _mac(node.token, "hello", self._me.incarnation, node.incarnation, nonce)}
            sock.sendall(json.dumps(hello).encode() + b"\n")
            answer = _read_line(sock)
            if not _same(answer, _mac(node.token, "welcome", nonce)):
                raise OSError("it did not prove who it is")
            return sock
        except (OSError, ValueError):
            sock.close()
            raise

    def _accept_all(self) -> None:
        while not self._stopped:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            peer = self._welcome(sock)
            if peer is None:
                sock.close()
            else:
                self._accepted.put(peer)
                self._wake()

    def _welcome(self, sock: socket.socket) -> _Peer | None:
        assert self._me is not None
        try:
            sock.settimeout(_HANDSHAKE_TIMEOUT_S)
            line = _read_line(sock)
            if not line:  # a probe: somebody asks whether this process lives
                return None
            hello = json.loads(line)
            sender, nonce = str(hello["from"]), str(hello["nonce"])
            expected = _mac(self._me.token, "hello", sender, self._me.incarnation, nonce)
            if not _same(str(hello["mac"]), expected):
                raise ValueError("wrong proof")
            sock.sendall(_mac(self._me.token, "welcome", nonce).encode() + b"\n")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.debug("refused a connection: %s", error)
            return None
        return _Peer(sender, sock)

    def _admit(self, peer: _Peer) -> None:
        sock = peer.sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 2),
                              (socket.TCP_USER_TIMEOUT, 3000)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setblocking(False)
        self._peers[sock] = peer
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(_MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(peer)
            self._suspect(peer.incarnation, f"its agent's connection broke: {error.strerror or error}")
            return
        if data:
            if _GOODBYE in data:
                # Its record may outlive its listener by a moment: not to be found there is no loss.
                peer.said_goodbye = True
                self._departed.add(peer.incarnation)
            return
        self._drop(peer)
        if not peer.said_goodbye:
            self._suspect(peer.incarnation, "its agent's connection was closed by the kernel")

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.sock)
        del self._peers[peer.sock]
        if self._dialled.get(peer.incarnation) is peer.sock:
            del self._dialled[peer.incarnation]
        peer.sock.close()

    def _drop_dialled(self, incarnation: str) -> None:
        peer = self._peers[self._dialled[incarnation]]
        with contextlib.suppress(OSError):
            peer.sock.sendall(_GOODBYE)
        self._drop(peer)

    def _suspect(self, incarnation: str, evidence: str) -> None:
        """Probe the listener of the suspect; only a node that does not answer there either is lost."""
        with self._lock:
            node = self._known.get(incarnation)
        if node is None or incarnation in self._reported or self._stopped:
            return
        try:
            socket.create_connection((node.host, node.watch_port), timeout=PROBE_TIMEOUT_S).close()
            return
        except OSError as error:
            evidence = f"{evidence}; its port answers: {error.strerror or error}"
        self._reported.add(incarnation)
        self._on_lost(incarnation, evidence)


def _read_line(sock: socket.socket) -> str:
    """Read one line within the handshake's time, however slowly it comes. Raises OSError."""
    data = b""
    deadline_s = time.monotonic() + _HANDSHAKE_TIMEOUT_S
    while not data.endswith(b"\n") and len(data) < _MAX_LINE_BYTES:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left_s)
        chunk = sock.recv(_MAX_LINE_BYTES)
        if not chunk:
            break
        data += chunk
    return data.decode(errors="replace").strip()
