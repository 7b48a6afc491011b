"""The store that membership is kept in: its contract, its values and its errors.

Implemented by `etcd.EtcdStore` and, for tests in virtual time, by `memory.MemoryStore`. Must never import either, nor
anything that needs a network.

Keys are text, values are bytes. Every change gives the whole store a new revision, a number that only grows; what one
transaction changes has one revision. Semantics are those of etcd's v3 API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from swift_rendezvous.errors import RendezvousError


class StoreUnavailable(RendezvousError):
    """No endpoint answered before the deadline. A write may or may not have been applied."""


class AuthenticationFailed(RendezvousError):
    """Wrong user or password, or a server that wants them and got none."""


class PermissionDenied(RendezvousError):
    """The user may not touch this key."""


class RequestRefused(RendezvousError):
    """This request will never be taken, from any client and however often: it is too large or malformed."""


class LeaseLost(RendezvousError):
    """The lease expired or was revoked; its keys are gone."""


class Compacted(RendezvousError):
    """The revisions asked for were compacted away: list again and watch from the revision of that list."""

    def __init__(self, message: str, compact_revision: int = 0) -> None:
        super().__init__(message)
        self.compact_revision = compact_revision


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as of ``mod_revision``.

    ``version`` counts the writes since the key was created; ``lease_id`` is 0 without a lease. In the event of a
    deletion only ``key`` and ``mod_revision`` are set.
    """

    key: str
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    version: int = 0
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One key was written or deleted, at ``kv.mod_revision``."""

    kind: Literal["put", "delete"]
    kv: KeyValue


@dataclass(frozen=True, slots=True)
class WatchResponse:
    """Events in the order of their revisions, never empty.

    ``revision`` is that of the last event: everything up to and including it has been delivered, so
    ``watch_prefix(prefix, revision + 1)`` goes on from here. A revision is never split over two responses.
    """

    revision: int
    events: tuple[Event, ...]


Operator = Literal["==", "!=", "<", ">"]
Target = Literal["version", "create", "mod", "value", "lease"]


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction. A missing key has the revisions, version and lease 0, and equals no value."""

    target: Target
    key: str
    operator: Operator
    operand: int | bytes

    def __post_init__(self) -> None:
        if self.operator not in ("==", "!=", "<", ">"):
            raise ValueError(f"operator {self.operator!r} is none of == != < >")

    @classmethod
    def version(cls, key: str, operator: Operator, operand: int) -> Compare:
        return cls("version", key, operator, operand)

    @classmethod
    def create_revision(cls, key: str, operator: Operator, operand: int) -> Compare:
        return cls("create", key, operator, operand)

    @classmethod
    def mod_revision(cls, key: str, operator: Operator, operand: int) -> Compare:
        return cls("mod", key, operator, operand)

    @classmethod
    def value(cls, key: str, operator: Operator, operand: bytes) -> Compare:
        return cls("value", key, operator, operand)

    @classmethod
    def lease(cls, key: str, operator: Operator, operand: int) -> Compare:
        return cls("lease", key, operator, operand)

    @classmethod
    def exists(cls, key: str) -> Compare:
        return cls("create", key, ">", 0)

    @classmethod
    def absent(cls, key: str) -> Compare:
        return cls("create", key, "==", 0)


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key. One transaction may write a key once."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    key: str


@dataclass(frozen=True, slots=True)
class DeletePrefix:
    prefix: str


@dataclass(frozen=True, slots=True)
class Get:
    key: str


@dataclass(frozen=True, slots=True)
class GetPrefix:
    prefix: str


Op = Put | Delete | DeletePrefix | Get | GetPrefix
# Put -> None; Delete and DeletePrefix -> number of deleted keys; Get -> the key or None; GetPrefix -> keys in order.
OpResponse = None | int | KeyValue | tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """Which branch ran, the store's revision after it, and one response per operation of that branch.

    ``retried`` says that an earlier try ended without an answer and may have been applied: then ``succeeded == False``
    can mean that our own first try has already changed what was compared.
    """

    succeeded: bool
    revision: int
    responses: tuple[OpResponse, ...]
    retried: bool = False


