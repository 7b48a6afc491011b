"""The batches that a script takes: between two iterations, or inside of one.

Between two, the place at which a batch is taken is a point. A replacement begins at the newest one that comes before
all batches that no iteration has used: what a script collects for an update, a replacement collects, too. Inside an
iteration (or a section) it is none: the batches are kept by `draws` until that counts. A pass that is made in a section
is no part of the place in the loop at all.

This module must never decide which batches a loader gives; that is for `positions`.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

from swift_agent.errors import UsageError
from swift_agent.worker.data import own_epochs, positions
from swift_agent.worker.data.draws import Draws, Group
from swift_agent.worker.data.inputs import Inputs
from swift_agent.worker.data.loader_order import Pass, number_of
from swift_agent.worker.line import in_script
from swift_agent.worker.loop.unprotected import Running
from swift_agent.worker.tracked import epoch_loops
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.position import Units

T = TypeVar("T")


def group_size(group: int | None) -> int | None:
    """*group*, as a script gives it. Raises `UsageError` if it is no number of batches."""
    if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
        raise UsageError(f"group={group!r} is no number of batches of at least 1")
    return group


class Passes:
    """Of one job, over all its loaders. *begin*: the training loop begins, if it has not yet. *has_state*: whether a
    loader is where it has to be by a state of its own. *elsewhere* is told why the loop cannot get to where it has to
    be. *num_open*: passes that the script is in. *has_epochs*: the job says which epoch it is, not the samplers."""

    def __init__(
        self, place: Place, running: Running, draws: Draws, inputs: Inputs, begin: Callable[[], None], world_size: int,
        tell: Callable[[str], None], has_state: Callable[[Any], bool] = lambda loader: False,
        elsewhere: Callable[[str], None] = lambda why: None,
    ) -> None:  # fmt: skip
        self.place, self.draws, self.begin, self.world_size = place, draws, begin, world_size
        self._running, self._inputs, self.has_state = running, inputs, has_state
        self.feeds = positions.Feeds(
            lambda done, num: tell(f"has drawn {done} of {num} batches again, to get to the one that it needs")
        )
        self.num_open = 0
        self.has_epochs = self._is_out_of_order = self._has_told = False
        self._elsewhere, self._tell = elsewhere, tell
        self._newest: dict[int, weakref.ref[Batches[Any]]] = {}

    def begins(self, batches: Batches[Any], loader: Any) -> None:
        """A pass over *loader*. One before it that nobody took the last batch of is over, even if it is still
        held: after a recovery the frames of what was cut do, for a while."""
        before = self._newest.get(id(loader))
        self._newest[id(loader)] = weakref.ref(batches)
        if before is not None and (one := before()) is not None and one is not batches:
            one.end_for_next(loader)

    def is_before_epoch(self, loader: Any) -> bool:
        """Whether a replacement's pass is one of an epoch before that in which it has to begin."""
        place, target = self.place, self.place.target
        if target is None or not place.is_before_epoch:
            return False
        if target.loop:
            return True  # until that loop of epochs begins
        own = own_epochs.of_loader(loader)
        if own is not None and own > target.epoch:
            self._elsewhere(
                f"the loop begins with epoch {own}, and has to go on in epoch {target.epoch}: a snapshot that is newer "
                "than that, for one. Have job.epochs(n, start=...) give the epochs, in the place of range(start, n)"
            )
        place.is_before_epoch = own is None or own < target.epoch
        if own is not None and own < target.epoch and not self._has_told:
            self._has_told = True
            self._tell(
                f"this replacement skips the training of epochs before {target.epoch}, but repeats the script's code "
                "between them: validation, and snapshots, which get the newest weights. Use job.epochs(n, start=...) "
                f"instead of range(start, n) to begin with epoch {target.epoch}"
            )
        return place.is_before_epoch

    def note_epoch(self, loader: Any) -> None:
        """A pass begins in the loop: without `job.epochs` it is in the epoch that the script has told its sampler."""
        here, own = self.place.here, own_epochs.of_loader(loader)
        if self.has_epochs or self._is_out_of_order or own is None or self.draws.is_inside:
            return
        if not here.is_told or own > here.epoch:
            here.begin_epoch(own, is_told=True)
        elif own < here.epoch:  # no numbers that say how far the loop is
            self._is_out_of_order = True
            here.epoch, here.is_told, here.epoch_passes, here.epoch_sections, here.peeks = 0, False, 0, 0, ()

    def at_point(self) -> None:
        """User code is between two steps."""
        if not self.place.drawn:
            self._inputs.at_point()
        self._running.at_point()

    def begin_track(self, number: int, loader: Any, epoch: int) -> Callable[[Any], None]:
        """What pass *number* over *loader* goes through is to be shown to the result."""
        self._inputs.begin_pass(number, loader, epoch)
        return self._inputs.passed

    def over(self, loader: Iterable[Any], group: int | None) -> Batches[Any]:
        return (SectionBatches if self.draws.is_in_section else Batches)(self, loader, group)

    def hand_out(self, batch: T) -> T:
        self.place.drawn += 1
        self._inputs.handed(batch)
        return batch


