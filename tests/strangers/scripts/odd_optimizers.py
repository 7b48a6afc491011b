"""Optimizers that are not torch's own: with lists in their state (SOAP), with estimates in their groups (Prodigy), with
a count of their own, or which move what has no gradient (Muon). Some make their step before the backward of the others,
and the loss is summed up for a log after the update.
"""

from __future__ import annotations

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift
from tests.support.odd_optimizers import Counted, Estimating, Listed, Momentum


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    models = [DDP(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 4))) for _ in range(4)]
    kinds = (Listed, Momentum, Estimating, Counted)
    optimizers = [kind(model.parameters()) for kind, model in zip(kinds, models, strict=True)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[2], 0.9)
    job.track(model=models, optimizer=optimizers, scheduler=scheduler)

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor) -> float:
        number = job.iteration_number
        total = torch.zeros(())
        for begin in (0, 2):
            losses = [F.mse_loss(model(x), y) for model in models[begin : begin + 2]]
            if begin:
                hooks.moment("inside", number)
            for loss, optimizer in zip(losses, optimizers[begin : begin + 2], strict=True):
                optimizer.zero_grad()
                loss.backward()
                total += loss.detach()
            for optimizer in optimizers[begin : begin + 2]:
                optimizer.step()
        scheduler.step()
        hooks.moment("after", number)
        dist.all_reduce(total)
        return total.item()

    for number in job.iterations(12):
        hooks.moment("before", number)
        train(torch.randn(8, 8), torch.randn(8, 4))
    hooks.finish(job, *models, *optimizers, scheduler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
