"""A loop that a library has prepared: model and optimizer are its wrappers, and the backward is its call.

library_wrappers.py accelerate | fabric
"""

from __future__ import annotations

import sys
from typing import Any

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import swift_agent as swift


def accelerated(net: nn.Module, optimizer: Any, scheduler: Any) -> tuple[Any, Any, Any, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    return model, optimizer, scheduler, accelerator.backward


def set_up_by_fabric(net: nn.Module, optimizer: Any, scheduler: Any) -> tuple[Any, Any, Any, Any]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=1, num_nodes=dist.get_world_size())
    fabric.launch()
    model, optimizer = fabric.setup(net, optimizer)
    return model, optimizer, scheduler, fabric.backward


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4))
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    prepare = accelerated if "accelerate" in sys.argv else set_up_by_fabric
    model, optimizer, scheduler, backward = prepare(net, inner, torch.optim.lr_scheduler.ExponentialLR(inner, 0.95))
    job.track(model=model, optimizer=optimizer, scheduler=scheduler)

    @job.iteration
    def training_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        number = job.iteration_number

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            hooks.moment("inside", number)
            backward(loss)
            return loss

        if "fabric" in sys.argv:
            loss = optimizer.step(closure)
        else:
            loss = closure()
            optimizer.step()
        scheduler.step()
        hooks.moment("after", number)
        return loss

    for _ in job.iterations(12):
        hooks.moment("before", job.iteration_number)
        training_step(torch.randn(8, 16), torch.randint(4, (8,)))
    hooks.finish(job, net, inner)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
