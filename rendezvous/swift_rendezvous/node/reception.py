"""Lets in each caller of this agent's heartbeat port that proves that it belongs to the job; sends all others away.

    accepted --nonce sent--> visitor --hello, proved--> guest (liveness)
                                '--garbage, end of file, too late, or the oldest of too many--> closed

One thread for all of them, which waits for none: strangers that say nothing cost a descriptor each, for two seconds at
most, and where there are too many the oldest has to go. Each caller is greeted first, at once: one that only wants to
know whether this process lives (`liveness` probes) has its answer before it is sent away.

A connection that cannot be accepted (no descriptors, no memory) waits in the kernel's queue; the next try is a moment
later, for as long as it takes. Must never execute, unpickle or trust anything that comes in.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time
from collections.abc import Callable

from swift_rendezvous.node import _handshake as handshake
from swift_rendezvous.roster.records import NodeRecord

log = logging.getLogger(__name__)

# The kernel takes what net.core.somaxconn allows (4096).
BACKLOG = 4096
MAX_VISITORS = 256
# Without descriptors, or with whatever else accept() has failed of.
PAUSE_S = 0.1
# At the end, for a visitor that is just proving itself: it hears a farewell then.
_LAST_S = 0.5
_AT_ONCE = 64
_CLOSED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)


class Reception:
    """*admit* gets the incarnation and the socket of each guest, in the thread that calls `run`."""

    def __init__(
        self, listener: socket.socket, me: NodeRecord, key: bytes, admit: Callable[[str, socket.socket], None]
    ) -> None:
        self._listener, self._me, self._key, self._admit = listener, me, key, admit
        self._visitors: dict[socket.socket, handshake.Visitor] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._resume_s = 0.0
        self._fails = False
        self._stopped = False

    def stop(self) -> None:
        """From any thread. `run` returns in a moment; the listener is the caller's to close, after that."""
        self._stopped = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `run`, whose accept() then fails
        except OSError as error:
            log.debug("the listener was closed already: %s", error)

    def run(self) -> None:
        """Until `stop`. Raises OSError if the listener is closed in any other way."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._stopped:
                self._turn()
            self._unlisten()
            last_s = time.monotonic() + _LAST_S
            while self._visitors and time.monotonic() < last_s:
                self._turn()
        finally:
            for visitor in list(self._visitors.values()):
                self._send_away(visitor)
            self._selector.close()

    def _turn(self) -> None:
        now_s = time.monotonic()
        due_s = [now_s + 1.0 if not self._stopped else now_s + 0.05]
        if self._resume_s:
            due_s.append(self._resume_s)
        due_s += [visitor.deadline_s for visitor in list(self._visitors.values())[:1]]
        for key, _ in self._selector.select(max(0.0, min(due_s) - now_s)):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj in self._visitors:
                self._hear(self._visitors[key.fileobj])  # only sockets are left
        now_s = time.monotonic()
        for visitor in [v for v in self._visitors.values() if v.deadline_s <= now_s]:
            self._send_away(visitor)
        if self._resume_s and now_s >= self._resume_s and not self._stopped:
            self._resume_s = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _unlisten(self) -> None:
        if not self._resume_s:
            self._selector.unregister(self._listener)
        self._resume_s = 0.0

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._on_error(error)
                return
            if self._fails:
                log.info("connections of other agents are accepted again")
                self._fails = False
            try:
                visitor = handshake.Visitor(sock, self._me, self._key)
            except OSError as error:
                log.debug("it has gone already: %s", error)
                sock.close()
                continue
            self._visitors[sock] = visitor
            self._selector.register(sock, selectors.EVENT_READ)
            if len(self._visitors) > MAX_VISITORS:
                self._send_away(next(iter(self._visitors.values())))

    def _on_error(self, error: OSError) -> None:
        if self._stopped or error.errno in (errno.ECONNABORTED, errno.EINTR):
            return
        if error.errno in _CLOSED:
            raise error
        if not self._fails:
            log.warning("connections of other agents cannot be accepted (%s); trying on", error.strerror or error)
            self._fails = True
        if self._visitors:
            self._send_away(next(iter(self._visitors.values())))
        self._selector.unregister(self._listener)
        self._resume_s = time.monotonic() + PAUSE_S

    def _hear(self, visitor: handshake.Visitor) -> None:
        try:
            sender = visitor.hear()
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            log.debug("refused a connection: %s", error)
            self._send_away(visitor)
            return
        if sender is not None:
            self._selector.unregister(visitor.sock)
            del self._visitors[visitor.sock]
            self._admit(sender, visitor.sock)

    def _send_away(self, visitor: handshake.Visitor) -> None:
        self._selector.unregister(visitor.sock)
        del self._visitors[visitor.sock]
        visitor.sock.close()
