"""What an iteration changes and carries on, wherever the script keeps it; and what is no business of anybody's."""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from swift_agent.worker.job.changed_values import uses_of
from swift_agent.worker.job.own_values import OwnValues

count, beta = 0, 1.0
history: list[float] = []
state: dict[str, Any] = {"updates": 0, "loss": 0.0}
draws, numpy_draws, torch_draws = random.Random(1), numpy.random.default_rng(1), torch.Generator()
average = torch.zeros(100)
small = numpy.zeros(2)


@dataclass
class Meter:
    total: float = 0.0
    last: float = 0.0
    parts: list[float] = field(default_factory=list)

    def update(self, value: float) -> None:
        self.last = value
        self.total += value


class Slotted:
    __slots__ = ("total",)
    seen = 0

    def __init__(self) -> None:
        self.total = 0.0


meter, slotted = Meter(), Slotted()
unknown, no_numbers = float("nan"), torch.full((2,), float("nan"))


def helper(x: float) -> float:
    global count
    count += 1
    return x * count


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.seen += 1
        return self.layer(x) * min(1.0, self.calls / 10)


net, teacher = Net(), Net()


def by_a_helper(x: float) -> float:
    return helper(x)


def by_an_attribute(x: float) -> float:
    meter.update(x)
    return x


def by_slots(x: float) -> float:
    slotted.total += x
    return slotted.total


def by_a_class(x: float) -> float:
    Slotted.seen += 1
    return x


def by_a_list(x: float) -> float:
    history.append(x)
    return sum(history)


def by_a_key(x: float) -> float:
    state["updates"] += 1
    state["loss"] = x  # set by each call, read by none
    return float(state["updates"])


def by_draws(x: float) -> float:
    return x + draws.random() + numpy_draws.random() + torch.rand(1, generator=torch_draws).item()


def by_memory(x: float) -> float:
    average.mul_(0.9)
    small[0] += x
    return float(average.sum())


def by_the_model(x: float) -> float:
    return float(net(torch.tensor([x])).detach())


def by_another_model(x: float) -> float:
    with torch.no_grad():
        teacher.layer.weight.mul_(0.9)
    return x


def by_a_default(x: float, *, kept: list[float] = []) -> float:  # noqa: B006
    kept.append(x)
    return sum(kept)


def by_nothing(x: float) -> float:
    """Its own variables, results that each call sets first, and what libraries keep."""
    logging.getLogger("script").debug("x")
    meter.last = x
    own = Meter()
    own.update(x)
    return own.total + meter.last + bool(unknown == no_numbers[0])


def by_what_it_sets_at_once(x: float) -> float:
    """And the functions that it calls read."""
    global beta
    beta = x
    state["loss"] = x
    return reader()


def by_what_it_sets_too_late(x: float) -> float:
    loss = reader()
    state["loss"] = x
    return loss


def reader() -> float:
    return beta * float(state["loss"])


def now_and_then(x: float) -> float:
    """As caches do that are filled at first."""
    if len(history) < 2:
        history.append(x)
    return x


def notes_of(function: Callable[..., Any], *args: Any, known: tuple[Any, ...] = (), num: int = 3) -> list[str]:
    notes: list[str] = []
    own = OwnValues(notes.append)
    own.begin(known)
    for number in range(num):
        own.run(function, (*args, float(number + 1)), {})
    return notes


arguments, simple = argparse.Namespace(step=0, device="cpu"), SimpleNamespace(parts={"n": 0})
ticks, global_step = itertools.count(), 0
hooked = nn.Sequential(nn.Linear(1, 1))


def noisy(module: nn.Module, inputs: Any, output: Any) -> Any:
    history.append(1.0)
    return output


hooked[0].register_forward_hook(noisy)


def by_a_namespace(x: float) -> float:
    arguments.step += 1
    return x * arguments.step


def by_a_simple_one(x: float) -> float:
    simple.parts["n"] += 1
    return x * simple.parts["n"]


