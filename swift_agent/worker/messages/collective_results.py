"""Results of collectives that all members of a group have alike: each keeps them in its log, and a living one gives
them to a replacement that repeats their iteration.

They are messages of a channel of which a rank is source and destination. The tag says which operation it was, and the
number the iteration and how many of these it has had before: so nothing has to be counted from one iteration to the
next. A rank that passes over the rest of an iteration says so in its log: what is missing there was cut.

Collectives that a replacement would have to make again are not kept: those between C++ code, and those whose results
differ from rank to rank. Must never decide which rank repeats what.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swift_agent.torch_private import works as torch_works
from swift_logging_store.errors import NotLoggable
from swift_logging_store.format.operations import COLLECTIVE_TAGS
from swift_logging_store.format.record import Channel
from swift_logging_store.format.tensors import check_plain
from swift_logging_store.log.transfer import MAX_MESSAGE_BYTES
from swift_recovery.errors import NotInLog
from swift_recovery.replay.source import Repetition

# Operations of one kind of a group in one iteration, at most; the others are not kept.
MAX_NUMBER = 1 << 20
# The tag of what says that the rest of an iteration was passed over.
PASSED_OVER = -1
Outputs = Callable[[], Sequence[Tensor]]


def giver_of(members: Sequence[int], rank: int, lost: Collection[int]) -> int | None:
    """The rank that gives *rank* what all *members* had: the next of them that is not *lost*, None if all are."""
    at = members.index(rank)
    return next((member for member in [*members[at + 1 :], *members[:at]] if member not in lost), None)


class Results:
    """Of the rank *rank*. *keep* logs a message."""

    def __init__(self, rank: int, repetition: Repetition, keep: Callable[[Channel, int, Tensor], None]) -> None:
        self._rank, self._repetition, self._keep = rank, repetition, keep
        self._members: dict[str, list[int]] = {}  # by the name of a group, those of all that were used
        self._is_sloppy = False  # in some iteration the script had results later than it should
        self._misses = False  # not all that it had in this one was kept
        self._updated_at: Counter[Channel] = Counter()  # those that were begun before the update
        self._lock = threading.RLock()  # futures are done in any thread
        self._iteration, self._run = -1, 0  # an iteration that is run again is another run
        self._begun: Counter[Channel] = Counter()
        self._kept: Counter[Channel] = Counter()
        # Those that are done, while ones that were begun before them are not: a log has them in their order.
        self._held: dict[Channel, dict[int, Tensor | None]] = {}
        self._was_passed_over = False

    def begin(self, iteration: int) -> None:
        """An iteration begins."""
        self._iteration, self._misses = iteration, False
        self._run += 1
        self._updated_at.clear()
        self._begun.clear()
        self._kept.clear()
        self._held.clear()
        self._was_passed_over = False

    def agree(self) -> None:
        """All agree to the update: what was begun before should be done."""
        self._updated_at = self._begun.copy()

    def end(self) -> None:
        """It is over."""
        if self._iteration < 0:
            return
        with self._lock:
            self._misses = self._misses or any(self._kept[one] < num for one, num in self._updated_at.items())
            for channel, held in self._held.items():
                for number in sorted(held):
                    self._write(channel, number, held[number])
            if self._was_passed_over:
                self._tell_passed_over()
            elif self._begun != self._kept:
                self._is_sloppy = True
            self.cut()

    def pass_over(self) -> None:
        """It was cut, and counts; the rest of it is left out."""
        self._was_passed_over = True
        self.end()

    def cut(self) -> None:
        """It will be run again."""
        self._iteration = -1

    def ends(self, destination: int, before: int, lost: Collection[int]) -> dict[Channel, int]:
        """What *destination*, one of the ranks *lost*, is to have from this one, of the iterations before that: the
        channels, and their ends."""
        names = [
            name for name, members in self._members.items()
            if destination in members and giver_of(members, destination, lost) == self._rank
        ]  # fmt: skip
        tags = COLLECTIVE_TAGS.values()
        channels = [Channel(name, self._rank, self._rank, tag) for name in names for tag in tags]
        if channels:
            channels.append(_passed_over(self._rank))
        return dict.fromkeys(channels, before * MAX_NUMBER)

    def make(self, name: str, group: Any, outputs: Outputs, call: Callable[[], Any]) -> Any:
        """One operation of `COLLECTIVE_TAGS`, by *call*, or with what it gave the others."""
        members = self._members.get(group.group_name)
        if members is None:
            members = self._members[group.group_name] = dist.get_process_group_ranks(group)
        giver = giver_of(members, self._rank, self._repetition.together) if self._repetition.is_whole else None
        tensors = outputs()
        if not tensors:  # all that it gives is that all were there
            return call() if giver is None else Repeated(tensors)
        channel = Channel(group.group_name, self._rank, self._rank, COLLECTIVE_TAGS[name])
        number = self._begun[channel]
        self._begun[channel] += 1
        record = partial(self._record, self._run, channel, number, tensors)
        if giver is None:
            # They are connected; or all of them repeat it, too.
            work = call()
            if work is not None:
                return Collective(work, record)
            record()  # torch has waited for it
            return None
        theirs = replace(channel, source=giver, destination=giver)
        self._fill(tensors, theirs, number, f"what the {number + 1}. {name} of group {channel.group} gave", record)
        return Repeated(tensors)

    def _fill(
        self, tensors: Sequence[Tensor], channel: Channel, number: int, what: str, record: Callable[[], None]
    ) -> None:
        begin = self._iteration * MAX_NUMBER
        packed = _packed(tensors)
        try:
            if packed is None:
                raise NotInLog(f"{what} is of a kind that nobody keeps")
            self._repetition.fill(packed, channel, begin + number, self._iteration, what=what)
        except NotInLog:
            if not self._repetition.has(_passed_over(channel.source), begin):
                raise
            # It was cut there: so it leaves what it finds, as it did there.
            self._was_passed_over = True
            return
        if len(tensors) > 1:
            parts = torch.split(packed, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.data.copy_(part.view(tensor.shape))
        record()

    def _record(self, run: int, channel: Channel, number: int, tensors: Sequence[Tensor]) -> None:
        with self._lock:
            # A script that hears later that it is done may have changed it.
            if run != self._run or self._iteration < 0:
                return
            packed = _packed(tensors)
            if number == self._kept[channel]:
                self._write(channel, number, packed)
                held = self._held.get(channel, {})
                while self._kept[channel] in held:
                    self._write(channel, self._kept[channel], held.pop(self._kept[channel]))
            else:
                self._held.setdefault(channel, {})[number] = packed.clone() if packed is not None else None

    def _write(self, channel: Channel, number: int, packed: Tensor | None) -> None:
        self._kept[channel] += 1
        if packed is None or number >= MAX_NUMBER:
            self._misses = True  # a rank that would have to repeat it finds nothing there
        else:
            self._keep(channel, self._iteration * MAX_NUMBER + number, packed)

    def _tell_passed_over(self) -> None:
        # Only where all that is missing was cut.
        if not self._misses and not self._is_sloppy:
            self._keep(_passed_over(self._rank), self._iteration * MAX_NUMBER, torch.zeros(1, dtype=torch.uint8))


def _passed_over(rank: int) -> Channel:
    return Channel("", rank, rank, PASSED_OVER)


def _packed(tensors: Sequence[Tensor]) -> Tensor | None:
    """The elements of all of them; None for what is not kept."""
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if len({tensor.dtype for tensor in tensors}) > 1 or num_bytes > MAX_MESSAGE_BYTES:
        return None
    try:
        for tensor in tensors:
            check_plain(tensor)
    except NotLoggable:
        return None
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class Collective(dist.Work):
    """*inner* is torch's; *record* is called once, when the script hears that it is done."""

    def __init__(self, inner: Any, record: Callable[[], None]) -> None:
        super().__init__()
        self._inner = inner
        self._record: Callable[[], None] | None = record
        self._lock = threading.RLock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = bool(self._inner.wait(timeout))
        self._is_done()
        return done

    def is_completed(self) -> bool:
        # One that has failed is completed, too; and a script that hears of that uses the tensors.
        return bool(self._inner.is_completed()) and self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        def value(future: torch.futures.Future[Any]) -> Any:
            found = future.value()
            self._is_done()
            return found

        future: torch.futures.Future[Any] = self._inner.get_future()
        return future.then(value)

    def _is_done(self) -> None:
        # No thread goes on before it is recorded, whichever heard of it first.
        with self._lock:
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

    def get_future_result(self) -> Any:
        return self._inner.get_future_result()


class Repeated(torch_works.Finished):
    """One that was made by others, long ago: its results are in *tensors*."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def exception(self) -> Any:
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def synchronize(self) -> None: ...

    def block_current_stream(self) -> None: ...

    def get_future(self) -> torch.futures.Future[Any]:
        devices = sorted({str(tensor.device) for tensor in self._tensors if tensor.device.type != "cpu"})
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        future.set_result(self._tensors)
        return future
