"""Sharded parameters: who holds the same part, and a part copied to a replica. On torch's fake backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers "fake"
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from swift_recovery.state.sharded import is_sharded, local_of, replicas_of
from swift_recovery.state.training_state import TrainingState


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Worker:
    """A model of odd sizes, sharded in two and replicated in three, with an optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("replicate", "shard"))
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        for layer in self.net:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.state = TrainingState({"net": self.net}, {"adamw": self.optimizer})

    def train(self) -> None:
        self.net(torch.ones(2, 5)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("rank", range(6))
def test_replicas_are_those_along_the_replicated_dimension(rank: int) -> None:
    with as_rank(rank, 6):
        for parameter in Worker(0).net.parameters():
            assert replicas_of(parameter) == [rank % 2, rank % 2 + 2, rank % 2 + 4]


def test_without_a_replicated_dimension_a_rank_is_alone() -> None:
    with as_rank(1, 4):
        net = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,)))
        assert [replicas_of(parameter) for parameter in net.parameters()] == [[1], [1]]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_part_is_copied_with_its_optimizer_state(rank: int, staged: bool, is_new: bool) -> None:
    with as_rank(rank, 6):
        source, target = Worker(1), Worker(2)
        source.train()
        if not is_new:
            target.train()
        parameters = list(target.net.parameters())
        memory = [local_of(parameter).data_ptr() for parameter in parameters]
        outgoing = source.state.collect({"iteration": 1})
        incoming = target.state.prepare(outgoing.manifest, staged)
        for to, tensor in zip(incoming.tensors, outgoing.tensors, strict=True):
            to.copy_(tensor)
        assert incoming.commit() == {"iteration": 1}
        assert [id(parameter) for parameter in target.net.parameters()] == [id(parameter) for parameter in parameters]
        assert [local_of(parameter).data_ptr() for parameter in parameters] == memory, "FSDP holds this memory"
        pairs = zip(source.state.replicated_tensors(), target.state.replicated_tensors(), strict=True)
        assert all(torch.equal(theirs, mine) for theirs, mine in pairs)
        for parameter in parameters:
            entry = target.optimizer.state[parameter]
            assert isinstance(entry["exp_avg"], DTensor) and not is_sharded(entry["step"])
            assert entry["exp_avg"].placements == parameter.placements and entry["exp_avg"].shape == parameter.shape
        source.train(), target.train()
        pairs = zip(source.state.replicated_tensors(), target.state.replicated_tensors(), strict=True)
        assert all(torch.equal(theirs, mine) for theirs, mine in pairs), "both go on alike"
