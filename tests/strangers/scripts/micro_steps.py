"""Accumulation over micro-steps in which the script itself switches DDP's reduction on for the last one, with a scaler,
clipping, a cosine schedule and, if asked for, a compiled model whose gradients travel in half precision.

micro_steps.py [compiled | outside]: the model, or what DDP has made of it.
"""

from __future__ import annotations

import math
import sys

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift

MICRO_STEPS, MAX_ITERS, BLOCK = 3, 12, 8


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.drop = nn.Embedding(17, 16), nn.Dropout(0.1)
        self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 17, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, index: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.wte(index))
        return F.cross_entropy(self.head(x + self.block(x)).flatten(0, 1), targets.flatten())


def get_lr(number: int) -> float:
    return 1e-3 + 0.5 * (1.0 + math.cos(math.pi * number / MAX_ITERS)) * 1e-2


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(1337)
    data = torch.randint(17, (4096,))
    model = Gpt()
    raw_model = model
    if "compiled" in sys.argv:
        model = torch.compile(model, backend="aot_eager")
    model = DDP(model)
    if "outside" in sys.argv:
        model = torch.compile(model, backend="aot_eager")
    if "compiled" in sys.argv:
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    job.track(model=model, optimizer=optimizer, scaler=scaler)

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.stack([data[i : i + BLOCK + 1] for i in torch.randint(len(data) - BLOCK, (4,))])
        return rows[:, :-1], rows[:, 1:]

    @job.iteration
    def train(iter_num: int) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        for micro_step in range(MICRO_STEPS):
            model.require_backward_grad_sync = micro_step == MICRO_STEPS - 1
            loss = model(*get_batch()) / MICRO_STEPS
            if micro_step == MICRO_STEPS - 1:
                hooks.moment("inside", iter_num)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        hooks.moment("after", iter_num)
        return loss

    for iter_num in job.iterations(MAX_ITERS):
        hooks.moment("before", iter_num)
        train(iter_num)
    hooks.finish(job, raw_model, optimizer, scaler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
