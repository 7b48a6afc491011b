"""What a job has gone through, counted from its records: failures, recoveries, time that was lost. Pure.

Each agent counts what the records tell that all nodes follow, from when it came: `max` of all nodes is the job's
figure. Must never read a clock: times come in, seconds of one monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, get_args

from swift_recovery.planning.plan import Plan
from swift_rendezvous.roster.records import EventRecord, GenerationRecord
from swift_rendezvous.roster.view import View

K = TypeVar("K")

# Upper bounds of the classes of a recovery's phases and of requests to etcd, s.
PHASE_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
REQUEST_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

Cause = Literal["node", "worker", "restart", "drain", "resize"]
# Of several in one recovery the first of these counts.
_CAUSES: tuple[Cause, ...] = get_args(Cause)
# Those that are failures; the others were asked for.
FAILURES: tuple[Cause, ...] = ("node", "worker", "restart")
# The ways in which state may come back after each cause, see `way_of`.
_OF_A_PLAN = ("checkpoint", "drain", "in place", "log", "replica")
WAYS: Mapping[Cause, tuple[str, ...]] = {cause: ("resize",) if cause == "resize" else _OF_A_PLAN for cause in _CAUSES}


@dataclass(frozen=True)
class Spread:
    """A histogram. *counts*: of each class alone, one more than there are *bounds_s*; *sum_s*: of all values."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...] = ()
    sum_s: float = 0.0

    def plus(self, seconds: float) -> Spread:
        counts = list(self.counts or (0,) * (len(self.bounds_s) + 1))
        counts[bisect_left(self.bounds_s, seconds)] += 1
        return replace(self, counts=tuple(counts), sum_s=self.sum_s + seconds)

    def cumulated(self) -> list[tuple[str, float]]:
        """As Prometheus has it: upper bound as text, number of values up to that."""
        found, total = [], 0
        names = [*(repr(float(bound)) for bound in self.bounds_s), "+Inf"]
        for name, count in zip(names, self.counts or (0,) * len(names), strict=True):
            total += count
            found.append((name, float(total)))
        return found


@dataclass(frozen=True)
class Over:
    """A recovery. *iteration*: the first that was not begun before it, as it was last told."""

    cause: Cause
    iteration: int


@dataclass(frozen=True)
class Figures:
    """Since this agent came. *generation*, *owners*: the current one, and who has its slots; *recovered*: the newest
    one that trains again; *causes*: of those after that; *due*: recoveries whose entries in the job's history are still
    to be read. *stalled_since_s*: when the job was seen to stand still, None: it
    does not. *iteration*: the first that was not begun, as it was last told. *recoveries*: by the way in which the
    state came back, and by cause. *training_since_s*: when the job was first seen to train; None: it was not yet."""

    generation: int = 0
    owners: tuple[str, ...] = ()
    recovered: int = 0
    causes: frozenset[Cause] = frozenset()
    due: Mapping[int, Over] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    recoveries: Mapping[tuple[str, str], int] = field(default_factory=dict)
    phases: Mapping[str, Spread] = field(default_factory=dict)
    iteration: int = 0
    num_iterations: int = 0
    per_s: float = 0.0
    lost_iterations: int = 0
    lost_s: float = 0.0
    stalled_s: float = 0.0
    stalled_since_s: float | None = None
    training_since_s: float | None = None

    def stalled_until(self, now_s: float) -> float:
        """Seconds in which the job stood still because of a failure. Never less than before."""
        return self.stalled_s + (0.0 if self.stalled_since_s is None else max(0.0, now_s - self.stalled_since_s))

    def goodput(self, now_s: float) -> float | None:
        """The part of the time since it first trained that was neither stood still nor spent on what had to be made
        again; None before that."""
        if self.training_since_s is None or now_s <= self.training_since_s:
            return None
        lost_s = self.stalled_until(now_s) + self.lost_s
        return min(1.0, max(0.0, 1.0 - lost_s / (now_s - self.training_since_s)))


def observe(figures: Figures, view: View, now_s: float) -> Figures:
    """The records of the job have changed."""
    if view.generation is not None and view.number != figures.generation:
        figures = _entered(figures, view.generation, view)
    if view.recovered > figures.recovered:
        due = dict(figures.due)
        if figures.causes:
            due[view.recovered] = Over(_greatest(figures.causes), figures.iteration)
        figures = replace(figures, recovered=view.recovered, causes=frozenset(), due=due)
    return _stalled(_advanced(figures, view, now_s), view, now_s)


