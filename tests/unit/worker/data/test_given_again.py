"""What an iteration has changed in place is as it was when the iteration runs again."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from swift_agent.worker.data.given_again import CannotPutBack, GivenAgain


def no_state(tensor: torch.Tensor) -> bool:
    return False


def mixed(x: torch.Tensor) -> None:
    x.mul_(0.3).add_(x.flip(0))


def taken_apart(batch: Any) -> None:
    batch.pop("labels")
    batch["x"] = batch["x"] + 1


def normalised(x: torch.Tensor) -> None:
    x.numpy()[...] -= 1.0


def penalised(x: torch.Tensor) -> None:
    x.requires_grad_()
    (x**2).sum().backward()


def in_the_graph(x: torch.Tensor) -> None:
    x.mul_(nn.Parameter(torch.ones(3)))


def of_an_array(x: numpy.ndarray[Any, Any]) -> None:
    x *= 2


def shortened(items: list[Any]) -> None:
    items.pop()


def copied(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, numpy.ndarray):
        return x.copy()
    return {k: copied(v) for k, v in x.items()} if hasattr(x, "items") else [copied(v) for v in x]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and not one.requires_grad and one.grad is None and one.grad_fn is None
    if isinstance(one, numpy.ndarray):
        return bool((one == other).all())
    if hasattr(one, "items"):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    return len(one) == len(other) and all(map(same, one, other))


CASES: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {
    "mixed": (mixed, lambda: torch.arange(6.0).view(2, 3)),
    "taken apart": (taken_apart, lambda: {"x": torch.ones(2), "labels": torch.zeros(2)}),
    "a mapping that is no dict": (
        taken_apart, lambda: collections.UserDict({"x": torch.ones(2), "labels": torch.zeros(2)})),
    "by way of numpy": (normalised, lambda: torch.arange(6.0)),
    "a gradient of its own": (penalised, lambda: torch.arange(3.0)),
    "in the graph": (in_the_graph, lambda: torch.arange(3.0)),
    "an array": (of_an_array, lambda: numpy.arange(4)),
    "a list": (shortened, lambda: [torch.ones(2), torch.zeros(2)]),
    "made in inference mode": (lambda x: _inferred(mixed, x), lambda: _inferred(lambda: torch.arange(6.0).view(2, 3))),
}  # fmt: skip


def _inferred(function: Callable[..., Any], *args: Any) -> Any:
    with torch.inference_mode():
        return function(*args)


@pytest.mark.parametrize(("change", "make"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("drawn", [False, True], ids=["given", "taken inside"])
def test_each_run_is_given_the_same(change: Callable[[Any], None], make: Callable[[], Any], drawn: bool) -> None:
    again = GivenAgain(no_state)
    for _ in range(3):  # that it changes it is known after the first, and copies go on
        batch = make()
        before = copied(batch)
        again.begin(*(() if drawn else (batch,)))
        for number in range(3):
            again.run()
            if drawn and number == 0:
                again.add(batch)
            assert same(batch, before), f"run {number}"
            change(batch)
            assert not same(batch, before)
        again.end()


def test_who_changes_nothing_pays_no_copies_and_is_told_if_it_does_later() -> None:
    again, x = GivenAgain(no_state), torch.ones(3)
    again.begin(x)
    again.run()
    again.end()
    again.begin(x)
    assert all(kept.copy is None for kept in again._tensors) and not again._arrays
    again.run()
    again.run()  # nothing was changed: nothing is said
    x.add_(1)
    with pytest.raises(CannotPutBack, match=r"a tensor of shape \[3\]"):
        again.run()
    again.end()
    again.begin(x)
    again.run()
    x.add_(1)
    again.run()  # from there on it is kept
    assert torch.equal(x, torch.full((3,), 2.0))
    again.end()
    assert not again._tensors, "nothing is kept alive between iterations"


def test_state_of_the_job_is_left_alone() -> None:
    """A run whose update is made already comes again for its result: with the state after the update."""
    model = nn.BatchNorm1d(2)
    mean = model.running_mean
    assert mean is not None
    again = GivenAgain(lambda tensor: tensor is mean)
    again.begin(model.weight, mean)
    again.run()
    with torch.no_grad():
        model.weight.add_(1)
        mean.add_(1)
    again.run()
    assert torch.equal(model.weight, torch.full((2,), 2.0)) and torch.equal(mean, torch.ones(2))


def test_another_shape_cannot_be_put_back() -> None:
    again, x = GivenAgain(no_state), torch.ones(3)
    again.begin(x)
    again.run()
    x.unsqueeze_(0)
    with pytest.raises(CannotPutBack, match=r"\[3\]"):
        again.run()


def test_what_belongs_to_an_optimizer_is_left_alone() -> None:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(layer.parameters())
    again = GivenAgain(no_state)
    again.begin(optimizer.param_groups, optimizer.param_groups[0])
    again.run()
    optimizer.param_groups[0]["lr"] = 0.5
    again.run()
    assert optimizer.param_groups[0]["lr"] == 0.5
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    again.begin(optimizer.state)
    again.run()
    optimizer.state[layer.weight] = {}
    again.run()
    assert optimizer.state[layer.weight] == {}


def test_many_things_are_not_gone_through() -> None:
    again = GivenAgain(no_state)
    again.begin(list(range(1_000_000)), torch.ones(1))
    assert not again._lists and len(again._tensors) == 1
