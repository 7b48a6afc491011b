"""A model of Hugging Face's transformers in a plain loop; it is made from a configuration, nothing is downloaded.

    pip install transformers
    swift-run --standalone --nproc-per-node 2 examples/huggingface.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from models import LENGTH, NUM_WORDS, data_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

import swift_agent as swift

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--out", type=Path)
args = parser.parse_args()

torch.manual_seed(0)
job = swift.init()
data = data_of("bert")
sampler = DistributedSampler(data, job.world_size, job.rank, drop_last=True)
loader = DataLoader(data, 16, sampler=sampler, drop_last=True)
config = BertConfig(
    vocab_size=NUM_WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=LENGTH,
)  # fmt: skip
model = DistributedDataParallel(BertForMaskedLM(config).to(job.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 20, args.epochs * len(loader))
job.track(model=model, optimizer=optimizer, scheduler=scheduler)


@job.iteration
def train(words: torch.Tensor, targets: torch.Tensor) -> None:
    model(input_ids=words, labels=targets).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


for epoch in job.epochs(args.epochs):
    for words, targets in job.batches(loader):
        train(words.to(job.device), targets.to(job.device))
    if job.rank == 0:
        print(f"epoch {epoch + 1}/{args.epochs}", flush=True)
if args.out:
    torch.save(model.module.state_dict(), args.out / f"weights.{job.rank}.pt")
