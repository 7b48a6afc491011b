"""A wait that nobody will answer is told apart from a slow rank, and from one that works alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_agent.worker.checks.standstill import Standing, describe, waits_for_ever
from swift_agent.worker.line.in_script import place_of

ITERATION = Standing(30, 4, "iteration", "waits", "train, t.py:9", 20.0)
END = Standing(30, 4, "end", "waits", "main, t.py:30", 20.0)


def ever(*now: Standing, world_size: int | None = None) -> bool:
    ranks = dict(enumerate(now))
    return waits_for_ever(ranks, {rank: replace(one, beat=one.beat + 1) for rank, one in ranks.items()},
                          world_size or len(now))  # fmt: skip


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ((END,), True),  # it never begins iteration 30
        ((replace(END, iterations=31),), False),  # its part of iteration 30 is done
        ((ITERATION,), False),  # something large may be under way
        ((replace(ITERATION, doing="works"),), False),
        ((replace(ITERATION, iterations=31),), False),  # its part of iteration 30 is done
        ((replace(ITERATION, inside="section"),), True),
        ((replace(ITERATION, inside=""),), True),  # a collective between iterations, that the other one has not made
        ((replace(ITERATION, iterations=31, inside="section"),), False),
        # It has left out the section in which the other one is.
        ((replace(ITERATION, iterations=31), replace(ITERATION, inside="section")), True),
        ((END, replace(ITERATION, doing="works")), False),
        ((END, END, END), True),
        ((replace(END, iterations=31), replace(ITERATION, inside="begin", iterations=0, sections=0)), True),
        ((replace(ITERATION, inside="begin"),), False),
    ],
)
def test_who_waits_for_what_never_comes(others: tuple[Standing, ...], expected: bool) -> None:
    assert ever(ITERATION, *others) is expected


def test_it_takes_the_word_of_all_ranks_and_twice() -> None:
    ranks = {0: ITERATION, 1: END}
    again = {0: replace(ITERATION, beat=1), 1: replace(END, beat=1)}
    assert waits_for_ever(ranks, again, 2)
    assert not waits_for_ever(ranks, again, 3)
    assert not waits_for_ever(ranks, ranks, 2)  # what was read may be old
    assert not waits_for_ever({}, again, 2)
    assert not waits_for_ever({0: replace(ITERATION, iterations=29), 1: END}, again, 2)


moves = st.lists(st.sampled_from(["iteration", "section"]), min_size=1, max_size=12)


@given(way=moves, at=st.lists(st.tuples(st.integers(0, 11), st.booleans()), min_size=2, max_size=5))
def test_ranks_that_go_the_same_way_are_never_ended(way: list[Any], at: list[tuple[int, bool]]) -> None:
    """However far apart they are, if each is in its next step of that way."""
    standings = []
    for position, _ in at:
        done = way[: position % len(way)]
        inside = way[position % len(way)]
        standings.append(Standing(done.count("iteration"), done.count("section"), inside, "waits", "f, t.py:1", 20.0))
    assert not ever(*standings)


def test_people_are_told_who_waits_where() -> None:
    now = {0: END, 1: ITERATION, 2: ITERATION}
    said = describe(now, 4)
    assert "rank 0 has come to the end of the run after 30 iterations" in said
    assert "ranks 1, 2 wait for others in iteration 30 (train, t.py:9)" in said
    assert "rank 3 goes on, or cannot be heard of" in said


def test_it_survives_json() -> None:
    assert Standing.from_json(ITERATION.to_json()) == ITERATION
    with pytest.raises(ValueError):
        Standing.from_json({**ITERATION.to_json(), "inside": "elsewhere"})


def test_the_line_is_the_scripts() -> None:
    assert place_of(sys._getframe()).startswith("test_the_line_is_the_scripts, test_standstill.py:")
