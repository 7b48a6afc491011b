"""Results of collectives that all members of a group have alike: each keeps them in its log, and one who lives gives
them to a replacement that repeats their iteration.

They are messages of a channel of which a rank is source and destination. The tag says which operation it was, and the
number the iteration and how many of these it has had before: so nothing has to be counted from one iteration to the
next, and a survivor that has passed over the rest of one counts as the others do.

Collectives that a replacement would have to make anew are none of this: those between C++ code, and those whose results
differ from rank to rank. Must never decide who repeats what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swift_agent import torch_private
from swift_agent.errors import NotInLog
from swift_agent.log_transfer import MAX_MESSAGE_BYTES
from swift_agent.repetition import Repetition
from swift_logging_store.errors import NotLoggable
from swift_logging_store.record import Channel
from swift_logging_store.tensors import check_plain

# Results of one operation of a group in one iteration, at most; the others are not kept.
MAX_NUMBER = 1 << 20


def giver_of(members: Sequence[int], rank: int, lost: Collection[int]) -> int | None:
    """Who gives *rank* what all *members* had: the next of them that is not *lost*, None if all are."""
    at = members.index(rank)
    return next((member for member in [*members[at + 1 :], *members[:at]] if member not in lost), None)


class Results:
    """Of the rank *rank*. *keep* logs a message."""

    def __init__(self, rank: int, repetition: Repetition, keep: Callable[[Channel, int, Tensor], None]) -> None:
        self._rank, self._repetition, self._keep = rank, repetition, keep
        self.is_updated: Callable[[], bool] = lambda: False
        """Whether the update of the iteration that is repeated is made."""
        self._members: dict[str, list[int]] = {}  # by the name of a group, those of all that were used
        self._iteration = -1
        self._counts: Counter[Channel] = Counter()

    def begin(self, iteration: int) -> None:
        """An iteration begins."""
        self._iteration = iteration
        self._counts.clear()

    def end(self) -> None:
        """It is over, or will be run again."""
        self._iteration = -1

    def ends(self, destination: int, before: int, lost: Collection[int]) -> dict[Channel, int]:
        """What *destination*, one of the ranks *lost*, is to have from this one, of the iterations before that: the
        channels, and their ends."""
        names = (
            name for name, members in self._members.items()
            if destination in members and giver_of(members, destination, lost) == self._rank
        )  # fmt: skip
        tags = range(len(torch_private.ALIKE))
        return {Channel(name, self._rank, self._rank, tag): before * MAX_NUMBER for name in names for tag in tags}

    def make(self, name: str, group: Any, outputs: Sequence[Tensor], call: Callable[[], Any]) -> Any:
        """One operation of those in `torch_private.ALIKE`, by *call*, or with what it gave the others."""
        members = self._members.get(group.group_name)
        if members is None:
            members = self._members[group.group_name] = dist.get_process_group_ranks(group)
        channel = Channel(group.group_name, self._rank, self._rank, torch_private.ALIKE.index(name))
        first = self._iteration * MAX_NUMBER + self._counts[channel]
        self._counts[channel] += len(outputs)
        giver = giver_of(members, self._rank, self._repetition.together) if self._repetition.is_whole else None
        if giver is None:
            # They are connected; or all of them repeat it, too.
            return self._kept(call(), partial(self._record, self._iteration, channel, first, outputs))
        theirs = replace(channel, source=giver, destination=giver)
        try:
            for number, output in enumerate(outputs, first):
                what = f"what the {number - self._iteration * MAX_NUMBER + 1}. {name} of group {channel.group} gave"
                self._repetition.fill(output, theirs, number, self._iteration, what=what)
        except NotInLog:
            # After the update a cut passes over the rest, and leaves what is there.
            if not self.is_updated():
                raise
        else:
            self._record(self._iteration, channel, first, outputs)
        return torch_private.finished_work()

    @staticmethod
    def _kept(work: Any, record: Callable[[], None]) -> Any:
        if work is None:  # torch has waited for it
            record()
            return None
        return Collective(work, record)

    def _record(self, iteration: int, channel: Channel, first: int, outputs: Sequence[Tensor]) -> None:
        # Who waits for it later only may have changed it.
        if iteration != self._iteration or self._counts[channel] > MAX_NUMBER:
            return
        for number, output in enumerate(outputs, first):
            try:
                check_plain(output)
            except NotLoggable:
                continue  # who would have to repeat it finds that it is not there
            if output.numel() * output.element_size() <= MAX_MESSAGE_BYTES:
                self._keep(channel, number, output)


class Collective(dist.Work):
    """*inner* is torch's; *record* is called once, when the script hears that it is done."""

    def __init__(self, inner: Any, record: Callable[[], None]) -> None:
        super().__init__()
        self._inner = inner
        self._record: Callable[[], None] | None = record

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = bool(self._inner.wait(timeout))
        self._is_done()
        return done

    def is_completed(self) -> bool:
        completed = bool(self._inner.is_completed())
        if completed and self._inner.is_success():
            self._is_done()
        return completed

    def _is_done(self) -> None:
        record, self._record = self._record, None
        if record is not None:
            record()

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[Tensor]:
        found: list[Tensor] = self._inner.result()
        return found

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()

    def get_future(self) -> torch.futures.Future[Any]:
        """(Who uses this instead of waiting does not tell when it is done: that is not kept.)"""
        future: torch.futures.Future[Any] = self._inner.get_future()
        return future
