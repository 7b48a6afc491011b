"""From what is known of each generation, wherever from, to one `Timeline`. Pure.

`from_etcd` and `from_journals` find the chapters. What follows from them is the same for both and is worked out here:
who did what when, which incidents there were, and what they cost. Must never fill a gap with something likely.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from swift_agent.ctl.timeline.model import Incident, Lane, Loss, Lost, NodeRow, Piece, Point, State, Timeline
from swift_recovery.planning.plan import Plan

# More are not looked at in a picture.
MOST_ROWS, MOST_LANES = 40, 160


@dataclass(frozen=True)
class Chapter:
    """What is known of one generation. *nodes*, *workers*: by slot, the owner and how many ranks it has; empty: not
    known. *new*: by slot, local ranks whose processes were lost before it. *begin_s*: when its roster was written.
    *failed_s*: when what led to it was noticed, None: at its begin. *moved*: slot -> old and new owner."""

    number: int
    mode: str = ""
    why: str = ""
    begin_s: float = 0.0
    nodes: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()
    moved: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    new: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    handover: tuple[int, ...] = ()
    losses: tuple[Loss, ...] = ()
    failed_s: float | None = None
    resumed_s: float | None = None
    iteration: int | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    plan: Plan | None = None
    plan_why: str = ""
    predicted_s: float | None = None

    @property
    def starts_all(self) -> bool:
        return self.mode in ("start", "restart", "resize")

    def new_ranks(self, slot: int) -> tuple[int, ...]:
        """Local ranks whose processes are started in this generation."""
        if self.starts_all or slot in self.moved:
            return tuple(range(self.workers[slot]))
        return self.new.get(slot, ())


@dataclass(frozen=True)
class Presence:
    """A node was in the job, with or without a slot. *end_s*: None: it still is."""

    node: str
    begin_s: float
    end_s: float | None = None


@dataclass(frozen=True)
class Known:
    """All that a source says. *chapters* by number, *points* by time."""

    job: str
    source: str
    state: str
    end_s: float
    chapters: tuple[Chapter, ...] = ()
    presences: tuple[Presence, ...] = ()
    points: tuple[Point, ...] = ()
    why: str = ""
    tracked: bool = True
    """Its script calls `swift_agent.init()`: else nobody tells when all train again."""
    failing_s: float | None = None
    """Something is lost since then, and there is no generation yet that follows."""
    failing: tuple[Loss, ...] = ()
    strategy: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def assemble(known: Known) -> Timeline:
    """The whole."""
    chapters = known.chapters
    begin_s = chapters[0].begin_s if chapters else min((p.begin_s for p in known.presences), default=known.end_s)
    last = chapters[-1] if chapters else Chapter(0)
    incidents = _incidents(known)
    rows, num_hidden = _rows(known, incidents)
    points = _with_stalls(known.points, incidents)
    return Timeline(
        known.job, known.source, known.state, begin_s, max(begin_s, known.end_s), last.number, sum(last.workers),
        rows, num_hidden, incidents, points, known.why, known.strategy, known.notes,
    )  # fmt: skip


# ---- incidents -----------------------------------------------------------------------------------------------------


def _incidents(known: Known) -> tuple[Incident, ...]:
    found = []
    for index, chapter in enumerate(known.chapters):
        if chapter.number == 1 or (index == 0 and not chapter.failed_s):
            continue  # the begin of the job, or of what is kept of it
        after = known.chapters[index + 1] if index + 1 < len(known.chapters) else None
        # One that another failure cut goes over into the next.
        cut_s = known.end_s if after is None else after.begin_s if after.failed_s is None else after.failed_s
        untold = chapter.resumed_s is None and not known.tracked
        until_s = chapter.begin_s if untold else max(cut_s, chapter.begin_s)
        until_s = until_s if chapter.resumed_s is None else chapter.resumed_s
        failed_s = chapter.begin_s if chapter.failed_s is None else chapter.failed_s
        lost = 0 if chapter.resumed_s is None else _lost_iterations(chapter, failed_s, known.points)
        found.append(Incident(
            chapter.number, chapter.mode, title_of(chapter), chapter.why, failed_s, chapter.begin_s, chapter.resumed_s,
            chapter.losses, tuple((slot, *pair) for slot, pair in sorted(chapter.moved.items())), chapter.phases_s,
            chapter.plan, chapter.plan_why, chapter.iteration, None if untold else lost,
            chapter.predicted_s, sum(chapter.workers), until_s, untold,
        ))  # fmt: skip
    if known.failing_s is not None:
        last = known.chapters[-1] if known.chapters else Chapter(0)
        title = title_of(Chapter(0, losses=known.failing))
        found.append(Incident(
            last.number + 1, "", title, "no node has its place yet", known.failing_s, known.end_s, None, known.failing,
            world_size=sum(last.workers), until_s=known.end_s, lost_iterations=0,
        ))  # fmt: skip
    return tuple(found)


def _lost_iterations(chapter: Chapter, failed_s: float, points: Sequence[Point]) -> int | None:
    """Made once more, beside the one that was interrupted. Only where all begin with an older state are there any: a
    replacement that repeats iterations from logs holds up the others, which is in the time that the job stood still."""
    if chapter.plan is not None and chapter.plan.kind == "copy":
        return 0
    if chapter.iteration is None:
        return None
    before = [point.iteration for point in points if point.at_s <= failed_s]
    return max(0, before[-1] - (chapter.iteration - 1)) if before else None


def title_of(chapter: Chapter) -> str:
    """A few words on what happened."""
    nodes = [loss for loss in chapter.losses if loss.kind == "node"]
    workers = [loss for loss in chapter.losses if loss.kind == "workers"]
    drained = [chapter.moved[slot] for slot in chapter.handover if slot in chapter.moved]
    words = []
    if nodes:
        words.append(f"{_some('node', [loss.node or f'of slot {loss.slot}' for loss in nodes])} lost")
    for loss in workers:
        words.append(f"{_some('rank', [str(rank) for rank in loss.ranks])} on {loss.node} lost")
    for old, new in drained:
        words.append(f"node {old} drained, {new} takes its place")
    if words:
        return "; ".join(words[:3]) + (f"; and {len(words) - 3} more" if len(words) > 3 else "")
    for kind, text in (("restart", "workers cannot go on in place"), ("again", "processes are connected again")):
        if any(loss.kind == kind for loss in chapter.losses):
            return text
    if chapter.mode == "resize":
        return f"the job goes on with {len(chapter.nodes)} nodes" if chapter.nodes else "the job changes its size"
    return "all workers start again" if chapter.mode == "restart" else "something is lost"


def _some(what: str, names: Sequence[str]) -> str:
    if len(names) > 4:
        return f"{len(names)} {what}s"
    return f"{what}{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _with_stalls(points: Sequence[Point], incidents: Sequence[Incident]) -> tuple[Point, ...]:
    """*points*, and what the incidents say of the iteration at which the job stood: without them its standstill would
    be spread over the time until the next point."""
    times = [point.at_s for point in points]
    found = [p for p in points if not any(i.failed_s < p.at_s < i.until_s for i in incidents)]
    for incident in incidents:
        index = bisect.bisect_right(times, incident.failed_s)
        before = points[index - 1].iteration if index else None
        if incident.plan is not None and incident.plan.kind == "copy" and before is not None:
            # What it goes on with may be one that somebody had finished already.
            before = max(before, min(incident.plan.iteration, (incident.iteration or 0) - 1))
        if before is not None:
            found.append(Point(incident.failed_s, before))
            if incident.resumed_s is None:
                found.append(Point(incident.until_s, before))
        if incident.resumed_s is not None and incident.iteration is not None:
            found.append(Point(incident.resumed_s, incident.iteration))
    return tuple(sorted(found, key=lambda point: point.at_s))


# ---- rows ----------------------------------------------------------------------------------------------------------


class _Row:
    """What is collected of one node."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.slots: list[int] = []
        self.ranks: set[int] = set()
        self.lanes: dict[int, list[Piece]] = {}
        self.lost: list[Lost] = []
        self.until = ""

    def add(self, rank: int, begin_s: float, end_s: float, state: State) -> None:
        if end_s <= begin_s:
            return
        pieces = self.lanes.setdefault(rank, [])
        if pieces and pieces[-1].state == state and pieces[-1].end_s >= begin_s:
            pieces[-1] = replace(pieces[-1], end_s=end_s)
        else:
            pieces.append(Piece(begin_s, end_s, state))

    def made(self, presences: Sequence[Presence], known: Known) -> NodeRow:
        busy = sorted((p.begin_s, p.end_s) for pieces in self.lanes.values() for p in pieces)
        lost_s = [lost.at_s for lost in self.lost if not lost.ranks]
        spare = []
        for presence in presences:
            at_s, end_s = presence.begin_s, known.end_s if presence.end_s is None else presence.end_s
            for begin_s, until_s in busy:
                if at_s < begin_s < end_s:
                    spare.append(Piece(at_s, begin_s, "spare"))
                at_s = max(at_s, until_s)
            if at_s < end_s and not any(presence.begin_s <= one <= end_s for one in lost_s):
                spare.append(Piece(at_s, end_s, "spare"))
        lanes = tuple(Lane(rank, tuple(pieces)) for rank, pieces in sorted(self.lanes.items()))
        slots, ranks = tuple(dict.fromkeys(self.slots)), tuple(sorted(self.ranks))
        return NodeRow(self.node, slots, ranks, lanes, tuple(spare), tuple(self.lost), self.until)


