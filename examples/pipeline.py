"""BERT in stages (1F1B), each on one worker, or on several with --replicas: pipeline parallel, or data and pipeline.

    swift-run --standalone --nproc-per-node 2 examples/pipeline.py --checkpoints /shared/run
    swift-run --standalone --nproc-per-node 4 examples/pipeline.py --checkpoints /shared/run --replicas 2

A stage without replicas is computed again from the messages of its neighbours, which `--log-store s3://BUCKET/PREFIX`
of swift-run keeps in a bucket. It takes the compiled library (`swiftctl native build`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from models import bert, data_of, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import swift_agent as swift

NUM_MICRO_BATCHES, BATCH = 4, 32

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=100)
parser.add_argument("--replicas", type=int, default=1)
parser.add_argument("--checkpoints", required=True)
parser.add_argument("--out", type=Path)
args = parser.parse_args()

job = swift.init()
num_stages = job.world_size // args.replicas
mesh = init_device_mesh(job.device.type, (num_stages, args.replicas), mesh_dim_names=("stage", "replica"))
number, replica = mesh.get_local_rank("stage"), mesh.get_local_rank("replica")
torch.manual_seed(0)  # replicas of a stage begin with the same parameters
layers = list(bert())
size = -(-len(layers) // num_stages)
module: nn.Module = nn.Sequential(*layers[number * size : (number + 1) * size]).to(job.device)
if args.replicas > 1:
    module = DistributedDataParallel(module, process_group=mesh.get_group("replica"))
stage = PipelineStage(module, number, num_stages, job.device, group=mesh.get_group("stage"))
schedule = Schedule1F1B(stage, NUM_MICRO_BATCHES, loss_fn=loss_of)
optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
job.track(model=stage, optimizer=optimizer)
job.checkpoint(args.checkpoints, every=50)
inputs, targets = (part.to(job.device) for part in data_of("bert").tensors)


@job.iteration
def train(t: int) -> None:
    chosen = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(t))
    mine = chosen[replica * BATCH : (replica + 1) * BATCH].to(job.device)
    first = [inputs[mine]] if number == 0 else []
    last = {"target": targets[mine]} if number == num_stages - 1 else {}
    schedule.step(*first, **last)
    optimizer.step()
    optimizer.zero_grad()


for t in job.iterations(args.iterations):
    train(t)
    if job.rank == 0 and t % 20 == 0:
        print(f"iteration {t}/{args.iterations}", flush=True)
if args.out:
    torch.save(module.state_dict(), args.out / f"weights.{job.rank}.pt")
