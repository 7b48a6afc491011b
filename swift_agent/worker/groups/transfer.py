"""Move tensors and small numbers between ranks of the default group, whatever device its backend works on.

For the recovery itself, right after the groups were connected. All but `agree` must not be used with training
collectives in flight: gloo and NCCL match messages by order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from swift_agent.torch_private import groups


class Transfer:
    """A send or receive under way. `wait()` raises RuntimeError if it was cut."""

    def __init__(self, work: Any, then: Callable[[], object] | None = None) -> None:
        self._work, self._then = work, then

    def wait(self) -> None:
        self._work.wait()
        if self._then is not None:
            self._then()


def wire_device(tensor_device: torch.device) -> torch.device:
    """Where a tensor must be to travel: gloo moves host memory, NCCL this process's GPU memory."""
    kinds = groups.backends_by_device(dist.get_backend_config())
    if tensor_device.type == "cuda" and kinds.get("cuda") == "nccl":
        return tensor_device
    if "gloo" in kinds.values():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def isend(tensor: torch.Tensor, dst_rank: int) -> Transfer:
    staged = tensor.to(wire_device(tensor.device))
    # The staging copy must live as long as the operation.
    return Transfer(dist.isend(staged, dst_rank), lambda: staged)


def irecv(tensor: torch.Tensor, src_rank: int) -> Transfer:
    device = wire_device(tensor.device)
    if device == tensor.device:
        return Transfer(dist.irecv(tensor, src_rank))
    staged = torch.empty_like(tensor, device=device)
    return Transfer(dist.irecv(staged, src_rank), lambda: tensor.copy_(staged))


def all_gather_ints(values: Sequence[int]) -> list[list[int]]:
    device = wire_device(torch.device("cpu"))
    mine = torch.tensor(list(values), dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [[int(value) for value in one.tolist()] for one in everyone]


def agree() -> None:
    """Return when all ranks of the default group have called this; as a part of training, in its order."""
    dist.all_reduce(torch.zeros(1, device=wire_device(torch.device("cpu"))))
