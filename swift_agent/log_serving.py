"""A rank hands on its log, over a connection for each replacement, in threads: training has nothing to do with it.

That outlives a failure of somebody else: who takes a log repeats its iterations meanwhile, and joins after them. Must
never decide what is sent, or to whom.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from swift_agent.ahead import Stopped
from swift_agent.errors import PeerFailure
from swift_agent.handover import Listener, SocketLink, connected
from swift_agent.log_transfer import BytesLink
from swift_logging_store.errors import LogError

Gift = Callable[[BytesLink, Callable[[], None]], None]
# How long the giver may be silent when there was a failure: it may be the one that is lost.
SILENT_S = 30.0


class LogServer:
    """Of one rank."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def serve(self, address: str, gift: Gift) -> str:
        """Call *gift* with the link to who connects there (`taken`), where the address is that by which others reach
        this machine, and with what raises `Stopped` when this is closed. Raises OSError if nobody could."""
        listener = Listener(address)
        thread = threading.Thread(target=self._run, args=(listener, gift), name="swift-log-to", daemon=True)
        self._threads.append(thread)
        thread.start()
        return listener.where

    def close(self) -> None:
        """Whoever takes a log has it by now, or is lost."""
        self._is_closed = True
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._is_closed = False

    def _run(self, listener: Listener, gift: Gift) -> None:
        # The other side notices, or was told, and says why.
        with contextlib.suppress(Stopped, PeerFailure, LogError), listener, listener.accepted(self._check) as link:
            gift(link, self._check)

    def _check(self) -> None:
        if self._is_closed:
            raise Stopped


@contextlib.contextmanager
def taken(
    where: str, rank: int, has_failed: Callable[[], bool], check: Callable[[], None]
) -> Iterator[SocketLink]:
    """The link to the log of *rank*. *has_failed*: whether somebody has since. Raises `PeerFailure`, and what *check*
    does."""
    links: list[SocketLink] = []

    def impatient() -> None:
        check()
        if has_failed() and links and time.monotonic() - links[0].active_at_s > SILENT_S:
            raise PeerFailure(f"rank {rank} has sent nothing for {SILENT_S:g} s")

    with connected(where, f"rank {rank}", impatient) as link:
        links.append(link)
        yield link
