"""Entering and leaving a job: one node's records, and the last one's duty to clean up.

This module must never decide which nodes train.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, replace
from typing import TypeVar

from swift_rendezvous.codec import RecordError, decode, encode
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.roster import kinds
from swift_rendezvous.roster.draining import slot_left
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import (
    AS_LONG_AS_IT_ADVANCES,
    FailureRecord,
    GenerationRecord,
    JobRecord,
    NodeRecord,
)
from swift_rendezvous.roster.resizing import sizes
from swift_rendezvous.store.kv import Compare, Delete, DeletePrefix, KeyValue, KeyValueStore, Lease, Op, Put

log = logging.getLogger(__name__)

ENDING_TIMEOUT_S = 10.0
# After a time in which etcd was away the nodes of a running job may all be without a lease; they come back within this.
RETURN_TIMEOUT_S = 3.0


T = TypeVar("T")


class JobConflict(RendezvousError):
    """Another job runs under this id, or another node under this name."""


class PlaceLost(RendezvousError):
    """The others have taken this node for lost: it may come back, but not as the one that it was."""


class JobOver(RendezvousError):
    """The job that a node wanted to come back to has ended meanwhile."""


@dataclass(frozen=True)
class Entry:
    """A node is in. *job*: which job of this id it is, the create revision of its record."""

    lease: Lease
    job: int


def enter_job(
    store: KeyValueStore, keys: Keys, job: JobRecord, me: NodeRecord, lease_ttl_s: int, known_job: int | None = None
) -> Entry:
    """Register *me* under a fresh lease; creates the job if there is none.

    Records of a job that no node runs any more are removed first. *known_job*: `Entry.job` of a node that comes back:
    it enters that very job, raises `JobOver` if it has ended, and never creates one. Raises `JobConflict` if a running
    job with this id was started with another command or has no place for a node of this size, or a living node has this
    name. When it raises, no lease is left.
    """
    # The wait for an ending job may be longer than a lease that is not refreshed.
    found = _find(store, keys, known_job) if known_job is not None else _find_or_create(store, keys, job)
    if known_job is None:
        _check_fits(store, keys, job, me)
    lease = store.grant_lease(lease_ttl_s)
    mine = Put(keys.node(me.node_id), encode(me), lease_id=lease.id)
    deadline_s = time.monotonic() + lease_ttl_s + 1.0
    nobody = 0  # the revision of what stands in the place of this node's record and cannot be read
    try:
        while True:
            # The job must still be the one that was found, and is written again with the node: an agent that is
            # about to remove it because it had no nodes (guarded by its revision) then does not.
            guards = [
                Compare.mod_revision(keys.node(me.node_id), "==", nobody),
                Compare.value(keys.job, "==", found.value),
                Compare.create_revision(keys.job, "==", found.create_revision),
            ]
            if store.transaction(guards, [mine, Put(keys.job, found.value)]).succeeded:
                return Entry(lease, found.create_revision)
            there = store.get(keys.node(me.node_id))
            if there is not None and there.lease_id == lease.id:
                return Entry(lease, found.create_revision)  # it was sent twice, and the first one counted
            if there is not None and not _is_node(there) and there.mod_revision != nobody:
                nobody = there.mod_revision
                continue
            nobody = 0
            if there is not None:
                if time.monotonic() >= deadline_s:
                    raise JobConflict(
                        f"a node named {me.node_id!r} is already in job {keys.job_id!r}; name this one with --node-id"
                    )
                time.sleep(0.2)  # an earlier agent of this name that died without a word: its lease runs out soon
            found = _find(store, keys, known_job) if known_job is not None else _find_or_create(store, keys, job)
            lease.refresh()
    except BaseException:
        with contextlib.suppress(RendezvousError):
            lease.revoke()
        raise


def reclaim_place(store: KeyValueStore, keys: Keys, me: NodeRecord, known_job: int, lease_ttl_s: int) -> Lease:
    """Write the record of *me* again, under a fresh lease, after the old lease was lost; the incarnation stays.

    For a node that has trained on while etcd was away, or that was drained and still keeps what it hands over. Raises
    `PlaceLost` if the slot was given to another node or this one was accused meanwhile, or if it has no slot and hands
    none over; `JobOver`; or what the store raises. Then no lease is left. May be called again when it is not known
    whether it has succeeded.
    """
    lease = store.grant_lease(lease_ttl_s)
    try:
        while True:
            job = _find(store, keys, known_job)
            stored, record = store.get(keys.generation), store.get(keys.node(me.node_id))
            if record is not None and record.value != encode(me) and _is_node(record):
                raise PlaceLost(f"another node is in the job under the name {me.node_id!r}")
            generation = _readable(GenerationRecord, stored)
            if stored is None or generation is None:
                begun, _ = store.get_prefix(keys.events, limit=1)
                if stored is not None or begun:
                    raise RendezvousError("the record generation is not there, or cannot be read")  # it is mended
            slot = None if generation is None else generation.slot_of(me.incarnation)
            if generation is not None and slot is None:
                slot = slot_left(generation, me.incarnation)
            if stored is None or generation is None or slot is None:
                raise PlaceLost(f"{me.node_id} has no slot in the job")
            failure_key = keys.failure(generation.number, slot)
            failure = store.get(failure_key)
            accused = _readable(FailureRecord, failure)
            if accused is not None and accused.kind == "node" and accused.incarnation == me.incarnation:
                raise PlaceLost(f"the other nodes took {me.node_id} for lost: {accused.evidence}")
            guards = [
                Compare.mod_revision(keys.generation, "==", stored.mod_revision),
                Compare.mod_revision(failure_key, "==", failure.mod_revision if failure else 0),
                Compare.mod_revision(keys.node(me.node_id), "==", record.mod_revision if record else 0),
                Compare.create_revision(keys.job, "==", known_job),
                Compare.absent(keys.result),
            ]
            # The job is written again for the same reason as in `enter_job`.
            mine = [Put(keys.node(me.node_id), encode(me), lease_id=lease.id), Put(keys.job, job.value)]
            if store.transaction(guards, mine).succeeded:
                return lease
            found = store.get(keys.node(me.node_id))
            if found is not None and found.lease_id == lease.id:
                return lease  # it was sent twice, and the first one counted
            lease.refresh()
    except BaseException:
        with contextlib.suppress(RendezvousError):
            lease.revoke()
        raise


def _find(store: KeyValueStore, keys: Keys, known_job: int) -> KeyValue:
    found = store.get(keys.job)
    if found is None or found.create_revision != known_job or store.get(keys.result) is not None:
        raise JobOver(f"job {keys.job_id!r} ended while this node was away from it")
    return found


def _find_or_create(store: KeyValueStore, keys: Keys, job: JobRecord) -> KeyValue:
    """Return the job's record as it is stored."""
    deadline_s = time.monotonic() + ENDING_TIMEOUT_S
    return_s: float | None = None
    while True:
        value = encode(job)
        store.transaction([Compare.absent(keys.job)], [Put(keys.job, value)])
        found = store.get(keys.job)
        if found is None:
            continue
        nodes = _has_nodes(store, keys)
        ended = store.get(keys.result) is not None
        begun = store.get(keys.generation) is not None
        # From its first answers on: it may have been away until just now, and away for them, too.
        return_s = return_s or time.monotonic() + RETURN_TIMEOUT_S
        if not nodes and _is_alike(found.value, job) and not begun and not ended:
            return found  # just created by a node that is about to register, or has nothing that could mislead
        if not nodes and begun and not ended and time.monotonic() < return_s:
            time.sleep(0.1)  # etcd was away, and they are on their way back; or they have died all at once
            continue
        if not nodes:
            _remove_leftovers(store, keys, found.mod_revision)
        elif ended and time.monotonic() < deadline_s:
            time.sleep(0.1)  # the job under this id is just ending
        elif ended:
            raise JobConflict(f"job {keys.job_id!r} has ended, but its nodes do not leave; use another --rdzv-id")
        else:
            try:
                other = decode(JobRecord, found.value)
            except RecordError as error:
                if time.monotonic() < return_s:
                    time.sleep(0.1)  # the coordinator writes it again
                    continue
                raise JobConflict(
                    f"the record of job {keys.job_id!r} cannot be read ({error}); nothing was started"
                ) from None
            if not _is_alike(found.value, job):
                raise JobConflict(_describe_conflict(keys, other, job))
            return found


