"""A synchronous client of etcd's v3 API: the `KeyValueStore` of a real job.

Must never hold policy: what keys mean is decided in `membership` and `keys`. Importing it starts no thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from swift_rendezvous.store._etcd_lease import EtcdKeepAlive, EtcdLease
from swift_rendezvous.store._etcd_members import MembersWatch
from swift_rendezvous.store._etcd_proto import (
    COMPACT,
    DELETE_RANGE,
    LEASE_GRANT,
    PUT,
    RANGE,
    TXN,
    decode_key_value,
    decode_responses,
    encode_key,
    prefix_range,
    transaction_request,
)
from swift_rendezvous.store._etcd_transport import Transport
from swift_rendezvous.store._etcd_watch import EtcdWatch, Watchdog
from swift_rendezvous.store.etcd_config import DEFAULT_PORT, EtcdConfig, parse_endpoints
from swift_rendezvous.store.kv import Compare, KeyValue, Op, TransactionResult
from swift_rendezvous.store.tenure import Event

__all__ = ["DEFAULT_PORT", "EtcdConfig", "EtcdKeepAlive", "EtcdLease", "EtcdStore", "EtcdWatch", "parse_endpoints"]


class EtcdStore:
    """Implements `kv.KeyValueStore` on a cluster of etcd 3.4 or later.

    Endpoints are tried in turn: a second each in the first round, longer in later ones, until the deadline
    (``config.timeout_s``, or *timeout_s* where a method takes one). Tokens are renewed as needed. Nothing is sent
    before the first call. Usable from any number of threads; after a fork only in the process that made it (children
    started by exec do not matter).

    **A write whose answer was lost is sent again, so it may have been applied twice.** Guard writes that matter by
    conditions, and see `TransactionResult.retried`.

    Names are as in the `etcd3` package (``get put delete delete_prefix get_prefix transaction
    lease watch watch_prefix close``), with these differences: `get` returns one `KeyValue` or None, `get_prefix`
    a list and the revision; conditions and operations are the classes of `kv`, not ``client.transactions``; `watch`
    and `watch_prefix` return one iterable object with ``cancel()`` that yields `WatchResponse`, and survive their
    server; `lease` takes no id; errors are those of `kv`.
    """

    def __init__(self, config: EtcdConfig, asked: Callable[[str, float, bool], None] | None = None) -> None:
        """*asked*: see `Transport`."""
        self.config = config
        self._transport = Transport(config, asked)
        self._watchdog = Watchdog(self._transport)

    def __enter__(self) -> EtcdStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.closed.set()  # first: a watch that is cancelled or broken by this must not reconnect
        self._watchdog.close()
        self._transport.close()

    # -- reads ---------------------------------------------------------------------------------------------------

    def get(self, key: str, *, timeout_s: float | None = None) -> KeyValue | None:
        response = self._transport.call(RANGE, RANGE.request(key=encode_key(key)), timeout_s).response
        return decode_key_value(response.kvs[0]) if response.kvs else None

    def get_prefix(
        self, prefix: str, *, before: str | None = None, limit: int = 0, timeout_s: float | None = None
    ) -> tuple[list[KeyValue], int]:
        request = RANGE.request(**prefix_range(prefix, before), limit=limit)
        response = self._transport.call(RANGE, request, timeout_s).response
        return [decode_key_value(message) for message in response.kvs], response.header.revision

    # -- writes --------------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes, lease_id: int = 0, *, timeout_s: float | None = None) -> int:
        request = PUT.request(key=encode_key(key), value=value, lease=lease_id)
        revision: int = self._transport.call(PUT, request, timeout_s).response.header.revision
        return revision

    def delete(self, key: str, *, timeout_s: float | None = None) -> bool:
        """See `kv.KeyValueStore`. False also when a first try, whose answer was lost, has deleted it."""
        request = DELETE_RANGE.request(key=encode_key(key))
        return bool(self._transport.call(DELETE_RANGE, request, timeout_s).response.deleted)

    def delete_prefix(self, prefix: str, *, timeout_s: float | None = None) -> int:
        request = DELETE_RANGE.request(**prefix_range(prefix))
        deleted: int = self._transport.call(DELETE_RANGE, request, timeout_s).response.deleted
        return deleted

    def transaction(
        self,
        compare: Sequence[Compare],
        success: Sequence[Op],
        failure: Sequence[Op] = (),
        *,
        timeout_s: float | None = None,
    ) -> TransactionResult:
        answer = self._transport.call(TXN, transaction_request(compare, success, failure), timeout_s)
        response = answer.response
        ops = success if response.succeeded else failure
        return TransactionResult(
            response.succeeded, response.header.revision, decode_responses(ops, response.responses), answer.retried
        )

    def compact(self, revision: int) -> None:
        """Forget the history before *revision*. For operators and tests; a cluster usually does it by itself."""
        self._transport.call(COMPACT, COMPACT.request(revision=revision, physical=True))

    # -- leases, watches, locks ----------------------------------------------------------------------------------

    def grant_lease(self, ttl_s: int) -> EtcdLease:
        """See `kv.KeyValueStore`. etcd raises a TTL below 1.5 election timeouts: 1 becomes 2 s by default."""
        asked_s = time.monotonic()
        response = self._transport.call(LEASE_GRANT, LEASE_GRANT.request(TTL=ttl_s)).response
        return EtcdLease(self._transport, response.ID, response.TTL, asked_s)

    lease = grant_lease

    def watch_prefix(self, prefix: str, start_revision: int | None = None, *, before: str | None = None) -> EtcdWatch:
        return self._watch(prefix, False, start_revision, before)

    def watch(self, key: str, start_revision: int | None = None) -> EtcdWatch:
        """As `watch_prefix`, for one key."""
        return self._watch(key, True, start_revision)

    def _watch(
        self, key: str, single_key: bool, start_revision: int | None, before: str | None = None
    ) -> EtcdWatch:
        if start_revision is None:
            # "From now on" is fixed here and not by the stream, which may have to be opened more than once.
            keys = {"key": encode_key(key)} if single_key else prefix_range(key)
            answer = self._transport.call(RANGE, RANGE.request(**keys, count_only=True))
            start_revision = answer.response.header.revision + 1
        return EtcdWatch(self._transport, self._watchdog, key, single_key, start_revision, before)

    def watch_members(self, tell: Callable[[Event], object], in_doubt: Callable[[], bool]) -> MembersWatch:
        """What `tenure` has to know of the members, as long as it runs; they are asked while *in_doubt* says so."""
        return MembersWatch(self._transport, tell, in_doubt)
