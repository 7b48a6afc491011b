"""Point-to-point messages of iterations: counted, logged by their sender, and served again to a replacement.

Every Python caller of c10d's point-to-point operations (`isend`, `irecv`, `batch_isend_irecv`, object lists,
`torch.distributed.pipelining`) ends in `ProcessGroup.send` and `recv`, which are wrapped here for all groups. Outside
of an iteration nothing is done. A message is identified by its channel (group, source, destination, tag) and its number
there, which a rank that repeats an iteration counts again from where that began.

While a replacement repeats the iterations of its predecessor, what survivors had sent it comes from their logs, and
what it sends to them is dropped: they have it. It logs again what it sends, so that the next failure finds complete
logs. It begins with what set-up gives, or with a checkpoint: what was sent before the newest one that counts is gone.

The first step of a pipeline, in which stages tell each other shapes, comes again in each new process, wherever that
begins: its messages have channels of their own, and are kept. This module must never decide who repeats what; the plan
does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swift_agent import torch_private
from swift_agent.errors import SwiftError, UsageError
from swift_logging_store.errors import LogError
from swift_logging_store.reader import LogReader
from swift_logging_store.record import Channel, Header
from swift_logging_store.segment import SegmentWriter
from swift_logging_store.tensors import tensor_of
from swift_logging_store.writer import SUFFIX, LogWriter
from swift_recovery.replica import Link

# Of the log that goes to a replacement in one piece.
PIECE_BYTES = 16 << 20
# In the name of a channel's group: its messages are those of a pipeline's first step.
FIRST_STEP = ", first step of "
# A piece, which has the last message whole, goes as one; `swift_recovery.replica` takes 1 GiB.
MAX_MESSAGE_BYTES = (1 << 30) - 2 * PIECE_BYTES


class CannotReplay(SwiftError):
    """The iterations of a lost rank cannot be repeated from logs; all workers have to begin again."""


class CutReplay(CannotReplay):
    """Ranks that repeat iterations together were cut: this process has gone too far to begin again with others."""


class Messages:
    """Of the rank *rank*; its log is written below *directory*, which is local to the node. One per process.

    *incomplete*: why the log lacks something, '' if it has all. *origin*: what this process's set-up gave; *origins*:
    what that of the first process of each rank gave, empty if that is not known. *note* tells people.
    """

    def __init__(self, rank: int, directory: Path, note: Callable[[str], None]) -> None:
        self.rank = rank
        self.incomplete = ""
        self.origin: list[int] = []
        self.origins: list[list[int]] = []
        self._note = note
        for old in directory.glob(f"messages-{rank}-*"):
            shutil.rmtree(old, ignore_errors=True)  # of a process that this one replaces
        self._directory = directory / f"messages-{rank}-{uuid.uuid4().hex[:8]}"
        self._logs, self._first_steps = self._directory / "sent", self._directory / "first steps"
        self._bytes_left = self._bytes = bytes_for_logs(directory)
        self._writer = self._new_log(self._logs)
        self._first_writer = self._new_log(self._first_steps)
        self._complete_from = 0  # the iteration
        self.checkpoint = 0
        """The iteration of the newest one that counts: what was sent before it is gone."""
        self._for_good = False  # given up
        self._iteration = -1  # not in one
        self._generation = 0
        self._sent: dict[Channel, int] = {}
        self._received: dict[Channel, int] = {}
        self._begun: tuple[dict[Channel, int], dict[Channel, int]] = ({}, {})
        self._source: LogReader | None = None  # what was taken, while it is needed
        self._replaying = False
        self._repeating: frozenset[int] = frozenset()
        # Of pipelines, in this iteration; and whether it was their first.
        self._schedules: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._first_step = ""  # which one this is
        self._first_steps_made: set[str] = set()
        self._made_by_others: set[str] = set()  # before the checkpoint that this process began with
        torch_private.watch_schedules(self._on_step)
        torch_private.wrap_messages(self._send, self._recv, self._recv_from_any)

    @property
    def is_complete(self) -> bool:
        """Whether a lost neighbour finds here all that it was sent, from a state on that it can begin with."""
        if self.incomplete:
            return False
        return 0 < self._complete_from <= self.checkpoint or (self._complete_from == 0 and self._has_begin)

    @property
    def _has_begin(self) -> bool:
        return bool(self.origins) or self.checkpoint > 0

    # ---- iterations ----

    def begin(self, iteration: int, generation: int) -> None:
        """An iteration begins; its messages count."""
        self._iteration, self._generation = iteration, generation
        self._begun = (self._sent.copy(), self._received.copy())
        self._schedules.clear()

    def end(self) -> None:
        self._iteration = -1

    def rewind(self) -> None:
        """The iteration was cut, and will be run again."""
        self._iteration = -1
        self._sent, self._received = self._begun
        self.reset_schedules()

    def reset_schedules(self) -> None:
        """Pipelines forget a step that was cut."""
        for schedule, first in self._schedules.items():
            # Who comes new to it tells the shapes of its messages, and waits for those of the others.
            torch_private.reset_schedule(schedule, first=first)
        self._schedules.clear()

    @contextlib.contextmanager
    def _on_step(self, schedule: Any, first: bool) -> Iterator[None]:
        self._schedules[schedule] = first or self._schedules.get(schedule, False)
        if not first:
            yield
            return
        self._first_step = name = FIRST_STEP + torch_private.name_of_schedule(schedule)
        try:
            yield
        finally:
            self._first_step = ""
        self._first_steps_made.add(name)
        self._let_go()

    # ---- checkpoints ----

    def begin_checkpoint(self, iteration: int) -> dict[str, Any]:
        """A checkpoint of the state before *iteration* is taken, and this belongs to it; for `restore`. A log that was
        given up begins again."""
        if not self.incomplete:
            with self._giving_up():
                self._writer.roll()
        elif not self._for_good:
            with self._giving_up():
                self._writer = self._new_log(self._logs)
                self._bytes_left, self._complete_from, self.incomplete = self._bytes, iteration, ""
                self._note(
                    f"messages are logged again; with the checkpoint of iteration {iteration} they are of use again"
                )
        return {
            "sent": _to_tree(self._sent),
            "received": _to_tree(self._received),
            "first steps": sorted(self._first_steps_made | self._made_by_others),
        }

    def restore(self, tree: Mapping[str, Any] | None, iteration: int) -> None:
        """This process begins with that checkpoint; None: it was taken where nothing was logged."""
        if tree is not None:
            self._sent, self._received = _from_tree(tree["sent"]), _from_tree(tree["received"])
            self._made_by_others = set(tree["first steps"])
        self._begun = (self._sent.copy(), self._received.copy())
        self._complete_from = self.checkpoint = iteration

    def checkpointed(self, iteration: int) -> None:
        """That checkpoint counts: nobody needs what was sent before it."""
        self.checkpoint = iteration
        if not self.incomplete:
            with self._giving_up():
                self._bytes_left += self._writer.drop(iteration)

    # ---- recovery ----

    def give(self, destination: int, before: int, link: Link) -> None:
        """To a replacement of rank *destination*: what it was sent in the iterations before that one. Raises `LogError`
        if the log cannot be read."""
        link.send_bytes(json.dumps(self.origins).encode())
        self._writer.flush()
        self._first_writer.flush()
        with LogReader(self._logs) as log, LogReader(self._first_steps) as first_steps:
            piece, writer = _new_piece()
            for record in (*_sent_to(destination, before, first_steps), *_sent_to(destination, before, log)):
                writer.append(*record)
                if len(piece) >= PIECE_BYTES:
                    _send_piece(piece, writer, link)
                    piece, writer = _new_piece()
            _send_piece(piece, writer, link)
        link.send_bytes(b"")

    def take(self, source: int, link: Link) -> None:
        """What *source* gives."""
        self.origins = json.loads(link.recv_bytes())
        number = 0
        while piece := link.recv_bytes():
            path = self._directory / "taken" / f"from{source}.{number:08d}{SUFFIX}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(piece)
            number += 1

    def check_origin(self, rank: int) -> None:
        """Raise CannotReplay if set-up gave something else here than for the first process of this rank."""
        for mine, first, what in zip(self.origin, self.origins[rank], ("state", "seed"), strict=True):
            if mine != first:
                raise CannotReplay(
                    f"rank {rank}: the script's set-up gives another {what} than when the job began. It must give the "
                    "same each time: seed it (torch.manual_seed), and load no checkpoint that the job itself writes"
                )

    def prepare_replay(self) -> None:
        """What was taken in an attempt that was cut is let go."""
        self._close_source()

    def begin_replay(self, repeating: Collection[int]) -> None:
        """From the next iteration on messages come from what was taken, but for those of the ranks *repeating*, which
        repeat theirs, too; and are sent to those only."""
        self._repeating, self._replaying = frozenset(repeating), True
        self._source = LogReader(self._directory / "taken")

    def end_replay(self) -> None:
        """From the next iteration on messages pass, but for the first steps that the others will not make again."""
        self._replaying = False
        self._let_go()

    def _let_go(self) -> None:
        if self._source is not None and not self._replaying and self._made_by_others <= self._first_steps_made:
            self._close_source()

    def _close_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None
        shutil.rmtree(self._directory / "taken", ignore_errors=True)

    def _is_repeated(self, peer: int) -> bool:
        """Whether the message was exchanged before, by *peer* and the predecessor."""
        if self._source is None or peer in self._repeating:
            return False
        return self._replaying or self._first_step in self._made_by_others

    # ---- operations ----

    def _send(self, original: Any, group: Any, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        if self._iteration < 0:
            return original(group, tensors, dst, tag)
        channel = Channel(group.group_name + self._first_step, self.rank, _global_rank(group, dst), tag)
        for tensor in tensors:
            number = self._sent.get(channel, 0)
            self._sent[channel] = number + 1
            self._log(channel, number, tensor)
        if self._is_repeated(channel.destination):
            return torch_private.finished_work()
        return original(group, tensors, dst, tag)

    def _log(self, channel: Channel, number: int, tensor: torch.Tensor) -> None:
        if self.incomplete and not self._first_step:
            return
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > MAX_MESSAGE_BYTES:
            self._for_good = True
            self.give_up(f"a message of {num_bytes} bytes is more than the {MAX_MESSAGE_BYTES} that can be handed on")
            return
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            self.give_up("half of what was free on the disk is used up")
            return
        writer = self._first_writer if self._first_step else self._writer
        with self._giving_up():
            writer.append(channel, number, tensor, iteration=self._iteration, generation=self._generation)

    def give_up(self, why: str) -> None:
        """Log no more until the next checkpoint; what was logged is of no use without the rest."""
        self.incomplete = why
        self._note(
            f"messages are logged no more: {why}. If a rank is lost all workers start again"
            + (" (from now on)." if self._for_good or not self.checkpoint else ", until the next checkpoint counts.")
        )
        with contextlib.suppress(LogError):
            self._writer.close()
        shutil.rmtree(self._logs, ignore_errors=True)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except LogError as error:
            self.give_up(str(error))

    def _new_log(self, directory: Path) -> LogWriter:
        directory.mkdir(parents=True, exist_ok=True)
        return LogWriter(directory, f"rank{self.rank}")

    def _recv(self, original: Any, group: Any, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        if self._iteration < 0:
            return original(group, tensors, src, tag)
        channel = Channel(group.group_name + self._first_step, _global_rank(group, src), self.rank, tag)
        number = self._received.get(channel, 0)
        self._received[channel] = number + len(tensors)
        if not self._is_repeated(channel.source):
            return original(group, tensors, src, tag)
        for index, tensor in enumerate(tensors):
            self._fill(tensor, channel, number + index)
        return torch_private.finished_work()

    def _fill(self, tensor: torch.Tensor, channel: Channel, number: int) -> None:
        assert self._source is not None
        try:
            header, payload = self._source.read(channel, number)
        except KeyError:
            raise CannotReplay(f"message {number} of {channel} is in nobody's log") from None
        except LogError as error:
            raise CannotReplay(str(error)) from None
        if header.iteration != self._iteration and not self._first_step:
            raise CannotReplay(
                f"message {number} of {channel} was sent in iteration {header.iteration}, and is waited for in "
                f"{self._iteration}"
            )
        message = tensor_of(header, payload)
        if message.dtype != tensor.dtype or message.shape != tensor.shape:
            raise CannotReplay(
                f"message {number} of {channel} is {message.dtype} {list(message.shape)}, and what waits for it "
                f"{tensor.dtype} {list(tensor.shape)}: the repetition differs from what was done"
            )
        tensor.data.copy_(message)  # what waits for an activation is a leaf that requires a gradient

    def _recv_from_any(self, original: Any, group: Any, tensors: list[torch.Tensor], tag: int) -> Any:
        if self._iteration >= 0:
            raise UsageError(
                "a receive from any source inside an iteration: in which order its messages come is not logged, so it "
                "could not be repeated. Name the source."
            )
        return original(group, tensors, tag)


def bytes_for_logs(directory: Path) -> int:
    """What one rank's log may take: half of what is free, over the ranks of this node."""
    return shutil.disk_usage(directory).free // 2 // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _global_rank(group: Any, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def _sent_to(destination: int, before: int, log: LogReader) -> Iterator[tuple[Header, memoryview]]:
    for channel in log.channels:
        if channel.destination == destination:
            for sequence in log.sequences(channel):
                # Of an iteration that was run again the last time counts.
                if log.iteration_of(channel, sequence) < before:
                    yield log.read_last(channel, sequence)


def _to_tree(counts: Mapping[Channel, int]) -> list[list[Any]]:
    """Without first steps, which are counted anew in each process."""
    return [[*astuple(channel), count] for channel, count in counts.items() if FIRST_STEP not in channel.group]


def _from_tree(tree: Iterable[Sequence[Any]]) -> dict[Channel, int]:
    return {Channel(*fields): count for *fields, count in tree}


def _new_piece() -> tuple[bytearray, SegmentWriter]:
    piece = bytearray()
    return piece, SegmentWriter(piece.extend, int.from_bytes(os.urandom(8), "little"))


def _send_piece(piece: bytearray, writer: SegmentWriter, link: Link) -> None:
    writer.finish()
    link.send_bytes(bytes(piece))
