"""Gradients that an iteration leaves to the next one without an update: a step that is left out now and then, or an
accumulation over several calls.

An iteration that begins by clearing them never needs them, but nobody can know that before it does. So they are a part
of the state until the next update: `TrainingState.carried` has their checksum, snapshots have their values, and
replicas must have the same ones. This module must never change a gradient, nor communicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swift_agent.errors import UsageError
from swift_agent.torch_private import fsdp as torch_fsdp
from swift_recovery.state.checksum import checksum
from swift_recovery.state.deviation import ENDED, REMEDY
from swift_recovery.state.sharded import local_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def digest(
    parameters: Iterable[Tensor], sharded: Iterable[FSDPModule] = (), *, why_not: str = "", may_refuse: bool = True
) -> int:
    """A checksum of the gradients of *parameters*, never 0; 0 if all of them are zero. *sharded*: modules whose
    gradients may not have got there yet (FSDP2). *why_not*: they cannot be a part of the state.

    Raises `UsageError` for those that no replica has, or can be given; without *may_refuse* they are left out."""
    unreduced = any(map(torch_fsdp.has_unreduced_gradients, sharded))
    found = [local_of(p.grad.detach()) for p in parameters if p.grad is not None]
    if not unreduced and not any(bool(gradient.any()) for gradient in found):
        return 0
    if unreduced:
        why_not = "before they were reduced"
    elif any(gradient.layout != torch.strided for gradient in found):
        why_not = "some of them are sparse"
    if why_not and may_refuse:
        raise UsageError(f"{ENDED} ({why_not}): {REMEDY}.")
    return 0 if why_not else checksum(found) or 1


class Touched:
    """Whether a script has done something to the gradients of *parameters* since this was made."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._before = [(p.grad, -1 if p.grad is None else local_of(p.grad)._version) for p in parameters]

    def by(self, parameters: Sequence[Tensor]) -> list[bool]:
        """Of each."""
        return [
            p.grad is not grad or (grad is not None and local_of(grad)._version != version)
            for p, (grad, version) in zip(parameters, self._before, strict=True)
        ]


def why_not(num_batches: int) -> str:
    """The call that has returned has left its update, with gradients of this rank only."""
    return (
        "accelerator.accumulate() around one batch leaves gradients that only this rank has, and a replacement would "
        f"not have them. Give the iteration all batches of an update: `for group in job.batches(loader, group="
        f"{num_batches})`, and in it `for batch in group:` above `with accelerator.accumulate(model):`"
    )
