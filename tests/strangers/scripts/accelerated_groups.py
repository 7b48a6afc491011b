"""Accelerate's `accumulate()` around each batch of an update; the last update of a pass has fewer.

accelerated_groups.py [single] [each]    single: the iteration is given one batch. each: gradients are reduced in each
"""

from __future__ import annotations

import sys

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import swift_agent as swift

EPOCHS, BATCHES, SIZE, STEPS = 4, 7, 4, 3


def main() -> None:
    hooks.begin()
    job = swift.init()
    plugin = GradientAccumulationPlugin(num_steps=STEPS, sync_each_batch="each" in sys.argv)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2 * BATCHES * SIZE, 8), torch.randint(3, (2 * BATCHES * SIZE,)))
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.95)
    model, optimizer, loader, scheduler = accelerator.prepare(
        net, inner, DataLoader(data, SIZE, shuffle=True), schedule
    )
    job.track(model=model, optimizer=optimizer, scheduler=scheduler)

    @job.iteration
    def train(batches: list[list[torch.Tensor]]) -> None:
        number = job.iteration_number
        for at, (x, y) in enumerate(batches):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                if at + 1 == min(2, len(batches)):
                    hooks.moment("inside", number)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        hooks.moment("after", number)

    for _ in job.epochs(EPOCHS):
        if "single" in sys.argv:
            for batch in job.batches(loader):
                hooks.moment("before", job.iteration_number)
                train([batch])
            continue
        for group in job.batches(loader, group=STEPS):
            hooks.moment("before", job.iteration_number)
            train(group)
    hooks.finish(job, net, inner, scheduler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
