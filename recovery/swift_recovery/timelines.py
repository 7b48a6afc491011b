"""Which of several generations that write checkpoints into one directory counts, by the names in it. Pure.

A generation of a run of a job (`Timeline`) says in the directory that it has begun, and before which iteration
(`Claim`). Within a run generations are ordered by their numbers. Runs are ordered by their *terms*: the first claim of
a run has one more than all that it finds, so the order needs no clock, and no etcd that remembers.

    timeline-00000001.e17-1.000000000000.json    run e17 begins
    timeline-00000001.e17-2.000000000060.json    its generation 2 goes on before iteration 60
    timeline-00000002.e5-1.000000000080.json     another etcd: run e5 begins with the checkpoint of 80

What a timeline has written counts, but for what comes after the beginning of a later one: that is another history. So
the one who was cut off may write what it likes: nobody will read it, and it takes nothing away.

Where two runs claim the same term at once the order is that of their names. Must never remove the claim of the latest
timeline, without which an earlier one would count again.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from swift_recovery.errors import StateError

_ENTRY = re.compile(r"iteration-(\d{12})(?:\.([a-z]\d+)-(\d+))?")
_CLAIM = re.compile(r"timeline-(\d{8,})\.([a-z]\d+)-(\d+)\.(\d{12})\.json")


class Superseded(StateError):
    """A later generation has begun: what this one has made does not count any more."""


@dataclass(frozen=True)
class Timeline:
    """Generation *generation* of run *run*: a letter and a number. Without a run: of nobody who could be told apart."""

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
class History:
    entries: tuple[Entry, ...] = ()
    claims: tuple[Claim, ...] = ()

    def order(self, timeline: Timeline) -> tuple[int, str, int]:
        """Larger for a later one. A run that has not claimed comes before all that have."""
        terms = [claim.term for claim in self.claims if claim.timeline.run == timeline.run]
        return max(terms, default=0), timeline.run, timeline.generation

    def is_later(self, entry: Entry, timeline: Timeline) -> bool:
        return self.order(entry.timeline) > self.order(timeline)

    def is_dead(self, entry: Entry) -> bool:
        """It comes after the beginning of a later timeline."""
        mine = self.order(entry.timeline)
        return any(claim.begins < entry.iteration and self.order(claim.timeline) > mine for claim in self.claims)

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

    def without(self, entries: Collection[Entry]) -> History:
        return replace(self, entries=tuple(entry for entry in self.entries if entry not in entries))

    def needless(self, timeline: Timeline) -> list[Claim]:
        """Earlier ones than that of *timeline*, which make nothing dead that this one does not, and give no run its
        place that has written anything."""
        runs = {entry.timeline.run for entry in self.entries} | {timeline.run}
        mine = self.order(timeline)
        found = []
        for claim in self.claims:
            order = self.order(claim.timeline)
            kills = any(e.iteration > claim.begins and self.order(e.timeline) < order for e in self.entries)
            if order < mine and not kills and (claim.timeline.run not in runs or claim.timeline.run == timeline.run):
                found.append(claim)
        return found


def read(names: Iterable[str]) -> History:
    """Of the files and directories of those names; others mean nothing."""
    entries, claims = [], []
    for name in names:
        if (found := _ENTRY.fullmatch(name)) is not None:
            entries.append(Entry(int(found[1]), Timeline(found[2] or "", int(found[3] or 0))))
        elif (found := _CLAIM.fullmatch(name)) is not None:
            claims.append(Claim(int(found[1]), Timeline(found[2], int(found[3])), int(found[4])))
    order = lambda entry: (entry.iteration, entry.timeline.run, entry.timeline.generation)  # noqa: E731
    return History(tuple(sorted(entries, key=order)), tuple(sorted(claims, key=lambda claim: claim.name)))
