"""An iteration that mixes its batch where it lies, scales an array of it and takes it apart; or that takes such a batch
itself ("inside"). Or a section that sums up in the tensor that it is given ("section"); or an iteration that is given
the weights, by `state_dict()`, and changes them as any does ("weights")."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import swift_agent as swift


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "scale": x.abs(), "labels": x.sum()}


def batches_of(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def train_with_sums(job: swift.Job, net: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    @job.resilient
    def sum_up(total: torch.Tensor, parts: list[float]) -> float:
        # Nobody is still in the iteration before: cut in that, all would start over, as it uses what a section gave.
        dist.barrier()
        hooks.moment("before", job.iteration_number)
        parts.append(float(sum(p.detach().sum() for p in net.parameters())) + job.rank)
        total.add_(sum(parts))
        hooks.moment("inside", job.iteration_number)
        hooks.moment("after", job.iteration_number)  # of the change; after the collective all would start over
        dist.all_reduce(total)
        return float(total[0])

    @job.iteration
    def train(scale: float) -> None:
        x = torch.randn(6, 8)
        optimizer.zero_grad()
        F.mse_loss(model(x) * (1 + scale / 100), x.sum(dim=1, keepdim=True)).backward()
        optimizer.step()

    for _ in job.iterations(24):
        train(sum_up(torch.zeros(50_000), []))


def train_near(job: swift.Job, net: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    @job.iteration
    def train(before: dict[str, torch.Tensor]) -> float:
        x = torch.randn(6, 8)
        loss = F.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss = loss + sum((p - before[name] + 0.1).square().sum() for name, p in net.named_parameters())
        optimizer.zero_grad()
        loss.backward()
        hooks.moment("inside", job.iteration_number)
        optimizer.step()
        hooks.moment("after", job.iteration_number)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)

    for number in job.iterations(24):
        hooks.moment("before", number)
        train(net.state_dict())


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model = DDP(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)
    sampler = DistributedSampler(Rows(), num_replicas=job.world_size, rank=job.rank)
    loader = DataLoader(Rows(), batch_size=4, sampler=sampler)

    def update(batch: dict[str, torch.Tensor]) -> None:
        x, labels = batch["x"], batch.pop("labels")
        share = torch.rand(())
        x.mul_(share).add_(x.flip(0) * (1 - share))
        batch["scale"].numpy()[...] *= 0.5
        loss = F.mse_loss(model(x + batch["scale"]).squeeze(1), labels)
        hooks.moment("inside", job.iteration_number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hooks.moment("after", job.iteration_number)

    if "section" in sys.argv:
        train_with_sums(job, net, model, optimizer)
    elif "weights" in sys.argv:
        train_near(job, net, model, optimizer)
    elif "inside" in sys.argv:
        source = batches_of(job.loader(loader))
        take = job.iteration(lambda: update(next(source)))
        for number in job.iterations(24):
            hooks.moment("before", number)
            take()
    else:
        train = job.iteration(update)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in job.batches(loader):
                hooks.moment("before", job.iteration_number)
                train(batch)
    hooks.finish(job, list(net.parameters()), optimizer)


if __name__ == "__main__":
    main()
