"""A learning rate from a counter of the loop over batches, as many scripts have it. A replacement counts from 0."""

from __future__ import annotations

import hooks
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import swift_agent as swift


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
    def train(x: torch.Tensor, y: torch.Tensor, rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = F.mse_loss(model(x), y)
        hooks.moment("inside", job.iteration_number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hooks.moment("after", job.iteration_number)

    for step, (x, y) in enumerate(job.batches(loader)):
        hooks.moment("before", job.iteration_number)
        train(x, y, 0.1 / (1 + step))
    hooks.finish(job, model, optimizer)


if __name__ == "__main__":
    main()
