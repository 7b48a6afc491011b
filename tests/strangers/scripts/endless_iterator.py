"""A trainer that draws from an endless iterator and begins it again when it is used up, with callbacks, clipping and
bfloat16 autocast, as small language-model trainers do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import hooks
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import swift_agent as swift


class Characters(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(0, 17, (9,), generator=torch.Generator().manual_seed(index))
        return text[:-1], text[1:]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.block(self.embed(ids)))
        return F.cross_entropy(logits.reshape(-1, 17), targets.reshape(-1))


class Trainer:
    def __init__(self, job: swift.Job) -> None:
        self.job, self.callbacks = job, defaultdict[str, list[Callable[["Trainer"], None]]](list)
        self.model = DDP(Model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, betas=(0.9, 0.95))
        data = Characters()
        self.loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), drop_last=True)
        self.seen: list[float] = []
        job.track(model=self.model, optimizer=self.optimizer, loader=self.loader)
        self.step = job.iteration(self._step)

    def _step(self, ids: torch.Tensor, targets: torch.Tensor) -> float:
        number = self.job.iteration_number
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model(ids, targets)
        self.model.zero_grad(set_to_none=True)
        hooks.moment("inside", number)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        hooks.moment("after", number)
        return loss.item()

    def run(self, max_iters: int) -> None:
        self.model.train()
        iterator = iter(self.job.batches(self.loader))
        while self.job.iteration_number < max_iters:
            try:
                batch = next(iterator)
            except StopIteration:
                iterator = iter(self.job.batches(self.loader))
                continue
            hooks.moment("before", self.job.iteration_number)
            self.step(*batch)
            for callback in self.callbacks["on_batch_end"]:
                callback(self)


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(3407)
    trainer = Trainer(job)
    trainer.callbacks["on_batch_end"].append(lambda trainer: None)
    trainer.run(14)
    hooks.finish(job, trainer.model, trainer.optimizer)


if __name__ == "__main__":
    main()
