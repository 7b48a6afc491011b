"""Which of several generations that write checkpoints into one directory counts, by the names in it. Pure.

A generation of a run of a job (`Timeline`) says in the directory that it has begun, and before which iteration
(`Claim`). Within a run generations are ordered by their numbers. Runs are ordered by their *terms*: the first claim of
a run has one more than all that it finds, so the order needs no clock, and no etcd that remembers.

    timeline-00000001.e17-1.000000000000.json    run e17 begins
    timeline-00000001.e17-2.000000000060.json    its generation 2 goes on before iteration 60
    timeline-00000002.e5-1.000000000080.json     another etcd: run e5 begins with the checkpoint of 80

What a timeline has written counts, but for what comes after the beginning of a later one: that is another history. So
a process that was cut off may write what it likes: that is never read, and it takes nothing away.

It may write at any time. So a claim is removed only when others make dead all that it could make dead, also of what is
yet to come: one of a later timeline that began no later, or a low-water mark. And the last claim of each run
stays, or the run would be taken for a new one if it came back.

    timeline-low.e5-1.000000000060.json          what timelines before that one have written before 60 is removed

Where two runs claim the same term at once the later one is that of the larger number: the later one of an etcd.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from swift_recovery.errors import StateError

_ENTRY = re.compile(r"iteration-(\d{12})(?:\.([a-z]\d+)-(\d+))?")
_CLAIM = re.compile(r"timeline-(\d{8,})\.([a-z]\d+)-(\d+)\.(\d{12})\.json")
_LOW_WATER = re.compile(r"timeline-low\.([a-z]\d+)-(\d+)\.(\d{12})\.json")


class Superseded(StateError):
    """A later generation has begun: what this one has made does not count any more."""


@dataclass(frozen=True)
class Timeline:
    """Generation *generation* of run *run*: a letter and a number. Without a run: of none that could be told apart."""

    run: str = ""
    generation: int = 0

    def __str__(self) -> str:
        return f"(generation {self.generation} of run {self.run})" if self.run else "(of no run)"


NOBODY = Timeline()


def number_of(timeline: Timeline) -> int:
    """Above 0, and the same for equal ones: what ranks compare when they have loaded a checkpoint each."""
    return 1 + zlib.crc32(str(timeline).encode())


@dataclass(frozen=True)
class Entry:
    """The directory of the checkpoint of *iteration* that *timeline* takes."""

    iteration: int
    timeline: Timeline = NOBODY

    @property
    def name(self) -> str:
        name, (run, generation) = f"iteration-{self.iteration:012d}", (self.timeline.run, self.timeline.generation)
        return f"{name}.{run}-{generation}" if run else name


@dataclass(frozen=True)
class Claim:
    """*timeline* has begun before iteration *begins*."""

    term: int
    timeline: Timeline
    begins: int

    @property
    def name(self) -> str:
        run, generation = self.timeline.run, self.timeline.generation
        return f"timeline-{self.term:08d}.{run}-{generation}.{self.begins:012d}.json"

    def to_json(self) -> dict[str, Any]:
        """For people: readers take the name."""
        run, generation = self.timeline.run, self.timeline.generation
        return {"term": self.term, "run": run, "generation": generation, "begins": self.begins}


@dataclass(frozen=True)
class LowWater:
    """What timelines before *timeline* had written before *iteration* was removed: if more of it comes it is dead."""

    timeline: Timeline
    iteration: int

    @property
    def name(self) -> str:
        return f"timeline-low.{self.timeline.run}-{self.timeline.generation}.{self.iteration:012d}.json"

    def to_json(self) -> dict[str, Any]:
        return {"run": self.timeline.run, "generation": self.timeline.generation, "iteration": self.iteration}


@dataclass(frozen=True)
class History:
    entries: tuple[Entry, ...] = ()
    claims: tuple[Claim, ...] = ()
    marks: tuple[LowWater, ...] = ()

    @cached_property
    def _terms(self) -> dict[str, int]:
        terms: dict[str, int] = {}
        for claim in self.claims:
            terms[claim.timeline.run] = max(claim.term, terms.get(claim.timeline.run, 0))
        return terms

    def order(self, timeline: Timeline) -> tuple[int, int, str, int]:
        """Larger for a later one. A run that has not claimed comes before all that have."""
        run = timeline.run
        return self._terms.get(run, 0), int(run[1:] or 0), run[:1], timeline.generation

    def is_later(self, entry: Entry, timeline: Timeline) -> bool:
        return self.order(entry.timeline) > self.order(timeline)

    def is_dead(self, entry: Entry) -> bool:
        """It comes after the beginning of a later timeline, or below the low-water mark of one."""
        mine = self.order(entry.timeline)
        after = (claim.timeline for claim in self.claims if claim.begins < entry.iteration)
        below = (mark.timeline for mark in self.marks if entry.iteration < mark.iteration)
        return any(self.order(timeline) > mine for timeline in (*after, *below))

    def newest_first(self) -> list[Entry]:
        """Without those that are dead. Of one iteration the later timeline comes first."""
        living = [entry for entry in self.entries if not self.is_dead(entry)]
        return sorted(living, key=lambda entry: (entry.iteration, self.order(entry.timeline)), reverse=True)

    def has(self, timeline: Timeline) -> bool:
        return not timeline.run or any(claim.timeline == timeline for claim in self.claims)

    def check(self, timeline: Timeline) -> None:
        """Raises `Superseded` if a later timeline has claimed: one that has not is earlier than all that have."""
        if not timeline.run:
            return
        later = [claim for claim in self.claims if self.order(claim.timeline) > self.order(timeline)]
        if later:
            last = max(later, key=lambda claim: self.order(claim.timeline))
            raise Superseded(
                f"another generation has taken over {last.timeline}, and has begun before iteration {last.begins}: "
                f"this one {timeline} writes no checkpoints there any more. If both belong to jobs that run on "
                "purpose, give each a directory of its own"
            )

    def new_claim(self, timeline: Timeline, begins: int) -> Claim:
        """Raises `Superseded`. The first of a run is later than all that are there."""
        if any(claim.timeline.run == timeline.run for claim in self.claims):
            self.check(timeline)
        term = self.order(timeline)[0] or 1 + max((claim.term for claim in self.claims), default=0)
        return Claim(term, timeline, begins)

    def low_water(self, timeline: Timeline, kept: Collection[Entry]) -> LowWater | None:
        """The mark that *timeline* leaves where *kept* is all that it has left, if a claim can go for it."""
        if not timeline.run or not kept:
            return None
        mark = LowWater(timeline, min(entry.iteration for entry in kept))
        before, after = self.needless(), replace(self, marks=(*self.marks, mark)).needless()
        return mark if any(isinstance(file, Claim) and file not in before for file in after) else None

    def needless(self) -> list[Claim | LowWater]:
        """Without them the same is dead, whatever is yet written by whomever, and each run keeps its place. What stands
        in for one is of a later timeline, so of any number that goes at once, by several processes, the last stays."""
        claims = sorted(self.claims, key=lambda claim: self.order(claim.timeline))
        found: list[Claim | LowWater] = []
        for number, claim in enumerate(claims):
            later = [other for other in claims[number + 1 :] if self.order(other.timeline) > self.order(claim.timeline)]
            is_last = not any(it.timeline.run == claim.timeline.run and it.term >= claim.term for it in later)
            if not is_last and any(it.begins <= claim.begins or self._is_below_water(it) for it in later):
                found.append(claim)
        for mark in self.marks:
            place = self.order(mark.timeline)
            above = (it for it in self.marks if self.order(it.timeline) >= place and it.iteration >= mark.iteration)
            if any(it != mark for it in above):
                found.append(mark)
        return found

    def _is_below_water(self, claim: Claim) -> bool:
        """Nothing that timelines before it write counts: it is dead by the claim, or by a mark."""
        place = self.order(claim.timeline)
        return any(claim.begins < mark.iteration and place <= self.order(mark.timeline) for mark in self.marks)


def read(names: Iterable[str]) -> History:
    """The history in these names of files and directories; others mean nothing."""
    entries, claims, marks = [], [], []
    for name in names:
        if (found := _ENTRY.fullmatch(name)) is not None:
            entries.append(Entry(int(found[1]), Timeline(found[2] or "", int(found[3] or 0))))
        elif (found := _CLAIM.fullmatch(name)) is not None:
            claims.append(Claim(int(found[1]), Timeline(found[2], int(found[3])), int(found[4])))
        elif (found := _LOW_WATER.fullmatch(name)) is not None:
            marks.append(LowWater(Timeline(found[1], int(found[2])), int(found[3])))
    order = lambda entry: (entry.iteration, entry.timeline.run, entry.timeline.generation)  # noqa: E731
    by_name = lambda file: file.name  # noqa: E731
    return History(
        tuple(sorted(entries, key=order)), tuple(sorted(claims, key=by_name)), tuple(sorted(marks, key=by_name)))
