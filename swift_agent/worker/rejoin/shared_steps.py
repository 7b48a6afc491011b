"""Steps of a pipeline's schedule that several processes make together while they repeat a lost stage (SWIFT, section 5.2).

    first step of a schedule: made as a whole by each (`Rehearsal`) --> can it be shared?
    every other one: own micro-batches are computed --> results and gradients are exchanged --> the step is made once
                     more with these in place of computations, so that messages, losses and outputs are as ever

Each process ends a step with the gradients, losses and generators that one process alone would have. This module must
never decide who takes part, or when: see `team` and `helping`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from swift_agent.torch_private import pipelining
from swift_agent.worker.messages.messages import Messages
from swift_recovery.replay import draws
from swift_recovery.replay.parallel import Rehearsal, Sum, shares, why_not
from swift_recovery.replay.team import Frame, Pieces, Reformed

Key = tuple[str, int, int]
"""A part of a micro-batch: its kind, the stage, the micro-batch."""


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
        self, computed: "Computed", own: Pieces, parameters: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], "Computed"]:
        """Returns the sums of all gradients, and what all have computed. Raises `Reformed`."""


class Computed:
    """Results of parts of micro-batches, by key: the tensors of each, None for what is none. *seconds*: it took."""

    def __init__(self) -> None:
        self.parts: dict[Key, list[Tensor | None]] = {}
        self.seconds = 0.0

    def to_frame(self) -> Frame:
        head = [[*key, [one is not None for one in tensors]] for key, tensors in self.parts.items()]
        return {"parts": head}, [one for tensors in self.parts.values() for one in tensors if one is not None]

    def add(self, frame: Frame) -> None:
        """What another process has computed."""
        head, tensors = frame
        rest = iter(tensors)
        for kind, stage, number, are_there in head["parts"]:
            self.parts[str(kind), int(stage), int(number)] = [next(rest) if there else None for there in are_there]


class SharedSteps:
    """Stands around the parts of steps (`pipelining.Parts`) in the process of one rank, inside `around`.

    *parameters*: all that the job's optimizers update. *refused* is told once why steps are not shared. *device*: of
    the rank."""

    def __init__(
        self, team: Team, messages: Messages, parameters: Sequence[Tensor], device: torch.device,
        refused: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._team, self._messages, self._device, self._refused = team, messages, device, refused
        self._given = parameters
        self._rehearsed: dict[int, _Rehearsing] = {}  # by the identity of a schedule, which it keeps
        self._now: _Whole | _Rehearsing | _Computing | _Giving = _Whole()
        self.is_off = not pipelining.has_schedules()
        """Steps are made as a whole from now on."""

    def around(self) -> AbstractContextManager[None]:
        return pipelining.around_parts(self)

    def stop(self) -> None:
        """Nobody takes part any more."""
        self.is_off = True

    # ---- a `Parts` ----

    def step(self, schedule: Any, num_micro_batches: int, losses: Any, call: Callable[[Any], Any]) -> Any:
        if self.is_off or self._team.size == 1 or pipelining.mode_of_schedule(schedule) != "training":
            return call(losses)
        rehearsed = self._rehearsed.get(id(schedule))
        if rehearsed is None:
            return self._rehearse(schedule, num_micro_batches, losses, call)
        start = _Start(rehearsed.parameters, self._device)
        while self._team.size > 1:
            try:
                self._team.meet()
                if self._team.size == 1:
                    break
                computed, own = self._compute(rehearsed, num_micro_batches, call)
                sums, everything = self._team.exchange(computed, own, rehearsed.parameters)
            except Reformed:
                start.put_back()
                pipelining.begin_again(schedule)
                continue
            for parameter, total in zip(rehearsed.parameters, sums, strict=True):
                parameter.grad = total
            pipelining.begin_again(schedule)
            self._now = _Giving(rehearsed, everything, start)
            try:
                return call(losses)
            finally:
                self._now = _Whole()
        return call(losses)

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

    def _rehearse(self, schedule: Any, num_micro_batches: int, losses: Any, call: Callable[[Any], Any]) -> Any:
        rehearsing = self._now = _Rehearsing(schedule, num_micro_batches, self._given, self._device)
        begun = self._messages.num_collectives
        try:
            result = call(losses)
        finally:
            self._now = _Whole()
        why = why_not(rehearsing.found(self._messages.num_collectives - begun))
        if why:
            self.stop()
            self._refused(why)
        else:
            self._rehearsed[id(schedule)] = rehearsing
        return result

    def _compute(
        self, rehearsed: _Rehearsing, num_micro_batches: int, call: Callable[[Any], Any]
    ) -> tuple[Computed, Pieces]:
        team = self._team
        share = shares(num_micro_batches, team.size)[team.index]
        computing = self._now = _Computing(rehearsed, share, keeps_all=team.index > 0 and team.sum == "ordered")
        if team.index > 0:
            for parameter in rehearsed.parameters:
                parameter.grad = None
        began_s = time.monotonic()
        try:
            with self._messages.peeking():
                call([])
        finally:
            self._now = _Whole()
        computing.computed.seconds = time.monotonic() - began_s
        return computing.computed, computing.pieces()


class _Start:
    """What a step that comes to nothing must leave as it was."""

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self._generators = draws.states([device])
        self._gradients = [
            (parameter, parameter.grad, parameter.grad.clone() if parameter.grad is not None else None)
            for parameter in parameters
        ]

    def put_back_generators(self) -> None:
        draws.put_back(self._generators)

    def put_back(self) -> None:
        self.put_back_generators()
        for parameter, gradient, was in self._gradients:
            if gradient is not None and was is not None:
                gradient.copy_(was)
            parameter.grad = gradient


class _Whole:
    """All parts are made here, as if nobody stood around them."""

    def forward(self, stage: Any, number: int, call: Callable[[], Any], keeps_output: bool) -> Any:
        return call()

    def loss(self, schedule: Any, number: int, call: Callable[[], Any]) -> Any:
        return call()

    def backward(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        return call()

    def weights(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        return call()

    def scale(self, stage: Any, call: Callable[[], Any]) -> Any:
        return call()


class _Rehearsing(_Whole):
    """All parts are made here, and what they do is noted: what `why_not` asks, and what a process that leaves parts out
    has to know of them."""

    def __init__(self, schedule: Any, num_micro_batches: int, parameters: Sequence[Tensor], device: torch.device) -> None:
        self.schedule, self._num_micro_batches, self._device = schedule, num_micro_batches, device
        self.stages = list(pipelining.stages_of(schedule))
        of_stages = [list(stage.submod.parameters()) for stage in self.stages]
        everything = [*parameters, *(one for some in of_stages for one in some)]
        self.parameters = list({id(one): one for one in everything if one.requires_grad}.values())
        self._num_shared = sum(map(len, of_stages)) - len({id(one) for some in of_stages for one in some})
        self._modules = [module for stage in self.stages for module in stage.submod.modules()]
        if isinstance(schedule._loss_fn, torch.nn.Module):
            self._modules += schedule._loss_fn.modules()
        self._kept = _kept_by(self._modules)
        self._python, self._numpy = random.getstate(), numpy.random.get_state()
        self._added: list[tuple[int, int]] = []
        self._num_uncounted = 0
        self._other = ""
        self.draws: dict[Key, dict[str, int]] = {}
        self.outputs: dict[Key, tuple[Any, list[tuple[torch.Size, torch.dtype]]]] = {}
        self.input_gradients: dict[Key, list[Tensor | None]] = {}

    def found(self, num_collectives: int) -> Rehearsal:
        """What has come out, once the step is made."""
        changed = [name for name in self._kept if not self._kept[name].is_still_there()]
        if random.getstate() != self._python:
            changed.append("the state of Python's generator")
        if not _same_states(numpy.random.get_state(), self._numpy):
            changed.append("the state of NumPy's generator")
        other = self._other
        if not pipelining.keeps_known_parts(self.schedule):
            other = f"torch {torch.__version__} keeps what a stage computes in a way that is not known here"
        if any(isinstance(stage.submod, DistributedDataParallel) for stage in self.stages):
            other = "its stages are in DDP"
        if any(getattr(one, "_post_accumulate_grad_hooks", None) for one in self.parameters):
            other = "gradients are used as soon as they are there, in hooks"
        if any(one.grad is not None and one.grad.layout != torch.strided for one in self.parameters):
            other = "it has gradients that are sparse"
        if any(hasattr(one, "_local_tensor") for one in self.parameters):
            other = "its stages are sharded"
        return Rehearsal(
            self._num_micro_batches, self._added, self._num_shared, num_collectives, self._num_uncounted, changed,
            other, self.draws,
        )  # fmt: skip

    def key(self, kind: str, stage: Any, number: int) -> Key:
        return kind, self.stages.index(stage), number

    def forward(self, stage: Any, number: int, call: Callable[[], Any], keeps_output: bool) -> Any:
        key = self.key("output", stage, number)
        output = self._drawing(key, call)
        leaves, spec = pytree.tree_flatten(output)
        if not all(isinstance(one, Tensor) for one in leaves) or not isinstance(output, (Tensor, tuple, list)):
            self._other = "its stages give something else than tensors"
        else:
            self.outputs[key] = spec, [(one.shape, one.dtype) for one in leaves]
        return output

    def loss(self, schedule: Any, number: int, call: Callable[[], Any]) -> Any:
        return self._drawing(("loss", 0, number), call)

    def backward(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        key = self.key("input", stage, number)
        result = self._drawing(key, lambda: self._adding(stage, number, call))
        self.input_gradients[key] = [
            torch.empty_like(one, device="meta") if one is not None else None
            for one in pipelining.input_gradients(stage, number)
        ]
        return result

    def weights(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        return self._drawing(self.key("weights", stage, number), lambda: self._adding(stage, number, call))

    def _adding(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        before = [_version_of(one) for one in self.parameters]
        result = call()
        if before != [_version_of(one) for one in self.parameters]:
            self._added.append((self.stages.index(stage), number))
        return result

    def _drawing(self, key: Key, call: Callable[[], Any]) -> Any:
        before = draws.states([self._device])
        result = call()
        found = draws.between(before, draws.states([self._device]))
        if found is None:
            self._num_uncounted += 1
        else:
            self.draws[key] = found
        return result


class _Computing:
    """Parts of the micro-batches *share* are made; of all others the generators are put where they would be."""

    def __init__(self, rehearsed: _Rehearsing, share: range, keeps_all: bool) -> None:
        """*keeps_all*: gradients of each micro-batch apart."""
        self._rehearsed, self._share, self._keeps_all = rehearsed, share, keeps_all
        self.computed = Computed()
        self._pieces: list[dict[int, Tensor]] = []

    def pieces(self) -> Pieces:
        if not self._keeps_all:
            self._keep()
        return self._pieces

    def _keep(self) -> None:
        gradients = {
            number: one.grad for number, one in enumerate(self._rehearsed.parameters) if one.grad is not None
        }
        if gradients:
            self._pieces.append(gradients)

    def _left_out(self, key: Key) -> None:
        draws.skip(self._rehearsed.draws.get(key, {}))

    def forward(self, stage: Any, number: int, call: Callable[[], Any], keeps_output: bool) -> Any:
        key = self._rehearsed.key("output", stage, number)
        if number not in self._share:
            self._left_out(key)
            return pipelining.give_output(stage, number, _stand_in(self._rehearsed, key, stage), keeps_output)
        output = call()
        self.computed.parts[key] = [one.detach() for one in pytree.tree_leaves(output)]
        return output

    def loss(self, schedule: Any, number: int, call: Callable[[], Any]) -> Any:
        key = ("loss", 0, number)
        if number not in self._share:
            self._left_out(key)
            pipelining.give_loss(schedule, torch.zeros(()))
            return None
        result = call()
        self.computed.parts[key] = [pipelining.last_loss(schedule).detach()]
        return result

    def backward(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        key = self._rehearsed.key("input", stage, number)
        if number not in self._share:
            self._left_out(key)
            pipelining.give_input_gradients(stage, number, _no_gradients(self._rehearsed, key, stage))
            return None
        result = call()
        self.computed.parts[key] = list(pipelining.input_gradients(stage, number))
        self._after_backward()
        return result

    def weights(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        if number not in self._share:
            self._left_out(self._rehearsed.key("weights", stage, number))
            return None
        result = call()
        self._after_backward()
        return result

    def _after_backward(self) -> None:
        if self._keeps_all:
            self._keep()
            for parameter in self._rehearsed.parameters:
                parameter.grad = None

    def scale(self, stage: Any, call: Callable[[], Any]) -> Any:
        return None  # the sums are


class _Giving:
    """No part is made: each is given what was computed."""

    def __init__(self, rehearsed: _Rehearsing, everything: Computed, start: _Start) -> None:
        self._rehearsed, self._parts = rehearsed, everything.parts

    def _take(self, key: Key, stage: Any) -> list[Tensor | None] | None:
        found = self._parts.get(key)
        if found is None:
            return None
        return [one.to(stage.device) if one is not None else None for one in found]

    def forward(self, stage: Any, number: int, call: Callable[[], Any], keeps_output: bool) -> Any:
        key = self._rehearsed.key("output", stage, number)
        found = self._take(key, stage)
        if found is None:  # nobody here needs it
            output = _stand_in(self._rehearsed, key, stage)
        else:
            output = pytree.tree_unflatten(found, self._rehearsed.outputs[key][0])
        return pipelining.give_output(stage, number, output, keeps_output)

    def loss(self, schedule: Any, number: int, call: Callable[[], Any]) -> Any:
        (loss,) = self._parts["loss", 0, number]
        assert loss is not None
        pipelining.give_loss(schedule, loss.to(self._rehearsed.stages[-1].device))

    def backward(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        key = self._rehearsed.key("input", stage, number)
        found = self._take(key, stage)
        gradients = _no_gradients(self._rehearsed, key, stage) if found is None else tuple(found)
        pipelining.give_input_gradients(stage, number, gradients)

    def weights(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        return None

    def scale(self, stage: Any, call: Callable[[], Any]) -> Any:
        return call()


def _stand_in(rehearsed: _Rehearsing, key: Key, stage: Any) -> Any:
    spec, metas = rehearsed.outputs[key]
    return pytree.tree_unflatten([torch.zeros(shape, dtype=dtype, device=stage.device) for shape, dtype in metas], spec)


def _no_gradients(rehearsed: _Rehearsing, key: Key, stage: Any) -> tuple[Tensor | None, ...]:
    metas = rehearsed.input_gradients[key]
    return tuple(torch.zeros_like(one, device=stage.device) if one is not None else None for one in metas)


def _version_of(parameter: Tensor) -> tuple[int, int] | None:
    gradient = parameter.grad
    return (id(gradient), gradient._version) if gradient is not None else None


# ---- what modules keep ----


class _Kept:
    """Something of a module, by *name*, as it is now."""

    def __init__(self, owner: Mapping[str, Any], name: str) -> None:
        self._owner, self._name = owner, name
        value = owner[name]
        self._was = value.detach().clone() if isinstance(value, Tensor) else value

    def is_still_there(self) -> bool:
        value = self._owner.get(self._name)
        if isinstance(self._was, Tensor):
            return isinstance(value, Tensor) and value.shape == self._was.shape and torch.equal(value, self._was)
        return type(value) is type(self._was) and value == self._was


def _kept_by(modules: Sequence[torch.nn.Module]) -> dict[str, _Kept]:
    """Buffers, and numbers, texts and tensors among the attributes, by a name for people."""
    found: dict[str, _Kept] = {}
    for module in modules:
        for owner, name in _names_of(module):
            found[f"{type(module).__name__}.{name}"] = _Kept(owner, name)
    return found


def _names_of(module: torch.nn.Module) -> Iterator[tuple[Mapping[str, Any], str]]:
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield module._buffers, name
    for name, value in vars(module).items():
        if isinstance(value, (int, float, str, Tensor)):
            yield vars(module), name


def _same_states(one: Any, other: Any) -> bool:
    return all(numpy.array_equal(a, b) for a, b in zip(one, other, strict=True))
