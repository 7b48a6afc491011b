"""Whether the workers of a node have to stand still, because it may be the one that the others go on without."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

log = logging.getLogger(__name__)


def shall_pause(paused: bool, lease_overdue_s: float, silence_s: float, ttl_s: float) -> bool:
    """Whether the workers shall be paused, from what is known now; *paused*: whether they are.

    Without etcd and without a sign of life from anybody the others may have given this node's slot away, so its workers
    must not touch what they share. Or else etcd and all others are gone, and these workers hold the only state there
    is: so they are not ended before etcd has said which it is. Only etcd ends the pause: a peer may be cut off as well.

    *lease_overdue_s*, *silence_s*: since when the lease may be over, and nobody was heard; seconds.
    """
    if paused:
        return lease_overdue_s > 0
    return lease_overdue_s > 0 and silence_s > ttl_s


class Pause:
    """Pauses and resumes the workers of this node; *signal_workers* sends a signal to all that live.

    A stopped process writes to nothing, holds its state, and dies with its agent or by SIGKILL as ever.
    """

    def __init__(self, signal_workers: Callable[[int], None], ttl_s: float) -> None:
        self._signal_workers, self._ttl_s = signal_workers, ttl_s
        self._paused = False

    def check(self, lease_overdue_s: float, silence_s: float) -> None:
        """See `shall_pause`."""
        if not shall_pause(self._paused, lease_overdue_s, silence_s, self._ttl_s):
            self.end()
        elif not self._paused:
            self._paused = True
            why = f"cut off: neither etcd nor another node has answered for {self._ttl_s:g} s"
            log.warning("%s; the workers of this node are paused until etcd does", why)
            self._signal_workers(signal.SIGSTOP)

    def end(self) -> None:
        """Whoever lives goes on."""
        if self._paused:
            self._paused = False
            log.info("the workers of this node are not paused any more")
            self._signal_workers(signal.SIGCONT)
