"""How much of its messages a job may log: a size for each node, or a part of all of them. Pure.

It must never choose groups that log more, if any groups log so little.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from swift_recovery.strategy.choose import Helpers, best_groups, chain_of, logged_bytes
from swift_recovery.strategy.grouping import Groups, alone, greedy
from swift_recovery.strategy.profile import Profile

UNITS = {"": 1, **{name: 1 << (10 * power) for power, name in enumerate(("KiB", "MiB", "GiB", "TiB", "PiB"), 1)}}


# Of so many uneven machines the best groups are found within half a second.
MOST_EXACT = 64


@dataclass(frozen=True)
class Budget:
    """*value*: bytes, or with *is_part* a part of what all messages between machines are."""

    value: float
    is_part: bool


def parse_budget(text: str) -> Budget:
    """`200GiB` or `20%`. Raises ValueError, with what to type."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(%|[KMGTP]iB|)", text.strip())
    if found is None or (found[2] == "%" and float(found[1]) > 100):
        raise ValueError(f"{text!r} is no size; type 500GiB, 2TiB, or 20% of all messages")
    if not found[2] and 0 < float(found[1]) < 1024:
        if float(found[1]) > 100:
            raise ValueError(f"{text!r} is a few bytes; type {text}GiB")
        raise ValueError(f"{text!r} is a few bytes; type {text}% of all messages, or {text}GiB")
    return Budget(float(found[1]) / 100, True) if found[2] == "%" else Budget(float(found[1]) * UNITS[found[2]], False)


# Of a budget: sums of bytes that are no whole numbers are rounded.
_ROUNDED = 1 + 1e-12


def groups_within(
    profile: Profile, budget: Budget, helpers: Helpers = "nobody", elsewhere_of: Sequence[float] = (),
    most_helpers: int | None = None,
) -> Groups:  # fmt: skip
    """Groups of machines with the shortest expected recovery, with *helpers*, at most *most_helpers* of them. A size is
    for the logs of each machine, between two checkpoints. One group of all machines, which log nothing: no others fit.
    Of more than `MOST_EXACT` machines they are those of the paper's algorithm, which knows of no helpers: a coordinator
    must not think for minutes.

    *elsewhere_of*: what each machine sends in an iteration to others than its neighbours, as interleaved stages do. All
    of that is taken to be logged, as it is where it goes from the last machine to the first.
    """
    chain = chain_of(profile)
    along, beside = chain.log_bytes(alone(chain)), sum(elsewhere_of) * chain.iterations
    if not budget.is_part:
        of_each = budget.value * _ROUNDED
        if chain.num_machines > MOST_EXACT:
            return greedy(chain, math.inf, fits=lambda group: logged_bytes(profile, group, elsewhere_of) <= of_each)
        return best_groups(profile, along * _ROUNDED, helpers, of_each, elsewhere_of, most_helpers)
    most = ((along + beside) * budget.value - beside) * _ROUNDED
    if most < 0:
        return (range(chain.num_machines),)
    if chain.num_machines > MOST_EXACT:
        return greedy(chain, most)
    return best_groups(profile, most, helpers, most_helpers=most_helpers)
