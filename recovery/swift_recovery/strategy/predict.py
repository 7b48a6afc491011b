"""How long a recovery takes that a plan describes, and whether to go back to a checkpoint is sooner. Pure.

Seconds are from the loss until all ranks have made the first iteration after it. It must never count on anything that
the plan does not have: a replica that is gone, a log that is incomplete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swift_recovery.planning.plan import Plan
from swift_recovery.strategy.choose import with_helpers_s
from swift_recovery.strategy.profile import Profile

# Predictions hold within that: less is no reason to give up what survivors have in memory.
MARGIN = 1.5


@dataclass(frozen=True)
class Predicted:
    """*way*: by which the state comes back, see `choose.Way`. *seconds*: of the whole recovery."""

    way: str
    seconds: float

    def corrected(self, errors: Mapping[str, float]) -> Predicted:
        """*errors*: by way, how many times as long as predicted the last one took."""
        return Predicted(self.way, self.seconds * errors.get(self.way, 1.0))


def in_place(profile: Profile, plan: Plan, machine_of: Callable[[int], int], num_shares: int = 1) -> Predicted | None:
    """Of a plan of the kind `copy`, None for another one. *machine_of*: of a rank. *num_shares*: so many processes
    repeat what is lost together."""
    if plan.kind != "copy":
        return None
    if plan.replays:
        machines = sorted({machine_of(rank) for rank in plan.replays})
        group = range(machines[0], machines[-1] + 1)
        repeated_s = (plan.iteration - plan.checkpoint) * with_helpers_s(profile, group, num_shares)
        load_s = profile.load_s if plan.checkpoint else 0.0
        way = "log" if num_shares == 1 else "log+parallel"
        return Predicted(way, profile.replace_s + load_s + repeated_s + profile.iteration_s)
    moved = max((profile.machines[machine_of(rank)].state_bytes for rank in plan.sources), default=0.0)
    return Predicted("replica", profile.replace_s + moved / profile.network_bytes_per_s + profile.iteration_s)


def rollback(profile: Profile, num_iterations: int) -> Predicted:
    """All workers restart from a checkpoint, and make so many iterations once more, and the one that was cut."""
    return Predicted("checkpoint", profile.restart_s + profile.load_s + (num_iterations + 1) * profile.iteration_s)


def is_sooner(rolled_back: Predicted, kept: Predicted) -> bool:
    """Whether to roll all back pays, by so much that it may be believed."""
    return rolled_back.seconds * MARGIN < kept.seconds
