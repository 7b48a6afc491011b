"""Two optimizers, of which one begins later, as a discriminator does (VQGAN's `disc_start`), and a loss that is summed
up for a log after the update.
"""

from __future__ import annotations

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift

START = 10


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    coder = DDP(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 8)))
    critic = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer, critic_optimizer = [torch.optim.Adam(one.parameters(), lr=1e-2) for one in (coder, critic)]
    job.track(model=[coder, critic], optimizer=[optimizer, critic_optimizer])

    @job.iteration
    def train(x: torch.Tensor) -> float:
        number = job.iteration_number
        made = coder(x)
        loss = F.mse_loss(made, x)
        hooks.moment("inside", number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number >= START:
            critic_optimizer.zero_grad()
            (critic(made.detach()) - critic(x)).mean().backward()
            critic_optimizer.step()
        hooks.moment("after", number)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item()

    for number in job.iterations(12):
        hooks.moment("before", number)
        train(torch.randn(8, 8))
    hooks.finish(job, coder, critic, optimizer, critic_optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
