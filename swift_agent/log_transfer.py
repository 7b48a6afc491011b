"""Messages from the log of who has sent them: all of one destination in pieces over a link, or some of them by number.

Must never decide what is sent, or to whom.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor

from swift_agent.ahead import ahead
from swift_agent.sent_log import SentLog
from swift_logging_store.errors import LogError
from swift_logging_store.reader import LogReader
from swift_logging_store.record import Channel, Header
from swift_logging_store.segment import SegmentWriter
from swift_logging_store.tensors import tensor_of
from swift_logging_store.writer import SUFFIX

# Of the log that goes to a replacement in one piece, and how many are put together ahead.
PIECE_BYTES = 16 << 20
NUM_PIECES_AHEAD = 2
# A piece, which has the last message whole, goes as one; `swift_recovery.replica` takes 1 GiB.
MAX_MESSAGE_BYTES = (1 << 30) - 2 * PIECE_BYTES


class BytesLink(Protocol):
    """A connection to one other rank: what is sent is received, in order."""

    def send_bytes(self, data: bytes) -> None: ...

    def recv_bytes(self) -> bytes: ...


def send(log: SentLog, destination: int, before: int, ends: Mapping[Channel, int], link: BytesLink) -> None:
    """What that rank was sent in the iterations before that one, up to the numbers *ends*. Raises `LogError`.

    While a piece is on its way the next ones are put together, and what is in a store only is brought."""
    with contextlib.closing(ahead(partial(_pieces, log, destination, before, ends), NUM_PIECES_AHEAD)) as pieces:
        for piece in pieces:
            link.send_bytes(piece)
    link.send_bytes(b"")


def receive(directory: Path, name: str, link: BytesLink) -> None:
    """What `send` sends, as segments of a log of that name; each is written while the next one comes."""
    number = 0
    with ThreadPoolExecutor(1, "swift-log-receive") as pool:
        writing: Future[int] | None = None
        while piece := link.recv_bytes():
            if writing is not None:
                writing.result()
            directory.mkdir(exist_ok=True)
            writing = pool.submit((directory / f"{name}.{number:08d}{SUFFIX}").write_bytes, piece)
            number += 1
        if writing is not None:
            writing.result()


def logged(log: SentLog, wanted: Mapping[Channel, range]) -> list[tuple[Channel, Tensor]]:
    """Messages of these numbers, in their order. Raises `LogError`."""
    found: dict[tuple[Channel, int], Tensor] = {}
    num_wanted = sum(map(len, wanted.values()))
    if num_wanted:
        with contextlib.closing(log.newest_first()) as segments:
            for segment in segments:
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


def _sent_to(
    destination: int, before: int, log: LogReader, begins: dict[Channel, int], ends: Mapping[Channel, int]
) -> Iterator[tuple[Header, memoryview]]:
    """Of one segment, in which messages may be that were sent again later: from number *begins* on those of a channel
    are in newer segments; from *ends* on they will be sent again."""
    for channel in log.channels:
        if channel.destination != destination:
            continue
        numbers = log.sequences(channel)
        begin = begins.get(channel, numbers[-1] + 1)
        for number in numbers:
            # Of an iteration that was run again the last time counts.
            if number < min(begin, ends.get(channel, 0)) and log.iteration_of(channel, number) < before:
                yield log.read_last(channel, number)
        begins[channel] = min(begin, numbers[0])


def _pieces(
    log: SentLog, destination: int, before: int, ends: Mapping[Channel, int], stopped: Callable[[], None]
) -> Generator[bytes, None, None]:
    """Each of them a whole segment."""
    begins: dict[Channel, int] = {}
    piece, writer = _new_piece()
    with contextlib.closing(log.newest_first(stopped)) as segments:
        for segment in segments:
            for record in _sent_to(destination, before, segment, begins, ends):
                writer.append(*record)
                if len(piece) >= PIECE_BYTES:
                    writer.finish()
                    yield bytes(piece)
                    piece, writer = _new_piece()
    writer.finish()
    yield bytes(piece)


def _new_piece() -> tuple[bytearray, SegmentWriter]:
    piece = bytearray()
    return piece, SegmentWriter(piece.extend, int.from_bytes(os.urandom(8), "little"))
