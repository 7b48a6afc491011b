"""Train a small CNN on scikit-learn's handwritten digits; the script to copy from.

    python examples/digits.py                                        one process
    torchrun  --standalone --nproc-per-node 2 examples/digits.py     as usual: a lost worker restarts all
    swift-run --standalone --nproc-per-node 2 examples/digits.py     a lost worker is replaced, the others go on

Lines that differ from a plain DDP script are marked with "swift". The result is the same bit for bit in every run with
as many workers, whichever of them are lost on the way.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import swift_agent as swift

NUM_TEST = 360


def make_net() -> nn.Module:
    """(N, 1, 8, 8) -> (N, 10) logits."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10),
    )  # fmt: skip


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: images (1, 8, 8) in 0..1, labels 0..9."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


class Progress:
    """Where this process is, for the program that watches the run (`demo.py`): "time pid what iteration" per line."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._file = open(directory / f"rank{rank}", "a", buffering=1) if directory else None  # noqa: SIM115

    def tell(self, what: str, iteration: int) -> None:
        if self._file:
            print(time.monotonic(), os.getpid(), what, iteration, file=self._file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16, help="per worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overlap", action="store_true", help="update parameters while the backward goes on")
    parser.add_argument("--out", type=Path, help="where rank 0 saves the final weights")
    parser.add_argument("--progress", type=Path, metavar="DIR", help="directory for one line per step, for watchers")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    job = swift.init()  # swift: instead of dist.init_process_group()
    progress = Progress(args.progress, job.rank)

    train_set, test_set = load()
    sampler = DistributedSampler(train_set, job.world_size, job.rank, drop_last=True)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    # Small buckets: with overlap each is updated as soon as it is reduced.
    model = DistributedDataParallel(make_net().to(job.device), bucket_cap_mb=0.02 if args.overlap else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=args.epochs * len(loader))
    # swift: what a replacement has to be given
    job.track(model=model, optimizer=optimizer, scheduler=scheduler, overlap_update=args.overlap)

    @job.iteration  # swift: one update; run again if a peer is lost inside it
    def train(images: Tensor, labels: Tensor) -> None:
        progress.tell("begin", job.iteration_number)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        progress.tell("end", job.iteration_number)

    @job.resilient  # swift: repeated if a peer is lost inside it
    def evaluate() -> tuple[float, float]:
        """Loss on the test set, and the share of it that is recognised; each worker looks at its part of it."""
        images, labels = (part[job.rank :: job.world_size].to(job.device) for part in test_set.tensors)
        model.eval()
        with torch.no_grad():
            found = model.module(images)
            sums = torch.stack([F.cross_entropy(found, labels, reduction="sum"), (found.argmax(1) == labels).sum()])
        model.train()
        dist.all_reduce(sums)
        loss, num_right = sums.tolist()
        return loss / NUM_TEST, num_right / NUM_TEST

    for epoch in job.epochs(args.epochs):  # swift: a replacement begins with the right epoch
        for images, labels in job.batches(loader):  # swift: ... and the right batch
            train(images.to(job.device), labels.to(job.device))
        # Not what the loop has left in its variables: a replacement may begin behind the last batch.
        loss, accuracy = evaluate()
        if job.rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs}: test loss {loss:.4f}, test accuracy {accuracy:.2%}", flush=True)

    if job.rank == 0 and args.out:
        torch.save(model.module.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
