"""The head first, then all: one loop over epochs after the other, with a validation before each, another learning rate
and a head made anew for the second, and iterations without a loader in the end."""

from __future__ import annotations

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import swift_agent as swift


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job.track(model=model, optimizer=optimizer)

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.mse_loss(model(x), y)
        hooks.moment("inside", job.iteration_number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hooks.moment("after", job.iteration_number)

    @job.resilient
    def validate() -> float:
        hooks.moment("before", job.iteration_number)
        with torch.no_grad():
            loss = F.mse_loss(model.module(data.tensors[0]), data.tensors[1])
        dist.all_reduce(loss)
        return loss.item()

    def loop(epochs: int) -> None:
        validate()
        for _ in job.epochs(epochs):
            for x, y in job.batches(loader):
                hooks.moment("before", job.iteration_number)
                train(x, y)

    loop(2)
    # Also in a replacement, which has it all from the others already.
    optimizer.param_groups[0]["lr"] *= 0.1
    optimizer.state.clear()
    nn.init.constant_(model.module[2].weight, 0.1)
    loop(3)
    for number in job.iterations(14):
        hooks.moment("before", number)
        train(torch.randn(4, 8), torch.randn(4, 1))
        validate()
    validate()
    hooks.finish(job, list(model.parameters()), optimizer)


if __name__ == "__main__":
    main()
