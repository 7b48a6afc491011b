"""The training script of test_meshes: data parallel in one dimension of a mesh, and another kind in the other.

"tensor": layers split by hand, as Megatron does it, in DDP; "dtensor": by `parallelize_module`, in `fully_shard`, which
replicates them; "pipeline": two stages of `torch.distributed.pipelining`, 1F1B over four micro-batches, each in DDP.
*overlap*: parameters are updated in the backward.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.fault_train import (
    DIR,
    ITERATIONS,
    ORDERS,
    RANK,
    arm_agreement,
    arm_private_places,
    fault,
    init,
    leave_result,
    now,
    update,
)
from tests.support.split_layers import Sum

WIDTH, HIDDEN, BATCH, NUM_CHUNKS = 16, 32, 8, 4


class Copy(torch.autograd.Function):
    """Into a region that is split: the gradients of its parts are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Mlp(nn.Module):
    """All of it, or with *group* the part of a rank of it."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.drop = nn.Dropout(0.1)
        if group is not None:
            part, count = dist.get_rank(group), dist.get_world_size(group)
            for layer, name, dim in ((self.wide, "weight", 0), (self.wide, "bias", 0), (self.narrow, "weight", 1)):
                setattr(layer, name, nn.Parameter(getattr(layer, name).detach().chunk(count, dim)[part].clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.norm(x)
        if self.group is not None:
            inside = Copy.apply(inside, self.group)
        hidden = self.drop(F.gelu(self.wide(inside)))
        out = F.linear(hidden, self.narrow.weight)
        out = (out if self.group is None else Sum.apply(out, self.group)) + self.narrow.bias
        if out.requires_grad:
            out.register_hook(lambda grad: fault("backward"))
        return x + out


class Dense(nn.Module):
    """As `Mlp`, of layers that `parallelize_module` splits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def averaged(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(net, process_group=mesh["data"].get_group())


def split_by_hand(mesh: DeviceMesh) -> nn.Module:
    net = nn.Sequential(*(Mlp(mesh["model"].get_group()) for _ in range(2)), nn.Linear(WIDTH, 4))
    return averaged(net, mesh)


def split_by_torch(mesh: DeviceMesh) -> nn.Module:
    net = nn.Sequential(Dense(), Dense(), nn.Linear(WIDTH, 4))
    plan = {f"{number}.{name}": style() for number in range(2)
            for name, style in (("wide", ColwiseParallel), ("narrow", RowwiseParallel))}  # fmt: skip
    parallelize_module(net, mesh["model"], plan)
    for block in net:
        fully_shard(block, mesh=mesh["data", "shard"])
    fully_shard(net, mesh=mesh["data", "shard"])
    return net


def stage_of(mesh: DeviceMesh) -> nn.Module:
    stages = [nn.Sequential(Mlp(), Mlp()), nn.Sequential(Mlp(), nn.Linear(WIDTH, 4))]
    return averaged(stages[mesh.get_local_rank("model")], mesh)


def whole_batch(net: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss.detach()

    return step


def pipelined(net: nn.Module, mesh: DeviceMesh) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    number, group = mesh.get_local_rank("model"), mesh["model"].get_group()
    stage = PipelineStage(net, number, 2, torch.device("cpu"), group=group)  # its stages tell each other the shapes
    # What scales the gradients after the backward comes too late for updates in the backward.
    schedule = Schedule1F1B(stage, NUM_CHUNKS, loss_fn=F.cross_entropy, scale_grads=not ORDERS.get("overlap"))

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        return schedule.step(x) if number == 0 else schedule.step(target=y, losses=[])

    return step


def main() -> None:
    torch.set_num_threads(1)
    arm_private_places()
    arm_agreement()
    job = init()
    torch.manual_seed(7)
    layout = ORDERS["model"]
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("data", "shard", "model"))
    net = {"tensor": split_by_hand, "dtensor": split_by_torch, "pipeline": stage_of}[layout](mesh)
    step = pipelined(net, mesh) if layout == "pipeline" else whole_batch(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    overlap = ORDERS.get("overlap", False)
    job.track(model=net, optimizer=optimizer, overlap_update=overlap, exact=overlap)

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        now["iteration"] = job.iteration_number
        loss = step(x, y)
        update([optimizer])
        optimizer.zero_grad()
        return loss

    for number in job.iterations(ITERATIONS):
        # The ranks of one replica see the same batch.
        generator = torch.Generator().manual_seed(100 * number + mesh.get_local_rank("data"))
        x = torch.randn(BATCH, WIDTH, generator=generator)
        train(x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long())
        fault("between", job.iteration_number - 1)
    leave_result(job, net, [optimizer], local)


def local(tensor: Any) -> Any:
    """This rank's part of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


if __name__ == "__main__":
    with open(DIR / f"pids.{RANK}", "a") as stream:
        print(os.getpid(), file=stream)
    main()
    sys.exit(0)
