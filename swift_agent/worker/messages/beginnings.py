"""What set-up gave each rank when the job began: a replacement that repeats iterations has to begin with the same.

This module must never communicate: ranks hear of each other's through `rejoin`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift_recovery.errors import CannotReplay


class Beginnings:
    """*origin*: what this process's set-up gave, checksums of its state and its seed. *origins*: what that of the first
    process of each rank gave, empty if that is not known."""

    def __init__(self) -> None:
        self.origin: list[int] = []
        self.origins: list[list[int]] = []
        self.all_began_at = 0
        """The iteration of the checkpoint with which all ranks began together; 0: with what set-up gave."""

    def to_json(self) -> list[Any]:
        """What a replacement has to know of the begin of the job, for its `hear`."""
        return [self.origins, self.all_began_at]

    def hear(self, beginning: Sequence[Any]) -> None:
        """A replacement hears that from another rank, which may not know it."""
        if beginning[0] or not self.origins:
            self.origins, self.all_began_at = beginning

    def check(self, rank: int, *, has_checkpoint: bool) -> None:
        """Raise CannotReplay if set-up gave something else here than for the first process of this rank, as far as that
        is known: another seed, or, where no checkpoint takes its place, another state."""
        first_origin = self.origins[rank] if self.origins else self.origin
        for mine, first, what in zip(self.origin, first_origin, ("state", "seed"), strict=True):
            if mine != first and not (what == "state" and has_checkpoint):
                raise CannotReplay(
                    f"rank {rank}: the script's set-up gives another {what} than when the job began. It must give the "
                    "same each time: seed it (torch.manual_seed), and load no checkpoint that the job itself writes"
                )
