"""A training script in which two ranks have replicas of a model, and the third one has another one for itself, whose
messages would be logged: there are none between the two parts."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swift_agent as swift
from tests.support.fault_train import DIR, ITERATIONS, RANK, fault, leave_result, now, update


def main() -> None:
    torch.set_num_threads(1)
    job = swift.init()
    pair = dist.new_group([0, 1])
    torch.manual_seed(3 + RANK // 2)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(net.parameters())
    if RANK < 2:
        model: nn.Module = DistributedDataParallel(net, process_group=pair)
        job.track(model=model, optimizer=optimizer)
    else:
        model = net
        job.track(model=model, optimizer=optimizer, replicas=[RANK], log_messages=True)

    @job.iteration
    def train(x: torch.Tensor) -> float:
        now["iteration"] = job.iteration_number
        optimizer.zero_grad()
        loss = model(x).square().sum()
        fault("forward")
        loss.backward()
        update([optimizer])
        return loss.item()

    for number in job.iterations(ITERATIONS):
        train(torch.randn(2, 4, generator=torch.Generator().manual_seed(number)))
    leave_result(job, net, [optimizer])


if __name__ == "__main__":
    with open(DIR / f"pids.{RANK}", "a") as stream:
        print(os.getpid(), file=stream)
    main()
