"""Ranks with another number of batches, which `DDP.join()` makes up for.

uneven_inputs.py
"""

from __future__ import annotations

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift

NUM_BATCHES = 12


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.track(model=model, optimizer=optimizer)

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.mse_loss(model(x), y)
        hooks.moment("inside", job.iteration_number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hooks.moment("after", job.iteration_number)

    batches = torch.randn(NUM_BATCHES, 6, 9, generator=torch.Generator().manual_seed(job.rank))
    with model.join():
        for number in job.iterations(NUM_BATCHES - job.rank):
            hooks.moment("before", number)
            train(batches[number, :, :8], batches[number, :, 8:])
    hooks.finish(job, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
