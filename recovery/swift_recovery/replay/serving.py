"""A rank hands on its log, over a connection for each replacement, in threads: training has nothing to do with it.

That outlives a failure of a third rank: the one that takes a log repeats its iterations meanwhile, and joins after
them. Must never decide what is sent, or to whom.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator

from swift_logging_store.errors import LinkLost, LogError
from swift_logging_store.log.prefetch import Stopped
from swift_logging_store.log.transfer import BytesLink
from swift_recovery.transfer.socket_link import MEET_TIMEOUT_S, Listener, SocketLink, connected
from swift_rendezvous.threads import has_started, thread

Gift = Callable[[BytesLink, Callable[[], None]], None]
# How long the giver may be silent when there was a failure: it may be the one that is lost. A living one says something
# much more often (`transfer.ALIVE_S`).
SILENT_S = 30.0


class LogServer:
    """Of one rank. *note* tells people."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._threads: dict[int, list[threading.Thread]] = {}  # by the rank that is given something
        self._is_closed: dict[int, threading.Event] = {}

    def serve(self, rank: int, address: str, gift: Gift, num_processes: int = 1) -> str:
        """Call *gift* with the link to that rank when it connects there (`log_of`), where the address is that by which
        others reach this machine, and with what raises `Stopped` when this is closed; for as many *num_processes* as
        repeat its iterations, in a thread each. Raises OSError if none could.
        """
        self.close([rank])
        listener, is_closed = Listener(address), threading.Event()
        visitors = _Visitors(listener, num_processes)
        args = (rank, visitors, gift, is_closed)
        threads = [thread(f"swift-log-to-{rank}", self._run, self._note, *args) for _ in range(num_processes)]
        self._threads[rank], self._is_closed[rank] = [one for one in threads if has_started(one)], is_closed
        if len(self._threads[rank]) < num_processes:
            self.close([rank])
            listener.close()
            raise OSError(f"there is no thread to give rank {rank} what it was sent")
        return listener.where

    def close(self, ranks: Collection[int] | None = None) -> None:
        """These ranks, all by default, have what they were given, or are lost."""
        closing = set(self._threads if ranks is None else ranks).intersection(self._threads)
        for rank in closing:
            self._is_closed.pop(rank).set()
        for rank in closing:
            for one in self._threads.pop(rank):
                one.join()

    def _run(self, rank: int, visitors: _Visitors, gift: Gift, is_closed: threading.Event) -> None:
        def check() -> None:
            if is_closed.is_set():
                raise Stopped

        try:
            # The other side notices, or was told, and says why.
            with contextlib.suppress(Stopped, LinkLost, LogError), visitors.next(check) as link:
                gift(link, check)
        except Exception as error:  # whatever it is: the thread must not end without a word
            self._note(f"rank {rank} cannot be given what it was sent: {error!r}")


class _Visitors:
    """Those that connect with *listener*, which is closed when *number* of them were there, or nobody waits for more.
    """

    def __init__(self, listener: Listener, number: int) -> None:
        self._listener, self._num_left = listener, number
        self._callers = listener.visitors()  # one for all: a rank that has called waits there
        self._lock = threading.Lock()  # one after the other waits for the next

    @contextlib.contextmanager
    def next(self, check: Callable[[], None]) -> Iterator[SocketLink]:
        """Raises `LinkLost` if none comes, and what *check* does."""
        try:
            sock = self._wait(check)
        finally:
            with self._lock:
                self._num_left -= 1
                if not self._num_left:
                    self._callers.close()
                    self._listener.close()
        with sock:
            yield SocketLink(sock, check)

    def _wait(self, check: Callable[[], None]) -> socket.socket:
        deadline_s = time.monotonic() + MEET_TIMEOUT_S
        while time.monotonic() < deadline_s:
            with self._lock:
                found = next(self._callers)
            if found is not None:
                return found
            check()
        raise LinkLost(f"nobody came within {MEET_TIMEOUT_S:g} s")


@contextlib.contextmanager
def log_of(
    where: str, rank: int, has_failed: Callable[[], bool], check: Callable[[], None]
) -> Iterator[SocketLink]:
    """The link to the log of *rank*. *has_failed*: whether a rank has since. Raises `LinkLost`, and what *check*
    does."""
    links: list[SocketLink] = []

    def impatient() -> None:
        check()
        if has_failed() and links and time.monotonic() - links[0].active_at_s > SILENT_S:
            raise LinkLost(f"rank {rank} has sent nothing for {SILENT_S:g} s")

    with connected(where, f"rank {rank}", impatient) as link:
        links.append(link)
        yield link
