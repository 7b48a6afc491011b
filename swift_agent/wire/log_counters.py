"""What the logs of messages of a node's workers have done, in memory that they share with their agent.

    worker: its figures, after each iteration --> agent: the sum of all there are and were, when somebody asks

The file lies beside the agent's socket, and has the fields of `LogFigures` for each local rank. Only the worker writes
its own while it lives; the agent takes them over before it starts another one, so that a sum never falls. This module
must never decide anything.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableSequence

from swift_agent.wire.standing import shared_numbers
from swift_logging_store.log.rate import LogFigures

NAME = "log-counters"
_FIELDS = len(LogFigures._fields)


class LogCounters:
    """The agent's end, of *num_workers*, in *directory*."""

    def __init__(self, directory: str, num_workers: int) -> None:
        self._num_workers, self._past = num_workers, LogFigures()
        self._numbers = shared_numbers(os.path.join(directory, NAME), os.O_CREAT | os.O_EXCL, num_workers * _FIELDS)

    def retire(self, local_rank: int) -> None:
        """That process has ended, and another one begins with nothing."""
        if local_rank >= self._num_workers:
            return
        self._past = self._past.plus(self._of(local_rank))._replace(num_given_up=0)
        self._numbers[local_rank * _FIELDS : (local_rank + 1) * _FIELDS] = memoryview(bytes(8 * _FIELDS)).cast("q")

    def total(self) -> LogFigures:
        """Of all processes that this node has had. Any thread."""
        total = self._past
        for local_rank in range(self._num_workers):
            total = total.plus(self._of(local_rank))
        return total

    def _of(self, local_rank: int) -> LogFigures:
        return LogFigures(*self._numbers[local_rank * _FIELDS : (local_rank + 1) * _FIELDS])


class MyLogCounters:
    """A worker's end; without a *directory*, or where the file cannot be opened, nothing reads it."""

    def __init__(self, directory: str | None = None, local_rank: int = 0) -> None:
        self._numbers: MutableSequence[int] = [0] * _FIELDS
        if directory is not None:
            with contextlib.suppress(OSError, ValueError):  # a full disk; a helper, whose number is larger
                numbers = shared_numbers(os.path.join(directory, NAME), 0, (local_rank + 1) * _FIELDS)
                self._numbers = numbers[local_rank * _FIELDS :]  # type: ignore[assignment]

    def tell(self, figures: LogFigures) -> None:
        numbers = self._numbers
        for index, number in enumerate(figures):
            numbers[index] = number
