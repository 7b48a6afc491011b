"""Objects from other ranks, in the runs of iterations and sections, and in those that are for a result only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from swift_agent.worker.tracked import object_results
from swift_agent.worker.tracked.object_results import ObjectResults, What
from swift_recovery.state.codec import decode, encode


def ran(results: ObjectResults, what: What, number: int, *objects: Sequence[Any]) -> None:
    results.begin(what, number, dry_run=False)
    for one in objects:
        results.keep_for_all(one)
    results.end()


def given(results: ObjectResults, what: What, number: int, num: int = 1, rank: int = 1) -> list[Any]:
    results.begin(what, number, dry_run=True)
    found = [results.next(rank) for _ in range(num)]
    results.end()
    return found


def test_a_dry_run_is_given_what_the_last_run_had() -> None:
    results = ObjectResults(2)
    ran(results, "iteration", 3, ["cut"], ["cut, too"])
    ran(results, "iteration", 3, [{"size": (4, 8)}], [1.5, None])
    ran(results, "section", 3, ["of the section"])
    for _ in range(2):  # a remade iteration, and it is run for its result
        assert given(results, "iteration", 3, 3) == [[{"size": (4, 8)}], [1.5, None], None]
    assert given(results, "section", 3) == [["of the section"]]
    assert given(results, "section", 4) == given(results, "iteration", 2) == [None]


def test_what_the_script_does_with_an_object_stays_its_own() -> None:
    results, mine = ObjectResults(2), [{"loss": 1.0}]
    ran(results, "section", 0, mine)
    mine[0]["loss"] = 2.0
    (found,) = given(results, "section", 0)
    found[0]["loss"] = 3.0
    assert given(results, "section", 0) == [[{"loss": 1.0}]]


def test_a_replacement_has_them_from_another_rank() -> None:
    source, replacement, resized = ObjectResults(3), ObjectResults(3), ObjectResults(2)
    ran(source, "section", 7, ["best"])
    source.begin("iteration", 2, dry_run=False)
    source.keep({0: ["a"], 1: ["b"], 2: ["c"]})  # it has scattered them
    offer = decode(*encode(source.offer()))
    replacement.take(offer)
    resized.take(offer)
    assert given(replacement, "section", 7) == [["best"]] and given(replacement, "iteration", 2) == [["b"]]
    assert given(resized, "section", 7) == [None]
    replacement.take(())  # a checkpoint of a version that kept none
    assert given(replacement, "section", 7) == [["best"]]


def test_who_has_another_ranks_part_does_not_give_it() -> None:
    results = ObjectResults(2)
    results.begin("iteration", 0, dry_run=False)
    results.keep({0: ["mine"]})
    assert given(results, "iteration", 0, rank=0) == [["mine"]] and given(results, "iteration", 0) == [None]


@pytest.mark.parametrize("kind", [object, lambda: torch.ones(2)])
def test_what_cannot_be_sent_is_not_kept_and_leaves_the_order(kind: Any) -> None:
    results = ObjectResults(2)
    ran(results, "section", 0, ["first"], [kind()], ["third"])
    assert given(results, "section", 0, 3) == [["first"], None, ["third"]]


def test_old_ones_and_too_many_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    results = ObjectResults(2)
    for number in range(5):
        ran(results, "iteration", number, [number])
        ran(results, "section", number, [number])
    assert [given(results, "iteration", number)[0] for number in range(5)] == [None, None, [2], [3], [4]]
    assert [given(results, "section", number)[0] for number in range(5)] == [[number] for number in range(5)]
    monkeypatch.setattr(object_results, "MAX_BYTES", 100)
    ran(results, "section", 5, ["x" * 40])
    assert given(results, "section", 0) == [None] and given(results, "section", 5) == [["x" * 40]]
    ran(results, "section", 6, ["x" * 400])
    assert given(results, "section", 6) == [None]
    assert given(results, "section", 5) == [["x" * 40]], "what is too large takes no place of others"
    results.keep_for_all(["outside of both"])
    assert [(what, number) for what, number, _ in results.offer()[1]] == [("section", number) for number in (4, 5, 6)]


def test_what_would_take_long_to_keep_is_not_looked_at_as_a_whole() -> None:
    most = object_results.MAX_ITEMS
    results = ObjectResults(2)
    for number, one in enumerate((
        list(range(most)), {"texts": ["x" * 1000] * 2000}, {str(item): item for item in range(most)},
        [[0] * (most // 2)] * 3, "x" * object_results.MAX_BYTES * 2,
    )):  # fmt: skip
        ran(results, "section", number, [one])
        assert given(results, "section", number) == [None]
    ran(results, "section", 9, [list(range(most - 2))])
    assert given(results, "section", 9) == [[list(range(most - 2))]]
