"""The parts of a step of a pipeline's schedule, and what becomes of each in a step that is made as a whole, in one of
which only some micro-batches are computed, and in one where results are given.

    Whole, Rehearsing: call() | Computing: call(), or a stand-in | Giving: what was computed, here or elsewhere

Stand-ins go nowhere: their messages are not sent. This module must never talk to another process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from swift_agent.torch_private import pipeline_parts, pipelining
from swift_agent.worker.rejoin import gradients
from swift_agent.worker.rejoin.kept import differing, has_plain_memory, kept_by
from swift_recovery.replay import draws
from swift_recovery.replay.parallel import Rehearsal
from swift_recovery.replay.ring import Frame, Pieces

Key = tuple[str, int, int]
"""A part of a micro-batch: its kind, the stage, the micro-batch."""


class Unlike(Exception):
    """A step is not like that which was made as a whole."""


class Computed:
    """Results of parts of micro-batches, by key: the tensors of each, None for what is none. *of*: the iteration, the
    step in that, and a checksum of the state that it began with. *seconds*: it took."""

    def __init__(self) -> None:
        self.of: tuple[int, ...] = ()
        self.parts: dict[Key, list[Tensor | None]] = {}
        self.seconds = 0.0

    def to_frame(self) -> Frame:
        head = [[*key, [one is not None for one in tensors]] for key, tensors in self.parts.items()]
        found = [one for tensors in self.parts.values() for one in tensors if one is not None]
        return {"parts": head, "of": list(self.of)}, found

    def add(self, frame: Frame) -> None:
        """What another process has computed."""
        head, tensors = frame
        rest = iter(tensors)
        for kind, stage, number, are_there in head["parts"]:
            self.parts[str(kind), int(stage), int(number)] = [next(rest) if there else None for there in are_there]


class Whole:
    """All parts are made here, as if nobody stood around them."""

    def receive(self, number: int, memory: Sequence[Tensor]) -> None:
        return None

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


class Rehearsing(Whole):
    """All parts are made here, and what they do is noted: what `why_not` asks, and what a process that leaves parts out
    has to know of them."""

    def __init__(
        self, schedule: Any, num_micro_batches: int, parameters: Sequence[Tensor], device: torch.device, given: Any
    ) -> None:
        """*given*: what the script gives to the step."""
        self.schedule, self.num_micro_batches = schedule, num_micro_batches
        self.stages = list(pipelining.stages_of(schedule))
        of_stages = [list(stage.submod.parameters()) for stage in self.stages]
        self._of_stages = [id(one) for some in of_stages for one in some]
        everything = [*parameters, *(one for some in of_stages for one in some)]
        # Frozen ones too: a script may have them train from a later step on.
        self.parameters = list({id(one): one for one in everything}.values())
        places = [device, *(stage.device for stage in self.stages), *(one.device for one in self.parameters)]
        self.devices = list(dict.fromkeys(places))
        self._num_shared = sum(map(len, of_stages)) - len({id(one) for some in of_stages for one in some})
        loss = pipeline_parts.loss_of(schedule)
        self._modules = [module for stage in self.stages for module in stage.submod.modules()]
        self._others = pipeline_parts.contexts_of(schedule)
        if isinstance(loss, torch.nn.Module):
            self._modules += loss.modules()
        else:
            self._others[getattr(loss, "__name__", type(loss).__name__)] = loss
        self._given: dict[str, Any] = {}
        self._begin(given, is_thorough=True)
        self._added: list[tuple[int, int]] = []
        self._num_uncounted = 0
        self._other = ""
        self.draws: dict[Key, dict[str, int]] = {}
        self.outputs: dict[Key, tuple[Any, list[tuple[torch.Size, torch.dtype]]]] = {}
        self.input_gradients: dict[Key, list[Tensor | None]] = {}

    def has_its_parameters(self) -> bool:
        """Whether stages have those that they had then: a script may have put others in their place."""
        return self._of_stages == [id(one) for stage in self.stages for one in stage.submod.parameters()]

    def found(self, num_collectives: int) -> Rehearsal:
        """What has come out, once the step is made."""
        other = self._other
        if not pipeline_parts.keeps_known_parts(self.schedule):
            other = f"torch {torch.__version__} keeps what a stage computes in a way that is not known here"
        if any(isinstance(stage.submod, DistributedDataParallel) for stage in self.stages):
            other = "its stages are in DDP"
        other = self.why_not_now() or other
        if any(one.grad is not None and one.grad.layout != torch.strided for one in self.parameters):
            other = "it has gradients that are sparse"
        if any(hasattr(one, "_local_tensor") for one in self.parameters):
            other = "its stages are sharded"
        return Rehearsal(
            self.num_micro_batches, self._added, self._num_shared, num_collectives, self._num_uncounted,
            self.changed(), other,
        )  # fmt: skip

    def why_not_now(self) -> str:
        """What forbids to share a step that is about to begin, and could be looked at before."""
        names = ("_post_accumulate_grad_hooks", "_backward_hooks")
        if any(getattr(one, name, None) for one in self.parameters for name in names):
            return "gradients are used as soon as they are there, in hooks"
        if any(one.requires_grad for one in self._inputs):
            return "its inputs get gradients"  # those of the own share only
        return ""

    def state(self) -> list[Tensor]:
        """What a step begins with, and may leave otherwise: parameters and buffers."""
        buffers = [one for module in self._modules for one in module._buffers.values() if one is not None]
        return [*self.parameters, *filter(has_plain_memory, buffers)]

    def are_inputs_changed(self) -> bool:
        """In place, since the step has begun: what would make it again begins with what is left of them."""
        return self._versions != [one._version for one in self._inputs]

    def changed(self) -> list[str]:
        """What is not as it was when this was made, by names for people."""
        now = kept_by(self._modules, {**self._others, **self._given}, self._is_thorough)
        changed = differing(self._kept, now)
        if random.getstate() != self._python:
            changed.append("the state of Python's generator")
        if not _same_states(numpy.random.get_state(), self._numpy):
            changed.append("the state of NumPy's generator")
        return changed

    def begin(self, given: Any) -> None:
        """Another step like that one begins. What the script has changed since is no matter."""
        self._begin(given, is_thorough=False)

    def _begin(self, given: Any, is_thorough: bool) -> None:
        leaves = pytree.tree_leaves(given)
        self._inputs = [one for one in leaves if isinstance(one, Tensor)]
        self._versions = [one._version for one in self._inputs]
        # torch hands the same object to all micro-batches.
        others = [one for one in leaves if not isinstance(one, (Tensor, bool, int, float, str, type(None)))]
        self._given = {f"argument {number}": one for number, one in enumerate(others)}
        self._is_thorough = is_thorough
        self._kept = kept_by(self._modules, {**self._others, **self._given}, is_thorough)
        self._python, self._numpy = random.getstate(), numpy.random.get_state()

    def is_for_all(self, key: Key) -> bool:
        """What a script may use of a step: losses, and outputs of the last stage."""
        return key[0] == "loss" or (key[0] == "output" and bool(self.stages[key[1]].is_last))

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
            for one in pipeline_parts.input_gradients(stage, number)
        ]
        return result

    def weights(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        return self._drawing(self.key("weights", stage, number), lambda: self._adding(stage, number, call))

    def _adding(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        before = gradients.versions(self.parameters)
        result = call()
        if gradients.are_added_twice(self.parameters, before):
            self._other = "gradients of one micro-batch are added more than once"
        if gradients.are_shared(self.parameters):
            self._other = "the gradients of two parameters are one tensor"
        if before != gradients.versions(self.parameters):
            self._added.append((self.stages.index(stage), number))
        return result

    def _drawing(self, key: Key, call: Callable[[], Any]) -> Any:
        before = draws.states(self.devices)
        result = call()
        found = draws.between(before, draws.states(self.devices))
        if found is None:
            self._num_uncounted += 1
        else:
            self.draws[key] = found
        return result


class Computing:
    """Parts of the micro-batches *share* are made; of all others the generators are put where they would be."""

    def __init__(self, rehearsed: Rehearsing, share: Sequence[int], keeps_all: bool) -> None:
        """*keeps_all*: gradients of each micro-batch apart."""
        self._rehearsed, self._share, self._keeps_all = rehearsed, share, keeps_all
        self.computed = Computed()
        self.unread = set[int]()
        """Where memory begins of messages that only other micro-batches need, as they come."""
        self._pieces: list[dict[int, Tensor]] = []

    def pieces(self) -> Pieces:
        if not self._keeps_all:
            self._keep()
        return self._pieces

    def _keep(self) -> None:
        found = {number: one.grad for number, one in enumerate(self._rehearsed.parameters) if one.grad is not None}
        if found:
            self._pieces.append(found)

    def _made(self, key: Key, call: Callable[[], Any]) -> Any:
        rehearsed = self._rehearsed
        before, added = draws.states(rehearsed.devices), gradients.versions(rehearsed.parameters)
        result = call()
        if draws.between(before, draws.states(rehearsed.devices)) != rehearsed.draws.get(key, {}):
            raise Unlike("a micro-batch has drawn another number of random numbers than before")
        if gradients.are_added_twice(rehearsed.parameters, added):
            raise Unlike("gradients of one micro-batch are added more than once")
        return result

    def _left_out(self, key: Key) -> None:
        draws.skip(self._rehearsed.draws.get(key, {}))

    def receive(self, number: int, memory: Sequence[Tensor]) -> None:
        places = {one.data_ptr() for one in memory if one.numel()}
        if number in self._share:
            self.unread -= places  # torch 2.15 makes memory for each message, where that of another one has been
        else:
            self.unread |= places

    def forward(self, stage: Any, number: int, call: Callable[[], Any], keeps_output: bool) -> Any:
        key = self._rehearsed.key("output", stage, number)
        if number not in self._share:
            self._left_out(key)
            return pipeline_parts.give_output(stage, number, _stand_in(self._rehearsed, key, stage), keeps_output)
        output = self._made(key, call)
        self.computed.parts[key] = [one.detach() for one in pytree.tree_leaves(output)]
        return output

    def loss(self, schedule: Any, number: int, call: Callable[[], Any]) -> Any:
        key = ("loss", 0, number)
        if number not in self._share:
            self._left_out(key)
            pipeline_parts.give_loss(schedule, torch.zeros(()))
            return None
        result = self._made(key, call)
        self.computed.parts[key] = [pipeline_parts.last_loss(schedule).detach()]
        return result

    def backward(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        key = self._rehearsed.key("input", stage, number)
        if number not in self._share:
            self._left_out(key)
            pipeline_parts.give_input_gradients(stage, number, _no_gradients(self._rehearsed, key, stage))
            return None
        result = self._made(key, call)
        self.computed.parts[key] = list(pipeline_parts.input_gradients(stage, number))
        self._after_backward()
        return result

    def weights(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        key = self._rehearsed.key("weights", stage, number)
        if number not in self._share:
            self._left_out(key)
            return None
        result = self._made(key, call)
        # torch may have made a gradient that goes to the stage before that of a parameter, to which others are added.
        taken = {one.grad.data_ptr() for one in self._rehearsed.parameters if one.grad is not None}
        sent = self._rehearsed.key("input", stage, number)
        if sent in self.computed.parts:
            self.computed.parts[sent] = [
                one.clone() if one is not None and one.data_ptr() in taken else one for one in self.computed.parts[sent]
            ]
        self._after_backward()
        return result

    def _after_backward(self) -> None:
        if self._keeps_all:
            self._keep()
            for parameter in self._rehearsed.parameters:
                parameter.grad = None

    def scale(self, stage: Any, call: Callable[[], Any]) -> Any:
        return None  # the sums are


class Giving:
    """No part is made: each is given what was computed."""

    def receive(self, number: int, memory: Sequence[Tensor]) -> None:
        return None

    def __init__(self, rehearsed: Rehearsing, everything: Computed) -> None:
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
        return pipeline_parts.give_output(stage, number, output, keeps_output)

    def loss(self, schedule: Any, number: int, call: Callable[[], Any]) -> Any:
        (loss,) = self._parts["loss", 0, number]
        assert loss is not None
        pipeline_parts.give_loss(schedule, loss.to(self._rehearsed.stages[-1].device))

    def backward(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        key = self._rehearsed.key("input", stage, number)
        found = self._take(key, stage)
        given = _no_gradients(self._rehearsed, key, stage) if found is None else tuple(found)
        pipeline_parts.give_input_gradients(stage, number, given)

    def weights(self, stage: Any, number: int, call: Callable[[], Any]) -> Any:
        return None

    def scale(self, stage: Any, call: Callable[[], Any]) -> Any:
        return call()


def _stand_in(rehearsed: Rehearsing, key: Key, stage: Any) -> Any:
    spec, metas = rehearsed.outputs[key]
    return pytree.tree_unflatten([torch.zeros(shape, dtype=dtype, device=stage.device) for shape, dtype in metas], spec)


def _no_gradients(rehearsed: Rehearsing, key: Key, stage: Any) -> tuple[Tensor | None, ...]:
    metas = rehearsed.input_gradients[key]
    return tuple(torch.zeros_like(one, device=stage.device) if one is not None else None for one in metas)


def _same_states(one: Any, other: Any) -> bool:
    return all(numpy.array_equal(a, b) for a, b in zip(one, other, strict=True))
