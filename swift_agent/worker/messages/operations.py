"""Sends and receives of an iteration, as the script holds them: they outlive the connections that they began on.

A wait for a receive that a failure cuts asks whether this process stays where it is. If it does the receive has begun
again, on new connections, when the answer comes, and the wait goes on. What was sent is sent again from the log where
it is needed: a send that a failure cuts is over.

This module must never decide which rank stays.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

_NO_TIMEOUT = timedelta(0)  # torch's


class Meter:
    """What messages add to while a job is measured. *waited_s*: for messages, and for others to agree to an update."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.sent_bytes: Counter[int] = Counter()
        self.num_sent: Counter[int] = Counter()

    def sent(self, destination: int, num_bytes: int) -> None:
        self.sent_bytes[destination] += num_bytes
        self.num_sent[destination] += 1


@contextlib.contextmanager
def waiting(meter: Meter | None) -> Iterator[None]:
    """Inside, others are waited for."""
    began_s = time.perf_counter()
    yield
    if meter is not None:
        meter.waited_s += time.perf_counter() - began_s


class Owner(Protocol):
    """Of all operations of an iteration. *reconnected* counts how often this process has stayed in one."""

    reconnected: int
    meter: Meter | None

    def stay(self, error: Exception) -> None:
        """Return on new connections, where all that was waited for has begun again; or raise *error*."""

    def expect_cut(self, error: Exception) -> None:
        """Return if *error* comes from a failure that this process outlives; else raise it."""

    def note_thread(self) -> None:
        """The calling thread uses messages."""


class _Work(dist.Work):
    """An operation; *inner* is torch's, on the newest connections."""

    def __init__(self, owner: Owner, inner: Any = None) -> None:
        super().__init__()
        self.inner = inner
        self._owner = owner

    def is_success(self) -> bool:
        return bool(self.inner.is_success())

    def exception(self) -> Any:
        return self.inner.exception()

    def source_rank(self) -> int:
        return int(self.inner._source_rank())

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self.inner.result()
        return found

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.inner.block_current_stream()

    def get_future(self) -> Any:
        return self.inner.get_future()


class Send(_Work):
    """Of a message that is in the log."""

    def __init__(self, owner: Owner, inner: Any) -> None:
        super().__init__(owner, inner)
        self._connection = owner.reconnected

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        self._owner.note_thread()
        if self._connection != self._owner.reconnected:
            return True
        try:
            return bool(self.inner.wait(timeout))
        except Exception as error:
            cut = error
        try:
            self._owner.expect_cut(cut)
        finally:
            del cut  # its traceback has this frame
        return True

    def is_completed(self) -> bool:
        return self._connection != self._owner.reconnected or bool(self.inner.is_completed())


class Receive(_Work):
    """The next receive of a channel; *queue*: those that are not done yet, this one at its end. *post* begins it, on
    the connections that there are; *done* is called when it is done."""

    def __init__(self, owner: Owner, queue: deque[Receive], post: Callable[[], Any], done: Callable[[], None]) -> None:
        super().__init__(owner)
        self._post, self._done = post, done
        self._queue: deque[Receive] | None = queue
        self.is_done = False
        queue.append(self)

    def post(self) -> None:
        self.inner = self._post()

    def let_go(self) -> None:
        """The iteration is over, or will be run again: from now on this is a receive as any other."""
        self._queue = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        self._owner.note_thread()
        # Those before it first: messages come in order, and a rank that has so many has the first so many.
        while not self.is_done:
            queue = self._queue
            if queue is None:
                return bool(self.inner.wait(timeout))
            first, meter = queue[0], self._owner.meter
            began_s = time.perf_counter() if meter is not None else 0.0
            try:
                first.inner.wait(timeout)
            except Exception as error:
                cut = error
            else:
                if meter is not None:
                    meter.waited_s += time.perf_counter() - began_s
                if queue and queue[0] is first:  # else another thread has run the iteration again, or ended it
                    queue.popleft()
                    first.is_done = True
                    first._done()
                continue
            try:
                self._owner.stay(cut)
            finally:
                del cut
        return True

    def is_completed(self) -> bool:
        # A script that hears of it may use the tensor, so from now on nothing must be received into it again.
        return self.is_done or (bool(self.inner.is_completed()) and self.wait())
