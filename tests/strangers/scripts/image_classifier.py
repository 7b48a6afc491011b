"""A classifier with epochs of training and validation, meters that reduce over ranks, a learning rate set by the epoch,
the best accuracy so far, and snapshots by rank 0: what examples for ImageNet look like.
"""

from __future__ import annotations

import hooks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import swift_agent as swift
from tests.support.fault_train import DIR


class Pictures(Dataset):
    """Small pictures, turned and shifted at random."""

    def __init__(self, size: int, *, augment: bool) -> None:
        self.size, self.augment = size, augment

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        if self.augment:
            if torch.rand(1).item() < 0.5:
                picture = picture.flip(2)
            picture = picture.roll(int(torch.randint(0, 3, (1,))), 1)
        return picture, index % 5


class AverageMeter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, num: int) -> None:
        self.sum, self.count = self.sum + value * num, self.count + num

    def all_reduce(self) -> None:
        total = torch.tensor([self.sum, float(self.count)])
        dist.all_reduce(total)
        self.sum, self.count = total[0].item(), int(total[1].item())


def adjust_learning_rate(optimizer: torch.optim.Optimizer, epoch: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * 0.5 ** (epoch // 2)


def main() -> None:
    hooks.begin()
    job = swift.init("gloo")
    torch.manual_seed(5)
    model = DDP(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Dropout(0.2), nn.Linear(32, 5),
        )
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    train_set, val_set = Pictures(48, augment=True), Pictures(16, augment=False)
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=8, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=8, sampler=DistributedSampler(val_set, shuffle=False))
    job.track(model=model, optimizer=optimizer)

    @job.iteration
    def train_step(images: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
        number = job.iteration_number
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        hooks.moment("inside", number)
        loss.backward()
        optimizer.step()
        hooks.moment("after", number)
        return loss.item(), (output.argmax(1) == target).float().mean().item()

    @job.resilient
    def validate() -> float:
        top1 = AverageMeter()
        model.eval()
        with torch.no_grad():
            for images, target in val_loader:
                top1.update((model(images).argmax(1) == target).float().mean().item(), len(target))
        model.train()
        top1.all_reduce()
        return top1.sum / top1.count

    best = 0.0
    for epoch in job.epochs(4):
        train_sampler.set_epoch(epoch)
        adjust_learning_rate(optimizer, epoch)
        losses = AverageMeter()
        for images, target in job.batches(train_loader):
            hooks.moment("before", job.iteration_number)
            loss, _ = train_step(images, target)
            losses.update(loss, len(target))
        accuracy = validate()
        is_best, best = accuracy > best, max(accuracy, best)
        if job.rank == 0:
            state = {"epoch": epoch + 1, "model": model.state_dict(), "best": best, "optimizer": optimizer.state_dict()}
            torch.save(state, DIR / "checkpoint.pt")
            if is_best:
                torch.save(state, DIR / "best.pt")
    hooks.finish(job, model, optimizer)


if __name__ == "__main__":
    main()
