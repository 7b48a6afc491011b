"""A job over time, as values: who trained where, what was lost, what that cost. Pure.

All times are Unix seconds. What is not known is None or empty, and named in `Timeline.notes`: nothing here is ever
guessed. Must never read a record, a file or a clock.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from swift_recovery.planning.plan import Plan

State = Literal["trains", "waits", "starts", "spare"]


@dataclass(frozen=True)
class Piece:
    """Somebody was in *state* for a while."""

    begin_s: float
    end_s: float
    state: State


@dataclass(frozen=True)
class Lane:
    """What one rank did on one node, oldest first. Where there is no piece it had no process there."""

    rank: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Lost:
    """A node, or ranks of it, lost at *at_s*: a cross in the picture. *ranks*: empty for the whole node."""

    at_s: float
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class NodeRow:
    """One node, and the *ranks* that it had; of many there are not lanes for all. *spare*: when it had no slot.
    *until*: in words, how its time ended; "" if it is there still."""

    node: str
    slots: tuple[int, ...]
    ranks: tuple[int, ...]
    lanes: tuple[Lane, ...]
    spare: tuple[Piece, ...] = ()
    lost: tuple[Lost, ...] = ()
    until: str = ""

    @property
    def begin_s(self) -> float:
        return min((piece.begin_s for piece in self.pieces), default=0.0)

    @property
    def end_s(self) -> float:
        return max((piece.end_s for piece in self.pieces), default=0.0)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (*self.spare, *(piece for lane in self.lanes for piece in lane.pieces))


@dataclass(frozen=True)
class Loss:
    """What a slot lost: *kind* as in `FailureRecord`; *ranks*: global, empty for all of the node."""

    slot: int
    node: str
    kind: str
    ranks: tuple[int, ...]
    evidence: str


@dataclass(frozen=True)
class Incident:
    """Why a job has another generation, and what that cost. *failed_s*: when the loss was noticed; *resumed_s*: when
    all trained again, None if another generation came first, or if it has not come to that yet. *lost_iterations*: made
    once more, beside the one that was interrupted; None: not known. *predicted_s*: what it should have taken.
    *world_size*: 0 where that is not known."""

    generation: int
    mode: str
    title: str
    why: str
    failed_s: float
    begin_s: float
    resumed_s: float | None = None
    losses: tuple[Loss, ...] = ()
    takers: tuple[tuple[int, str, str], ...] = ()
    """Slots that have another owner: the slot, the old one, the new one."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    plan: Plan | None = None
    plan_why: str = ""
    iteration: int | None = None
    lost_iterations: int | None = None
    predicted_s: float | None = None
    world_size: int = 0
    until_s: float = 0.0
    """When it was over, in whatever way."""
    untold: bool = False
    """Nobody says when all trained again: it was over at *until_s* at the earliest."""

    @property
    def stalled_s(self) -> float:
        """For so long not all ranks trained."""
        return max(0.0, self.until_s - self.failed_s)

    @property
    def cost_rank_s(self) -> float:
        """Ranks times seconds, each of which has a GPU, or a part of one, to itself."""
        return self.stalled_s * self.world_size

    @property
    def way(self) -> str:
        """How the state came back, in words."""
        plan = self.plan
        if plan is None:
            return "not known"
        if plan.kind == "restart":
            return "all workers begin with the newest checkpoint, or start over"
        if plan.kind == "fresh":
            return "all workers set themselves up"
        ways = []
        if plan.handovers:
            ways.append("the drained node hands its state over")
        if plan.replays:
            ways.append("lost iterations are repeated from message logs")
        if plan.sources:
            ways.append("state of a replica")
        if plan.loads:
            ways.append("state from files of the nodes")
        return ", and ".join(ways) or "all ranks hold the state already"


@dataclass(frozen=True)
class Point:
    """At that time *iteration* iterations were done, or the iteration of that number began: the same."""

    at_s: float
    iteration: int


@dataclass(frozen=True)
class Step:
    """The mean speed between two points, iterations per second."""

    begin_s: float
    end_s: float
    per_s: float


