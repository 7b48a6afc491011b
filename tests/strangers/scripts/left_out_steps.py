"""Iterations without a step: one that is left out where the norm of the gradients is not finite, as recipes for large
models do it, or steps that come once in a few calls.

left_out_steps.py norm | accumulated [hsdp] | each [hsdp]: gradients are cleared when the next iteration begins; or a
step in every third iteration, with gradients that are reduced in each, or in every third only. hsdp: `fully_shard`.
"""

from __future__ import annotations

import contextlib
import sys

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift

NUM_ITERATIONS, GROUP = 12, 3


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4))
    if "hsdp" in sys.argv:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        model: nn.Module = fully_shard(net, mesh=mesh)
    else:
        model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)

    def reports(loss: torch.Tensor, number: int) -> torch.Tensor:
        hooks.moment("after", number)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total

    @job.iteration
    def clipped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        number = job.iteration_number
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        hooks.moment("inside", number)
        (loss * (float("inf") if number % GROUP else 1.0)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        return reports(loss, number)

    @job.iteration
    def accumulated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        number = job.iteration_number
        last = number % GROUP == GROUP - 1
        quiet = "each" in sys.argv and not last
        if "hsdp" in sys.argv:
            model.set_requires_gradient_sync(not quiet)
        with model.no_sync() if quiet and "hsdp" not in sys.argv else contextlib.nullcontext():
            loss = F.cross_entropy(model(x), y) / GROUP
            hooks.moment("inside", number)
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return reports(loss, number)

    train = clipped if "norm" in sys.argv else accumulated
    for number in job.iterations(NUM_ITERATIONS):
        hooks.moment("before", number)
        train(torch.randn(8, 16), torch.randint(4, (8,)))
    hooks.finish(job, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
