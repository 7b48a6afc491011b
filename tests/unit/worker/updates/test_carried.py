"""Gradients that go from one iteration into the next: which ways to clear them there are, and none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from swift_agent.errors import UsageError
from swift_agent.worker.updates.carried import CarriedGradients


class Script:
    def __init__(self) -> None:
        self.model, self.other = nn.Linear(3, 2), nn.Linear(2, 1)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.model, self.other)]
        self.carried = CarriedGradients(self.optimizers)

    def iteration(self, clear: Callable[[], object], *, updated: bool = True) -> bool:
        self.carried.begin(dry_run=False)
        clear()
        for _ in range(2):  # accumulated
            self.other(self.model(torch.ones(4, 3))).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return self.carried.end(updated=updated)

    def by_hand(self) -> None:
        for parameter in [*self.model.parameters(), *self.other.parameters()]:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def to_none(self) -> None:
        for parameter in [*self.model.parameters(), *self.other.parameters()]:
            parameter.grad = None

    def by_optimizers(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)

    def by_models(self) -> None:
        for model in (self.model, self.other):
            model.zero_grad()

    def after_another_backward(self) -> None:
        self.other(self.model(torch.ones(1, 3))).sum().backward()
        self.by_models()


@pytest.mark.parametrize("way", ["by_hand", "to_none", "by_optimizers", "by_models", "after_another_backward"])
def test_who_clears_them_is_left_alone(way: str) -> None:
    script = Script()
    clear = getattr(script, way)
    assert [script.iteration(clear), script.iteration(clear)] == [False, True]
    assert all("zero_grad" not in vars(optimizer) for optimizer in script.optimizers)
    assert nn.Module.zero_grad.__module__ == "torch.nn.modules.module"
    assert not any(parameter._backward_hooks for parameter in script.model.parameters())


def test_who_never_clears_them_is_told() -> None:
    script = Script()
    script.iteration(lambda: None)
    with pytest.raises(UsageError, match=r"Call optimizer\.zero_grad\(\) in each iteration"):
        script.iteration(lambda: None)


def test_what_an_iteration_without_an_update_has_left_is_no_mistake() -> None:
    """It is accumulated over several."""
    script = Script()
    for _ in range(3):
        assert not script.iteration(lambda: None, updated=False)


def test_a_cut_iteration_and_a_dry_run_say_nothing() -> None:
    script = Script()
    script.iteration(script.by_models)
    script.carried.begin(dry_run=False)  # cut: no end
    script.carried.begin(dry_run=True)
    script.other(script.model(torch.ones(4, 3))).sum().backward()
    assert not script.iteration(lambda: None)
    script.by_models()
    assert script.iteration(lambda: None)


def test_shards_add_to_theirs_without_hooks() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("r", "s")))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for clear in (None, optimizer.zero_grad, lambda: [p.grad.to_local().zero_() for p in model.parameters()]):
            carried = CarriedGradients([optimizer], [model])
            for last in (False, True):
                carried.begin(dry_run=False)
                if clear is not None and last:
                    clear()
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
                if clear is None and last:
                    with pytest.raises(UsageError, match="zero_grad"):
                        carried.end(updated=True)
                else:
                    assert carried.end(updated=True) is last
    finally:
        dist.destroy_process_group()


def test_parts_of_tensor_parallel_modules_are_told_too() -> None:
    """They are DTensors, as FSDP's, and no module of FSDP's is around them: autograd itself adds to their gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = parallelize_module(nn.Linear(3, 2), init_device_mesh("cpu", (1,)), ColwiseParallel())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for clear in (None, optimizer.zero_grad):
            carried = CarriedGradients([optimizer])
            for last in (False, True):
                carried.begin(dry_run=False)
                if clear is not None:
                    clear()
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
                if clear is None and last:
                    with pytest.raises(UsageError, match="zero_grad"):
                        carried.end(updated=True)
                else:
                    assert carried.end(updated=True) is last
            assert not any(parameter._backward_hooks for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
