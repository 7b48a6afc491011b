"""What torch's dynamic rendezvous needs of a backend, on a `KeyValueStore`: one state, written by compare-and-swap.

torch's own code (`DynamicRendezvousHandler`) decides which node joins, which waits and when a round is complete. This
module must never decide any of it. In etcd the state is JSON: nothing that comes from there is unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from swift_agent.torchrun_plugin.name import BACKEND
from swift_agent.torchrun_plugin.state import to_json, to_torch
from swift_agent.torchrun_plugin.store import EtcdRunStore, LeasedStore, connection_errors
from swift_rendezvous.store.kv import Compare, DeletePrefix, Get, KeyValue, KeyValueStore, Op, Put


def run_prefix(run_id: str) -> str:
    """All keys of a run are below it. The id is quoted, so that no id is a folder of another."""
    return f"/swift-rdzv/{quote(run_id, safe='')}/"


class SwiftEtcdBackend(RendezvousBackend):
    """Implements torch's `RendezvousBackend`; the fencing token is the revision of the state's last write."""

    def __init__(self, store: LeasedStore, run_id: str) -> None:
        if not run_id:
            raise ValueError("the run id must not be empty")
        self._store = store
        self._key = run_prefix(run_id) + "state"
        self._store_prefix = run_prefix(run_id) + "store/"

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Any] | None:
        with connection_errors():
            kv = self._store.store.get(self._key)
        return None if kv is None else (self._read(kv), kv.mod_revision)

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Write *state* if the present one has this *token*; without one, if there is none.

        Returns what is there afterwards, its token, and whether it is *state*; None when there is nothing.
        """
        if token is not None and type(token) is not int:
            current = self.get_state()
            return None if current is None else (*current, False)

        stored = to_json(state)

        def write(lease_id: int) -> Sequence[Op]:
            put = Put(self._key, stored, lease_id)
            # A new state counts its rounds from 0 again; what an earlier one has left in the store of round 0 would
            # be taken for its own.
            return [put] if token is not None else [DeletePrefix(self._store_prefix), put]

        with connection_errors():
            result = self._store.transaction(
                [Compare.mod_revision(self._key, "==", token or 0)], write, [Get(self._key)]
            )
        if result.succeeded:
            return state, result.revision, True
        kv = result.responses[0]
        if not isinstance(kv, KeyValue):
            return None
        # The answer to a first try may have been lost after it was applied: then what is there is ours.
        return self._read(kv), kv.mod_revision, result.retried and kv.value == stored

    def _read(self, kv: KeyValue) -> bytes:
        try:
            return to_torch(kv.value)
        except ValueError as error:
            raise RendezvousStateError(f"the state of this run in etcd ({kv.key}) is corrupt: {error}") from error


class SwiftEtcdHandler(RendezvousHandler):
    """torch's dynamic rendezvous; `shutdown` ends our connections as well."""

    def __init__(self, rendezvous: RendezvousHandler, store: LeasedStore) -> None:
        self._rendezvous = rendezvous
        self._store = store
        self._shut_down: bool | None = None

    def get_backend(self) -> str:
        return self._rendezvous.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return self._rendezvous.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        return self._rendezvous.next_rendezvous()

    def is_closed(self) -> bool:
        return self._rendezvous.is_closed()

    def set_closed(self) -> None:
        self._rendezvous.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self._rendezvous.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._rendezvous.get_run_id()

    def shutdown(self) -> bool:
        """Close the rendezvous for all nodes. The closed state stays for one lease, so that the others see it."""
        if self._shut_down is None:
            try:
                self._shut_down = self._rendezvous.shutdown()
            finally:
                self._store.close()
        return self._shut_down


def make_handler(kv_store: KeyValueStore, params: RendezvousParameters, lease_ttl_s: int) -> RendezvousHandler:
    """torch's handler over *kv_store*, which it owns from now on."""
    leased = LeasedStore(kv_store, lease_ttl_s)
    # torch's C++ side does not keep this object alive, the handler does.
    store: Store = EtcdRunStore(leased, run_prefix(params.run_id) + "store/", run_prefix(params.run_id) + "written/")
    backend = SwiftEtcdBackend(leased, params.run_id)
    return SwiftEtcdHandler(torchs.create_handler(store, backend, params), leased)
