"""Private parts of FSDP: whether a module is one of its own, and what a backward that was cut has left in it.

It must never import FSDP, which takes 0.6 s, in agents too: where the script has not imported it there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def is_fsdp(module: torch.nn.Module) -> TypeGuard[FSDPModule]:
    """Whether `fully_shard` was applied to *module*. FSDP is not imported for it: that takes 0.6 s, in agents too."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_fsdp1(module: torch.nn.Module) -> bool:
    """Whether *module* is a `FullyShardedDataParallel`, which is not imported for it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def reset_fsdp(root: FSDPModule) -> None:
    """Make FSDP forget a forward or backward that was cut; nothing before the first forward, where torch cannot.
    Gradients that are reduced stay: an update may come of them."""
    if root._get_fsdp_state()._is_root is None:
        return
    parameters = [parameter for group in _fsdp_groups(root) for parameter in group.fsdp_params]
    reduced = [parameter.sharded_param.grad for parameter in parameters]
    root.reset_iter_state()
    for parameter, gradient in zip(parameters, reduced, strict=True):
        parameter.sharded_param.grad = gradient  # torch drops it from 2.15 on
        # torch leaves what a layer has accumulated before its reduction, and would add to it. From 2.15 on that is the
        # gradient of the unsharded parameter itself.
        if "unsharded_accumulated_grad" in vars(parameter):
            parameter.unsharded_accumulated_grad = None
        if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
            unsharded.grad = None


def has_unreduced_gradients(root: FSDPModule) -> bool:
    """Whether a backward below that outermost module has left gradients that are not in its parameters yet
    (`set_requires_gradient_sync(False)`, `set_requires_all_reduce(False)`)."""
    for group in _fsdp_groups(root):
        if getattr(group, "_partial_reduce_output", None) is not None:
            return True
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            if parameter.unsharded_accumulated_grad is not None or getattr(unsharded, "grad", None) is not None:
                return True
    return False


def _fsdp_groups(root: FSDPModule) -> Iterator[Any]:
    assert isinstance(root, torch.nn.Module)
    for module in root.modules():
        if is_fsdp(module):
            state = module._get_fsdp_state()
            one = getattr(state, "_fsdp_param_group", None)  # before torch 2.12
            yield from getattr(state, "_fsdp_param_groups", [one] if one else [])
