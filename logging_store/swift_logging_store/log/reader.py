"""Reads the logs of a directory: which messages of which channels are there, and the messages themselves.

Segments are mapped, not read: a message costs what it is; and no more than `MAX_MAPPED` of them at a time, as each
takes a descriptor. A log whose writer died ends with a torn tail, which is left out and told of. The same message may
be in several segments, because a replayed process logs again; then both must be equal.

Must never write or delete.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swift_logging_store.errors import Damaged, LogError
from swift_logging_store.format.record import Channel, Header
from swift_logging_store.format.segment import HEAD_BYTES, Entry, Segment
from swift_logging_store.log.writer import SUFFIX

# Of one reader: a log of a terabyte may come in a hundred thousand files.
MAX_MAPPED = 32


@dataclass(frozen=True)
class TornTail:
    """*num_bytes* at the end of a segment that was not closed are no whole record."""

    path: Path
    num_bytes: int


@dataclass(eq=False)
class _File:
    """*mapped*: only while its segment is used."""

    path: Path
    segment: Segment
    mapped: mmap.mmap | None

    def unmap(self) -> None:
        self.segment.let_go()
        mapped, self.mapped = self.mapped, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # a payload is still in use; the map goes with it
                mapped.close()


class LogReader:
    """All logs of *place*, a directory or one segment, as they are when this is made. A context manager, which unmaps
    the files at its end; payloads must not be used afterwards.

    *torn*: what was left out. *is_closed*: all segments have an end mark. Raises `LogError` if they cannot be read,
    `Damaged` if a closed segment is not whole.
    """

    def __init__(self, place: Path) -> None:
        self.torn: list[TornTail] = []
        self.is_closed = True
        self._files: list[_File] = []
        self._mapped: OrderedDict[_File, None] = OrderedDict()  # those used longest ago first
        self._index: dict[Channel, dict[int, list[tuple[_File, Entry]]]] = {}
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
        self._files.clear()
        while self._mapped:
            self._mapped.popitem()[0].unmap()

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
        """Channel, number and iteration of each message, in the order in which they were written; if one is there more
        than once, the last."""
        for file in self._files:
            for entry in file.segment.entries:
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
        (file, entry), *copies = self._index[channel][sequence]
        header, payload = self._read(file, entry)
        for file, entry in copies:
            other, again = self._read(file, entry)
            if (other.dtype, other.shape) != (header.dtype, header.shape) or again != payload:
                raise Damaged(f"{channel}: message {sequence} was logged again with other contents")
        return header, payload

    def iteration_of(self, channel: Channel, sequence: int) -> int:
        """The iteration in which it was sent, the last time. Raises KeyError."""
        return self._index[channel][sequence][-1][1].iteration

    def read_last(self, channel: Channel, sequence: int) -> tuple[Header, memoryview]:
        """Like `read`, where only what was written last counts. Of one writer's log: others have no order."""
        return self._read(*self._index[channel][sequence][-1])

    def messages(self, channel: Channel, start: int = 0) -> Iterator[tuple[Header, memoryview]]:
        """Messages from number *start* on, up to the first that is not there."""
        for sequence in range(start, self.first_missing(channel, start)):
            yield self.read(channel, sequence)

    def _add(self, path: Path) -> None:
        if path.stat().st_size == 0:
            self.is_closed = False
            self.torn.append(TornTail(path, 0))
            return
        mapped = _map(path)
        try:
            segment = Segment(mapped)
        except Damaged:
            if len(mapped) >= HEAD_BYTES:
                raise
            # Its writer died before it had written the first bytes.
            self.is_closed = False
            self.torn.append(TornTail(path, len(mapped)))
            return
        self.is_closed = self.is_closed and segment.is_closed
        if not segment.is_closed and segment.num_bytes < len(mapped):
            self.torn.append(TornTail(path, len(mapped) - segment.num_bytes))
        file = _File(path, segment, mapped)
        self._files.append(file)
        self._use(file)
        for entry in segment.entries:
            self._index.setdefault(entry.channel, {}).setdefault(entry.sequence, []).append((file, entry))

    def _read(self, file: _File, entry: Entry) -> tuple[Header, memoryview]:
        if file.mapped is None:
            try:
                file.mapped = _map(file.path)
            except (OSError, ValueError) as error:
                raise LogError(f"the log in {file.path} cannot be read: {error}") from error
            file.segment.attach(file.mapped)
        self._use(file)
        try:
            return file.segment.read(entry)
        except Damaged as error:
            raise Damaged(f"{file.path}: {error}") from None

    def _use(self, file: _File) -> None:
        self._mapped[file] = None
        self._mapped.move_to_end(file)
        while len(self._mapped) > MAX_MAPPED:
            self._mapped.popitem(last=False)[0].unmap()


def _map(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
