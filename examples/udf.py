"""The form of the SWIFT paper: the script gives one function of the number of the iteration, and the job calls it.

    swift-run --standalone --nproc-per-node 2 examples/udf.py

Nothing else says where training is, so batches are chosen by that number.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from models import data_of, loss_of, wide_resnet
from torch.nn.parallel import DistributedDataParallel

import swift_agent as swift

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=100)
parser.add_argument("--out", type=Path)
args = parser.parse_args()

torch.manual_seed(0)
job = swift.init()
images, labels = data_of("wide-resnet").tensors
model = DistributedDataParallel(wide_resnet().to(job.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
job.track(model=model, optimizer=optimizer)


def train_iter(t: int) -> None:
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(t))
    mine = chosen[job.rank * 16 : (job.rank + 1) * 16]
    loss_of(model(images[mine].to(job.device)), labels[mine].to(job.device)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if job.rank == 0 and t % 20 == 0:
        print(f"iteration {t}/{args.iterations}", flush=True)


job.run(train_iter, iterations=args.iterations)
if args.out:
    torch.save(model.module.state_dict(), args.out / f"weights.{job.rank}.pt")
