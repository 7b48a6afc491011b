"""Writes a log on a node-local disk: asynchronously, in order, with bounded memory.

    append --copy--> queue (at most so many bytes) --thread--> segment file 0, 1, 2, ...

The caller only copies; what is on a GPU goes by way of `staging`. The thread shares its core and the interpreter with
the caller, so it writes many messages at a time: when they are `BATCH_BYTES`, or when the caller says that it is a good
moment. If the disk is slower than the sends the queue fills up, and then `append` waits: no message is ever dropped,
and how long was waited is counted. What fails in the thread is raised by the next call.

Must never read a log; that is the `reader`'s.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from swift_logging_store.errors import LogError
from swift_logging_store.format.record import Buffer, Channel, Header
from swift_logging_store.format.segment import SegmentWriter
from swift_logging_store.format.tensors import copy_of, dtype_name
from swift_logging_store.log.rate import Rate
from swift_logging_store.log.staging import Staged, Staging

SUFFIX = ".seg"
BATCH_BYTES = 4 << 20
SEGMENT_BYTES = 256 << 20
# Buffers in one call of the system; Linux takes 1024.
_MAX_BUFFERS = 512


def segment_path(directory: Path, name: str, number: int) -> Path:
    """*name*: of the log, unique for each process that writes one; *number*: of the segment, from 0."""
    return directory / f"{name}.{number:08d}{SUFFIX}"


class _Message(NamedTuple):
    channel: Channel
    sequence: int
    iteration: int
    generation: int
    dtype: torch.dtype
    shape: torch.Size
    payload: bytes | Staged
    micro_batch: int

    def header(self) -> Header:
        return Header(
            self.channel, self.sequence, self.iteration, self.generation, dtype_name(self.dtype), tuple(self.shape),
            len(self.payload), self.micro_batch,
        )  # fmt: skip


@dataclass
class _Closed:
    """A segment: the last iteration in it, the bytes of payload, the lowest number of each channel, and whether its
    file is there."""

    last_iteration: int
    num_bytes: int
    firsts: Mapping[Channel, int]
    is_here: bool = True


class LogWriter:
    """One log of one process. A context manager; its end closes the last segment.

    *budget_bytes*: what may wait to be written; one message may be larger, and then waits alone. *segment_bytes*: a
    segment that has become as large is closed, and another one begun. *on_closed*: called with the path of each segment
    that is whole and on the disk, in a thread. Raises `LogError` if *directory* cannot be written, or has segments of
    that name.
    """

    def __init__(
        self, directory: Path, name: str, *, budget_bytes: int = 256 << 20, segment_bytes: int = SEGMENT_BYTES,
        on_closed: Callable[[Path], None] = lambda path: None,
    ) -> None:  # fmt: skip
        self._directory, self._name = directory, name
        self._budget_bytes, self._segment_bytes, self._on_closed = budget_bytes, segment_bytes, on_closed
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._queue: deque[_Message | None] = deque()  # None: a new segment begins
        self._queued_bytes = 0
        self._due = False  # the thread is to write what is there
        self._num_written = 0
        self._closed: dict[int, _Closed] = {}  # by number
        self._closing = False
        self._error: LogError | None = None
        self._staging: Staging | None = None
        self.wait_s = 0.0
        """Seconds that `append` has waited for the disk, in all."""
        self.written = Rate()
        """By the thread: in calls that write, and that wait for the disk."""
        # Of the thread, once it runs.
        self._number = -1
        self._file_fd = -1
        self._segment: SegmentWriter | None = None
        self._buffers: list[Buffer] = []
        self._last_iteration = -1
        self._payload_bytes = 0
        self._firsts: dict[Channel, int] = {}
        self._begin_segment()
        self._thread = threading.Thread(target=self._run, name="swift-log-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def append(
        self, channel: Channel, sequence: int, tensor: Tensor, *, iteration: int, generation: int, micro_batch: int = -1
    ) -> None:
        """Log a message; *tensor* may be changed as soon as this returns. Waits while the queue is full.

        Raises `NotLoggable` for a tensor without plain memory, `LogError` if the log cannot be written any more.
        """
        payload = self._stage(tensor) if self._is_staged(tensor) else copy_of(tensor)
        # What can be done by the thread is.
        message = _Message(channel, sequence, iteration, generation, tensor.dtype, tensor.shape, payload, micro_batch)
        with self._changed:
            if not self._has_room(len(payload)):
                began_s = time.monotonic()
                self._wake()
                self._changed.wait_for(lambda: self._error is not None or self._has_room(len(payload)))
                self.wait_s += time.monotonic() - began_s
            self._check()
            self._queue.append(message)
            self._queued_bytes += len(payload)
            if self._queued_bytes >= BATCH_BYTES:
                self._wake()

    @staticmethod
    def _is_staged(tensor: Tensor) -> bool:
        return tensor.is_cuda

    def _stage(self, tensor: Tensor) -> bytes | Staged:
        """Waits while there is no room for it in pinned memory."""
        if self._staging is None:
            self._staging = Staging(tensor.device)
        staging = self._staging
        if staging.is_too_large(tensor.numel() * tensor.element_size()):
            return copy_of(tensor)
        while True:
            written = self._num_written
            if (staged := staging.copy(tensor)) is not None:
                return staged
            began_s = time.monotonic()
            with self._changed:
                self._wake()
                # What was in the ring just now is not counted yet.
                self._changed.wait_for(lambda: self._error is not None or self._num_written > written)  # noqa: B023
                self._check()
                self.wait_s += time.monotonic() - began_s

    def wake(self) -> None:
        """A good moment to write what was appended."""
        with self._changed:
            if self._queue:
                self._wake()

    def roll(self) -> None:
        """What is appended from now on is in a segment of its own, if anything was appended before."""
        with self._changed:
            self._check()
            self._queue.append(None)
            self._wake()

    def drop(self, before: int) -> tuple[int, list[str]]:
        """Delete the closed segments in which all messages are of iterations *before* that one: how many bytes of
        payload their files had, and the names of all, whether their files were there or not. Raises `LogError`. The
        log must not be read meanwhile."""
        with self._changed:
            self._check()
            old = {number: one for number, one in self._closed.items() if one.last_iteration < before}
            for number in old:
                del self._closed[number]
        freed = self._delete(old)
        return freed, [self._path(number).name for number in old]

    def evict(self, names: Collection[str], num_bytes: int) -> int:
        """Delete the files of those closed segments, of which copies exist, from the oldest on, until *num_bytes* of
        payload are gone; how many it were. As with `drop` otherwise."""
        with self._changed:
            self._check()
            closed = dict(sorted(self._closed.items()))
        freed = 0
        for number, one in closed.items():
            if freed < num_bytes and self._path(number).name in names:
                freed += self._delete({number: one})
        return freed

    def segments(self) -> list[tuple[Path, Mapping[Channel, int]]]:
        """Of this log, whether their files are there or not, the oldest first, with the lowest number of each channel
        that is in them. All but the last one are closed; that may be. What has been flushed is in these."""
        with self._changed:
            firsts = {number: one.firsts for number, one in self._closed.items()}
            firsts.setdefault(self._number, dict(self._firsts))
        return [(self._path(number), firsts[number]) for number in sorted(firsts)]

    def _delete(self, segments: dict[int, _Closed]) -> int:
        freed = 0
        for number, one in segments.items():
            if not one.is_here:
                continue
            try:
                self._path(number).unlink(missing_ok=True)
            except OSError as error:
                raise self._failed(error) from error
            one.is_here = False
            freed += one.num_bytes
        return freed

    def _path(self, number: int) -> Path:
        return segment_path(self._directory, self._name, number)

    def flush(self) -> int:
        """Return when all that was appended is on the disk (fsync): how many bytes the newest segment has then, 0 if
        there is no message in it. Raises `LogError`."""
        with self._changed:
            self._wake()
            # Not only for messages: after them a segment may be about to be closed.
            self._changed.wait_for(lambda: self._error is not None or not self._queue)
            self._check()
            try:
                os.fsync(self._file_fd)
            except OSError as error:
                raise self._failed(error) from error
            # The thread has nothing to do: only the caller appends.
            return self._segment.num_bytes if self._segment is not None and self._segment.entries else 0

    def close(self) -> None:
        """Write what is left and close the segment. May be repeated. Raises `LogError`; then the last segment has no
        end mark, and what was written before is whole."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._file_fd >= 0:
            os.close(self._file_fd)
            self._file_fd = -1
        with self._changed:
            self._check()

    def _has_room(self, num_bytes: int) -> bool:
        return not self._queued_bytes or self._queued_bytes + num_bytes <= self._budget_bytes

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._due or self._closing)
                    if not self._queue and self._closing:
                        break
                    batch = self._next_batch()  # it counts until it is written
                    self._due = len(batch) < len(self._queue)
                self._write_batch(batch)
                with self._changed:
                    for entry in batch:
                        self._queue.popleft()
                        if entry is not None:
                            self._queued_bytes -= len(entry.payload)
                            self._num_written += 1
                    self._changed.notify_all()
            self._end_segment()
        except Exception as error:  # whatever it is: nothing may wait for this thread any more
            with self._changed:
                self._error = error if isinstance(error, LogError) else self._failed(error)
                self._changed.notify_all()

    def _next_batch(self) -> list[_Message | None]:
        batch, num_bytes = [], 0
        for entry in self._queue:
            batch.append(entry)
            num_bytes += 0 if entry is None else len(entry.payload)
            if num_bytes >= BATCH_BYTES:
                break
        return batch

    def _write_batch(self, batch: list[_Message | None]) -> None:
        for entry in batch:
            if entry is None:
                if self._last_iteration >= 0:
                    self._end_segment()
                    self._begin_segment()
                continue
            assert self._segment is not None
            payload = entry.payload if isinstance(entry.payload, bytes) else entry.payload.take()
            self._segment.append(entry.header(), payload)
            self._last_iteration = max(self._last_iteration, entry.iteration)
            self._firsts[entry.channel] = min(self._firsts.get(entry.channel, entry.sequence), entry.sequence)
            self._payload_bytes += len(entry.payload)
            if self._segment.num_bytes >= self._segment_bytes:
                self._end_segment()
                self._begin_segment()
        self._write_buffers()

    def _failed(self, error: Exception) -> LogError:
        why = getattr(error, "strerror", None) or error
        return LogError(f"the log in {self._directory} cannot be written: {why}")

    def _begin_segment(self) -> None:
        path = self._path(self._number + 1)
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._failed(error) from error
        directory_fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory_fd)  # or a crash of the machine could leave no name for what is flushed
        finally:
            os.close(directory_fd)
        self._number += 1
        with self._changed:  # `flush` may be about to use it
            if self._file_fd >= 0:
                os.close(self._file_fd)
            self._file_fd = fd
        self._segment = SegmentWriter(self._buffers.append, secrets.randbits(64))

    def _end_segment(self) -> None:
        assert self._segment is not None
        self._segment.finish()
        self._write_buffers()
        began_s = time.monotonic()
        os.fsync(self._file_fd)
        self.written = self.written.more(0, time.monotonic() - began_s)
        with self._changed:
            self._closed[self._number] = _Closed(self._last_iteration, self._payload_bytes, self._firsts)
        if self._last_iteration >= 0:
            self._on_closed(self._path(self._number))
        self._last_iteration, self._payload_bytes, self._firsts = -1, 0, {}

    def _write_buffers(self) -> None:
        """All that the segment has given."""
        left = [memoryview(buffer) for buffer in self._buffers]
        self._buffers.clear()
        while left:
            began_s = time.monotonic()
            num_bytes = os.writev(self._file_fd, left[:_MAX_BUFFERS])
            self.written = self.written.more(num_bytes, time.monotonic() - began_s)
            while left and num_bytes >= len(left[0]):
                num_bytes -= len(left.pop(0))
            if num_bytes:
                left[0] = left[0][num_bytes:]
