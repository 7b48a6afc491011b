"""Local SGD: ranks train apart, and average their models now and then. Between two averages nobody has a replica."""

from __future__ import annotations

import hooks
import torch
import torch.distributed as dist
from torch import nn

import swift_agent as swift


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)

    @job.iteration
    def train() -> None:
        loss = model(torch.randn(6, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if job.iteration_number % 4 == 3:
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter)
                    parameter /= job.world_size

    for number in job.iterations(4000):
        hooks.moment("before", number)
        train()
    hooks.finish(job, model, optimizer)


if __name__ == "__main__":
    main()
