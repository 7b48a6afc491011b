"""What the records of a job say of its past. Pure.

etcd keeps two entries of each generation, its begin and its recovery, and when some of its iterations began. The roster
is kept of the newest only: those before it follow from who took whose slot. Must never talk to a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from swift_agent.ctl.reports import explain, jobs
from swift_agent.ctl.timeline.assemble import Chapter, Known, Presence
from swift_agent.ctl.timeline.model import Loss, Point
from swift_rendezvous.codec import RecordError, decode
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import EventRecord, GenerationRecord, RateRecord
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.kv import KeyValue

NO_MARKS = (
    "When iterations began is not known: rank 0's node has not told it yet, or the script does not call "
    "swift_agent.init()."
)


def read(job_id: str, entries: Iterable[KeyValue], now_s: float) -> Known:
    """All that the keys of *job_id* say. *now_s*: Unix time."""
    listed = list(entries)
    view = jobs.view_of(job_id, listed)
    events, unread = jobs.history_of(job_id, listed)
    notes = [f"The record {name} {why}." for name, why in sorted(unread.items())]
    chapters = _with_rosters(_chapters(events), view.generation, notes)
    points = paces(job_id, listed)
    if chapters and not points:
        notes.append(NO_MARKS)
    if len(chapters) > 1:
        notes.append("A loss is drawn from when an agent noticed it; it may have been a moment earlier.")
    if chapters and chapters[0].number > 1:
        notes.append(f"Generations before {chapters[0].number} are not kept any more.")
    summary = jobs.summarize(job_id, listed)
    end_s = now_s
    if view.result is not None or summary["state"] == "abandoned":
        # Nobody writes down when it ended.
        times = [event.time_s for event in events] + [point.at_s for point in points]
        end_s = max(times, default=now_s)
        notes.append("When the job ended is in no record: the picture goes to the last thing that is known.")
    failing = tuple(_loss_now(view, slot) for slot in sorted(view.failures)) if view.result is None else ()
    presences = _presences(view, listed, job_id, events, end_s, chapters[0].nodes if chapters else (), notes)
    return Known(
        job_id, "the records of the job in etcd", summary["state"], end_s, chapters, presences, points, summary["why"],
        # A loss has no time of its own until the recovery is told.
        view.tracked, end_s if failing else None, failing,
        view.profile.lines if view.profile is not None else (), tuple(notes),
    )  # fmt: skip


def paces(job_id: str, entries: Iterable[KeyValue]) -> tuple[Point, ...]:
    """When iterations began, oldest first. What cannot be read is left out."""
    keys, found = Keys(job_id), list[Point]()
    for kv in entries:
        if kv.key.startswith(keys.paces):
            try:
                record = decode(RateRecord, kv.value)
            except RecordError:
                continue
            began_s = record.began_s or {record.iteration - 1: record.time_s}
            found += [Point(at_s, iteration) for iteration, at_s in began_s.items()]
    return tuple(sorted(found, key=lambda point: (point.at_s, point.iteration)))


# ---- generations ---------------------------------------------------------------------------------------------------


def _chapters(events: Sequence[EventRecord]) -> tuple[Chapter, ...]:
    """One for each generation of the history, without a roster."""
    found: dict[int, Chapter] = {}
    for event, episode in zip(
        sorted(events, key=lambda event: event.generation), explain.history(events), strict=True
    ):
        chapter = found.get(event.generation, Chapter(event.generation, begin_s=event.time_s, why=event.why))
        if event.what == "recovered":
            total_s, plan = episode.phases_s.get("total"), episode.plan
            chapter = replace(
                chapter, resumed_s=event.time_s, iteration=episode.iteration, phases_s=episode.phases_s, plan=plan,
                plan_why=plan.why if plan is not None else "", predicted_s=_number(event.details.get("predicted_s")),
                failed_s=None if total_s is None else min(event.time_s - total_s, chapter.begin_s),
            )  # fmt: skip
        else:
            mode = event.what.removeprefix("generation (").removesuffix(")")
            chapter = replace(chapter, mode=mode, begin_s=event.time_s, why=event.why, **_changes(event.details))
        found[event.generation] = chapter
    return tuple(found[number] for number in sorted(found))


def _changes(details: Mapping[str, Any]) -> dict[str, Any]:
    """What `losses.changes_of` has written; what is not as it writes it is left out."""
    moved, lost = details.get("moved"), details.get("lost")
    found: dict[str, Any] = {}
    if isinstance(moved, dict):
        found["moved"] = {
            int(slot): (str(pair[0]), str(pair[1]))
            for slot, pair in moved.items()
            if slot.isdecimal() and isinstance(pair, list) and len(pair) == 2
        }
    if isinstance(lost, dict):
        found["losses"] = tuple(
            Loss(int(slot), "", str(one.get("kind")), _numbers(one.get("local_ranks")), str(one.get("evidence")))
            for slot, one in lost.items()
            if slot.isdecimal() and isinstance(one, dict)
        )
    return found


def _with_rosters(
    chapters: tuple[Chapter, ...], newest: GenerationRecord | None, notes: list[str]
) -> tuple[Chapter, ...]:
    """From the newest roster back: each generation says who had a slot before it."""
    if newest is None or not chapters or chapters[-1].number != newest.number:
        if chapters:
            notes.append("Which node had which slot is not known: the record of the generation is missing.")
        return chapters
    nodes = [owner.node_id for owner in newest.slots]
    workers = [newest.workers_of(slot) for slot in range(len(newest.slots))]
    found, usual = list[Chapter](), newest.num_workers
    for index, chapter in enumerate(reversed(chapters)):
        handover = tuple(newest.handover) if index == 0 else ()
        before = list(nodes)
        for slot, (old, _) in chapter.moved.items():
            before += [""] * (slot + 1 - len(before))
            before[slot] = old
        while before and not before[-1]:
            before.pop()
        first = [0]
        for num in workers:
            first.append(first[-1] + num)
        losses = tuple(_placed(loss, before, first) for loss in chapter.losses)
        new = {loss.slot: loss.ranks for loss in chapter.losses if loss.kind == "workers"}
        lost_slots = {loss.slot for loss in chapter.losses}
        if chapter.mode == "replace" and not handover:
            # Who lost its slot without a loss has handed it over.
            handover = tuple(slot for slot in chapter.moved if slot not in lost_slots)
        found.append(replace(
            chapter, nodes=tuple(nodes), workers=tuple(workers), losses=losses, new=new, handover=handover
        ))  # fmt: skip
        nodes, workers = before, [workers[slot] if slot < len(workers) else usual for slot in range(len(before))]
    return tuple(reversed(found))


def _placed(loss: Loss, before: Sequence[str], first: Sequence[int]) -> Loss:
    """With the node that had the slot, and ranks of the job in place of those of the node."""
    node = before[loss.slot] if loss.slot < len(before) else ""
    start = first[loss.slot] if loss.slot < len(first) else 0
    return replace(loss, node=node, ranks=tuple(start + rank for rank in loss.ranks))


def _loss_now(view: View, slot: int) -> Loss:
    failure, generation = view.failures[slot], view.generation
    node, first = "", 0
    if generation is not None and slot < len(generation.slots):
        node, first = generation.slots[slot].node_id, generation.first_rank(slot)
    ranks = tuple(first + rank for rank in failure.local_ranks)
    return Loss(slot, node, failure.kind, ranks, failure.evidence)


# ---- nodes ---------------------------------------------------------------------------------------------------------


def _presences(
    view: View, entries: Sequence[KeyValue], job_id: str, events: Sequence[EventRecord], end_s: float,
    nodes_at_first: Sequence[str], notes: list[str],
) -> tuple[Presence, ...]:  # fmt: skip
    """Nodes that are alive. When one came is in no record, but it came after all that was written before it."""
    keys = Keys(job_id)
    times = {(event.generation, event.what == "recovered"): event.time_s for event in events}
    written = list[tuple[int, float]]()
    for kv in entries:
        number, _, what = kv.key.removeprefix(keys.events).partition(".")
        if kv.key.startswith(keys.events) and number.isdecimal():
            at_s = times.get((int(number), what == "recovered"))
            if at_s is not None:
                written.append((kv.create_revision, at_s))
    begin_s = min((at_s for _, at_s in written), default=end_s)
    found = []
    for node in view.nodes:
        came = view.joined.get(node, 0)
        found.append(Presence(node, max((at_s for revision, at_s in written if revision < came), default=begin_s)))
    if any(presence.begin_s > begin_s for presence in found) or len(found) > len(nodes_at_first):
        notes.append("When a node came as a spare is in no record: it is drawn from the last event before that on.")
    return tuple(found)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(one for one in value if isinstance(one, int) and not isinstance(one, bool))
