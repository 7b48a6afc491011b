"""What an agent knows of its job: the content of etcd under the job's prefix, as typed records.

A `View` is immutable; `apply` folds one change into it. Only records of the current generation are kept: what belongs
to an older one has no say any more, what belongs to a newer one arrives after that generation's record (etcd delivers
in the order of revisions).

A record that cannot be read, because a person, a stranger or another version wrote it, counts as none, in a listing as
in a watch, and is noted (`View.damaged`): one of them must not blind a node for all others. What the job cannot do
without, its own record and the generation, stays as it was last read until it is written again (see `mending`).

This module must never decide anything and never talk to a store.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from swift_rendezvous.codec import RecordError, decode
from swift_rendezvous.roster import kinds
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.kinds import Kind
from swift_rendezvous.roster.records import (
    CoordinatorRecord,
    DrainRecord,
    ExitedRecord,
    FailureRecord,
    FinishedRecord,
    GenerationRecord,
    JobRecord,
    KernelsRecord,
    MeasuredRecord,
    NodeRecord,
    ParkedRecord,
    PauseRecord,
    PlanRecord,
    PositionRecord,
    ProfileRecord,
    ProgressRecord,
    RateRecord,
    ResultRecord,
    ResumedRecord,
    StoreRecord,
    TakenRecord,
)
from swift_rendezvous.store.kv import KeyValue

T = TypeVar("T")


@dataclass(frozen=True)
class Damaged:
    """What is stored in the place of a record. *revision*: of that, 0 where there is nothing: the agent that writes it
    again compares with it. *why*: goes on from "the record NAME"."""

    revision: int
    why: str


@dataclass(frozen=True)
class View:
    """All records that matter now. Maps are keyed by slot, *nodes* by node id."""

    revision: int = 0
    """Of the last change folded in: of two views of one store, the one with the smaller number is the older."""
    job: JobRecord | None = None
    job_created: int = 0
    """The create revision of its record: which job of this id it is."""
    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)
    joined: Mapping[str, int] = field(default_factory=dict)
    """node id -> create revision of its record: the order in which nodes came."""
    generation: GenerationRecord | None = None
    generation_revision: int = 0
    coordinator: CoordinatorRecord | None = None
    coordinator_revision: int = 0
    tracked: bool = False
    preload: tuple[str, ...] = ()
    kernels: KernelsRecord | None = None
    store: StoreRecord | None = None
    plan: PlanRecord | None = None
    released: bool = False
    result: ResultRecord | None = None
    failures: Mapping[int, FailureRecord] = field(default_factory=dict)
    told: Mapping[int, int] = field(default_factory=dict)
    """slot -> the create revision of its failure: the order in which they were told first."""
    progress: Mapping[int, ProgressRecord] = field(default_factory=dict)
    resumed: Mapping[int, ResumedRecord] = field(default_factory=dict)
    finished: Mapping[int, FinishedRecord] = field(default_factory=dict)
    exited: Mapping[int, ExitedRecord] = field(default_factory=dict)
    drains: Mapping[str, DrainRecord] = field(default_factory=dict)
    """node id -> the order that it leaves; maybe of an incarnation that is gone."""
    pause: PauseRecord | None = None
    positions: Mapping[int, PositionRecord] = field(default_factory=dict)
    parked: Mapping[int, ParkedRecord] = field(default_factory=dict)
    handovers: Mapping[int, ProgressRecord] = field(default_factory=dict)
    """slot -> what the workers of its drained former owner hold."""
    taken: Mapping[int, TakenRecord] = field(default_factory=dict)
    measured: Mapping[int, MeasuredRecord] = field(default_factory=dict)
    rate: RateRecord | None = None
    profile: ProfileRecord | None = None
    recovered: int = 0
    """The last generation whose recovery is in the history: it has been told."""
    begun: int = 0
    """The last generation that is in the history at all."""
    damaged: Mapping[str, Damaged] = field(default_factory=dict)
    """By name, which is the key without the job's prefix, what cannot be read, or should be there and is not."""

    @property
    def log_groups(self) -> tuple[tuple[int, ...], ...]:
        """See `JobRecord`."""
        chosen = self.profile.log_groups if self.profile is not None else ()
        return chosen or (self.job.log_groups if self.job is not None else ())

    def log_group_of(self, slot: int) -> tuple[int, ...]:
        """The slots of its group, itself among them."""
        return next((group for group in self.log_groups if slot in group), (slot,))

    def computed_by(self, ranks: range) -> tuple[str, ...]:
        """What the first processes of these ranks computed with; () if that is not known, or was of another size."""
        known = self.kernels
        if known is None or self.generation is None or len(known.of) != self.generation.world_size:
            return ()
        texts = {number: "".join(filter(str.isprintable, text)) for number, text in enumerate(known.texts)}
        return tuple(texts.get(known.of[rank], "")[:_MAX_TEXT] for rank in ranks)

    @property
    def number(self) -> int:
        """The current generation, 0 before the first."""
        return self.generation.number if self.generation else 0


