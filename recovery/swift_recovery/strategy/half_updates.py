"""What becomes of an update that a failure cuts in the middle: time beside accuracy. Pure.

In the terms of Nicolae et al., Towards Low-Overhead Resilience for Data Parallel Deep Learning (CCGrid'22): roll back
to a checkpoint, immediate rollback of the mini-batch, lossy forward recovery; and what this product does, which is
exact. A model of it in kind: its numbers are not the paper's, and say nothing of the accuracy at the end.
It must never call a way exact that learns from other samples than an undisturbed run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal["checkpoint", "exact", "immediate-rollback", "lossy-forward"]


@dataclass(frozen=True)
class Cut:
    """A failure in the middle of an update of data parallel replicas. Raises `ValueError` for what cannot be.

    - *num_replicas*: that train together, one of which is lost.
    - *batch*: samples of one iteration, of all replicas together.
    - *updated*: the part of the parameters that had their update, from 0 to 1.
    - *iteration_s*: of one iteration; the failure comes at its end, where the update is.
    - *replace_s*: until the replacement has the state.
    - *restart_s*, *interval_s*: until all run again from a checkpoint; of training between two checkpoints.
    """

    num_replicas: int
    batch: int
    updated: float
    iteration_s: float
    replace_s: float
    restart_s: float
    interval_s: float

    def __post_init__(self) -> None:
        if self.num_replicas < 2 or self.batch < 1 or not 0 <= self.updated <= 1:
            raise ValueError("at least 2 replicas, one sample, and a part of the parameters from 0 to 1")
        if min(self.iteration_s, self.replace_s, self.restart_s, self.interval_s) < 0:
            raise ValueError("times are no less than 0")


@dataclass(frozen=True)
class Outcome:
    """Of one failure.

    - *seconds*: that all replicas lose.
    - *twice*: the part of the parameters that are updated twice with the same batch.
    - *unlearnt*: samples, weighted with the part of the parameters that do not learn from them.
    """

    name: Name
    seconds: float
    twice: float = 0.0
    unlearnt: float = 0.0

    @property
    def is_exact(self) -> bool:
        return self.twice == 0 and self.unlearnt == 0


def outcomes(cut: Cut) -> tuple[Outcome, ...]:
    """Of each way, from the slowest to the fastest where checkpoints are rare."""
    return (
        # All go back, and train half of what lies between two checkpoints again.
        Outcome("checkpoint", cut.restart_s + cut.interval_s / 2),
        # The update is taken back, or completed, and the iteration is run again.
        Outcome("exact", cut.replace_s + cut.iteration_s),
        # All take over the half-done update, and make the whole update on top of it.
        Outcome("immediate-rollback", cut.replace_s + cut.iteration_s, twice=cut.updated),
        # What is updated stays so; the rest is updated with the gradients of those that are left.
        Outcome("lossy-forward", cut.replace_s, unlearnt=(1 - cut.updated) * cut.batch / cut.num_replicas),
    )
