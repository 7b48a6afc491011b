"""Selective logging: which machines of a pipeline form a group, inside which no message is logged. Pure.

A failure of one machine rolls its whole group back, so larger groups log less and recover slower. The groups are
neighbours in the pipeline. SWIFT (arXiv 2302.06173), section 5.3.

It must never choose groups that log more than the budget, if any groups log so little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Groups = tuple[range, ...]
Weighting = Literal["paper", "authors"]


@dataclass(frozen=True)
class Chain:
    """Machines of a pipeline, in its order.

    - *times_s*: by machine, the computation of one iteration.
    - *boundary_bytes*: by pair of neighbours, what they send each other in one iteration.
    - *bytes_per_s*: of the network between two machines.
    - *iterations*: so many are logged between two checkpoints.
    - *helpers*: with parallel recovery, all machines repeat what a group has lost (section 5.2).

    Raises `ValueError`.
    """

    times_s: Sequence[float]
    boundary_bytes: Sequence[float]
    bytes_per_s: float
    iterations: int = 1
    helpers: bool = False

    def __post_init__(self) -> None:
        if len(self.boundary_bytes) != len(self.times_s) - 1:
            raise ValueError(
                f"{len(self.times_s)} machines have {len(self.times_s) - 1} boundaries, not {len(self.boundary_bytes)}"
            )
        if self.bytes_per_s <= 0:
            raise ValueError("the network must carry more than nothing")

    @property
    def num_machines(self) -> int:
        return len(self.times_s)

    def repeat_s(self, group: range) -> float:
        """Of one iteration, by one group: its computation, and the messages inside it, which are sent again (the
        paper's recovery time of a merged group)."""
        inner_bytes = sum(self.boundary_bytes[boundary] for boundary in group[:-1])
        time_s = sum(self.times_s[machine] for machine in group) + inner_bytes / self.bytes_per_s
        # Those who help are groups of the same size.
        return time_s / (self.num_machines // len(group)) if self.helpers else time_s

    def expected_repeat_s(self, groups: Iterable[range]) -> float:
        """Of one iteration, by the group of a machine that is lost; each is as likely as another."""
        return sum(len(group) * self.repeat_s(group) for group in groups) / self.num_machines

    def log_bytes(self, groups: Iterable[range]) -> float:
        """Of all iterations between two checkpoints, on all machines together."""
        ends = [group[-1] for group in groups]
        return sum(self.boundary_bytes[end] for end in ends if end < self.num_machines - 1) * self.iterations


def alone(chain: Chain) -> Groups:
    """Each machine is its own group: everything between machines is logged."""
    return tuple(range(machine, machine + 1) for machine in range(chain.num_machines))


def greedy(
    chain: Chain, budget_bytes: float, weighting: Weighting = "paper",
    fits: Callable[[range], bool] = lambda group: True,
) -> Groups:  # fmt: skip
    """The paper's algorithm: merge two neighbouring groups, those that add least recovery time for each byte that they
    save, until the logs fit into the budget. Where nothing is saved groups are merged last.

    *weighting* "paper": a group's time counts once for each of its machines, as in the formula of section 5.3.
    "authors": it counts once, but the merged one twice, and the log is taken for one boundary longer than it is, as in
    the script that made Tables 6 and 7 (`benchmarks/distributed/ft/pipeline_vit/profile/optimizer.py`).

    *fits*: whether what a group logs is allowed to it; groups for which it is not are merged, too.
    """
    groups = list(alone(chain))
    too_much = float(max(chain.boundary_bytes, default=0.0) * chain.iterations) if weighting == "authors" else 0.0

    def cost(at: int) -> float:
        both = (groups[at], groups[at + 1])
        saved = chain.boundary_bytes[both[0][-1]] * chain.iterations
        return _added_s(chain, both, weighting) / saved if saved else math.inf

    costs, unfit = [cost(at) for at in range(len(groups) - 1)], [not fits(group) for group in groups]
    crossing = list(chain.boundary_bytes)
    while len(groups) > 1:
        is_over = sum(crossing) * chain.iterations + too_much > budget_bytes
        may = [at for at in range(len(costs)) if is_over or unfit[at] or unfit[at + 1]]
        if not may:
            break
        best = min(may, key=costs.__getitem__)
        groups[best : best + 2] = [range(groups[best].start, groups[best + 1].stop)]
        unfit[best : best + 2] = [not fits(groups[best])]
        del costs[best], crossing[best]
        for at in (best - 1, best):
            if 0 <= at < len(costs):
                costs[at] = cost(at)
    return tuple(groups)


def _added_s(chain: Chain, both: tuple[range, range], weighting: Weighting) -> float:
    merged = range(both[0].start, both[1].stop)
    if weighting == "authors":
        return 2 * chain.repeat_s(merged) - sum(map(chain.repeat_s, both))
    return len(merged) * chain.repeat_s(merged) - sum(len(one) * chain.repeat_s(one) for one in both)


def optimal(chain: Chain, budget_bytes: float, repeat_s: Callable[[range], float] | None = None) -> Groups:
    """Of all groups whose logs fit into the budget those with the least expected time of a repeated iteration; of equal
    ones those that log least. *repeat_s*: of one iteration by a group, if not the chain's own.

    A dynamic programme over the machines, which keeps for each of them every pair of bytes and time that no other one
    beats in both; one pair, if no groups log more than the budget. Milliseconds for 64 machines.
    """
    repeat = repeat_s or chain.repeat_s
    budget = budget_bytes / chain.iterations
    keep = _fastest if sum(chain.boundary_bytes) <= budget else _unbeaten
    best: list[list[_Prefix]] = [[_Prefix(0.0, 0.0)]]
    for end in range(1, chain.num_machines + 1):
        found: list[_Prefix] = []
        for begin in range(end):
            group = range(begin, end)
            crossing = chain.boundary_bytes[begin - 1] if begin else 0.0
            time_s = len(group) * repeat(group)
            found += [
                _Prefix(before.num_bytes + crossing, before.time_s + time_s, group, before)
                for before in best[begin]
                if before.num_bytes + crossing <= budget
            ]
        best.append(keep(found))
    chosen, groups = min(best[-1], key=lambda one: (one.time_s, one.num_bytes)), list[range]()
    while chosen.before is not None:
        groups.append(chosen.last)
        chosen = chosen.before
    return tuple(reversed(groups))


@dataclass(frozen=True)
class _Prefix:
    """Groups of the first machines: what they log in one iteration, the sum of their times, and how they end."""

    num_bytes: float
    time_s: float
    last: range = range(0)
    before: _Prefix | None = field(default=None, repr=False)


def _fastest(prefixes: Iterable[_Prefix]) -> list[_Prefix]:
    one = min(prefixes, key=lambda one: (one.time_s, one.num_bytes), default=None)
    return [] if one is None else [one]


def _unbeaten(prefixes: Iterable[_Prefix]) -> list[_Prefix]:
    kept: list[_Prefix] = []
    for one in sorted(prefixes, key=lambda one: (one.num_bytes, one.time_s)):
        if not kept or one.time_s < kept[-1].time_s:
            kept.append(one)
    return kept
