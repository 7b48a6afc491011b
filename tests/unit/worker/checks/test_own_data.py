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
    found = [OwnData(rank, lambda: store, differ, lambda: is_cut) for rank in range(num)]
    for one in found:
        one.recovered()
    return found


@pytest.mark.parametrize("is_replacement_first", [False, True])
def test_one_that_starts_again_among_others_is_told_by_whoever_comes_second(is_replacement_first: bool) -> None:
    one, replacement = ranks(2)
    order = [(replacement, True), (one, False)] if is_replacement_first else [(one, False), (replacement, True)]
    order[0][0].given(7, order[0][1])
    with pytest.raises(Told, match=r"iteration 7 was given on rank 1 what the run, .*, and not on rank 0: "):
        order[1][0].given(7, order[1][1])


@pytest.mark.parametrize("is_again", [False, True])
def test_data_that_comes_again_does_so_on_all_ranks(is_again: bool) -> None:
    for iteration in range(3):
        for one in ranks(3):
            one.given(iteration, is_again)


def test_iterations_are_compared_with_themselves() -> None:
    one, replacement = ranks(2)
    replacement.given(6, True)  # it begins with the one before
    one.given(7, False)
    replacement.given(7, False)


def test_only_the_first_iterations_after_a_recovery_are_compared() -> None:
    undisturbed = OwnData(0, dist.HashStore, differ, lambda: False)
    undisturbed.given(0, True)
    one, other = ranks(2)
    for iteration in range(5):
        one.given(iteration, False)
    other.given(4, True)


def test_a_generation_that_ends_says_nothing() -> None:
    one, other = ranks(2, is_cut=True)
    one.given(3, False)
    other.given(3, True)
