"""Logs on a local disk: real files, real kills, a disk that is full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swift_logging_store.errors import Damaged, LogError, NotLoggable
from swift_logging_store.format.record import Channel
from swift_logging_store.format.tensors import tensor_of
from swift_logging_store.log import reader
from swift_logging_store.log.reader import LogReader
from swift_logging_store.log.writer import LogWriter, segment_path

FORTH, BACK = Channel("pp", 0, 1), Channel("pp", 1, 0, 3)
# Appends messages of 4 KB to a log; says after each flush how many there are.
ENDLESS = """
import resource, signal, sys, torch
from pathlib import Path
from swift_logging_store.format.record import Channel
from swift_logging_store.log.writer import LogWriter
if len(sys.argv) > 2:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
writer = LogWriter(Path(sys.argv[1]), "w0", segment_bytes=200_000)
for number in range(1_000_000):
    writer.append(Channel("pp", 0, 1), number, torch.full((1000,), float(number)), iteration=number, generation=1)
    if number % 10 == 9:
        writer.flush()
        print(number + 1, flush=True)
"""


def endless(directory: Path, *args: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(directory), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment,
    )  # fmt: skip


def append(writer: LogWriter, channel: Channel, sequence: int, tensor: torch.Tensor) -> None:
    writer.append(channel, sequence, tensor, iteration=sequence // 4, generation=2, micro_batch=sequence % 4)


def test_messages_come_back_in_order(tmp_path: Path) -> None:
    sent = [torch.randn(3, number + 1).to(torch.bfloat16) for number in range(40)]
    with LogWriter(tmp_path, "w0", segment_bytes=2000) as writer:
        for number, tensor in enumerate(sent):
            append(writer, FORTH, number, tensor)
            append(writer, BACK, number, tensor.t())
            tensor.fill_(7.0)  # the log has a copy
    assert segment_path(tmp_path, "w0", 3).exists(), "several segments"
    in_files = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert writer.written.num_bytes == in_files and writer.written.seconds > 0
    with LogReader(tmp_path) as reader:
        assert reader.channels == [FORTH, BACK] and reader.torn == []
        assert reader.sequences(FORTH) == list(range(40)) and reader.first_missing(FORTH, 5) == 40
        assert reader.has(FORTH, 39) and not reader.has(FORTH, 40)
        for number, (header, payload) in enumerate(reader.messages(FORTH)):
            assert (header.iteration, header.micro_batch) == (number // 4, number % 4)
            assert tensor_of(header, payload).shape == (3, number + 1) and header.dtype == "bfloat16"
            assert not bool((tensor_of(header, payload) == 7.0).all())
        assert len(list(reader.messages(BACK, 38))) == 2


def test_what_waits_is_bounded(tmp_path: Path) -> None:
    """A message larger than the budget passes alone; every other one waits for room, and that is counted."""
    with LogWriter(tmp_path, "w0", budget_bytes=100_000) as writer:
        for number in range(300):
            append(writer, FORTH, number, torch.zeros(60_000 if number % 2 else 10_000))
            assert writer._queued_bytes <= 240_000 and len(writer._queue) <= 2
        writer.flush()
        assert writer._queued_bytes == 0 and writer.wait_s > 0
    with LogReader(tmp_path) as reader:
        assert reader.first_missing(FORTH) == 300


def test_what_was_flushed_survives_a_kill(tmp_path: Path) -> None:
    process = endless(tmp_path)
    assert process.stdout is not None and process.stderr is not None
    flushed = 0
    while flushed < 500:
        flushed = int(process.stdout.readline())
    process.kill()
    rest = process.stdout.read().split()
    process.communicate()
    flushed = int(rest[-1]) if rest else flushed
    with LogReader(tmp_path) as reader:
        there = reader.first_missing(FORTH)
        assert there >= flushed and reader.sequences(FORTH) == list(range(there))
        for number, (header, payload) in enumerate(reader.messages(FORTH)):
            assert torch.equal(tensor_of(header, payload), torch.full((1000,), float(number)))


def test_a_full_disk_is_told_and_what_was_written_is_whole(tmp_path: Path) -> None:
    process = endless(tmp_path, "100000")  # no file may become larger
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "LogError: the log in" in errors and "File too large" in errors, errors
    with LogReader(tmp_path) as reader:
        assert len(reader.torn) == 1 and reader.first_missing(FORTH) >= int(output.split()[-1])
        assert all(tensor_of(*message).shape == (1000,) for message in reader.messages(FORTH))


def test_after_a_failure_nothing_more_is_taken(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, "w0", segment_bytes=1)
    segment_path(tmp_path, "w0", 1).touch()  # the next one cannot be begun
    append(writer, FORTH, 0, torch.zeros(4))
    for call in (writer.flush, writer.close, lambda: append(writer, FORTH, 1, torch.zeros(4)), writer.close):
        with pytest.raises(LogError, match="File exists"):
            call()
    assert not writer._thread.is_alive()


def test_a_log_that_cannot_be_begun(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="No such file or directory"):
        LogWriter(tmp_path / "none", "w0")
    LogWriter(tmp_path, "w0").close()
    with pytest.raises(LogError, match="File exists"):
        LogWriter(tmp_path, "w0")


def test_a_tensor_without_plain_memory_leaves_the_log_as_it_is(tmp_path: Path) -> None:
    with LogWriter(tmp_path, "w0") as writer:
        with pytest.raises(NotLoggable):
            append(writer, FORTH, 0, torch.eye(3).to_sparse())
        append(writer, FORTH, 0, torch.eye(3))
    with LogReader(tmp_path) as reader:
        assert reader.sequences(FORTH) == [0]


def test_a_message_that_was_logged_again_must_be_the_same(tmp_path: Path) -> None:
    for name, values in (("w0", (1.0, 2.0)), ("w1", (1.0, 3.0))):
        with LogWriter(tmp_path, name) as writer:
            for sequence, value in enumerate(values):
                append(writer, FORTH, sequence, torch.tensor([value]))
    with LogReader(tmp_path) as reader:
        assert tensor_of(*reader.read(FORTH, 0)).item() == 1.0
        with pytest.raises(Damaged, match="message 1 was logged again with other contents"):
            reader.read(FORTH, 1)


def test_gaps_and_empty_directories(tmp_path: Path) -> None:
    with LogReader(tmp_path) as reader:
        assert reader.channels == [] and reader.first_missing(FORTH, 3) == 3
    with LogWriter(tmp_path, "w0") as writer:
        for sequence in (0, 1, 3):
            append(writer, FORTH, sequence, torch.zeros(1))
    segment_path(tmp_path, "w1", 0).write_bytes(b"SWIFT")  # a writer that died at once
    segment_path(tmp_path, "w2", 0).touch()
    with LogReader(tmp_path) as reader:
        assert reader.first_missing(FORTH) == 2 and len(list(reader.messages(FORTH))) == 2
        assert [(torn.path.name, torn.num_bytes) for torn in reader.torn] == [
            ("w1.00000000.seg", 5), ("w2.00000000.seg", 0)
        ]  # fmt: skip
        with pytest.raises(KeyError):
            reader.read(FORTH, 2)


def test_a_log_of_many_files_takes_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_MAPPED", 3)
    with LogWriter(tmp_path, "w0") as writer:
        for number in range(20):
            append(writer, FORTH, number, torch.full((50,), float(number)))
            writer.roll()

    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_descriptors()
    with LogReader(tmp_path) as log:
        held = log.read(FORTH, 7)
        for number in (*range(20), 3, 19, 0, 11):
            assert tensor_of(*log.read(FORTH, number))[0].item() == number
            assert num_descriptors() <= before + 3 + 1  # and the one of what is held
        assert tensor_of(*held)[49].item() == 7 and [number for _, number, _ in log.newest()] == list(range(20))
        segment_path(tmp_path, "w0", 5).unlink()
        with pytest.raises(LogError, match=r"w0\.00000005\.seg cannot be read: "):
            log.read(FORTH, 5)
        del held
    assert num_descriptors() == before


def test_a_damaged_segment_is_named(tmp_path: Path) -> None:
    with LogWriter(tmp_path, "w0") as writer:
        append(writer, FORTH, 0, torch.zeros(100))
    path = segment_path(tmp_path, "w0", 0)
    data = bytearray(path.read_bytes())
    data[40] ^= 1  # in the first record
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"w0\.00000000\.seg: the header of a record"):
        LogReader(tmp_path)


def test_old_segments_are_dropped_and_newer_ones_stay(tmp_path: Path) -> None:
    with LogWriter(tmp_path, "w0", segment_bytes=3000) as writer:
        writer.roll()  # nothing is there yet
        for number in range(40):
            if number == 20:
                writer.roll()
            append(writer, FORTH, number, torch.full((100,), float(number)))
        writer.flush()
        before = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert writer.drop(0) == (0, [])
        freed, names = writer.drop(5)
        assert freed == 20 * 400 and len(names) == 4  # the iteration of message 20
        assert before - sum(path.stat().st_size for path in tmp_path.iterdir()) > 8000
        with LogReader(tmp_path) as reader:
            assert reader.sequences(FORTH) == list(range(20, 40))
        assert writer.drop(5) == (0, [])
        append(writer, FORTH, 40, torch.zeros(1))
        writer.roll()
        writer.roll()
        append(writer, FORTH, 41, torch.zeros(1))
        writer.flush()
        writer.drop(100)  # but for the segment that is being written
        with LogReader(tmp_path) as reader:
            assert reader.sequences(FORTH) == [41]
        append(writer, FORTH, 42, torch.zeros(1))
    with LogReader(tmp_path) as reader:
        assert reader.sequences(FORTH) == [41, 42] and reader.torn == []


def test_what_was_flushed_is_in_the_segments_that_are_told_of(tmp_path: Path) -> None:
    """Also while a segment is being closed."""
    with LogWriter(tmp_path, "w0") as writer:
        for number in range(100):
            append(writer, FORTH, number, torch.zeros(1))
            if number % 3:
                writer.roll()
            num_bytes = writer.flush()
            path, firsts = writer.segments()[-1]
            assert (num_bytes == 0) == bool(number % 3) == (firsts == {})
            assert not num_bytes or path.stat().st_size == num_bytes


def test_segments_that_somebody_has_copies_of_need_not_be_here(tmp_path: Path) -> None:
    closed: list[Path] = []
    with LogWriter(tmp_path, "w0", segment_bytes=3000, on_closed=closed.append) as writer:
        for number in range(40):
            append(writer, FORTH, number, torch.full((100,), float(number)))
        writer.roll()
        writer.flush()
        append(writer, FORTH, 40, torch.zeros(1))
        writer.flush()
        assert len(closed) == 7
        names = [path.name for path in closed]
        paths, firsts = zip(*writer.segments(), strict=True)
        assert list(paths[:-1]) == closed and len(paths) == 8
        for path, first in zip(paths, firsts, strict=True):
            with LogReader(path) as reader:
                assert first == {FORTH: reader.sequences(FORTH)[0]}
        assert writer.evict({"unknown"}, 1 << 30) == 0
        size = writer.evict(names, 1)  # no more than asked for, the oldest first
        assert size > 4 * 400 and not closed[0].exists() and closed[1].exists()
        assert writer.evict(names[1:3], 1 << 30) >= 2 * 4 * 400 and writer.evict(names[:3], 1) == 0
        assert [path.exists() for path in closed] == [False] * 3 + [True] * 4
        with LogReader(closed[3]) as reader, LogReader(paths[-1]) as newest:
            assert reader.is_closed and len(reader.sequences(FORTH)) > 3
            assert not newest.is_closed and newest.sequences(FORTH) == [40]
        with pytest.raises(LogError, match="cannot be read"):
            LogReader(closed[0])
        freed, dropped = writer.drop(100)
        assert dropped == names and freed > 3 * 4 * 400 and len(writer.segments()) == 1
    assert len(closed) == 8


def test_a_message_larger_than_the_budget_does_not_wait_for_a_new_segment(tmp_path: Path) -> None:
    with LogWriter(tmp_path, "w0", budget_bytes=100) as writer:
        for number in range(20):
            append(writer, FORTH, number, torch.zeros(100))
            writer.roll()
    with LogReader(tmp_path) as reader:
        assert reader.sequences(FORTH) == list(range(20))
