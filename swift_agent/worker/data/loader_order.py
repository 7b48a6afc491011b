"""The indices of one pass over a `DataLoader`, from a given batch on, and seeds for what draws meanwhile.

    loader asks --> Order: seeds, the script's sampler, without the first --> Seeded: where it is loaded

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


@dataclass(frozen=True)
class Seeded:
    """What a sampler has chosen, of whatever kind, with the seed for loading it. It is never seen by a data set: the
    process of a loader that it is sent to unpickles it right before it loads, and has the *entry* itself then."""

    entry: Any
    key: Key
    number: int

    def arrive(self) -> Any:
        """Generators here are seeded for it."""
        return _arrive(self.entry, self.key, self.number)

    def __reduce__(self) -> Any:
        return _arrive, (self.entry, self.key, self.number)


def _arrive(entry: Any, key: Key, number: int) -> Any:
    _series(key)(number)
    return entry


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
        self.is_sent = False

    def begin(self, coming: Pass, *, ahead: bool, is_sent: bool) -> None:
        """The next pass. *ahead*: entries are asked for earlier than their batches. *is_sent*: by the processes of the
        loader; else each is loaded here as soon as it is asked for."""
        self._coming, self.is_sent = (coming, ahead), is_sent

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
            key = coming.key if ahead else None
            yield entry if key is None else Seeded(entry, key, number_of(coming.number, number))

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class _Chosen(Iterator[Any]):
    def __init__(self, order: Order) -> None:
        self._order: Order | None = order
        self._is_sent = order.is_sent
        self._entries: Iterator[Any] = iter(())

    def choose(self) -> None:
        if self._order is None:
            return
        self._is_sent = self._order.is_sent
        entries, skip = self._order.entries()
        self._order = None
        drawn = list(itertools.islice(entries, max(1, skip)))
        self._entries = itertools.chain(drawn[skip:], entries)

    def __next__(self) -> Any:
        if self._order is not None:
            self.choose()
        entry = next(self._entries)
        return entry.arrive() if isinstance(entry, Seeded) and not self._is_sent else entry
