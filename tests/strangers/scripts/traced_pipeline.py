"""A model that is traced and cut into two stages by torch, under GPipe, as its introduction to pipelines has it.

traced_pipeline.py [static]: a hand-made stage whose shapes are given instead.
"""

from __future__ import annotations

import sys

import hooks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, SplitPoint, pipeline

import swift_agent as swift

DIM, CHUNKS, BATCH = 16, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2, self.norm = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.lin2(torch.relu(self.lin1(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    hooks.begin()
    job = swift.init()
    torch.manual_seed(0)
    net, example = Net(), torch.randn(BATCH // CHUNKS, DIM)
    if "static" in sys.argv:
        half = nn.Sequential(*net.layers[2 * job.rank : 2 * job.rank + 2])
        arrives, leaves = example.clone().requires_grad_(job.rank > 0), example.clone().requires_grad_()
        stage = PipelineStage(half, job.rank, 2, job.device, input_args=(arrives,), output_args=(leaves,))
    else:
        pipe = pipeline(net, mb_args=(example,), split_spec={"layers.2": SplitPoint.BEGINNING})
        stage = pipe.build_stage(job.rank, job.device)
    schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-2)
    job.track(model=stage, optimizer=optimizer)

    @job.iteration
    def train(x: torch.Tensor) -> None:
        number = job.iteration_number
        optimizer.zero_grad()
        hooks.moment("inside", number)
        if job.rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.flip(-1))
        optimizer.step()
        hooks.moment("after", number)

    for number in job.iterations(12):
        hooks.moment("before", number)
        train(torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(number)))
    hooks.finish(job, stage.submod, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
