"""The indices of one pass over a `DataLoader`, from a given batch on, and seeds for what draws meanwhile.

    loader asks --> Order: seeds, the script's sampler, without the first --> Fetch: seeds where it is loaded

With worker processes a batch is loaded somewhere else and earlier than it is handed out, by a process that has loaded
others before, or none if it belongs to a replacement. So generators are seeded there for each batch, by its number.

This module must never load a sample.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from swift_agent import native
from swift_recovery.state.randomness import SeedSeries, compiled_seeder, seed_series

_FETCH_TAG = 6  # see `tracked.seeds`
Key = tuple[int, int]
"""The job's seed, and a rank."""


def _nothing(*_: Any) -> None: ...


def unseen(entry: Any) -> None:
    """Nobody looks."""


def number_of(pass_number: int, batch: int) -> int:
    """One number for a batch of a pass."""
    return (pass_number << 32) + batch


@dataclass(frozen=True)
class Pass:
    """*number*: of this pass in the job. *skip*: so many of its batches are left out. *for_start* seeds generators
    before the loader is asked for an iterator; its argument: whether that starts processes which stay for all passes.
    *for_order* does (and positions those that the loader has of its own) before its samples are chosen, *for_batch*
    before the batch of that number. *key*: of seeds for where samples are loaded, None to leave generators there alone.
    *common_seed*: the same on all ranks. *see* is shown what the pass goes through from its beginning on, those that
    are left out, too: what the sampler chooses, or the batches where that cannot be had."""

    number: int = 0
    skip: int = 0
    for_start: Callable[[bool], None] = _nothing
    for_order: Callable[[], None] = _nothing
    for_batch: Callable[[int], None] = _nothing
    key: Key | None = None
    common_seed: int = 0
    see: Callable[[Any], None] = unseen


class Fetch(list[Any]):
    """The indices of one batch. Whoever goes through them to load it has generators seeded for it first."""

    def __init__(self, indices: Iterable[Any] = (), key: Key = (0, 0), number: int = 0) -> None:
        super().__init__(indices)
        self.key, self.number = key, number

    def __iter__(self) -> Iterator[Any]:
        _series(self.key)(self.number)
        return super().__iter__()

    def __reduce__(self) -> Any:
        return Fetch, (self[:], self.key, self.number)  # a slice is a list; list(self) would seed


@functools.cache
def _series(key: Key) -> SeedSeries:
    library = native.load()
    return seed_series(*key, _FETCH_TAG, compiled_seeder(library.Seeder) if library else None)


class Order:
    """Stands in for the sampler (or batch sampler) of a loader. A pass that was not announced by `begin` is the
    sampler's own: a loader with persistent workers keeps the one it was started with.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self._coming: tuple[Pass, bool] | None = None
        self._newest: _Chosen | None = None

    def begin(self, coming: Pass, *, ahead: bool) -> None:
        """The next pass. *ahead*: entries are asked for earlier than their batches."""
        self._coming = (coming, ahead)

    def choose(self) -> None:
        """What that pass begins with is chosen now, not with its first batch; the loader has made its iterator."""
        if self._newest is not None:
            self._newest.choose()

    def __iter__(self) -> Iterator[Any]:
        self._newest = _Chosen(self)
        return self._newest

    def entries(self) -> tuple[Iterator[Any], int]:
        """Of the next pass, and how many of them are to be left out."""
        # When the first one is asked for: a loader with worker processes makes two iterators and uses the second.
        coming, self._coming = self._coming, None
        if coming is None:
            return iter(self._sampler), 0
        return self._entries(*coming), coming[0].skip

    def _entries(self, coming: Pass, ahead: bool) -> Iterator[Any]:
        """A sampler may draw for each entry: what it draws for one is the same whichever is the first."""
        coming.for_order()
        entries = iter(self._sampler)
        for number in itertools.count():
            if number and (ahead or number <= coming.skip):
                coming.for_batch(number)
            try:
                entry = next(entries)
            except StopIteration:
                return
            if not number:
                coming.for_batch(0)
            coming.see(entry)
            yield self._seeded(entry, coming, number) if ahead and coming.key is not None else entry

    @staticmethod
    def _seeded(entry: Any, coming: Pass, number: int) -> Any:
        assert coming.key is not None
        if type(entry) is not list:
            return entry  # a sampler of batches of its own kind; or batch_size=None, and an index
        return Fetch(entry, coming.key, number_of(coming.number, number))

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class _Chosen(Iterator[Any]):
    def __init__(self, order: Order) -> None:
        self._order: Order | None = order
        self._entries: Iterator[Any] = iter(())

    def choose(self) -> None:
        if self._order is None:
            return
        entries, skip = self._order.entries()
        self._order = None
        drawn = list(itertools.islice(entries, max(1, skip)))
        self._entries = itertools.chain(drawn[skip:], entries)

    def __next__(self) -> Any:
        if self._order is not None:
            self.choose()
        return next(self._entries)
