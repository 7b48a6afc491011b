"""Scripts whose ranks hold what no other rank has: refused.py fsdp1 | averager | carried [tensor]."""

from __future__ import annotations

import sys

import hooks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    averager = None
    if "fsdp1" in sys.argv:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif "averager" in sys.argv:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        averager = PeriodicModelAverager(period=4)
    elif "tensor" in sys.argv:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        ways = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
        model = parallelize_module(model, init_device_mesh("cpu", (job.world_size,)), ways)
    else:
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)

    @job.iteration
    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        if "carried" not in sys.argv:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if averager is not None:
            averager.average_parameters(model.parameters())
        return loss

    for _ in job.iterations(12):
        train(torch.randn(4, 8))
    hooks.finish(job, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
