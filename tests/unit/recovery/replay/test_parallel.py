"""Each micro-batch is repeated by one process, in the order of one process alone, and only where that is the same."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_recovery.replay.parallel import Rehearsal, order_of, shares, why_not

GOOD = Rehearsal(4, [(0, 0), (0, 1), (0, 2), (0, 3)])


@given(st.permutations(range(13)), st.integers(1, 13), st.integers(1, 16))
def test_shares_are_blocks_of_the_order(numbers: list[int], num_micro_batches: int, num_processes: int) -> None:
    order = numbers[:num_micro_batches]
    found = shares(order, num_processes)
    assert list(itertools.chain(*found)) == order
    sizes = [len(share) for share in found]
    assert len(sizes) == num_processes and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_one_process_has_everything() -> None:
    assert shares((2, 0, 1), 1) == [(2, 0, 1)]


def test_more_processes_than_micro_batches() -> None:
    assert shares((1, 0), 4) == [(1,), (0,), (), ()]


def test_a_good_step_is_shared() -> None:
    assert why_not(GOOD) == ""
    assert order_of(GOOD) == (0, 1, 2, 3)


@pytest.mark.parametrize(("change", "why"), [
    ({"num_micro_batches": 1, "added": [(0, 0)]}, "one micro-batch"),
    ({"num_collectives": 1}, "collectives"),
    ({"changed": ("BatchNorm1d.running_mean", "Block.calls")}, "change BatchNorm1d.running_mean, from one"),
    ({"num_uncounted": 1}, "random numbers"),
    ({"shared_parameters": 1}, "same parameters"),
    ({"other": "its stages are sharded"}, "its stages are sharded"),
    ({"added": []}, "different orders"),
    ({"added": [(0, 0), (0, 1), (0, 2)]}, "different orders"),
    ({"added": [(0, 0), (0, 1), (0, 2), (0, 3), (0, 3)]}, "different orders"),
    ({"added": [(0, 0), (0, 1), (0, 2), (0, 4)]}, "different orders"),
])  # fmt: skip
def test_any_other_is_not(change: dict[str, object], why: str) -> None:
    assert why in why_not(replace(GOOD, **change))  # type: ignore[arg-type]


@given(st.permutations(range(6)), st.permutations(range(6)), st.randoms(use_true_random=False))
def test_stages_have_one_order(first: list[int], second: list[int], rng: object) -> None:
    rest = {0: list(first), 1: list(second)}
    added = []
    while any(rest.values()):  # as an interleaved schedule does, one or the other
        stage = rng.choice([stage for stage in rest if rest[stage]])  # type: ignore[attr-defined]
        added.append((stage, rest[stage].pop(0)))
    rehearsal = Rehearsal(6, added)
    assert order_of(rehearsal) == (tuple(first) if first == second else ())
    assert bool(why_not(rehearsal)) == (first != second)


def test_an_order_that_all_stages_have() -> None:
    added = [(stage, number) for number in (3, 1, 0, 2) for stage in (1, 0)]
    assert order_of(Rehearsal(4, added)) == (3, 1, 0, 2)
    assert why_not(Rehearsal(4, added)) == ""
