"""BatchNorm whose statistics are each rank's own: gradients averaged by hand ("hand"), or DDP without a broadcast of
buffers ("ddp"). They differ from rank to rank at all times, and are nobody's concern."""

from __future__ import annotations

import sys

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    by_hand = "hand" in sys.argv
    model = net if by_hand else DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)

    @job.iteration
    def train() -> None:
        x = torch.randn(6, 8) + job.rank
        loss = F.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        hooks.moment("inside", job.iteration_number)
        optimizer.zero_grad()
        loss.backward()
        if by_hand:
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= job.world_size
        optimizer.step()
        hooks.moment("after", job.iteration_number)

    for number in job.iterations(24):
        hooks.moment("before", number)
        train()
    hooks.finish(job, list(net.parameters()), optimizer)


if __name__ == "__main__":
    main()
