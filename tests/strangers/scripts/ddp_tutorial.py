"""A trainer class around DDP, with a sampler and epochs, as introductions to DDP have it.

"snapshots": with a snapshot that one rank writes and all load, epochs by `range` from there on, and a look at the first
batch of each epoch.
"""

from __future__ import annotations

import os
import sys

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import swift_agent as swift

SNAPSHOT = hooks.DIR / "snapshot.pt"


class Trainer:
    def __init__(self, job: swift.Job, model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> None:
        self.job, self.loader, self.optimizer, self.epochs_run = job, loader, optimizer, 0
        if SNAPSHOT.exists() and "snapshots" in sys.argv:
            snapshot = torch.load(SNAPSHOT)
            model.load_state_dict(snapshot["model"])
            self.epochs_run = snapshot["epochs_run"]
        self.model = DDP(model)
        job.track(model=self.model, optimizer=optimizer, loader=loader)
        self.run_batch = job.iteration(self._run_batch)

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> float:
        number = self.job.iteration_number
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        hooks.moment("inside", number)
        loss.backward()
        self.optimizer.step()
        hooks.moment("after", number)
        return loss.item()

    def train(self, max_epochs: int) -> None:
        for epoch in self.job.epochs(max_epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.job.batches(self.loader):
                hooks.moment("before", self.job.iteration_number)
                self.run_batch(source, targets)

    def train_with_snapshots(self, max_epochs: int) -> None:
        batches = self.job.loader(self.loader)
        for epoch in range(self.epochs_run, max_epochs):
            print(f"epoch {epoch}: {len(batches)} batches of {len(next(iter(batches))[0])}")
            batches.sampler.set_epoch(epoch)
            for source, targets in batches:
                hooks.moment("before", self.job.iteration_number)
                self.run_batch(source, targets)
            if self.job.rank == 0:
                new = SNAPSHOT.with_suffix(".new")
                torch.save({"model": self.model.module.state_dict(), "epochs_run": epoch + 1}, new)
                os.replace(new, SNAPSHOT)


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 20), torch.randn(96, 1))
    model = nn.Sequential(nn.Linear(20, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    loader = DataLoader(data, batch_size=12, shuffle=False, sampler=DistributedSampler(data))
    trainer = Trainer(job, model, loader, optimizer)
    trainer.train_with_snapshots(4) if "snapshots" in sys.argv else trainer.train(4)
    hooks.finish(job, trainer.model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