def once_per_view(function: Callable[[View], T]) -> Callable[[View], T]:
    """A pure *function* of a view, worked out once for each: every agent asks several times per event, and what looks
    at all slots would otherwise be most of its work in a large job. What it returns must not be changed."""
    name = f"_{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def known_or_new(view: View) -> T:
        kept = vars(view)
        if name not in kept:
            kept[name] = function(view)  # beside the fields: neither `==` nor `replace` sees it
        found: T = kept[name]
        return found

    return known_or_new


@dataclass(frozen=True)
class Change:
    """One key that was put (value is bytes) or deleted (value is None)."""

    key: str
    value: bytes | None
    mod_revision: int = 0
    create_revision: int = 0


# Of a text that becomes a variable of a worker.
_MAX_TEXT = 1000
# Of why a record cannot be read: it may quote what a stranger wrote.
_MAX_WHY = 200
REMOVED = "was removed by somebody"

_NOTHING = View()
# By name. The records of the job itself that need no more than to be read:
_SIMPLE = {
    kind.name: kind for kind in kinds.PER_JOB
    if kind.attribute in ("tracked", "preload", "kernels", "result", "rate", "profile")
}  # fmt: skip
_PER_GENERATION = {kind.name: kind for kind in kinds.PER_GENERATION}
_PER_SLOT = {kind.name: kind for kind in kinds.PER_SLOT}


def apply(view: View, keys: Keys, change: Change) -> View:
    """Fold one change into the view. A value that cannot be read is noted and counts as none. Never raises."""
    if not change.key.startswith(keys.prefix):
        return view
    name = change.key[len(keys.prefix) :]
    view = replace(view, revision=max(view.revision, change.mod_revision))
    if name in view.damaged:
        view = replace(view, damaged={key: what for key, what in view.damaged.items() if key != name})
    try:
        return _read(view, name, change)
    except RecordError as error:
        why = str(error)
    except Exception as error:  # a defect of the reading: it must not end an agent that follows the job
        why = f"{type(error).__name__}: {error}"
    return _unread(view, name, change.mod_revision, f"cannot be read ({why[:_MAX_WHY]})")


def _unread(view: View, name: str, revision: int, why: str) -> View:
    """*view* without what the record *name* held, as far as the job can do without that."""
    damaged = Damaged(revision, why)
    match name:
        case "generation":  # the fences of all writes compare with what is stored
            view = replace(view, generation_revision=revision)
        case "coordinator":  # the next election compares with it, too
            view = replace(view, coordinator=None, coordinator_revision=revision)
        case "job":
            pass
        case _:
            view = _read(view, name, Change("", None, revision))
    return replace(view, damaged={**view.damaged, name: damaged})


