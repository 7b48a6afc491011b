"""The training script of the tests of jobs that change their size while they are recovered in place.

Every rank leaves a line per iteration in `log.{rank}.{pid}`: which iteration, the size of the world, the samples, and
hashes of parameters and optimizer state before and after it. An iteration takes $PACE_S until the file `free` is there.
On the node $STRUCK the first worker that starts in a world of three dies with its agent, once. With $CUT parameters are
updated in the backward, and the worker of that node dies with its agent in an iteration of that number or later, once,
when the others have updated the parameters of the first bucket, and it has not.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import swift_agent as swift
from swift_agent.worker.updates.overlapped import OverlappedUpdates

OUT = Path(os.environ["OUT"])
NUM_SAMPLES, BATCH, NUM_EPOCHS = 360, 4, 2


class Points(Dataset):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator), index % 4, index


def strike() -> None:
    if os.environ["NODE"] == os.environ.get("STRUCK") and os.environ["WORLD_SIZE"] == "3":
        (OUT / "struck").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def cut_an_update(number: Callable[[], int]) -> None:
    """See the module. *number*: of the iteration."""
    reduce, update = OverlappedUpdates._reduce, OverlappedUpdates._update
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def others_are_ready() -> bool:
        return all((OUT / f"updated.{number()}.{other}").exists() for other in set(range(world)) - {rank})

    def armed_reduce(self: OverlappedUpdates, ddp: Any, bucket: Any) -> Any:
        due = world == 3 and number() >= int(os.environ["CUT"]) and not (OUT / "struck").exists()
        if due and os.environ["NODE"] == os.environ["STRUCK"] and bucket.index() == 1:
            while not others_are_ready():
                time.sleep(0.001)
            (OUT / "struck").touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return reduce(self, ddp, bucket)

    def armed_update(self: OverlappedUpdates, attempt: int, pairs: Any, future: Any) -> Any:
        result = update(self, attempt, pairs, future)
        (OUT / f"updated.{number()}.{rank}").touch()
        return result

    OverlappedUpdates._reduce, OverlappedUpdates._update = armed_reduce, armed_update


def digest(*objects: nn.Module | torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for one in objects:
        state = one.state_dict()
        values = state.items() if isinstance(one, nn.Module) else enumerate(state["state"].values())
        for name, value in values:
            flat = value.values() if isinstance(value, dict) else [value]
            for tensor in flat:
                found.update(str(name).encode() + torch.as_tensor(tensor).numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    overlap = "CUT" in os.environ
    if not overlap:
        strike()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    job = swift.init()
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    model = DistributedDataParallel(net, bucket_cap_mb=0.0005 if overlap else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    data = Points()
    sampler = DistributedSampler(data, num_replicas=job.world_size, rank=job.rank, seed=3)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    job.track(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, overlap_update=overlap, exact=overlap
    )
    if overlap:
        cut_an_update(lambda: job.iteration_number)
    log = open(OUT / f"log.{job.rank}.{os.getpid()}", "a", buffering=1)  # noqa: SIM115 - kept for the process' life

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    for epoch in job.epochs(NUM_EPOCHS):
        for x, y, index in job.batches(loader):
            number, before = job.iteration_number, digest(net, optimizer)
            train(x, y)
            line = {"iteration": number, "epoch": epoch, "world": job.world_size, "rank": job.rank,
                    "node": os.environ["NODE"], "samples": index.tolist(), "before": before,
                    "after": digest(net, optimizer), "lr": scheduler.get_last_lr()[0]}  # fmt: skip
            if line["after"] != before:  # else the update is on a replica, and still to come
                print(json.dumps(line), file=log)
            end_s = time.monotonic() + float(os.environ["PACE_S"])
            while not (OUT / "free").exists() and time.monotonic() < end_s:
                time.sleep(0.01)
    (OUT / f"end.{job.rank}").write_text(digest(net, optimizer))


if __name__ == "__main__":
    main()