@dataclass(frozen=True)
class Timeline:
    """All that is known of a job's past. *source*: where from, in words. *notes*: what is not known, in sentences."""

    job: str
    source: str
    state: str
    begin_s: float
    end_s: float
    generation: int = 0
    world_size: int = 0
    rows: tuple[NodeRow, ...] = ()
    num_hidden: int = 0
    """Nodes that are not among *rows*."""
    incidents: tuple[Incident, ...] = ()
    points: tuple[Point, ...] = ()
    why: str = ""
    strategy: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def elapsed_s(self) -> float:
        return max(0.0, self.end_s - self.begin_s)

    @property
    def stalled_s(self) -> float:
        """In which not all ranks trained; what overlaps counts once."""
        return sum(end_s - begin_s for begin_s, end_s in _union((i.failed_s, i.until_s) for i in self.incidents))

    @property
    def cost_rank_s(self) -> float:
        return sum(incident.cost_rank_s for incident in self.incidents)

    @property
    def repeated_s(self) -> float | None:
        """Time for iterations that were made once more; None where it is not known how many, or how long they take."""
        if any(incident.lost_iterations is None for incident in self.incidents):
            return None
        lost = sum(incident.lost_iterations or 0 for incident in self.incidents)
        if lost == 0:
            return 0.0
        per_s = self.usual_per_s
        return lost / per_s if per_s else None

    @property
    def goodput(self) -> float | None:
        """The part of its time in which the job neither stood still nor made iterations once more."""
        if self.elapsed_s <= 0:
            return None
        return max(0.0, 1.0 - (self.stalled_s + (self.repeated_s or 0.0)) / self.elapsed_s)

    @property
    def usual_per_s(self) -> float | None:
        """The median speed, by time, outside of incidents."""
        quiet = [step for step in self.steps(self.begin_s, self.end_s) if step.per_s > 0]
        return weighted_median([(step.per_s, step.end_s - step.begin_s) for step in quiet])

    @property
    def iteration(self) -> int | None:
        return self.points[-1].iteration if self.points else None

    def steps(self, begin_s: float, end_s: float, shortest_s: float = 0.0) -> tuple[Step, ...]:
        """The speed from *begin_s* to *end_s*, in steps of at least *shortest_s*. None where iterations went backwards.
        """
        inside = [point for point in self.points if begin_s <= point.at_s <= end_s]
        return steps_of(inside, [(i.failed_s, i.until_s) for i in self.incidents], shortest_s)


def steps_of(
    points: Sequence[Point], stalls: Sequence[tuple[float, float]], shortest_s: float = 0.0
) -> tuple[Step, ...]:
    """*points*, oldest first, joined until they are *shortest_s* apart; but not over the begin or the end of one of the
    *stalls*, at which there are points. In these the speed is 0: what is made there is made again, or waited for."""
    edges = {at_s for stall in stalls for at_s in stall}
    begins = {begin_s for begin_s, _ in stalls}
    found, first = list[Step](), points[0] if points else None
    for before, point in itertools.pairwise(points):
        assert first is not None
        if point.iteration < before.iteration:
            first = point  # all workers have been started again
            continue
        if point.at_s - first.at_s < max(shortest_s, 1e-6) and point.at_s not in edges:
            continue
        if point.at_s > first.at_s:
            made = 0 if first.at_s in begins else point.iteration - first.iteration
            found.append(Step(first.at_s, point.at_s, made / (point.at_s - first.at_s)))
        first = point
    return tuple(found)


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begin_s, end_s in sorted(spans):
        if found and begin_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_s))
        else:
            found.append((begin_s, end_s))
    return found


def weighted_median(values: Sequence[tuple[float, float]]) -> float | None:
    """The value at which half of the weight is reached; of (value, weight)."""
    total, seen = sum(weight for _, weight in values), 0.0
    for value, weight in sorted(values):
        seen += weight
        if seen * 2 >= total:
            return value
    return None


def mean_recovery_s(timeline: Timeline) -> float | None:
    """Of those that came to an end."""
    times = [incident.stalled_s for incident in timeline.incidents if incident.resumed_s is not None]
    return statistics.fmean(times) if times else None


def to_json(timeline: Timeline) -> dict[str, Any]:
    """For programs: all of it, but for the lanes of single ranks."""
    return {
        "job": timeline.job, "source": timeline.source, "state": timeline.state, "why": timeline.why,
        "begin_s": timeline.begin_s, "end_s": timeline.end_s, "generation": timeline.generation,
        "world_size": timeline.world_size, "iteration": timeline.iteration, "goodput": timeline.goodput,
        "stalled_s": timeline.stalled_s, "cost_rank_s": timeline.cost_rank_s, "usual_per_s": timeline.usual_per_s,
        "nodes": [
            {"node": row.node, "slots": list(row.slots), "begin_s": row.begin_s, "end_s": row.end_s, "until": row.until}
            for row in timeline.rows
        ],
        "incidents": [_incident_json(incident) for incident in timeline.incidents],
        "points": [[point.at_s, point.iteration] for point in timeline.points],
        "notes": list(timeline.notes),
    }  # fmt: skip


def _incident_json(incident: Incident) -> dict[str, Any]:
    return {
        "generation": incident.generation, "mode": incident.mode, "title": incident.title, "why": incident.why,
        "failed_s": incident.failed_s, "begin_s": incident.begin_s, "resumed_s": incident.resumed_s,
        "stalled_s": incident.stalled_s, "cost_rank_s": incident.cost_rank_s, "iteration": incident.iteration,
        "lost_iterations": incident.lost_iterations, "predicted_s": incident.predicted_s, "way": incident.way,
        "phases_ms": {name: round(seconds * 1000, 3) for name, seconds in incident.phases_s.items()},
        "losses": [
            {"slot": loss.slot, "node": loss.node, "kind": loss.kind, "ranks": list(loss.ranks),
             "evidence": loss.evidence}
            for loss in incident.losses
        ],
        "plan": incident.plan.to_json() if incident.plan else None,
    }  # fmt: skip
