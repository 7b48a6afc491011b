"""A c10d store in etcd, for what torchrun's agents tell each other; workers never see it.

Everything is written under a lease, so that nothing is left in etcd for ever. This module must never write without one.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store.kv import (
    Compacted,
    Compare,
    Get,
    KeepAlive,
    KeyValue,
    KeyValueStore,
    LeaseLost,
    Op,
    Put,
    TransactionResult,
)

_MAX_OPS = 100  # of one transaction; etcd allows 128
_LEASE_TRIES = 3
_MAX_PAUSE_S = 0.5


@contextlib.contextmanager
def connection_errors() -> Iterator[None]:
    """Turn errors of our store into the one that torch knows."""
    try:
        yield
    except RendezvousError as error:
        raise RendezvousConnectionError(str(error)) from error


class LeasedStore:
    """A store, and the lease of this node: made with the first write, kept alive until `close`.

    A lease that etcd has given up (this node was cut off or frozen) is replaced by the next write.
    """

    def __init__(self, store: KeyValueStore, ttl_s: int) -> None:
        self.store = store
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._lease_id = 0
        self._keep_alive: KeepAlive | None = None
        self._closed = False

    def transaction(
        self, compare: Sequence[Compare], success: Callable[[int], Sequence[Op]], failure: Sequence[Op] = ()
    ) -> TransactionResult:
        """As `KeyValueStore.transaction`; *success* is called with the lease to write under."""
        for _ in range(_LEASE_TRIES):
            lease_id = self._lease()
            try:
                return self.store.transaction(compare, success(lease_id), failure)
            except LeaseLost:
                self._forget(lease_id)
        raise LeaseLost("the lease was lost again and again")

    def close(self) -> None:
        """Let the lease run out, its keys with it, and close the store. May be called twice."""
        with self._lock:
            self._closed = True
            keep_alive, self._keep_alive = self._keep_alive, None
        if keep_alive is not None:
            keep_alive.stop()
        self.store.close()

    def _lease(self) -> int:
        with self._lock:
            if self._closed:
                raise RendezvousError("this rendezvous was shut down")
            if not self._lease_id:
                lease = self.store.grant_lease(self._ttl_s)
                self._keep_alive = lease.keep_alive(lambda reason: self._forget(lease.id))
                self._lease_id = lease.id
            return self._lease_id

    def _forget(self, lease_id: int) -> None:
        with self._lock:
            if self._lease_id != lease_id:
                return
            self._lease_id = 0
            keep_alive, self._keep_alive = self._keep_alive, None
        if keep_alive is not None:
            keep_alive.stop()


class EtcdRunStore(Store):
    """A c10d store below *prefix*; each of these objects notes its last change of a key below *notes_prefix*.

    Raises `dist.DistStoreError` when the time of a wait is up, `RendezvousConnectionError` when etcd cannot be used.
    Usable from any number of threads. The Python object must outlive all that torch makes of it (PrefixStore): C++
    does not keep it alive. Queues are not supported.
    """

    def __init__(self, leased: LeasedStore, prefix: str, notes_prefix: str, timeout: timedelta | None = None) -> None:
        super().__init__()
        self._leased = leased
        self._prefix = prefix
        self._note = f"{notes_prefix}{uuid.uuid4().hex}"
        self._change_lock = threading.Lock()
        self._change_numbers = itertools.count(1)
        if timeout is not None:
            self.set_timeout(timeout)

    def clone(self) -> EtcdRunStore:
        return self  # any number of threads may use it

    # -- reads -------------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait_for(keys, self._default())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_for(keys, self._default() if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        with connection_errors():
            return self._read(keys)[0].keys() >= set(keys)

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        with connection_errors():
            return [kv.key.removeprefix(self._prefix) for kv in self._leased.store.get_prefix(self._prefix)[0]]

    def has_extended_api(self) -> bool:
        return True

    # -- writes ------------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = list({self._prefix + key: _bytes(value) for key, value in zip(keys, values, strict=True)}.items())
        with connection_errors():
            for at in range(0, len(pairs), _MAX_OPS):
                self._leased.transaction([], partial(_puts, pairs[at : at + _MAX_OPS]))

    def add(self, key: str, amount: int) -> int:
        _, new = self._change(key, lambda old: b"%d" % (int(old or b"0") + amount))
        return int(new or b"0")

    def append(self, key: str, value: str | bytes) -> None:
        self._change(key, lambda old: (old or b"") + _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Returns what is there afterwards; *expected* when there is nothing."""
        wanted = _bytes(expected)
        old, new = self._change(key, lambda old: _bytes(desired) if (old or b"") == wanted else None)
        if new is not None:
            return new
        return wanted if old is None else old

    def delete_key(self, key: str) -> bool:
        with connection_errors():
            return self._leased.store.delete(self._prefix + key)

    # The names by which a PrefixStore over this one calls them.
    getNumKeys = num_keys
    deleteKey = delete_key

    def _change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> tuple[bytes | None, bytes | None]:
        """Replace a value by what *change* makes of it, exactly once; returns the old one and the new one.

        *change* may be called several times, and returns None to leave the value alone.
        """
        name = self._prefix + key
        # One at a time: the note below tells of the last one only.
        with connection_errors(), self._change_lock:
            number = b"%d" % next(self._change_numbers)
            kv = self._leased.store.get(name)
            pause_s = 0.002
            while True:
                old = None if kv is None else kv.value
                new = change(old)
                if new is None:
                    return old, None
                result = self._leased.transaction(
                    [Compare.mod_revision(name, "==", 0 if kv is None else kv.mod_revision)],
                    partial(_puts, [(name, new), (self._note, number)]),
                    [Get(name), Get(self._note)],
                )
                if result.succeeded:
                    return old, new
                current, note = result.responses
                # A try whose answer was lost may have been applied, and the second try then finds its condition
                # broken by the first. To do it again would count twice.
                if isinstance(note, KeyValue) and note.value == number:
                    return old, new
                kv = current if isinstance(current, KeyValue) else None
                # Many nodes count in one key at the end of a job: the loser stands back for a moment.
                time.sleep(random.uniform(0, pause_s))
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    # -- waiting -----------------------------------------------------------------------------------------------

    def _default(self) -> timedelta:
        # Kept by torch's base class, where a PrefixStore over this one sets it as well.
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]
        return timeout

    def _read(self, keys: Sequence[str]) -> tuple[dict[str, bytes], int]:
        """Those of *keys* that are there, and a revision after which none of the others was seen."""
        found: dict[str, bytes] = {}
        first_revision = 0
        for at in range(0, len(keys), _MAX_OPS):
            ops = [Get(self._prefix + key) for key in keys[at : at + _MAX_OPS]]
            result = self._leased.store.transaction([], ops)
            first_revision = first_revision or result.revision
            for response in result.responses:
                if isinstance(response, KeyValue):
                    found[response.key.removeprefix(self._prefix)] = response.value
        return found, first_revision

    def _wait_for(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        end_s = time.monotonic() + timeout.total_seconds()
        with connection_errors():
            while True:
                found, revision = self._read(keys)
                missing = [key for key in keys if key not in found]
                if not missing:
                    return [found[key] for key in keys]
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    some = ", ".join(missing[:5])
                    raise dist.DistStoreError(f"nobody has set {some} within {timeout.total_seconds():g} s")
                self._await_write(missing[0], revision + 1, left_s)

    def _await_write(self, key: str, start_revision: int, timeout_s: float) -> None:
        with self._leased.store.watch_prefix(self._prefix + key, start_revision) as watch:
            timer = threading.Timer(timeout_s, watch.cancel)
            timer.daemon = True
            timer.start()
            try:
                next(watch, None)
            except Compacted:
                pass  # the caller reads again
            finally:
                timer.cancel()


def _puts(pairs: Sequence[tuple[str, bytes]], lease_id: int) -> list[Op]:
    return [Put(key, value, lease_id) for key, value in pairs]


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
