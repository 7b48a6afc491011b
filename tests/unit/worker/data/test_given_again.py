"""What an iteration has changed in place is as it was when the iteration runs again."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from swift_agent.worker.data import given_again
from swift_agent.worker.data.given_again import CannotPutBack, GivenAgain


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    labels: torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor


def no_state(thing: Any) -> bool:
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


def shortened(items: Any) -> None:
    items.pop()


def assigned(batch: Batch) -> None:
    batch.x.add_(1)
    batch.x, batch.labels = batch.x * 2, None


def changed_deep_inside(batch: Any) -> None:
    batch[0]["a"][1][0].add_(1)
    batch[0]["a"].append(3)


def last_one_changed(images: list[dict[str, torch.Tensor]]) -> None:
    images[-1]["boxes"].add_(1)


def by_its_views(views: list[torch.Tensor]) -> None:
    for number, view in enumerate(views):
        view.mul_(number + 2)


def doubled(x: torch.Tensor) -> None:
    x.mul_(2)


def itself_in_it() -> list[Any]:
    items: list[Any] = [torch.ones(2)]
    items.append(items)
    return items


def copied(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, numpy.ndarray):
        return x.copy()
    if dataclasses.is_dataclass(x):
        return {field.name: copied(getattr(x, field.name)) for field in dataclasses.fields(x)}
    if x is None:
        return None
    return {k: copied(v) for k, v in x.items()} if hasattr(x, "items") else [copied(v) for v in x]


def same(one: Any, other: Any) -> bool:
    if dataclasses.is_dataclass(one):
        one = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    if one is None or other is None:
        return one is other
    if isinstance(one, torch.Tensor) and one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
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
    "a queue": (shortened, lambda: collections.deque([torch.ones(2), torch.zeros(2)])),
    "an object of a data class": (assigned, lambda: Batch(torch.ones(3), torch.zeros(2))),
    "one that is frozen": (lambda batch: batch.x.add_(1), lambda: Frozen(torch.ones(3))),
    "deep inside": (changed_deep_inside, lambda: [{"a": [torch.ones(1), (torch.ones(2), torch.ones(3))]}]),
    "many images with boxes": (
        last_one_changed, lambda: [{"image": torch.ones(1), "boxes": torch.ones(2)} for _ in range(200)]),
    "views of one tensor": (by_its_views, lambda: (lambda x: [x, x[1:3], x.view(2, 3)[0]])(torch.arange(6.0))),
    "not contiguous": (doubled, lambda: torch.arange(12.0).view(4, 3).t()),
    "sparse": (doubled, lambda: torch.eye(3).to_sparse()),
    "sparse by rows": (doubled, lambda: torch.eye(3).to_sparse_csr()),
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


KINDS: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse by rows": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "quantized by channels": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
    "of MKL-DNN": lambda: torch.ones(2, 2).to_mkldnn(),
    "halves that are complex": lambda: torch.ones(3, dtype=torch.complex64).to(torch.complex32),
    "eight bits": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "four bits": lambda: torch.empty(3, dtype=torch.uint4),
    "nowhere": lambda: torch.empty(3, device="meta"),
    "expanded": lambda: torch.ones(1, 3).expand(2, 3),
    "not a number": lambda: torch.tensor([float("nan")]),
    "empty": lambda: torch.empty(0),
    "a parameter without a shape": nn.UninitializedParameter,
    "an array that cannot be written": lambda: numpy.broadcast_to(numpy.ones(3), (2, 3)),
    "an array of objects": lambda: numpy.array([{"a": 1}], dtype=object),
    "who is in itself": itself_in_it,
}  # fmt: skip


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_what_nothing_has_changed_ends_nobody(make: Callable[[], Any]) -> None:
    again = GivenAgain(no_state)
    for _ in range(3):
        again.begin(make())
        again.run()
        again.add([make()])
        again.run()
        again.end()


def reshaped(array: numpy.ndarray[Any, Any]) -> None:
    array.shape = (3, 2)


TOLD: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], str]] = {
    "several elements at one place": (
        lambda x: x[:, 0].add_(1), lambda: torch.ones(4, 1).expand(4, 3), r"a tensor of shape \[4, 3\]"),
    "turned round": (lambda x: x.t_(), lambda: torch.ones(3, 3), r"a tensor of shape \[3, 3\]"),
    "with a past": (
        lambda x: x.data.add_(1), lambda: torch.ones(3, requires_grad=True) * 2, r"a tensor of shape \[3\]"),
    "an array of another shape": (reshaped, lambda: numpy.arange(6), r"an array of shape \[6\]"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "make", "line"), TOLD.values(), ids=TOLD)
def test_what_cannot_be_put_back_is_told(change: Callable[[Any], Any], make: Callable[[], Any], line: str) -> None:
    again = GivenAgain(no_state)
    for _ in range(2):
        given = make()
        again.begin(given)
        again.run()
        change(given)
        with pytest.raises(CannotPutBack, match=line):
            again.run()
        again.end()


def test_a_gradient_that_a_run_adds_to_is_put_back() -> None:
    again = GivenAgain(no_state)
    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        x.grad = torch.ones(3)
        again.begin(x)
        for _ in range(3):
            again.run()
            assert torch.equal(x.grad, torch.ones(3))
            x.sum().backward()
        again.end()


def test_a_whole_data_set_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_again, "_MAX_BYTES", 100)
    again, small, large = GivenAgain(no_state), torch.ones(8), torch.ones(1000)
    again.begin(large, numpy.ones(1000), small)
    assert [kept.copy is None for kept in again._tensors] == [True, False] and not again._arrays
    again.run()
    again.run()
    large.add_(1)
    with pytest.raises(CannotPutBack, match=r"\[1000\]"):
        again.run()
    again.end()
    again.begin(small)
    assert again._bytes_left == 100 - small.nbytes, "what the iteration before was given is forgotten"


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
    again = GivenAgain(lambda thing: thing is mean)
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
