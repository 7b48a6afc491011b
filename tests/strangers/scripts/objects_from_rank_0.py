"""Rank 0 draws the size of the images of an iteration for all, and works out a metric for all in a validation; both are
sent as objects. An average of the weights is in an object that is no module, as diffusers' EMAModel, and one of two
networks is frozen while the other has its turn, as in a GAN.
"""

from __future__ import annotations

from typing import Any

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift


class EMAModel:
    def __init__(self, model: nn.Module) -> None:
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def step(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.shadow, model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = [tensor.clone() for tensor in state["shadow"]]


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    generator = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12)))
    discriminator = DDP(nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Conv1d(4, 1, 3)))
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-2) for one in (generator, discriminator)]
    ema = EMAModel(generator)
    job.track(model=[generator, discriminator], optimizer=optimizers, ema=ema)

    @job.iteration
    def train(real: torch.Tensor) -> float:
        number = job.iteration_number
        sizes = [int(torch.randint(6, 13, ())) if job.rank == 0 else None]
        dist.broadcast_object_list(sizes, src=0)
        size = sizes[0]
        assert size is not None
        generator.requires_grad_(False)
        discriminator.requires_grad_(True)
        fake = generator(torch.randn(4, 8))[:, None, :size]
        loss = F.softplus(discriminator(fake)).mean() + F.softplus(-discriminator(real[:, None, :size])).mean()
        hooks.moment("inside", number)
        loss.backward()
        discriminator.requires_grad_(False)
        generator.requires_grad_(True)
        fooled = F.softplus(-discriminator(generator(torch.randn(4, 8))[:, None, :size])).mean()
        fooled.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ema.step(generator)
        hooks.moment("after", number)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return size * total.item()

    @job.resilient
    def validate() -> float:
        metrics = [[{"of": rank, "mean": ema.shadow[0].mean().item()}] for rank in range(job.world_size)]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, metrics if job.rank == 0 else None, src=0)
        (metric,) = mine[0]
        assert metric["of"] == job.rank
        mean: float = metric["mean"]
        return mean

    for number in job.iterations(12):
        hooks.moment("before", number)
        train(torch.randn(4, 12))
        if number % 2:
            validate()
    hooks.finish(job, generator, discriminator, *optimizers, ema)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
