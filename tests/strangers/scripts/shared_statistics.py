"""A BatchNorm over the samples of all ranks, as SyncBatchNorm is on GPUs: one gather in the forward, one reduction in
the backward, and running statistics that are alike on all ranks."""

from __future__ import annotations

from typing import Any

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: SharedNorm) -> Tensor:
        mine = torch.cat([x.mean(dim=0), x.pow(2).mean(dim=0)])
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        mean, square = torch.stack(gathered).mean(dim=0).chunk(2)
        deviation = (square - mean.pow(2) + norm.eps).sqrt()
        norm.running_mean.lerp_(mean, 0.1)
        norm.running_std.lerp_(deviation, 0.1)
        y = (x - mean) / deviation
        ctx.save_for_backward(y, deviation)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        y, deviation = ctx.saved_tensors
        sums = torch.cat([gradient.mean(dim=0), (gradient * y).mean(dim=0)])
        dist.all_reduce(sums)
        of_all, along = (sums / dist.get_world_size()).chunk(2)
        return (gradient - of_all - y * along) / deviation, None


class SharedNorm(nn.Module):
    running_mean: Tensor
    running_std: Tensor
    eps = 1e-5

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_std", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return _Normalize.apply(x, self)
        return (x - self.running_mean) / self.running_std


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 16), SharedNorm(16), nn.ReLU(), nn.Linear(16, 16), SharedNorm(16), nn.Linear(16, 1)
    )
    model = DDP(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)

    @job.iteration
    def train() -> None:
        x = torch.randn(6, 8) + job.rank
        loss = F.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        hooks.moment("inside", job.iteration_number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hooks.moment("after", job.iteration_number)

    for number in job.iterations(12):
        hooks.moment("before", number)
        train()
    hooks.finish(job, net, optimizer)


if __name__ == "__main__":
    main()
