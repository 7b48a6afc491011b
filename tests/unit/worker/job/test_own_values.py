"""Which variables of a script an iteration may carry from one call to the next, by its code, and how they are told."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swift_agent.worker.job.own_values import OwnValues, carried_by

num_updates = 0
last_loss = 0.0
beta = 1.0
kept: Any = None


def counts(x: float) -> float:
    global num_updates
    num_updates += 1
    return x * min(1.0, num_updates / 1000)


def shows(x: float) -> float:
    """What it sets nobody reads in it."""
    global last_loss
    last_loss = x
    return x


def sets_first(x: float) -> float:
    global beta
    beta = x / 1000
    return beta * x


def sets_now_and_then(x: float) -> float:
    global beta
    if x > 3:
        beta = x / 1000
    return beta * x


def reads_first(x: float) -> float:
    global beta
    loss = beta * x
    beta = loss / 2
    return loss


def sets_in_a_function(x: float) -> float:
    def inner() -> None:
        global num_updates
        num_updates += 1

    inner()
    return x


def only_reads(x: float) -> float:
    return x * beta


def has_its_own(x: float) -> float:
    total = 0.0

    def add(y: float) -> None:
        nonlocal total
        total += y

    add(x)
    return total


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (counts, ["num_updates"]),
        (shows, []),
        (sets_first, []),
        (sets_now_and_then, ["beta"]),
        (reads_first, ["beta"]),
        (sets_in_a_function, ["num_updates"]),
        (only_reads, []),
        (has_its_own, []),
    ],
)
def test_what_a_call_may_leave_to_the_next_one(function: Callable[..., Any], names: list[str]) -> None:
    assert carried_by(function.__code__) == names


def test_variables_of_the_function_around() -> None:
    count, other = 0, 0

    def direct() -> int:
        nonlocal count
        count += 1
        return count

    def inside() -> int:
        own = 0

        def inner() -> None:
            nonlocal count, own
            count += 1
            own += 1

        inner()
        return own + other

    assert carried_by(direct.__code__) == carried_by(inside.__code__) == ["count"]


def notes_of(*functions: Callable[..., Any], known: tuple[Any, ...] = ()) -> list[str]:
    notes: list[str] = []
    own = OwnValues(notes.append)
    for function in functions:
        own.add(function)
    assert notes == []  # the set-up may still make what is tracked
    own.begin(known)
    return notes


def test_it_is_told_once_when_the_loop_begins() -> None:
    (said,) = notes_of(shows, counts, sets_now_and_then)
    assert said.startswith("counts() sets and reads num_updates: ") and "job.iteration_number" in said
    assert notes_of(shows, sets_first) == []


def test_a_function_that_the_loop_defines_is_told_then() -> None:
    notes: list[str] = []
    own = OwnValues(notes.append)
    own.begin(())
    own.add(counts)
    assert len(notes) == 1


def test_what_the_job_has_is_not_told() -> None:
    global kept
    kept = object()

    def swaps() -> None:
        global kept
        if kept is not None:
            kept = [kept][0]

    assert notes_of(swaps, known=(kept,)) == []
    assert len(notes_of(swaps)) == 1


@pytest.mark.parametrize(("value", "is_told"), [(torch.zeros(4, 2), False), (torch.zeros(()), True), (None, True)])
def test_a_batch_that_the_iteration_leaves_is_told_by_who_finds_it_in_a_forward(value: Any, is_told: bool) -> None:
    made = value

    def trains() -> Any:
        nonlocal made
        used, made = made, torch.zeros(4, 2)
        return used

    assert bool(notes_of(trains)) == is_told


class Trainer:
    def step(self, x: float) -> float:
        global num_updates
        num_updates += 1
        return x


def test_decorators_and_methods_are_looked_into() -> None:
    @functools.wraps(counts)
    def wrapped(*args: float) -> float:
        return counts(*args)

    assert len(notes_of(wrapped)) == len(notes_of(Trainer().step)) == 1
    assert notes_of(functools.partial(counts, 1.0), len, print) == []
    assert OwnValues(None).begin(()) is None
