"""What there is of optimizers around their steps: what a step overwrites, and whether gradients have moved.

This module must never decide what is kept, or put back.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_agent.errors import PeerFailure
from swift_agent.worker.line.fence import Fence
from swift_recovery.state.training_state import state_of_none
from swift_recovery.undo.patch import copy_of, keep_tree, put_back

_POLL_S = 20e-6


class Kept:
    """Parameters and state of one optimizer before its step, *on_host*: in the memory of the host."""

    def __init__(self, optimizer: Optimizer, *, every: bool = False, on_host: bool = False) -> None:
        """Of parameters with a gradient, or of *every* one."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if every or p.grad is not None]
        self._copies = [(parameter, copy_of(optimizer, parameter, on_host=on_host)) for parameter in parameters]
        others = state_of_none(optimizer)
        self._others = {key: keep_tree(value, on_host=on_host) for key, value in others.items()}

    def put_back(self, optimizer: Optimizer) -> None:
        for parameter, copy in self._copies:
            put_back(optimizer, parameter, copy)
        for key in state_of_none(optimizer):
            del optimizer.state[key]
        for key, put in self._others.items():
            optimizer.state[key] = put()


class Gradients:
    """Of *optimizers*, by their names: whether they have moved since they were noted."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._seen: dict[str, list[_Seen]] = {}

    def note(self, names: Iterable[str]) -> None:
        """What those of these optimizers look like now; others are forgotten."""
        self._seen = {name: [_Seen(grad) for grad in self._of(name)] for name in names}

    def have_moved(self, name: str) -> bool:
        seen, now = self._seen.get(name, []), self._of(name)
        return len(seen) != len(now) or not all(one.is_still(grad) for one, grad in zip(seen, now, strict=True))

    def _of(self, name: str) -> list[Tensor | None]:
        return [p.grad for group in self._optimizers[name].param_groups for p in group["params"]]


class _Seen:
    """What a gradient was. Known again by a weak reference: where one is freed the next one often has its address."""

    def __init__(self, grad: Tensor | None) -> None:
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = 0 if grad is None else grad._version

    def is_still(self, grad: Tensor | None) -> bool:
        """Whether it is *grad*, unchanged."""
        if self._grad is None or grad is None:
            return self._grad is None and grad is None
        return self._grad() is grad and grad._version == self._version


def told_of_left_out(stepped: Iterable[str], left_out: Iterable[str], *, is_kept: bool) -> str:
    """Some optimizers have made their step in an iteration, others have not. *is_kept*: what those overwrite is, from
    the next such iteration on."""
    names, others = [", ".join(f"'{name}'" for name in some) for some in (stepped, left_out)]
    then = "a failure that cuts such an iteration after a step may restart all workers"
    if is_kept:
        then = (
            "while iterations end so, what such a step overwrites is copied before it, for a failure after it; one in "
            "the first of them, after others, may restart all workers"
        )
    return (
        f"an iteration has ended with a step of {names}, without one of {others}: {then}. One optimizer with the "
        "parameters of all makes one step, which skips those without a gradient"
    )


def cuda_device(optimizer: Optimizer) -> torch.device | None:
    devices = (parameter.device for group in optimizer.param_groups for parameter in group["params"])
    return next((device for device in devices if device.type == "cuda"), None)


def wait_until_reduced(device: torch.device, fence: Fence) -> None:
    """CUDA: an aborted NCCL collective just ends, with garbage in its output. So a step is launched only when every
    reduction before it is known to be complete; the host waits for the device here, and gives up if stopped."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    while not event.query():  # type: ignore[no-untyped-call]
        if fence.interrupted:
            raise PeerFailure("stopped while gradients were being reduced")
        time.sleep(_POLL_S)
