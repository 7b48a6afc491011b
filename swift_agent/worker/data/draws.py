"""What the iteration or section that runs now takes inside of it: the same when it is run again.

    first run:   take --> drawn from the loader, kept
    second run:  take --> what the first one got, in its order; then drawn

A pass that is made inside starts over then. This module must never ask a loader for anything: it is handed what to draw
with.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from swift_agent.errors import UsageError
from swift_agent.worker.data.loader_order import number_of
from swift_agent.worker.tracked.loop_state import Place
from swift_recovery.state.randomness import capture_generators, restore_generators

T = TypeVar("T")
R = TypeVar("R")

# Numbers of passes in sections begin with this: seeds of theirs are not those of the passes of the loop.
_OF_SECTIONS = 1 << 30
_MAX_IN_SECTION = 64


class OnePass(Protocol):
    """A pass over a loader, which the script holds."""

    def forget(self) -> None:
        """The iteration that has begun this pass begins it again: it has never been."""


@dataclass(frozen=True)
class Group:
    """So many batches that are handed out together. *of*: in all groups but the last of a pass. 0, 0: a batch by
    itself."""

    size: int = 0
    of: int = 0


@dataclass(frozen=True)
class _Begun:
    """A pass that run *run* has made and begun, after so many batches had been taken, and from which place."""

    run: int
    num_taken: int
    passes: int
    batch: int
    of: weakref.ref[OnePass]


@dataclass(frozen=True)
class _End:
    """In place of a batch: that pass had none any more."""

    of: weakref.ref[OnePass]


@dataclass
class _Inside:
    """One iteration or section, in whichever run. *taken*: batches or ends, and generators after them.
    *num_section_passes*: of the run now. *group*: see `Draws.group`. *decided*: see `Draws.decide`."""

    number: int
    is_section: bool
    group: Group
    taken: list[tuple[Any, Any]] = field(default_factory=list)
    begun: list[_Begun] = field(default_factory=list)
    num_section_passes: int = 0
    decided: list[Any] = field(default_factory=list)


class Draws:
    """What the iteration or section that runs now has taken; one per job. *given*: told of each batch that is taken for
    the first time."""

    def __init__(self, place: Place, given: Callable[[Any], None]) -> None:
        self._place, self._given = place, given
        self._inside: _Inside | None = None
        self._next = self._next_decided = 0
        self._num_runs = 0
        self._group = Group()
        self.run = 0
        """Of what runs now, counted from 1; 0 between iterations."""

    @property
    def is_inside(self) -> bool:
        return self._inside is not None

    @property
    def is_in_section(self) -> bool:
        return self._inside is not None and self._inside.is_section

    def remembered(self, function: Callable[[], R], *, is_section: bool = False) -> Callable[[], R]:
        """*function*, which takes the same batches each time it is called."""
        inside = _Inside(self._place.here.iteration, is_section, self._group)

        def call() -> R:
            outer = self._inside, self._next, self.run, self._next_decided
            self._num_runs += 1
            self._inside, self._next, self.run, self._next_decided = inside, 0, self._num_runs, 0
            inside.num_section_passes = 0
            try:
                result = function()
                if self._place.has_points:
                    self._check_all_taken()
                return result
            finally:
                self._inside, self._next, self.run, self._next_decided = outer

        return call

    def take(self, draw: Callable[[], T], of: OnePass) -> T:
        """*of*: which pass."""
        assert self._inside is not None
        seeds, taken = self._place.seeds, self._inside.taken
        while self._next < len(taken) and isinstance(end := taken[self._next][0], _End) and end.of() is not of:
            self._next += 1  # the script has gone on with another pass before it was cut
        if self._next == len(taken):
            try:
                batch: Any = draw()
            except StopIteration:
                batch = _End(weakref.ref(of))
            taken.append((batch, capture_generators() if seeds.keeps_generators else None))
            if not isinstance(batch, _End):
                self._given(batch)
        batch, generators = taken[self._next]
        self._next += 1
        # What comes after it draws the same, whether the batch was loaded now or before.
        if generators is None:
            seeds.for_inside(number_of(self._inside.number, self._next))
        else:
            restore_generators(generators)
        if isinstance(batch, _End):
            raise StopIteration
        result: T = batch
        return result

    def note(self, group: Group) -> None:
        """It has been handed out: to the iteration that runs, or to the next one."""
        if self._inside is None:
            self._group = group
        else:
            self._inside.group = group

    def decide(self, decision: Callable[[int, Group], T]) -> T:
        """What *decision* gives, which counts; in another run what it has given in the first one. Its arguments: which
        one of this run it is, from 0, and the group that the iteration was given."""
        assert self._inside is not None
        decided, at = self._inside.decided, self._next_decided
        if at == len(decided):
            decided.append(decision(at, self._inside.group))
        self._next_decided += 1
        found: T = decided[at]
        return found

    def _check_all_taken(self) -> None:
        """A run that counts, and has come to its end, has taken all that one which was cut had. For its result only it
        may take fewer: what it gets from collectives is its own."""
        assert self._inside is not None
        left = [batch for batch, _ in self._inside.taken[self._next :] if not isinstance(batch, _End)]
        if left:
            raise UsageError(
                "an iteration that is run again takes fewer batches than before it was cut: the others "
                "come from a generator that has ended since. Take them by next() on the result of job.batches() itself."
            )

    def make_room(self) -> None:
        """A pass that this run has made is about to begin. If a run that was cut has begun it, too, that one has
        never been."""
        assert self._inside is not None
        taken, begun, here = self._inside.taken, self._inside.begun, self._place.here
        same = (at for at, one in enumerate(begun) if one.num_taken == self._next and one.run != self.run)
        at = next(same, None)
        if at is None:
            if self._next < len(taken):
                raise UsageError(
                    "an iteration that is run again calls job.batches() where its first run took batches of another "
                    "pass: call it outside of the iteration, and next() on its result inside."
                )
            return
        first = begun[at]
        for one in begun[at:]:
            batches = one.of()
            if batches is not None:
                batches.forget()
        del begun[at:], taken[self._next :]
        here.passes, here.batch = first.passes, first.batch

    def begins(self, batches: OnePass) -> None:
        """A pass that this run has made."""
        if self._inside is not None:
            here = self._place.here
            begun = _Begun(self.run, len(self._inside.taken), here.passes, here.batch, weakref.ref(batches))
            self._inside.begun.append(begun)

    def number_in_section(self) -> int:
        """Of the pass that begins in this run of a section: the same in each run, and in a replacement's."""
        assert self._inside is not None
        self._inside.num_section_passes += 1
        return _OF_SECTIONS + self._place.here.sections * _MAX_IN_SECTION + self._inside.num_section_passes - 1
