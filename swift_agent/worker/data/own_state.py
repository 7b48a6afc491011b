"""Numbers that a sampler, a stream or a loader of the script's own keeps from pass to pass: in a replacement they begin
again.

What a replacement is given is compared with what its predecessor was given (`given`). Of a pass of which that one had
not been given anything there is nothing to compare with; so it counts whether the others have seen such a number
change.

    each pass, with its first index or batch: numbers --> not those of the first pass over this loader --> `changing`

This module must never change an object that it looks at, nor keep it alive.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from swift_agent.worker.data import loaders

# What these count is positioned by `loaders`, or by `set_epoch`.
_KNOWN = ("torch", "accelerate", "lightning", "lightning_fabric", "timm", "torchdata", "transformers", "datasets")
_NUMBERS = (bool, int, float, str)
_SIZED = (list, dict, set, tuple, deque)
Numbers = dict[str, Any]


def held_weakly(value: Any) -> Callable[[], Any]:
    """What gives *value* for as long as somebody has it."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value  # as are Python's own iterators, which hold nothing once they have ended


def _objects(loader: Any) -> Iterator[Any]:
    for part in loaders.parts(loader):
        yield part
        dataset = getattr(part, "__dict__", {}).get("dataset")
        if isinstance(dataset, IterableDataset):
            yield dataset


def numbers_of(loader: Any) -> Numbers:
    """By class and attribute; of what has a size, that."""
    found: Numbers = {}
    for one in _objects(loader):
        kind = type(one)
        if kind.__module__.partition(".")[0] in _KNOWN:
            continue
        for name, value in getattr(one, "__dict__", {}).items():
            if type(value) in _NUMBERS:
                found[f"{kind.__name__}.{name}"] = value
            elif type(value) in _SIZED:
                found[f"{kind.__name__}.{name}"] = len(value)
    return found


class OwnState:
    """Of one process. *changing*: the numbers that were others in a later pass than in the first one."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[Numbers, int]] = {}  # by id of the loader
        self.changing: set[str] = set()

    def knows(self, loader: Any) -> bool:
        """Whether a pass over it has begun in this process."""
        return id(loader) in self._first

    def look(self, loader: Any, epoch: int) -> None:
        """A pass over *loader* has given its first index or batch; *epoch*: what it was told by `set_epoch`."""
        now = numbers_of(loader)
        if id(loader) not in self._first:
            try:
                weakref.finalize(loader, self._first.pop, id(loader), None).atexit = False
            except TypeError:
                return  # a list, which has nothing of its own
            self._first[id(loader)] = now, epoch
            return
        first, first_epoch = self._first[id(loader)]
        for name, value in now.items():
            was_told = value == epoch and first.get(name) == first_epoch
            if not was_told and first.get(name) != value:
                self.changing.add(name)
