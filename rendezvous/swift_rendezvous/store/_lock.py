"""A lock made of the store's own transactions, leases and watches; the same for every store.

Must never break a lock that somebody else holds: it only waits for the holder's key to go.
"""

from __future__ import annotations

import threading
import time
import uuid
from types import TracebackType

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store.kv import (
    Compacted,
    Compare,
    Delete,
    Get,
    KeepAlive,
    KeyValue,
    KeyValueStore,
    Lease,
    LeaseLost,
    Put,
    Watch,
)


class StoreLock:
    """Implements `kv.Lock`. One object is one holder; threads that compete use one object each."""

    def __init__(self, store: KeyValueStore, name: str, ttl_s: int) -> None:
        self._store = store
        self._name = name
        self._ttl_s = ttl_s
        self._holder = uuid.uuid4().bytes
        self._lease: Lease | None = None
        self._keep_alive: KeepAlive | None = None
        self._create_revision = 0
        self._seen_revision = 0
        self._watch: Watch | None = None
        self._lost: str | None = None

    def __enter__(self) -> StoreLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.release()

    def acquire(self, timeout_s: float | None = None) -> bool:
        """See `kv.Lock.acquire`. On any error and on a time-out nothing of ours stays in the store."""
        if self._lease is not None:
            raise RendezvousError(f"lock {self._name!r} is held by this object already")
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._lost = None
        self._lease = self._store.grant_lease(self._ttl_s)
        self._keep_alive = self._lease.keep_alive(self._on_lost)
        try:
            while not self._try(self._lease.id):
                if self._lost is not None:
                    raise LeaseLost(f"lost the lease while waiting for lock {self._name!r}: {self._lost}")
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    self.release()
                    return False
                self._wait_for_change(deadline_s)
        except BaseException:
            self._abandon()
            raise
        return True

    def _on_lost(self, reason: str) -> None:
        self._lost = reason
        watch = self._watch
        if watch is not None:
            watch.cancel()

    def _try(self, lease_id: int) -> bool:
        result = self._store.transaction(
            [Compare.absent(self._name)], [Put(self._name, self._holder, lease_id)], [Get(self._name)]
        )
        if result.succeeded:
            self._create_revision = result.revision
            return True
        current = result.responses[0]
        # The answer to a first try that succeeded may have been lost on the way.
        if isinstance(current, KeyValue) and current.lease_id == lease_id and current.value == self._holder:
            self._create_revision = current.create_revision
            return True
        self._seen_revision = result.revision
        return False

    def _wait_for_change(self, deadline_s: float | None) -> None:
        """Return when something happened to the key since `_try` saw it, or when the deadline is over."""
        timer = None
        with self._store.watch_prefix(self._name, self._seen_revision + 1) as watch:
            self._watch = watch
            if deadline_s is not None:
                timer = threading.Timer(max(0.0, deadline_s - time.monotonic()), watch.cancel)
                timer.daemon = True
                timer.start()
            if self._lost is not None:  # it may have been lost before there was a watch to cancel
                return
            try:
                for response in watch:
                    if any(event.kv.key == self._name and event.kind == "delete" for event in response.events):
                        return
            except Compacted:
                return
            finally:
                self._watch = None
                if timer is not None:
                    timer.cancel()
        if self._lost is None and (deadline_s is None or time.monotonic() < deadline_s):
            raise RendezvousError(f"the store was closed while waiting for lock {self._name!r}")

    def _abandon(self) -> None:
        """Release as far as the store can be reached; the lease ends the rest."""
        try:
            self.release()
        except RendezvousError:
            self._lease = None

    def release(self) -> None:
        """See `kv.Lock.release`."""
        lease, self._lease = self._lease, None
        if self._keep_alive is not None:
            self._keep_alive.stop()
        if lease is None:
            return
        # The key first and by itself: who waits then need not wait for the end of the lease should revoking fail.
        self._store.transaction([Compare.value(self._name, "==", self._holder)], [Delete(self._name)])
        lease.revoke()

    def held(self) -> Compare:
        """See `kv.Lock.held`."""
        if self._lease is None or self._lost is not None:
            raise LeaseLost(f"lock {self._name!r} is not held: {self._lost or 'it was not acquired'}")
        return Compare.create_revision(self._name, "==", self._create_revision)
