"""Space against time: what logs of a pipeline take, and how long a recovery takes with so much. Pure.

The curves of figure 11 of SWIFT (arXiv 2302.06173). Machines form groups, inside which no message is logged: fewer
groups log less, and repeat more. It must never offer one group of all machines: nothing is logged then, and nothing
could be repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from swift_recovery.strategy.choose import Helpers, best_groups, chain_of, log_recovery_s
from swift_recovery.strategy.grouping import Groups, alone, greedy
from swift_recovery.strategy.profile import Profile

Algorithm = Literal["greedy", "optimum"]
MAX_BUDGETS = 64


@dataclass(frozen=True)
class Point:
    """*log_bytes*: of all machines, between two checkpoints. *recovery_s*: expected, for one lost machine."""

    log_bytes: float
    recovery_s: float
    groups: Groups


def curve(profile: Profile, algorithm: Algorithm, helpers: bool) -> tuple[Point, ...]:
    """For falling budgets, from all messages to those between two groups; each groups once. "greedy" is the paper's
    algorithm, "optimum" the best there is. *helpers*: with parallel recovery (SWIFT, section 5.2). () without a
    pipeline."""
    if not profile.boundary_bytes:
        return ()
    chain = replace(chain_of(profile), helpers=helpers)
    who: Helpers = "groups" if helpers else "nobody"
    find: Callable[[float], Groups]
    if algorithm == "greedy":
        find = lambda budget: greedy(chain, budget)  # noqa: E731
    else:
        find = lambda budget: best_groups(profile, budget, who)  # noqa: E731
    everything = chain.log_bytes(alone(chain))
    steps = min(MAX_BUDGETS, chain.num_machines - 1)
    found: dict[Groups, Point] = {}
    for step in range(steps, 0, -1):
        groups = find(everything * step / steps * (1 + 1e-12))
        if len(groups) > 1 and groups not in found:
            found[groups] = Point(chain.log_bytes(groups), log_recovery_s(profile, groups, who), groups)
    return tuple(found.values())
