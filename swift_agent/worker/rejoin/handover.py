"""From a worker of a drained node to its successor of the same rank: a TCP connection of their own.

The old worker has left the process groups, and both have the same rank, so no group can carry this. They find each
other through the generation's c10d store, which only workers of the job can read; there the successor finds a ticket
that is good for this connection only. What travels is what a replica would
send (`swift_recovery.transfer.replica`). Must never decide who hands over to whom; that is the plan's.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from swift_agent.wire.store_client import StoreClient
from swift_recovery.transfer.socket_link import Check, Listener, SocketLink, connected


@contextlib.contextmanager
def offered(store: StoreClient, rank: int, layouts: list[Any], check: Check) -> Iterator[SocketLink]:
    """The old worker's end: tell where it listens, and the DDP layouts of *rank*; the link to the successor."""
    with Listener(store.local_address) as listener:
        PrefixStore("layouts", store).set(str(rank), json.dumps(layouts))
        PrefixStore("handover", store).set(str(rank), listener.where)
        with listener.accepted(check) as link:
            yield link


@contextlib.contextmanager
def from_predecessor(store: StoreClient, rank: int, check: Check) -> Iterator[SocketLink]:
    """The successor's end: the link to the old worker of *rank*. Raises `dist.DistStoreError` if *store* is cut."""
    where = PrefixStore("handover", store).get(str(rank))
    with connected(where, f"the old worker of rank {rank}", check) as link:
        yield link


