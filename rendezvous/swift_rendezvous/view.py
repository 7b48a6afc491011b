"""What an agent knows of its job: the content of etcd under the job's prefix, as typed records.

A `View` is immutable; `apply` folds one change into it. Only records of the current generation are kept: what belongs
to an older one has no say any more, what belongs to a newer one arrives after that generation's record (etcd delivers
in the order of revisions).

This module must never decide anything and never talk to a store.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from swift_rendezvous.keys import (
    CoordinatorRecord,
    DrainRecord,
    ExitedRecord,
    FailureRecord,
    FinishedRecord,
    GenerationRecord,
    JobRecord,
    Keys,
    NodeRecord,
    ParkedRecord,
    PauseRecord,
    PlanRecord,
    PositionRecord,
    ProgressRecord,
    RateRecord,
    ResultRecord,
    ResumedRecord,
    StoreRecord,
    TakenRecord,
    decode,
)
from swift_rendezvous.kv import KeyValue

T = TypeVar("T")


@dataclass(frozen=True)
class Stored:
    """Where a record stands in the history of the store; what a guarded write compares with."""

    mod_revision: int = 0
    create_revision: int = 0


@dataclass(frozen=True)
class View:
    """All records that matter now. Maps are keyed by slot, *nodes* by node id."""

    revision: int = 0
    """Of the last change folded in: of two views of one store, the one with the smaller number is the older."""
    job: JobRecord | None = None
    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)
    joined: Mapping[str, int] = field(default_factory=dict)
    """node id -> create revision of its record: the order in which nodes came."""
    generation: GenerationRecord | None = None
    generation_revision: int = 0
    coordinator: CoordinatorRecord | None = None
    coordinator_revision: int = 0
    tracked: bool = False
    preload: tuple[str, ...] = ()
    store: StoreRecord | None = None
    plan: PlanRecord | None = None
    released: bool = False
    result: ResultRecord | None = None
    failures: Mapping[int, FailureRecord] = field(default_factory=dict)
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
    rate: RateRecord | None = None
    recovered: int = 0
    """The last generation whose recovery is in the history: it has been told."""

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


_PER_SLOT: dict[str, tuple[str, type[Any]]] = {
    "failure": ("failures", FailureRecord),
    "~progress": ("progress", ProgressRecord),
    "~resumed": ("resumed", ResumedRecord),
    "~finished": ("finished", FinishedRecord),
    "exited": ("exited", ExitedRecord),
    "~position": ("positions", PositionRecord),
    "~parked": ("parked", ParkedRecord),
    "~handover": ("handovers", ProgressRecord),
    "taken": ("taken", TakenRecord),
}


def apply(view: View, keys: Keys, change: Change) -> View:
    """Fold one change into the view. Raises `RecordError` if a value cannot be read."""
    if not change.key.startswith(keys.prefix):
        return view
    view = replace(view, revision=max(view.revision, change.mod_revision))
    parts = change.key[len(keys.prefix) :].split("/")
    name, value = parts[0], change.value
    match name:
        case "nodes" if len(parts) == 2:
            return _node(view, parts[1], change)
        case "generation":
            if value is None:
                return _enter(view, None, 0)
            return _enter(view, decode(GenerationRecord, value), change.mod_revision)
        case "coordinator":
            record = None if value is None else decode(CoordinatorRecord, value)
            return replace(view, coordinator=record, coordinator_revision=change.mod_revision if record else 0)
        case "job":
            return replace(view, job=None if value is None else decode(JobRecord, value))
        case "tracked":
            return replace(view, tracked=value is not None)
        case "preload":
            return replace(view, preload=() if not value else tuple(value.decode().split(",")))
        case "end":
            return replace(view, result=None if value is None else decode(ResultRecord, value))
        case "rate":
            return replace(view, rate=None if value is None else decode(RateRecord, value))
        case "events" if len(parts) == 2 and value is not None:
            number, _, what = parts[1].partition(".")
            if what == "recovered" and number.isdigit():
                view = replace(view, recovered=max(view.recovered, int(number)))
            return view
        case "drain" if len(parts) == 2:
            drains = {node_id: drain for node_id, drain in view.drains.items() if node_id != parts[1]}
            if value is not None:
                drains[parts[1]] = decode(DrainRecord, value)
            return replace(view, drains=drains)
    if len(parts) < 2 or not parts[1].isdigit() or int(parts[1]) != view.number:
        return view
    match name:
        case "store":
            return replace(view, store=None if value is None else decode(StoreRecord, value))
        case "plan":
            return replace(view, plan=None if value is None else decode(PlanRecord, value))
        case "release":
            return replace(view, released=value is not None)
        case "pause":
            return replace(view, pause=None if value is None else decode(PauseRecord, value))
    if name in _PER_SLOT and len(parts) == 3 and parts[2].isdigit():
        attribute, cls = _PER_SLOT[name]
        records = dict(getattr(view, attribute))
        if value is None:
            records.pop(int(parts[2]), None)
        else:
            records[int(parts[2])] = decode(cls, value)
        changes: dict[str, Any] = {attribute: records}
        return replace(view, **changes)
    return view


def apply_all(view: View, keys: Keys, changes: Iterable[Change]) -> View:
    """Fold many changes. A listing is not in the order of history, so it is sorted by revision first."""
    nodes, joined, newest = dict(view.nodes), dict(view.joined), view.revision
    rest = []
    for change in sorted(changes, key=lambda c: c.mod_revision):
        if change.key.startswith(keys.nodes) and "/" not in change.key[len(keys.nodes) :]:
            # All at once: no other record means anything else because of them, and there may be a thousand.
            _put_node(nodes, joined, change.key[len(keys.nodes) :], change)
            newest = max(newest, change.mod_revision)
        else:
            rest.append(change)
    view = replace(view, nodes=nodes, joined=joined, revision=newest)
    for change in rest:
        view = apply(view, keys, change)
    return view


def view_of_entries(keys: Keys, entries: Iterable[KeyValue]) -> View:
    """The view that a listing of the job's prefix gives. Raises `RecordError`."""
    return apply_all(
        View(), keys, (Change(kv.key, kv.value, kv.mod_revision, kv.create_revision) for kv in entries)
    )


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
        return replace(view, generation=generation, generation_revision=revision)
    return replace(
        view,
        generation=generation,
        generation_revision=revision,
        store=None,
        plan=None,
        released=False,
        failures={},
        progress={},
        resumed={},
        finished={},
        exited={},
        pause=None,
        positions={},
        parked={},
        handovers={},
        taken={},
    )
