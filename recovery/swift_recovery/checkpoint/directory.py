"""Checkpoints in a directory that all nodes see: what is there, what counts, how one comes and goes.

    {directory}/iteration-000000000100.e17-2/rank-3.5f2e91ab.state   a part: the state of rank 3 and of its replicas
                                             committed.json          names the parts; written last
                timeline-00000001.e17-2.000000000060.json            generation 2 of run e17 has begun before 60
                timeline-low.e17-2.000000000040.json                 of earlier ones what is below 40 was removed

A checkpoint counts from the moment on at which its `committed.json` has its name: then all its parts are on the disk.
One is removed by taking its `committed.json` away first.

A generation that was believed dead may still write. So each writes into directories of its own name, and removes none
of a later one; and what an earlier generation has written counts only up to the iteration with which a later one has
begun (`timelines`). The name of a part is never used again. Must never decide when a checkpoint is taken, or by whom.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swift_logging_store.stores.contract import Store
from swift_recovery.checkpoint import timelines
from swift_recovery.checkpoint.timelines import NOBODY, Entry, History, Timeline
from swift_recovery.errors import StateError
from swift_recovery.planning.reports import ranges_of, ranks_of
from swift_recovery.transfer.state_file import Written

VERSION = 1
_MARK = "committed.json"


@dataclass(frozen=True)
class Part:
    """A file *name* with the state of *ranks*, which are replicas of each other; see `Written`."""

    name: str
    ranks: tuple[int, ...]
    written: Written

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ranks": ranges_of(self.ranks),
            "num_bytes": self.written.num_bytes,
            "checksum": f"{self.written.checksum:016x}",
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Part:
        """Raises KeyError, TypeError or ValueError on what `to_json` did not write."""
        name = data["name"]
        if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is no name of a file")
        return cls(name, ranks_of(data["ranks"]), Written(int(data["num_bytes"]), int(data["checksum"], 16)))


@dataclass(frozen=True)
class Checkpoint:
    """The state of the whole job before *iteration*: every rank below *world_size* is in one of *parts*. *timeline*: of
    the generation that has taken it. *counts*: of messages, as JSON, of ranks whose part another one has written."""

    iteration: int
    world_size: int
    parts: tuple[Part, ...]
    timeline: Timeline = NOBODY
    counts: Mapping[int, Any] = field(default_factory=dict)

    def part_of(self, rank: int) -> Part:
        """Where all ranks hold the same state there is one part, for a job of any size."""
        if len(self.parts) == 1:
            return self.parts[0]
        return next(part for part in self.parts if rank in part.ranks)

    def fits(self, world_size: int) -> bool:
        """Whether a job of that many ranks can go on from it."""
        return world_size == self.world_size or len(self.parts) == 1

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "iteration": self.iteration,
            "world_size": self.world_size,
            "parts": [part.to_json() for part in self.parts],
            "run": self.timeline.run,
            "generation": self.timeline.generation,
        } | ({"counts": {str(rank): told for rank, told in self.counts.items()}} if self.counts else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Raises KeyError, TypeError or ValueError on what `to_json` did not write."""
        if data["version"] != VERSION:
            raise ValueError(f"its format has version {data['version']}, this is {VERSION}")
        # A version that knew of no runs has written none.
        timeline = Timeline(str(data.get("run", "")), int(data.get("generation", 0)))
        parts = tuple(map(Part.from_json, data["parts"]))
        counts = {int(rank): told for rank, told in dict(data.get("counts", {})).items()}
        found = cls(int(data["iteration"]), int(data["world_size"]), parts, timeline, counts)
        ranks = sorted(rank for part in found.parts for rank in part.ranks)
        if ranks != list(range(found.world_size)):
            raise ValueError(f"it has parts of ranks {ranges_of(ranks)}, of {found.world_size}")
        return found


def to_remove(committed: Iterable[int], begun: Iterable[int], keep: int, newest: int) -> list[int]:
    """The iterations whose checkpoints go when that of *newest* counts: what is older, but for the newest *keep* that
    count, itself included. Later ones may be under way, or of a run that went further and cannot be loaded."""
    counting = set(committed)
    kept = sorted(iteration for iteration in counting if iteration <= newest)[-keep:]
    return sorted(iteration for iteration in {*counting, *begun} if iteration < newest and iteration not in kept)


