"""FSDP2 on a mesh of two dimensions (HSDP), each block wrapped, mixed precision, a learning rate with warm-up.

`hsdp`: replicate and shard; `tp`: fully sharded over one dimension, tensor parallel over the other.
"""

from __future__ import annotations

import sys

import hooks
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import swift_agent as swift


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def main() -> None:
    hooks.begin()
    job = swift.init("gloo")
    torch.manual_seed(11)
    model = Model()
    if sys.argv[1] == "hsdp":
        mesh = init_device_mesh("cpu", (2, job.world_size // 2), mesh_dim_names=("replicate", "shard"))
        seed = job.rank
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        wrap = {"mesh": mesh, "mp_policy": policy}
    else:
        mesh = init_device_mesh("cpu", (2, 1, job.world_size // 2), mesh_dim_names=("replicate", "shard", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        seed = mesh["replicate"].get_local_rank()  # the ranks of a tensor-parallel group share their data
        wrap = {"mesh": mesh["replicate", "shard"]}
    for block in model.blocks:
        fully_shard(block, **wrap)
    fully_shard(model, **wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    job.track(model=model, optimizer=optimizer, scheduler=scheduler)

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        number = job.iteration_number
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        hooks.moment("inside", number)
        loss.backward()
        optimizer.step()
        scheduler.step()
        hooks.moment("after", number)
        return loss.detach()

    for i in job.iterations(12):
        draw = torch.Generator().manual_seed(1000 * i + seed)
        x, y = torch.randn(8, 16, generator=draw), torch.randint(0, 4, (8,), generator=draw)
        hooks.moment("before", i)
        train(x, y)
    hooks.finish(job, model, optimizer, scheduler)


if __name__ == "__main__":
    main()
