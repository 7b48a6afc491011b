"""How much of its messages a job may log: a size for each node, or a part of all of them. Pure.

It must never choose groups that log more, if any groups log so little.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from swift_recovery.strategy.choose import Helpers, best_groups, chain_of
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
        raise ValueError(f"{text!r} is a few bytes; type {text}% of all messages, or {text}GiB")
    return Budget(float(found[1]) / 100, True) if found[2] == "%" else Budget(float(found[1]) * UNITS[found[2]], False)


def groups_within(profile: Profile, budget: Budget, helpers: Helpers = "nobody") -> Groups:
    """Groups of machines with the shortest expected recovery, with *helpers*. A size is for the logs of each machine,
    between two checkpoints. One group of all machines, which log nothing: no others fit. For a part of the messages of
    more than `MOST_EXACT` machines they are those of the paper's algorithm: a coordinator must not think for minutes.
    """
    chain = chain_of(profile)
    everything = chain.log_bytes(alone(chain))
    if budget.is_part and chain.num_machines > MOST_EXACT:
        return greedy(chain, everything * budget.value)
    if budget.is_part:
        return best_groups(profile, everything * budget.value, helpers)
    return best_groups(profile, everything, helpers, budget.value)
