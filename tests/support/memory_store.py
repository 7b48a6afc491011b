"""The `KeyValueStore` in memory, with etcd's semantics and virtual time, for tests of what is built on the store.

Must never look at a clock: time passes by `advance` only. Not a store for a job: nothing is shared or durable.
"""

from __future__ import annotations

import queue
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store.kv import (
    Compacted,
    Compare,
    Delete,
    DeletePrefix,
    Event,
    Get,
    GetPrefix,
    KeyValue,
    LeaseLost,
    Op,
    OpResponse,
    Put,
    TransactionResult,
    WatchResponse,
)

MAX_TRANSACTION_OPS = 128  # etcd's default


class MemoryStore:
    """Implements `kv.KeyValueStore`. Thread-safe; expiry happens inside `advance`, in the order of the deadlines."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        # Reentrant: the callback of a lost lease may use the store.
        self._lock = threading.RLock()
        self._revision = 1  # as an empty etcd
        self._compacted = 0
        self._keys: dict[str, KeyValue] = {}
        self._history: list[WatchResponse] = []  # one per revision that changed a key
        self._leases: dict[int, MemoryLease] = {}
        self._num_leases = 0
        self._watches: list[MemoryWatch] = []
        self._closed = False

    def twin(self) -> MemoryStore:
        """Another store with the same keys and leases, which nobody keeps alive, watches or looks back in."""
        twin = MemoryStore(self.now_s)
        twin._revision, twin._compacted = self._revision, self._revision + 1
        twin._keys, twin._num_leases = dict(self._keys), self._num_leases
        for number, lease in self._leases.items():
            twin._leases[number] = other = MemoryLease(twin, number, lease.ttl_s)
            other.keys = set(lease.keys)
        return twin

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for watch in list(self._watches):
                watch.cancel()

    def advance(self, seconds: float) -> None:
        """Let virtual time pass: leases that are kept alive are refreshed in time, the others expire."""
        end_s = self.now_s + seconds
        while True:
            lost = []
            with self._lock:
                due = [lease for lease in self._leases.values() if not lease.kept and lease.deadline_s <= end_s]
                if not due:
                    self.now_s = end_s
                    for lease in self._leases.values():
                        if lease.kept:
                            lease.deadline_s = end_s + lease.ttl_s
                    return
                first = min(due, key=lambda lease: (lease.deadline_s, lease.id))
                self.now_s = max(self.now_s, first.deadline_s)
                lost = self._drop_lease(first)
            for callback in lost:
                callback(f"lease {first.id:x} expired or was revoked")

    def compact(self, revision: int) -> None:
        """Forget the history before *revision*."""
        with self._lock:
            if revision > self._revision:
                raise RendezvousError(f"revision {revision} is in the future, the store is at {self._revision}")
            if revision <= self._compacted:
                raise Compacted(f"revision {revision} has been compacted", self._compacted)
            self._compacted = revision
            self._history = [entry for entry in self._history if entry.revision >= revision]

    # -- reads and writes ----------------------------------------------------------------------------------------

    def get(self, key: str) -> KeyValue | None:
        response = self.transaction([], [Get(key)]).responses[0]
        return response if isinstance(response, KeyValue) else None

    def get_prefix(self, prefix: str, *, before: str | None = None, limit: int = 0) -> tuple[list[KeyValue], int]:
        result = self.transaction([], [GetPrefix(prefix)])
        found = result.responses[0]
        assert isinstance(found, tuple)
        wanted = [kv for kv in found if before is None or kv.key < before]
        return wanted[:limit] if limit else wanted, result.revision

    def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        return self.transaction([], [Put(key, value, lease_id)]).revision

    def delete(self, key: str) -> bool:
        return bool(self.transaction([], [Delete(key)]).responses[0])

    def delete_prefix(self, prefix: str) -> int:
        deleted = self.transaction([], [DeletePrefix(prefix)]).responses[0]
        return deleted if isinstance(deleted, int) else 0

    def transaction(self, compare: Sequence[Compare], success: Sequence[Op],
                    failure: Sequence[Op] = ()) -> TransactionResult:
        for ops in (compare, success, failure):
            if len(ops) > MAX_TRANSACTION_OPS:
                raise RendezvousError(f"too many operations in a transaction: {len(ops)} of {MAX_TRANSACTION_OPS}")
        _check_duplicates(success)
        _check_duplicates(failure)
        with self._lock:
            if self._closed:
                raise RendezvousError("this store was closed")
            succeeded = all(self._holds(condition) for condition in compare)
            ops = success if succeeded else failure
            for op in ops:
                if isinstance(op, Put) and op.lease_id and op.lease_id not in self._leases:
                    raise LeaseLost(f"put {op.key!r}: requested lease not found")
            events: list[Event] = []
            responses = tuple(self._apply(op, events) for op in ops)
            self._publish(events)
            return TransactionResult(succeeded, self._revision, responses)

    def _holds(self, condition: Compare) -> bool:
        kv = self._keys.get(_checked(condition.key))
        actual: int | bytes
        if condition.target == "value":
            if kv is None:
                return False
            actual = kv.value
        else:
            kv = kv or KeyValue(condition.key)
            actual = {"version": kv.version, "create": kv.create_revision, "mod": kv.mod_revision,
                      "lease": kv.lease_id}[condition.target]
        operand = condition.operand
        match condition.operator:
            case "==":
                return actual == operand
            case "!=":
                return actual != operand
            case "<":
                return actual < operand  # type: ignore[operator]  # both int or both bytes
            case ">":
                return actual > operand  # type: ignore[operator]

    def _apply(self, op: Op, events: list[Event]) -> OpResponse:
        """Carry out one operation under the next revision; what it changes is appended to *events*."""
        revision = self._revision + 1
        match op:
            case Get(key):
                return self._keys.get(_checked(key))
            case GetPrefix(prefix):
                return tuple(self._keys[key] for key in self._under(prefix))
            case Put(key, value, lease_id):
                old = self._keys.get(_checked(key))
                self._detach(old)
                kv = KeyValue(key, value, old.create_revision if old else revision, revision,
                              old.version + 1 if old else 1, lease_id)
                self._keys[key] = kv
                if lease_id:
                    self._leases[lease_id].keys.add(key)
                events.append(Event("put", kv))
                return None
            case Delete(key):
                doomed = [key] if _checked(key) in self._keys else []
            case DeletePrefix(prefix):
                doomed = self._under(prefix)
        for key in doomed:
            self._detach(self._keys.pop(key))
            events.append(Event("delete", KeyValue(key, mod_revision=revision)))
        return len(doomed)

    def _under(self, prefix: str) -> list[str]:
        return sorted(key for key in self._keys if key.startswith(prefix))

    def _detach(self, kv: KeyValue | None) -> None:
        if kv is not None and kv.lease_id in self._leases:
            self._leases[kv.lease_id].keys.discard(kv.key)

    def _publish(self, events: list[Event]) -> None:
        if not events:
            return
        self._revision += 1
        response = WatchResponse(self._revision, tuple(events))
        self._history.append(response)
        for watch in self._watches:
            watch.offer(response)

    # -- leases, watches, locks ----------------------------------------------------------------------------------

    def grant_lease(self, ttl_s: int) -> MemoryLease:
        if ttl_s < 1:
            raise RendezvousError(f"a lease lives for at least 1 s, not {ttl_s}")
        with self._lock:
            self._num_leases += 1
            lease = MemoryLease(self, self._num_leases, ttl_s)
            self._leases[lease.id] = lease
            return lease

    lease = grant_lease

    def is_alive(self, lease: MemoryLease) -> bool:
        return lease.id in self._leases

    def refresh(self, lease: MemoryLease) -> int:
        with self._lock:
            if lease.id not in self._leases:
                raise LeaseLost(f"lease {lease.id:x} expired or was revoked")
            lease.deadline_s = self.now_s + lease.ttl_s
            return lease.ttl_s

    def revoke(self, lease: MemoryLease) -> None:
        with self._lock:
            lost = self._drop_lease(lease)
        for callback in lost:
            callback(f"lease {lease.id:x} expired or was revoked")

    def _drop_lease(self, lease: MemoryLease) -> list[Callable[[str], None]]:
        """Delete the lease and its keys under one revision; returns who is to be told."""
        if self._leases.pop(lease.id, None) is None:
            return []
        events: list[Event] = []
        for key in sorted(lease.keys):
            self._apply(Delete(key), events)
        self._publish(events)
        return lease.take_callbacks()

    def watch_prefix(
        self, prefix: str, start_revision: int | None = None, *, before: str | None = None
    ) -> MemoryWatch:
        return self._watch(prefix, False, start_revision, before)

    def watch(self, key: str, start_revision: int | None = None) -> MemoryWatch:
        """As `watch_prefix`, for one key."""
        return self._watch(key, True, start_revision)

    def _watch(
        self, prefix: str, single_key: bool, start_revision: int | None, before: str | None = None
    ) -> MemoryWatch:
        with self._lock:
            if self._closed:
                raise RendezvousError("this store was closed")
            start = self._revision + 1 if start_revision is None else start_revision
            watch = MemoryWatch(self, prefix, single_key, start, before)
            if start < self._compacted:
                watch.fail(Compacted(f"revision {start} has been compacted", self._compacted))
                return watch
            first = bisect_left(self._history, start, key=lambda entry: entry.revision)
            for response in self._history[first:]:
                watch.offer(response)
            self._watches.append(watch)
            return watch

    def forget(self, watch: MemoryWatch) -> None:
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)


class MemoryLease:
    """Implements `kv.Lease`."""

    def __init__(self, store: MemoryStore, lease_id: int, ttl_s: int) -> None:
        self._store = store
        self.id = lease_id
        self.ttl_s = ttl_s
        self.deadline_s = store.now_s + ttl_s
        self.keys: set[str] = set()
        self._keepers: list[MemoryKeepAlive] = []

    @property
    def kept(self) -> bool:
        return bool(self._keepers)

    def refresh(self) -> int:
        return self._store.refresh(self)

    def revoke(self) -> None:
        self._store.revoke(self)

    def remaining_ttl_s(self) -> float:
        return max(0.0, self.deadline_s - self._store.now_s) if self._store.is_alive(self) else 0.0

    def keep_alive(self, on_lost: Callable[[str], None] | None = None) -> MemoryKeepAlive:
        """As `kv.Lease`, without a thread: until it is stopped the lease does not expire, however far time advances.

        *on_lost* is called by the thread that revokes the lease.
        """
        keeper = MemoryKeepAlive(self, self._store, on_lost)
        self._keepers.append(keeper)
        return keeper

    def drop(self, keeper: MemoryKeepAlive) -> None:
        if keeper in self._keepers:
            self._keepers.remove(keeper)

    def take_callbacks(self) -> list[Callable[[str], None]]:
        keepers, self._keepers = self._keepers, []
        return [keeper.on_lost for keeper in keepers if keeper.on_lost is not None]


class MemoryKeepAlive:
    """Implements `kv.KeepAlive`."""

    def __init__(self, lease: MemoryLease, store: MemoryStore, on_lost: Callable[[str], None] | None) -> None:
        self._lease = lease
        self._store = store
        self._began_s = store.now_s
        self.on_lost = on_lost

    def stop(self) -> None:
        self._lease.drop(self)

    def confirmed_s(self) -> float:
        return self._store.now_s

    def overdue_s(self) -> float:
        return max(0.0, self._store.now_s - self._lease.deadline_s)

    def unbroken_s(self) -> float:
        return self._store.now_s - self._began_s


class MemoryWatch:
    """Implements `kv.Watch`."""

    def __init__(
        self, store: MemoryStore, prefix: str, single_key: bool, start_revision: int, before: str | None = None
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._before = before
        self._single_key = single_key
        self._start_revision = start_revision
        self._queue: queue.SimpleQueue[WatchResponse | RendezvousError | None] = queue.SimpleQueue()
        self._ended = False

    def offer(self, response: WatchResponse) -> None:
        """Queue what concerns this watch."""
        if response.revision < self._start_revision:
            return
        events = tuple(event for event in response.events if self._concerns(event.kv.key))
        if events:
            self._queue.put(WatchResponse(response.revision, events))

    def _concerns(self, key: str) -> bool:
        if self._single_key:
            return key == self._prefix
        return key.startswith(self._prefix) and (self._before is None or key < self._before)

    def fail(self, error: RendezvousError) -> None:
        self._queue.put(error)

    def __iter__(self) -> Iterator[WatchResponse]:
        return self

    def __next__(self) -> WatchResponse:
        item = None if self._ended else self._queue.get()
        if self._ended or item is None:  # `cancel` ends it at once, whatever is still queued
            raise StopIteration
        if isinstance(item, RendezvousError):
            self._ended = True
            raise item
        return item

    def __enter__(self) -> MemoryWatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        self._ended = True
        self._queue.put(None)
        self._store.forget(self)


def _checked(key: str) -> str:
    if not key:
        raise RendezvousError("key is not provided")
    return key


def _check_duplicates(ops: Sequence[Op]) -> None:
    """Refuse what etcd refuses: a key that is written twice, or written and deleted, by one transaction."""
    written: set[str] = set()
    for op in ops:
        if isinstance(op, Put):
            if _checked(op.key) in written:
                raise RendezvousError(f"duplicate key {op.key!r} given in transaction")
            written.add(op.key)
    for op in ops:
        if (isinstance(op, Delete) and op.key in written) or (
            isinstance(op, DeletePrefix) and any(key.startswith(op.prefix) for key in written)
        ):
            raise RendezvousError("duplicate key given in transaction: written and deleted")
