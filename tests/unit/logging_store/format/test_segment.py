"""The format of the log: what is written comes back, and no byte of it can change unnoticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_logging_store.errors import Damaged, NotLoggable
from swift_logging_store.format import record, segment
from swift_logging_store.format.record import Channel, Header
from swift_logging_store.format.segment import Segment, SegmentWriter
from swift_logging_store.format.tensors import copy_of, digest_of, dtype_name, payload_of, tensor_of

SALT = 0x0123456789ABCDEF
U64 = st.integers(0, 2**64 - 1)
RANKS, TAGS = st.integers(0, 2**32 - 1), st.integers(-(2**63), 2**63 - 1)
CHANNELS = st.builds(Channel, st.text(max_size=40), RANKS, RANKS, TAGS)
HEADERS = st.builds(
    Header, CHANNELS, sequence=U64, iteration=U64, generation=U64, dtype=st.text(max_size=20),
    shape=st.lists(U64, max_size=5).map(tuple), num_bytes=st.just(0), micro_batch=st.integers(-1, 2**31 - 1),
)  # fmt: skip
RECORDS = st.lists(st.tuples(HEADERS, st.binary(max_size=60)), max_size=6)


def write(records: list[tuple[Header, bytes]], *, close: bool = True, salt: int = SALT) -> bytes:
    data = bytearray()
    writer = SegmentWriter(data.extend, salt)
    for header, payload in records:
        writer.append(header, payload)
    if close:
        writer.finish()
    assert writer.num_bytes == len(data)
    return bytes(data)


def some() -> list[tuple[Header, bytes]]:
    """Two channels, payloads of all remainders, one of them empty."""
    channel = Channel("pp", 0, 1, 7)
    other = Channel("pp", 1, 0)
    header = Header(channel, 0, 12, 3, "float32", (2, 1), 0, micro_batch=4)
    return [
        (header, b"12345678"),
        (replace(header, channel=other, shape=()), b"abc"),
        (replace(header, sequence=1, micro_batch=-1), b""),
    ]


def content(found: Segment) -> list[tuple[Header, bytes]]:
    return [(replace(header, checksum=0, num_bytes=0), bytes(payload)) for header, payload in found.records()]


@settings(max_examples=200)
@given(RECORDS, st.booleans(), U64)
def test_what_is_written_is_read(records: list[tuple[Header, bytes]], close: bool, salt: int) -> None:
    found = Segment(write(records, close=close, salt=salt))
    assert content(found) == records and found.is_closed == close and found.salt == salt
    assert [(entry.channel, entry.sequence) for entry in found.entries] == [(h.channel, h.sequence) for h, _ in records]


def test_each_byte_of_a_closed_segment_counts() -> None:
    """Whichever is flipped: an error, or the end mark is gone, and then nothing but what was written is handed out."""
    data = write(some())
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= flip
            assert is_noticed(bytes(damaged)), f"byte {at} of {len(data)}"


def is_noticed(damaged: bytes) -> bool:
    try:
        found = Segment(damaged)
        read = content(found)
    except Damaged:
        return True
    assert read == some()[: len(read)], "something else was handed out"
    return not found.is_closed


def test_each_cut_of_a_segment_is_noticed_and_leaves_what_was_whole() -> None:
    records = some()
    data = write(records)
    ends = [len(write(records[:count], close=False)) for count in range(len(records) + 1)]
    for length in range(len(data)):
        try:
            found = Segment(data[:length])
        except Damaged:
            assert length < segment.HEAD_BYTES
            continue
        whole = sum(end <= length for end in ends[1:])
        assert not found.is_closed and content(found) == records[:whole] and found.num_bytes == ends[whole]


def test_what_another_segment_left_behind_is_no_record() -> None:
    """A block of a disk that was used before: the same records, with another salt."""
    mine, theirs = write(some()[:1], close=False), write(some(), salt=SALT + 1)
    found = Segment(mine + theirs[len(mine) :])
    assert content(found) == some()[:1] and not found.is_closed and found.num_bytes == len(mine)


def test_a_closed_segment_that_something_follows_is_not_closed() -> None:
    data = write(some())
    found = Segment(data + bytes(8))
    assert not found.is_closed and content(found) == some()


def test_an_index_that_leaves_a_record_out_is_damaged() -> None:
    """Its checksum is right: a mistake of a program, not of a disk."""
    data = bytearray()
    writer = SegmentWriter(data.extend, SALT)
    for header, payload in some():
        writer.append(header, payload)
    del writer.entries[1]
    writer.finish()
    with pytest.raises(Damaged, match="the one before it ends"):
        Segment(data)


def test_a_record_that_is_not_the_one_of_the_index_is_damaged() -> None:
    found = Segment(write(some()))
    with pytest.raises(Damaged, match="not the one that the index names"):
        found.read(replace(found.entries[0], sequence=9))


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "too few"), (bytes(100), "no segment of a log"), (b"SWIFTLOG" + bytes([9]) + bytes(60), "version 9")],
)
def test_what_is_no_segment(data: bytes, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        Segment(data)


@pytest.mark.parametrize(
    "header",
    [
        Header(Channel("g", -1, 0), 0, 0, 0, "int8", (), 0),
        Header(Channel("g", 0, 2**32), 0, 0, 0, "int8", (), 0),
        Header(Channel("g" * 65536, 0, 0), 0, 0, 0, "int8", (), 0),
        Header(Channel("g", 0, 0), 2**64, 0, 0, "int8", (), 0),
        Header(Channel("g", 0, 0), 0, 0, 0, "int8", (1,) * 256, 0),
    ],
)
def test_what_no_field_can_hold_is_refused_and_leaves_nothing(header: Header) -> None:
    data = bytearray()
    writer = SegmentWriter(data.extend, SALT)
    before = bytes(data)
    with pytest.raises(NotLoggable):
        writer.append(header, b"x")
    assert bytes(data) == before and writer.entries == []


def test_a_mapped_file_is_read_without_a_copy(tmp_path: Path) -> None:
    import mmap

    path = tmp_path / "segment"
    path.write_bytes(write(some()))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        found = Segment(mapped)
        assert content(found) == some()
        del found


# ---- tensors ----


def all_dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(found, key=str)


@pytest.mark.filterwarnings("ignore")  # that complex32 is experimental, and quantized dtypes are deprecated
@pytest.mark.parametrize("dtype", all_dtypes(), ids=dtype_name)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    """Bit for bit; quantized ones are refused, which are more than their bytes."""
    if dtype_name(dtype).startswith(("qint", "quint")):
        for of in (payload_of, copy_of, digest_of):
            with pytest.raises(NotLoggable):
                of(torch._empty_affine_quantized([3], scale=1.0, zero_point=0, dtype=dtype))
        return
    tensor = torch.empty(4, 6, dtype=dtype)
    bits = torch.randint(0, 256, (tensor.numel() * tensor.itemsize,), dtype=torch.uint8)
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (len(bits),))
    raw.copy_(bits % 2 if dtype == torch.bool else bits)
    header = Header(Channel("pp", 0, 1), 0, 0, 0, dtype_name(dtype), tuple(tensor.shape), 0)
    assert copy_of(tensor) == bytes(payload_of(tensor))
    assert digest_of(tensor) == xxhash.xxh3_64_intdigest(copy_of(tensor))
    found = Segment(write([(header, bytes(payload_of(tensor)))]))
    again = tensor_of(*found.read(found.entries[0]))
    assert again.dtype == dtype and again.shape == tensor.shape
    assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(again.untyped_storage(), 0, (len(bits),)), raw)


def test_views_and_small_shapes() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    for tensor in (whole.t(), whole[1:3, ::2], whole[2], whole.flatten()[5], whole[:0], torch.nn.Parameter(whole)):
        header = Header(Channel("pp", 0, 1), 0, 0, 0, "float32", tuple(tensor.shape), 0)
        for payload in (bytes(payload_of(tensor)), copy_of(tensor)):
            assert torch.equal(tensor_of(header, memoryview(payload)), tensor)
            assert digest_of(tensor) == xxhash.xxh3_64_intdigest(payload)


def test_zeros_without_memory_are_zeros() -> None:
    """What autograd makes where a gradient is known to be nothing."""
    zeros = torch._efficientzerotensor(4)
    assert copy_of(zeros) == bytes(payload_of(zeros)) == bytes(16)
    assert digest_of(zeros) == xxhash.xxh3_64_intdigest(bytes(16))


def test_what_has_no_plain_memory_is_refused() -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.empty(2, device="meta"), torch.ones(2, dtype=torch.cfloat).conj()):
        for of in (payload_of, copy_of, digest_of):
            with pytest.raises(NotLoggable, match="no plain memory"):
                of(tensor)


def test_a_header_that_does_not_fit_its_payload_is_damaged() -> None:
    header = Header(Channel("pp", 0, 1), 0, 0, 0, "float32", (2,), 0)
    with pytest.raises(Damaged, match="no float32"):
        tensor_of(header, memoryview(bytes(7)))
    with pytest.raises(Damaged, match="has no dtype 'nn'"):
        tensor_of(replace(header, dtype="nn"), memoryview(bytes(8)))


def test_the_sizes_that_the_readme_names() -> None:
    assert (segment.HEAD_BYTES, segment.END_BYTES, record.HEADER_LEAST) == (32, 24, 72 + 8)
