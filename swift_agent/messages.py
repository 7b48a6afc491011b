"""Point-to-point messages of iterations: counted, logged by their sender, and served again to a replacement.

Every Python caller of c10d's point-to-point operations (`isend`, `irecv`, `batch_isend_irecv`, object lists,
`torch.distributed.pipelining`) ends in `ProcessGroup.send` and `recv`, which are wrapped here for all groups. Outside
of an iteration nothing is done. A message is identified by its channel (group, source, destination, tag) and its number
there, which a rank that repeats an iteration counts again from where that began.

While a replacement repeats the iterations of its predecessor, what survivors had sent it comes from their logs, and
what it sends to them is dropped: they have it. It logs again what it sends, so that the next failure finds complete
logs. It begins with what set-up gives, or with a checkpoint: what was sent before the newest one that counts is gone.
This module must never decide who repeats what; the plan does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from swift_agent import torch_private
from swift_agent.errors import SwiftError, UsageError
from swift_agent.sent_before import SentBefore
from swift_agent.sent_log import SentLog, bytes_for_logs
from swift_logging_store.errors import LogError
from swift_logging_store.reader import LogReader
from swift_logging_store.record import Channel, Header
from swift_logging_store.segment import SegmentWriter
from swift_logging_store.tensors import tensor_of
from swift_logging_store.writer import SUFFIX

# Of the log that goes to a replacement in one piece.
PIECE_BYTES = 16 << 20
# A piece, which has the last message whole, goes as one; `swift_recovery.replica` takes 1 GiB.
MAX_MESSAGE_BYTES = (1 << 30) - 2 * PIECE_BYTES


class BytesLink(Protocol):
    """A connection to one other rank: what is sent is received, in order."""

    def send_bytes(self, data: bytes) -> None: ...

    def recv_bytes(self) -> bytes: ...


class CannotReplay(SwiftError):
    """The iterations of a lost rank cannot be repeated from logs; all workers have to begin again."""


class CutReplay(CannotReplay):
    """Ranks that repeat iterations together were cut: this process has gone too far to begin again with others."""


class Messages:
    """Of the rank *rank*; its `log` is written below *directory*, which is local to the node. One per process.

    *origin*: what this process's set-up gave; *origins*: what that of the first process of each rank gave, empty if
    that is not known. *note* tells people; *check* raises when a recovery is cut.
    """

    def __init__(
        self, rank: int, directory: Path, note: Callable[[str], None], check: Callable[[], object] = lambda: None
    ) -> None:
        self.rank = rank
        self.origin: list[int] = []
        self.origins: list[list[int]] = []
        self._note = note
        self._sent_before = SentBefore(directory, rank)
        self._has_predecessors = True  # for all that is known
        self._directory = directory / f"{self._sent_before.prefix}{uuid.uuid4().hex[:8]}"
        self.log = SentLog(rank, self._directory, *bytes_for_logs(directory), note, check)
        self.all_began_at = 0
        """The iteration of the checkpoint with which all ranks began together; 0: with what set-up gave."""
        self._complete_from = 0  # the iteration
        self.checkpoint = 0
        """The iteration of the newest one that counts: what was sent before it is gone."""
        self._iteration = -1  # not in one
        self._refuses = False
        self._generation = 0
        self._sent: dict[Channel, int] = {}
        self._received: dict[Channel, int] = {}
        self._begun: tuple[dict[Channel, int], dict[Channel, int]] = ({}, {})
        # By the name of the group, the peer's rank in it, and the tag.
        self._to: dict[tuple[str, int, int], Channel] = {}
        self._from: dict[tuple[str, int, int], Channel] = {}
        self._source: LogReader | None = None  # what was taken, while iterations are repeated
        self._repeating: frozenset[int] = frozenset()
        torch_private.wrap_messages(self._send, self._recv, self._recv_from_any)

    @property
    def is_complete(self) -> bool:
        """Whether a lost neighbour finds here all that it was sent, from a state on that it can begin with."""
        if self.log.incomplete:
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

    def end(self) -> None:
        """The iteration, or a section, is over, and counts."""
        was_iteration, self._iteration = self._iteration >= 0, -1
        self.log.end_iteration()
        if was_iteration and self._source is None and self._has_predecessors:
            self._has_predecessors = False
            self._sent_before.forget()
            self.log.forget_predecessors()

    def rewind(self) -> None:
        """The iteration was cut, and will be run again."""
        self._iteration = -1
        self._sent, self._received = self._begun

    # ---- checkpoints ----

    def begin_checkpoint(self, iteration: int) -> None:
        """A checkpoint of the state before *iteration* is taken; `counts` belong to it. A log that was given up begins
        again."""
        if self.log.begin_checkpoint(iteration):
            self._complete_from = iteration

    def counts(self) -> dict[str, Any]:
        """Of all messages of this rank so far: who takes it over goes on counting."""
        return {"sent": _to_tree(self._sent), "received": _to_tree(self._received)}

    def take_over(self, counts: Mapping[str, Any] | None) -> None:
        """This process has the state of its predecessor, but not the log of what that had sent."""
        if counts is not None:
            self._count_on(counts)
        if not self.log.incomplete:
            self.log.give_up("this process has taken over a state, without the log of what was sent")

    def _count_on(self, counts: Mapping[str, Any]) -> None:
        self._sent, self._received = _from_tree(counts["sent"]), _from_tree(counts["received"])
        self._begun = (self._sent.copy(), self._received.copy())

    def restore(self, counts: Mapping[str, Any] | None, iteration: int) -> None:
        """This process begins with that checkpoint; None: it was taken where nothing was logged."""
        if counts is not None:
            self._count_on(counts)
        self._complete_from = self.checkpoint = iteration

    def checkpointed(self, iteration: int) -> None:
        """That checkpoint counts: nobody needs what was sent before it."""
        self.checkpoint = iteration
        self.log.drop(iteration)

    def close(self) -> None:
        """The end: nobody needs what was sent."""
        self.log.close()

    # ---- recovery ----

    def give(self, destination: int, before: int, link: BytesLink) -> None:
        """To a replacement of rank *destination*: what it was sent in the iterations before that one. Raises `LogError`
        if the log cannot be read."""
        link.send_bytes(json.dumps([self.origins, self.all_began_at]).encode())
        piece, writer = _new_piece()
        begins: dict[Channel, int] = {}
        with contextlib.closing(self.log.newest_first()) as logs:
            for log in logs:
                for record in _sent_to(destination, before, log, begins):
                    writer.append(*record)
                    if len(piece) >= PIECE_BYTES:
                        _send_piece(piece, writer, link)
                        piece, writer = _new_piece()
        _send_piece(piece, writer, link)
        link.send_bytes(b"")

    def take(self, source: int, link: BytesLink) -> None:
        """What *source* gives."""
        self.origins, self.all_began_at = json.loads(link.recv_bytes())
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

    def begin_replay(self, repeating: Collection[int]) -> None:
        """From the next iteration on messages come from what was taken, but for those of the ranks *repeating*, which
        repeat theirs, too; and are sent to those only."""
        self._repeating = frozenset(repeating)
        self._source = LogReader(self._directory / "taken")
        self._sent_before.open(self._note)

    def end_replay(self) -> None:
        """All that was taken has been used, or was not needed."""
        if self._source is not None:
            self._source.close()
            self._source = None
        self._sent_before.close()
        shutil.rmtree(self._directory / "taken", ignore_errors=True)

    def _is_repeated(self, peer: int) -> bool:
        """Whether the message was exchanged before, by *peer* and the predecessor."""
        return self._source is not None and peer not in self._repeating

    # ---- operations ----

    def _send(self, original: Any, group: Any, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        if self._iteration < 0:
            self._check_outside()
            return original(group, tensors, dst, tag)
        key = (group.group_name, dst, tag)
        channel = self._to.get(key)
        if channel is None:
            channel = self._to[key] = Channel(key[0], self.rank, _global_rank(group, dst), tag)
        for tensor in tensors:
            number = self._sent.get(channel, 0)
            self._sent[channel] = number + 1
            if self._source is not None and self._sent_before.differs(channel, number, self._iteration, tensor):
                raise CannotReplay(
                    f"message {number} of {channel} is not what was sent before: the repetition differs from what was "
                    "done (job.track(deterministic=True) names the operations of torch that do)"
                )
            self._log(channel, number, tensor)
        if self._is_repeated(channel.destination):
            return torch_private.finished_work()
        return original(group, tensors, dst, tag)

    @contextlib.contextmanager
    def none_between(self) -> Iterator[None]:
        """Inside, between iterations that are repeated, a message is an error: it was not logged."""
        self._refuses = True
        try:
            yield
        finally:
            self._refuses = False

    def _check_outside(self) -> None:
        if self._refuses:
            raise CannotReplay("a message outside of iterations is in no log")

    def _log(self, channel: Channel, number: int, tensor: torch.Tensor) -> None:
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > MAX_MESSAGE_BYTES and not self.log.incomplete:
            why = f"a message of {num_bytes} bytes is more than the {MAX_MESSAGE_BYTES} that can be handed on"
            self.log.give_up(why, for_good=True)
        self.log.append(channel, number, tensor, iteration=self._iteration, generation=self._generation)

    def _recv(self, original: Any, group: Any, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        if self._iteration < 0:
            self._check_outside()
            return original(group, tensors, src, tag)
        key = (group.group_name, src, tag)
        channel = self._from.get(key)
        if channel is None:
            channel = self._from[key] = Channel(key[0], _global_rank(group, src), self.rank, tag)
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
        if header.iteration != self._iteration:
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


def _global_rank(group: Any, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def _sent_to(
    destination: int, before: int, log: LogReader, begins: dict[Channel, int]
) -> Iterator[tuple[Header, memoryview]]:
    """Of one segment, in which messages may be that were sent again later: from number *begins* on those of a channel
    are in newer segments."""
    for channel in log.channels:
        if channel.destination != destination:
            continue
        numbers = log.sequences(channel)
        begin = begins.get(channel, numbers[-1] + 1)
        for number in numbers:
            # Of an iteration that was run again the last time counts.
            if number < begin and log.iteration_of(channel, number) < before:
                yield log.read_last(channel, number)
        begins[channel] = min(begin, numbers[0])


def _to_tree(counts: Mapping[Channel, int]) -> list[list[Any]]:
    return [[*astuple(channel), count] for channel, count in counts.items()]


def _from_tree(tree: Iterable[Sequence[Any]]) -> dict[Channel, int]:
    return {Channel(*fields): count for *fields, count in tree}


def _new_piece() -> tuple[bytearray, SegmentWriter]:
    piece = bytearray()
    return piece, SegmentWriter(piece.extend, int.from_bytes(os.urandom(8), "little"))


def _send_piece(piece: bytearray, writer: SegmentWriter, link: BytesLink) -> None:
    writer.finish()
    link.send_bytes(bytes(piece))
