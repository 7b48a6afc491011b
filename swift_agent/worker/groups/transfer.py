"""Numbers, and an agreement, between ranks of the default group, whatever device its backend works on.

For the recovery itself, right after the groups were connected. All but `agree` must never be used with training
collectives in flight: gloo and NCCL match messages by order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from swift_agent.torch_private import groups


def _wire_device() -> torch.device:
    """Where a small tensor must be to travel: gloo moves host memory, NCCL this process's GPU memory."""
    if "gloo" in groups.backends_by_device(dist.get_backend_config()).values():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def all_gather_ints(values: Sequence[int]) -> list[list[int]]:
    device = _wire_device()
    mine = torch.tensor(list(values), dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [[int(value) for value in one.tolist()] for one in everyone]


def agree() -> None:
    """Return when all ranks of the default group have called this; as a part of training, in its order."""
    dist.all_reduce(torch.zeros(1, device=_wire_device()))