class CheckpointDirectory:
    """Checkpoints in *store*. All methods raise OSError if that does."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __str__(self) -> str:
        return str(self.store)

    # ---- reading ----

    def committed(self) -> list[int]:
        """The iterations of the checkpoints that count, in ascending order."""
        return sorted({entry.iteration for entry in self._counting(self._history())})

    def counts(self, iteration: int) -> bool:
        return self._newest_of(iteration) is not None

    def newest(self, before: int | None = None) -> int:
        """The iteration of the newest one that counts (below *before*), 0 if there is none."""
        for entry in self._history().newest_first():
            if (before is None or entry.iteration < before) and self._is_marked(entry):
                return entry.iteration
        return 0

    def load(self, iteration: int) -> Checkpoint:
        """One that counts. Raises `StateError` if what says so cannot be understood."""
        entry = self._newest_of(iteration) or Entry(iteration)
        path = f"{entry.name}/{_MARK}"
        with self.store.reading(path) as stream:
            data = stream.read()
        try:
            found = Checkpoint.from_json(json.loads(data))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{self.store}/{path} cannot be used: {error}") from None
        if (found.iteration, found.timeline) != (iteration, entry.timeline):
            raise StateError(f"{self.store}/{path} is of iteration {found.iteration} {found.timeline}")
        return found

    # ---- writing ----

    def claim(self, timeline: Timeline, begins: int, must_be_ours: Callable[[], None] = lambda: None) -> None:
        """The generation of *timeline* has begun before iteration *begins*: what earlier ones write from there on does
        not count. May be repeated. Raises `Superseded`, and what *must_be_ours* does.

        *must_be_ours* is asked after the claims were read, so that a later successor reads this one, or claims a term
        that is no smaller: a process that is stopped anywhere here cannot come after its successor."""
        history = self._history()
        must_be_ours()
        if history.has(timeline):
            history.check(timeline)
            return
        claim = history.new_claim(timeline, begins)
        self.store.put(claim.name, json.dumps(claim.to_json()).encode())
        self._history().check(timeline)  # two that begin at once both see the other, or one does

    def check(self, timeline: Timeline) -> None:
        """Raises `Superseded` if a later generation has begun."""
        self._history().check(timeline)

    def new_part(self, iteration: int, rank: int, timeline: Timeline = NOBODY) -> str:
        """The path in the store of a part that is to be written: a name that no other has."""
        return f"{Entry(iteration, timeline).name}/rank-{rank}.{uuid.uuid4().hex[:8]}.state"

    def path_of(self, checkpoint: Checkpoint, part: Part) -> str:
        return f"{Entry(checkpoint.iteration, checkpoint.timeline).name}/{part.name}"

    def commit(self, checkpoint: Checkpoint) -> None:
        """All its parts are durable: it counts when this returns. Raises `Superseded`."""
        self.check(checkpoint.timeline)
        data = json.dumps(checkpoint.to_json(), indent=1).encode()
        self.store.put(f"{Entry(checkpoint.iteration, checkpoint.timeline).name}/{_MARK}", data)

    def check_parts(self, checkpoint: Checkpoint) -> None:
        """Raise `StateError` if this process does not see all parts, in their sizes."""
        for part in checkpoint.parts:
            path = self.path_of(checkpoint, part)
            if self.store.size(path) != part.written.num_bytes:
                raise StateError(
                    f"the part {path} of ranks {ranges_of(part.ranks)} is not there for all: do all nodes share "
                    f"{self.store}?"
                )

    def remove(self, keep: int, newest: int, timeline: Timeline = NOBODY) -> list[int]:
        """That of *newest* counts: see `to_remove`. Of later generations than that of *timeline* nothing goes. Returns
        what was removed. Raises `Superseded`."""
        history = self._history()
        history.check(timeline)
        counting = self._counting(history)
        begun = [entry.iteration for entry in history.entries]
        gone = set(to_remove([entry.iteration for entry in counting], begun, keep, newest))
        # A dead one beside one that counts goes, too.
        old = [entry for entry in history.entries if entry.iteration < newest and not history.is_later(entry, timeline)]
        removed = [entry for entry in old if entry.iteration in gone or entry not in counting]
        for entry in removed:
            self.store.remove(f"{entry.name}/{_MARK}")
            self.store.remove_directory(entry.name)
        # What stands in for what goes now is there since before: a listing of the names meanwhile has one of the two.
        kept = [entry for entry in counting if entry not in removed and entry.iteration <= newest]
        if (mark := history.low_water(timeline, kept)) is not None:
            self.store.put(mark.name, json.dumps(mark.to_json()).encode())
        for file in history.needless():
            self.store.remove(file.name)
        return sorted({entry.iteration for entry in removed} & gone)

    def _history(self) -> History:
        return timelines.read(self.store.names())

    def _is_marked(self, entry: Entry) -> bool:
        return self.store.exists(f"{entry.name}/{_MARK}")

    def _counting(self, history: History) -> list[Entry]:
        return [entry for entry in history.newest_first() if self._is_marked(entry)]

    def _newest_of(self, iteration: int) -> Entry | None:
        entries = (entry for entry in self._history().newest_first() if entry.iteration == iteration)
        return next(filter(self._is_marked, entries), None)
