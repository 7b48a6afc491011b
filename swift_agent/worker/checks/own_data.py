"""Whether all ranks go on with data that the script makes itself, or a replacement starts again with it.

Such data comes from a position that nobody but the script knows, and in a replacement that is where the script begins.
So in the first iterations after a recovery each rank says, in the store of the generation, whether it was given what
the run, or the epoch, began with. Either that is so on all ranks, as with a text that is read again and again, or on
none. Whoever is first writes, the others compare. Nobody waits for anybody, and a run without failures pays nothing.

This module must never look at the data itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

# A replacement may begin with the iteration before that of the others.
_NUM_ITERATIONS = 3


class OwnData:
    """One per worker. *store*: of the generation. *differ*: has all workers start again, with that reason. *is_cut*:
    whether this generation ends."""

    def __init__(
        self, rank: int, store: Callable[[], Any], differ: Callable[[str], NoReturn], is_cut: Callable[[], bool]
    ) -> None:
        self._rank, self._store, self._differ, self._is_cut = rank, store, differ, is_cut
        self._num_left = 0

    def recovered(self) -> None:
        """Training begins in another generation."""
        self._num_left = _NUM_ITERATIONS

    def given(self, iteration: int, is_again: bool) -> None:
        """That is given now what the script has made; *is_again*: what it began with."""
        if not self._num_left or self._is_cut():
            return
        self._num_left -= 1
        mine = f"{int(is_again)} {self._rank}"
        first = mine
        # A store that is cut, or away: the next collective finds out.
        with contextlib.suppress(dist.DistStoreError):
            first = self._store().compare_set(f"own-data/{iteration}", "", mine).decode()
        others, rank = first.split()
        if int(others) != is_again:
            self._differ(
                f"iteration {iteration} was given on rank {self._rank if is_again else rank} what the run, or the "
                f"epoch, began with, and not on rank {rank if is_again else self._rank}: the script keeps to itself "
                "where its data is, and starts again in a replacement. Take it from job.batches, next() inside the "
                "iteration, or from the number of the iteration (see: Will my script be recovered?)"
            )
