"""Steps of a pipeline's schedule that several processes make together, to repeat a lost stage (SWIFT, section 5.2).

    first step of a schedule: made as a whole by each (`Rehearsal`) --> can it be shared?
    every other one: own micro-batches are computed --> results and gradients are exchanged --> the step is made once
                     more with these in place of computations, so that messages, losses and outputs are as ever

Each process ends a step with the gradients, losses and generators that one process alone would have. This module must
never decide who takes part, or when: see `team` and `helping`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from swift_agent.torch_private import pipeline_parts, pipelining
from swift_agent.worker.messages.messages import Messages
from swift_agent.worker.rejoin.step_parts import Computed, Computing, Giving, Key, Rehearsing, Unlike, Whole
from swift_recovery.errors import CannotReplay
from swift_recovery.replay import draws
from swift_recovery.replay.parallel import Sum, order_of, shares, why_not
from swift_recovery.replay.ring import Pieces
from swift_recovery.replay.team import Reformed
from swift_recovery.state.checksum import checksum


class Team(Protocol):
    """The processes that take part, as one of them sees them; *index* 0 is the replacement."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def sum(self) -> Sum: ...

    def meet(self) -> None:
        """A step begins. Raises `Reformed`."""

    def exchange(
        self, computed: Computed, own: Pieces, parameters: Sequence[Tensor], is_for_all: Callable[[Key], bool]
    ) -> tuple[list[Tensor | None], Computed]:
        """Returns the sums of all gradients, and what all have computed: on the replacement all of that, on others what
        *is_for_all*. Raises `Reformed`."""


