"""Batches of a loader from a given position on, without loading those before it.

A map-style `DataLoader` is positioned by skipping indices: its sampler is run, its data set is not touched. Anything
else that can be iterated is read ahead and thrown away, which costs the time to load it; an object with `state_dict`
(such as a stateful loader) should be tracked instead. This module must never seed anything: the caller has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset


class _Skipping:
    """A sampler without its first *count* entries, once: a loader with persistent workers asks the same one in every
    pass.
    """

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self._sampler, self._count = sampler, count

    def __iter__(self) -> Iterator[Any]:
        # Runs when the first index is asked for: a loader with worker processes makes two iterators and uses the
        # second.
        count, self._count = self._count, 0
        yield from itertools.islice(iter(self._sampler), count, None)

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._count)  # type: ignore[arg-type]


def iterate(loader: Iterable[Any], skip: int) -> Iterator[Any]:
    """Iterate *loader*, leaving out its first *skip* batches."""
    if skip == 0:
        return iter(loader)
    # Persistent workers that run already keep the sampler they were started with, so it cannot be exchanged.
    running = getattr(loader, "_iterator", None) is not None
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and not running:
        return _skip_indices(loader, skip)
    iterator = iter(loader)
    for _ in itertools.islice(iterator, skip):
        pass
    return iterator


def _skip_indices(loader: DataLoader[Any], skip: int) -> Iterator[Any]:
    # The loader looks at its sampler when the iterator is made. It refuses to have the attribute set, hence object.
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, name)
    object.__setattr__(loader, name, _Skipping(sampler, skip))
    try:
        return iter(loader)
    finally:
        object.__setattr__(loader, name, sampler)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a `DistributedSampler` (or whatever has `set_epoch`) which epoch begins, so that it shuffles anew."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        method = getattr(sampler, "set_epoch", None)
        if callable(method):
            method(epoch)
