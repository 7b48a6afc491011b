"""Reads the logs of a directory: which messages of which channels are there, and the messages themselves.

Segments are mapped, not read: a message costs what it is. A log whose writer died ends with a torn tail, which is left
out and told of. The same message may be in several segments, because a replayed process logs again; then both must be
equal.

Must never write or delete.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swift_logging_store.errors import Damaged, LogError
from swift_logging_store.record import Channel, Header
from swift_logging_store.segment import HEAD_BYTES, Entry, Segment
from swift_logging_store.writer import SUFFIX


@dataclass(frozen=True)
class TornTail:
    """*num_bytes* at the end of a segment that was not closed are no whole record."""

    path: Path
    num_bytes: int


class LogReader:
    """All logs of *place*, a directory or one segment, as they are when this is made. A context manager, which unmaps
    the files at its end; payloads must not be used afterwards.

    *torn*: what was left out. *is_closed*: all segments have an end mark. Raises `LogError` if they cannot be read,
    `Damaged` if a closed segment is not whole.
    """

    def __init__(self, place: Path) -> None:
        self.torn: list[TornTail] = []
        self.is_closed = True
        self._maps: list[mmap.mmap] = []
        self._segments: list[Segment] = []
        self._index: dict[Channel, dict[int, list[tuple[Segment, Entry]]]] = {}
        try:
            for path in [place] if place.suffix == SUFFIX else sorted(place.glob(f"*{SUFFIX}")):
                self.add(path)
        except LogError:
            self.close()
            raise

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._index.clear()
        self._segments.clear()
        for mapped in self._maps:
            with contextlib.suppress(BufferError):  # somebody still looks at a payload; it goes when that does
                mapped.close()
        self._maps.clear()

    def add(self, path: Path) -> None:
        """One more segment. Raises as the constructor does; this is then as it was."""
        try:
            self._add(path)
        except OSError as error:
            raise LogError(f"the log in {path} cannot be read: {error.strerror or error}") from error
        except Damaged as error:
            raise Damaged(f"{path}: {error}") from None

    @property
    def channels(self) -> list[Channel]:
        return sorted(self._index)

    def sequences(self, channel: Channel) -> list[int]:
        """The numbers of the messages that are there, in ascending order."""
        return sorted(self._index.get(channel, ()))

    def has(self, channel: Channel, sequence: int) -> bool:
        """Whether that message is there."""
        return sequence in self._index.get(channel, ())

    def newest(self) -> Iterator[tuple[Channel, int, int]]:
        """Channel, number and iteration of each message, in the order in which they were written; of one that is there
        more than once the last."""
        for segment in self._segments:
            for entry in segment.entries:
                if self._index[entry.channel][entry.sequence][-1][1] is entry:
                    yield entry.channel, entry.sequence, entry.iteration

    def first_missing(self, channel: Channel, start: int = 0) -> int:
        """The first number from *start* on that is not there: up to it the channel can be replayed."""
        known = self._index.get(channel, {})
        while start in known:
            start += 1
        return start

    def read(self, channel: Channel, sequence: int) -> tuple[Header, memoryview]:
        """A message. Raises KeyError if it is not there; `Damaged` if it is not what was written, or if it is there
        twice and not the same: then the process that logged it again did not do what it had done before."""
        (segment, entry), *copies = self._index[channel][sequence]
        header, payload = segment.read(entry)
        for segment, entry in copies:
            other, again = segment.read(entry)
            if (other.dtype, other.shape) != (header.dtype, header.shape) or again != payload:
                raise Damaged(f"{channel}: message {sequence} was logged again with other contents")
        return header, payload

    def iteration_of(self, channel: Channel, sequence: int) -> int:
        """The iteration in which it was sent, the last time. Raises KeyError."""
        return self._index[channel][sequence][-1][1].iteration

    def read_last(self, channel: Channel, sequence: int) -> tuple[Header, memoryview]:
        """Like `read`, where only what was written last counts. Of one writer's log: others have no order."""
        segment, entry = self._index[channel][sequence][-1]
        return segment.read(entry)

    def messages(self, channel: Channel, start: int = 0) -> Iterator[tuple[Header, memoryview]]:
        """Messages from number *start* on, up to the first that is not there."""
        for sequence in range(start, self.first_missing(channel, start)):
            yield self.read(channel, sequence)

    def _add(self, path: Path) -> None:
        with open(path, "rb") as file:
            if path.stat().st_size == 0:
                self.is_closed = False
                self.torn.append(TornTail(path, 0))
                return
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._maps.append(mapped)
        try:
            segment = Segment(mapped)
        except Damaged:
            if len(mapped) >= HEAD_BYTES:
                self._maps.remove(mapped)
                raise
            # Its writer died before it had written the first bytes.
            self.is_closed = False
            self.torn.append(TornTail(path, len(mapped)))
            return
        self.is_closed = self.is_closed and segment.is_closed
        if not segment.is_closed and segment.num_bytes < len(mapped):
            self.torn.append(TornTail(path, len(mapped) - segment.num_bytes))
        self._segments.append(segment)
        for entry in segment.entries:
            self._index.setdefault(entry.channel, {}).setdefault(entry.sequence, []).append((segment, entry))
