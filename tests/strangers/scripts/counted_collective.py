"""A mean of losses over ranks every few batches, by a counter of the loop, as many scripts log it.

With "own" the counter starts over in a replacement; with "position" it is right there.
"""

from __future__ import annotations

import sys

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import swift_agent as swift
from swift_agent.worker.checks import lookout

lookout.PERIOD_S = 1.0  # a rank that waits is looked at twice before it is told

LOG_EVERY = 5


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(240, 8), torch.randn(240, 1))
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data))
    job.track(model=model, optimizer=optimizer, loader=loader)

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        hooks.moment("inside", job.iteration_number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hooks.moment("after", job.iteration_number)
        return loss.detach()

    start = job.position.batch if "position" in sys.argv else 0
    for step, (x, y) in enumerate(job.batches(loader), start=start):
        hooks.moment("before", job.iteration_number)
        loss = train(x, y)
        if step % LOG_EVERY == LOG_EVERY - 1:
            dist.all_reduce(loss)
            print(f"step {step}: {loss.item() / job.world_size:.4f}")
    hooks.finish(job, model, optimizer)


if __name__ == "__main__":
    main()
