"""Batches cut out of one long text at random; the next one is made while the update is still under way.

prefetched_batch.py [read | numbered] [now] [validate]: one after the other, from where the script has come to, or by
the number of the iteration, again after every third; made where it is needed; lost in a validation and not in an
iteration.
"""

from __future__ import annotations

import sys

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(1337 + job.rank)
    text = torch.randint(0, 11, (400,), generator=torch.Generator().manual_seed(1))

    position = job.rank * 4

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal position
        starts = torch.randint(len(text) - 9, (4,))
        if "read" in sys.argv:
            starts = torch.arange(position, position + 4)
            position += 8
        elif "numbered" in sys.argv:
            starts = torch.arange(job.rank * 4, job.rank * 4 + 4) + job.iteration_number % 3 * 8
        return torch.stack([text[i : i + 8] for i in starts]), torch.stack([text[i + 1 : i + 9] for i in starts])

    model = DDP(nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 11)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)
    x, y = get_batch()

    validates = "validate" in sys.argv

    @job.resilient
    def validate() -> float:
        dist.barrier()  # nobody is still in the iteration before
        with torch.no_grad():
            loss = F.cross_entropy(model.module(text[:8]), text[1:9])
        for moment in ("before", "inside", "after"):
            hooks.moment(moment, job.iteration_number)
        dist.all_reduce(loss)
        return loss.item()

    @job.iteration
    def train() -> float:
        nonlocal x, y
        number = job.iteration_number
        if "now" in sys.argv:
            x, y = get_batch()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        if "now" not in sys.argv:
            x, y = get_batch()
        hooks.moment("inside", number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hooks.moment("after", number)
        return loss.item()

    for number in job.iterations(12):
        if validates:
            validate()
        else:
            hooks.moment("before", number)
        train()
    hooks.finish(job, model, optimizer)


if __name__ == "__main__":
    main()
