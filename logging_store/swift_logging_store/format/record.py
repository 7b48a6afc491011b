"""One logged message: what its header says, and the bytes of both. Pure; the layout is in `logging_store/README.md`.

All numbers are little-endian. A checksum is XXH3-64 with the segment's salt as seed, so that what another segment left
in the same blocks of a disk is never taken for a record of this one. It finds accidents, not forgeries.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from mmap import mmap

import xxhash

from swift_logging_store.errors import Damaged, NotLoggable

Buffer = bytes | bytearray | memoryview | mmap

MAGIC = b"SREC"
ALIGNMENT = 8
MAX_NAME = 65535
MAX_DIMS = 255
# magic, header length, payload length, sequence, iteration, generation, micro-batch, source, destination, number of
# dimensions, length of the dtype's name, length of the group's name, tag, payload checksum
_FIXED = struct.Struct("<4sIQQQQiIIBBHqQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_LEAST = _FIXED.size + _CHECKSUM.size


@dataclass(frozen=True, order=True)
class Channel:
    """Where messages of one order pass: global ranks *source* and *destination*, within *group*, with *tag*."""

    group: str
    source: int
    destination: int
    tag: int = 0


@dataclass(frozen=True)
class Header:
    """*sequence*: the number of the message on its channel, from 0. *generation*, *iteration*, *micro_batch* (-1:
    none): those of the sender when it sent. *dtype*: torch's name, without `torch.`; *shape* in elements. *num_bytes*:
    of the payload, contiguous. *checksum*: of the payload, with the segment's salt.
    """

    channel: Channel
    sequence: int
    iteration: int
    generation: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    micro_batch: int = -1
    checksum: int = 0


def checksum_of(data: Buffer, salt: int) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=salt)


def padding(length: int) -> int:
    """Zero bytes after so many, up to the next multiple of `ALIGNMENT`."""
    return -length % ALIGNMENT


def encode_header(header: Header, salt: int) -> bytes:
    """Its bytes, a multiple of `ALIGNMENT`. Raises `NotLoggable` for what no field can hold."""
    dtype, group = header.dtype.encode(), header.channel.group.encode()
    if len(header.shape) > MAX_DIMS or len(dtype) > 255 or len(group) > MAX_NAME:
        raise NotLoggable(
            f"{header.channel}: {len(header.shape)} dimensions, a dtype of {len(dtype)} and a group of {len(group)} "
            f"characters; there may be {MAX_DIMS}, 255 and {MAX_NAME}"
        )
    variable = struct.pack(f"<{len(header.shape)}Q", *header.shape) + dtype + group
    length = _FIXED.size + len(variable) + padding(_FIXED.size + len(variable)) + _CHECKSUM.size
    try:
        fixed = _FIXED.pack(
            MAGIC, length, header.num_bytes, header.sequence, header.iteration, header.generation, header.micro_batch,
            header.channel.source, header.channel.destination, len(header.shape), len(dtype), len(group),
            header.channel.tag, header.checksum,
        )  # fmt: skip
    except struct.error as error:
        raise NotLoggable(f"{header}: {error}") from None
    body = fixed + variable
    body += bytes(padding(len(body)))
    return body + _CHECKSUM.pack(checksum_of(body, salt))


def decode_header(data: memoryview, salt: int) -> tuple[Header, int]:
    """The header at the beginning of *data*, and how many bytes it takes. Raises `Damaged`."""
    if len(data) < HEADER_LEAST:
        raise Damaged(f"{len(data)} bytes are too few for a record")
    (magic, length, num_bytes, sequence, iteration, generation, micro_batch, source, destination, num_dims, len_dtype,
     len_group, tag, checksum) = _FIXED.unpack_from(data)  # fmt: skip
    if magic != MAGIC:
        raise Damaged("no record begins here")
    used = _FIXED.size + 8 * num_dims + len_dtype + len_group
    if length != used + padding(used) + _CHECKSUM.size or length > len(data):
        raise Damaged("the header of a record is cut, or its lengths do not fit each other")
    body = data[: length - _CHECKSUM.size]
    if _CHECKSUM.unpack_from(data, len(body))[0] != checksum_of(body, salt):
        raise Damaged("the header of a record has another checksum")
    shape = struct.unpack_from(f"<{num_dims}Q", data, _FIXED.size)
    names = bytes(body[_FIXED.size + 8 * num_dims : used])
    try:
        dtype, group = names[:len_dtype].decode(), names[len_dtype:].decode()
    except UnicodeDecodeError:
        raise Damaged("a name in the header of a record is no text") from None
    channel = Channel(group, source, destination, tag)
    header = Header(channel, sequence, iteration, generation, dtype, shape, num_bytes, micro_batch, checksum)
    return header, length
