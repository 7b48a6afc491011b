"""Seeds of one rank for all that draws in the training loop: a series of its own for each purpose.

With them a step that is run again, and a replacement, draw what the first one drew. This module must never draw
anything.
"""

from __future__ import annotations

from typing import Literal

import torch

from swift_agent import native
from swift_recovery.state.randomness import SeedSeries, compiled_seeder, seed_series

RngMode = Literal["iteration", "user"]


class Seeds:
    """Seeds of one rank, a series for each purpose: its functions seed all generators. With mode "user" generators are
    left alone, and kept in snapshots instead.
    """

    def __init__(self, mode: RngMode, seed: int | None, rank: int) -> None:
        self.keeps_generators = mode == "user"
        self._seed, self._rank = seed, rank
        self.for_iteration: SeedSeries = _leave_alone
        self.for_data: SeedSeries = _leave_alone
        self.for_pass: SeedSeries = _leave_alone
        self.for_section: SeedSeries = _leave_alone
        self.for_batch: SeedSeries = _leave_alone
        self.for_inside: SeedSeries = _leave_alone
        self.common = 0
        """Rank 0's `number`, the same on all ranks."""

    @property
    def number(self) -> int:
        """Of the seed, within 62 bits; 0 where generators are left alone."""
        return 0 if self.keeps_generators else (self._seed or 0) & ((1 << 62) - 1)

    def settle(self) -> None:
        """Training begins: without a seed of its own the job takes the script's."""
        if self._seed is None:
            self._seed = torch.initial_seed()
        if self.keeps_generators:
            return
        library = native.load()
        seeder = compiled_seeder(library.Seeder) if library else None
        seed, rank = self._seed, self._rank
        # The numbers are tags: with others the same job would draw other numbers.
        self.for_iteration = seed_series(seed, rank, 1, seeder)
        self.for_data = seed_series(seed, rank, 2, seeder)
        self.for_pass = seed_series(seed, rank, 3, seeder)
        self.for_section = seed_series(seed, rank, 4, seeder)
        self.for_batch = seed_series(seed, rank, 5, seeder)
        # 6: where batches are loaded, see `loader_order`.
        self.for_inside = seed_series(seed, rank, 7, seeder)

    @property
    def key(self) -> tuple[int, int] | None:
        """Of seeds for where batches are loaded; None where generators are left alone."""
        return None if self.keeps_generators else (self._seed or 0, self._rank)


def _leave_alone(index: int) -> None: ...
