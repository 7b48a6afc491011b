"""Steps of a pipeline that several processes share, as in parallel recovery: real processes, sockets and kills.

Parameters, losses, outputs and generators must be those of one process, bit for bit, whoever dies when.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.job import ROOT

Run = Callable[..., dict[str, Any]]
ZERO_BUBBLE = "ScheduleInterleavedZeroBubble"
SCHEDULES = [
    "ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble", "ScheduleDualPipeV",
]  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """What one process gives, by its orders: each made once."""
    return {}


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.shared_train"]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def run(tmp_path: Path, server: subprocess.Popen[str]) -> Run:
    def together(size: int, faults: dict[int, dict[str, Any]] | None = None, **orders: Any) -> dict[str, Any]:
        directory = tmp_path / f"{size}"
        directory.mkdir()
        orders = {"schedule": "Schedule1F1B", "iterations": 5, **orders, "size": size, "faults": faults or {}}
        orders |= {"where": str(directory / "where"), "out": str(directory / "out")}
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(orders) + "\n")
        server.stdin.flush()
        ends = json.loads(server.stdout.readline())
        assert ends == [-9 if index in (faults or {}) else 0 for index in range(size)]
        found: dict[str, Any] = json.loads((directory / "out").read_text())
        return found

    return together


@pytest.fixture
def assert_equal(run: Run, alone: dict[str, dict[str, Any]]) -> Callable[..., None]:
    def equal(found: dict[str, Any], **orders: Any) -> None:
        key = json.dumps(orders)
        if key not in alone:
            alone[key] = run(1, **orders)
        assert found["digest"] == alone[key]["digest"]
        assert found["told"] == alone[key]["told"]

    return equal


@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_step_is_that_of_one_process(size: int, run: Run, assert_equal: Callable[..., None]) -> None:
    """Seven have one micro-batch each."""
    found = run(size)
    assert found["size"] == size and not found["notes"]
    assert_equal(found)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: str, run: Run, assert_equal: Callable[..., None]) -> None:
    found = run(2, schedule=schedule)
    assert found["size"] == 2 and not found["notes"]
    assert_equal(found, schedule=schedule)


def test_gradients_of_several_steps_are_added(run: Run, assert_equal: Callable[..., None]) -> None:
    found = run(2, steps=2)
    assert found["size"] == 2
    assert_equal(found, steps=2)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "orders",
    [
        {"unfreezes": True},  # a parameter trains from a later step on
        {"flat": True},  # all gradients are views of one tensor
        {"sets": True},  # the script changes an attribute of a module between steps
        {"wide": True},  # gradients have another type than parameters
        {"channels_last": True, "clips": True},  # the order in memory decides on how a norm is rounded
    ],
)
def test_gradients_are_as_autograd_leaves_them(
    orders: dict[str, Any], size: int, run: Run, assert_equal: Callable[..., None]
) -> None:
    found = run(size, **orders)
    assert found["size"] == size and not found["notes"]
    assert_equal(found, **orders)


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("at", ["meet", "exchange", "exchanged"])
def test_a_helper_dies(at: str, index: int, run: Run, assert_equal: Callable[..., None]) -> None:
    found = run(3, {index: {"at": at, "number": 2}})
    assert found["size"] == 2
    assert found["notes"] == ["1 of its helpers are gone: 2 processes go on"]
    assert_equal(found)


def test_the_only_helper_dies(run: Run, assert_equal: Callable[..., None]) -> None:
    found = run(2, {1: {"at": "exchange", "number": 1}})
    assert found["notes"] == ["1 of its helpers are gone: it goes on alone"]
    assert_equal(found)


def test_both_helpers_die(run: Run, assert_equal: Callable[..., None]) -> None:
    found = run(3, {1: {"at": "exchange", "number": 1}, 2: {"at": "meet", "number": 1}})
    assert found["size"] == 1
    assert_equal(found)


def test_a_helper_stands_still(run: Run, assert_equal: Callable[..., None]) -> None:
    found = run(3, {1: {"at": "exchange", "number": 2, "stops": True}})
    assert found["size"] == 2
    assert_equal(found)


@pytest.mark.parametrize(
    ("orders", "why"),
    [
        ({"counting": "attribute"}, "its stages change Counting.num_calls"),
        ({"counting": "buffer"}, "its stages change Counting.mean"),
        ({"counting": "list"}, "its stages change Counting.seen"),
        ({"counting": "closure"}, "its stages change Counting.count"),
        ({"counting": "pair"}, "the random numbers that its micro-batches draw cannot be counted"),
        ({"counting": "collective"}, "its stages make collectives"),
        ({"counting": "python"}, "its stages change the state of Python's generator"),
        ({"counting": "hook"}, "gradients are used as soon as they are there"),
        ({"counting": "inputs", "steps": 2}, "its stages change their inputs in place"),
        ({"counting": "none"}, "its stages change Counting.last"),
        ({"counting": "list"}, "its stages change Counting.seen"),
        ({"counting": "generator"}, "its stages change Counting.generator"),
        ({"counting": "parameter"}, "its stages change Counting.codes"),
        ({"counting": "first of two"}, "its stages change Counting.mean"),
        ({"counting": "main_grad"}, "gradients are used as soon as they are there"),
        ({"counting": "loss"}, "its stages change "),
        ({"twice": True}, "gradients of one micro-batch are added more than once"),
        ({"schedule": "ScheduleInterleaved1F1B", "ties": True}, "two of its stages have the same parameters"),
    ],
)
def test_what_cannot_be_shared_is_not(
    orders: dict[str, Any], why: str, run: Run, assert_equal: Callable[..., None]
) -> None:
    found = run(2, **orders)
    (note,) = found["notes"]
    assert note.startswith(why)
    assert_equal(found, **orders)


@pytest.mark.parametrize(
    ("odd", "orders", "why"),
    [
        ("iterator", {}, "its stages change Iterates.numbers"),
        ("data", {}, "its stages change Normalizes.weight"),
        ("gate", {}, "its stages change Gated.gate"),
        ("fused", {}, "its stages change Fused.weight"),
        ("default", {}, "its stages change counting"),
        ("nested", {}, "its stages change "),
        ("object", {}, "its stages change argument 0,"),
        ("inputs get gradients", {}, "its inputs get gradients"),
        ("one gradient of two", {"schedule": ZERO_BUBBLE}, "the gradients of two parameters are one tensor"),
        ("late hook", {}, "gradients are used as soon as they are there, in hooks"),
        ("late twice", {}, "gradients of one micro-batch are added more than once"),
        ("first on the replacement", {"steps": 3}, "a helper is in another step, or has another state"),
    ],
)
def test_what_is_not_seen_at_once_is_not_shared_either(
    odd: str, orders: dict[str, Any], why: str, run: Run, assert_equal: Callable[..., None]
) -> None:
    """State where one looks for it last, gradients that go elsewhere, and what begins in a later step only."""
    found = run(2, odd=odd, **orders)
    assert any(why in note for note in found["notes"]), found["notes"]
    assert_equal(found, odd=odd, **orders)


def test_a_gradient_that_is_to_be_sent_is_not_added_to(run: Run, assert_equal: Callable[..., None]) -> None:
    orders = {"odd": "one gradient to be sent", "schedule": ZERO_BUBBLE}
    found = run(2, **orders)
    assert found["size"] == 2 and not found["notes"]
    assert_equal(found, **orders)


def test_a_step_of_which_half_is_done_is_not_made_again(run: Run) -> None:
    """Statistics are updated, and then a draw is found that was none before."""
    assert "half of it is done" in run(2, odd="late statistics")["cannot"]


if torch.__version__ >= "2.15":  # which has these contexts

    @pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
    @pytest.mark.parametrize("context", ["draws", "counts"])
    def test_a_context_of_forwards(context: str, schedule: str, run: Run, assert_equal: Callable[..., None]) -> None:
        found = run(2, context=context, schedule=schedule)
        if context == "draws":
            assert found["size"] == 2 and not found["notes"]
        else:
            (note,) = found["notes"]
            assert note.startswith("its stages change the forward context of stage 0")
        assert_equal(found, context=context, schedule=schedule)


def test_a_cache_that_the_first_call_makes_is_no_change(run: Run, assert_equal: Callable[..., None]) -> None:
    found = run(2, counting="cache")
    assert found["size"] == 2 and not found["notes"]
    assert_equal(found, counting="cache")


def test_a_change_that_comes_late_is_noticed(run: Run, assert_equal: Callable[..., None]) -> None:
    """In a micro-batch of the helper, which leaves: then nothing is shared any more."""
    found = run(2, counting="late")
    assert found["notes"] == ["1 of its helpers are gone: it goes on alone"]
    assert_equal(found, counting="late")


def test_a_helper_that_would_round_otherwise_is_not_taken(run: Run, assert_equal: Callable[..., None]) -> None:
    found = run(3, strange=[1])
    assert found["size"] == 2
    assert [note for note in found["notes"] if "another torch" in note and "is not taken" in note]
    assert_equal(found)


@pytest.mark.parametrize("how", ["ahead", "drifts"])
def test_a_helper_that_has_come_to_something_else_is_not_taken(
    how: str, run: Run, assert_equal: Callable[..., None]
) -> None:
    found = run(3, **{how: [1]})
    assert found["size"] == 2
    assert any("is in another step, or has another state" in note for note in found["notes"])
    assert_equal(found)


def test_sums_of_blocks_need_less_memory_and_are_rounded_otherwise(run: Run) -> None:
    one, found = run(1), run(2, sum="unordered")
    assert found["digest"] != one["digest"]
    assert found["told"] == pytest.approx(one["told"], rel=1e-4)
