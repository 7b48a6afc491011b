"""Who changes a parameter: the optimizer, or the script too."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from swift_agent.errors import UsageError
from swift_agent.wire.environment import NO_AGENT
from swift_agent.worker.tracked.tracked import Tracked
from swift_agent.worker.updates.touched import ChangedInSection, TouchedParameters, told


def run(before: Callable[[nn.Module], object], after: Callable[[nn.Module], object]) -> tuple[nn.Module, set[int]]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    touched = TouchedParameters([optimizer])
    for last in (False, True):
        touched.begin(dry_run=False)
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
        touched.begin(dry_run=False)
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
            touched.begin(dry_run=False)
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            touched.end(updated=True)
        assert not touched.found
    finally:
        dist.destroy_process_group()


class TwoSteps(torch.optim.Optimizer):
    """SAM, as it is mostly used: the step is one of the optimizer inside."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)
        self.old: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.old[id(p)] = p.data.clone()
            p.add_(0.05 * p.grad)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.old[id(p)]
        self.base_optimizer.step()
        self.zero_grad()


def tracked_with(optimizer: torch.optim.Optimizer, model: nn.Module) -> Tracked:
    # Under an agent: only there is it looked.
    supervisor = cast(
        Any, SimpleNamespace(enter_step=lambda: None, leave=lambda: None, environment=NO_AGENT, note=print)
    )
    return Tracked({"models": {"m": model}, "optimizers": {"o": optimizer}, "others": {}}, [0, 1], 2, supervisor)


@pytest.mark.parametrize("warm_up", [0, 2])
def test_an_update_without_a_step_is_refused(warm_up: int) -> None:
    """In the first iteration that changes something."""
    model = nn.Linear(3, 2)
    optimizer = TwoSteps(model.parameters(), lr=0.1)
    tracked = tracked_with(optimizer, model)
    for number in range(warm_up + 1):
        optimizer.base_optimizer.param_groups[0]["lr"] = 0.1 if number == warm_up else 0.0
        tracked.begin(number, dry_run=True)  # of a replacement
        tracked.updates.cut()
        tracked.begin(number)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.first_step()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.second_step()
        if number == warm_up:
            with pytest.raises(UsageError, match=r"without a step\(\) of the tracked optimizer \(m.bias, m.weight\)"):
                tracked.check_repeatable()
        else:
            tracked.check_repeatable()


def test_an_iteration_may_change_nothing() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracked = tracked_with(optimizer, model)
    for number in range(6):
        tracked.begin(number)
        if number == 1:
            model.weight.data = model.weight.data.clone()  # elsewhere
        tracked.check_repeatable()


def test_what_a_section_has_changed() -> None:
    """An optimizer's `eval()` that moves parameters (schedule-free): made twice it gives another model."""
    net = torch.nn.Linear(2, 2)
    section = ChangedInSection([torch.optim.SGD(net.parameters(), lr=0.1)])
    section.begin()
    assert net(torch.ones(1, 2)).sum().item() is not None and not section.ids(is_cut=True)
    with torch.no_grad():
        net.bias.lerp_(torch.ones(2), 0.5)
    assert section.ids(is_cut=True) == {id(net.bias)}
    net.weight.data = net.weight.data.clone()
    assert section.ids(is_cut=True) == {id(net.bias), id(net.weight)}


def test_what_a_section_has_changed_by_way_of_data() -> None:
    """Averaged weights are put into a model so, and nothing counts it."""
    first, second, empty = nn.Linear(4, 3), nn.Linear(3, 2).half(), nn.Parameter(torch.empty(0, 2))
    first.weight = nn.Parameter(first.weight.detach().t())  # not contiguous
    first.bias.data.fill_(torch.nan)
    net = nn.ParameterList([*first.parameters(), *second.parameters(), empty])
    section = ChangedInSection([torch.optim.SGD(net.parameters(), lr=0.1)])
    for weights in (first.weight, second.weight):
        section.begin()
        assert not section.ids(is_cut=False)
        kept = weights.data.clone()
        weights.data.mul_(0.5)
        assert section.ids(is_cut=False) == section.ids(is_cut=True) == {id(weights)}
        weights.data.copy_(kept)
        assert not section.ids(is_cut=True)
    # Elsewhere from one section to the next: what is looked at is there, too.
    first.weight.data = first.weight.data.clone()
    section.begin()
    assert not section.ids(is_cut=True)
    first.weight.data.add_(1.0)
    assert section.ids(is_cut=True) == {id(first.weight)}


def test_a_large_model_that_is_exchanged_by_way_of_data() -> None:
    """Some of its parameters are looked at, of whichever kinds its layers have."""
    net = nn.ModuleList([nn.Linear(2, 2) for _ in range(40)])
    section = ChangedInSection([torch.optim.SGD(net.parameters(), lr=0.1)])
    for those in (list(net.parameters()), [layer.bias for layer in net], [layer.weight for layer in net]):
        section.begin()
        for one in those:
            one.data.add_(1.0)
        found = section.ids(is_cut=True)
        assert found and found <= set(map(id, those))
    section.begin()
    assert not section.ids(is_cut=True)


def test_memory_that_a_section_gives_up() -> None:
    """As those do that keep parameters elsewhere for a while; nothing of it is held by who looks at it."""
    net = nn.Linear(4, 3)
    section = ChangedInSection([torch.optim.SGD(net.parameters(), lr=0.1)])
    section.begin()
    net.weight.untyped_storage().resize_(0)
    assert section.ids(is_cut=True) <= {id(net.weight)}
    section.begin()
    net.bias.data.fill_(7.0)
    assert section.ids(is_cut=True) == {id(net.bias)}
    section.end()
    storage = net.bias.untyped_storage()
    held = weakref.ref(storage)
    net.bias.data = torch.zeros(3)
    del storage
    assert held() is None