def by_a_count(x: float) -> float:
    return x * next(ticks)


def by_a_hook(x: float) -> float:
    return float(hooked(torch.tensor([x])).detach())


def of_a_dict(given: dict[str, Any], x: float) -> float:
    given["n"] = given.get("n", 0) + 1
    return x * float(given["n"])


def reads_a_global(x: float) -> float:
    return x * global_step


def is_given_numbers(x: float, beta: float = 0.0, *, number: int = 0) -> float:
    return x * beta * number


# As the job's own frames are, which are none of the script's.
through = eval("lambda own, function: lambda *args, **named: own.run(function, args, named)")


def body_of(kind: str) -> list[str]:
    global global_step
    notes: list[str] = []
    own = OwnValues(notes.append)
    own.begin(())
    train, reads = through(own, is_given_numbers), through(own, reads_a_global)
    count = 0.0
    for number in range(5):
        if kind == "counts":
            count += 0.5
            train(1.0, count)
        elif kind == "counts by name":
            train(1.0, beta=count)
            count += 0.5
        elif kind == "of the job":
            train(1.0, number / 5, number=number)
        elif kind == "the same":
            train(1.0, count)
        elif kind == "reads":
            reads(1.0)
        global_step += 1
    return notes


@pytest.mark.parametrize(
    ("kind", "named"),
    [("counts", "is_given_numbers() uses beta, "), ("counts by name", "is_given_numbers() uses beta, "),
     ("reads", "reads_a_global() uses global_step, ")],
)  # fmt: skip
def test_what_the_body_of_the_loop_carries_on(kind: str, named: str) -> None:
    (said,) = body_of(kind)
    assert said.startswith(f"{named}which the body of the loop carries on: in a replacement that starts over"), said


@pytest.mark.parametrize("kind", ["of the job", "the same"])
def test_numbers_of_the_job_are_not_told(kind: str) -> None:
    assert body_of(kind) == []


def test_a_mapping_is_told_if_the_same_one_is_given_again() -> None:
    kept: dict[str, Any] = {}
    (said,) = notes_of(of_a_dict, kept)
    assert said.startswith("of_a_dict() changes given['n']: "), said
    notes: list[str] = []
    own = OwnValues(notes.append)
    own.begin(())
    for _ in range(4):  # a batch, whose memory the next one has
        own.run(of_a_dict, ({"n": 1}, 1.0), {})
    assert notes == []
    assert notes_of(of_a_dict, {"n": 1, "image": torch.zeros(2)}) == []


@pytest.fixture(autouse=True)
def _as_at_first() -> None:
    global count
    count = 0
    history.clear()
    meter.total, meter.last, state["updates"] = 0.0, 0.0, 0


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (by_a_helper, "count"),
        (by_an_attribute, "meter.total"),
        (by_slots, "slotted.total"),
        (by_a_class, "Slotted.seen"),
        (by_a_list, "history"),
        (by_a_key, "state['updates']"),
        (by_draws, "draws, numpy_draws, torch_draws"),
        (by_memory, "average, small"),
        (by_the_model, "Net.calls"),
        (by_what_it_sets_too_late, "state['loss']"),
        (by_another_model, "teacher.layer.weight"),
        (by_a_default, "by_a_default.__defaults__"),
        (by_a_namespace, "arguments.step"),
        (by_a_simple_one, "simple.parts['n']"),
        (by_a_count, "ticks"),
        (by_a_hook, "history"),
    ],
)
def test_what_an_iteration_carries_on_is_told_after_the_third(function: Callable[..., Any], named: str) -> None:
    known = (net, hooked, nn.Identity())
    assert notes_of(function, known=known, num=2) == []
    (said,) = notes_of(function, known=known)
    assert said.startswith(f"{function.__name__}() changes {named}: in a replacement that starts over"), said
    assert len(notes_of(function, known=known, num=20)) == 1


