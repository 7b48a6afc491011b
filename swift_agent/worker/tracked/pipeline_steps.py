"""Schedules of `torch.distributed.pipelining` across a failure: what a step leaves behind, and first steps.

In the first step of a schedule, and whenever it changes between training and evaluation, the stages of a pipeline
agree, and tell each other the shapes of what they will send unless the script has given them. A new process comes to
its first step when the others have long been through theirs. So what was received then is kept, goes to the process
that takes a rank over, with the rest of its state (`Place.offer`) or in a checkpoint, and is served there; a replica's
is as good, as it has the same stage. A step that was cut is forgotten, and run again by all, unless those who are in
it stay there: then this module does not notice. A step that a process runs dry, because others have counted it, tells
it the mode in which all are then.

This module must never decide who begins with what.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from swift_agent.errors import SwiftError, UsageError
from swift_agent.torch_private import messages as torch_messages
from swift_agent.torch_private import pipelining
from swift_agent.torch_private import works as torch_works
from swift_agent.worker.in_place import Alone, InPlace

Mode = Literal["training", "evaluation"]


# Of what is known of a schedule; the rest is left out where there is none.
_ALWAYS = ("mode", "received")


@dataclass
class _Known:
    """Of one schedule: the *mode* of the last step that all stages made together, and what this rank received in the
    last first step of each mode. *at*: after how many iterations and sections that mode began. *before*: the mode where
    a checkpoint was taken with which all processes have begun, until they have made a step."""

    mode: Mode | None = None
    received: dict[Mode, list[Tensor]] = field(default_factory=dict)
    at: tuple[int, int] | None = None
    before: Mode | None = None


class Pipelines:
    """All schedules of this process; there is one of this, made once schedules may be there. *unreduced*: what a first
    step runs in that was none when its iteration ran before."""

    def __init__(
        self, in_place: InPlace | None = None,
        unreduced: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:  # fmt: skip
        self._in_place, self._unreduced = in_place or Alone(), unreduced
        # By the name of a schedule, then by its number among those of that name, in the order of their first steps.
        self._known: dict[str, list[_Known]] = {}
        self._places: weakref.WeakKeyDictionary[Any, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._numbers: Counter[str] = Counter()
        # Of this iteration: schedules that made a step, and whether one was a first; and what is known if it counts.
        self._stepped: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._new: dict[tuple[str, int], _Known] = {}
        self._receiving: list[Tensor] | None = None
        self._serving: deque[Tensor] | None = None
        self._is_unserved = False  # in the first step of a dry run, and nobody has told it what is heard there
        pipelining.watch_schedules(self._on_step)
        torch_messages.intercept_messages("schedules", self._send, self._recv, self._recv_from_any)

    @property
    def micro_batches(self) -> int:
        """Most of a step of any schedule that has made one, 0: none has."""
        return max(map(pipelining.micro_batches_of, self._places), default=0)

    def end(self) -> None:
        """The iteration or section counts, and what was made in it."""
        for (name, number), known in self._new.items():
            self._all_of(name, number)[number] = known
        self._new.clear()
        self._stepped.clear()

    def pass_over(self) -> None:
        """The iteration was cut after its first steps were made, and counts."""
        for schedule in self._stepped:
            pipelining.reset_schedule(schedule, first=False)
        self.end()

    def rewind(self) -> None:
        """The iteration or section was cut, and will be run again."""
        for schedule, first in self._stepped.items():
            pipelining.reset_schedule(schedule, first=first)
        self._new.clear()
        self._stepped.clear()

    def offer(self) -> dict[str, list[dict[str, Any]]]:
        """For `give`, through the codec."""
        return {
            name: [{kind: value for kind, value in vars(one).items() if kind in _ALWAYS or value} for one in all_of]
            for name, all_of in self._known.items()
        }

    def give(self, offered: Mapping[str, list[dict[str, Any]]]) -> None:
        """To a new process, which has made no step yet. Raises `SwiftError` for what torch would not have sent: it
        will unpickle it."""
        self._known = {name: [_Known(**one) for one in all_of] for name, all_of in offered.items()}
        for all_of in self._known.values():
            for known in all_of:
                for received in known.received.values():
                    pipelining.check_stage_messages(received)

    def begin_anew(self) -> None:
        """All processes are new, and have begun with the checkpoint that had what was given: stages tell each other
        shapes once more. For that they run their modules, which the processes before them had not done there."""
        for all_of in self._known.values():
            all_of[:] = [_Known(before=one.mode or one.before) for one in all_of]

    # ---- steps ----

    @contextlib.contextmanager
    def _on_step(self, schedule: Any, first: bool) -> Iterator[None]:
        key, mode = self._key_of(schedule), pipelining.mode_of_schedule(schedule)
        known = self._new.get(key) or self._all_of(*key)[key[1]]
        dry_run = self._in_place.is_dry_run
        if not first and not dry_run and known.mode != mode:
            # It made its step of this mode as a dry_run: the others change to it now, and tell each other.
            pipelining.change_mode_of_schedule(schedule)
            first = True
        if dry_run and known.at is not None and self._in_place.at >= known.at:
            known.mode, known.at = mode, self._in_place.at  # others have counted it, and this process had not
        self._stepped[schedule] = first or self._stepped.get(schedule, False)
        if not first:
            yield
            return
        if pipelining.connects_by_edges(schedule):
            raise UsageError(
                "torch.distributed.config.pipeline_per_edge_p2p is on: a schedule makes process groups in its first "
                "step, which a replacement would make alone. Set it to False."
            )
        # The others are in this mode already, or nobody else is there.
        served = known.received.get(mode) if dry_run or known.mode == mode else None
        self._serving = deque(served) if served is not None else None
        self._is_unserved = dry_run and served is None
        receiving = self._receiving = []
        alone = self._in_place.dry_run() if served is not None else contextlib.nullcontext()
        unreduced = self._unreduced() if known.before == mode else contextlib.nullcontext()
        try:
            with alone, unreduced, pipelining.agreeing_by_messages():
                yield
        finally:
            self._serving = self._receiving = None
            self._is_unserved = False
        if not dry_run:
            # Received into memory that the stage may use again.
            heard = served if served is not None else [tensor.detach().clone() for tensor in receiving]
            self._new[key] = _Known(mode, {**known.received, mode: heard}, self._in_place.at)
            if not self._in_place.is_inside:
                self.end()

    def _key_of(self, schedule: Any) -> tuple[str, int]:
        if schedule not in self._places:
            name = pipelining.name_of_schedule(schedule)
            self._places[schedule] = (name, self._numbers[name])
            self._numbers[name] += 1
        return self._places[schedule]

    def _all_of(self, name: str, number: int) -> list[_Known]:
        all_of = self._known.setdefault(name, [])
        while len(all_of) <= number:
            all_of.append(_Known())
        return all_of

    # ---- messages ----

    def _send(self, original: Any, group: Any, tensors: list[Tensor], dst: int, tag: int) -> Any:
        if self._serving is not None or self._is_unserved:
            return torch_works.finished_work()  # they know
        return original(group, tensors, dst, tag)

    def _recv(self, original: Any, group: Any, tensors: list[Tensor], src: int, tag: int) -> Any:
        if self._serving is not None:
            for tensor in tensors:
                self._serve(tensor)
            return torch_works.finished_work()
        if self._is_unserved:
            self._in_place.give_up(
                "a failure interrupted this rank's first step of a pipeline's schedule in this mode (training or "
                "evaluation). Other ranks finished it. This rank lacks the shapes that the stages exchanged in it"
            )
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
