"""The training script of test_hsdp: FSDP2 on a mesh (replicate, shard), with the faults of fault_train's orders."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.fault_train import (
    DEVICE,
    DIR,
    ITERATIONS,
    ORDERS,
    RANK,
    arm_private_places,
    fault,
    init,
    leave_result,
    now,
    take_checkpoints,
    until_it_counts,
    update,
)


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(31)  # of a size that shards do not divide
        self.wide = nn.Linear(31, 31)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.number == 1:
            fault("forward")
        out = x + self.drop(F.gelu(self.wide(self.norm(x))))
        if out.requires_grad and self.number == 1:
            out.register_hook(lambda grad: fault("backward"))
        return out


def main() -> None:
    torch.set_num_threads(1)
    arm_private_places()
    job = init()
    torch.manual_seed(7)
    net = nn.Sequential(*(Block(number) for number in range(3)), nn.Linear(31, 4)).to(DEVICE)
    sizes, names = ((2, 2), ("replicate", "shard")) if ORDERS.get("model") == "hsdp" else ((4,), ("shard",))
    mesh = init_device_mesh(DEVICE.type, sizes, mesh_dim_names=names)
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8)
    take_checkpoints(job)
    job.track(model=net, optimizer=optimizer, scheduler=scheduler)

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        now["iteration"] = job.iteration_number
        (DIR / f"begun.{RANK}").touch()
        until_it_counts(job)
        loss = F.cross_entropy(net(x.to(DEVICE)), y.to(DEVICE))
        loss.backward()
        update([optimizer])
        optimizer.zero_grad()
        scheduler.step()
        return loss.detach()

    @job.resilient
    def evaluate(x: torch.Tensor) -> None:
        with torch.no_grad():
            net(x.to(DEVICE))  # FSDP leaves whole parameters behind

    for number in job.iterations(ITERATIONS):
        generator = torch.Generator().manual_seed(100 * number + RANK)
        x = torch.randn(8, 31, generator=generator)
        train(x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long())
        if ORDERS.get("evaluates"):
            evaluate(x)
        fault("between", job.iteration_number - 1)
    leave_result(job, net, [optimizer], full)


def full(tensor: Any) -> Any:
    """All of it, gathered from its shards: the same on all ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


if __name__ == "__main__":
    with open(DIR / f"pids.{RANK}", "a") as stream:
        print(os.getpid(), file=stream)
    main()
    sys.exit(0)
