"""Who changes a parameter: the optimizer, or the script too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

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
