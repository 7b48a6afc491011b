"""Messages on a GPU, on their way to the log: the computation never waits for the copy.

    message --clone, on its stream--> clone --a stream beside it--> pinned memory --writer's thread--> segment

The clone takes microseconds, and then the message may be changed. Its way over the bus is on a stream of its own: it is
gone in what a pipeline waits anyway. What is under way takes as much memory on the device as in the ring, and no more.

Must never wait for the device in the thread that sends (but for what is larger than the ring, which is not staged).
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor

from swift_logging_store.errors import LogError
from swift_logging_store.format.tensors import bytes_of, check_plain

RING_BYTES = 256 << 20
_ALIGNMENT = 64


class Ring:
    """Which ranges of a buffer of *num_bytes* are in use; one that is released early is free when older ones are.
    Pure."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._used: deque[tuple[int, int]] = deque()  # begin and end
        self._released: set[int] = set()

    def take(self, num_bytes: int) -> int | None:
        """Where a range of so many bytes begins, None if there is no room."""
        size = max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
        begin, end = 0, self.num_bytes
        if self._used:
            oldest, begin = self._used[0][0], self._used[-1][1]
            if self._used[-1][0] < oldest:  # it goes on at the front
                end = oldest
            elif begin + size > end:
                begin, end = 0, oldest
        if begin + size > end:
            return None
        self._used.append((begin, begin + size))
        return begin

    def release(self, begin: int) -> None:
        """The range that begins there is not used any more."""
        self._released.add(begin)
        while self._used and self._used[0][0] in self._released:
            self._released.remove(self._used.popleft()[0])


class Staged:
    """A message that is on its way; `len` of it in bytes."""

    def __init__(self, staging: Staging, begin: int, num_bytes: int, event: Any) -> None:
        self._staging, self._begin, self._num_bytes, self._event = staging, begin, num_bytes, event

    def __len__(self) -> int:
        return self._num_bytes

    def take(self) -> bytes:
        """Its bytes, when they are here; once."""
        if self._event is not None:
            self._event.synchronize()
        return self._staging.fetch(self._begin, self._num_bytes)


class Staging:
    """For the messages of *device*. (On the CPU the same without streams, which is of use to tests only.)"""

    def __init__(self, device: torch.device, num_bytes: int = RING_BYTES) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes = self._memory.numpy().data
        self._stream: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._ring = Ring(num_bytes)

    def is_too_large(self, num_bytes: int) -> bool:
        """Whether there is never room for so many."""
        return num_bytes > self._ring.num_bytes - _ALIGNMENT

    def copy(self, tensor: Tensor) -> Staged | None:
        """Begin to copy *tensor*, which may be changed then; None if there is no room now. Raises `NotLoggable`,
        and `LogError` where the device has no memory for it."""
        check_plain(tensor)
        num_bytes = tensor.numel() * tensor.element_size()
        with self._lock:
            begin = self._ring.take(num_bytes)
        if begin is None:
            return None
        try:
            source = bytes_of(tensor.detach().clone(memory_format=torch.contiguous_format))
        except torch.OutOfMemoryError as error:
            with self._lock:
                self._ring.release(begin)
            raise LogError(f"there is no memory for a copy of a message of {num_bytes} bytes: {error}") from error
        target = self._memory[begin : begin + num_bytes]
        if self._stream is None:
            target.copy_(source)
            return Staged(self, begin, num_bytes, None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
        source.record_stream(self._stream)  # its memory is not given to others before
        return Staged(self, begin, num_bytes, event)

    def fetch(self, begin: int, num_bytes: int) -> bytes:
        data = bytes(self._bytes[begin : begin + num_bytes])
        with self._lock:
            self._ring.release(begin)
        return data
