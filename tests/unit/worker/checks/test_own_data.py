"""Ranks say to each other whether the script's own data starts again; by a real store."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch.distributed as dist

from swift_agent.worker.checks.own_data import OwnData


class Told(Exception):
    pass


def differ(why: str) -> NoReturn:
    raise Told(why)


def ranks(num: int, *, is_cut: bool = False) -> list[OwnData]:
    store = dist.HashStore()
    found = [OwnData(rank, lambda: store, differ, lambda: is_cut, lambda: num) for rank in range(num)]
    for one in found:
        one.recovered()
    return found


@pytest.mark.parametrize("is_replacement_first", [False, True])
def test_one_that_starts_again_among_others_is_told_by_whoever_comes_second(is_replacement_first: bool) -> None:
    one, replacement, third = ranks(3)
    third.given(7, True, False)  # it comes again there
    order = [(replacement, True), (one, False)] if is_replacement_first else [(one, False), (replacement, True)]
    order[0][0].given(7, order[0][1], order[0][1])
    with pytest.raises(Told, match=r"iteration 7 was given on rank 1 what the run, .*, and not on rank 0: "):
        order[1][0].given(7, order[1][1], order[1][1])


def test_data_that_comes_again_says_nothing() -> None:
    """On some of those that were there only (a flag that each rank draws); on all; and in a replacement, too."""
    one, other, replacement = ranks(3)
    for iteration, (mine, theirs) in enumerate([(True, False), (True, True), (False, False)]):
        one.given(iteration, mine, False)
        other.given(iteration, theirs, False)
        replacement.given(iteration, False, iteration == 0)
    one, other, replacement = ranks(3)
    for each, is_first in ((one, False), (replacement, True), (other, False)):
        each.given(8, True, is_first)


def test_what_all_start_again_with_nobody_can_tell() -> None:
    """Workers were lost one after the other, and none of those that were there is left."""
    one, other = ranks(2)
    for _ in range(3):  # what is run once more is said once
        one.given(6, True, True)
    with pytest.raises(Told, match=r"every rank is a replacement, and iteration 6 got.*no rank is left"):
        other.given(6, True, True)
    one, other = ranks(2)
    one.given(6, False, True)
    other.given(6, False, True)


def test_iterations_are_compared_with_themselves() -> None:
    one, replacement = ranks(2)
    replacement.given(6, True, True)  # it begins with the one before
    one.given(7, False, False)
    replacement.given(7, False, False)


def test_only_the_first_iterations_after_a_recovery_are_compared() -> None:
    undisturbed = OwnData(0, dist.HashStore, differ, lambda: False, lambda: 1)
    undisturbed.given(0, True, True)
    one, other = ranks(2)
    for iteration in range(5):
        one.given(iteration, False, False)
    other.given(4, True, True)


def test_a_generation_that_ends_says_nothing() -> None:
    one, other = ranks(2, is_cut=True)
    one.given(3, False, False)
    other.given(3, True, True)