def told(figures: Figures, generation: int, event: EventRecord | None) -> Figures:
    """The entry of a recovery that is *due*; None: there is none."""
    over = figures.due.get(generation)
    if over is None:
        return figures
    figures = replace(figures, due={number: one for number, one in figures.due.items() if number != generation})
    if event is None:
        return figures
    phases_s, after = event.details.get("phases_s"), event.details.get("iteration")
    phases = dict(figures.phases)
    for name, seconds in phases_s.items() if isinstance(phases_s, dict) else ():
        if isinstance(seconds, int | float):
            phases[name] = phases.get(name, Spread(PHASE_BOUNDS_S)).plus(float(seconds))
    # It names the iteration after the one that it went on with. The last that was begun was interrupted, not lost.
    lost = max(0, (over.iteration - 1) - (after - 1)) if isinstance(after, int) else 0
    way = way_of(over.cause, event.details.get("plan"))
    return replace(
        figures,
        recoveries=_plus_one(figures.recoveries, (way, over.cause)),
        phases=phases,
        lost_iterations=figures.lost_iterations + lost,
        lost_s=figures.lost_s + (lost / figures.per_s if figures.per_s else 0.0),
    )


def way_of(cause: Cause, content: object) -> str:
    """In which the state came back: `replica`, `log`, `drain`, `resize`, `checkpoint` (or the script's own begin), or
    `in place`, where nobody had lost any. *content*: the plan, as JSON."""
    try:
        plan = Plan.from_json(content) if isinstance(content, dict) else None
    except (KeyError, TypeError, ValueError, AttributeError):
        plan = None
    if cause == "resize":
        return "resize"
    if plan is None or plan.kind != "copy":
        return "checkpoint"
    if plan.replays:
        return "log"
    if plan.sources:
        return "replica"
    return "drain" if plan.handovers else "in place"


def _entered(figures: Figures, generation: GenerationRecord, view: View) -> Figures:
    """A generation that this agent has not seen yet."""
    owners = tuple(owner.incarnation for owner in generation.slots)
    if figures.generation == 0 and generation.number > 1:
        # What has happened before this agent came is counted by others; if it is not over, it is one of them.
        causes = frozenset[Cause]() if view.recovered >= generation.number else frozenset({_cause(generation, ())})
    else:
        causes = frozenset() if generation.number == 1 else frozenset({_cause(generation, figures.owners)})
    failures = figures.failures
    for cause in causes:
        if cause in FAILURES and figures.generation:
            failures = _plus_one(failures, cause)
    return replace(
        figures, generation=generation.number, owners=owners, causes=figures.causes | causes, failures=failures,
        recovered=view.recovered if figures.generation == 0 else figures.recovered,
    )  # fmt: skip


def _cause(generation: GenerationRecord, before: tuple[str, ...]) -> Cause:
    """Why there is that generation, by its roster. *before*: the owners of the slots in the one before."""
    if generation.mode == "resize":
        return "resize"
    handed = {slot for slot in generation.handover}
    changed = {
        slot for slot, owner in enumerate(generation.slots) if slot >= len(before) or owner.incarnation != before[slot]
    }
    if changed - handed:
        return "node"
    if generation.lost.keys() - handed:  # those of a slot that is handed over are not lost, but left behind
        return "worker"
    return "drain" if handed else "restart"


def _greatest(causes: frozenset[Cause]) -> Cause:
    return next(cause for cause in _CAUSES if cause in causes)


def _stalled(figures: Figures, view: View, now_s: float) -> Figures:
    """Whether the job stands still: something is lost, or a generation does not train yet. Nothing is known of a
    script that does not call `swift_agent.init()`."""
    here = {node.incarnation for node in view.nodes.values()}
    is_vacant = any(owner not in here for owner in figures.owners)
    is_recovering = figures.generation > max(1, figures.recovered)
    is_over = view.released or view.result is not None
    stalled = view.tracked and not is_over and (is_vacant or is_recovering or bool(view.failures))
    if stalled and figures.stalled_since_s is None:
        return replace(figures, stalled_since_s=now_s)
    if not stalled and figures.stalled_since_s is not None:
        return replace(figures, stalled_s=figures.stalled_until(now_s), stalled_since_s=None)
    return figures


def _advanced(figures: Figures, view: View, now_s: float) -> Figures:
    """By what the job tells of its speed."""
    rate = view.rate
    if rate is None or rate.generation != figures.generation:
        return figures  # one that was told before a failure says nothing of what came after it
    since_s = now_s if figures.training_since_s is None else figures.training_since_s
    # What was done before this agent came was counted by others.
    done = 0 if figures.training_since_s is None else max(0, rate.iteration - figures.iteration)
    return replace(
        figures,
        training_since_s=since_s,
        iteration=rate.iteration,
        num_iterations=figures.num_iterations + done,
        per_s=rate.per_s or figures.per_s,
    )


def _plus_one(counts: Mapping[K, int], key: K) -> dict[K, int]:
    return {**counts, key: counts.get(key, 0) + 1}