class KeepAlive(Protocol):
    """Keeps a lease alive until stopped."""

    def stop(self) -> None:
        """Refresh no more; returns at once. The lease then lives on for its TTL. May be called twice."""

    def confirmed_s(self) -> float:
        """When the last refresh that was answered was sent (or the lease asked for), by the monotonic clock."""

    def overdue_s(self) -> float:
        """Seconds since when the lease may have expired because no refresh was confirmed; 0.0 while it is alive."""

    def unbroken_s(self) -> float:
        """Seconds since this began, or since a refresh failed or took longer than a second: for how long the store has
        been there without a break."""


class Lease(Protocol):
    """Keys written with ``lease_id=lease.id`` are deleted together when the lease expires or is revoked."""

    @property
    def id(self) -> int: ...

    @property
    def ttl_s(self) -> int:
        """The granted time to live, which may be longer than the one asked for (etcd: above 1.5 election timeouts)."""

    def refresh(self) -> int:
        """Start the TTL again and return it. Raises LeaseLost when there is nothing left to refresh."""

    def revoke(self) -> None:
        """Delete the lease and its keys; does nothing when it is gone already."""

    def remaining_ttl_s(self) -> float:
        """Time that the server still gives it, in etcd rounded down to whole seconds; 0.0 when it is gone."""

    def keep_alive(self, on_lost: Callable[[str], None] | None = None) -> KeepAlive:
        """Refresh every third of the TTL in a daemon thread until stopped.

        *on_lost* is called once, in that thread, with the reason, when the store says that the lease is gone. A store
        that cannot be reached is no loss: refreshing goes on, and `KeepAlive.overdue_s` tells how late it is.
        """


class Watch(Protocol):
    """An iterator of responses; a context manager that cancels at its end.

    Iteration ends after `cancel` (from any thread, within milliseconds) or `close` of the store, and raises
    `Compacted`, `PermissionDenied` or `AuthenticationFailed`. One thread iterates.
    """

    def __iter__(self) -> Iterator[WatchResponse]: ...
    def __next__(self) -> WatchResponse: ...
    def __enter__(self) -> Watch: ...
    def __exit__(self, *exc_info: object) -> None: ...
    def cancel(self) -> None: ...


class KeyValueStore(Protocol):
    """What membership needs of a store. All methods may be called from any thread.

    Every method raises `StoreUnavailable`, `AuthenticationFailed`, `PermissionDenied` or plain `RendezvousError`. A
    write that had to be sent again after a lost answer may have been applied twice, so writes that matter are
    transactions whose conditions fail the second time.
    """

    def get(self, key: str) -> KeyValue | None:
        """The key as of now (linearizable), or None."""

    def get_prefix(self, prefix: str, *, before: str | None = None, limit: int = 0) -> tuple[list[KeyValue], int]:
        """All keys that start with *prefix*, in order, and the store's revision: watch from that revision + 1.

        *before*: as in `watch_prefix`; *limit*: so many keys at most, 0: all.
        """

    def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Write the key, return the new revision. Raises LeaseLost when there is no such lease."""

    def delete(self, key: str) -> bool:
        """Delete the key; False when there was none."""

    def delete_prefix(self, prefix: str) -> int:
        """Delete all keys that start with *prefix*, return how many."""

    def transaction(self, compare: Sequence[Compare], success: Sequence[Op],
                    failure: Sequence[Op] = ()) -> TransactionResult:
        """Run *success* when all conditions hold, else *failure*, atomically and under one revision."""

    def grant_lease(self, ttl_s: int) -> Lease: ...

    def watch_prefix(self, prefix: str, start_revision: int | None = None, *, before: str | None = None) -> Watch:
        """All changes under *prefix* from *start_revision* on, by default from this call on.

        *before*: a key that starts with *prefix*; only changes of smaller keys are wanted.
        """

    def close(self) -> None:
        """End all watches, refresh no lease any more, free the connections. Leases and keys stay."""


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all keys that start with *prefix*; ``b"\\0"`` is the end of all keys (etcd's range_end)."""
    for index in range(len(prefix) - 1, -1, -1):
        if prefix[index] < 0xFF:
            return prefix[:index] + bytes([prefix[index] + 1])
    return b"\0"
