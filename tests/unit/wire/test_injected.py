"""Orders of faults: what people type, and what anybody may have written into etcd."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from swift_agent.wire.injected import NEXT, Fault, FaultError, checked, fault_of, moment_of

FAULT = Fault("a1", "kill-worker", 3, iteration=12, phase="backward", part=0.5)


def test_an_order_is_read_as_it_was_written() -> None:
    assert fault_of(FAULT.encoded()) == FAULT


def test_an_order_without_a_micro_batch_is_for_the_first() -> None:
    """As swiftctl wrote it before it knew any."""
    written = json.loads(FAULT.encoded())
    del written["micro_batch"]
    assert fault_of(json.dumps(written).encode()) == FAULT


@pytest.mark.parametrize(
    "value",
    [
        b"", b"{", b"[]", b"7", b'{"version": 2}', b'{"version": 1}', b"\xff\xfe",
        *(
            json.dumps({"version": 1, **asdict(FAULT), **change}).encode()
            for change in (
                {"kind": "rm"}, {"phase": "x"}, {"part": 2.0}, {"part": None}, {"rank": "x"}, {"id": "../x"},
                {"rate": "1mbit; reboot"}, {"for_s": -1}, {"for_s": 1e999}, {"iteration": "x"},
                {"kind": ["x"]}, {"kind": {}}, {"phase": ["begin"]}, {"rank": 1e999}, {"num_bytes": 1e999},
                {"micro_batch": 0}, {"micro_batch": "x"}, {"micro_batch": 1e999},
            )
        ),
    ],
)  # fmt: skip
def test_what_is_no_order_is_refused(value: bytes) -> None:
    with pytest.raises(FaultError):
        fault_of(value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {"iteration": NEXT}),
        ("iteration=120", {"iteration": 120}),
        ("iteration=next,phase=step", {"iteration": NEXT, "phase": "step"}),
        (" phase=backward , part=0.25", {"iteration": NEXT, "phase": "backward", "part": 0.25}),
        ("phase=forward,micro-batch=3", {"iteration": NEXT, "phase": "forward", "micro_batch": 3}),
    ],
)
def test_moments(text: str, found: dict[str, Any]) -> None:
    assert moment_of(text) == found


@pytest.mark.parametrize(
    "text",
    ["120", "iteration=-1", "iteration=x", "phase=up", "part=x", "part=1.2.3", "a=b", "micro-batch=x"],
)
def test_what_is_no_moment_is_told_with_an_example(text: str) -> None:
    with pytest.raises(FaultError, match="type for example --at iteration=120"):
        moment_of(text)


def test_all_mistakes_are_told() -> None:
    with pytest.raises(FaultError) as raised:
        checked(Fault("a1", "kill-worker", node="n", iteration=3, part=7.0, for_s=0.0, micro_batch=0))
    assert len(raised.value.mistakes) == 5


def test_moments_in_words() -> None:
    assert FAULT.moment == "in iteration 12, after 50% of the backward"
    assert Fault("a", "freeze", 0).moment == "at once"
    assert Fault("a", "freeze", 0, iteration=NEXT, phase="step").moment == "in the next iteration, step"
    third = Fault("a", "freeze", 0, iteration=4, phase="forward", part=0.5, micro_batch=3)
    assert third.moment == "in iteration 4, after 50% of the forward of micro-batch 3"
    assert [Fault("a", "kill-node", 2).target, FAULT.target, Fault("a", "freeze", node="n").target] == [
        "the node of rank 2", "rank 3", "node n",
    ]  # fmt: skip
