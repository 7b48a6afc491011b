"""A mask that the forward makes, and makes again for longer sequences, as a buffer; and parameter groups that are made
of sets of parameters, so that their order is another one in each process."""

from __future__ import annotations

import hooks
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import swift_agent as swift


class Attention(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, dim * 3)
        self.register_buffer("mask", None, persistent=False)
        self.max_length = 0

    def get_mask(self, length: int) -> torch.Tensor:
        if length > self.max_length:
            self.max_length = length
            # For each length another one.
            self.register_buffer("mask", torch.ones(length, length).triu(1) * length, persistent=False)
        return self.mask[:length, :length]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return (q @ k.mT - self.get_mask(x.shape[1])).softmax(-1) @ v


def main() -> None:
    hooks.begin()
    torch.manual_seed(0)
    job = swift.init("gloo")
    model = DDP(nn.Sequential(nn.Linear(8, 8), Attention(), nn.Linear(8, 8)), broadcast_buffers=False)
    head = set(model.module[2].parameters())
    others = [torch.zeros(3 + job.rank) for _ in range(50 + 13 * job.rank)]  # other addresses
    rest = set(model.parameters()) - head
    optimizer = torch.optim.AdamW([{"params": list(rest)}, {"params": list(head), "lr": 1e-2}], lr=1e-3)
    assert len(others) > len(rest)
    job.track(model=model, optimizer=optimizer)

    @job.iteration
    def train(number: int) -> None:
        x = torch.randn(4, 4 + number // 2, 8)
        loss = F.mse_loss(model(x), x.flip(2))
        hooks.moment("inside", number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hooks.moment("after", number)

    for number in job.iterations(14):
        hooks.moment("before", number)
        train(number)
    # By name: the numbers of a `state_dict` are those of an order.
    by_name = {name: dict(optimizer.state[one]) for name, one in model.named_parameters()}
    hooks.finish(job, model, by_name, dict(model.named_buffers()))


if __name__ == "__main__":
    main()
