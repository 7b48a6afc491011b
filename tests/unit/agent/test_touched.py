"""Who changes a parameter: the optimizer, or the script too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from swift_agent.touched import TouchedParameters, told


def run(before: Callable[[nn.Module], object], after: Callable[[nn.Module], object]) -> tuple[nn.Module, set[int]]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    touched = TouchedParameters([optimizer])
    for last in (False, True):
        touched.begin(ghost=False)
        before(model)
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        after(model)
        assert touched.end(updated=True) is last
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    return model, touched.found


def decay(model: nn.Module) -> None:
    with torch.no_grad():
        model.weight.mul_(0.99)


def decay_data(model: nn.Module) -> None:
    model.weight.data.mul_(0.99)


def nothing(model: nn.Module) -> None: ...


@pytest.mark.parametrize("change", [decay, decay_data])
@pytest.mark.parametrize("is_before", [True, False], ids=["before the update", "after it"])
def test_a_change_by_the_script_is_found(change: Callable[[nn.Module], object], is_before: bool) -> None:
    model, found = run(change, nothing) if is_before else run(nothing, change)
    assert found == {id(model.weight)}


def test_the_optimizer_is_no_script() -> None:
    assert run(nothing, nothing)[1] == set()


def test_two_optimizers_may_share_one() -> None:
    model = nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([model.weight], lr=0.1)]
    touched = TouchedParameters(optimizers)
    for _ in range(2):
        touched.begin(ghost=False)
        model(torch.ones(4, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        touched.end(updated=True)
    assert not touched.found


def test_few_are_named() -> None:
    assert "(a, b)" in told(["a", "b"]) and "(a, b, c and 2 more)" in told(["a", "b", "c", "d", "e"])


def test_shards_are_changed_by_their_optimizer_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        for layer in net:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        touched = TouchedParameters([optimizer])
        for _ in range(2):
            touched.begin(ghost=False)
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            touched.end(updated=True)
        assert not touched.found
    finally:
        dist.destroy_process_group()
