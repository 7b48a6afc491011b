"""Leases of etcd and the thread that keeps one alive.

Must never call a lease lost because the store is out of reach: only the store knows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store._etcd_proto import LEASE_KEEP_ALIVE, LEASE_REVOKE, LEASE_TIME_TO_LIVE
from swift_rendezvous.store._etcd_transport import TRY_S, Transport, log
from swift_rendezvous.store.kv import LeaseLost, StoreUnavailable
from swift_rendezvous.threads import only_logged, start, thread


class EtcdLease:
    """Implements `kv.Lease`.

    etcd deletes the keys 0.2 s after the TTL is over. A change of its leader starts all TTLs again, so an expiry may
    come up to twice as late: a lease is the backstop of failure detection, not its fast path.
    """

    def __init__(self, transport: Transport, lease_id: int, ttl_s: int, granted_s: float) -> None:
        self._transport = transport
        self.id = lease_id
        self.ttl_s = ttl_s
        # Taken before the request was sent: the server cannot have counted from earlier.
        self.confirmed_s = granted_s

    def refresh(self, timeout_s: float | None = None) -> int:
        """See `kv.Lease`; *timeout_s* is the overall deadline of this call."""
        asked_s = time.monotonic()
        request = LEASE_KEEP_ALIVE.request(ID=self.id)
        ttl_s: int = self._transport.call(LEASE_KEEP_ALIVE, request, timeout_s).response.TTL
        if ttl_s <= 0:
            raise LeaseLost(f"lease {self.id:x} expired or was revoked")
        self.confirmed_s = asked_s
        return ttl_s

    def revoke(self) -> None:
        with contextlib.suppress(LeaseLost):
            self._transport.call(LEASE_REVOKE, LEASE_REVOKE.request(ID=self.id))

    def remaining_ttl_s(self) -> float:
        request = LEASE_TIME_TO_LIVE.request(ID=self.id)
        return float(max(0, self._transport.call(LEASE_TIME_TO_LIVE, request).response.TTL))

    def keep_alive(self, on_lost: Callable[[str], None] | None = None) -> EtcdKeepAlive:
        return EtcdKeepAlive(self._transport, self, on_lost)


class EtcdKeepAlive:
    """Implements `kv.KeepAlive`."""

    def __init__(self, transport: Transport, lease: EtcdLease, on_lost: Callable[[str], None] | None) -> None:
        self._closed = transport.closed
        self._lease = lease
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._broken_s = time.monotonic()
        # The owner of this lease gets another one, as after any loss of it.
        start(thread(f"etcd-lease-{lease.id:x}", self._run, on_lost or only_logged))

    def stop(self) -> None:
        self._stop.set()

    def confirmed_s(self) -> float:
        return self._lease.confirmed_s

    def overdue_s(self) -> float:
        return max(0.0, time.monotonic() - self._lease.confirmed_s - self._lease.ttl_s)

    def unbroken_s(self) -> float:
        return time.monotonic() - self._broken_s

    def _run(self) -> None:
        interval_s = self._lease.ttl_s / 3
        said: str | None = None
        while not self._stop.wait(interval_s):
            if self._closed.is_set():
                return
            asked_s = time.monotonic()
            try:
                # The deadline leaves time to try the other endpoints before the lease is over.
                self._lease.refresh(timeout_s=max(TRY_S, self._lease.ttl_s / 2))
            except LeaseLost as error:
                if not self._stop.is_set() and self._on_lost is not None:
                    self._on_lost(str(error))
                return
            except RendezvousError as error:
                if self._stop.is_set() or self._closed.is_set():
                    return
                self._broken_s = time.monotonic()
                # One line per outage, not one per try.
                if type(error).__name__ != said:
                    said = type(error).__name__
                    log.warning("lease %x cannot be refreshed, trying on: %s", self._lease.id, error)
                interval_s = 0.0 if isinstance(error, StoreUnavailable) else min(1.0, self._lease.ttl_s / 3)
            else:
                said = None
                interval_s = self._lease.ttl_s / 3
                if time.monotonic() - asked_s > TRY_S:
                    self._broken_s = time.monotonic()
