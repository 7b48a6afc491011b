"""What a soak does and what must hold after it, without a process: random failures, where they strike, records. Pure.

A failure is drawn from (seed, number) alone, so that a soak can be run again; it names its victim by what it is
("the coordinator", "a slot"), and `aim` says who that is at the time. Must never read a clock or touch a process.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Kind = Literal["worker", "node", "agent", "freeze", "etcd kill", "etcd freeze", "quorum", "cut", "deaf"]
Victim = Literal["coordinator", "store", "slot", "spare"]
Moment = Literal["now", "failure", "generation", "plan"]

# How often each kind is drawn. node: the agent, then its workers; agent: alone, its workers have to end by themselves.
WEIGHTS: dict[Kind, int] = {
    "worker": 30, "node": 14, "agent": 8, "freeze": 10, "etcd kill": 10, "etcd freeze": 8, "quorum": 5, "cut": 9,
    "deaf": 6,
}  # fmt: skip
NEEDS_LINKS: frozenset[Kind] = frozenset({"cut", "deaf"})
ON_ETCD: frozenset[Kind] = frozenset({"etcd kill", "etcd freeze", "quorum"})
# What may strike while the recovery of another failure is under way.
SECOND: tuple[Kind, ...] = ("worker", "worker", "node", "agent", "freeze", "etcd kill", "etcd freeze", "cut")
# For how long it lasts, in seconds. node, agent: until it is started again; freeze: beyond the end of its lease.
LASTS_S: dict[Kind, tuple[float, float]] = {
    "worker": (0.0, 0.0), "node": (0.0, 1.5), "agent": (0.0, 1.5), "freeze": (0.0, 2.5), "etcd kill": (0.3, 3.0),
    "etcd freeze": (0.5, 3.0), "quorum": (0.5, 4.0), "cut": (0.2, 4.0), "deaf": (0.5, 5.0),
}  # fmt: skip
SHARE_OF_SECONDS = 0.25
SHARE_OF_PATIENT = 0.6


@dataclass(frozen=True)
class Strike:
    """One failure. *pick*, in [0, 1): which of several. *lasts_s*: until it is undone. *way* (deaf): which packets
    vanish."""

    kind: Kind
    victim: Victim
    pick: float
    lasts_s: float
    way: Literal["", "to etcd", "from etcd", "to a peer"] = ""

    def __str__(self) -> str:
        where = f" {self.way}" if self.way else ""
        return self.kind + where if self.kind in ON_ETCD | {"worker"} else f"{self.kind}{where} of the {self.victim}"


@dataclass(frozen=True)
class Failure:
    """*second* strikes *delay_s* after the *moment* of the recovery from *first* has come. *patient*: the next failure
    comes when all nodes are there again, else as soon as the job trains."""

    number: int
    first: Strike
    second: Strike | None = None
    moment: Moment = "now"
    delay_s: float = 0.0
    patient: bool = True

    @property
    def strikes(self) -> tuple[Strike, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)


def draw(seed: int, number: int, links: bool) -> Failure:
    """Failure *number* of a soak. *links*: whether links can be cut here."""
    rng = random.Random(f"{seed}/{number}")
    weights = {kind: weight for kind, weight in WEIGHTS.items() if links or kind not in NEEDS_LINKS}
    first = _strike(rng, rng.choices(list(weights), list(weights.values()))[0])
    patient = rng.random() < SHARE_OF_PATIENT
    if rng.random() >= SHARE_OF_SECONDS:
        return Failure(number, first, patient=patient)
    kinds = [kind for kind in SECOND if links or kind not in NEEDS_LINKS]
    if first.kind in ON_ETCD:  # etcd is in trouble, and then something else fails
        kinds = [kind for kind in kinds if kind not in ON_ETCD]
        return Failure(number, first, _strike(rng, rng.choice(kinds)), "now", rng.uniform(0.0, first.lasts_s), patient)
    moment: Moment = rng.choice(("now", "failure", "generation", "plan"))
    return Failure(number, first, _strike(rng, rng.choice(kinds)), moment, rng.uniform(0.0, 0.1), patient)


def _strike(rng: random.Random, kind: Kind) -> Strike:
    victim: Victim = rng.choice(("coordinator", "store", "slot", "slot", "spare"))
    lasts_s = rng.uniform(*LASTS_S[kind])
    way = rng.choice(("to etcd", "from etcd", "to a peer")) if kind == "deaf" else ""
    return Strike(kind, victim, rng.random(), lasts_s, way)  # type: ignore[arg-type]


# ---- where it strikes ----


@dataclass(frozen=True)
class Layout:
    """Who is what at this moment. *slots*: node of each slot; *others*: nodes without one, that live.

    *living*: ranks that have a process. *gone*: ranks whose state is lost, or may soon be; *shaky*: nodes that may soon
    be taken for lost, with all that they hold."""

    slots: tuple[str, ...]
    num_workers: int
    others: tuple[str, ...] = ()
    coordinator: str | None = None
    store: str = ""
    living: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    shaky: frozenset[str] = frozenset()

    def ranks_of(self, node: str) -> frozenset[int]:
        return frozenset(
            rank for slot, owner in enumerate(self.slots) if owner == node for rank in self.ranks_in(slot)
        )

    def ranks_in(self, slot: int) -> range:
        return range(slot * self.num_workers, (slot + 1) * self.num_workers)

    def keeps_a_copy(self) -> bool:
        """A node that nobody will take for lost has a worker with the state."""
        return any(self.ranks_of(node) - self.gone for node in self.slots if node not in self.shaky)


@dataclass(frozen=True)
class Aim:
    """*nodes* and *ranks* that are struck (none: etcd is). *after*: the layout, with what may be lost by it."""

    after: Layout
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    may_lose: frozenset[int] = field(default_factory=frozenset)


def aim(strike: Strike, layout: Layout) -> Aim | None:
    """Whom it strikes: whom it names, or else the next one whose loss leaves a copy of the state. None if there is
    nobody left whom the job could spare."""
    if strike.kind in ON_ETCD:
        return Aim(layout)
    if strike.kind == "worker":
        # One that trains. A replacement may be struck again on its way.
        found = [
            Aim(_less(layout, frozenset({rank})), (), (rank,), frozenset({rank}))
            for rank in _from(sorted(layout.living), strike.pick)
            if layout.slots[rank // layout.num_workers] not in layout.shaky
        ]
    else:
        nodes = _candidates(strike, layout)
        found = [Aim(_less(layout, frozenset(), node), (node,), (), layout.ranks_of(node)) for node in nodes]
        if strike.way == "to a peer":
            found = [_with_peer(one, layout, strike.pick) for one in found]
    return next((one for one in found if one.after.keeps_a_copy()), None)


def _less(layout: Layout, ranks: frozenset[int], *nodes: str) -> Layout:
    return replace(layout, gone=layout.gone | ranks, shaky=layout.shaky | set(nodes))


def _candidates(strike: Strike, layout: Layout) -> list[str]:
    """All nodes that nothing has struck yet, the one that is meant first."""
    here = [node for node in (*layout.slots, *layout.others) if node not in layout.shaky]
    meant: Sequence[str | None]
    match strike.victim:
        case "coordinator":
            meant = [layout.coordinator]
        case "store":
            meant = [layout.store]
        case "slot":
            meant = _from(list(layout.slots), strike.pick)
        case "spare":
            meant = layout.others
    return list(dict.fromkeys([node for node in meant if node in here] + _from(here, strike.pick)))  # type: ignore[misc]


def _with_peer(one: Aim, layout: Layout, pick: float) -> Aim:
    """Two that lose each other accuse each other: each of them may be taken for lost, one of them only. That one of
    two slots is kept is the product's promise, so it is not asked of the layout."""
    (node,) = one.nodes
    others = _from([name for name in (*layout.slots, *layout.others) if name != node], pick)
    if not others:
        return one
    both = layout.ranks_of(node) | layout.ranks_of(others[0])
    alone = not layout.gone and not layout.shaky
    after = _less(layout, frozenset(), node, *([] if alone else others[:1]))
    return Aim(after, (node, others[0]), (), both)


