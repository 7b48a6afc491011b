"""Where a training loop stands, in numbers that another process can go on from. Values only.

This module must never know what a number leads to: where a batch is found, or a replacement waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True)
class Position:
    """Where the loop stands: all that a replacement needs to start its script at the same point.

    *passes* counts finished passes over a loader, *batch* the batches taken in the current one, *sections* the finished
    `@job.resilient` calls. The `epoch_*` fields are the counts at the begin of the current epoch, that of `job.epochs`,
    or (*is_told*) the one that the script has told its sampler. *peeks*: the passes of this epoch that the script has
    left after one batch, which no iteration has used, and the last one before. *loop*: so many loops of `job.epochs`
    have begun; None in what a version wrote that did not count them: the first one. *is_end*: at the end of a
    loop without a loader, not at the beginning of what comes next after as many iterations.
    """

    iteration: int = 0
    epoch: int = 0
    passes: int = 0
    batch: int = 0
    sections: int = 0
    epoch_passes: int = 0
    epoch_sections: int = 0
    is_told: bool = False
    peeks: tuple[int, ...] = ()
    loop: int | None = 0
    is_end: bool = False

    def begun_again(self) -> Position:
        """Where a script stands that has been started again, to get here."""
        return replace(
            self, passes=self.epoch_passes, sections=self.epoch_sections, batch=0, peeks=(), loop=0, is_end=False
        )

    def begin_epoch(self, epoch: int, *, is_told: bool) -> None:
        self.epoch, self.is_told = epoch, is_told
        self.epoch_passes, self.epoch_sections = self.passes, self.sections
        self.peeks = self.peeks[-1:]  # that there are some


@dataclass(frozen=True)
class Units:
    """What a batch of a `Position` is: so many ranks take one of so many samples each, 0 where that is not known."""

    num_ranks: int = 1
    num_samples: int = 0

    def batches_of(self, other: Units, count: int) -> int:
        """How many batches of ours are past the first *count* of *other*: as few as leave none of those samples."""
        per_batch, theirs = self.num_samples or 1, other.num_samples or 1
        if not self.num_samples or not other.num_samples:
            per_batch = theirs = 1
        return -(-count * other.num_ranks * theirs // (self.num_ranks * per_batch))
