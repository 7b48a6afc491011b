"""Training scripts whose ranks come to wait for each other for ever; $FAULT_ORDERS names the "form" to run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from fault_train import DIR, ORDERS, RANK, fault
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_agent as swift
from swift_agent.worker.checks import lookout


def main() -> None:
    form = ORDERS["form"]
    lookout.PERIOD_S, lookout.STILL_S, lookout.FIRST_NOTE_S = 0.4, 1.2, 2.0
    with open(DIR / f"pids.{RANK}", "a") as stream:
        print(os.getpid(), file=stream)
    torch.set_num_threads(1)
    job = swift.init()
    torch.manual_seed(7)
    others = dist.new_group()  # on one group, unlike collectives end the process
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)

    @job.iteration
    def train() -> None:
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        fault("backward", job.iteration_number)
        loss.backward()
        optimizer.step()

    @job.resilient
    def evaluate() -> None:
        if form == "slow alone":
            time.sleep(4.0)
        else:
            dist.all_reduce(torch.zeros(1), group=others)

    def numbers() -> Iterator[int]:
        return job.iterations(12 if form == "uneven" and job.rank else 10)

    if form == "no loop" and job.rank == 0:
        return
    for number in numbers():
        train()
        if form in ("section of some", "slow alone") and job.rank == 0 and number == 5:
            evaluate()
        if form == "barrier of some" and job.rank == 0 and number == 5:
            dist.all_reduce(torch.zeros(1), group=others)  # between iterations
        if form == "one's barrier" and number == 5:
            if job.rank == 0:
                dist.barrier()
            else:
                dist.all_reduce(torch.zeros(1), group=others)
    result = {"rank": RANK, "pid": os.getpid(), "iterations": job.iteration_number}
    (DIR / f"result.{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
