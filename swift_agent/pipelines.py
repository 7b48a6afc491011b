"""Schedules of `torch.distributed.pipelining` across a failure: what a step leaves behind, and the first step.

In the first step of a schedule the stages of a pipeline tell each other the shapes of what they will send, unless the
script has given them. A new process comes to its first step when the others have long been through theirs. So what was
received in first steps is kept, goes to whoever takes a rank over, with the rest of its state (`Place.offer`) or in a
checkpoint, and is served there; a replica's is as good, as it has the same stage. A step that was cut is forgotten, and
run again by all.

This module must never decide who begins with what.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from swift_agent import torch_private
from swift_agent.errors import SwiftError


class Pipelines:
    """All schedules of this process; there is one of this, made once schedules may be there."""

    def __init__(self) -> None:
        # Stepped in this iteration; and whether it was their first.
        self._schedules: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # By the name of a schedule: what each of that name has received in its first step.
        self._made: dict[str, list[list[Tensor]]] = {}
        self._given: Mapping[str, list[list[Tensor]]] = {}
        self._new: list[tuple[str, list[Tensor]]] = []  # in this iteration
        self._receiving: list[Tensor] | None = None
        self._serving: deque[Tensor] | None = None
        self.alone: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Around a first step that is served: it must have no effect, and nobody else makes it."""
        torch_private.watch_schedules(self._on_step)
        torch_private.wrap_messages(self._send, self._recv, self._recv_from_any)

    def end(self) -> None:
        """The iteration or section counts, and what was made in it."""
        for name, received in self._new:
            self._made.setdefault(name, []).append(received)
        self._new.clear()
        self._schedules.clear()

    def pass_over(self) -> None:
        """The iteration was cut after its first steps were made, and counts."""
        for schedule in self._schedules:
            torch_private.reset_schedule(schedule, first=False)
        self.end()

    def rewind(self) -> None:
        """The iteration or section was cut, and will be run again."""
        for schedule, first in self._schedules.items():
            torch_private.reset_schedule(schedule, first=first)
        self._new.clear()
        self._schedules.clear()

    def offer(self) -> dict[str, list[list[Tensor]]]:
        """For `give`, through the codec."""
        return dict(self._made)

    def give(self, offered: Mapping[str, list[list[Tensor]]]) -> None:
        """To a new process, which has made no step yet."""
        self._given = offered

    # ---- first steps ----

    @contextlib.contextmanager
    def _on_step(self, schedule: Any, first: bool) -> Iterator[None]:
        self._schedules[schedule] = first or self._schedules.get(schedule, False)
        if not first:
            yield
            return
        name = torch_private.name_of_schedule(schedule)
        number = len(self._made.get(name, ())) + sum(name == made for made, _ in self._new)
        given = self._given.get(name, [])[number : number + 1]
        self._serving = deque(given[0]) if given else None
        receiving = self._receiving = []
        try:
            with self.alone() if given else contextlib.nullcontext():
                yield
        finally:
            self._serving = self._receiving = None
        # Received into memory that the stage may use again.
        self._new.append((name, given[0] if given else [tensor.detach().clone() for tensor in receiving]))

    def _send(self, original: Any, group: Any, tensors: list[Tensor], dst: int, tag: int) -> Any:
        if self._serving is not None:
            return torch_private.finished_work()  # they know
        return original(group, tensors, dst, tag)

    def _recv(self, original: Any, group: Any, tensors: list[Tensor], src: int, tag: int) -> Any:
        if self._serving is not None:
            for tensor in tensors:
                self._serve(tensor)
            return torch_private.finished_work()
        if self._receiving is not None:
            self._receiving.extend(tensors)
        return original(group, tensors, src, tag)

    def _serve(self, tensor: Tensor) -> None:
        known = self._serving.popleft() if self._serving else None
        if known is None or (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
            raise SwiftError(
                "this process's first step of a pipeline schedule differs from that of the process whose rank it has: "
                "the same script must make the same schedules, in the same order, with the same micro-batches"
            )
        with torch.no_grad():
            tensor.copy_(known)

    def _recv_from_any(self, original: Any, group: Any, tensors: list[Tensor], tag: int) -> Any:
        return original(group, tensors, tag)
