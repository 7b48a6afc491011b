"""torch's rendezvous state as JSON and back, so that what is read from etcd is never unpickled.

torch hands a backend its state pickled, and unpickles what the backend returns. The pickles that pass here were made in
this process. This module must never be given bytes from a network to unpickle.
"""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from typing import Any

from swift_agent.torch_private import rendezvous as torch_rendezvous

VERSION = 1
_FIELDS = {
    "round", "complete", "deadline", "closed", "participants", "wait_list", "redundancy_list", "last_heartbeats"
}  # fmt: skip


def to_json(pickled: bytes) -> bytes:
    """*pickled*: what torch has just given. Raises ValueError for a state of another shape: a newer torch's."""
    state = vars(pickle.loads(pickled))
    if state.keys() != _FIELDS:
        strange = ", ".join(sorted(state.keys() ^ _FIELDS))
        raise ValueError(f"the rendezvous state of this torch has other fields than swift-agent knows: {strange}")
    return json.dumps(
        {
            "v": VERSION,
            "round": state["round"],
            "complete": state["complete"],
            "deadline": state["deadline"] and state["deadline"].isoformat(),
            "closed": state["closed"],
            "participants": sorted([*_node(node), rank] for node, rank in state["participants"].items()),
            "wait_list": sorted(map(_node, state["wait_list"])),
            "redundancy_list": sorted(map(_node, state["redundancy_list"])),
            "last_heartbeats": sorted([*_node(node), at.isoformat()] for node, at in state["last_heartbeats"].items()),
        }
    ).encode()


def to_torch(stored: bytes) -> bytes:
    """What torch unpickles, of what `to_json` gave. Raises ValueError for anything else."""
    try:
        data = json.loads(stored)
        if data["v"] != VERSION:
            raise ValueError(f"version {data['v']!r}, not {VERSION}")
        state = torch_rendezvous.new_rendezvous_state()
        state.round, state.complete, state.closed = int(data["round"]), bool(data["complete"]), bool(data["closed"])
        state.deadline = data["deadline"] and datetime.fromisoformat(data["deadline"])
        state.participants = {_read_node(node): int(rank) for *node, rank in data["participants"]}
        state.wait_list = set(map(_read_node, data["wait_list"]))
        state.redundancy_list = set(map(_read_node, data["redundancy_list"]))
        state.last_heartbeats = {_read_node(node): datetime.fromisoformat(at) for *node, at in data["last_heartbeats"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a rendezvous state: {error!r}") from error
    return pickle.dumps(state)


def _node(node: Any) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _read_node(values: Any) -> Any:
    address, pid, local_id = values
    return torch_rendezvous.rendezvous_node(str(address), int(pid), int(local_id))
