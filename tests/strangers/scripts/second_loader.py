"""Learns from samples without labels as well, which come from a shuffled loader that the script goes through by itself.

second_loader.py [validate]: the iteration draws from it; or the body of the loop does, and a rank is lost in a
validation, where no iteration is cut.
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


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    x, y = torch.randn(96, 8), torch.randint(4, (96,))
    labelled = TensorDataset(x, y)
    sampler = DistributedSampler(labelled, job.world_size, job.rank)
    loader = DataLoader(labelled, batch_size=4, sampler=sampler)
    unlabelled = iter(DataLoader(TensorDataset(torch.randn(200, 8)), batch_size=4, shuffle=True))
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)
    validates = "validate" in sys.argv

    @job.resilient
    def validate() -> float:
        dist.barrier()  # nobody is still in the iteration before
        with torch.no_grad():
            loss = F.cross_entropy(model.module(x), y)
        hooks.moment("inside", job.iteration_number)
        dist.all_reduce(loss)
        return loss.item()

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor, others: torch.Tensor | None = None) -> None:
        if others is None:
            (others,) = next(unlabelled)
        given, guessed = model(torch.cat([x, others])).split([len(x), len(others)])
        if not validates:
            hooks.moment("inside", job.iteration_number)
        optimizer.zero_grad()
        (F.cross_entropy(given, y) - 0.1 * guessed.softmax(1).amax(1).mean()).backward()
        optimizer.step()

    for x_batch, y_batch in job.batches(loader):
        if validates:
            validate()
            train(x_batch, y_batch, *next(unlabelled))
        else:
            train(x_batch, y_batch)
    hooks.finish(job, model, optimizer)


if __name__ == "__main__":
    main()
