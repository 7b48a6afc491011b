"""One small training loop over the loaders that scripts have; the argument says which."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hooks
import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, default_collate

import swift_agent as swift

EPOCHS, SAMPLES, BATCH = 3, 48, 4
KIND = sys.argv[1]


class Augmented(Dataset[Any]):
    """Noise from all generators, drawn where the sample is loaded."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        point = torch.randn(8, generator=torch.Generator().manual_seed(index))
        noise = torch.randn(8) + random.random() + float(numpy.random.rand())
        return point + 0.1 * noise, index % 3


class Stream(IterableDataset[Any]):
    """A stream that shuffles in a buffer; each rank has its part."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        buffer: list[int] = []
        for index in range(self.rank, SAMPLES, self.world_size):
            buffer.append(index)
            if len(buffer) == 6:
                yield Augmented()[buffer.pop(random.randrange(6))]
        while buffer:
            yield Augmented()[buffer.pop()]


class Counting(Sampler[int]):
    """An order for each of its passes, which it counts itself."""

    def __init__(self) -> None:
        self.turn = torch.distributed.get_rank()

    def __iter__(self) -> Iterator[int]:
        self.turn += 100
        yield from torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.turn)).tolist()[: SAMPLES // 2]

    def __len__(self) -> int:
        return SAMPLES // 2


class CountingStream(IterableDataset[Any]):
    """A stream that goes on where its last pass has stopped, by a number that it keeps."""

    def __init__(self, rank: int) -> None:
        self.at = 1000 * rank

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for _ in range(SAMPLES // 2):
            self.at += 1
            yield Augmented()[self.at]


class OwnOrder(DataLoader[Any]):
    """A subclass that goes through something else than its sampler."""

    def __iter__(self) -> Any:
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        for first in range(SAMPLES - BATCH * (rank + 1), -1, -BATCH * world_size):
            samples = [self.dataset[index] for index in range(first, first + BATCH)]
            yield torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])


@dataclass
class Rows:
    """A batch as an object of a class."""

    x: torch.Tensor
    y: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (self.x, self.y)


def in_rows(samples: list[Any]) -> Rows:
    return Rows(*default_collate(samples))


def sharded(**options: Any) -> DataLoader[Any]:
    data = Augmented()
    return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, seed=3), **options)


def accelerate(job: swift.Job, **options: Any) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return accelerator.prepare(DataLoader(Augmented(), BATCH, shuffle=True, **options))


def fabric(job: swift.Job) -> Any:
    from lightning.fabric import Fabric

    one = Fabric(accelerator="cpu", devices=1)
    one.launch()
    return one.setup_dataloaders(sharded(), use_distributed_sampler=False)


def stateful(job: swift.Job) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = Augmented()
    return StatefulDataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, seed=3), num_workers=1)


LOADERS: dict[str, Callable[[swift.Job], Any]] = {
    "accelerate": accelerate,
    "fabric": fabric,
    "stateful": stateful,
    "generator": lambda job: DataLoader(
        Augmented(), BATCH * 2, shuffle=True, generator=torch.Generator().manual_seed(job.rank)),
    "processes": lambda job: sharded(num_workers=2, persistent_workers=True, prefetch_factor=3),
    "stream": lambda job: DataLoader(Stream(job.rank, job.world_size), BATCH, num_workers=0),
    "counting": lambda job: DataLoader(Augmented(), BATCH, sampler=Counting()),
    "counting rows": lambda job: DataLoader(CountingStream(job.rank), BATCH, collate_fn=in_rows),
    "counting stream": lambda job: DataLoader(CountingStream(job.rank), BATCH),
    "own order": lambda job: OwnOrder(Augmented(), BATCH),
}  # fmt: skip


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = LOADERS.get(KIND, lambda job: sharded())(job)
    job.track(model=model, optimizer=optimizer, loader=loader)

    @job.iteration
    def train(*batches: tuple[torch.Tensor, torch.Tensor]) -> float:
        return update(batches)

    @job.iteration
    def train_on_next(source: Iterator[Any]) -> float:
        return update([next(source) for _ in range(2)])

    def update(batches: Any) -> float:
        number = job.iteration_number
        optimizer.zero_grad()
        total = 0.0
        for index, (x, y) in enumerate(batches):
            with torch.enable_grad() if index == len(batches) - 1 else model.no_sync():
                loss = F.cross_entropy(model(x), y) / len(batches)
                if index == 0:
                    hooks.moment("inside", number)
                loss.backward()
            total += loss.item()
        optimizer.step()
        hooks.moment("after", number)
        return total

    if KIND == "draws inside":
        source = endless(job, loader)
        for number in job.iterations(12):
            hooks.moment("before", number)
            train_on_next(source)
    elif KIND == "one ahead":
        source = endless(job, loader)
        batch = next(source)
        for number in job.iterations(12):
            hooks.moment("before", number)
            train(batch)
            batch = next(source)
    elif KIND == "ahead of the update":
        held = None
        for batch in job.batches(loader):
            if held is not None:
                train(held)
            held = batch
    else:
        for _ in job.epochs(EPOCHS * 2 if KIND in ("collected", "grouped") else EPOCHS):
            epoch(job, loader, train)
    hooks.finish(job, model, optimizer)


def epoch(job: swift.Job, loader: Any, train: Callable[..., float]) -> None:
    if KIND == "grouped":
        for group in job.batches(loader, group=4):
            hooks.moment("before", job.iteration_number)
            train(*group)
        return
    collected: list[Any] = []
    total = job.resilient(summed)
    for batch in job.batches(loader):
        collected.append(batch)
        if KIND == "summed before":
            batch[0].mul_(summed(batch[1]))
        elif KIND == "summed in a section":
            batch[0].mul_(total(batch[1]))
        if len(collected) == (3 if KIND == "collected" else 1):
            hooks.moment("before", job.iteration_number)
            train(*collected)
            collected = []


def summed(labels: torch.Tensor) -> float:
    """Of all ranks, for a mean over what they have together."""
    total = labels.sum().float() + 1
    torch.distributed.all_reduce(total)
    return 1 / float(total)


def endless(job: swift.Job, loader: Any) -> Iterator[Any]:
    while True:
        yield from job.batches(loader)


if __name__ == "__main__":
    main()
