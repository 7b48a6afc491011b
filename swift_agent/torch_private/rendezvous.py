"""Private parts of torch's dynamic rendezvous: an empty state, and a node in one.

It must never fill or change a state: that is `torchrun_plugin.state`.
"""

from __future__ import annotations

from typing import Any


def new_rendezvous_state() -> Any:
    """The state of torch's dynamic rendezvous, before any node has joined."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    return dynamic_rendezvous._RendezvousState()


def rendezvous_node(address: str, pid: int, local_id: int) -> Any:
    """A node in such a state."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    return dynamic_rendezvous._NodeDesc(address, pid, local_id)
