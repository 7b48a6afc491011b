"""Checkpoints in a directory that all nodes see: what is there, what counts, how one comes and goes.

    {directory}/iteration-000000000100/rank-3.5f2e91ab.state     a part: the state of rank 3 and of its replicas
                                       committed.json            names the parts; written last

A checkpoint counts from the moment on at which its `committed.json` has its name: then all its parts are on the disk.
Parts have names that nobody uses again, so a process that was believed dead cannot change what counts. One is removed
by taking its `committed.json` away first. Must never decide when a checkpoint is taken, or by whom.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swift_logging_store.store import Store
from swift_recovery.errors import StateError
from swift_recovery.progress import ranges_of, ranks_of
from swift_recovery.state_file import Written

VERSION = 1
_MARK = "committed.json"
_NAME = re.compile(r"iteration-(\d{12})")


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
    """The state of the whole job before *iteration*: every rank below *world_size* is in one of *parts*."""

    iteration: int
    world_size: int
    parts: tuple[Part, ...]

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
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Raises KeyError, TypeError or ValueError on what `to_json` did not write."""
        if data["version"] != VERSION:
            raise ValueError(f"its format has version {data['version']}, this is {VERSION}")
        found = cls(int(data["iteration"]), int(data["world_size"]), tuple(map(Part.from_json, data["parts"])))
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

    def committed(self) -> list[int]:
        """The iterations of the checkpoints that count, in ascending order."""
        return [number for number in self._found() if self.counts(number)]

    def counts(self, iteration: int) -> bool:
        return self.store.exists(f"{_at(iteration)}/{_MARK}")

    def newest(self, before: int | None = None) -> int:
        """The iteration of the newest one that counts (below *before*), 0 if there is none."""
        for number in reversed(self._found()):
            if (before is None or number < before) and self.counts(number):
                return number
        return 0

    def new_part(self, iteration: int, rank: int) -> str:
        """The path in the store of a part that is to be written: a name that nobody has."""
        return f"{_at(iteration)}/rank-{rank}.{uuid.uuid4().hex[:8]}.state"

    def path_of(self, iteration: int, part: Part) -> str:
        return f"{_at(iteration)}/{part.name}"

    def commit(self, checkpoint: Checkpoint) -> None:
        """All its parts are durable: it counts when this returns."""
        data = json.dumps(checkpoint.to_json(), indent=1).encode()
        self.store.put(f"{_at(checkpoint.iteration)}/{_MARK}", data)

    def load(self, iteration: int) -> Checkpoint:
        """One that counts. Raises `StateError` if what says so cannot be understood."""
        path = f"{_at(iteration)}/{_MARK}"
        with self.store.reading(path) as stream:
            data = stream.read()
        try:
            found = Checkpoint.from_json(json.loads(data))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{self.store}/{path} cannot be used: {error}") from None
        if found.iteration != iteration:
            raise StateError(f"{self.store}/{path} is of iteration {found.iteration}")
        return found

    def check_parts(self, checkpoint: Checkpoint) -> None:
        """Raise `StateError` if this process does not see all parts, in their sizes."""
        for part in checkpoint.parts:
            path = self.path_of(checkpoint.iteration, part)
            if self.store.size(path) != part.written.num_bytes:
                raise StateError(
                    f"the part {path} of ranks {ranges_of(part.ranks)} is not there for all: do all nodes share "
                    f"{self.store}?"
                )

    def remove(self, keep: int, newest: int) -> list[int]:
        """That of *newest* counts: see `to_remove`. Returns what was removed."""
        removed = to_remove(self.committed(), self._found(), keep, newest)
        for iteration in removed:
            self.store.remove(f"{_at(iteration)}/{_MARK}")
            self.store.remove_directory(_at(iteration))
        return removed

    def _found(self) -> list[int]:
        return sorted(int(match[1]) for name in self.store.names() if (match := _NAME.fullmatch(name)))


def _at(iteration: int) -> str:
    return f"iteration-{iteration:012d}"
