"""How far each worker of a node is, and until when it may go on, in memory that it shares with its agent.

    agent:  until ---------------------------------> worker: stands still after that, and says so
    worker: iteration, how many were finished, ... -> agent:  all that one that was killed can say

The file lies beside the agent's socket. It begins with the number that the agent writes, as no message could tell it: a
worker whose threads are busy, or hold each other up, takes none. Five numbers for each local rank follow. Only the
worker writes its own while it lives; the agent clears them before it starts another one. A worker that cannot open the
file trains all the same, and nothing is known of it.

This module must never decide anything, and costs an iteration no more than three stores.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
from collections.abc import MutableSequence
from dataclasses import dataclass

NAME = "standings"
# 8-byte integers.
_UNTIL_NS = 0
_HEAD = 1
_FIELDS = 5
_ITERATION, _BEGUN, _DONE, _EXCUSED, _STANDS = range(_FIELDS)


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
    """The agent's end, of *num_workers*, in *directory*. A helper, whose number is larger, has no standing: it has no
    place that could be lost."""

    def __init__(self, directory: str, num_workers: int) -> None:
        self._num_workers, self.directory = num_workers, directory
        self._numbers = shared_numbers(os.path.join(directory, NAME), os.O_CREAT | os.O_EXCL, _size(num_workers))

    def vouch(self, until_s: float) -> None:
        """The places of this node are its own until then, on the monotonic clock. Before the first call nothing is said
        of that."""
        self._numbers[_UNTIL_NS] = int(until_s * 1e9)

    def stands(self, local_rank: int) -> bool:
        """Whether that one has stopped by itself, and was not woken since."""
        return local_rank < self._num_workers and self._numbers[_HEAD + local_rank * _FIELDS + _STANDS] > 0

    def clear(self, local_rank: int) -> None:
        start = _HEAD + local_rank * _FIELDS
        for index in range(start, start + _FIELDS):
            self._numbers[index] = 0

    def of(self, local_rank: int) -> Standing:
        if local_rank >= self._num_workers:
            return Standing()
        start = _HEAD + local_rank * _FIELDS
        iteration, begun, done, excused, _ = self._numbers[start : start + _FIELDS]
        return Standing(iteration - 1, begun > 0, done, excused > 0)


class MyStanding:
    """A worker's end; without a *directory* nothing reads it."""

    def __init__(self, directory: str | None = None, local_rank: int = 0) -> None:
        self._numbers: MutableSequence[int] = [0] * _FIELDS
        self._head: MutableSequence[int] = [0] * _HEAD
        if directory is not None:
            # A file of another length, or none: of an agent of another version, or a full disk.
            with contextlib.suppress(OSError, ValueError):
                numbers = shared_numbers(os.path.join(directory, NAME), 0, _size(local_rank + 1))
                start = _HEAD + local_rank * _FIELDS
                self._head, self._numbers = numbers[:_HEAD], numbers[start : start + _FIELDS]  # type: ignore[assignment]

    def left_s(self) -> float:
        """How long the place of this worker is still known to be its own; less than 0: it is not."""
        until_ns = self._head[_UNTIL_NS]
        return (until_ns - time.monotonic_ns()) / 1e9 if until_ns else math.inf

    def stand(self, still: bool) -> None:
        self._numbers[_STANDS] = int(still)

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


def _size(num_workers: int) -> int:
    return _HEAD + num_workers * _FIELDS


def shared_numbers(path: str, flags: int, count: int) -> memoryview:
    """The first *count* 8-byte integers of a file that processes of this machine map: one writes each, others read it
    without a lock. *flags*: how it is opened besides; `O_CREAT`: it is made. Raises `OSError`, and `ValueError` if it
    is shorter."""
    size = count * 8
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        if flags & os.O_CREAT:
            os.posix_fallocate(fd, 0, size)  # a full disk must not end a process that writes later
        elif os.fstat(fd).st_size < size:
            raise ValueError(f"{path} is shorter than {size} bytes")
        return memoryview(mmap.mmap(fd, size)).cast("q")
    finally:
        os.close(fd)