@pytest.mark.parametrize("function", [by_nothing, by_what_it_sets_at_once, now_and_then])
def test_what_is_set_first_or_once_is_not_told(function: Callable[..., Any]) -> None:
    assert notes_of(function) == []


class Trainer:
    def __init__(self) -> None:
        self.model = Net()
        self.num_steps = 0
        self.batch: Any = None
        self.loss: Any = None
        self.meters = {"a": Meter()}

    def step(self, x: float) -> float:
        self.batch = torch.full((100,), x)
        self.loss = self.model(self.batch[:1]).sum()
        self.num_steps += 1
        self.meters["a"].update(x)
        return float(self.loss.detach()) * self.num_steps

    def only_reads(self, x: float) -> float:
        return self.num_steps * x


def test_attributes_of_the_object_whose_method_it_is() -> None:
    trainer = Trainer()
    (said,) = notes_of(trainer.step, known=(trainer.model,))
    assert said.startswith("step() changes Net.calls, self.num_steps, self.meters['a'].total: "), said
    # The same, where the class has decorated the function.
    plain = Trainer.step
    (said,) = notes_of(plain, Trainer(), known=())
    assert "self.num_steps" in said and "self.batch" not in said and "self.loss" not in said
    assert notes_of(Trainer().only_reads) == []


def test_variables_around_and_wrappers() -> None:
    total = 0

    def counts(x: float) -> float:
        nonlocal total
        total += 1
        return x

    @functools.wraps(counts)
    def wrapped(x: float) -> float:
        return counts(x)

    # What its code says itself is told when the loop begins, and not again.
    for function in (counts, wrapped):
        notes: list[str] = []
        own = OwnValues(notes.append)
        own.add(function)
        own.begin(())
        for _ in range(4):
            own.run(function, (1.0,), {})
        assert len(notes) == 1 and notes[0].startswith("counts() sets and reads total: "), notes


class Hostile:
    """Whoever asks it anything is told off."""

    def __init__(self) -> None:
        self.inner = self  # a circle

    def __getattr__(self, name: str) -> int:
        raise AssertionError(f"asked for {name}")

    @property
    def value(self) -> int:
        raise AssertionError("a property was run")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def __len__(self) -> int:
        raise AssertionError("counted")

    __hash__ = object.__hash__


class Lazy(collections.UserDict[str, int]):
    def __getitem__(self, key: str) -> int:
        raise AssertionError("read")


hostile, lazy, numbers, deep = Hostile(), Lazy(a=1), itertools.count(), SimpleNamespace()


def meets_anything(x: float) -> float:
    return x + bool(hostile is None) + bool(lazy is None) + bool(numbers is None) + bool(deep is None)


def test_nothing_of_the_script_is_run_nor_used_up() -> None:
    at = deep
    for _ in range(2000):
        at.next = SimpleNamespace(items=list(range(100)))
        at = at.next
    assert notes_of(meets_anything) == [] and next(numbers) == 0


def test_an_error_of_the_iteration_is_its_own() -> None:
    own = OwnValues(lambda text: None)
    own.begin(())
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            own.run(lambda x: x / 0, (1.0,), {})
    assert own.run(lambda x: x, (1.0,), {}) == 1.0


def test_what_the_code_reads_before_it_sets_it() -> None:
    uses = uses_of(Meter.update.__code__)
    assert (uses.reads, uses.sets, uses.at_once) == ({".total"}, {".last", ".total"}, {".last"})
    uses = uses_of(by_a_key.__code__)
    assert "[updates]" in uses.reads and "[loss]" in uses.sets - uses.reads - uses.at_once | {"[loss]"}
    assert "[n]" in uses_of(of_a_dict.__code__).reads
    uses = uses_of(by_what_it_sets_at_once.__code__)
    assert uses.at_once == {"beta", "[loss]"} and not uses_of(by_what_it_sets_too_late.__code__).at_once
