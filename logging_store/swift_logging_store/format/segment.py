"""Segments: append-only files of records with an index at their end. Pure, but for the sink that a writer is given.

    segment header | record | record | ... | index | end
                     header, payload, zeros

A segment that was closed has an index and an end mark, and every byte of it is under a checksum. One whose writer died
has none: its records are found by reading from the front, up to the first that is not whole, the torn tail.
Layout byte by byte: `logging_store/README.md`. It must never unpickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from swift_logging_store.errors import Damaged
from swift_logging_store.format.record import (
    Buffer,
    Channel,
    Header,
    checksum_of,
    decode_header,
    encode_header,
    padding,
)

MAGIC, INDEX_MAGIC, END_MAGIC = b"SWIFTLOG", b"SIDX", b"SWIFTEND"
VERSION = 1
_HEAD = struct.Struct("<8sHHIQQ")  # magic, version, two reserved (0), salt, checksum
_INDEX = struct.Struct("<4sII4x")  # magic, number of channels, number of entries
_CHANNEL = struct.Struct("<IIqH6x")  # source, destination, tag, length of the group's name
_ENTRY = struct.Struct("<QQQQiI")  # offset, payload bytes, sequence, iteration, micro-batch, number of the channel
_CHECKSUM = struct.Struct("<Q")
_END = struct.Struct("<Q8sQ")  # offset of the index, magic, checksum
HEAD_BYTES, END_BYTES = _HEAD.size, _END.size


@dataclass(frozen=True)
class Entry:
    """A record in its segment: *offset* of its header, in bytes, and what one looks for it by."""

    channel: Channel
    sequence: int
    iteration: int
    micro_batch: int
    offset: int
    num_bytes: int


class SegmentWriter:
    """Writes a segment through *sink*, which is called with buffers that follow each other without gaps.

    *salt*: a random number of 64 bits, another one for each segment.
    """

    def __init__(self, sink: Callable[[Buffer], object], salt: int) -> None:
        self._sink, self._salt = sink, salt
        self.entries: list[Entry] = []
        self.num_bytes = 0
        head = _HEAD.pack(MAGIC, VERSION, 0, 0, salt, 0)[: -_CHECKSUM.size]
        # With a seed of its own: the salt is not known before it is read.
        self._write(head + _CHECKSUM.pack(checksum_of(head, 0)))

    def append(self, header: Header, payload: Buffer) -> Entry:
        """Write a record; checksum and length are filled in. Raises `NotLoggable`, and then nothing is written."""
        view = memoryview(payload).cast("B")
        header = replace(header, num_bytes=len(view), checksum=checksum_of(view, self._salt))
        encoded = encode_header(header, self._salt)
        entry = Entry(
            header.channel, header.sequence, header.iteration, header.micro_batch, self.num_bytes, header.num_bytes
        )
        for data in (encoded, view, bytes(padding(len(view)))):
            self._write(data)
        self.entries.append(entry)
        return entry

    def finish(self) -> None:
        """Write index and end mark. Nothing may be appended afterwards."""
        offset = self.num_bytes
        index = encode_index(self.entries, self._salt)
        self._write(index)
        end = _END.pack(offset, END_MAGIC, 0)[: -_CHECKSUM.size]
        self._write(end + _CHECKSUM.pack(checksum_of(end, self._salt)))

    def _write(self, data: Buffer) -> None:
        if len(data):
            self._sink(data)
            self.num_bytes += len(data)


class Segment:
    """A segment in memory (bytes, or a mapped file). Raises `Damaged` if it is none, or was closed and is not whole.

    *entries*: its records, in their order. *is_closed*: it has its end mark. *num_bytes*: up to where it is whole; of
    one that was not closed, what follows is a torn tail.
    """

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")
        self.salt = _salt_of(self._data)
        index_at = self._index_offset()
        self.is_closed = index_at is not None
        if index_at is not None:
            self.entries = decode_index(self._data[index_at : len(self._data) - END_BYTES], self.salt)
            self.num_bytes = len(self._data)
            self._check_order(index_at)
        else:
            self.entries, self.num_bytes = self._scan()

    def let_go(self) -> None:
        """Of its bytes: before the next read they must come again (`attach`)."""
        self._data = memoryview(b"")

    def attach(self, data: Buffer) -> None:
        """The same bytes, or more."""
        self._data = memoryview(data).cast("B")

    def read(self, entry: Entry) -> tuple[Header, memoryview]:
        """Header and payload of a record; the payload is a view of this segment. Raises `Damaged`."""
        header, payload, _ = self._record(entry.offset)
        told = Entry(
            header.channel, header.sequence, header.iteration, header.micro_batch, entry.offset, header.num_bytes
        )
        if told != entry:
            raise Damaged(f"the record at byte {entry.offset} is not the one that the index names")
        return header, payload

    def records(self) -> Iterator[tuple[Header, memoryview]]:
        """All records, each checked as it is read."""
        return (self.read(entry) for entry in self.entries)

    def _record(self, offset: int) -> tuple[Header, memoryview, int]:
        """A record that is checked, and where the next one begins."""
        header, length = decode_header(self._data[offset:], self.salt)
        begin = offset + length
        end = begin + header.num_bytes
        after = end + padding(header.num_bytes)
        if after > len(self._data):
            raise Damaged(f"the payload of the record at byte {offset} is cut")
        payload = self._data[begin:end]
        if checksum_of(payload, self.salt) != header.checksum:
            raise Damaged(f"the payload of the record at byte {offset} has another checksum")
        if any(self._data[end:after]):
            raise Damaged(f"what follows the payload of the record at byte {offset} is not zero")
        return header, payload, after

    def _index_offset(self) -> int | None:
        """Where the index begins, or None if there is no end mark."""
        if len(self._data) < HEAD_BYTES + END_BYTES:
            return None
        end = self._data[-END_BYTES:]
        offset, magic, checksum = _END.unpack(end)
        if magic != END_MAGIC or checksum != checksum_of(end[: -_CHECKSUM.size], self.salt):
            return None
        if not HEAD_BYTES <= offset <= len(self._data) - END_BYTES:
            raise Damaged(f"the end mark names an index at byte {offset}, which is not in the segment")
        return int(offset)

    def _check_order(self, index_at: int) -> None:
        """Records follow each other from the head to the index without a gap: each byte is under some checksum."""
        at = HEAD_BYTES
        for entry in self.entries:
            if entry.offset != at:
                raise Damaged(f"the index names a record at byte {entry.offset}, the one before it ends at byte {at}")
            _, length = decode_header(self._data[at:index_at], self.salt)
            at += length + entry.num_bytes + padding(entry.num_bytes)
        if at != index_at:
            raise Damaged(f"the last record ends at byte {at}, the index begins at byte {index_at}")

    def _scan(self) -> tuple[tuple[Entry, ...], int]:
        entries, at = [], HEAD_BYTES
        while at < len(self._data):
            try:
                header, _, after = self._record(at)
            except Damaged:
                break
            entries.append(
                Entry(header.channel, header.sequence, header.iteration, header.micro_batch, at, header.num_bytes)
            )
            at = after
        return tuple(entries), at


def _salt_of(data: memoryview) -> int:
    if len(data) < HEAD_BYTES:
        raise Damaged(f"{len(data)} bytes are too few for a segment")
    magic, version, first, second, salt, checksum = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise Damaged("this is no segment of a log")
    if version != VERSION:
        raise Damaged(f"version {version} of the format; this program reads version {VERSION}")
    if first or second or checksum != checksum_of(data[: HEAD_BYTES - _CHECKSUM.size], 0):
        raise Damaged("the head of the segment has another checksum")
    return int(salt)


def encode_index(entries: list[Entry], salt: int) -> bytes:
    channels = sorted({entry.channel for entry in entries})
    numbers = {channel: number for number, channel in enumerate(channels)}
    parts = [_INDEX.pack(INDEX_MAGIC, len(channels), len(entries))]
    for channel in channels:
        group = channel.group.encode()
        parts.append(_CHANNEL.pack(channel.source, channel.destination, channel.tag, len(group)) + group)
        parts.append(bytes(padding(len(group))))
    for entry in entries:
        parts.append(
            _ENTRY.pack(
                entry.offset, entry.num_bytes, entry.sequence, entry.iteration, entry.micro_batch,
                numbers[entry.channel],
            )
        )  # fmt: skip
    body = b"".join(parts)
    return body + _CHECKSUM.pack(checksum_of(body, salt))


def decode_index(data: memoryview, salt: int) -> tuple[Entry, ...]:
    """Raises `Damaged`."""
    body = data[: -_CHECKSUM.size]
    if len(body) < _INDEX.size or _CHECKSUM.unpack_from(data, len(body))[0] != checksum_of(body, salt):
        raise Damaged("the index has another checksum")
    try:
        magic, num_channels, num_entries = _INDEX.unpack_from(body)
        at, channels = _INDEX.size, []
        for _ in range(num_channels):
            source, destination, tag, length = _CHANNEL.unpack_from(body, at)
            at += _CHANNEL.size
            channels.append(Channel(bytes(body[at : at + length]).decode(), source, destination, tag))
            at += length + padding(length)
        entries = []
        for number in range(num_entries):
            offset, num_bytes, sequence, iteration, micro_batch, channel = _ENTRY.unpack_from(
                body, at + number * _ENTRY.size
            )
            entries.append(Entry(channels[channel], sequence, iteration, micro_batch, offset, num_bytes))
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise Damaged(f"the index is malformed: {error}") from None
    if magic != INDEX_MAGIC or at + num_entries * _ENTRY.size != len(body):
        raise Damaged("the index is malformed")
    return tuple(entries)
