"""Messages of a GPU on their way to the log: the ring of pinned memory, and the writer with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_logging_store.errors import LogError
from swift_logging_store.format.record import Channel
from swift_logging_store.format.tensors import tensor_of
from swift_logging_store.log.reader import LogReader
from swift_logging_store.log.staging import Ring, Staging
from swift_logging_store.log.writer import LogWriter

CHANNEL = Channel("0", 0, 1, 0)


@given(st.lists(st.one_of(st.integers(0, 700), st.tuples(st.integers(0, 9))), max_size=200))
def test_ranges_that_are_in_use_never_overlap(steps: list[int | tuple[int]]) -> None:
    """A number: take so many bytes; in brackets: release one of those that are in use. And when nothing is in use there
    is room for all but the largest."""
    ring, used = Ring(1024), list[tuple[int, int]]()
    for step in steps:
        if isinstance(step, tuple):
            if used:
                ring.release(used.pop(step[0] % len(used))[0])
            continue
        begin = ring.take(step)
        if begin is None:
            assert used, "there is room when nothing is in use"
            continue
        assert begin >= 0 and begin + step <= 1024
        assert all(begin + max(step, 1) <= other or end <= begin for other, end in used)
        used.append((begin, begin + max(step, 1)))
    for begin, _ in used:
        ring.release(begin)
    assert ring.take(960) is not None


def test_the_bytes_are_those_of_when_it_was_appended() -> None:
    staging = Staging(torch.device("cpu"), 4096)
    tensor = torch.arange(60, dtype=torch.bfloat16).view(5, 12).T  # not contiguous
    expected = tensor.clone()
    staged = staging.copy(tensor)
    assert staged is not None and len(staged) == 120
    tensor.zero_()
    assert torch.equal(torch.frombuffer(bytearray(staged.take()), dtype=torch.bfloat16).view(12, 5), expected)
    assert staging.is_too_large(4096) and not staging.is_too_large(4000)


def test_a_device_without_memory_for_the_copy_loses_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, tensor = Staging(torch.device("cpu"), 4096), torch.zeros(3000, dtype=torch.uint8)

    def clone(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", clone)
        with pytest.raises(LogError, match="no memory for a copy of a message of 3000 bytes: CUDA out of memory"):
            staging.copy(tensor)
    assert staging.copy(tensor) is not None


def messages(device: str) -> list[torch.Tensor]:
    return [torch.randn(size, device=device) for _ in range(5) for size in (3, 0, 500, 64, 1000, 7)]


def written_and_read(directory: Path, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What was appended to a log with a ring that holds one or two messages, and what is in the log."""
    appended = messages(device)
    expected = [tensor.cpu().clone() for tensor in appended]
    with LogWriter(directory, "rank0") as writer:
        writer._staging = Staging(torch.device(device), 4608)
        writer._is_staged = lambda tensor: True  # type: ignore[method-assign]
        for number, tensor in enumerate(appended):
            writer.append(CHANNEL, number, tensor, iteration=0, generation=1)
            tensor.zero_()
    with LogReader(directory) as log:
        return expected, [tensor_of(*log.read(CHANNEL, number)) for number in log.sequences(CHANNEL)]


def test_a_log_with_a_small_ring_has_all_messages(tmp_path: Path) -> None:
    expected, found = written_and_read(tmp_path, "cpu")
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))


@pytest.mark.gpu
def test_messages_of_a_gpu(tmp_path: Path) -> None:
    expected, found = written_and_read(tmp_path, "cuda")
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
