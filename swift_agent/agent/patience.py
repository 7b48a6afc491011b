"""How long a worker whose collective failed waits for the word that a peer did: only while etcd takes writes.

    worker: suspect ...................... (30 s) gives up: the error is its own
    agent:          5 s, then one write to etcd; "wait" to the worker until that is stored

The loss of a peer reaches the other nodes through etcd. While etcd is away, or takes no writes because its space is
used up, no node can tell; a worker that gave up meanwhile would take the state with it. Must never touch a process.
"""

from __future__ import annotations

from collections.abc import Callable

from swift_rendezvous.codec import encode
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import JobRecord, NodeRecord
from swift_rendezvous.store.kv import Compare, Op, Put

# A recovery is much faster; only an exceptional wait costs a write.
PROBE_AFTER_S = 5.0


def probe(keys: Keys, record: JobRecord, job: int, me: NodeRecord) -> tuple[list[Compare], list[Op]]:
    """A transaction that changes nothing: the record of the job is written again. *job*: its create revision."""
    guards = [Compare.create_revision(keys.job, "==", job), Compare.exists(keys.node(me.node_id))]
    return guards, [Put(keys.job, encode(record))]


class Patience:
    """*probe* writes something to the store; `proved` or `failed` is called when the store has answered. *tell* sends
    "wait" to the workers of these local ranks. Used in one thread; a test may let time pass as it likes."""

    def __init__(self, probe: Callable[[], None], tell: Callable[[tuple[int, ...]], None]) -> None:
        self._probe, self._tell = probe, tell
        self._since_s: dict[int, float] = {}
        self._probing: set[int] | None = None

    def suspected(self, local_rank: int, now_s: float) -> None:
        """The worker waits from now on."""
        self._since_s[local_rank] = now_s
        if self._probing is not None:
            self._probing.discard(local_rank)  # what is on its way says nothing about later

    def settled(self, local_rank: int) -> None:
        """The worker was stopped, or has ended: it waits no more."""
        self._since_s.pop(local_rank, None)

    def clear(self) -> None:
        """None of the workers lives any more."""
        self._since_s.clear()

    def tick(self, now_s: float) -> None:
        waiting = tuple(sorted(rank for rank, since_s in self._since_s.items() if now_s - since_s >= PROBE_AFTER_S))
        if not waiting:
            return
        self._tell(waiting)
        if self._probing is None:
            self._probing = set(waiting)
            self._probe()

    def proved(self) -> None:
        """The store takes writes: a node that knows of a loss can tell it now. The workers' time runs."""
        for rank in self._probing or ():
            self._since_s.pop(rank, None)
        self._probing = None

    def failed(self) -> None:
        """The write came to nothing without telling whether the store takes any: try another."""
        self._probing = None
