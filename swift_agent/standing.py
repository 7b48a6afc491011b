"""How far each worker of a node is, in memory that it shares with its agent: all that one that was killed can say.

The file lies beside the agent's socket and holds four numbers for each local rank. Only the worker writes its own while
it lives; the agent clears them before it starts another one and reads them once a process has ended. A worker that
cannot open the file trains all the same, and nothing is known of it.

This module must never decide anything, and costs an iteration no more than three stores.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import MutableSequence
from dataclasses import dataclass

NAME = "standings"
# 8-byte integers.
_FIELDS = 4
_ITERATION, _BEGUN, _DONE, _EXCUSED = range(_FIELDS)


@dataclass(frozen=True)
class Standing:
    """*iteration*: the last that was begun, or from which a replacement was to go on; -1 if there is none. *begun*,
    *num_iterations*: how many of its own were begun, and finished. *excused*: it has itself replaced because of the
    failure of another worker."""

    iteration: int = -1
    begun: bool = False
    num_iterations: int = 0
    excused: bool = False


class Standings:
    """The agent's end, of *num_workers*, in *directory*."""

    def __init__(self, directory: str, num_workers: int) -> None:
        self._numbers = _map(os.path.join(directory, NAME), os.O_CREAT | os.O_EXCL, num_workers)

    def clear(self, local_rank: int) -> None:
        start = local_rank * _FIELDS
        for index in range(start, start + _FIELDS):
            self._numbers[index] = 0

    def of(self, local_rank: int) -> Standing:
        start = local_rank * _FIELDS
        iteration, begun, done, excused = self._numbers[start : start + _FIELDS]
        return Standing(iteration - 1, begun > 0, done, excused > 0)


class MyStanding:
    """A worker's end; without a *directory* nobody looks."""

    def __init__(self, directory: str | None = None, local_rank: int = 0) -> None:
        self._numbers: MutableSequence[int] = [0] * _FIELDS
        if directory is not None:
            # A file of another length, or none: of an agent of another version, or a full disk.
            with contextlib.suppress(OSError, ValueError):
                numbers = _map(os.path.join(directory, NAME), 0, local_rank + 1)
                self._numbers = numbers[local_rank * _FIELDS : (local_rank + 1) * _FIELDS]  # type: ignore[assignment]

    def replaces(self, iteration: int) -> None:
        """It replaces another one, and is to go on from there."""
        self._numbers[_ITERATION] = iteration + 1

    def begins(self, iteration: int) -> None:
        numbers = self._numbers
        numbers[_ITERATION] = iteration + 1
        numbers[_BEGUN] = 1

    def finishes(self) -> None:
        self._numbers[_DONE] += 1

    def excuse(self) -> None:
        self._numbers[_EXCUSED] = 1


def _map(path: str, flags: int, num_workers: int) -> memoryview:
    size = num_workers * _FIELDS * 8
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        if flags & os.O_CREAT:
            os.posix_fallocate(fd, 0, size)  # a full disk must not end who writes later
        elif os.fstat(fd).st_size < size:
            raise ValueError(f"{path} is shorter than {size} bytes")
        return memoryview(mmap.mmap(fd, size)).cast("q")
    finally:
        os.close(fd)