class SharedSteps:
    """Stands around the parts of steps (`pipeline_parts.Parts`) in the process of one rank, inside `around`.

    *parameters*: all that the job's optimizers update. *refused* is told once why steps are not shared. *device*: of
    the rank."""

    def __init__(
        self, team: Team, messages: Messages, parameters: Sequence[Tensor], device: torch.device,
        refused: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._team, self._messages, self._device, self._refused = team, messages, device, refused
        self._given = parameters
        # By the identity of a schedule, which it keeps; and the order in which it adds gradients.
        self._rehearsed: dict[int, tuple[Rehearsing, tuple[int, ...]]] = {}
        self._again: dict[int, Any] = {}  # by its identity, a schedule of which another step is made as a whole
        self._now: Whole | Rehearsing | Computing | Giving = Whole()
        self._last = (-1, 0)
        """The iteration of the last step, and its number in that."""
        self._is_compared = False
        """All have begun with the same state, and none has made a step as a whole since."""
        self.is_off = not pipelining.has_schedules()
        """Steps are made as a whole from now on."""

    def around(self) -> AbstractContextManager[None]:
        return pipeline_parts.around_parts(self)

    def stop(self) -> None:
        """Nobody takes part any more."""
        self.is_off = True

    # ---- a `Parts` ----

    def step(
        self, schedule: Any, num_micro_batches: int, given: Any, losses: Any, call: Callable[[Any], Any]
    ) -> Any:
        if self.is_off or self._team.size == 1 or pipelining.mode_of_schedule(schedule) != "training":
            return call(losses)
        iteration = self._messages.shared.iteration
        self._last = iteration, self._last[1] + 1 if self._last[0] == iteration else 0
        known = self._rehearsed.get(id(schedule))
        if known is None or not known[0].has_its_parameters():
            return self._rehearse(schedule, num_micro_batches, given, losses, call)
        if pipelining.is_first_step(schedule):
            # Of two passes through it only one would have the messages by which stages tell each other their shapes.
            self._is_compared = False
            return call(losses)
        rehearsed, order = self._rehearsed[id(schedule)]
        of = self._label(rehearsed)
        start = _Start(rehearsed.parameters, rehearsed.devices)
        rehearsed.begin(given)
        while self._team.size > 1:
            try:
                self._team.meet()
                if self._team.size == 1:
                    break
                computed, own = self._compute(rehearsed, order, call)
                computed.of = of
                sums, everything = self._team.exchange(computed, own, rehearsed.parameters, rehearsed.is_for_all)
            except Reformed:
                start.put_back()
                pipeline_parts.begin_again(schedule)
                continue
            except Unlike as error:
                start.put_back()
                self._check_half(rehearsed.changed())
                pipeline_parts.begin_again(schedule)
                self.stop()
                self._refused(str(error))
                break
            self._is_compared = True
            start.add(sums)
            pipeline_parts.begin_again(schedule)
            self._now = Giving(rehearsed, everything)
            try:
                with self._messages.shared.counting() if self._team.index > 0 else contextlib.nullcontext():
                    return call(losses)
            finally:
                self._now = Whole()
        return call(losses)

    def receive(self, number: int, memory: Sequence[Tensor]) -> None:
        self._now.receive(number, memory)

    def forward(self, stage: Any, number: int, call: Callable[[], Any], keeps_output: bool) -> Any:
        return self._now.forward(stage, number, call, keeps_output)

    def loss(self, schedule: Any, number: int, call: Callable[[], Any]) -> Any:
        return self._now.loss(schedule, number, call)

    def backward(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        return self._now.backward(stage, number, call)

    def weights(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        return self._now.weights(stage, number, call)

    def scale(self, stage: Any, call: Callable[[], Any]) -> Any:
        return self._now.scale(stage, call)

    # ---- one step ----

    def _label(self, rehearsed: Rehearsing) -> tuple[int, ...]:
        """By which processes know that they are in the same step; for the first one also of what they have after steps
        that each has made by itself."""
        return *self._last, 0 if self._is_compared else checksum(rehearsed.state())

    def _rehearse(
        self, schedule: Any, num_micro_batches: int, given: Any, losses: Any, call: Callable[[Any], Any]
    ) -> Any:
        rehearsing = self._now = Rehearsing(schedule, num_micro_batches, self._given, self._device, given)
        begun = self._messages.shared.num_collectives
        self._is_compared = False
        try:
            result = call(losses)
        finally:
            self._now = Whole()
        found = rehearsing.found(self._messages.shared.num_collectives - begun)
        is_changed = rehearsing.are_inputs_changed()
        why = "its stages change their inputs in place" if is_changed else why_not(found)
        if found.changed and not is_changed and id(schedule) not in self._again:
            # What a first call makes for all that follow is no change.
            self._again[id(schedule)] = schedule
        elif why:
            self.stop()
            self._refused(why)
        else:
            self._rehearsed[id(schedule)] = rehearsing, order_of(found)
        return result

    def _compute(
        self, rehearsed: Rehearsing, order: Sequence[int], call: Callable[[Any], Any]
    ) -> tuple[Computed, Pieces]:
        if why := rehearsed.why_not_now():
            raise Unlike(why)
        team = self._team
        share = shares(order, team.size)[team.index]
        computing = self._now = Computing(rehearsed, share, keeps_all=team.index > 0 and team.sum == "ordered")
        if team.index > 0:
            for parameter in rehearsed.parameters:
                parameter.grad = None
        began_s, begun = time.monotonic(), self._messages.shared.num_collectives
        try:
            with self._messages.shared.peeking(computing.unread):
                call([])
        finally:
            self._now = Whole()
        computing.computed.seconds = time.monotonic() - began_s
        if self._messages.shared.num_collectives != begun:
            changed = ["what they get from collectives"]
        elif rehearsed.are_inputs_changed():
            changed = ["their inputs in place"]
        else:
            changed = rehearsed.changed()
        if changed:
            self._check_half(changed)
            raise Unlike(f"its stages change {changed[0]}, which they did not do in the first step that was repeated")
        return computing.computed, computing.pieces()

    def _check_half(self, changed: Sequence[str]) -> None:
        """What the own share of a step has *changed* beside gradients nobody can take back. A helper leaves then; the
        replacement cannot."""
        if changed and self._team.index == 0:
            raise CannotReplay(
                f"its stages change {changed[0]}, which they did not do in the first step that was repeated: half of "
                "it is done (type --strategy log, and leave --helpers out)"
            )


class _Start:
    """What a step that comes to nothing must leave as it was."""

    def __init__(self, parameters: Sequence[Tensor], devices: Sequence[torch.device]) -> None:
        self._generators = draws.states(devices)
        self._gradients = [
            (parameter, parameter.grad, parameter.grad.clone() if parameter.grad is not None else None)
            for parameter in parameters
        ]

    def add(self, sums: Sequence[Tensor | None]) -> None:
        """The step has come to these. As autograd does: a gradient that is there is written in place, for it may be
        part of something else (all gradients in one tensor)."""
        for (parameter, gradient, _), total in zip(self._gradients, sums, strict=True):
            if gradient is not None and total is not None and gradient is not total:
                gradient.copy_(total)
            parameter.grad = gradient if gradient is not None else total

    def put_back(self) -> None:
        draws.put_back(self._generators)
        for parameter, gradient, was in self._gradients:
            if gradient is not None and was is not None:
                gradient.copy_(was)
            parameter.grad = gradient
