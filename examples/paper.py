"""Wide-ResNet, ViT and BERT, data parallel, with bfloat16 and accumulated gradients if asked for.

    swift-run --standalone --nproc-per-node 2 examples/paper.py wide-resnet
    swift-run --standalone --nproc-per-node 2 examples/paper.py vit --bfloat16 --accumulate 2

As in SWIFT's evaluation, Wide-ResNet is trained with SGD and momentum, the others with Adam.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import torch
from models import MODELS, data_of, loss_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import swift_agent as swift

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=MODELS)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--bfloat16", action="store_true", help="autocast, and scaled losses")
parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches for each update")
parser.add_argument("--out", type=Path)
args = parser.parse_args()

torch.manual_seed(0)
job = swift.init()
data = data_of(args.model)
sampler = DistributedSampler(data, job.world_size, job.rank, drop_last=True)
loader = DataLoader(data, 16, sampler=sampler, drop_last=True)
model = DistributedDataParallel(MODELS[args.model]().to(job.device))
if args.model == "wide-resnet":
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(job.device.type, enabled=args.bfloat16)
job.track(model=model, optimizer=optimizer, scaler=scaler)


@job.iteration
def train(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """One update; gradients are added up over the batches, and reduced with the last one."""
    for number, (inputs, targets) in enumerate(batches):
        is_last = number == len(batches) - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            with torch.autocast(job.device.type, torch.bfloat16, enabled=args.bfloat16):
                outputs = model(inputs.to(job.device))
            scaler.scale(loss_of(outputs.float(), targets.to(job.device)) / len(batches)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


for epoch in job.epochs(args.epochs):
    for batches in job.batches(loader, group=args.accumulate):
        train(batches)
    if job.rank == 0:
        print(f"epoch {epoch + 1}/{args.epochs}", flush=True)
if args.out:
    torch.save(model.module.state_dict(), args.out / f"weights.{job.rank}.pt")
