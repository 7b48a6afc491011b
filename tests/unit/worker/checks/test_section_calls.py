"""Ranks that go different ways in a section are told, whoever comes first, and nobody waits."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from swift_agent.worker.checks.section_calls import CALLS, SECTIONS, SectionCalls, is_compared

ALL = (0, 1, 2)


class Differs(Exception):
    pass


def differ(why: str) -> NoReturn:
    raise Differs(why)


def ranks_in(store: object, *, section: int = 4, generation: int = 2) -> list[SectionCalls]:
    made = [SectionCalls(rank, differ) for rank in ALL]
    for one in made:
        one.recovered()
        one.begin(section, store, generation)
    return made


def test_the_same_way_is_no_news_in_any_order() -> None:
    first, second, third = ranks_in(HashStore())
    for one in (second, first, third):
        one.before(ALL, "allgather of 3 float32", "validate, train.py:7")
    second.before((1, 2), "allreduce of 1 float32", "validate, train.py:9")
    for one in (third, first):
        one.before(ALL, "barrier", "validate, train.py:8")
        one.end()
    third.begin(5, HashStore(), 2)
    second.before(ALL, "barrier", "validate, train.py:18")  # a line of its own is no other way
    second.end()
    assert not second.compares


def test_another_collective_is_told_by_who_comes_second() -> None:
    first, second, _ = ranks_in(HashStore())
    first.before(ALL, "allgather of 3 float32", "log, train.py:7")
    with pytest.raises(Differs, match=r"on rank 1 than on rank 0: allgather of 12 float32 \(evaluate, train.py:9\)"):
        second.before(ALL, "allgather of 12 float32", "evaluate, train.py:9")


def test_one_collective_more_is_told_on_either_side() -> None:
    first, second, _ = ranks_in(HashStore())
    for one in (first, second):
        one.before(ALL, "barrier", "f, train.py:1")
    first.end()
    with pytest.raises(Differs, match=r"barrier .* here, the end of the section there"):
        second.before(ALL, "barrier", "f, train.py:1")

    first, second, _ = ranks_in(HashStore())
    for one in (first, second):
        one.before(ALL, "barrier", "f, train.py:1")
    second.before(ALL, "barrier", "f, train.py:2")
    with pytest.raises(Differs, match=r"the end of the section here, barrier \(f, train.py:2\) there"):
        first.end()


def test_a_section_that_begins_again_is_another_one() -> None:
    store = HashStore()
    (first, *_), (_, second, _) = ranks_in(store), ranks_in(store, generation=3)
    first.before(ALL, "barrier", "")
    second.before(ALL, "broadcast of 1 int64", "")


def test_nothing_is_said_without_a_failure_nor_in_most_sections_long_after_one() -> None:
    calls = SectionCalls(0, differ)
    calls.begin(0, HashStore(), 1)
    assert not calls.compares
    calls.end()
    calls.recovered()
    compared = []
    for section in range(40):
        calls.begin(section, HashStore(), 2)
        compared += [section] if calls.compares else []
    assert compared == [*range(SECTIONS), 15, 31]
    assert [number for number in range(1, 300) if is_compared(number, CALLS)] == [*range(1, CALLS + 1), 128, 256]


def test_a_store_that_is_away_ends_nothing() -> None:
    class Away(HashStore):
        def compare_set(self, *_: object) -> bytes:
            raise dist.DistStoreError("cut")

    first, *_ = ranks_in(Away())
    first.before(ALL, "barrier", "")
    first.end()
