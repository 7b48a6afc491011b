"""Whether all ranks go on with data that the script makes itself, or a replacement starts again with it.

Such data comes from a position that only the script knows, and in a replacement that is where the script begins.
So in the first iterations after a recovery ranks say to each other, in the store of the generation, what they were
given: a replacement if that is what the run, or the epoch, began with, the others if it is not. Between those that were
there nothing is compared: such data may come again on some of them only. Each says it first, and looks then whether
another one has said what does not fit. No rank waits for another, and a run without failures pays nothing.

    replacement: again --> has a rank said on? are all replacements, and none left that could? --> told
    others:      on    --> has a replacement said again? --> told

This module must never look at the data itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

# A replacement may begin with the iteration before that of the others.
_NUM_ITERATIONS = 3
_REMEDY = (
    "Take it from job.batches, next() inside the iteration, or from the number of the iteration (see: Will my script "
    "be recovered?)"
)


class OwnData:
    """One per worker. *store*: of the generation. *differ*: has all workers start again, with that reason. *is_cut*:
    whether this generation ends."""

    def __init__(
        self, rank: int, store: Callable[[], Any], differ: Callable[[str], NoReturn], is_cut: Callable[[], bool],
        world_size: Callable[[], int] = dist.get_world_size,
    ) -> None:  # fmt: skip
        self._rank, self._store, self._differ, self._is_cut = rank, store, differ, is_cut
        self._world_size = world_size
        self._num_left, self._said = 0, -1

    def recovered(self) -> None:
        """Training begins in another generation."""
        self._num_left, self._said = _NUM_ITERATIONS, -1

    def given(self, iteration: int, is_again: bool, is_first: bool) -> None:
        """That is given now what the script has made; *is_again*: what it began with. *is_first*: by a replacement,
        for the first time."""
        if not self._num_left or iteration == self._said or self._is_cut():
            return
        self._num_left, self._said = self._num_left - 1, iteration
        if is_again != is_first:
            return
        why = ""
        # A store that is cut, or away: the next collective finds out.
        with contextlib.suppress(dist.DistStoreError):
            why = self._compare(self._store(), f"own-data/{iteration}", iteration, is_again)
        if why:
            self._differ(f"{why}. {_REMEDY}")

    def _compare(self, store: Any, key: str, iteration: int, is_again: bool) -> str:
        mine, other = (f"{key}/again", f"{key}/on") if is_again else (f"{key}/on", f"{key}/again")
        store.set(mine, f"{self._rank}")
        if store.check([other]):
            ranks = [f"{self._rank}", store.get(other).decode()]
            return (
                f"iteration {iteration} was given on rank {ranks[not is_again]} what the run, or the epoch, began "
                f"with, and not on rank {ranks[is_again]}: the script keeps to itself where its data is, and starts "
                "again in a replacement"
            )
        if is_again and store.add(f"{key}/num", 1) == self._world_size():
            return (
                f"every rank is a replacement, and iteration {iteration} got the first data of the run or epoch on all "
                "of them. That may be right, or the script's own loader started over; no rank is left to tell"
            )
        return ""
