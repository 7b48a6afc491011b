"""Writes the agent's records in order, in a thread of its own, and repeats them until they are stored or pointless.

The agent's loop must never wait for the store: while it is away, training goes on and worker deaths are still seen.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store.kv import Compare, KeyValueStore, Op, RequestRefused
from swift_rendezvous.threads import OnFailure, only_logged, start, thread

log = logging.getLogger(__name__)

RETRY_S = 0.2


@dataclass(frozen=True)
class Write:
    """One guarded transaction. A guard that does not hold means that the world has moved on: the write is dropped.

    *wanted* is asked before each try; *dropped* is called, in the writer's thread, if it was not any more, *answered*
    when the store has answered, with whether the guards held. *read_first*: a key that is read before each try, and
    *wanted* asked again after it: what is written late, because the line to the store was broken, is not written.
    """

    what: str
    guards: Sequence[Compare]
    ops: Sequence[Op]
    wanted: Callable[[], bool]
    dropped: Callable[[], None] = lambda: None
    answered: Callable[[bool], None] = lambda held: None
    read_first: str = ""


class Writer:
    """*on_refused* is called in the writer's thread with a reason: a record will never be written, so that the agent
    cannot go on. *on_failure*: see `swift_rendezvous.threads`."""

    def __init__(
        self, store: KeyValueStore, on_refused: Callable[[str], None], on_failure: OnFailure = only_logged
    ) -> None:
        self._store, self._on_refused = store, on_refused
        self._queue: deque[Write] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._busy = False
        self._thread = thread("swift-writer", self._run, on_failure)
        start(self._thread)

    def submit(self, write: Write) -> None:
        with self._changed:
            self._queue.append(write)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        away = False
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopped or bool(self._queue))
                if self._stopped:
                    return
                write = self._queue.popleft()
                self._busy = True
            while not self._stopped:
                if not write.wanted():
                    write.dropped()
                    break
                try:
                    if write.read_first:
                        self._store.get(write.read_first)
                        if not write.wanted():
                            continue
                    held = self._store.transaction(write.guards, write.ops).succeeded
                    write.answered(held)
                    if not held:
                        log.debug("%s: outdated, not written", write.what)
                    away = False
                    break
                except RequestRefused as error:
                    self._on_refused(f"the record '{write.what}' cannot be written: {error}")
                    break
                except RendezvousError as error:
                    if not away:
                        log.warning("%s: %s; trying again", write.what, error)
                    away = True
                    with self._changed:
                        self._changed.wait_for(lambda: self._stopped, RETRY_S)
