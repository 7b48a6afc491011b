"""Whether ranks wait for each other for ever, and in words where each of them waits. Pure.

All ranks go the same way: iterations and sections in the same order. A rank that has been still for a while says where
it stands. If all of them wait, and one of them waits for what another one never comes to (it has ended its loop, or has
gone another way), then none will ever answer. It is no such case if a rank is slow, or works alone while the others
wait, or if all wait in the same place, where something large may be under way.

This module must never read a clock, a stack or a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

Inside = Literal["begin", "", "iteration", "section", "end"]
Doing = Literal["waits", "works"]


@dataclass(frozen=True)
class Standing:
    """Of a rank that has been still for *still_s*: after how many *iterations* and *sections* it is, *inside* of what
    ("begin": at its first point, "end": at the end of its run), and *where* its script is. *beat*: how often it has
    said so.
    """

    iterations: int
    sections: int
    inside: Inside
    doing: Doing
    where: str
    still_s: float
    beat: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Standing:
        inside, doing = data["inside"], data["doing"]
        if inside not in ("begin", "", "iteration", "section", "end") or doing not in ("waits", "works"):
            raise ValueError(f"a rank is inside {inside!r} and {doing!r}")
        return Standing(
            int(data["iterations"]), int(data["sections"]), inside, doing, str(data["where"]), float(data["still_s"]),
            int(data["beat"]),
        )  # fmt: skip

    @property
    def place(self) -> tuple[int, int, Inside, Doing]:
        return self.iterations, self.sections, self.inside, self.doing


def waits_for_ever(before: Mapping[int, Standing], now: Mapping[int, Standing], world_size: int) -> bool:
    """Whether no rank can move any more. *before*: what all had said a while ago; it must still hold, and each must
    have said so again since: what is old may not be true any more."""
    if len(now) != world_size or any(one.doing == "works" for one in now.values()):
        return False
    for rank, one in now.items():
        earlier = before.get(rank)
        if earlier is None or earlier.place != one.place or earlier.beat >= one.beat:
            return False
    return any(_part(one, other) for one, other in combinations(now.values(), 2))


def _part(one: Standing, other: Standing) -> bool:
    """Whether they have gone different ways, or one has come to its end before the other."""
    for first, second in ((one, other), (other, one)):
        if first.inside == "end" and second.inside == "begin":
            return True  # it has no loop
        if first.inside == "end" and second.inside in ("iteration", "section"):
            count = (second.iterations, first.iterations), (second.sections, first.sections)
            mine, theirs = count[0] if second.inside == "iteration" else count[1]
            if mine >= theirs:
                return True
    if "end" in (one.inside, other.inside) or "begin" in (one.inside, other.inside):
        return False
    if _done(one) == _done(other):
        return one.inside != other.inside
    points = [_done(one), _next(one), _done(other), _next(other)]
    return any(not _are_ordered(a, b) for a, b in combinations(points, 2))


def _done(one: Standing) -> tuple[int, int]:
    return one.iterations, one.sections


def _next(one: Standing) -> tuple[int, int]:
    return one.iterations + (one.inside == "iteration"), one.sections + (one.inside == "section")


def _are_ordered(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return (a[0] <= b[0] and a[1] <= b[1]) or (a[0] >= b[0] and a[1] >= b[1])


def describe(now: Mapping[int, Standing], world_size: int) -> str:
    """Where each rank stands, for people."""
    ranks_at: dict[str, list[int]] = {}
    for rank in range(world_size):
        ranks_at.setdefault(_describe_one(now.get(rank)), []).append(rank)
    return "; ".join(f"{_ranks(ranks)} {_conjugated(what, len(ranks))}" for what, ranks in ranks_at.items())


def _describe_one(one: Standing | None) -> str:
    if one is None:
        return "go on, or cannot be heard of"
    if one.inside == "end":
        return f"have come to the end of the run after {one.iterations} iterations"
    place = {
        "begin": "at the begin of the training loop",
        "iteration": f"in iteration {one.iterations}",
        "section": f"in a section (@job.resilient) after iteration {one.iterations - 1}",
        "": f"outside of iterations, after {one.iterations} of them",
    }[one.inside]
    verb = "wait for others" if one.doing == "waits" else "work"
    return f"{verb} {place} ({one.where})"


def _conjugated(what: str, num: int) -> str:
    if num > 1:
        return what
    for plural, singular in (("go on, or cannot", "goes on, or cannot"), ("have come", "has come"), ("wait", "waits"),
                             ("work", "works")):  # fmt: skip
        if what.startswith(plural):
            return singular + what[len(plural) :]
    return what


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks, the first of them {ranks[0]},"
    return f"ranks {', '.join(map(str, ranks))}"
