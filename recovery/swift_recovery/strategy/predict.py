"""How long a recovery takes that a plan describes, and whether to go back to a checkpoint is sooner. Pure.

Seconds are from the loss until all ranks have made the first iteration after it. It must never count on anything that
the plan does not have: a replica that is gone, a log that is incomplete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swift_recovery.planning.plan import Plan
from swift_recovery.strategy.choose import with_helpers_s
from swift_recovery.strategy.profile import Profile

# Predictions hold within that: less is no reason to give up what survivors have in memory.
MARGIN = 1.5
# What was predicted worse than that says nothing about the next time.
_MOST_ERROR = 20.0


@dataclass(frozen=True)
class Predicted:
    """*way*: by which the state comes back, see `choose.Way`. *repeated_s*: of iterations that are made once more;
    *fixed_s*: of all else in the recovery."""

    way: str
    fixed_s: float
    repeated_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.fixed_s + self.repeated_s

    def corrected(self, errors: Mapping[str, float]) -> Predicted:
        """*errors*: what `learned` made of recoveries by the same way."""
        fixed, repeated = (errors.get(name, 1.0) for name in _names(self.way))
        return Predicted(self.way, self.fixed_s * fixed, self.repeated_s * repeated)

    def errors_of(self, took_s: float, repeated_s: float) -> dict[str, float]:
        """How many times as long as predicted a recovery took, for both of its parts: each has errors of its own, and
        the next recovery may have to repeat many more iterations."""
        fixed, repeated = _names(self.way)
        found = {fixed: _ratio(took_s - repeated_s, self.fixed_s)}
        if self.repeated_s > 0 and repeated_s > 0:
            found[repeated] = _ratio(repeated_s, self.repeated_s)
        return found


def slowdown_of(profile: Profile, iterations_per_s: float | None) -> float:
    """How many times as long as when it was measured an iteration of the job takes now. *iterations_per_s*: of the last
    half minute, None: not known. It counts iterations, and all that held them up: within `MARGIN` it proves nothing."""
    if not iterations_per_s:
        return 1.0
    slowdown = 1 / (iterations_per_s * profile.iteration_s)
    return slowdown if slowdown > MARGIN else 1.0


def learned(errors: Mapping[str, float], found: Mapping[str, float]) -> dict[str, float]:
    """*errors* after a recovery that gave *found*: their geometric mean with what was known, and beside it the last two
    of each. Those of a way that was not taken fade: it is tried again."""
    known = {name: value**0.5 for name, value in errors.items()}
    for name, value in found.items():
        known[name] = (errors.get(name, value) * value) ** 0.5
        if _last(name) in errors:
            known[_before(name)] = errors[_last(name)]
        known[_last(name)] = value
    return known


def cautious(
    errors: Mapping[str, float], way: str, of_two: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    """Those of *way*, as far as two recoveries, one after the other, agree: one that something else has held up proves
    nothing. *of_two*: `min` for a way that may be slower than predicted, `max` for one that may be faster."""
    found = {}
    for name in _names(way):
        last_two = [errors.get(_last(name), 1.0), errors.get(_before(name), 1.0)]
        found[name] = of_two([errors.get(name, 1.0), *last_two])
    return found


def _last(name: str) -> str:
    return f"{name}, the last"


def _before(name: str) -> str:
    return f"{name}, the one before"


def _names(way: str) -> tuple[str, str]:
    return way, f"{way}, an iteration"


def _ratio(took_s: float, said_s: float) -> float:
    return min(max(took_s / said_s, 1 / _MOST_ERROR), _MOST_ERROR)


def in_place(profile: Profile, plan: Plan, machine_of: Callable[[int], int], num_shares: int = 1) -> Predicted | None:
    """Of a plan of the kind `copy`, None for another one. *machine_of*: of a rank. *num_shares*: so many processes
    repeat what is lost together."""
    if plan.kind != "copy":
        return None
    if plan.replays:
        profile = profile.slowed(plan.slowdown)
        load_s = profile.load_s if plan.checkpoint else 0.0
        # Those that are no neighbours do not wait for each other.
        each_s = [
            with_helpers_s(profile, range(min(run), max(run) + 1), num_shares, tuple(run.values()))
            for run in _runs(profile, plan.replays, machine_of)
        ]
        repeated_s = (plan.iteration - plan.checkpoint) * max(each_s)
        way = "log" if num_shares == 1 else "log+parallel"
        return Predicted(way, profile.replace_s + load_s + profile.iteration_s, repeated_s)
    # Each rank gets what it has lost, over the network of its machine.
    moved = max(
        (profile.machines[at].state_bytes / profile.gpus_per_machine * num
         for at, num in Counter(map(machine_of, plan.sources)).items()),
        default=0.0,
    )  # fmt: skip
    return Predicted("replica", profile.replace_s + moved / profile.network_bytes_per_s + profile.iteration_s)


def _runs(profile: Profile, ranks: Iterable[int], machine_of: Callable[[int], int]) -> list[Counter[int]]:
    """Of lost ranks those that are neighbours, and repeat together: by machine, how many."""
    # Where each rank is a stage those of one machine need not be neighbours.
    is_each = all(machine.stages == profile.gpus_per_machine for machine in profile.machines)
    found: list[Counter[int]] = []
    before = None
    for rank in sorted(ranks, key=lambda rank: (machine_of(rank), rank)):
        at = machine_of(rank)
        if before is None or at - machine_of(before) > 1 or (is_each and rank - before > 1):
            found.append(Counter())
        found[-1][at] += 1
        before = rank
    return found


def rollback(profile: Profile, num_iterations: int) -> Predicted:
    """All workers restart from a checkpoint, and make so many iterations once more, and the one that was cut."""
    fixed_s = profile.restart_s + profile.load_s + profile.iteration_s
    return Predicted("checkpoint", fixed_s, num_iterations * profile.iteration_s)


def is_sooner(rolled_back: Predicted, kept: Predicted) -> bool:
    """Whether to roll all back pays, by so much that it may be believed."""
    return rolled_back.seconds * MARGIN < kept.seconds
