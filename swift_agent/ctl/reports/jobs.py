"""What the keys of jobs say, for operators: which nodes are in a job, what it does, whether it still runs. Pure.

Must never talk to a store or read a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from swift_recovery.state.machines import kinds_of
from swift_rendezvous.codec import RecordError, decode
from swift_rendezvous.roster import resizing
from swift_rendezvous.roster.draining import progress_of
from swift_rendezvous.roster.keys import ROOT, Keys
from swift_rendezvous.roster.losses import spares
from swift_rendezvous.roster.records import EventRecord
from swift_rendezvous.roster.view import View, view_of_entries
from swift_rendezvous.store.kv import Compare, DeletePrefix, KeyValue, Op, WatchResponse

# Where `swiftctl doctor` measures how long a write takes. No job, so that none is disturbed.
PROBE_ID = ".swiftctl-doctor"


def jobs_in(entries: Iterable[KeyValue]) -> list[str]:
    """Ids of the jobs that have a key among *entries*, sorted."""
    ids = {entry.key[len(ROOT) :].partition("/")[0] for entry in entries if entry.key.startswith(ROOT)}
    return sorted(ids - {PROBE_ID})


def of_job(job_id: str, entries: Iterable[KeyValue]) -> list[KeyValue]:
    """The keys of one job."""
    prefix = Keys(job_id).prefix
    return [entry for entry in entries if entry.key.startswith(prefix)]


def view_of(job_id: str, entries: Iterable[KeyValue]) -> View:
    """The records of a job as an agent sees them: without what cannot be read."""
    return view_of_entries(Keys(job_id), entries)


def events_of(job_id: str, entries: Iterable[KeyValue]) -> tuple[EventRecord, ...]:
    """The history that is kept of a job, oldest first, without what cannot be read."""
    return history_of(job_id, entries)[0]


def history_of(job_id: str, entries: Iterable[KeyValue]) -> tuple[tuple[EventRecord, ...], dict[str, str]]:
    """The history, and by name why other entries of it cannot be read."""
    keys = Keys(job_id)
    events, unread = [], {}
    for kv in sorted((kv for kv in entries if kv.key.startswith(keys.events)), key=lambda kv: kv.key):
        try:
            events.append(decode(EventRecord, kv.value))
        except RecordError as error:
            unread[kv.key[len(keys.prefix) :]] = f"cannot be read ({error})"
    return tuple(events), unread


def follow(entries: Mapping[str, KeyValue], response: WatchResponse) -> dict[str, KeyValue]:
    """*entries*, by key, after the changes of *response*."""
    now = dict(entries)
    for event in response.events:
        if event.kind == "put":
            now[event.kv.key] = event.kv
        else:
            now.pop(event.kv.key, None)
    return now


def has_ended(job_id: str, entries: Mapping[str, KeyValue]) -> bool:
    """Whether there is nothing more to see of a job: it has a result, or its records were removed."""
    keys = Keys(job_id)
    return keys.result in entries or not any(key.startswith(keys.prefix) for key in entries)


def summarize(job_id: str, entries: Iterable[KeyValue]) -> dict[str, Any]:
    """What the keys of a job say, as plain JSON types.

    `state` is `starting`, `training`, `recovering`, `abandoned` (no node is alive), `unreadable` (the record of the job
    or of its generation is) or, at the end, what the result says. A slot whose owner is not alive is listed under
    `missing_slots`; a living node without a slot is a spare and has `slot` null. `iteration` is the newest that is
    known: that of `rate`, which rank 0's node writes every few seconds (`time_s`: when), else the one at which the job
    last went on after a recovery, else null. `machines`: which ranks began with what to compute, if that was not the
    same everywhere, else null. `drains`: the nodes that are to leave, and how far that is. `damaged`: records that are
    left out, because they cannot be read.
    """
    listed = list(entries)
    view = view_of(job_id, listed)
    generation = view.generation
    alive = {node.incarnation for node in view.nodes.values()}
    slots = generation.slots if generation else ()
    events, unread = history_of(job_id, listed)
    damaged = {**{name: what.why for name, what in view.damaged.items()}, **unread}
    return {
        "job": job_id,
        "state": state_of(view),
        "generation": view.number,
        "mode": generation.mode if generation else None,
        "why": view.result.why if view.result else generation.why if generation else "",
        "iteration": _iteration(view, events),
        "rate": _rate(view),
        "num_restarts": generation.num_restarts if generation else 0,
        "num_nodes": view.job.num_nodes if view.job else None,
        "max_nodes": resizing.most_nodes(view.job) if view.job else None,
        "world_size": generation.world_size if generation else None,
        "coordinator": view.coordinator.node_id if view.coordinator else None,
        "nodes": [
            {
                "node": node_id,
                "host": node.host,
                "slot": generation.slot_of(node.incarnation) if generation else None,
                "num_workers": node.num_workers,
            }
            for node_id, node in sorted(view.nodes.items())
        ],
        "machines": _machines(view),
        "num_spares": sum(not generation or generation.slot_of(name) is None for name in alive),
        "missing_slots": [
            {"slot": slot, "last_owner": owner.node_id, "host": owner.host}
            for slot, owner in enumerate(slots)
            if owner.incarnation not in alive and view.result is None
        ],
        "drains": [
            {"node": node_id, "progress": progress, "why": view.drains[node_id].why}
            for node_id, progress in _drains(view)
        ],
        "failures": [
            {"slot": slot, "kind": failure.kind, "local_ranks": list(failure.local_ranks), "evidence": failure.evidence}
            for slot, failure in sorted(view.failures.items())
        ],
        "events": [
            {"time_s": event.time_s, "generation": event.generation, "what": event.what, "why": event.why}
            for event in events
        ],
        "damaged": [{"record": name, "why": why} for name, why in sorted(damaged.items())],
    }


def summarize_all(entries: Iterable[KeyValue]) -> list[dict[str, Any]]:
    """`summarize` for each job."""
    listed = list(entries)
    return [summarize(job_id, of_job(job_id, listed)) for job_id in jobs_in(listed)]


def state_of(view: View) -> str:
    """What the job does, in a word: see `summarize`."""
    if view.result is not None:
        return view.result.state
    if "job" in view.damaged or "generation" in view.damaged:
        return "unreadable"
    if not view.nodes:
        return "abandoned"
    if view.generation is None:
        return "starting"
    being_replaced = view.generation.asks and len(view.resumed) < len(view.generation.slots)
    return "recovering" if view.failures or being_replaced else "training"


def _rate(view: View) -> dict[str, Any] | None:
    """None also if it is that of workers before a restart, which counted another way."""
    rate, generation = view.rate, view.generation
    if rate is None or generation is None or rate.generation < generation.epoch:
        return None
    return {"iteration": rate.iteration, "iterations_per_s": rate.per_s, "time_s": rate.time_s}


def _drains(view: View) -> list[tuple[str, str]]:
    """Nodes that are about to leave, and how far that is."""
    has_spare = bool(spares(view))
    found = [(node_id, progress_of(view, node_id, has_spare=has_spare)) for node_id in sorted(view.drains)]
    return [(node_id, progress) for node_id, progress in found if progress]


def _machines(view: View) -> str | None:
    ranks = range(view.generation.world_size if view.generation else 0)
    return kinds_of(dict(zip(ranks, view.computed_by(ranks), strict=False))) or None


def _iteration(view: View, events: Iterable[EventRecord]) -> int | None:
    rate = _rate(view)
    if rate is not None or view.resumed:
        seen = [record.iteration for record in view.resumed.values()]
        return max([*seen, rate["iteration"]] if rate else seen)
    epoch = view.generation.epoch if view.generation else 0
    # Before a restart of all workers the count was another one.
    known = [event.details.get("iteration") for event in events if event.generation >= epoch]
    return next((iteration for iteration in reversed(known) if isinstance(iteration, int)), None)


@dataclass(frozen=True)
class Leftover:
    """The records of a job that no node runs. *job_revision*: of its `job` record, 0 if it has none."""

    job_id: str
    num_records: int
    job_revision: int
    state: str
    last_event_s: float | None


def leftovers(entries: Iterable[KeyValue]) -> tuple[Leftover, ...]:
    """Jobs without a node. *entries* must be one listing: what was read in two steps may have lost a new node."""
    listed = list(entries)
    found = []
    for job_id in jobs_in(listed):
        own, keys = of_job(job_id, listed), Keys(job_id)
        # Nodes write under a lease, of whatever version they are; people do not.
        if view_of(job_id, own).nodes or any(kv.lease_id and kv.key.startswith(keys.nodes) for kv in own):
            continue
        revision = next((entry.mod_revision for entry in own if entry.key == keys.job), 0)
        summary = summarize(job_id, own)
        last_s = max((event["time_s"] for event in summary["events"]), default=None)
        found.append(Leftover(job_id, len(own), revision, summary["state"], last_s))
    return tuple(found)


def removal(leftover: Leftover) -> tuple[list[Compare], list[Op]]:
    """The transaction that removes a leftover: conditions and operations.

    A node that enters writes the job's record again together with its own (`registration.enter_job`), so an unchanged
    record proves that no node has come since the listing.
    """
    keys = Keys(leftover.job_id)
    return [Compare.mod_revision(keys.job, "==", leftover.job_revision)], [DeletePrefix(keys.prefix)]