class Batches(Iterator[T]):
    """One pass over *loader*, see `Job.batches`. With *group*, lists of so many batches.

    A *peek* is one of which the script takes a batch that no iteration uses (`next(iter(loader))`, for its shape): in a
    replacement it gives that batch, also where the others have been through it.
    """

    def __init__(self, passes: Passes, loader: Iterable[Any], group: int | None) -> None:
        self._passes, self._loader, self._group = passes, loader, group
        self._batches: Iterator[Any] | None = None
        self._number = 0
        self._is_over = self._is_used_up = self._is_followed = False
        self._num_handed = self._began = 0
        self._counts, self._is_peek = True, False
        self._run = passes.draws.run

    def __iter__(self) -> Batches[T]:
        return self

    def __next__(self) -> T:
        passes = self._passes
        if passes.draws.is_inside:
            # Also where it is over: a run that was cut may have come to its end, after batches that come again.
            if self._batches is None and self._is_of_this_run and not self._is_over:
                passes.draws.make_room()
            taken = passes.draws.take(self._draw, self)
            self._note_group(taken)
            return taken
        self._check_goes_on()
        if self._batches is None and not self._start(is_next=not in_script.is_for(sys._getframe(1))):
            raise StopIteration
        if not self._is_peek:
            passes.at_point()
        elif self._num_handed:
            self.close()
            raise StopIteration
        batch = self._draw()
        self._num_handed += 1
        self._note_group(batch)
        return batch if self._is_peek else passes.hand_out(batch)

    def _note_group(self, batch: Any) -> None:
        self._passes.draws.note(Group() if self._group is None else Group(len(batch), self._group))

    def close(self) -> None:
        """The script leaves the loop, early or not."""
        self._is_over = True
        if self._batches is not None:
            self._batches = None
            self._passes.num_open -= 1
            here = self._passes.place.here
            here.passes, here.batch = self._number + self._counts, 0
            if self._num_handed == 1 and self._counts and not self._is_used_up and here.iteration == self._began:
                here.peeks = (*here.peeks, self._number)

    def forget(self) -> None:
        """The iteration that has begun this pass begins it again: it has never been."""
        self._is_over = True
        if self._batches is not None:
            self._batches = None
            self._passes.num_open -= 1

    def end_for_next(self, loader: Any) -> None:
        """The next pass over *loader* begins."""
        if self._loader is loader and self._batches is not None:
            self.close()
            self._is_followed = True

    def __del__(self) -> None:
        self.close()

    @property
    def _is_of_this_run(self) -> bool:
        return self._run == self._passes.draws.run

    def _start(self, *, is_next: bool = False) -> bool:
        """False if the others have been through this pass. *is_next*: the script asks by `next()`."""
        passes, place = self._passes, self._passes.place
        passes.begin()
        passes.begins(self, self._loader)
        epoch_loops.comes_to_another(place)
        here, seeds, target = place.here, place.seeds, place.target
        number = self._number = here.passes
        if target is not None:
            counts = not passes.is_before_epoch(self._loader)
            if not counts or number < target.passes:
                self._is_peek = number in target.peeks if counts else bool(target.peeks) and is_next
                self._counts = counts
                if not self._is_peek:
                    here.passes += counts
                    self._is_over = True
                    return False
        if passes.num_open:
            raise UsageError(
                "job.batches(): a pass begins while another one is not over, and a replacement could not find its "
                "place in both. Let the first one end, or leave its loop and let go of its iterator; give two loaders "
                "as one, with a data set that gives the samples of both; validate in a function decorated with "
                "@job.resilient, and call job.batches() in there."
            )
        if self._is_of_this_run:
            passes.draws.begins(self)
        skip = 0
        place.units = Units(passes.world_size, positions.samples_of(self._loader))
        arrives = target is not None and not self._is_peek
        if target is not None and arrives:
            skip = place.units.batches_of(place.target_units, target.batch)
            place.arrive()
        elif place.passed is not None:
            # It has arrived in a loop that is not this loader's.
            if place.passed.passes == number:
                skip = place.units.batches_of(place.target_units, place.passed.batch)
            place.passed = None
        if not self._is_peek:
            passes.note_epoch(self._loader)
        here.batch = skip
        self._num_handed, self._began = 0, here.iteration
        epoch = here.epoch if here.epoch or here.epoch_passes else number
        positions.set_epoch(self._loader, epoch)
        seeds.for_pass(number)
        coming = _pass_of(passes, number, skip)
        if passes.has_state(self._loader):
            coming = replace(coming, skip=0)  # and it does not begin at the beginning
        elif not seeds.keeps_generators and not self._is_peek:
            # Else what is left out may draw from the script's generators, and is not the same.
            coming = replace(coming, see=passes.begin_track(number, self._loader, epoch))
        self._batches = passes.feeds.begin(self._loader, coming)
        if arrives:
            place.point.restore_generators()
        passes.num_open += 1
        return True

    def _check_goes_on(self) -> None:
        """Raises StopIteration if it is over."""
        if self._is_over and self._is_followed:
            raise UsageError(
                "a batch is taken from a pass of job.batches() or job.loader() after the next pass over the same "
                "loader has begun. Take several batches for one update by group=k."
            )
        if self._is_over:
            raise StopIteration

    def _draw(self) -> T:
        self._check_goes_on()
        try:
            return self._draw_next()
        except StopIteration:
            self._is_used_up = True
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


