"""A validation on averaged weights, which it puts into the model and takes out again: in the optimizer's `eval()`, as
schedule-free ones do, or by way of `.data`, as averages that are kept beside the model do ("data")."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift


class Averaging(torch.optim.SGD):
    """In training the weights are some way off the average, towards what SGD has come to."""

    @torch.no_grad()
    def _move(self, share: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", parameter.clone())
                parameter.lerp_(average, share)

    def eval(self) -> None:
        self._move(0.9)

    def train(self) -> None:
        self._move(-9.0)


class ByData(Averaging):
    """Puts the average in, and the weights back that it has kept."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self._kept: list[torch.Tensor] = []

    def eval(self) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._kept = [parameter.data.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.data.copy_(self.state[parameter]["average"])

    def train(self) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, kept in zip(parameters, self._kept, strict=True):
            parameter.data.copy_(kept)


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = (ByData if "data" in sys.argv else Averaging)(model.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                optimizer.state[parameter].setdefault("average", parameter.clone()).lerp_(parameter, 0.1)

    @job.resilient
    def validate(x: torch.Tensor, y: torch.Tensor) -> float:
        number = job.iteration_number
        optimizer.eval()
        hooks.moment("before", number)
        with torch.no_grad():
            loss = F.cross_entropy(model.module(x), y)
        dist.all_reduce(loss)
        hooks.moment("inside", number)
        optimizer.train()
        dist.barrier()
        hooks.moment("after", number)
        return loss.item()

    losses = []
    for number in job.iterations(12):
        train(torch.randn(8, 16), torch.randint(4, (8,)))
        if number % 3 == 2:
            losses.append(validate(torch.randn(8, 16), torch.randint(4, (8,))))
    hooks.finish(job, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
