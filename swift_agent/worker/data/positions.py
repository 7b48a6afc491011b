"""Batches of a loader from a given position on, without loading those before it where that can be.

A `DataLoader` over a map-style data set is positioned by leaving out indices: its sampler is run, its data set is not
touched; so are the wrappers that `loaders` knows. From anything else that can be iterated the batches before the
position are drawn and dropped, each with the seeds of its number, which costs the time to load them.
Must never ask a data set for a sample that it leaves out by its index.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from swift_agent.errors import UsageError
from swift_agent.worker.data import loaders, own_epochs
from swift_agent.worker.data.loader_generators import OwnGenerators
from swift_agent.worker.data.loader_order import Order, Pass, unseen
from swift_agent.worker.data.own_loaders import OfTheJob
from swift_agent.worker.data.own_state import held_weakly

TELL_S = 10.0
"""At least, between two words about batches that are dropped."""


def _silent(num_done: int, num: int) -> None: ...


class Feeds:
    """One per job: what is kept of its loaders from pass to pass, for as long as the script has them.

    *tell*: how many batches have been dropped, of how many, when that takes long.
    """

    def __init__(self, tell: Callable[[int, int], None] = _silent) -> None:
        self._tell = tell
        self._orders: dict[int, Order] = {}  # by id of the loader
        self._generators = OwnGenerators()
        self._iterators: list[Callable[[], Any]] = []

    def begin(self, loader: Iterable[Any], coming: Pass) -> Iterator[Any]:
        """The batches of a pass over *loader*, but the first `coming.skip`. Raises `UsageError` for a loader that can
        not be positioned at all."""
        if iter_is_itself(loader):
            self._iterators = [one for one in self._iterators if one() is not None]
            if any(loader is one() for one in self._iterators):
                raise UsageError(
                    "job.batches() was given the same iterator for a second pass, and where the first has left it no "
                    "replacement could know: give it something that starts over each time (a DataLoader, an object "
                    "with __iter__), or go through it in one pass."
                )
            self._iterators.append(held_weakly(loader))
        source = loaders.find(loader)
        inner = source.inner
        is_new = inner is not None and inner.persistent_workers and inner._iterator is None
        if not is_new:
            self._generators.position(loader, coming.number, coming.common_seed)
        coming.for_start(is_new)
        if inner is None:
            return self._after_drop(OfTheJob(iter(loader)), coming)
        order = self._order_of(inner)
        swaps = [*source.swaps, *_stand_in(inner, order)]
        skip, see = (coming.skip, coming.see) if source.has_indices else (0, unseen)
        its_loader = held_weakly(loader)  # the order outlives its pass
        chosen = replace(coming, skip=skip, for_order=lambda: self._for_order(its_loader(), coming, is_new), see=see)
        ahead = source.looks_ahead or inner.num_workers > 0
        order.begin(chosen, ahead=ahead, is_sent=inner.num_workers > 0)
        target = inner if source.loader is loader and not source.is_wrapped else loader
        if source.seeded:
            inside = next((value for owner, _, value in swaps if owner is loader), getattr(loader, source.seeded))
            swaps.append((loader, source.seeded, _Seeded(inside, chosen)))
        if source.is_wrapped:
            batches = _swapped_at_first(target, swaps)
        else:
            with _exchanged(swaps):
                batches = iter(target)
            order.choose()
        drawn = OfTheJob(batches)
        return drawn if source.has_indices else self._after_drop(drawn, coming)

    def _for_order(self, loader: Any, coming: Pass, is_new: bool) -> None:
        coming.for_order()
        if is_new or coming.number:
            self._generators.position(loader, coming.number, coming.common_seed)

    def _order_of(self, inner: DataLoader[Any]) -> Order:
        known = self._orders.get(id(inner))
        sampler = getattr(inner, _sampler_name(inner))
        if known is None:
            weakref.finalize(inner, self._orders.pop, id(inner), None).atexit = False
        if known is None or known._sampler is not sampler:
            known = self._orders[id(inner)] = Order(sampler)
        return known

    def _after_drop(self, batches: Iterator[Any], coming: Pass) -> Iterator[Any]:
        told_s = time.monotonic()
        for number in range(coming.skip):
            coming.for_batch(number)
            try:
                coming.see(next(batches))
            except StopIteration:
                break
            if time.monotonic() - told_s >= TELL_S:
                told_s = time.monotonic()
                self._tell(number + 1, coming.skip)
        return batches if coming.see is unseen else map(_shown(coming.see), batches)


def _shown(see: Callable[[Any], None]) -> Callable[[Any], Any]:
    def show(batch: Any) -> Any:
        see(batch)
        return batch

    return show


def iterate(loader: Iterable[Any], skip: int) -> Iterator[Any]:
    """The batches of *loader* after the first *skip*, as a job's first pass."""
    return Feeds().begin(loader, Pass(skip=skip))


def iter_is_itself(loader: Any) -> bool:
    """Whether *loader* is an iterator, which goes on where it was."""
    return hasattr(loader, "__next__") and hasattr(loader, "__iter__") and iter(loader) is loader


def _sampler_name(inner: DataLoader[Any]) -> str:
    return "sampler" if inner.batch_sampler is None else "batch_sampler"


def _stand_in(inner: DataLoader[Any], order: Order) -> list[tuple[Any, str, Any]]:
    running = inner._iterator
    if running is not None and running._index_sampler is not order:
        # Its processes have been started by a pass that was not the job's.
        running._index_sampler = order
    return [(inner, _sampler_name(inner), order)]


class _Seeded:
    """*loader*, which begins with the first batch that is not left out, with seeds for what its wrapper draws."""

    def __init__(self, loader: Iterable[Any], coming: Pass) -> None:
        self._loader, self._coming = loader, coming

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._loader, start=self._coming.skip):
            self._coming.for_batch(number)
            yield batch


def _swapped_at_first(loader: Iterable[Any], swaps: list[tuple[Any, str, Any]]) -> Iterator[Any]:
    """A wrapper asks the loader inside it with the first batch."""
    batches = iter(loader)
    with _exchanged(swaps):
        try:
            first = next(batches)
        except StopIteration:
            return
    yield first
    yield from batches


@contextlib.contextmanager
def _exchanged(swaps: list[tuple[Any, str, Any]]) -> Iterator[None]:
    # A loader looks at its sampler when an iterator is made, and refuses to have the attribute set: hence object.
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in swaps]
    for owner, name, value in swaps:
        object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            object.__setattr__(owner, name, value)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell whatever has `set_epoch` (a `DistributedSampler`, Accelerate's loaders) which epoch begins, so that it
    shuffles again. One that the script tells by itself keeps what it was told, and so do all others of this loader."""
    own = own_epochs.of_loader(loader)
    epoch = epoch if own is None else own
    with own_epochs.not_the_script():
        for part in loaders.parts(loader):
            if type(part).__name__ == "_FabricDataLoader":
                part._num_iter_calls = epoch  # what it tells its sampler
            method = getattr(part, "set_epoch", None)
            if callable(method):
                told = own_epochs.of_sampler(part)
                method(epoch if told is None else told)


def samples_of(loader: Any) -> int:
    """How many samples a batch of *loader* has, 0 if it does not say."""
    for one in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(one, "batch_size", None)
        if isinstance(size, int) and size > 0:
            return size
    return 0
