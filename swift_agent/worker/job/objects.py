"""Objects that a script takes from another rank after its loop has begun (`broadcast_object_list`,
`scatter_object_list`).

They are kept. Where an iteration or section is run for its result only, nobody sends them: they are given again, or,
where they are not known, all workers start again. (Torch would read the size of what comes from memory that nobody has
written to.) This module must never make up an object.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from swift_agent.worker.in_place import InPlace
from swift_agent.worker.line import in_script
from swift_agent.worker.tracked.loop_state import Place

NAMES = ("broadcast_object_list", "scatter_object_list")
_FILLED = {"broadcast_object_list": "object_list", "scatter_object_list": "scatter_object_output_list"}


class Objects:
    """One per process. *in_place*: of its loop."""

    def __init__(self, place: Place, in_place: InPlace) -> None:
        self._place, self._in_place = place, in_place
        self._script = threading.get_ident()

    def make(self, name: str, call: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Operation *name*, by *call*, or with what it gave before."""
        tracked, rank, ranks = self._place.tracked, self._place.rank, ranks_of(args, named)
        is_ours = threading.get_ident() == self._script and tracked is not None
        if name not in NAMES or not is_ours or rank not in ranks or len(ranks) == 1:
            return call(*args, **named)
        assert tracked is not None
        source = source_of(name, args, named, ranks)
        filled = args[0] if args else named[_FILLED[name]]
        if not (self._in_place.is_dry_run or self._place.is_past_section):
            result = call(*args, **named)
            if name == "broadcast_object_list":
                tracked.objects.keep_for_all(filled)
            elif source == rank:
                given = args[1] if len(args) > 1 else named["scatter_object_input_list"]
                tracked.objects.keep({each: [one] for each, one in zip(ranks, given, strict=True)})
            else:
                tracked.objects.keep({rank: filled[:1]})
            return result
        known = tracked.objects.next(rank)
        if source == rank:
            return call(*args, **named)  # its own: nothing comes
        if known is not None and len(known) <= len(filled):
            filled[: len(known)] = known
            return None
        if not self._in_place.is_dry_run:
            return call(*args, **named)  # the groups are stopped, and say so
        self._in_place.give_up(
            f"{name} ({in_script.place_of(sys._getframe())}): the others are past it, so nobody sends rank {source}'s "
            "objects, and none are kept (numbers, texts and containers are, up to 10,000 items and 1 MiB). Have each "
            "rank work them out by itself, or send tensors"
        )


def ranks_of(args: Sequence[Any], named: Mapping[str, Any]) -> list[int]:
    """Global ranks of the group that a collective is given; none of one that torch would do nothing with, or does not
    know by itself."""
    outside = dist.GroupMember.NON_GROUP_MEMBER
    given = [one for one in (named.get("group"), *args) if one is outside or isinstance(one, dist.ProcessGroup)]
    group: Any = given[0] if given else dist.group.WORLD
    if group is None or group is outside:
        return []
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        return []


def source_of(name: str, args: Sequence[Any], named: Mapping[str, Any], ranks: Sequence[int]) -> int:
    """The global rank that sends."""
    if named.get("group_src") is not None:
        return ranks[int(named["group_src"])]
    position = 1 if name == "broadcast_object_list" else 2
    given = named.get("src", args[position] if len(args) > position else None)
    source: int = ranks[0] if given is None else given
    return source
