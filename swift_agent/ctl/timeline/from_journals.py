"""What the journals of a job's agents say of its past. Pure: lines in.

One journal is what one agent saw, and its own workers; several of one job are put together. A generation is told best
by the agent that was the coordinator in it. Must never take what one agent saw for what was everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swift_agent.agent.journal.format import NUM_VIEWS_KEPT, changed_view
from swift_agent.agent.journal.reading import CUT, JournalError, lines_of
from swift_agent.agent.lifecycle import strategy
from swift_agent.agent.lifecycle.timeline import PHASES, Timeline, merge_phases
from swift_agent.ctl.reports.explain import read_plan
from swift_agent.ctl.timeline.assemble import Chapter, Known, Presence
from swift_agent.ctl.timeline.from_etcd import NO_MARKS
from swift_agent.ctl.timeline.model import Loss, Point
from swift_rendezvous.codec import RecordError
from swift_rendezvous.roster.records import FailureRecord, GenerationRecord, ResultRecord
from swift_rendezvous.roster.view import View


@dataclass
class Seen:
    """What one journal says of one generation. *phases_s* is whole if it has a total."""

    begin_s: float
    record: GenerationRecord
    failed_s: float | None = None
    losses: dict[int, FailureRecord] = field(default_factory=dict)
    planned_s: float | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    plan_why: str = ""
    resumed_s: float | None = None
    iteration: int | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    predicted_s: float | None = None


@dataclass
class Journal:
    """One file, read. Times are Unix seconds."""

    job: str = ""
    node: str = ""
    incarnation: str = ""
    view: View = field(default_factory=View)
    seen: dict[int, Seen] = field(default_factory=dict)
    nodes: dict[str, tuple[str, float, float | None]] = field(default_factory=dict)
    """By incarnation: its name, when it came and went; None: it was there to the end."""
    points: list[Point] = field(default_factory=list)
    told: list[Point] = field(default_factory=list)
    """From etcd, by whichever node has rank 0."""
    last_s: float = 0.0
    cut_at: int | None = None
    lost_now: dict[int, FailureRecord] = field(default_factory=dict)
    failing_s: float | None = None
    result: ResultRecord | None = None


def read_lines(lines: Iterable[bytes]) -> Journal:
    """One journal. Raises `JournalError` for what is none."""
    fold = _Fold()
    for number, line in lines_of(lines):
        if line is CUT:
            fold.journal.cut_at = number
            break
        try:
            fold.begin(line) if number == 1 else fold.take(line)
        except (RecordError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise JournalError(f"line {number} cannot be read by this version: {error}") from error
    return fold.journal


class _Fold:
    """Goes through the lines of one journal."""

    def __init__(self) -> None:
        self.journal = Journal()
        self._to_unix_s = 0.0
        self._views: dict[int, View] = {0: View()}
        self._newest = 0
        self._timeline = Timeline()
        self._own: dict[tuple[int, int], Mapping[str, float]] = {}

    def begin(self, header: dict[str, Any]) -> None:
        journal = self.journal
        journal.job, journal.node = str(header.get("job")), str(header.get("node"))
        journal.incarnation = str(header.get("incarnation"))
        self._to_unix_s = float(header["time_s"]) - float(header["now_s"])
        journal.last_s = float(header["time_s"])

    def take(self, line: Any) -> None:
        if not isinstance(line, dict):
            raise RecordError("no JSON object")
        if "changes" in line:
            self._newest = line["view"]
            self._views[self._newest] = changed_view(self._views[self._newest - 1], line["changes"])
            self._views.pop(self._newest - NUM_VIEWS_KEPT, None)
        elif "event" in line:
            event, at_s = line["event"], float(line["now_s"]) + self._to_unix_s
            self.journal.last_s = max(self.journal.last_s, at_s)
            if event["type"] == "ViewChanged":
                self._view(self._views[event["view"]], at_s)
            else:
                self._event(event, at_s)

    def _view(self, view: View, at_s: float) -> None:
        journal, before = self.journal, self.journal.view
        journal.view, journal.result = view, view.result or journal.result
        self._nodes(before, view, at_s)
        if view.rate is not None and view.rate is not before.rate:
            journal.told.append(Point(view.rate.time_s, view.rate.iteration - 1))
        generation = view.generation
        phases = self._timeline.observe(view, at_s)
        if generation is None:
            return
        seen = journal.seen.get(generation.number)
        if seen is None:
            # What was lost before is why there is another one. Who comes later has not seen it.
            seen = journal.seen[generation.number] = Seen(at_s, generation, journal.failing_s, dict(journal.lost_now))
            journal.lost_now, journal.failing_s = {}, None
        seen.record = generation
        if view.plan is not None and seen.planned_s is None:
            seen.planned_s, seen.plan, seen.plan_why = at_s, view.plan.content, view.plan.why
        if view.failures and not view.released:
            journal.failing_s = journal.failing_s if journal.failing_s is not None else at_s
            journal.lost_now.update(view.failures)
        if seen.resumed_s is None and (phases is not None or view.recovered >= generation.number > before.recovered):
            seen.resumed_s = at_s
        if view.resumed and seen.resumed_s == at_s:
            seen.iteration = max(record.iteration for record in view.resumed.values())
        if phases is not None:
            predicted = strategy.predicted(view)
            seen.phases_s, seen.predicted_s = phases, None if predicted is None else predicted.seconds

    def _nodes(self, before: View, view: View, at_s: float) -> None:
        if before.nodes is view.nodes:
            return
        nodes = self.journal.nodes
        here = {node.incarnation: node.node_id for node in view.nodes.values()}
        for incarnation, node_id in here.items():
            if incarnation not in nodes:
                nodes[incarnation] = node_id, at_s, None
        for node in before.nodes.values():
            if node.incarnation not in here:
                nodes[node.incarnation] = (*nodes[node.incarnation][:2], at_s)

    def _event(self, event: Mapping[str, Any], at_s: float) -> None:
        generation = self.journal.view.generation
        match event["type"]:
            case "WorkerAt" if generation is not None and generation.slot_of(self.journal.incarnation) == 0:
                if event["local_rank"] == 0:
                    # Of a worker that does not mark them: the one before the first that has not begun is under way.
                    began_s = event.get("began_s") or {event["iteration"] - 1: at_s - self._to_unix_s}
                    self.journal.points += [
                        Point(float(when_s) + self._to_unix_s, int(number)) for number, when_s in began_s.items()
                    ]
            case "WorkerFinished" if generation is not None and generation.slot_of(self.journal.incarnation) == 0:
                if event["local_rank"] == 0 and isinstance(event["end"].get("iteration"), int):
                    self.journal.points.append(Point(at_s, event["end"]["iteration"]))
            case "WorkerResumed":
                self._resumed(event, at_s)

    def _resumed(self, event: Mapping[str, Any], at_s: float) -> None:
        """A worker of this node: where no coordinator says more, its phases are those that are known."""
        seen = self.journal.seen.get(int(event["generation"]))
        if seen is None or seen.record.number == 1 or seen.resumed_s is not None:
            return
        seen.iteration = max(seen.iteration or 0, int(event["iteration"]))
        merge_phases(seen.phases_s, {name: float(one) for name, one in event["phases_s"].items()})


# ---- all together ---------------------------------------------------------------------------------------------------


def read(journals: Sequence[Journal]) -> Known:
    """What *journals*, of one job, say together. Raises `JournalError` if they are of several."""
    ids = sorted({journal.job for journal in journals})
    if len(ids) != 1:
        raise JournalError(f"these are journals of several jobs: {', '.join(ids) or 'none'}")
    numbers = sorted({number for journal in journals for number in journal.seen})
    chapters = tuple(
        _chapter(number, [j.seen[number] for j in journals if number in j.seen], _record(journals, number - 1))
        for number in numbers
    )
    end_s = max(journal.last_s for journal in journals)
    last = max(journals, key=lambda journal: (journal.view.revision, journal.last_s))
    result = next((journal.result for journal in journals if journal.result is not None), None)
    points = _points(journals)
    notes = _notes(journals, chapters, points)
    is_failing = result is None and bool(last.view.failures) and last.failing_s is not None
    names = ", ".join(sorted({journal.node for journal in journals}))
    known = last.view.profile
    tracked = last.view.tracked
    is_over = bool(chapters) and (chapters[-1].number == 1 or chapters[-1].resumed_s is not None or not tracked)
    trains = is_over and not is_failing
    state = "training" if trains else "recovering" if chapters else "starting"
    return Known(
        ids[0], f"{_count(len(journals), 'journal')} of {names}", result.state if result else state,
        end_s, chapters, _presences(journals), points, result.why if result else "", tracked,
        last.failing_s if is_failing else None,
        tuple(_loss(one, last.view.generation, {}) for one in last.lost_now.values()) if is_failing else (),
        known.lines if known is not None else (), notes,
    )  # fmt: skip


def _record(journals: Sequence[Journal], number: int) -> GenerationRecord | None:
    return next((journal.seen[number].record for journal in journals if number in journal.seen), None)


def _chapter(number: int, told: Sequence[Seen], former: GenerationRecord | None) -> Chapter:
    """One generation, as several agents saw it, and the roster of the one before."""
    record = told[0].record
    begin_s = min(seen.begin_s for seen in told)
    # A node that was a spare, or came later, has not seen what was lost.
    failed = [seen.failed_s for seen in told if seen.failed_s is not None]
    failed_s = min(failed) if failed else None
    losses: dict[int, FailureRecord] = {}
    for seen in told:
        losses.update(seen.losses)
    whole = next((seen for seen in told if "total" in seen.phases_s), None)
    resumed = [seen.resumed_s for seen in told if seen.resumed_s is not None]
    resumed_s = whole.resumed_s if whole is not None else min(resumed, default=None)
    phases_s = dict(whole.phases_s) if whole is not None else _some_phases(told, failed_s, begin_s, resumed_s)
    planned = next((seen for seen in told if seen.plan), None)
    plan = read_plan(dict(planned.plan)) if planned is not None else None
    moved = _moved(former, record)
    return Chapter(
        number, record.mode, record.why, begin_s, tuple(owner.node_id for owner in record.slots),
        tuple(record.workers_of(slot) for slot in range(len(record.slots))), moved,
        dict(record.lost), tuple(record.handover),
        tuple(_loss(losses[slot], record, moved) for slot in sorted(losses)),
        failed_s if number > 1 else None, resumed_s if number > 1 else None,
        max((seen.iteration for seen in told if seen.iteration is not None), default=None), phases_s, plan,
        planned.plan_why if planned is not None else "", whole.predicted_s if whole is not None else None,
    )  # fmt: skip


def _moved(former: GenerationRecord | None, record: GenerationRecord) -> dict[int, tuple[str, str]]:
    """Slots that have another owner than before."""
    found: dict[int, tuple[str, str]] = {}
    for slot in range(max(len(former.slots), len(record.slots)) if former is not None else 0):
        old = former.slots[slot] if former is not None and slot < len(former.slots) else None
        new = record.slots[slot] if slot < len(record.slots) else None
        if old is None or new is None or old.incarnation != new.incarnation:
            found[slot] = old.node_id if old else "", new.node_id if new else ""
    return found


def _some_phases(
    told: Sequence[Seen], failed_s: float | None, begin_s: float, resumed_s: float | None
) -> dict[str, float]:
    """Where there is no journal of the coordinator: what these nodes know, and no total unless its ends are known."""
    phases: dict[str, float] = {}
    for seen in told:
        merge_phases(phases, seen.phases_s)
    if not phases:
        return {}
    if failed_s is not None:
        phases["agree"] = max(0.0, begin_s - failed_s)
    planned = [seen.planned_s for seen in told if seen.planned_s is not None]
    if planned and told[0].record.asks:
        phases["plan"] = max(0.0, min(planned) - begin_s)
    ordered = {name: phases[name] for name in PHASES if name in phases}
    if failed_s is not None and resumed_s is not None:
        ordered["total"] = resumed_s - failed_s
    return ordered


def _loss(failure: FailureRecord, generation: GenerationRecord | None, moved: Mapping[int, tuple[str, str]]) -> Loss:
    slot, node, first = failure.slot, "", 0
    if generation is not None and slot < len(generation.slots):
        node, first = generation.slots[slot].node_id, generation.first_rank(slot)
    if slot in moved:
        node = moved[slot][0]
    return Loss(slot, node, failure.kind, tuple(first + rank for rank in failure.local_ranks), failure.evidence)


def _points(journals: Sequence[Journal]) -> tuple[Point, ...]:
    """The node of rank 0 knows best; what it has told others is all that they know."""
    own = [point for journal in journals for point in journal.points]
    first_s = min((point.at_s for point in own), default=math.inf)
    last_s = max((point.at_s for point in own), default=-math.inf)
    told = {point for journal in journals for point in journal.told if not first_s <= point.at_s <= last_s}
    return tuple(sorted({*own, *told}, key=lambda point: (point.at_s, point.iteration)))


def _presences(journals: Sequence[Journal]) -> tuple[Presence, ...]:
    found: dict[str, tuple[str, float, float | None]] = {}
    for journal in journals:
        for incarnation, (node, begin_s, end_s) in journal.nodes.items():
            known = found.get(incarnation, (node, begin_s, end_s))
            ends = [one for one in (known[2], end_s) if one is not None]
            found[incarnation] = node, min(known[1], begin_s), min(ends, default=None)
    return tuple(Presence(*one) for one in found.values())


def _notes(journals: Sequence[Journal], chapters: Sequence[Chapter], points: Sequence[Point]) -> tuple[str, ...]:
    notes = []
    if len(chapters) > 1:
        notes.append("A loss is drawn from when an agent noticed it; it may have been a moment earlier.")
    for journal in journals:
        if journal.cut_at is not None:
            notes.append(
                f"The journal of {journal.node} ends in the middle of line {journal.cut_at}: it is read up to there."
            )
    first = {seen.record.slots[0].incarnation for journal in journals for seen in journal.seen.values()}
    unread = first - {journal.incarnation for journal in journals}
    if unread and points:
        notes.append(
            "Of a node of rank 0 there is no journal: while it had that place, the speed is what it told the others "
            "every 5 s."
        )
    elif first and not points:
        notes.append(NO_MARKS)
    partial = [str(c.number) for c in chapters if c.number > 1 and c.phases_s and "total" not in c.phases_s]
    if partial:
        notes.append(
            f"No journal of the coordinator in generation {', '.join(partial)}: its phases are those of the nodes that "
            "wrote these journals."
        )
    missing = {node for chapter in chapters for node in chapter.nodes} - {journal.node for journal in journals}
    if missing:
        notes.append(f"There is no journal of {_names(sorted(missing))}: what these nodes saw is not here.")
    if len({journal.node for journal in journals}) > 1:
        notes.append("Times are those of each node's clock; clocks that differ shift what is drawn.")
    return tuple(notes)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"