class SectionBatches(Batches[T]):
    """A pass that is made in a section, and starts over whenever that is run: no part of the place in the loop."""

    def __next__(self) -> T:
        if self._is_over:
            raise StopIteration
        if not self._is_of_this_run:
            raise UsageError(
                "batches are taken of a pass that job.batches() began inside a function decorated with @job.resilient, "
                "which has ended since: call job.batches() outside of it, or in it each time."
            )
        try:
            return self._draw_next()
        except StopIteration:
            self.close()
            raise

    def close(self) -> None:
        self._is_over, self._batches = True, None

    def _start(self, *, is_next: bool = False) -> bool:
        if positions.iter_is_itself(self._loader):
            raise UsageError(
                "job.batches() was given an iterator inside a function decorated with @job.resilient, which has to "
                "start over if it is repeated: give it something that can (a DataLoader, an object with __iter__)."
            )
        passes, here = self._passes, self._passes.place.here
        number = self._number = passes.draws.number_in_section()
        self._num_drawn = 0
        positions.set_epoch(self._loader, here.epoch if here.epoch or here.epoch_passes else here.sections)
        self._batches = passes.feeds.begin(self._loader, _pass_of(passes, number, 0))
        return True

    def _draw_one(self) -> Any:
        if self._batches is None:
            self._start()
        seeds = self._passes.place.seeds
        at = number_of(self._number, self._num_drawn)
        seeds.for_batch(at)
        assert self._batches is not None
        batch = next(self._batches)
        seeds.for_inside(at)  # what comes after it may draw
        self._num_drawn += 1
        return batch


def _pass_of(passes: Passes, number: int, skip: int) -> Pass:
    seeds = passes.place.seeds
    return Pass(
        number, skip, for_start=lambda stays: seeds.for_pass(0 if stays else number),
        for_order=lambda: seeds.for_pass(number), for_batch=lambda batch: seeds.for_batch(number_of(number, batch)),
        key=seeds.key, common_seed=seeds.common,
    )  # fmt: skip


class Looping(Generic[T]):
    """A loader that is positioned each time it is iterated, for code that does that by itself, see `Job.loader`.
    Everything else is the loader's."""

    def __init__(self, passes: Passes, loader: Any, group: int | None) -> None:
        self._passes, self._loader, self._group = passes, loader, group

    def __iter__(self) -> Iterator[T]:
        return self._passes.over(self._loader, self._group)

    def __len__(self) -> int:
        return math.ceil(len(self._loader) / (self._group or 1))

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)  # of a copy that is being made
        return getattr(self._loader, name)
