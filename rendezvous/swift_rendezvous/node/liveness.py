"""Agents watch each other's life over TCP, faster than a lease can.

Every agent keeps a connection to the next few nodes of a ring, the ones it watches; these send it a heartbeat ten times
a second. When a process dies its kernel closes its sockets, and both ends learn of it in milliseconds. When a machine
or a link dies there is silence. Either way the suspect's listener is probed before it is called lost: its *kernel*
connects us and keeps us, so a starved process, or a connection that was merely reset, is never taken for a death; nor
is a queue that strangers keep full: the kernel of that machine still refuses us at another port. And
who has heard from nobody at all meanwhile may be the one that is cut off: it finds nobody lost before it hears again,
and gives them time to be found again. Where all are silent the store is asked early: that it answers at once later does
not say that the line was there before.

    dial --hello/welcome--> watched --silence, end of file, reset--> suspected --no answer to a probe--> lost
                               ^------------------- its kernel answers --'

The lease in etcd stays the backstop (frozen processes). A connection is kept only if both sides prove that they know
the job's heartbeat key (`_handshake`, `reception`). Nothing received is ever executed or unpickled.

This module must never decide what follows from a loss.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import queue
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from swift_rendezvous.node import _handshake as handshake
from swift_rendezvous.node.reception import BACKLOG, Reception
from swift_rendezvous.roster.records import NodeRecord
from swift_rendezvous.threads import NoThread, OnFailure, has_started, only_logged, start, thread

log = logging.getLogger(__name__)

NUM_WATCHED = 2
_HEARTBEAT = b"."  # one byte is sent whole or not at all
_GOODBYE = b"bye\n"
_NUM_PROBES = 2  # at least: on a lossy network one may get lost
_MAX_PATIENCE_S = 2.0
_RETURN_S = 1.5  # a network that is back finds its hosts again: a lost request for an address is repeated after 1 s
_AT_ONCE_S = 0.2  # what TCP has to send again, because the line was cut, comes later than that
# No descriptor, memory or port to ask from.
_OF_OUR_OWN = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EADDRNOTAVAIL}
# Nobody listens here: a living kernel refuses at once, whatever waits at its other ports (tcpmux).
_UNUSED_PORT = 1


@dataclass(frozen=True)
class Limits:
    """When silence becomes a loss; all follows from the time between two heartbeats. Seconds."""

    heartbeat_s: float = 0.1

    @property
    def silence_s(self) -> float:
        """Without a sign of life for this long, a peer is suspected."""
        return 4 * self.heartbeat_s

    @property
    def probe_s(self) -> float:
        """The kernel of a suspect has this long to answer, over all probes."""
        return 2 * self.heartbeat_s

    @property
    def alone_s(self) -> float:
        """If nobody else is heard for this long after the last word of a peer, it may be this node that is cut off."""
        return 2 * self.heartbeat_s

    @property
    def doubt_s(self) -> float:
        """If nobody is heard for this long, somebody is asked. A cut that is over by then is short enough for what it
        has swallowed to be sent again before anybody is suspected."""
        return 1.5 * self.heartbeat_s

    @property
    def detection_s(self) -> tuple[float, float]:
        """The least and the most time from the end of a link to the verdict."""
        least = self.silence_s - self.heartbeat_s + self.probe_s
        return least, least + 2 * self.heartbeat_s


def ring_targets(me: str, incarnations: Iterable[str], num_watched: int = NUM_WATCHED) -> list[str]:
    """The *num_watched* successors of *me* in the ring of all incarnations. Pure."""
    ring = sorted({*incarnations, me})
    start = ring.index(me)
    return [ring[(start + step) % len(ring)] for step in range(1, min(num_watched, len(ring) - 1) + 1)]


@dataclass(eq=False)
class _Peer:
    """One connection. *watched*: this side dialled, so the other one sends heartbeats; else this side does."""

    incarnation: str
    sock: socket.socket
    watched: bool
    said_goodbye: bool = False
    heard_s: float = 0.0
    check_s: float = 0.0
    patience_s: float = 0.0


class Liveness:
    """Runs in daemon threads. `on_lost(incarnation, evidence, is_dead)` is called from one of them, once per lost
    incarnation (once more after `reconsider`); *is_dead*: its kernel has closed the connection and refuses another.
    *key*: `JobKey.heartbeat`. *ask*: returns once somebody who is no peer (the store) has answered, or raises; called
    in threads of their own where all peers are silent. Without it such a silence counts like any other. *on_failure*:
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
        # Guarded by the lock.
        self._known: dict[str, NodeRecord] = {}
        self._targets: list[str] | None = None  # of the ring of all known; None: to be worked out
        self._dialled: set[str] = set()  # dialling or dialled
        self._probed: set[str] = set()
        self._reported: set[str] = set()
        self._departed: set[str] = set()
        self._life_s = time.monotonic()
        self._asked_s = -_RETURN_S  # when somebody was asked first, in the silence that lasts if it is a later one
        self._back_s = -_RETURN_S  # when somebody was heard again after nobody had been
        # Of the loop's thread.
        self._peers: dict[socket.socket, _Peer] = {}
        self._heartbeat_due_s = self._no_ask_until_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._unasked: collections.deque[tuple[str, str, float, bool]] = collections.deque()
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

    def update(self, nodes: Iterable[NodeRecord]) -> None:
        """Tell which nodes are in the job now; connections follow."""
        with self._lock:
            if len(self._known) < 2:  # there was nobody who could have been heard
                self._life_s = time.monotonic()
            self._known = {node.incarnation: node for node in nodes}
            self._targets = None
        if not self._stopped:
            self._wake()

    def reconsider(self, incarnation: str) -> None:
        """The loss that was reported could not be acted on in time: look again whether it is one."""
        with self._lock:
            self._reported.discard(incarnation)
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
        if self._thread.ident is None:  # it was never started
            self._listener.close()
            self._selector.close()
        if not self._thread.is_alive():
            # With the lock: nobody may wake through a number that is somebody else's by then.
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
                    self._suspect(*self._unasked.popleft())
                # After all that has come was read: who could not run for a while has heard nothing, but was told.
                self._beat(time.monotonic())
                self._doubt(time.monotonic())
                self._check_silence(time.monotonic())
                self._dial()
        for peer in list(self._peers.values()):
            self._bid_farewell(peer.sock)
            self._drop(peer)
        self._selector.close()
        self._reception.stop()
        self._acceptor.join(timeout=handshake.TIMEOUT_S)  # who has just been let in hears the farewell, too
        self._listener.close()
        while not self._inbox.empty():
            self._inbox.get()()

    def _pause_s(self, now_s: float) -> float:
        due_s = [now_s + 1.0]
        if self._may_doubt():
            due_s.append(max(self._life_s + self._limits.doubt_s, self._no_ask_until_s))
        for peer in self._peers.values():
            due_s.append(peer.check_s if peer.watched else self._heartbeat_due_s)
        return max(0.0, min(due_s) - now_s)

    def _beat(self, now_s: float) -> None:
        if now_s < self._heartbeat_due_s:
            return
        self._heartbeat_due_s = now_s + self._limits.heartbeat_s
        for peer in self._peers.values():
            if not peer.watched:
                with contextlib.suppress(OSError):  # full, or broken: then reading tells
                    peer.sock.send(_HEARTBEAT)

    def _may_doubt(self) -> bool:
        """There are peers to be heard, and nobody was asked yet in the silence that lasts, if one does."""
        return self._ask is not None and self._asked_s <= self._life_s and any(p.watched for p in self._peers.values())

    def _doubt(self, now_s: float) -> None:
        """Nobody at all is heard: ask, in a thread, whether the line is there."""
        is_due = now_s - self._life_s >= self._limits.doubt_s and now_s >= self._no_ask_until_s
        if is_due and self._may_doubt():
            before_s, self._asked_s = self._asked_s, now_s
            if not has_started(thread("swift-liveness-ask", self._ask_once, self._on_failure)):
                self._asked_s, self._no_ask_until_s = before_s, now_s + self._limits.heartbeat_s

    def _ask_once(self) -> None:
        """Ask; raise nothing."""
        assert self._ask is not None
        try:
            self._ask()
            self._heard()
        except Exception as error:
            log.debug("all peers are silent, and so is the store: %s", error)

    def _check_silence(self, now_s: float) -> None:
        for peer in list(self._peers.values()):
            if not peer.watched or now_s < peer.check_s:
                continue
            silent_s = now_s - peer.heard_s
            if silent_s < self._limits.silence_s:
                peer.check_s = peer.heard_s + self._limits.silence_s
                continue
            # If its kernel answers it is asked again, less and less often.
            peer.patience_s = min(max(self._limits.silence_s, 2 * peer.patience_s), _MAX_PATIENCE_S)
            peer.check_s = now_s + self._limits.probe_s + peer.patience_s
            self._suspect(peer.incarnation, f"its agent was silent for {silent_s:.2f} s", peer.heard_s)

    def _dial(self) -> None:
        assert self._me is not None
        with self._lock:
            gone = [peer for peer in self._peers.values() if peer.watched and peer.incarnation not in self._known]
            if self._targets is None:  # not with every heartbeat: it sorts all nodes
                self._targets = ring_targets(self._me.incarnation, self._known)
            wanted = [
                self._known[incarnation]
                for incarnation in self._targets
                if incarnation not in self._dialled | self._reported | self._departed
            ]
            self._dialled.update(node.incarnation for node in wanted)
        for peer in gone:
            # No farewell: whose record was lost with its lease may be back in a moment, and would have taken this node
            # for one that has left.
            self._drop(peer)
        for node in wanted:
            if not has_started(thread("swift-liveness-dial", self._dial_one, self._on_failure, node)):
                with self._lock:
                    self._dialled.discard(node.incarnation)

    def _dial_one(self, node: NodeRecord) -> None:
        began_s = time.monotonic()
        try:
            assert self._me is not None
            sock, rest = handshake.dial(node, self._me, self._key)
        except (OSError, ValueError) as error:
            why = f"cannot connect to its agent: {getattr(error, 'strerror', None) or error}"
            self._suspect(node.incarnation, why, began_s)
            time.sleep(self._limits.silence_s)  # a peer that lives but does not let us in is not stormed
            with self._lock:
                self._dialled.discard(node.incarnation)
            self._wake()
            return
        departs = _GOODBYE in rest
        if departs:
            with self._lock:
                self._departed.add(node.incarnation)
        if departs or self._stopped:
            self._bid_farewell(sock)
            sock.close()
            return
        self._post(lambda: self._admit(_Peer(node.incarnation, sock, watched=True)))

    def _on_guest(self, sender: str, sock: socket.socket) -> None:
        self._post(lambda: self._admit(_Peer(sender, sock, watched=False)))

    def _admit(self, peer: _Peer) -> None:
        sock = peer.sock
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
        peer.heard_s = time.monotonic()
        peer.check_s = peer.heard_s + self._limits.silence_s
        self._peers[sock] = peer
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(4096)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(peer)
            why = f"its agent's connection broke: {error.strerror or error}"
            self._suspect(peer.incarnation, why, peer.heard_s, was_closed=True)
            return
        if data:
            peer.heard_s = self._heard()
            peer.patience_s = 0.0
            if _GOODBYE in data:
                # Its record may outlive its listener by a moment: not to be found there is no loss.
                peer.said_goodbye = True
                with self._lock:
                    self._departed.add(peer.incarnation)
            return
        self._drop(peer)
        if not peer.said_goodbye:
            why = "its agent's connection was closed by the kernel"
            self._suspect(peer.incarnation, why, peer.heard_s, was_closed=True)

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.sock)
        del self._peers[peer.sock]
        if peer.watched:
            with self._lock:
                self._dialled.discard(peer.incarnation)
        peer.sock.close()

    def _bid_farewell(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(self._farewell)

    # ---- suspects ----

    def _suspect(self, incarnation: str, evidence: str, silent_since_s: float, was_closed: bool = False) -> None:
        """Probe the listener of the suspect, in a thread; only a node that does not answer there either is lost.

        *was_closed*: its kernel has ended a connection. If it refuses the next one as well the process is gone; a
        refusal alone may come from a firewall.
        """
        with self._lock:
            node = self._known.get(incarnation)
            if node is None or self._stopped or incarnation in self._reported | self._departed | self._probed:
                return
            self._probed.add(incarnation)
        args = (node, evidence, silent_since_s, was_closed)
        if not has_started(thread("swift-liveness-probe", self._probe, self._on_failure, *args)):
            with self._lock:
                self._probed.discard(incarnation)
            self._unasked.append((incarnation, evidence, silent_since_s, was_closed))

    def _probe(self, node: NodeRecord, evidence: str, silent_since_s: float, was_closed: bool) -> None:
        answer, refuses = self._verdict(node, silent_since_s + self._limits.alone_s)
        with self._lock:
            self._probed.discard(node.incarnation)
            # It may have left, or been taken out of the job, while it was asked.
            known = node.incarnation in self._known and node.incarnation not in self._departed
            lost = answer is not None and known and not self._stopped
            if lost:
                self._reported.add(node.incarnation)
        if lost:
            self._on_lost(node.incarnation, f"{evidence}; its port answers: {answer}", refuses and was_closed)

    def _verdict(self, node: NodeRecord, sign_s: float) -> tuple[str | None, bool]:
        """As `_answer_of`, of a probe before which anybody was heard, later than *sign_s*: who is cut off is told
        nothing. A refusal is an answer, so that a death that the kernel has told waits for nobody.
        """
        if self._ask is not None:
            if time.monotonic() < sign_s:
                answer, refuses = self._answer_of(node)
                if answer is None or refuses:
                    return answer, refuses
            if not self._wait_for_life(node.incarnation, sign_s):
                return None, False
        until_s = self._back_s + _RETURN_S
        while True:
            answer, refuses = self._answer_of(node)
            if answer is None or refuses or time.monotonic() > until_s:
                return answer, refuses

    def _wait_for_life(self, incarnation: str, sign_s: float) -> bool:
        """Until anybody at all was heard after *sign_s*. False if that does not matter any more."""
        if self._asked_s <= self._life_s:
            self._asked_s = time.monotonic()
        while self._life_s <= sign_s:
            with self._lock:
                if self._stopped or incarnation not in self._known:
                    return False
            self._ask_once()
            if self._life_s <= sign_s:
                time.sleep(self._limits.heartbeat_s / 2)
        return True

    def _heard(self, was_there: bool = False) -> float:
        """Somebody gives a sign of life. *was_there*: and would have done so before."""
        now_s = time.monotonic()
        # Who was asked answers at once, unless the line was cut; then there was only nobody who speaks by himself.
        since_s, longest_s = self._life_s, self._limits.silence_s
        if self._asked_s > self._life_s:
            since_s, longest_s = self._asked_s, _AT_ONCE_S
        if not was_there and now_s - since_s > longest_s:
            self._back_s = now_s
        self._life_s = now_s
        return now_s

    def _answer_of(self, node: NodeRecord) -> tuple[str | None, bool]:
        """None if the kernel of *node* keeps a connection open for us, else what it says instead, and whether that is
        that nobody listens there any more: a way that is closed says nothing of who is at its end."""
        deadline_s = time.monotonic() + self._limits.probe_s
        with _calling(node.host) as is_there:
            answer, refuses = self._answer_until(node, deadline_s)
            if answer == "nothing" and is_there():
                # Its machine lives, and a port that nobody listens at any more would be refused: those who want to
                # connect there are too many.
                return None, False
            return answer, refuses

    def _answer_until(self, node: NodeRecord, deadline_s: float) -> tuple[str | None, bool]:
        answer = "nothing"
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                timeout_s = min(left_s, self._limits.probe_s / _NUM_PROBES)
                sock = socket.create_connection((node.host, node.watch_port), timeout=timeout_s)
            except TimeoutError:
                answer = "nothing"
                continue
            except OSError as error:
                if error.errno in _OF_OUR_OWN:
                    return None, False  # nobody was asked
                return str(error.strerror or error), isinstance(error, ConnectionRefusedError)
            self._heard(was_there=True)
            with sock:
                if _is_kept(sock, deadline_s):
                    return None, False
            answer = "it hangs up"
        return answer, False


@contextlib.contextmanager
def _calling(host: str) -> Iterator[Callable[[], bool]]:
    """Call the kernel of *host* at a port where nobody listens; whether it has answered by then, be it by refusing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError:
        yield lambda: False
        return
    with sock:
        try:
            has_answered = sock.connect_ex((host, _UNUSED_PORT)) in (0, errno.ECONNREFUSED)
        except OSError:  # a name that is none
            has_answered = False

        def answered() -> bool:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            if has_answered or not poll.poll(0):
                return has_answered
            return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNREFUSED)

        yield answered


def _is_kept(sock: socket.socket, deadline_s: float) -> bool:
    """Whether a listener with a living process is behind this new connection: it is greeted, or at least left open.

    The kernel closes the sockets of a dead process one after the other, its listener last: for a moment it still lets
    us in, and then resets what nobody has accepted.
    """
    try:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        return bool(sock.recv(4096))
    except TimeoutError:
        return True
    except OSError:
        return False