def _from(items: list[str] | list[int], pick: float) -> list:  # type: ignore[type-arg]
    """The same, beginning with the one that is picked."""
    start = int(pick * len(items)) if items else 0
    return [*items[start:], *items[:start]]


# ---- what must hold at the end ----


def wrong_records(
    rank: int, calls: Sequence[tuple[int, int]], ends: Sequence[tuple[int, int]], num_iterations: int, num_changes: int
) -> list[str]:
    """What is wrong with the iterations of one rank; empty if nothing is.

    *calls*: (iteration, pid) whenever the iteration's function was called; *ends*: (iterations that are complete, pid)
    whenever it has returned. *num_changes*: of the generation. No iteration is left out; a process goes from each to
    the next, and repeats a call only when a failure has cut it: at most one for each change of the generation.
    """
    wrong = []
    left_out = sorted(set(range(num_iterations)) - {iteration for iteration, _ in calls})
    if left_out:
        wrong.append(f"rank {rank}: iterations {left_out[:5]} were never run")
    beyond = [iteration for iteration, _ in calls if iteration >= num_iterations]
    if beyond:
        wrong.append(f"rank {rank}: iterations {beyond[:5]} were run beyond the end")
    repeated = len(calls) - len({iteration for iteration, _ in calls})
    if repeated > num_changes:
        wrong.append(f"rank {rank}: {repeated} calls were repeated, in {num_changes} changes of the generation")
    by_pid: dict[int, list[int]] = {}
    for number, pid in ends:
        by_pid.setdefault(pid, []).append(number)
    for pid, numbers in by_pid.items():
        jumps = [(a, b) for a, b in itertools.pairwise(numbers) if b != a + 1]
        if jumps:
            wrong.append(f"rank {rank}, process {pid}: went from iteration to iteration as {jumps[:3]}")
    # A later process begins where an earlier one was lost: at most the one iteration that was cut is run again.
    firsts = [(pid, numbers[0], numbers[-1]) for pid, numbers in by_pid.items()]
    for (_, _, last), (pid, first, _) in itertools.pairwise(firsts):
        if first < last:
            wrong.append(f"rank {rank}, process {pid}: began with the end of iteration {first}, after {last}")
    if ends and ends[-1][0] != num_iterations:
        wrong.append(f"rank {rank}: ended after {ends[-1][0]} iterations, not {num_iterations}")
    return wrong


