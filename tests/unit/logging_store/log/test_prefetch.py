"""Items that a thread makes ahead of their use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator

import pytest

from swift_logging_store.log.prefetch import Stopped, ahead


def numbers(made: list[int], at: dict[int, threading.Event]) -> Callable[..., Generator[int, None, None]]:
    def make(stopped: Callable[[], None]) -> Generator[int, None, None]:
        for number in range(5):
            made.append(number)
            if number in at:
                at[number].set()
            yield number

    return make


def test_all_come_in_their_order_and_no_more_are_made_than_were_asked_for() -> None:
    made: list[int] = []
    is_there = {number: threading.Event() for number in range(5)}
    found = []
    for number in ahead(numbers(made, is_there), 2):
        found.append(number)
        ahead_of_it = min(number + 2, 4)
        assert is_there[ahead_of_it].wait(10.0)  # while this one is used
        assert made[-1] <= number + 2
    assert found == made == [0, 1, 2, 3, 4]
    assert "swift-ahead" not in {thread.name for thread in threading.enumerate()}


def test_an_error_comes_after_the_items_before_it() -> None:
    def make(stopped: Callable[[], None]) -> Generator[int, None, None]:
        yield 1
        yield 2
        raise ZeroDivisionError

    found = []
    with pytest.raises(ZeroDivisionError):
        for number in ahead(make, 3):
            found.append(number)
    assert found == [1, 2]


def test_who_is_closed_stops_what_takes_long() -> None:
    """And what its maker has opened is closed before that returns."""
    is_closed, takes_long = [False], threading.Event()

    def make(stopped: Callable[[], None]) -> Generator[int, None, None]:
        try:
            yield 1
            takes_long.set()
            while True:
                stopped()
                threading.Event().wait(0.001)
        finally:
            is_closed[0] = True

    with contextlib.closing(ahead(make, 1)) as items:
        assert next(items) == 1
        assert takes_long.wait(10.0)
    assert is_closed == [True]


def test_an_iterator_within_another_one_is_stopped_with_that() -> None:
    """It does not look like a shorter one."""
    inside, found = threading.Event(), list[int]()

    def make(stopped: Callable[[], None]) -> Generator[int, None, None]:
        def make_inner(stopped_too: Callable[[], None]) -> Generator[int, None, None]:
            yield 1
            inside.set()
            while True:
                stopped()
                threading.Event().wait(0.001)

        with contextlib.closing(ahead(make_inner, 1)) as items:
            for item in items:
                found.append(item)
                yield item
        found.append(-1)

    with contextlib.closing(ahead(make, 1)) as items:
        assert next(items) == 1 and inside.wait(10.0)
    assert found == [1]


def test_nobody_else_may_stop_it() -> None:
    def make(stopped: Callable[[], None]) -> Generator[int, None, None]:
        yield 1
        raise Stopped

    with pytest.raises(Stopped):
        list(ahead(make, 1))
