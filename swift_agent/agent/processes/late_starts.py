"""Workers that could not be started for want of something: a descriptor, a process, memory, room. Pure.

Most shortages are over in a moment; only one that stays is a failure of the worker. So its start is tried again for a
while before that is said, with the place that it had: its record in `machine` is of that generation.

This module must never read a clock or start anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swift_agent.agent.lifecycle.state import Worker
from swift_agent.wire.environment import Placement
from swift_rendezvous.roster.records import WorkerExit

# As long as for stores that cannot be started.
TRY_S = 20.0


@dataclass(frozen=True)
class NotStarted:
    """A worker that cannot be started. *end*: its end, if that stays so. *may_pass*: for want of something of which
    there may be enough again in a moment. *warm*: as it was ordered."""

    place: Placement
    warm: bool
    end: WorkerExit
    may_pass: bool


def no_room(free: int | None, workers: Sequence[int], helpers: Sequence[int]) -> str:
    """Why one more process must not be started beside *workers*; '' if it may. All are bytes: *free* of the node, those
    of its workers, and of *helpers* that were started there before and may still grow as large. The kernel would else
    end one of them, and it may be a worker."""
    largest = max(workers, default=0)
    coming = sum(max(0, largest - one) for one in helpers)
    if free is None or not largest or free - coming > largest:
        return ""
    return f"its node has {free >> 20} MiB of memory left, and a worker takes {largest >> 20} MiB"


class LateStarts:
    def __init__(self) -> None:
        self._waiting: dict[int, NotStarted] = {}  # by local rank
        self._since: dict[int, tuple[int, float]] = {}  # the generation of its place, and when it failed first in that

    def failed(self, one: NotStarted, now_s: float) -> WorkerExit | None:
        """*one* could not be started. Its end if that is to be told, None if it is tried again."""
        local_rank, generation = one.end.local_rank, one.place.generation
        if self._since.get(local_rank, (-1, 0.0))[0] != generation:
            self._since[local_rank] = generation, now_s
        if not one.may_pass or now_s - self._since[local_rank][1] >= TRY_S:
            return one.end
        self._waiting[local_rank] = one
        return None

    def is_tried_again(self, one: NotStarted) -> bool:
        """Whether it has failed before."""
        return self._since.get(one.end.local_rank, (-1, 0.0))[0] == one.place.generation

    def take_due(self, workers: Mapping[int, Worker]) -> tuple[list[NotStarted], list[WorkerExit]]:
        """Those to be started again now, and the ends of unwanted ones, for which others wait."""
        again, ends = [], []
        for local_rank, one in self._waiting.items():
            worker = workers.get(local_rank)
            if worker is None or worker.generation != one.place.generation or not worker.alive or worker.pid:
                continue
            if worker.killed:
                ends.append(one.end)
            else:
                again.append(one)
        self._waiting.clear()
        return again, ends

    def clear(self) -> None:
        self._waiting.clear()
        self._since.clear()