def _rows(known: Known, incidents: Sequence[Incident]) -> tuple[tuple[NodeRow, ...], int]:
    """The rows of a picture, and how many nodes are left out of it. Of a large job these are nodes to which something
    happened first; of ranks there are only as many as can be told from each other."""
    presences: dict[str, list[Presence]] = {}
    for presence in known.presences:
        presences.setdefault(presence.node, []).append(presence)
    slots: dict[str, list[int]] = {node: [] for node in presences}
    for chapter in known.chapters:
        for slot, node in enumerate(chapter.nodes):
            slots.setdefault(node, []).append(slot)
    touched = {loss.node for one in incidents for loss in one.losses} | {
        node for one in incidents for _, *pair in one.takers for node in pair
    }
    ranked = sorted(slots, key=lambda node: (node not in touched, min(slots[node], default=1 << 30), node))
    rows = {node: _Row(node) for node in ranked[:MOST_ROWS]}
    widest = max((max(chapter.workers, default=0) for chapter in known.chapters), default=0)
    most = 1 if len(rows) * widest > MOST_LANES else widest
    for index, chapter in enumerate(known.chapters):
        after = known.chapters[index + 1] if index + 1 < len(known.chapters) else None
        firsts = [0, *itertools.accumulate(chapter.workers)]
        for slot, node in enumerate(chapter.nodes):
            if node in rows:
                rows[node].slots.append(slot)
                rows[node].ranks.update(range(firsts[slot], firsts[slot + 1]))
                _fill(rows[node], slot, firsts[slot], most, chapter, after, known)
    made = [row.made(presences.get(node, []), known) for node, row in rows.items()]
    made.sort(key=lambda row: (min(row.slots, default=1 << 30), row.begin_s, row.node))
    return tuple(made), len(slots) - len(made)


