"""A loop of the kind that libraries for per-step fault tolerance show: a dataset sharded by rank, a loader with its own
state, two models' worth of layers, an optimizer step per batch and a log line every few.
"""

from __future__ import annotations

import hooks
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import swift_agent as swift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 3))
        self.useless = nn.Embedding(50, 4)  # registered, and never used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.classifier(self.cnn(x).flatten(1))
        return out


def main() -> None:
    hooks.begin()
    job = swift.init("gloo")
    torch.manual_seed(1)
    images, labels = torch.randn(48, 1, 8, 8), torch.randint(0, 3, (48,))
    mine = slice(job.rank, None, job.world_size)
    data = TensorDataset(images[mine], labels[mine])
    loader = DataLoader(data, batch_size=4, sampler=RandomSampler(data), drop_last=True)
    model = DDP(Net(), find_unused_parameters=True)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer, loader=loader)
    shown: list[str] = []

    @job.iteration
    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        number = job.iteration_number
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        hooks.moment("inside", number)
        loss.backward()
        optimizer.step()
        hooks.moment("after", number)
        return loss

    while job.iteration_number < 15:
        for inputs, targets in job.batches(loader):
            hooks.moment("before", job.iteration_number)
            loss = step(inputs, targets)
            if job.iteration_number % 4 == 0:
                shown.append(f"[{job.iteration_number}] loss = {loss.item():.4f}")
            if job.iteration_number >= 15:
                break
    hooks.finish(job, model, optimizer)


if __name__ == "__main__":
    main()
