"""A validation that is due by a flag, which it clears itself, as callbacks of trainers do; then it saves.

section_by_a_flag.py [tracked]     tracked: the flag is among what is tracked
"""

from __future__ import annotations

import sys
from typing import Any

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift


class Control:
    def __init__(self) -> None:
        self.should_evaluate, self.best = False, float("inf")

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    control = Control()
    named = {"control": control} if "tracked" in sys.argv else {}
    job.track(model=model, optimizer=optimizer, **named)

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    @job.resilient
    def evaluate_and_save(x: torch.Tensor, y: torch.Tensor) -> None:
        number = job.iteration_number
        hooks.moment("before", number)
        if control.should_evaluate:
            with torch.no_grad():
                loss = F.cross_entropy(model.module(x), y)
            everyone = [torch.zeros(()) for _ in range(job.world_size)]
            dist.all_gather(everyone, loss)
            hooks.moment("inside", number)
            control.best = min(control.best, torch.stack(everyone).mean().item())
            control.should_evaluate = False
        hooks.moment("after", number)
        dist.barrier()  # rank 0 saves

    for number in job.iterations(12):
        train(torch.randn(8, 16), torch.randint(4, (8,)))
        if number % 3 == 2:
            control.should_evaluate = True
            evaluate_and_save(torch.randn(8, 16), torch.randint(4, (8,)))
    hooks.finish(job, model, optimizer, control.best)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
