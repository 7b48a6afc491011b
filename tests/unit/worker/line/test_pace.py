"""Marks of when iterations began: few, each taken once."""

from __future__ import annotations

from swift_agent.worker.line.pace import MARK_S, MOST, Pace


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_mark_is_made_a_few_times_a_second_and_taken_once() -> None:
    clock = Clock()
    pace = Pace(clock)
    for iteration in range(100):
        pace.begins(iteration)
        clock.now_s += MARK_S / 10
    taken = pace.take()
    assert len(taken) == 10 and taken[0] == 100.0 and list(taken) == sorted(taken)
    assert pace.take() == {}


def test_an_iteration_that_begins_again_counts_as_of_then() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.begins(7)
    clock.now_s += 5.0
    pace.begins(7)
    assert pace.take() == {7: 105.0}


def test_nobody_asks() -> None:
    clock = Clock()
    pace = Pace(clock)
    for iteration in range(1000):
        pace.begins(iteration)
        clock.now_s += MARK_S
    taken = pace.take()
    assert len(taken) == MOST and max(taken) == 999