def standstill_s(times_s: Iterable[float], since_s: float, until_s: float) -> float:
    """The longest time without the end of an iteration on one rank, from the last end before *since_s* on."""
    ordered = sorted(times_s)
    before = [time_s for time_s in ordered if time_s <= since_s]
    within = [time_s for time_s in ordered if since_s < time_s <= until_s]
    marks = [*before[-1:], *within]
    return max((b - a for a, b in itertools.pairwise(marks)), default=0.0)


@dataclass(frozen=True)
class Sample:
    """One look at a process."""

    role: str
    num_threads: int
    num_files: int
    rss_mb: float
    files: Mapping[str, int] = field(default_factory=dict)
    """How many of each kind."""


NUM_SAMPLES = 10  # of each half
NUM_WARMING = 4  # at first it opens what it needs: standbys, connections to all members of etcd
GROWTH = {"num_threads": 2.0, "num_files": 4.0, "rss_mb": 40.0}
"""What the later half of a life may need more at most: connections to etcd and peers come and go with the trouble."""


def grown(samples: Sequence[Sample]) -> tuple[dict[str, Mapping[str, tuple[float, float]]], list[str]]:
    """The most that a process needed in each half of its life, by role; what has grown. A leak raises it for good."""
    seen: dict[str, Mapping[str, tuple[float, float]]] = {}
    wrong = []
    for role, count in Counter(sample.role for sample in samples).items():
        if count < 2 * NUM_SAMPLES + NUM_WARMING:
            continue
        mine = [sample for sample in samples if sample.role == role][NUM_WARMING:]
        early, late = mine[: len(mine) // 2], mine[len(mine) // 2 :]
        figures = {
            name: (max(float(getattr(s, name)) for s in early), max(float(getattr(s, name)) for s in late))
            for name in GROWTH
        }
        seen[role] = figures
        wrong += [
            f"as {role}, {name} grew from {figures[name][0]:g} to {figures[name][1]:g}"
            f" ({' '.join(f'{float(getattr(sample, name)):g}' for sample in mine)})"
            for name, most in GROWTH.items()
            if figures[name][1] > figures[name][0] + most
        ]
    return seen, wrong
