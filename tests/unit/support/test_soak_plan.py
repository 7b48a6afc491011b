"""The soak's judgement: the same failures from a seed, a copy of the state is always left, what is wrong is seen."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.support.soak_plan import (
    NEEDS_LINKS,
    ON_ETCD,
    WEIGHTS,
    Layout,
    Sample,
    Strike,
    aim,
    draw,
    grown,
    standstill_s,
    wrong_records,
)

LAYOUT = Layout(("a", "b"), 2, ("c",), "c", "a", frozenset(range(4)))


def test_a_seed_gives_the_same_failures() -> None:
    one = [draw(7, number, True) for number in range(50)]
    assert one == [draw(7, number, True) for number in range(50)]
    assert one != [draw(8, number, True) for number in range(50)]


def test_all_kinds_come_up_and_none_that_needs_links_without_them() -> None:
    kinds = Counter(strike.kind for number in range(400) for strike in draw(1, number, True).strikes)
    assert set(kinds) == set(WEIGHTS)
    without = {strike.kind for number in range(400) for strike in draw(1, number, False).strikes}
    assert without == set(WEIGHTS) - NEEDS_LINKS
    doubles = [draw(1, number, True) for number in range(400)]
    assert any(failure.second is not None for failure in doubles)
    assert not any(
        failure.second is not None and {failure.first.kind, failure.second.kind} <= ON_ETCD for failure in doubles
    )


def test_any_two_failures_leave_a_copy_of_the_state() -> None:
    struck = 0
    for number in range(2000):
        failure = draw(3, number, True)
        first = aim(failure.first, LAYOUT)
        assert first is not None and first.after.keeps_a_copy()
        if failure.second is None:
            continue
        gone = Layout(**{**vars(first.after), "gone": first.after.gone | first.may_lose})
        second = aim(failure.second, gone)
        if second is not None:
            struck += 1
            left = set(range(4)) - first.may_lose - second.may_lose
            nodes = {"a", "b"} - set(first.nodes) - set(second.nodes)
            # Of two that lose each other one is lost; the driver strikes nothing else meanwhile.
            assert any(left & LAYOUT.ranks_of(node) for node in nodes) or failure.first.way == "to a peer"
    assert struck > 200


def test_the_victim_is_the_one_that_is_named() -> None:
    def nodes(strike: Strike) -> tuple[str, ...]:
        found = aim(strike, LAYOUT)
        assert found is not None
        return found.nodes

    assert nodes(Strike("node", "coordinator", 0.9, 0)) == ("c",)
    assert nodes(Strike("node", "store", 0.9, 0)) == ("a",)
    assert nodes(Strike("agent", "slot", 0.9, 0)) == ("b",)
    assert nodes(Strike("freeze", "spare", 0.0, 0)) == ("c",)
    found = aim(Strike("worker", "slot", 0.6, 0), LAYOUT)
    assert found is not None and found.ranks == (2,) and found.may_lose == {2}


def test_the_last_copy_is_spared() -> None:
    one_left = Layout(**{**vars(LAYOUT), "gone": frozenset({0, 1, 3}), "living": frozenset({2, 3})})
    found = aim(Strike("worker", "slot", 0.0, 0), one_left)
    assert found is not None and found.ranks == (3,)
    found = aim(Strike("node", "slot", 0.9, 0), one_left)
    assert found is not None and found.nodes != ("b",)
    assert aim(Strike("freeze", "slot", 0.0, 0), Layout(**{**vars(one_left), "shaky": frozenset("b")})) is None


def records(*parts: tuple[int, range]) -> list[tuple[int, int]]:
    return [(iteration, pid) for pid, numbers in parts for iteration in numbers]


def wrong(calls: list[tuple[int, int]], ends: list[tuple[int, int]], num_changes: int = 1) -> list[str]:
    return wrong_records(0, calls, ends, 10, num_changes)


def test_records_of_runs_as_they_have_to_be() -> None:
    assert wrong(records((1, range(10))), records((1, range(1, 11))), 0) == []
    # Cut in iteration 5, which is run again; by itself or by another process.
    assert wrong(records((1, range(6)), (1, range(5, 10))), records((1, range(1, 11)))) == []
    assert wrong(records((1, range(6)), (2, range(5, 10))), records((1, range(1, 6)), (2, range(6, 11)))) == []
    # Lost after iteration 5 was complete everywhere; or only there, so that it is run again.
    assert wrong(records((1, range(6)), (2, range(6, 10))), records((1, range(1, 6)), (2, range(7, 11)))) == []
    assert wrong(records((1, range(6)), (2, range(5, 10))), records((1, range(1, 7)), (2, range(6, 11)))) == []


@pytest.mark.parametrize(
    ("calls", "ends", "text"),
    [
        (records((1, range(5)), (1, range(6, 10))), records((1, range(1, 11))), r"\[5\] were never run"),
        (records((1, range(10))), records((1, range(1, 5)), (1, range(6, 11))), "from iteration to iteration"),
        (records((1, range(10))), records((1, range(1, 6)), (1, range(5, 11))), "from iteration to iteration"),
        (records((1, range(6)), (1, range(4, 10))), records((1, range(1, 11))), "2 calls were repeated"),
        (records((1, range(6)), (2, range(10))), records((1, range(1, 6)), (2, range(1, 11))), "began with the end"),
        (records((1, range(10))), records((1, range(1, 10))), "ended after 9"),
        (records((1, range(11))), records((1, range(1, 12))), "beyond the end"),
    ],
)
def test_what_is_wrong_is_told(calls: list[tuple[int, int]], ends: list[tuple[int, int]], text: str) -> None:
    assert any(re.search(text, line) for line in wrong(calls, ends))


def test_standstill() -> None:
    assert standstill_s([0.0, 1.0, 2.0, 5.0, 6.0], 2.5, 10.0) == 3.0
    assert standstill_s([0.0, 1.0], 0.5, 0.6) == 0.0


def test_growth_is_seen_by_role() -> None:
    steady = [Sample("a slot", 20, 40, 200.0 + number % 3) for number in range(24)]
    other = [Sample("spare", 15, 30 + 3 * number, 180.0) for number in range(24)]
    figures, wrongs = grown([*steady, *other])
    assert figures["a slot"]["num_files"] == (40, 40)
    assert len(wrongs) == 1 and "as spare, num_files grew" in wrongs[0]
    assert grown(steady[:5]) == ({}, [])
