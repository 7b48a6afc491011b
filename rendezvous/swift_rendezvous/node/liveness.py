"""Agents watch each other's life over TCP, faster than a lease can.

Every agent keeps a connection to the next few nodes of a ring, the ones it watches; these send it a heartbeat ten times
a second. When a process dies its kernel closes its sockets, and both ends learn of it in milliseconds. When a machine
or a link dies there is silence. Either way the suspect's listener is probed before it is called lost (`probe`).
`suspicion` decides which peer is suspected, what is asked and which is lost. Here are the sockets, the threads and the
lock around it.

    dial --hello/welcome--> watched --silence, end of file, reset--> suspected --no answer to a probe--> lost
                               ^------------------- its kernel answers --'

The lease in etcd stays the backstop (frozen processes). A connection is kept only if both sides prove that they know
the job's heartbeat key (`_handshake`, `reception`). Nothing received is ever executed or unpickled.

This module must never decide which peer is lost, nor what follows from a loss.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from swift_rendezvous.node import _handshake as handshake
from swift_rendezvous.node import probe
from swift_rendezvous.node.reception import BACKLOG, Reception
from swift_rendezvous.node.suspicion import Answer, Inquiry, Limits, Silence, Suspect, Suspicion
from swift_rendezvous.roster.records import NodeRecord
from swift_rendezvous.threads import NoThread, OnFailure, has_started, only_logged, start, thread

log = logging.getLogger(__name__)

_HEARTBEAT = b"."  # one byte is sent whole or not at all
_GOODBYE = b"bye\n"


@dataclass(eq=False)
class _Peer:
    """One connection. *watched*: this side dialled, so the other one sends heartbeats; else this side does."""

    incarnation: str
    sock: socket.socket
    watched: bool
    silence: Silence
    said_goodbye: bool = False


class Liveness:
    """Runs in daemon threads. `on_lost(incarnation, evidence, is_dead)` is called from one of them, once per lost
    incarnation (once more after `reconsider`); *is_dead*: its kernel has closed the connection and refuses another.
    *key*: `JobKey.heartbeat`. *ask*: returns once the store, which is no peer, has answered, or raises; called in
    threads of their own where all peers are silent. Without it such a silence counts like any other. *on_failure*:
    see `threads`.
    """

    def __init__(
        self,
        host: str,
        on_lost: Callable[[str, str, bool], None],
        limits: Limits | None = None,
        *,
        key: bytes = b"",
        ask: Callable[[], None] | None = None,
        on_failure: OnFailure = only_logged,
    ) -> None:
        self._on_lost, self._on_failure = on_lost, on_failure
        self._ask = ask
        self._limits = limits or Limits()
        self._key = key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._me: NodeRecord | None = None
        self._lock = threading.Lock()
        self._suspicion = Suspicion(self._limits, time.monotonic(), can_ask=ask is not None)  # guarded by the lock
        # Of the loop's thread.
        self._peers: dict[socket.socket, _Peer] = {}
        self._heartbeat_due_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._unasked: collections.deque[Suspect] = collections.deque()
        """Suspects for whose probe there was no thread."""
        self._stopped = False
        self._farewell = _GOODBYE
        # What may block has threads of its own: two agents that dial each other at once must each be able to answer
        # meanwhile, and heartbeats go on.
        self._thread = thread("swift-liveness", self._run, on_failure)

    def start(self, me: NodeRecord) -> None:
        self._me = me
        self._reception = Reception(self._listener, me, self._key, self._on_guest)
        self._acceptor = thread("swift-liveness-accept", self._reception.run, self._on_failure)
        start(self._acceptor)
        try:
            start(self._thread)
        except NoThread:
            self._reception.stop()
            self._acceptor.join(timeout=handshake.TIMEOUT_S)
            raise

    def update(self, nodes: Iterable[NodeRecord], with_slots: Collection[str] = ()) -> None:
        """Tell which nodes are in the job now, and which of them have a slot; connections follow."""
        with self._lock:
            self._suspicion.on_nodes(nodes, time.monotonic(), with_slots)
        if not self._stopped:
            self._wake()

    def reconsider(self, incarnation: str) -> None:
        """The loss that was reported could not be acted on in time: look again whether it is one."""
        with self._lock:
            self._suspicion.reconsider(incarnation)
        if not self._stopped:
            self._wake()

    def stop(self, goodbye: bool = True) -> None:
        """Say goodbye to all peers, so that they do not take the closed connections for a death; or let them."""
        if self._stopped:
            return
        self._farewell = _GOODBYE if goodbye else b""
        self._stopped = True
        with self._lock:
            self._suspicion.on_end()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        if self._thread.ident is None:  # it was never started
            self._listener.close()
            self._selector.close()
        elif not self._thread.is_alive() and self._acceptor.is_alive():
            self._leave()
        if not self._thread.is_alive():
            # With the lock: no thread may wake through a number that is another file's by then.
            with self._lock:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        self._wake()

    # ---- the loop ----

    def _run(self) -> None:
        while not self._stopped:
            for key, _ in self._selector.select(timeout=self._pause_s(time.monotonic())):
                if key.fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                    while not self._inbox.empty():
                        self._inbox.get()()
                elif key.fileobj in self._peers:
                    self._read(self._peers[key.fileobj])  # only sockets are left
            if not self._stopped:
                for _ in range(len(self._unasked)):
                    self._suspect(self._unasked.popleft())
                # After all that has come was read: a process that could not run has heard nothing, but was told.
                self._beat(time.monotonic())
                self._doubt(time.monotonic())
                self._check_silence(time.monotonic())
                self._dial()
        self._leave()

    def _leave(self) -> None:
        """In the loop's thread; in `stop`, if that has ended by an error."""
        for peer in list(self._peers.values()):
            self._bid_farewell(peer.sock)
            self._drop(peer)
        self._selector.close()
        self._reception.stop()
        self._acceptor.join(timeout=handshake.TIMEOUT_S)  # a peer that has just been let in hears the farewell, too
        self._listener.close()
        while not self._inbox.empty():
            self._inbox.get()()

    def _pause_s(self, now_s: float) -> float:
        due_s = [now_s + 1.0]
        with self._lock:
            doubt_due_s = self._suspicion.doubt_due_s(self._is_watching())
        if doubt_due_s is not None:
            due_s.append(doubt_due_s)
        for peer in self._peers.values():
            due_s.append(peer.silence.check_s if peer.watched else self._heartbeat_due_s)
        return max(0.0, min(due_s) - now_s)

    def _beat(self, now_s: float) -> None:
        if now_s < self._heartbeat_due_s:
            return
        self._heartbeat_due_s = now_s + self._limits.heartbeat_s
        for peer in self._peers.values():
            if not peer.watched:
                with contextlib.suppress(OSError):  # full, or broken: then reading tells
                    peer.sock.send(_HEARTBEAT)

    def _is_watching(self) -> bool:
        return any(peer.watched for peer in self._peers.values())

    def _doubt(self, now_s: float) -> None:
        """No peer is heard: ask, in a thread, whether the line is there."""
        with self._lock:
            before = self._suspicion.line
            must_ask = self._suspicion.doubts(now_s, self._is_watching())
        if must_ask and not has_started(thread("swift-liveness-ask", self._ask_once, self._on_failure)):
            with self._lock:
                self._suspicion.on_not_asked(before, now_s)

    def _ask_once(self) -> None:
        """Ask; raise nothing."""
        assert self._ask is not None
        try:
            self._ask()
            self._heard()
        except Exception as error:  # whatever it is: no answer
            log.debug("all peers are silent, and so is the store: %s", error)

    def _check_silence(self, now_s: float) -> None:
        for peer in list(self._peers.values()):
            if not peer.watched:
                continue
            peer.silence, silent_s = peer.silence.checked(now_s, self._limits)
            if silent_s is not None:
                evidence = f"its agent was silent for {silent_s:.2f} s"
                self._suspect(Suspect(peer.incarnation, evidence, peer.silence.heard_s))

    def _dial(self) -> None:
        assert self._me is not None
        with self._lock:
            known = self._suspicion.known
            gone = [peer for peer in self._peers.values() if peer.watched and peer.incarnation not in known]
            wanted = self._suspicion.to_dial(self._me.incarnation)
        for peer in gone:
            # No farewell: whose record was lost with its lease may be back in a moment, and would have taken this node
            # for one that has left.
            self._drop(peer)
        for node in wanted:
            if not has_started(thread("swift-liveness-dial", self._dial_one, self._on_failure, node)):
                with self._lock:
                    self._suspicion.on_hung_up(node.incarnation)

    def _dial_one(self, node: NodeRecord) -> None:
        began_s = time.monotonic()
        try:
            assert self._me is not None
            sock, rest = handshake.dial(node, self._me, self._key)
        except (OSError, ValueError) as error:
            why = f"cannot connect to its agent: {getattr(error, 'strerror', None) or error}"
            self._suspect(Suspect(node.incarnation, why, began_s))
            time.sleep(self._limits.silence_s)  # a peer that lives but does not let us in is not stormed
            with self._lock:
                self._suspicion.on_hung_up(node.incarnation)
            self._wake()
            return
        departs = _GOODBYE in rest
        if departs:
            with self._lock:
                self._suspicion.on_goodbye(node.incarnation)
        if departs or self._stopped:
            self._bid_farewell(sock)
            sock.close()
            return
        self._post(lambda: self._admit(node.incarnation, sock, watched=True))

    def _on_guest(self, sender: str, sock: socket.socket) -> None:
        self._post(lambda: self._admit(sender, sock, watched=False))

    def _admit(self, incarnation: str, sock: socket.socket, watched: bool) -> None:
        if self._stopped:
            self._bid_farewell(sock)
            sock.close()
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # The end that hears no heartbeats learns of a dead link from its kernel.
        for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 2),
                              (socket.TCP_USER_TIMEOUT, 3000), (socket.TCP_NODELAY, 1)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setblocking(False)
        silence = Silence.since(time.monotonic(), self._limits)
        self._peers[sock] = _Peer(incarnation, sock, watched, silence)
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(4096)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(peer)
            why = f"its agent's connection broke: {error.strerror or error}"
            self._suspect(Suspect(peer.incarnation, why, peer.silence.heard_s, was_closed=True))
            return
        if data:
            peer.silence = peer.silence.broken(self._heard(unasked=True))
            if _GOODBYE in data:
                peer.said_goodbye = True
                with self._lock:
                    self._suspicion.on_goodbye(peer.incarnation)
            return
        self._drop(peer)
        if not peer.said_goodbye:
            why = "its agent's connection was closed by the kernel"
            self._suspect(Suspect(peer.incarnation, why, peer.silence.heard_s, was_closed=True))

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.sock)
        del self._peers[peer.sock]
        if peer.watched:
            with self._lock:
                self._suspicion.on_hung_up(peer.incarnation)
        peer.sock.close()

    def _bid_farewell(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(self._farewell)

    # ---- suspects ----

    def _suspect(self, suspect: Suspect) -> None:
        """Look into it, in a thread: only a node that does not answer a probe either is lost."""
        with self._lock:
            inquiry = self._suspicion.look_into(suspect)
        if inquiry is None:
            return
        if not has_started(thread("swift-liveness-probe", self._look_into, self._on_failure, inquiry)):
            with self._lock:
                self._suspicion.on_not_looked_into(suspect.incarnation)
            self._unasked.append(suspect)

    def _look_into(self, inquiry: Inquiry) -> None:
        while True:
            with self._lock:
                step = self._suspicion.next_step(inquiry, time.monotonic())
            match step:
                case "probe":
                    inquiry.answer = self._answer_of(inquiry.node)
                case "ask":
                    self._ask_once()
                case "pause":
                    time.sleep(self._limits.heartbeat_s / 2)
                case "end":
                    break
        with self._lock:
            loss = self._suspicion.judge(inquiry)
        if loss is not None:
            self._on_lost(loss.incarnation, loss.evidence, loss.is_dead)

    def _heard(self, was_there: bool = False, unasked: bool = False) -> float:
        """Somebody gives a sign of life; when. See `suspicion.Line.heard`."""
        with self._lock:
            now_s = time.monotonic()
            self._suspicion.on_sign(now_s, was_there, unasked)
        return now_s

    def _answer_of(self, node: NodeRecord) -> Answer:
        return probe.answer_of(node, self._limits.probe_s, lambda: self._heard(was_there=True))
