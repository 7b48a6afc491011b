"""Runs iterations and sections for their result only: without communication that anybody notices, without effect.

Of survivors that need not run an iteration again, because its update exists; of replacements on their way to where the
others are; and the first step of a pipeline, when the others have long made theirs.

    stopped groups: enter --> ... --> leave, at the next recovery        connected groups: for one call

This module must never decide whether an iteration is run like this; `protected` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.tracked import Tracked
from swift_recovery.state.randomness import capture_generators, restore_generators
from swift_recovery.state.sharded import local_of
from swift_recovery.state.snapshots.by_hand import copies_of, put_back
from swift_recovery.state.snapshots.changes import Changed

R = TypeVar("R")


class DryRuns:
    """One per worker under an agent. *tracked*: from the first point of the loop on."""

    def __init__(self, place: Place, groups: ProcessGroups) -> None:
        self._place, self._groups = place, groups
        self.tracked: Tracked | None = None
        self._stack = contextlib.ExitStack()
        self._is_entered = False

    @property
    def is_on(self) -> bool:
        """Whether what runs now is a dry run, so that nobody else runs it."""
        return self._is_entered or self._groups.is_local

    def enter(self) -> None:
        """Collectives of the stopped groups return at once, with local values, until the next recovery."""
        if not self._is_entered:
            self._stack.enter_context(self._groups.dry_run())
            self._is_entered = True

    def leave(self) -> None:
        """The groups are about to be connected again."""
        if self._is_entered:
            self._stack.close()
            self._is_entered = False

    def iteration(self, call: Callable[[], R], number: int, made: Changed | None = None) -> R:
        """Of a survivor, number *number*, inside `enter`. *made*: what it had changed when it was cut after its update.

        That it has again after its step, so that what is worked out from it then (an average of buffers) is right; and
        at the end, whatever has changed it once more. What was still to be changed when it was cut is changed here,
        also what the iteration had changed before its update, if that comes out as it had (see `Changed`).
        """
        place, tracked = self._place, self._require_tracked()
        # Owed: its layouts are those before the update.
        tracked.restore_layouts(tracked.layouts_for(place.here.iteration))
        tracked.begin(number, dry_run=True)
        place.seeds.for_iteration(number)
        # Owed: what comes later, or the iteration when it is run after all, begins with parameters as they are.
        before = copies_of(tracked.state.loose_parameters()) if place.here.iteration == number else []
        with (
            place.without_points(),
            tracked.without_reduction(finite=place.here.iteration > number),
            self._after_steps(made),
        ):
            place.dry_run = number
            try:
                result = call()
            finally:
                place.dry_run = None
                tracked.updates.cut()
                if made is not None:
                    made.at_end()
                if before:
                    put_back(before)
                    place.start.by_hand.settle()
        tracked.end()
        return result

    @contextlib.contextmanager
    def _after_steps(self, made: Changed | None) -> Iterator[None]:
        hooks = []
        if made is not None:
            optimizers = self._require_tracked().state.optimizers.values()
            hooks = [each.register_step_post_hook(lambda *_: made.at_step()) for each in optimizers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def iteration_of_replacement(self, call: Callable[[], R]) -> R:
        """The others have finished this iteration, and this replacement has its update: run it for its result."""
        place, tracked = self._place, self._require_tracked()
        tracked.begin(place.here.iteration, dry_run=True)
        place.seeds.for_iteration(place.here.iteration)
        if self._groups.aborted is not None:
            self.enter()
        local = contextlib.nullcontext() if self._is_entered else self._groups.local()
        with place.without_points(), local, tracked.without_reduction(finite=False):
            try:
                result = call()
            finally:
                tracked.updates.cut()
                place.put_back_arrived()
        tracked.end()
        with place.lock:
            place.here.iteration += 1
        return result

    def remake(self, call: Callable[[], object], numbers: range, *, has_to_fit: bool) -> None:
        """Iterations *numbers*, which are over, are run once more for what they leave in variables of the script; with
        *has_to_fit* the last one has to be given what it was given at first. The start has been kept, and is in force
        again after it."""
        place, tracked = self._place, self._require_tracked()
        before = copies_of([local_of(parameter) for parameter in tracked.state.parameters()])
        for number in numbers:
            tracked.begin(number, dry_run=True)
            place.seeds.for_iteration(number)
            if self._groups.aborted is not None:
                self.enter()
            local = contextlib.nullcontext() if self._is_entered else self._groups.local()
            place.remaking, place.has_to_fit = number, has_to_fit and number == numbers[-1]
            place.dry_run = number
            with place.without_points(), local, tracked.without_reduction(finite=False):
                try:
                    call()
                finally:
                    place.remaking = place.dry_run = None
                    tracked.updates.cut()
                    put_back(before)
            tracked.end()
        place.start.restore()

    @contextlib.contextmanager
    def without_effect(self) -> Iterator[None]:
        """Forward and backward are run here only, with what they draw and count taken back."""
        tracked = self._require_tracked()
        generators = capture_generators({parameter.device for parameter in tracked.state.parameters()})
        buffers = tracked.copy_buffers()
        local = contextlib.nullcontext() if self._is_entered else self._groups.local()
        try:
            with local, tracked.without_reduction(finite=False):
                yield
        finally:
            tracked.put_buffers(buffers)
            restore_generators(generators)

    def section(self, call: Callable[[], R]) -> R:
        """The others have finished this section: run it for its result, with local values only."""
        local = contextlib.nullcontext() if self._groups.aborted is not None else self._groups.local()
        objects, place = self._require_tracked().objects, self._place
        # What comes before the epoch is numbered by nobody any more.
        objects.begin("section", -1 if place.is_before_epoch else place.here.sections, dry_run=True)
        place.is_past_section = True
        try:
            with place.without_points(), local:
                result = call()
        finally:
            place.is_past_section = False
            objects.end()
        if not self._place.is_before_epoch:
            with self._place.lock:
                self._place.here.sections += 1
        return result

    def _require_tracked(self) -> Tracked:
        assert self.tracked is not None
        return self.tracked
