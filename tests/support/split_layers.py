"""What layers need that are split over the ranks of a group by hand, as in tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Sum(torch.autograd.Function):
    """The outputs of the parts of a layer are summed; each part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None