def _check_fits(store: KeyValueStore, keys: Keys, job: JobRecord, me: NodeRecord) -> None:
    """Raises `JobConflict` if the job has begun, and none of its places is one that *me* could ever take."""
    generation = _readable(GenerationRecord, store.get(keys.generation))
    if generation is None or job.max_nodes:  # a job of a range of sizes has new places, too
        return
    places = {(generation.workers_of(slot), owner.role) for slot, owner in enumerate(generation.slots)}
    if (me.num_workers, me.role) not in places:
        of_role = f" of role {me.role!r}" if me.role else ""
        theirs = ", ".join(f"{num}{f' of role {role!r}' if role else ''}" for num, role in sorted(places))
        raise JobConflict(
            f"another job with the id {keys.job_id!r} is running, or this node's command is not that of the others: no "
            f"place has {me.num_workers} workers{of_role} (theirs: {theirs}). Nothing was started; choose another "
            "--rdzv-id, or start this node with the same --nproc-per-node and --role as the one that it shall replace"
        )


def _readable(kind: type[T], found: KeyValue | None) -> T | None:
    """The record, None if there is none or something else stands in its place."""
    try:
        return None if found is None else decode(kind, found.value)
    except RecordError:
        return None


def _is_node(found: KeyValue) -> bool:
    """Whether a node wrote it, of whatever version: all of them write under a lease."""
    return found.lease_id != 0 or _readable(NodeRecord, found) is not None


