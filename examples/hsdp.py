"""A sharded model with replicas (FSDP2 on a mesh of two dimensions): two shards of ViT, each on every other worker.

    swift-run --standalone --nproc-per-node 4 examples/hsdp.py

On several machines: as many shards as workers on a machine, so that no machine holds all replicas of a shard.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from models import data_of, loss_of, vit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import swift_agent as swift

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--shards", type=int, default=2)
parser.add_argument("--out", type=Path)
args = parser.parse_args()

torch.manual_seed(0)  # replicas begin with the same parameters
job = swift.init()
data = data_of("vit")
sampler = DistributedSampler(data, job.world_size, job.rank, drop_last=True)
loader = DataLoader(data, 16, sampler=sampler, drop_last=True)
shape = (job.world_size // args.shards, args.shards)
mesh = init_device_mesh(job.device.type, shape, mesh_dim_names=("replicate", "shard"))
model = vit().to(job.device)
for layer in model[1:-2]:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
job.track(model=model, optimizer=optimizer)


@job.iteration
def train(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    loss_of(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


for epoch in job.epochs(args.epochs):
    for inputs, targets in job.batches(loader):
        train(inputs.to(job.device), targets.to(job.device))
    if job.rank == 0:
        print(f"epoch {epoch + 1}/{args.epochs}", flush=True)
if args.out:
    shards = {name: value.to_local() for name, value in model.state_dict().items()}
    torch.save(shards, args.out / f"weights.{job.rank}.pt")
