"""The batches that a script takes: between two iterations, or inside of one.

Between two, the place at which a batch is taken is a point. A replacement begins at the newest one that comes before
all batches that no iteration has used: what a script collects for an update, a replacement collects, too. Inside an
iteration (or a section) it is none: the batches are kept until that counts, and it gets the same when it is run again.

This module must never decide which batches a loader gives; that is `data`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from swift_agent import data
from swift_agent.inputs import Inputs
from swift_agent.loader_order import Pass, number_of
from swift_agent.place import Place, Units
from swift_agent.unprotected import Running
from swift_recovery.randomness import capture_generators, restore_generators

T = TypeVar("T")
R = TypeVar("R")


class Draws:
    """What the iteration or section that runs now has taken; one per job. *given*: told of each batch that is taken for
    the first time."""

    def __init__(self, place: Place, given: Callable[[Any], None]) -> None:
        self._place, self._given = place, given
        self._taken: list[tuple[Any, Any]] | None = None
        self._next = 0
        self._number = 0

    @property
    def is_inside(self) -> bool:
        return self._taken is not None

    def remembered(self, function: Callable[[], R]) -> Callable[[], R]:
        """*function*, which takes the same batches each time it is called."""
        taken: list[tuple[Any, Any]] = []
        number = self._place.here.iteration

        def call() -> R:
            outer = self._taken, self._next, self._number
            self._taken, self._next, self._number = taken, 0, number
            try:
                return function()
            finally:
                self._taken, self._next, self._number = outer

        return call

    def take(self, draw: Callable[[], T]) -> T:
        assert self._taken is not None
        seeds = self._place.seeds
        if self._next == len(self._taken):
            batch = draw()
            self._taken.append((batch, capture_generators() if seeds.keeps_generators else None))
            self._given(batch)
        batch, generators = self._taken[self._next]
        self._next += 1
        # What comes after it draws the same, whether the batch was loaded now or before.
        if generators is None:
            seeds.for_inside(number_of(self._number, self._next))
        else:
            restore_generators(generators)
        result: T = batch
        return result


class Passes:
    """Of one job, over all its loaders. *begin*: the training loop begins, if it has not yet. *has_state*: whether a
    loader is where it has to be by a state of its own. *num_open*: passes that the script is in."""

    def __init__(
        self, place: Place, running: Running, draws: Draws, inputs: Inputs, begin: Callable[[], None], world_size: int,
        tell: Callable[[str], None], has_state: Callable[[Any], bool] = lambda loader: False,
    ) -> None:  # fmt: skip
        self.place, self.draws, self.begin, self.world_size = place, draws, begin, world_size
        self._running, self._inputs, self.has_state = running, inputs, has_state
        self.feeds = data.Feeds(
            lambda done, num: tell(f"has drawn {done} of {num} batches again, to get to the one that it needs")
        )
        self.num_open = 0

    def at_point(self) -> None:
        """User code is between two steps."""
        if not self.place.drawn:
            self._inputs.at_point()
        self._running.at_point()

    def hand_out(self, batch: T) -> T:
        self.place.drawn += 1
        self._inputs.handed(batch)
        return batch


class Batches(Iterator[T]):
    """One pass over *loader*, see `Job.batches`. With *group*, lists of so many batches."""

    def __init__(self, passes: Passes, loader: Iterable[Any], group: int | None) -> None:
        self._passes, self._loader, self._group = passes, loader, group
        self._batches: Iterator[Any] | None = None
        self._number = 0
        self._is_over = self._is_used_up = False

    def __iter__(self) -> Batches[T]:
        return self

    def __next__(self) -> T:
        passes = self._passes
        if self._is_over:
            raise StopIteration
        if passes.draws.is_inside:
            return passes.draws.take(self._draw)
        if self._batches is None and not self._start():
            raise StopIteration
        passes.at_point()
        return passes.hand_out(self._draw())

    def close(self) -> None:
        """The script leaves the loop, early or not."""
        self._is_over = True
        if self._batches is not None:
            self._batches = None
            self._passes.num_open -= 1
            here = self._passes.place.here
            here.passes, here.batch = self._number + 1, 0

    def __del__(self) -> None:
        self.close()

    def _start(self) -> bool:
        """False if the others have been through this pass."""
        passes, place = self._passes, self._passes.place
        passes.begin()
        here, seeds, target = place.here, place.seeds, place.target
        number = self._number = here.passes
        if target is not None and number < target.passes:
            here.passes += 1
            self._is_over = True
            return False
        skip = 0
        place.units = Units(passes.world_size, data.samples_of(self._loader))
        arrives = target is not None
        if target is not None:
            skip = place.units.batches_of(place.target_units, target.batch)
            place.arrive()
        elif place.passed is not None:
            # It has arrived in a loop that is not this loader's.
            if place.passed.passes == number:
                skip = place.units.batches_of(place.target_units, place.passed.batch)
            place.passed = None
        here.batch = skip
        data.set_epoch(self._loader, here.epoch if here.epoch or here.epoch_passes else number)
        seeds.for_pass(number)
        coming = Pass(
            number, 0 if passes.has_state(self._loader) else skip,
            for_start=lambda stays: seeds.for_pass(0 if stays else number),
            for_order=lambda: seeds.for_pass(number),
            for_batch=lambda batch: seeds.for_batch(number_of(number, batch)), key=seeds.key,
            common_seed=seeds.common,
        )  # fmt: skip
        self._batches = passes.feeds.begin(self._loader, coming)
        if arrives:
            place.point.restore_generators()
        passes.num_open += 1
        return True

    def _draw(self) -> T:
        try:
            return self._draw_next()
        except StopIteration:
            self.close()
            self._passes.place.drawn = 0
            raise

    def _draw_next(self) -> T:
        if self._is_used_up:
            raise StopIteration
        if self._group is None:
            batch: T = self._draw_one()
            return batch
        batches: list[Any] = []
        try:
            while len(batches) < self._group:
                batches.append(self._draw_one())
        except StopIteration:
            if not batches:
                raise
            self._is_used_up = True  # the pass goes on until the script has used these
        drawn: Any = batches
        group: T = drawn
        return group

    def _draw_one(self) -> Any:
        if self._batches is None and not self._start():
            raise StopIteration
        place = self._passes.place
        here, seeds = place.here, place.seeds
        seeds.for_batch(number_of(self._number, here.batch))
        assert self._batches is not None
        batch = next(self._batches)
        if not self._passes.draws.is_inside:
            seeds.for_data(here.iteration)  # the body of the loop may draw
        here.batch += 1
        return batch


class Looping(Generic[T]):
    """A loader that is positioned each time it is iterated, for code that does that by itself, see `Job.loader`.
    Everything else is the loader's."""

    def __init__(self, passes: Passes, loader: Any, group: int | None) -> None:
        self._passes, self._loader, self._group = passes, loader, group

    def __iter__(self) -> Iterator[T]:
        return Batches(self._passes, self._loader, self._group)

    def __len__(self) -> int:
        return math.ceil(len(self._loader) / (self._group or 1))

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)  # of a copy that is being made
        return getattr(self._loader, name)
