"""Moves messages out of their sender's log: all of some channels in pieces over a link, or some of them by number.

    segments, oldest first --thread--> pieces, some ahead --link--> files of the receiver, one after the other

The receiver can use each piece as soon as it is there: messages come in the order in which they were sent.

Must never decide what is sent, or to whom.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor

from swift_logging_store.errors import LinkLost, LogError
from swift_logging_store.format.record import Channel, Header
from swift_logging_store.format.segment import MAGIC, SegmentWriter
from swift_logging_store.format.tensors import tensor_of
from swift_logging_store.log.checked_segment import SegmentReader, SentSegment
from swift_logging_store.log.log import SentLog
from swift_logging_store.log.prefetch import Stopped, ahead
from swift_logging_store.log.writer import SUFFIX

# Of the log that goes to a replacement in one piece, and how many are put together ahead.
PIECE_BYTES = 16 << 20
NUM_PIECES_AHEAD = 2
# A piece, which has the last message whole, goes as one; links take 1 GiB.
MAX_MESSAGE_BYTES = (1 << 30) - 2 * PIECE_BYTES
# The last thing that is sent; after it, why there is no more.
_END = b"SWIFT-END"
# While there is nothing to send: what comes from a store may take minutes.
_ALIVE = b""
ALIVE_S = 5.0


class BytesLink(Protocol):
    """A connection to one other rank: what is sent is received, in order."""

    def send_bytes(self, data: bytes) -> None: ...

    def recv_bytes(self) -> bytes: ...


def send(
    log: SentLog, segments: Sequence[SentSegment], before: int, ends: Mapping[Channel, int],
    link: BytesLink, check: Callable[[], object],
) -> None:  # fmt: skip
    """What was sent on the channels *ends* in the iterations before that one, up to these numbers. Raises `LogError`,
    or whatever else prevents it, and tells the other side; and what *check* does, which is called in another thread.

    While a piece is on its way the next ones are put together, and what is in a store only is brought."""
    make = partial(_pieces, log, segments, before, ends, check)
    try:
        with contextlib.closing(ahead(make, NUM_PIECES_AHEAD, filler=_ALIVE, filler_s=ALIVE_S)) as pieces:
            for piece in pieces:
                link.send_bytes(piece)
    except (Stopped, LinkLost):
        raise
    except Exception as error:  # whatever it is: without a word the other side would try that again and again
        link.send_bytes(_END + (str(error) or type(error).__name__).encode())
        raise
    link.send_bytes(_END)


def receive(directory: Path, name: str, link: BytesLink) -> Iterator[Path]:
    """What `send` sends, as segments of a log of that name. Raises `LogError` if the log cannot be read there."""
    number = 0
    while not (piece := link.recv_bytes()).startswith(_END):
        if piece == _ALIVE:
            continue
        if not piece.startswith(MAGIC):
            raise LogError("what comes is no log")
        path = directory / f"{name}.{number:08d}{SUFFIX}"
        path.write_bytes(piece)
        yield path
        number += 1
    if why := piece[len(_END) :]:
        raise LogError(why.decode(errors="replace"))


def logged(
    log: SentLog, wanted: Mapping[Channel, range], check: Callable[[], object]
) -> list[tuple[Channel, Tensor]]:
    """Messages of these numbers, in their order. Raises `LogError`, and what *check* does."""
    found: dict[tuple[Channel, int], Tensor] = {}
    num_wanted = sum(map(len, wanted.values()))
    if num_wanted:
        with contextlib.closing(log.read(reversed(log.segments()), check, all_of_them=False)) as segments:
            for segment, _ in segments:
                for channel, numbers in wanted.items():
                    for number in numbers:
                        # What was sent last counts, in newer segments and in each of them.
                        if (channel, number) not in found and segment.has(channel, number):
                            found[channel, number] = tensor_of(*segment.read_last(channel, number))
                if len(found) == num_wanted:
                    break
    if len(found) < num_wanted:
        raise LogError(f"{num_wanted - len(found)} messages that are to be sent again are not in the log")
    return [(channel, found[channel, number]) for channel, numbers in wanted.items() for number in numbers]


def _pieces(
    log: SentLog, segments: Sequence[SentSegment], before: int, ends: Mapping[Channel, int],
    check: Callable[[], object], stopped: Callable[[], None],
) -> Generator[bytes, None, None]:  # fmt: skip
    """Each of them a whole segment."""

    def checks() -> None:
        stopped()
        check()

    piece, writer = _new_piece()
    with contextlib.closing(log.read(segments, checks, all_of_them=True)) as logs:
        for one, segment in logs:
            checks()
            for record in _wanted(before, one, segment.ends, ends):
                writer.append(*record)
                if len(piece) >= PIECE_BYTES:
                    writer.finish()
                    yield bytes(piece)
                    piece, writer = _new_piece()
    if writer.entries:
        writer.finish()
        yield bytes(piece)


def _wanted(
    before: int, log: SegmentReader, here: Mapping[Channel, int], ends: Mapping[Channel, int]
) -> Iterator[tuple[Header, memoryview]]:
    """Of one segment, where messages count below the numbers *here*; from *ends* on they will be sent again."""
    for channel, number, iteration in log.newest():
        if iteration >= before:
            continue
        if number < min(here.get(channel, number + 1), ends.get(channel, 0)):
            yield log.read_last(channel, number)


def _new_piece() -> tuple[bytearray, SegmentWriter]:
    piece = bytearray()
    return piece, SegmentWriter(piece.extend, int.from_bytes(os.urandom(8), "little"))