def _fill(
    row: _Row, slot: int, first: int, most: int, chapter: Chapter, after: Chapter | None, known: Known
) -> None:
    """What the first *most* ranks of *slot*, from *first* on, did on that node in one generation."""
    end_s = known.end_s if after is None else after.begin_s
    lost = {loss.slot: loss for loss in (known.failing if after is None else after.losses)}.get(slot)
    failed_s = known.failing_s if after is None else after.failed_s
    failed_s = end_s if failed_s is None else min(failed_s, end_s)
    resumed_s = _resumed_s(chapter, known, end_s)
    new = chapter.new_ranks(slot)
    for local_rank in range(min(most, chapter.workers[slot])):
        rank = first + local_rank
        row.add(rank, chapter.begin_s, min(resumed_s, failed_s), "starts" if local_rank in new else "waits")
        row.add(rank, max(resumed_s, chapter.begin_s), failed_s, "trains")
        is_lost = lost is not None and (lost.kind == "node" or rank in lost.ranks)
        if not is_lost:
            row.add(rank, failed_s, end_s, "waits")
    if lost is not None and lost.kind in ("node", "workers"):
        row.lost.append(Lost(failed_s, lost.ranks if lost.kind == "workers" else ()))
    if after is not None and slot in after.moved:
        old, new_owner = after.moved[slot]
        if lost is not None and lost.kind == "node":
            row.until = f"lost: {lost.evidence}"
        elif slot in after.handover:
            row.until = f"drained; {new_owner} has its place"
        elif old != new_owner:
            row.until = f"{new_owner} has its place"
    elif lost is not None and lost.kind == "node":
        row.until = f"lost: {lost.evidence}"


def _resumed_s(chapter: Chapter, known: Known, end_s: float) -> float:
    """When its ranks trained."""
    if chapter.resumed_s is not None:
        return chapter.resumed_s
    if chapter.number != 1:
        return end_s if known.tracked else chapter.begin_s
    # Nobody says when a job trains for the first time; the first iteration does.
    first = next((point.at_s for point in known.points if point.at_s >= chapter.begin_s), None)
    return chapter.begin_s if first is None else min(first, end_s)
