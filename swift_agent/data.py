"""Batches of a loader from a given position on, without loading those before it.

A map-style `DataLoader` is positioned by skipping indices: its sampler is run, its data set is not touched. Anything
else that can be iterated is read ahead and thrown away, which costs the time to load it; an object with `state_dict`
(such as a stateful loader) should be tracked instead. This module must never seed anything: the caller has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
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


class _Begun:
    """A sampler from which *count* entries and one more have been taken; that one comes first."""

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self._sampler = sampler
        self._rest = iter(sampler)
        for _ in itertools.islice(self._rest, count):
            pass
        self._first = list(itertools.islice(self._rest, 1))

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(self._first, self._rest)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]


def iterate(loader: Iterable[Any], skip: int, before_first: Callable[[], None] = lambda: None) -> Iterator[Any]:
    """Iterate *loader*, leaving out its first *skip* batches.

    *before_first* is called where batches have to be read ahead, before the first: to seed what the others had seeded.
    """
    # Persistent workers that run already keep the sampler they were started with, so it cannot be exchanged.
    running = getattr(loader, "_iterator", None) is not None
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and not running:
        return _at_index(loader, skip)
    iterator = iter(loader)
    if skip:
        before_first()
    for _ in itertools.islice(iterator, skip):
        pass
    return iterator


def _at_index(loader: DataLoader[Any], skip: int) -> Iterator[Any]:
    if skip == 0 and loader.num_workers:
        return iter(loader)
    # The loader looks at its sampler when the iterator is made. It refuses to have the attribute set, hence object.
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, name)
    # Without workers a sampler would first be asked, and draw its seed, with the first batch: where that is depends on
    # *skip*. So it is asked here; with workers, the iterator does it when it is made.
    stand_in = _Skipping(sampler, skip) if loader.num_workers else _Begun(sampler, skip)
    object.__setattr__(loader, name, stand_in)
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


def samples_of(loader: Any) -> int:
    """How many samples a batch of *loader* has, 0 if it does not say."""
    for one in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(one, "batch_size", None)
        if isinstance(size, int) and size > 0:
            return size
    return 0
