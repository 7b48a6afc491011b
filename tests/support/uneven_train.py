"""The training script of test_uneven: pipelines whose ranks are not alike, with the faults of fault_train's orders.

Rank 0 holds the first stage alone, and logs its messages. By the orders' "shape", ranks 1 and 2 are "replicas" of the
second one, whose gradients they sum up by hand; or each further rank is a stage with two optimizers, and the first one
receives what the last one reports between their steps, where it dawdles once in iteration 5 ("stages").
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import swift_agent as swift
from tests.support.fault_train import (
    DIR,
    ITERATIONS,
    ORDERS,
    RANK,
    arm_private_places,
    fault,
    leave_result,
    now,
)


def first_and_replicas(model: nn.ModuleList, optimizer: torch.optim.Optimizer, number: int, group: object) -> None:
    optimizer.zero_grad()
    if RANK == 0:
        y = model[0](torch.full((2, 4), float(number)))
        gradients = [torch.empty(2, 4) for _ in (1, 2)]
        for destination in (1, 2):
            dist.send(y.detach(), destination)
        for source in (1, 2):
            dist.recv(gradients[source - 1], source)
        y.backward(gradients[0] + gradients[1])
    else:
        y = torch.empty(2, 4)
        dist.recv(y, 0)
        fault("forward")
        model[1](y.requires_grad_()).square().mean().backward()
        assert y.grad is not None
        dist.send(y.grad, 0)
        for parameter in model[1].parameters():
            dist.all_reduce(parameter.grad, group=group)  # type: ignore[arg-type]
    optimizer.step()


def stage(model: nn.ModuleList, optimizers: list[torch.optim.Optimizer], number: int, world_size: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    x = torch.full((2, 4), float(number))
    if RANK:
        dist.recv(x, RANK - 1)
    y = model[1](model[0](x))
    y.square().mean().backward()
    works = [dist.isend(y.detach(), RANK + 1)] if world_size > RANK + 1 else []
    report = torch.ones(3)
    if world_size - 1 == RANK:
        works.append(dist.isend(report, 0))
    optimizers[0].step()
    if RANK == 0:
        fault("report")
        if number == 5 and not (DIR / "dawdled").exists():
            (DIR / "dawdled").touch()
            time.sleep(1.5)  # until all are stopped: nobody can tell when, as that waits for the end of this update
        dist.recv(report, world_size - 1)
    optimizers[1].step()
    fault("after_step")
    for work in works:
        assert work is not None
        work.wait()


def main() -> None:
    torch.set_num_threads(1)
    arm_private_places()
    job = swift.init()
    has_replicas = ORDERS["shape"] == "replicas"
    torch.manual_seed(1 if has_replicas and RANK else RANK)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    parts = [model] if has_replicas else list(model)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    group = dist.new_group([1, 2]) if has_replicas else None
    is_alone = RANK == 0 or not has_replicas
    job.track(
        model=model, optimizer=optimizers, replicas=[RANK] if is_alone else [1, 2],
        log_messages=True if is_alone else None,
    )  # fmt: skip
    with open(DIR / f"calls.{RANK}", "a") as calls:

        @job.iteration
        def train() -> None:
            number = now["iteration"] = job.iteration_number
            print(number, os.getpid(), file=calls, flush=True)
            if has_replicas:
                first_and_replicas(model, optimizers[0], number, group)
            else:
                stage(model, optimizers, number, job.world_size)

        for _ in job.iterations(ITERATIONS):
            train()
    leave_result(job, model, optimizers)


if __name__ == "__main__":
    with open(DIR / f"pids.{RANK}", "a") as stream:
        print(os.getpid(), file=stream)
    main()
    sys.exit(0)
