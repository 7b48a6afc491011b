"""Plans, from what the nodes of a job hold, how it goes on with another number of ranks. Pure.

Old ranks mean nothing to the new ones: all hold replicas of one state, so it only matters which *node* has the newest.
There one worker keeps it in a file, or a file of an earlier attempt has it already; the new workers of that node load
it, those of other nodes get it from them. This module must never look at tensors, clocks or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_recovery.planning.plan import Plan

FILE = -1
"""In the place of a local rank: the file of the node has the state."""


@dataclass(frozen=True)
class Held:
    """A state of *iteration* on a node: in the worker of *local_rank*, or in its `FILE`. *is_mixed*: a part of the next
    update is in it, which that worker takes back before it keeps the state. *is_full*: another worker of the node could
    not keep its own there."""

    local_rank: int
    iteration: int
    sections: int = 0
    is_mixed: bool = False
    is_full: bool = False

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value or not name.startswith("is_")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Held:
        flags = {name: bool(data.get(name, False)) for name in ("is_mixed", "is_full")}
        return cls(int(data["local_rank"]), int(data["iteration"]), int(data["sections"]), **flags)


def make_resize_plan(held: Mapping[int, Iterable[Held]], sizes: Sequence[int]) -> Plan:
    """Plan for new workers: slot i has *sizes[i]* of them. *held*: by new slot, what its node has."""
    by_slot = {slot: list(ones) for slot, ones in held.items()}
    newest = max((one.iteration for ones in by_slot.values() for one in ones), default=None)
    if newest is None:
        return Plan("restart", "no worker holds a state that could go on with another number of ranks")
    keepers: dict[int, int] = {}
    sections = 0
    newest_of = {slot: [one for one in ones if one.iteration == newest] for slot, ones in sorted(by_slot.items())}
    everyone = [one for ones in newest_of.values() for one in ones]
    all_full = all(one.is_full for one in everyone)
    all_mixed = all(one.is_mixed for one in everyone if one.is_full == all_full)
    for slot, ones in newest_of.items():
        sound = [one for one in ones if one.is_full == all_full and one.is_mixed == all_mixed]
        # What is undone differs by roundings from node to node: all get what one of them has then.
        if sound and not (all_mixed and keepers):
            keepers[slot] = min(one.local_rank for one in sound)  # a file first
        sections = max(sections, *(one.sections for one in ones), 0)
    slot_of = [slot for slot, size in enumerate(sizes) for _ in range(size)]
    ranks = range(len(slot_of))
    loaded = [rank for rank in ranks if slot_of[rank] in keepers]
    others = [rank for rank in ranks if slot_of[rank] not in keepers]
    sources = {rank: loaded[index % len(loaded)] for index, rank in enumerate(others)}
    layouts = {rank: loaded[0] for rank in ranks if rank != loaded[0]}
    new = "1 new rank goes on" if len(ranks) == 1 else f"{len(ranks)} new ranks go on"
    why = f"{new} with iteration {newest}, which the nodes of slots {sorted(keepers)} keep"
    if all_mixed:
        why += "; what all have made of the update after it is taken back there"
    return Plan("copy", why, newest, sections, sources, layouts, keepers=keepers, loads=tuple(loaded))
