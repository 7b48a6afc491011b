"""An exponential moving average of the weights, updated after each step, as recipes for images and diffusion keep it.

averaged_copy.py models: a copy by hand, among the tracked models; swa: torch's AveragedModel, under a name of its own.
late: after a metric that ranks exchange; with a momentum encoder, which is updated before the forward. twice: before
the forward, and after that metric.
"""

from __future__ import annotations

import copy
import sys

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import swift_agent as swift


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if "models" in sys.argv:
        ema = copy.deepcopy(net).requires_grad_(False)
        job.track(model=[model, ema], optimizer=optimizer)
    else:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        job.track(model=model, optimizer=optimizer, ema=ema)

    key = copy.deepcopy(net).requires_grad_(False).eval() if "late" in sys.argv else None
    if key is not None:
        job.track(key=key)

    def update_ema() -> None:
        if isinstance(ema, AveragedModel):
            ema.update_parameters(model)
            return
        with torch.no_grad():
            for mine, theirs in zip(ema.parameters(), net.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        number = job.iteration_number
        if "twice" in sys.argv:
            update_ema()
        if key is not None:
            for mine, theirs in zip(key.parameters(), net.parameters(), strict=True):
                mine.data.mul_(0.9).add_(0.1 * theirs.data)
            key(x)
        loss = F.cross_entropy(model(x), y)
        hooks.moment("inside", number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if key is None and "twice" not in sys.argv:
            update_ema()
        hooks.moment("after", number)
        total = loss.detach().clone()
        dist.all_reduce(total)
        if key is not None or "twice" in sys.argv:
            update_ema()
        return total

    for _ in job.iterations(12):
        hooks.moment("before", job.iteration_number)
        train(torch.randn(8, 16), torch.randint(4, (8,)))
    hooks.finish(job, model, ema, optimizer, *([] if key is None else [key]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
