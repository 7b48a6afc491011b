"""When a reduction on an accelerator is complete, as the host knows it.

torch's future of an NCCL collective is complete as soon as that is launched: what follows is ordered by streams. But an
aborted one just ends, with garbage in its output, and an update launched behind it would take that in. So here a thread
waits until the device is through, and what the future is used for runs then: on this thread, and, inside `launching`,
on a stream of its own, beside the backward.

This module must never start CUDA before there is a reduction on it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from swift_rendezvous.threads import start, thread

_POLL_S = 20e-6


class Reductions:
    """On *device*, whose reductions end in the order in which they begin. *is_stopped*: whether the groups are aborted,
    or about to be."""

    def __init__(self, device: torch.device, is_stopped: Callable[[], bool]) -> None:
        self._device, self._is_stopped = device, is_stopped
        self._waiting: queue.SimpleQueue[tuple[Any, Tensor, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: Any = None
        self._current: Any = None
        self._ended = ""

    def future_of(self, work: Any, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Has *tensor* as its value once *work*, which fills it, is complete; None if it was cut, and the error if it
        has failed."""
        if self._thread is None:
            new = thread("swift-reductions", self._run, self._end)
            start(new)
            self._thread = new
        if self._ended:
            raise RuntimeError(f"gradients cannot be reduced any more: {self._ended}")
        devices = [self._device] if self._device.type == "cuda" else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        self._waiting.put((work, tensor, future))
        if self._ended:  # meanwhile
            self._end(self._ended)
        return future

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """In what runs then: all goes to one stream. torch takes another one of 32 each time, and memory that was freed
        on one is of no use to the others."""
        if self._stream is None:
            yield
            return
        outer = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            yield
        outer.wait_stream(self._stream)  # what waits for the future waits for this one

    def wait_for_device(self) -> None:
        """Until all that was launched there is done: streams then need not wait for each other."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _end(self, why: str) -> None:
        """The thread has ended, which nothing here should bring about; the backward must not wait for it for ever."""
        self._ended = why
        error: Any = RuntimeError(f"a gradient could not be reduced: {why}")
        current, self._current = self._current, None
        if current is not None:
            with contextlib.suppress(RuntimeError):  # it has its result
                current.set_result(error)
        while not self._waiting.empty():
            self._waiting.get()[2].set_result(error)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        while True:
            work, tensor, future = self._waiting.get()
            self._current = future
            value: Any = tensor
            try:
                self._wait(work)
            except Exception as error:  # whatever it is: the backward waits for the future
                value = RuntimeError(f"a gradient could not be reduced: {error}")
            # If the groups are not stopped after it they were not before: what is there is whole.
            with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                future.set_result(None if self._is_stopped() else value)
            self._current = None
            del work, tensor, future, value  # not held until the next one comes

    def _wait(self, work: Any) -> None:
        """Until it is complete, or the groups are stopped."""
        if self._stream is None:
            work.wait()
            return
        with torch.cuda.stream(self._stream):
            work.wait()  # with NCCL it is the stream that waits
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        while not event.query() and not self._is_stopped():  # type: ignore[no-untyped-call]
            time.sleep(_POLL_S)
