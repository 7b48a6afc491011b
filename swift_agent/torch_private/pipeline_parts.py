"""The parts of a pipeline schedule's steps: what stands around them, and what a stage keeps of each, which another
process may have computed.

    around_parts(parts): torch's own part --> parts.forward, parts.backward, ... --> call(), or give_output, ...

Imports nothing of `torch.distributed.pipelining`, as `pipelining`. It must never hold a decision.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from swift_agent.torch_private.pipelining import release_memory, reset_schedule, stages_of


class Parts(Protocol):
    """What stands around the parts of a schedule's steps; each part is `call()`. *number*: of the micro-batch."""

    def step(
        self, schedule: Any, num_micro_batches: int, given: Any, losses: Any, call: Callable[[Any], Any]
    ) -> Any:
        """All of a step that is to leave its losses in *losses*, a list or None; `call(losses)` makes it. *given*: what
        the script gives to its micro-batches."""

    def receive(self, number: int, memory: Sequence[torch.Tensor]) -> None:
        """Messages for that micro-batch are about to come into *memory*."""

    def forward(self, stage: Any, number: int, call: Callable[[], Any], keeps_output: bool) -> Any: ...

    def loss(self, schedule: Any, number: int, call: Callable[[], Any]) -> Any: ...

    def backward(self, stage: Any, number: int, call: Callable[[], Any]) -> Any: ...

    def weights(self, stage: Any, number: int, call: Callable[[], Any]) -> Any: ...

    def scale(self, stage: Any, call: Callable[[], Any]) -> Any: ...


@contextlib.contextmanager
def around_parts(parts: Parts) -> Iterator[None]:
    """Inside, steps of all schedules and their parts are made through *parts*."""
    base: Any = sys.modules["torch.distributed.pipelining.stage"]._PipelineStageBase
    schedules: Any = sys.modules["torch.distributed.pipelining.schedules"]
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            original = vars(owner)[name]
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, functools.wraps(original)(make(original)))

        def step(original: Any) -> Any:
            def made(schedule: Any, args: Any = None, kwargs: Any = None, targets: Any = None, losses: Any = None,
                     *rest: Any, **named: Any) -> Any:  # fmt: skip
                def call(losses: Any) -> Any:
                    return original(schedule, args, kwargs, targets, losses, *rest, **named)

                given = args, kwargs, targets, rest, named
                return parts.step(schedule, schedule._n_microbatches, given, losses, call)

            return made

        def receive(original: Any) -> Any:
            def made(stage: Any, number: int) -> Any:
                operations = original(stage, number)
                parts.receive(number, [one.tensor for one in operations])
                return operations

            return made

        def forward(original: Any) -> Any:
            def made(stage: Any, number: int, *args: Any, **named: Any) -> Any:
                keeps = named.get("save_forward_output", args[2] if len(args) > 2 else True)
                return parts.forward(stage, number, lambda: original(stage, number, *args, **named), keeps)

            return made

        def loss(original: Any) -> Any:
            def made(schedule: Any, stage: Any, output: Any, targets: Any, number: int, *rest: Any) -> Any:
                def call() -> Any:
                    return original(schedule, stage, output, targets, number, *rest)

                return parts.loss(schedule, number, call) if stage.is_last and schedule._loss_fn else call()

            return made

        def of_micro_batch(part: Callable[..., Any]) -> Callable[[Any], Any]:
            def make(original: Any) -> Any:
                def made(stage: Any, number: int, *args: Any, **named: Any) -> Any:
                    return part(stage, number, lambda: original(stage, number, *args, **named))

                return made

            return make

        def scale(original: Any) -> Any:
            def made(stage: Any, *args: Any) -> Any:
                return parts.scale(stage, lambda: original(stage, *args))

            return made

        for kind in _kinds_of(schedules._PipelineSchedule):
            if "_step_microbatches" in vars(kind):
                replace(kind, "_step_microbatches", step)
        replace(schedules._PipelineSchedule, "_maybe_compute_loss", loss)
        replace(base, "get_fwd_recv_ops", receive)
        replace(base, "get_bwd_recv_ops", receive)
        replace(base, "forward_one_chunk", forward)
        replace(base, "backward_one_chunk", of_micro_batch(parts.backward))
        replace(base, "backward_weight_one_chunk", of_micro_batch(parts.weights))
        replace(base, "scale_grads", scale)
        yield


def _kinds_of(kind: Any) -> list[Any]:
    return [kind, *(one for child in kind.__subclasses__() for one in _kinds_of(child))]


def loss_of(schedule: Any) -> Any:
    """The script's function that computes it, None if there is none."""
    return schedule._loss_fn


def keeps_known_parts(schedule: Any) -> bool:
    """Whether parts of its steps can be given what another process has computed: torch 2.13 to 2.15 are known."""
    until_2_14 = "bwd_cache", "fwd_cache"
    from_2_15 = "bwd_cache", "_forward_chunk_states", "_make_forward_chunk_state"
    stages = stages_of(schedule)
    return any(all(hasattr(one, name) for one in stages for name in names) for names in (until_2_14, from_2_15))


def contexts_of(schedule: Any) -> dict[str, Any]:
    """What the script has put around the forwards of its stages (new in torch 2.15), by names for people."""
    return {
        f"the forward context of stage {stage.stage_index}": context
        for stage in stages_of(schedule) for context in getattr(stage, "_forward_contexts", {}).values()
    }  # fmt: skip


def give_output(stage: Any, number: int, output: Any, keeps_output: bool) -> Any:
    """In place of a forward: another process has made it."""
    if stage.is_last and keeps_output:
        stage.output_chunks.append(output)
    outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
    if hasattr(stage, "fwd_cache"):
        stage.fwd_cache[number] = outputs, []
    else:
        release_memory(stage.args_recv_info.get(number, ()))  # as a forward takes it
        stage._forward_chunk_states[number] = stage._make_forward_chunk_state(outputs, [])
    return output


def give_loss(schedule: Any, loss: torch.Tensor) -> None:
    """In place of the computation of one."""
    schedule._internal_losses.append(loss)


def last_loss(schedule: Any) -> torch.Tensor:
    """That which was computed last."""
    loss: torch.Tensor = schedule._internal_losses[-1]
    return loss


def give_input_gradients(stage: Any, number: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
    """In place of a backward."""
    if hasattr(stage, "fwd_cache"):
        stage.fwd_cache.pop(number, None)
    else:
        stage._forward_chunk_states.pop(number, None)
        release_memory(stage.grad_recv_info.get(number, ()))  # as a backward takes it
    stage.bwd_cache[number] = gradients


def input_gradients(stage: Any, number: int) -> tuple[torch.Tensor | None, ...]:
    """What a backward has left for the stage before."""
    return tuple(stage.bwd_cache.get(number, ()))


def begin_again(schedule: Any) -> None:
    """Its step, which was made to its end or left in the middle, is made once more."""
    reset_schedule(schedule, first=False)
    for stage in stages_of(schedule):
        stage.clear_runtime_states()