def _has_nodes(store: KeyValueStore, keys: Keys) -> bool:
    first, _ = store.get_prefix(keys.nodes, limit=1)
    if not first or _is_node(first[0]):
        return bool(first)
    return any(map(_is_node, store.get_prefix(keys.nodes)[0]))


def _is_alike(value: bytes, job: JobRecord) -> bool:
    """Whether a job's record, as it is stored, is *job*; nodes may differ in the number of their workers."""
    try:
        other = decode(JobRecord, value)
    except RecordError:
        return False
    return other == replace(job, num_workers=other.num_workers)


def _describe_conflict(keys: Keys, other: JobRecord, job: JobRecord) -> str:
    if other.secret_proof != job.secret_proof:
        return _describe_secrets(keys, other, job)
    differs = []
    if sizes(other) != sizes(job):
        differs.append(f"--nnodes {sizes(other)}, here {sizes(job)}")
    if other.max_restarts != job.max_restarts:
        differs.append(f"{_max_restarts(other)}, here {_max_restarts(job)}")
    if not differs:
        differs.append("other options")
    return (
        f"another job with the id {keys.job_id!r} is running ({'; '.join(differs)}). "
        "Nothing was started; choose another --rdzv-id, or start this node with the same command"
    )


def _max_restarts(job: JobRecord) -> str:
    return "no --max-restarts" if job.max_restarts == AS_LONG_AS_IT_ADVANCES else f"--max-restarts {job.max_restarts}"


def _describe_secrets(keys: Keys, other: JobRecord, job: JobRecord) -> str:
    if not job.secret_proof:
        differs = "protected by a job secret, and this node has none: start it with --job-secret-file FILE"
    elif not other.secret_proof:
        differs = "running without a job secret, and this node has one: leave it out here, or stop the job"
    else:
        differs = "protected by another job secret than this node has: give all nodes the same one"
    return f"job {keys.job_id!r} is {differs}. Nothing was started; the job is not disturbed"


def _remove_leftovers(store: KeyValueStore, keys: Keys, job_revision: int) -> None:
    """Remove the records of a job without nodes. The guard keeps two new nodes from removing each other's new job."""
    guard = Compare.mod_revision(keys.job, "==", job_revision)
    if store.transaction([guard], _all_but_nodes(keys)).succeeded:
        log.info("removed the records of an earlier job with the id %s", keys.job_id)


def _all_but_nodes(keys: Keys) -> list[Op]:
    below = [*kinds.PER_NODE, *kinds.PER_GENERATION, *kinds.PER_SLOT]
    many = [f"{kind.name}/" for kind in below if kind is not kinds.NODES]
    many += [f"{name}/" for name in (kinds.HISTORY, kinds.FAULTS, kinds.FAULT_ANSWERS)]
    return [
        *(Delete(keys.prefix + kind.name) for kind in kinds.PER_JOB),
        *(DeletePrefix(keys.prefix + name) for name in many),
        DeletePrefix(keys.for_coordinator),  # also what a newer version has there
    ]


def leave_job(store: KeyValueStore, keys: Keys, me: NodeRecord, lease: Lease) -> None:
    """Remove this node's records; the last node removes the job's. Never raises: a lease that runs out does the rest.
    """
    try:
        lease.revoke()
        remove_ended(store, keys)
    except RendezvousError as error:
        log.warning("could not remove this node's records (its lease will): %s", error)


def remove_ended(store: KeyValueStore, keys: Keys) -> None:
    """Remove the records of a job that has ended, or never begun, once no node is left.

    Safe to call by several at a time. Raises `RendezvousError` if the store does not answer.
    """
    job = store.get(keys.job)
    nodes = _has_nodes(store, keys)
    # A job without nodes that has begun and not ended: their leases were lost while etcd was away.
    over = store.get(keys.generation) is None or store.get(keys.result) is not None
    if job is not None and not nodes and over:
        store.transaction([Compare.mod_revision(keys.job, "==", job.mod_revision)], _all_but_nodes(keys))
