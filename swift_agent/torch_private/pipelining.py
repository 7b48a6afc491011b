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
import torch.distributed as dist
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


def connects_by_edges(schedule: Any) -> bool:
    """Whether the first step of this schedule makes process groups, one for each direction between two ranks: new in
    torch 2.15, where `torch.distributed.config.pipeline_per_edge_p2p` asks for it."""
    return any(getattr(stage, "p2p_per_edge", False) for stage in stages_of(schedule))


@contextlib.contextmanager
def agreeing_by_messages() -> Iterator[None]:
    """Inside, a first step sends nothing but messages from stage to stage. Until torch 2.14 that is so by itself. From
    2.15 on stages agree by an all-reduce of their group, and meet in more of those to connect: a replacement would make
    them alone, and a rank that has taken part in one cannot stay in its iteration."""
    schedules: Any = sys.modules["torch.distributed.pipelining.schedules"]
    base, name = schedules._PipelineSchedule, "_initialize_pipeline_distributed_state"
    original = getattr(base, name, None)
    if original is None:
        yield
        return

    def initialize(schedule: Any, stages: Sequence[Any], has_backward: bool, initialize_p2p: bool) -> None:
        # Connections need no messages of their own: the first ones that come make them, as in torch 2.14.
        schedules.dist = Agreeing(stages)
        try:
            original(schedule, stages, has_backward, False)
        finally:
            schedules.dist = dist

    setattr(base, name, initialize)
    try:
        yield
    finally:
        setattr(base, name, original)


class Agreeing:
    """`torch.distributed` in the eyes of a schedule whose *stages* agree with those of other ranks."""

    def __init__(self, stages: Sequence[Any]) -> None:
        self._stages = stages

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, vote: torch.Tensor, op: Any, group: Any) -> None:
        """*vote* becomes the least one of all ranks: it goes down the pipeline, and the result comes back."""
        assert op == dist.ReduceOp.MIN
        for stage in self._stages:
            self._recv(vote, stage, stage.stage_index - 1, group)
            self._send(vote, stage, stage.stage_index + 1, group)
        for stage in reversed(self._stages):
            self._recv(vote, stage, stage.stage_index + 1, group)
            self._send(vote, stage, stage.stage_index - 1, group)

    @staticmethod
    def _send(vote: torch.Tensor, stage: Any, to: int, group: Any) -> None:
        rank = stage.stage_index_to_group_rank.get(to, stage.group_rank)
        if rank != stage.group_rank:
            dist.send(vote, group=group, group_dst=rank)

    @staticmethod
    def _recv(vote: torch.Tensor, stage: Any, source: int, group: Any) -> None:
        rank = stage.stage_index_to_group_rank.get(source, stage.group_rank)
        if rank != stage.group_rank:
            theirs = torch.empty_like(vote)  # what was received is kept: see `Pipelines`
            dist.recv(theirs, group=group, group_src=rank)
            torch.minimum(vote, theirs, out=vote)


_telling_shapes = 0


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
        global _telling_shapes
        with stepped(schedule, is_first_step(schedule)):
            _telling_shapes += 1
            try:
                return original(schedule, *args, **kwargs)
            finally:
                _telling_shapes -= 1

    setattr(kind, name, initialize)


def tells_shapes() -> bool:
    """A module that runs now does so for a schedule that tells its stages the shapes of what they will send: with
    tensors that mean nothing."""
    return _telling_shapes > 0


def is_first_step(schedule: Any) -> bool:
    """Whether in the step that it is in, or will be, stages tell each other the shapes of what they will send."""
    flags = _schedule_flags(schedule)
    forward = all(done for flag, done in flags.items() if "forward" in flag)
    backward = all(done for flag, done in flags.items() if "backward" in flag)
    return not forward or backward != bool(schedule._has_backward)


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
    return f"{type(schedule).__name__}, {kind}, {micro_batches_of(schedule)} micro-batches"


def micro_batches_of(schedule: Any) -> int:
    """Of one step of it."""
    return int(schedule._n_microbatches)


def _schedule_flags(schedule: Any) -> dict[str, bool]:
    names = ("_stage_forward_initialized", "_stage_backward_initialized", "_stages_forward_initialized",
             "_stages_backward_initialized")  # fmt: skip
    return {name: bool(getattr(schedule, name)) for name in names if hasattr(schedule, name)}


def stages_of(schedule: Any) -> Sequence[Any]:
    """Those that this process has."""
    stages: Sequence[Any] = getattr(schedule, "_stages", None) or [schedule._stage]
    return stages


def reset_schedule(schedule: Any, *, first: bool) -> None:
    """Make a schedule forget a step that was cut. *first*: its next step is a first one again."""
    schedule._internal_losses.clear()
    for name in ("fwd_recv_ops", "bwd_recv_ops"):
        getattr(schedule, name, {}).clear()
    for stage in stages_of(schedule):
        for name in ("dw_runner", "backward_state", "bwd_cache"):
            getattr(stage, name, {}).clear()
        if hasattr(stage, "_forward_chunk_states"):
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                release_memory(infos)
            stage._gradient_reduction_handle = None  # else the next step waits for what was cut
    if first:
        for name in _schedule_flags(schedule):
            setattr(schedule, name, False)


def release_memory(infos: Sequence[Any]) -> None:
    """From torch 2.15 on memory to receive into is made for each message, and given away when it is used; a step finds
    an error where some is left. (Until 2.14 it belongs to the stage.)"""
    for info in infos:
        if getattr(info, "buffer", None) is not None:
            info.buffer = None
