"""A trainer that owns its loop: `train_step(data_iterator)` draws its own micro-batches, as torchtitan's does.

HSDP, gradients accumulated over two batches, a global count of tokens and clipping in each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

import swift_agent as swift

STEPS, MICRO_STEPS, BATCH, LENGTH, WORDS = 12, 2, 2, 6, 11


class Text(IterableDataset[Any]):
    """An endless stream; each rank has its own part."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.rank)
        while True:
            tokens = torch.randint(WORDS, (LENGTH + 1,), generator=generator)
            yield tokens[:-1], tokens[1:]


class Trainer:
    def __init__(self, job: swift.Job) -> None:
        self.job, self.step = job, 0
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1)) for _ in range(2)]
        self.model = nn.Sequential(nn.Embedding(WORDS, 16), *blocks, nn.Linear(16, WORDS))
        mesh = init_device_mesh("cpu", (2, job.world_size // 2), mesh_dim_names=("replicate", "shard"))
        for block in self.model:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 5))
        self.dataloader = job.loader(DataLoader(Text(job.rank), BATCH))
        job.track(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self.train_step = job.iteration(self.train_step)  # type: ignore[method-assign]

    def batch_generator(self) -> Iterator[Any]:
        while True:
            yield from self.dataloader

    def train_step(self, data_iterator: Iterator[Any]) -> float:
        number = self.job.iteration_number
        self.optimizer.zero_grad()
        micro_batches = [next(data_iterator) for _ in range(MICRO_STEPS)]
        tokens = torch.tensor(float(sum(labels.numel() for _, labels in micro_batches)))
        dist.all_reduce(tokens)
        losses = []
        for inputs, labels in micro_batches:
            loss = F.cross_entropy(self.model(inputs).flatten(0, 1), labels.flatten(), reduction="sum") / tokens
            if not losses:
                hooks.moment("inside", number)
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        hooks.moment("after", number)
        return float(sum(losses))

    def train(self) -> None:
        data_iterator = self.batch_generator()
        for step in self.job.iterations(STEPS):
            self.step = step
            hooks.moment("before", step)
            self.train_step(data_iterator)


def main() -> None:
    hooks.begin()
    job = swift.init()
    trainer = Trainer(job)
    trainer.train()
    hooks.finish(job, trainer.model, trainer.optimizer, trainer.scheduler, trainer.step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