def _number(text: str) -> int | None:
    """The number of a generation or a slot in a key; None for anything else, whatever Unicode takes for a digit."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _read(view: View, key: str, change: Change) -> View:
    """Raises `RecordError`."""
    parts = key.split("/")
    name, value = parts[0], change.value
    match name:
        case "nodes" if len(parts) == 2:
            return _node(view, parts[1], change)
        case "generation" if len(parts) == 1:
            if value is not None:
                return _enter(view, decode(GenerationRecord, value), change.mod_revision)
            if view.generation is not None and view.job is not None:
                return _unread(view, name, 0, REMOVED)  # the job goes with it where that is meant
            return _enter(view, None, 0)
        case "coordinator" if len(parts) == 1:
            record = None if value is None else decode(CoordinatorRecord, value)
            return replace(view, coordinator=record, coordinator_revision=change.mod_revision if record else 0)
        case "job" if len(parts) == 1:
            if value is not None:
                return replace(view, job=decode(JobRecord, value), job_created=change.create_revision)
            view = replace(view, job=None, job_created=0)
            if "generation" not in view.damaged:
                return view
            return _enter(replace(view, damaged=_all_but(view.damaged, "generation")), None, 0)
        case kinds.HISTORY if len(parts) == 2 and value is not None:
            digits, _, what = parts[1].partition(".")
            number = _number(digits) or 0
            if what == "recovered":
                view = replace(view, recovered=max(view.recovered, number))
            return replace(view, begun=max(view.begun, number))
        case "drain" if len(parts) == 2:
            drains = _all_but(view.drains, parts[1])
            if value is not None:
                drains[parts[1]] = decode(DrainRecord, value)
            return replace(view, drains=drains)
    if len(parts) == 1 and name in _SIMPLE:
        return _with(view, _SIMPLE[name], value)
    if len(parts) < 2 or _number(parts[1]) != view.number:
        return view
    if name in _PER_GENERATION:
        return _with(view, _PER_GENERATION[name], value)
    slot = _number(parts[2]) if name in _PER_SLOT and len(parts) == 3 else None
    if slot is None:
        return view
    if value is not None and (view.generation is None or slot >= len(view.generation.slots)):
        raise RecordError(f"generation {view.number} has no slot {slot}")  # the coordinator looks its owner up
    kind = _PER_SLOT[name]
    records = dict(getattr(view, kind.attribute))
    if value is None:
        records.pop(slot, None)
    else:
        records[slot] = kind.read(value)
    changes: dict[str, Any] = {kind.attribute: records}
    if name == "failure":
        told = {other: revision for other, revision in view.told.items() if other != slot}
        changes["told"] = told if value is None else {**told, slot: change.create_revision}
    return replace(view, **changes)


def _with(view: View, kind: Kind, value: bytes | None) -> View:
    """That has one record. Raises `RecordError`."""
    found = getattr(_NOTHING, kind.attribute) if value is None else kind.read(value)
    return replace(view, **{kind.attribute: found})


def _all_but(records: Mapping[str, T], name: str) -> dict[str, T]:
    return {key: record for key, record in records.items() if key != name}


def apply_all(view: View, keys: Keys, changes: Iterable[Change]) -> View:
    """Fold many changes. A listing is not in the order of history, so it is sorted by revision first; the generation
    comes before its records, also where it was written again after them."""
    nodes, joined, newest = dict(view.nodes), dict(view.joined), view.revision
    rest = []
    for change in sorted(changes, key=lambda c: (c.key != keys.generation, c.mod_revision)):
        name = change.key[len(keys.nodes) :]
        if not change.key.startswith(keys.nodes) or "/" in name:
            rest.append(change)
            continue
        # All at once: no other record means anything else because of them, and there may be a thousand.
        try:
            _put_node(nodes, joined, name, change)
            newest = max(newest, change.mod_revision)
        except Exception:  # `apply` says what is wrong with it
            rest.append(change)
    view = replace(view, nodes=nodes, joined=joined, revision=newest)
    for change in rest:
        view = apply(view, keys, change)
    return view


def view_of_entries(keys: Keys, entries: Iterable[KeyValue], known: View | None = None) -> View:
    """The view that a listing of the job's prefix gives. *known*: what was known before of that job, which has to do
    where the record of the job or of the generation cannot be read any more, or is gone."""
    changes = [Change(kv.key, kv.value, kv.mod_revision, kv.create_revision) for kv in entries]
    view = View()
    created = next((change.create_revision for change in changes if change.key == keys.job), 0)
    if known is not None and known.job is not None and created == known.job_created:
        view = View(job=known.job, job_created=created, generation=known.generation)
        if known.generation is not None and all(change.key != keys.generation for change in changes):
            view = _unread(view, "generation", 0, REMOVED)
    return apply_all(view, keys, changes)


def _node(view: View, node_id: str, change: Change) -> View:
    nodes, joined = dict(view.nodes), dict(view.joined)
    _put_node(nodes, joined, node_id, change)
    return replace(view, nodes=nodes, joined=joined)


def _put_node(nodes: dict[str, NodeRecord], joined: dict[str, int], node_id: str, change: Change) -> None:
    if change.value is None:
        nodes.pop(node_id, None)
        joined.pop(node_id, None)
    else:
        nodes[node_id] = decode(NodeRecord, change.value)
        joined[node_id] = change.create_revision


def _enter(view: View, generation: GenerationRecord | None, revision: int) -> View:
    if generation is not None and generation.number == view.number:
        view = replace(view, generation=generation, generation_revision=revision)
        return _without_slots_from(view, len(generation.slots))
    over = {**_PER_GENERATION, **_PER_SLOT}
    return replace(
        view,
        generation=generation,
        generation_revision=revision,
        damaged={name: what for name, what in view.damaged.items() if name.partition("/")[0] not in over},
        told={},
        **{kind.attribute: getattr(_NOTHING, kind.attribute) for kind in over.values()},
    )


def _without_slots_from(view: View, num_slots: int) -> View:
    """Somebody has written the generation again, maybe with fewer slots."""
    changes: dict[str, Any] = {}
    for attribute in ("told", *(kind.attribute for kind in kinds.PER_SLOT)):
        records = getattr(view, attribute)
        if any(slot >= num_slots for slot in records):
            changes[attribute] = {slot: record for slot, record in records.items() if slot < num_slots}
    return replace(view, **changes) if changes else view
