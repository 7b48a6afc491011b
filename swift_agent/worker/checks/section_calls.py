"""Whether ranks make the same collectives in a section that comes after a recovery.

A section that was cut is run again, and a replacement runs it for the first time. If the script decides in it by what
it keeps to itself (a flag, a counter), they go different ways: one collective meets another one. Sizes that differ end
the process in gloo, or make all wait for ever in the same place; sizes that do not give a wrong result without a word.
So each rank says, right before a collective, in the store of the generation which one it is; the first writes, the
others compare. No rank waits for another. A run without failures pays nothing.

This module must never make or stop a collective.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

# After a recovery all of the first sections are compared, and in each all of the first collectives; then those whose
# number is a power of two.
SECTIONS = 8
CALLS = 64

_END = "the end of the section"


def is_compared(number: int, first: int) -> bool:
    """*number*: from 1 on."""
    return number <= first or number & (number - 1) == 0


class SectionCalls:
    """One per worker. *differ*: has all workers start again, with that reason. *is_cut*: whether this generation ends,
    in which no rank makes a collective any more."""

    def __init__(
        self, rank: int, differ: Callable[[str], NoReturn], is_cut: Callable[[], bool] = lambda: False
    ) -> None:
        self._rank, self._differ, self._is_cut = rank, differ, is_cut
        self._sections_left_out = True  # nothing has failed
        self._num_sections = 0
        self._store: Any = None
        self._key = ""
        self._calls: Counter[tuple[int, ...]] = Counter()

    def recovered(self) -> None:
        """From here on sections are compared."""
        self._sections_left_out, self._num_sections = False, 0

    def begin(self, section: int, store: Any, generation: int) -> None:
        """Section number *section* begins, on the groups of *generation*, whose store is *store*."""
        self._store = None
        if self._sections_left_out:
            return
        self._num_sections += 1
        if is_compared(self._num_sections, SECTIONS):
            self._store, self._key = store, f"section-calls/{generation}/{section}"
            self._calls.clear()

    @property
    def compares(self) -> bool:
        return self._store is not None

    def before(self, ranks: tuple[int, ...], what: str, where: str) -> None:
        """The next collective of the group of *ranks* is *what*, alike on all of them; *where*: in the script."""
        self._calls[ranks] += 1
        if not self._is_cut() and is_compared(self._calls[ranks], CALLS):
            self._compare(ranks, self._calls[ranks], what, f"{what} ({where})")

    def end(self) -> None:
        """It is over. A rank that waits for this one in a collective more is told."""
        if self._store is None or self._is_cut():
            return
        for ranks, number in self._calls.items():
            if is_compared(number + 1, CALLS):
                self._compare(ranks, number + 1, _END, _END)
        self._store = None

    def _compare(self, ranks: tuple[int, ...], number: int, what: str, mine: str) -> None:
        key = f"{self._key}/{','.join(map(str, ranks))}/{number}"
        said = f"{what}\0{self._rank}\0{mine}"
        first = said
        # A store that is cut, or away: the collective itself finds out.
        with contextlib.suppress(dist.DistStoreError):
            first = self._store.compare_set(key, "", said).decode()
        theirs, rank, place = first.split("\0")
        if theirs != what:
            self._differ(
                f"a section (@job.resilient) that was run after a recovery goes another way on rank {self._rank} than "
                f"on rank {rank}: {mine} here, {place} there. What the script decides by in it, a flag or a counter, "
                "is not what it was when the section began: have job.track() name an object that keeps it"
            )
