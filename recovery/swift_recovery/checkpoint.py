"""Checkpoints in a directory that all nodes see: what is there, what counts, how one comes and goes.

    {directory}/iteration-000000000100/rank-3.5f2e91ab.state     a part: the state of rank 3 and of its replicas
                                       committed.json            names the parts; written last

A checkpoint counts from the moment on at which its `committed.json` has its name: then all its parts are on the disk.
Parts have names that nobody uses again, so a process that was believed dead cannot change what counts. One is removed
by taking its `committed.json` away first. Must never decide when a checkpoint is taken, or by whom.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        if not isinstance(name, str) or Path(name).name != name:
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


def to_remove(committed: Iterable[int], begun: Iterable[int], keep: int) -> list[int]:
    """The iterations whose checkpoints go: all but the newest *keep* that count, and what was begun before those and
    never came to count. Newer ones may be under way."""
    counting = sorted(committed)
    if not counting:
        return []
    kept = counting[-keep:]
    return sorted(iteration for iteration in {*counting, *begun} if iteration < kept[-1] and iteration not in kept)


class CheckpointDirectory:
    """*path* is made if need be. All methods raise OSError if the filesystem does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def committed(self) -> list[int]:
        """The iterations of the checkpoints that count, in ascending order."""
        return sorted(number for number, at in self._found().items() if (at / _MARK).exists())

    def newest(self, before: int | None = None) -> int:
        """The iteration of the newest one that counts (below *before*), 0 if there is none."""
        return max((number for number in self.committed() if before is None or number < before), default=0)

    def new_part(self, iteration: int, rank: int) -> Path:
        """Where a part is to be written: a name that nobody has."""
        at = self._at(iteration)
        at.mkdir(parents=True, exist_ok=True)
        return at / f"rank-{rank}.{uuid.uuid4().hex[:8]}.state"

    def path_of(self, iteration: int, part: Part) -> Path:
        return self._at(iteration) / part.name

    def commit(self, checkpoint: Checkpoint) -> None:
        """All its parts are on the disk: it counts when this returns."""
        at = self._at(checkpoint.iteration)
        new = at / f"{_MARK}.{uuid.uuid4().hex[:8]}"
        with open(new, "x") as stream:
            json.dump(checkpoint.to_json(), stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        _sync(at)  # the names of the parts, before they are told of
        os.replace(new, at / _MARK)
        for directory in (at, self.path):
            _sync(directory)

    def load(self, iteration: int) -> Checkpoint:
        """One that counts. Raises `StateError` if what says so cannot be understood."""
        path = self._at(iteration) / _MARK
        try:
            found = Checkpoint.from_json(json.loads(path.read_bytes()))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{path} cannot be used: {error}") from None
        if found.iteration != iteration:
            raise StateError(f"{path} is of iteration {found.iteration}")
        return found

    def remove(self, keep: int) -> list[int]:
        """Keep the newest *keep* that count, and what is newer; returns what was removed."""
        removed = to_remove(self.committed(), self._found(), keep)
        for iteration in removed:
            at = self._at(iteration)
            with contextlib.suppress(FileNotFoundError):
                os.remove(at / _MARK)
            _sync(at)
            shutil.rmtree(at, ignore_errors=True)
        return removed

    def _found(self) -> dict[int, Path]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return {}
        return {int(match[1]): self.path / match[0] for name in names if (match := _NAME.fullmatch(name))}

    def _at(self, iteration: int) -> Path:
        return self.path / f"iteration-{iteration:012d}"


def _sync(directory: Path) -> None:
    """Names of files are on the disk only when their directory is."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
