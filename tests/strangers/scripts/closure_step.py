"""`optimizer.step(closure)`, with forward and backward in the closure, as frameworks that own the loop call it.

closure_step.py [hsdp]
"""

from __future__ import annotations

import sys

import hooks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    module = Module()
    if "hsdp" in sys.argv:
        shape = (2, job.world_size // 2)
        model = fully_shard(module, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    else:
        model = DDP(module)
    optimizer = module.configure_optimizers()
    job.track(model=model, optimizer=optimizer)

    @job.iteration
    def training_step(batch: torch.Tensor) -> torch.Tensor:
        number = job.iteration_number

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch)
            hooks.moment("inside", number)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        hooks.moment("after", number)
        return loss

    for _ in job.iterations(12):
        hooks.moment("before", job.iteration_number)
        training_step(torch.randn(8, 16))
    hooks.finish(job, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
