"""What is private in `torch.distributed.pipelining`, one small function each.

Imports nothing of it: a script without pipelines does not pay for them. It must never hold a decision.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from swift_agent.errors import SwiftError


def pipeline_stage(candidate: Any) -> torch.nn.Module | None:
    """The module of a stage of `torch.distributed.pipelining`, None for anything else. Imports nothing for it."""
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is None or not isinstance(candidate, stages._PipelineStageBase):
        return None
    module: torch.nn.Module = candidate.submod
    return module


def has_schedules() -> bool:
    """Whether there may be pipeline schedules in this process. Imports nothing for it."""
    return "torch.distributed.pipelining.schedules" in sys.modules


def first_steps_are_collective() -> bool:
    """Whether all stages vote and connect together when a schedule makes its first step, as from torch 2.15 on."""
    return "torch.distributed.pipelining._p2p" in sys.modules


def watch_schedules(stepped: Callable[[Any, bool], AbstractContextManager[None]]) -> None:
    """Each step of a pipeline schedule begins inside `stepped(schedule, first)`. *first*: stages tell each other the
    shapes of what they will send."""
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    if schedules is not None:
        _watch_schedule(schedules.PipelineScheduleSingle, "_initialize_stage", stepped)
        _watch_schedule(schedules.PipelineScheduleMulti, "_initialize_stages", stepped)


def _watch_schedule(kind: Any, name: str, stepped: Callable[[Any, bool], AbstractContextManager[None]]) -> None:
    original = getattr(kind, name)

    def initialize(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        flags = _schedule_flags(schedule)
        forward = all(done for flag, done in flags.items() if "forward" in flag)
        backward = all(done for flag, done in flags.items() if "backward" in flag)
        with stepped(schedule, not forward or backward != schedule._has_backward):
            return original(schedule, *args, **kwargs)

    setattr(kind, name, initialize)


@contextlib.contextmanager
def without_last_backward() -> Iterator[None]:
    """Inside, stages in DDP do not reduce their gradients after the last micro-batch, which they do with or without
    `no_sync`."""
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is None:
        yield
        return
    original = stages._PipelineStageBase.backward_maybe_with_nosync

    def backward(stage: Any, kind: str, arguments: dict[str, Any], last_backward: bool = False) -> Any:
        last_backward = last_backward and not isinstance(stage.submod, DistributedDataParallel)
        return original(stage, kind, arguments, last_backward=last_backward)

    stages._PipelineStageBase.backward_maybe_with_nosync = backward
    try:
        yield
    finally:
        stages._PipelineStageBase.backward_maybe_with_nosync = original


def change_mode_of_schedule(schedule: Any) -> None:
    """Its step is to be one in which stages tell each other their shapes, as when it changes its mode."""
    for name in _schedule_flags(schedule):
        if "backward" in name:
            setattr(schedule, name, not schedule._has_backward)


def mode_of_schedule(schedule: Any) -> Literal["training", "evaluation"]:
    """Of the step that it is in: stages tell each other their shapes again when it changes."""
    return "training" if schedule._has_backward else "evaluation"


def check_stage_messages(received: Sequence[torch.Tensor]) -> None:
    """Raise SwiftError unless these are what stages tell each other in a first step: sizes, and pickles of torch's own
    descriptions of tensors, which torch will unpickle."""
    for tensor in received:
        if tensor.dtype == torch.uint8:
            _StageMessage(io.BytesIO(tensor.cpu().numpy().tobytes())).load()


# Where what describes tensors is defined.
_DESCRIBING = {"torch", "torch.distributed.pipelining._utils", "torch.distributed.tensor.placement_types"}


class _StageMessage(pickle.Unpickler):
    """Makes only what describes a tensor."""

    def find_class(self, module: str, name: str) -> Any:
        # A name with dots is a way through a module to what that has imported.
        known = module in _DESCRIBING and "." not in name
        found = super().find_class(module, name) if known else None
        if isinstance(found, torch.dtype) or found in (torch.Size, torch.device):
            return found
        if module != "torch" and isinstance(found, type) and found.__module__ == module:
            return found
        raise SwiftError(f"what was kept of a pipeline's first step names {module}.{name}: it is not what torch sends")


def name_of_schedule(schedule: Any) -> str:
    """The same in another process of the same script, and of schedules that differ another one."""
    kind = "training" if schedule._loss_fn is not None else "forward"
    return f"{type(schedule).__name__}, {kind}, {schedule._n_microbatches} micro-batches"


def _schedule_flags(schedule: Any) -> dict[str, bool]:
    names = ("_stage_forward_initialized", "_stage_backward_initialized", "_stages_forward_initialized",
             "_stages_backward_initialized")  # fmt: skip
    return {name: bool(getattr(schedule, name)) for name in names if hasattr(schedule, name)}


def reset_schedule(schedule: Any, *, first: bool) -> None:
    """Make a schedule forget a step that was cut. *first*: its next step is a first one again."""
    schedule._internal_losses.clear()
    for name in ("fwd_recv_ops", "bwd_recv_ops"):
        getattr(schedule, name, {}).clear()
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        for name in ("dw_runner", "backward_state", "bwd_cache"):
            getattr(stage, name, {}).clear()
    if first:
        for name in _schedule_flags(schedule):
            setattr(schedule, name, False)
