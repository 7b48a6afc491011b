"""What `job.track()` refuses by its kind, with what to use instead; and what it takes out of a library's wrapper.

Ranks that only average now and then, or keep an error of their own, hold different states: to take one for the replica
of another would end in a wrong model. This module must never change what it looks at, or import what a script has not.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from swift_agent.torch_private import ddp as torch_ddp
from swift_agent.torch_private import fsdp as torch_fsdp
from swift_agent.worker.tracked.refusals.hook_state import kept_by_hook

_HSDP = "use torch.distributed.fsdp.fully_shard on a mesh of two dimensions (replicate, shard)"
_EACH_TIME = "reduce gradients in each iteration (plain DistributedDataParallel does)"
_OR_ALONE = "or say that nobody holds what this rank does: track(replicas=[job.rank])"


def unwrapped_optimizer(value: Any) -> Any:
    """The optimizer in a library's wrapper, which has it as its `optimizer` and updates the same parameters."""
    seen = [value]
    while isinstance(inner := getattr(seen[-1], "optimizer", None), Optimizer) and inner not in seen:
        if hasattr(seen[-1], "param_groups") and not _parameters(seen[-1]) <= _parameters(inner):
            break  # copies of its own
        seen.append(inner)
    return seen[-1]


def scaler_of(value: Any) -> Any:
    """The gradient scaler that a wrapper of an optimizer makes its steps with; None if there is none."""
    scaler = getattr(value, "scaler", None)
    return scaler if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None


def _parameters(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def no_module(name: str, value: Any) -> str:
    parts = ("module", "_forward_module", "model")
    inner = [part for part in parts if isinstance(getattr(value, part, None), nn.Module)]
    remedy = f": track its .{inner[0]}" if inner else ""
    return f"{name} is a {type(value).__name__}, not a torch.nn.Module{remedy}"


def mistakes_of_optimizer(name: str, optimizer: Any) -> list[str]:
    kind = type(optimizer)
    if any(base.__name__ == "PostLocalSGDOptimizer" for base in kind.__mro__):
        return [f"{name} is a PostLocalSGDOptimizer, with which ranks hold different parameters: {_EACH_TIME}"]
    if not isinstance(optimizer, Optimizer):
        return [f"{name} is a {kind.__name__}, not a torch.optim.Optimizer; track the one that it wraps"]
    if not hasattr(optimizer, "_optimizer_step_pre_hooks") or not getattr(kind.step, "hooked", False):
        # Optimizer.__init__ makes them, and has step() call them.
        inner = [part for part, value in vars(optimizer).items() if isinstance(value, Optimizer)]
        remedy = f"track its .{inner[0]}" if inner else "track the optimizer that it wraps"
        return [f"{name} is a {kind.__name__} whose steps have no hooks: {remedy}"]
    return []


def mistakes_of_models(
    models: Mapping[str, nn.Module], optimizers: Iterable[Any], others: Iterable[Any], *, alone: bool
) -> list[str]:
    """*alone*: the script says that no other rank holds the same."""
    mistakes = []
    for name, model in models.items():
        if any(map(torch_fsdp.is_fsdp1, model.modules())):
            mistakes.append(
                f"{name} is a FullyShardedDataParallel (FSDP1), of whose shards it is not known who holds them: {_HSDP}"
            )
    ddps = {id(m): m for model in models.values() for m in model.modules() if isinstance(m, DistributedDataParallel)}
    tracked = {*map(id, others), *ddps}  # ours has the module
    parts = [part for one in models.values() for part in (*one.modules(), *one.parameters(), *one.buffers())]
    in_hooks = {*tracked, *map(id, parts), *map(id, optimizers)}
    for module in ddps.values():
        for hook, state in torch_ddp.comm_hooks(module):
            if alone:
                continue
            is_none = isinstance(state, dist.ProcessGroup | None) or id(state) in tracked
            kind = kept_by_hook(hook, in_hooks) if is_none else type(state).__name__
            if kind == "PostLocalSGDState":
                how = f"{_EACH_TIME}, {_OR_ALONE}"
                mistakes.append(f"post_localSGD_hook, with which ranks hold different parameters: {how}")
            elif kind:
                mistakes.append(
                    f"the communication hook {getattr(hook, '__name__', hook)} of DistributedDataParallel has a state "
                    f"on each rank (a {kind}), which a replacement would lack: use one without, as fp16_compress_hook"
                )
    return mistakes if alone else mistakes + _averagers()


def _averagers() -> list[str]:
    """One that is used beside the model is seen nowhere else."""
    module = sys.modules.get("torch.distributed.algorithms.model_averaging.averagers")
    if module is None:
        return []
    # By type: to ask for the class of anything else may run code of its own, or fail (a dead proxy).
    kinds = sorted(kind.__name__ for kind in set(map(type, gc.get_objects())) if issubclass(kind, module.ModelAverager))
    how = f"{_EACH_TIME}, {_OR_ALONE}"
    return [f"with a {kind} ranks hold different parameters between two averagings: {how}" for kind in kinds]
