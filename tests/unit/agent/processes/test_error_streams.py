"""Standard error on its way: nothing is lost or changed, the last of it is known, and nobody waits for a reader."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_agent.agent.processes.error_streams import KEPT, ErrorStreams


@pytest.fixture
def target() -> Iterator[tuple[int, int]]:
    """Where all goes to: its two ends."""
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def write(path: str, data: bytes) -> None:
    with open(path, "ab", buffering=0) as stream:
        while data:
            data = data[stream.write(data) :]


def test_it_arrives_and_is_known(target: tuple[int, int], tmp_path: Path) -> None:
    streams = ErrorStreams(str(tmp_path), target[1])
    path = streams.path(0)
    write(path, b"one\ntwo\n")
    assert streams.last(0) == "one\ntwo\n" and streams.last(1) == ""
    assert os.read(target[0], 100) == b"one\ntwo\n"
    # The next worker of the same rank begins with nothing.
    assert streams.path(0) == path and streams.last(0) == ""
    write(path, b"x" * (2 * KEPT))
    assert streams.last(0) == "x" * KEPT
    streams.close()
    assert os.listdir(tmp_path) == []


def test_all_of_it_arrives_whoever_writes(target: tuple[int, int], tmp_path: Path) -> None:
    streams = ErrorStreams(str(tmp_path), target[1])
    found = bytearray()
    lines = {rank: b"".join(b"%d:%d\n" % (rank, number) for number in range(20_000)) for rank in range(3)}
    total = sum(map(len, lines.values()))

    def read() -> None:
        while len(found) < total:
            found.extend(os.read(target[0], 1 << 16))

    threads = [threading.Thread(target=read)]
    threads += [threading.Thread(target=write, args=(streams.path(rank), data)) for rank, data in lines.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == total
    # No line is torn apart by another worker's.
    for rank in lines:
        ours = [line for line in bytes(found).splitlines() if line.startswith(b"%d:" % rank)]
        assert ours == [b"%d:%d" % (rank, number) for number in range(20_000)]
    for rank in lines:
        assert streams.last(rank).endswith(f"{rank}:19999\n")
    streams.close()


def test_a_reader_that_stands_still_keeps_only_those_who_write_to_it(target: tuple[int, int], tmp_path: Path) -> None:
    streams = ErrorStreams(str(tmp_path), target[1])
    path = streams.path(0)
    write(path, b"y" * 200_000)  # more than the reader's pipe takes
    began_s = time.monotonic()
    write(path, b"the end\n")
    assert streams.last(0).endswith("the end\n")
    assert time.monotonic() - began_s < 5.0
    os.set_blocking(target[1], False)
    streams.close(timeout_s=1.0)
    assert time.monotonic() - began_s < 10.0


def test_what_has_no_end_of_a_line_is_shown_after_a_moment(target: tuple[int, int], tmp_path: Path) -> None:
    """A question, or a dot for each batch."""
    streams = ErrorStreams(str(tmp_path), target[1])
    path = streams.path(0)
    write(path, b"begin\n...")
    assert os.read(target[0], 100) == b"begin\n"
    assert os.read(target[0], 100) == b"..."
    write(path, b"30%\r40%\r")
    assert os.read(target[0], 100) == b"30%\r40%\r"
    streams.close()


def test_a_slow_reader_gets_all_of_it(target: tuple[int, int], tmp_path: Path) -> None:
    streams = ErrorStreams(str(tmp_path), target[1])
    write(streams.path(0), b"w" * 400_000 + b"\nthe end\n")
    found = bytearray()

    def read() -> None:
        while not found.endswith(b"the end\n"):
            time.sleep(0.02)
            found.extend(os.read(target[0], 4096))

    reader = threading.Thread(target=read)
    reader.start()
    streams.close()
    reader.join(20)
    assert len(found) == 400_009


def test_a_target_that_is_gone_harms_nobody(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    streams = ErrorStreams(str(tmp_path), theirs)
    path = streams.path(0)
    os.close(ours)
    write(path, b"z" * 100_000)
    assert streams.last(0).endswith("zzz")
    streams.close()
    os.close(theirs)


def test_a_terminal_is_one_for_the_worker_too(tmp_path: Path) -> None:
    """As wide as that of the agent; and what is written comes as if it had been written there."""
    ours, theirs = os.openpty()
    subprocess.run(["stty", "cols", "91", "rows", "17"], stdin=theirs, check=True)
    streams = ErrorStreams(str(tmp_path), theirs)
    path = streams.path(0)
    script = "import os, sys; print(os.isatty(2), os.get_terminal_size(2).columns, file=sys.stderr)"
    stderr = os.open(path, os.O_WRONLY | os.O_NOCTTY)
    subprocess.run(["python3", "-c", script], stderr=stderr, check=True, timeout=30)
    os.close(stderr)
    assert streams.last(0) == "True 91\n"
    assert os.read(ours, 100) == b"True 91\r\n"  # the terminal's own doing
    streams.close()
    os.close(ours)
    os.close(theirs)


def test_without_a_pipe_there_is_no_path(target: tuple[int, int], tmp_path: Path) -> None:
    streams = ErrorStreams(str(tmp_path / "gone"), target[1])
    assert streams.path(0) == "" and streams.last(0) == ""
    streams.close()
    ErrorStreams(str(tmp_path), target[1]).close()
