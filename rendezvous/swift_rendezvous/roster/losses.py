"""Which nodes and workers are lost, and why, in words. Pure.

What was said to be lost is kept apart from what is merely absent, which may come back: on that only the coordinator may
act, after a while. What becomes of the job is `membership`. This module must never read a clock, talk to a store or
log; times come in as arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from swift_rendezvous.roster import draining
from swift_rendezvous.roster.accusations import bare_ranks, believed
from swift_rendezvous.roster.decision import Command, Decision, PublishLoss, Rules
from swift_rendezvous.roster.records import (
    FailureRecord,
    GenerationRecord,
    NodeRecord,
    Owner,
    WorkerExit,
)
from swift_rendezvous.roster.view import View, once_per_view

# Parts of a state of which it says that they differ; the others are counted.
MAX_NAMED = 5

# Of the messages of all failed workers in the result, as JSON; etcd takes 1.5 MiB.
MAX_MESSAGES = 1 << 19

# Losses of one generation of which the history says more than that a slot has another owner.
MAX_TOLD, MAX_EVIDENCE, MAX_SAID = 64, 300, 2000

LEFT_OUT = "(its message is left out here: see the log of its node)"

LEASE_IS_GONE = "its lease in etcd is gone"


@dataclass(frozen=True)
class Losses:
    """What the current generation has lost. Slots are disjoint between *nodes* and *workers*."""

    nodes: dict[int, str] = field(default_factory=dict)
    """slot -> evidence"""
    workers: dict[int, FailureRecord] = field(default_factory=dict)
    restarts: dict[int, FailureRecord] = field(default_factory=dict)
    """slot -> why all workers have to start again, as they were told"""
    again: dict[int, str] = field(default_factory=dict)
    """slot -> evidence: nothing is lost there, but all have to be connected again"""
    handovers: dict[int, str] = field(default_factory=dict)
    """slot -> evidence: a drained node that was lost before its successor trained"""
    records: dict[str, str] = field(default_factory=dict)
    """name -> evidence: see `mending.unread_records`"""

    def __bool__(self) -> bool:
        return bool(
            self.nodes or self.workers or self.restarts or self.again or self.handovers or self.records
        )

    @property
    def restart(self) -> FailureRecord | None:
        """The strictest of *restarts*: a final one, else one with the fewest restarts left. The first told of several.
        """
        found = list(self.restarts.values())
        final = [failure for failure in found if failure.is_final]
        return final[0] if final else min(found, key=lambda failure: failure.restarts_left, default=None)


@once_per_view
def absent(view: View) -> dict[int, Owner]:
    """Slots whose node has no record, though no record says that it is lost: its lease in etcd is gone.

    Etcd may have been away for longer than the lease lives while the node trained on: then it comes back by itself.
    """
    generation = view.generation
    if generation is None:
        return {}
    # Also a node that is given up for what it said of others: it would come back, and be forgotten again, for ever.
    said = [*view.failures.items(), *believed_failures(view).items()]
    accused = {(slot, failure.incarnation) for slot, failure in said if failure.kind == "node"}
    return {
        slot: owner
        for slot, owner in enumerate(generation.slots)
        if owner.node_id not in view.nodes and slot not in view.exited and (slot, owner.incarnation) not in accused
    }


@once_per_view
def absent_handovers(view: View) -> dict[int, Owner]:
    """The same of drained nodes that still keep the workers of a slot: nobody else may hold that state."""
    generation = view.generation
    if generation is None or view.released:
        return {}
    return {
        slot: owner
        for slot, owner in generation.handover.items()
        if owner.node_id not in view.nodes and slot not in view.taken
    }


def absentees(view: View) -> list[Owner]:
    """All that may come back: nodes with a slot, and those that hand theirs over."""
    return [*absent(view).values(), *absent_handovers(view).values()]


def missing(
    view: View, rules: Rules, *, now_s: float, absent_since_s: Mapping[str, float], unbroken_s: float
) -> Decision | None:
    """What the coordinator does about the nodes that are `absent`, or were drained and are; None if there is none.

    Each has `rules.return_s` to come back, and all have `rules.outage_s` after a time in which the store was away (it
    is there since *unbroken_s*): when it comes back many leases may be over at once, and their nodes return one by one.
    *absent_since_s*: by incarnation, seconds of the clock of *now_s*. A drained node that is late counts as lost at
    once: it owns no slot that could be given away while another loss is waited for.
    """
    gone, drained = absent(view), absent_handovers(view)
    if not (gone or drained) or view.result is not None or view.job is None:
        return None
    all_due_s = now_s + rules.outage_s - unbroken_s
    late: list[Command] = []
    next_s: list[float] = []
    for slot, owner in (*gone.items(), *drained.items()):
        due_s = max(all_due_s, absent_since_s.get(owner.incarnation, now_s) + rules.return_s)
        if now_s < due_s:
            next_s.append(due_s)
        elif gone.get(slot) == owner:
            holder = view.coordinator.node_id if view.coordinator else ""
            late.append(PublishLoss(FailureRecord("node", slot, owner.incarnation, (), LEASE_IS_GONE, holder)))
    if not late and not next_s:
        return None
    names = ", ".join(owner.node_id for owner in absentees(view))
    waiting = f"the lease of {names} is gone; waiting whether it comes back by itself"
    return Decision(tuple(late), waiting=waiting, deadline_s=min(next_s) if next_s else None)


@once_per_view
def believed_failures(view: View) -> Mapping[int, FailureRecord]:
    """By slot, what was said to be lost in the current generation, as far as it is believed (see `accusations`)."""
    generation = view.generation
    if generation is None:
        return {}
    left = [slot for slot in range(len(generation.slots)) if slot not in view.exited]
    gone = {slot for slot in left if not draining.is_alive(view, generation.slots[slot])}
    bare = bare_ranks(view, generation)
    # A script that tracks nothing has no state that could be lost.
    holders = [
        slot
        for slot in left
        if view.tracked and slot not in gone and len(bare.get(slot, ())) < generation.workers_of(slot)
    ]
    return believed(generation, view.failures, gone, holders)


@once_per_view
def losses(view: View) -> Losses:
    """Everything the records say was lost in the current generation; a node without a record counts as lost.

    That a record is missing is the coordinator's business (see `missing`): other agents may not act on it, but on
    `told_losses`.
    """
    return _losses(view, with_absent=True)


@once_per_view
def told_losses(view: View) -> Losses:
    """What was said to be lost; a node whose record is merely missing may come back."""
    return _losses(view, with_absent=False)


def _losses(view: View, with_absent: bool) -> Losses:
    generation = view.generation
    if generation is None:
        return Losses()
    nodes: dict[int, str] = {}
    workers: dict[int, FailureRecord] = {}
    restarts: dict[int, FailureRecord] = {}
    again: dict[int, str] = {}
    failures = believed_failures(view)
    for slot, owner in enumerate(generation.slots):
        failure = failures.get(slot)
        if failure is not None and failure.incarnation != owner.incarnation:
            failure = None
        alive = view.nodes.get(owner.node_id)
        if slot in view.exited:
            continue  # its workers are done; the agent may leave
        if failure is not None and failure.kind == "node":
            nodes[slot] = failure.evidence
        elif alive is not None and alive.incarnation != owner.incarnation:
            nodes[slot] = "it came back as a new incarnation"
        elif alive is None and with_absent:
            nodes[slot] = LEASE_IS_GONE
        elif failure is not None and failure.kind == "workers":
            workers[slot] = failure
        elif failure is not None and failure.kind == "restart":
            restarts[slot] = failure
        elif failure is not None and failure.kind == "again":
            again[slot] = failure.evidence
    # As they were told: the clocks of the nodes need not agree.
    workers, restarts = (
        {slot: found[slot] for slot in sorted(found, key=lambda slot: (view.told.get(slot, 0), slot))}
        for found in (workers, restarts)
    )
    return Losses(nodes, workers, restarts, again, draining.broken_handovers(view, with_absent))


def spares(view: View) -> list[NodeRecord]:
    """Nodes that can take a slot, in the order in which they joined: without one, and not about to leave."""
    taken = {drain.incarnation for drain in view.drains.values()}
    if view.generation is not None:
        taken |= {owner.incarnation for owner in (*view.generation.slots, *view.generation.handover.values())}
    free = [node for node in view.nodes.values() if node.incarnation not in taken]
    return sorted(free, key=lambda node: (view.joined.get(node.node_id, 0), node.node_id))


def describe(generation: GenerationRecord, lost: Losses) -> str:
    """One clause per loss, for people."""
    parts = [
        f"lost node {generation.slots[slot].node_id} (slot {slot}): {evidence}"
        for slot, evidence in sorted(lost.nodes.items())
    ]
    parts += [failure.evidence for _, failure in sorted(lost.workers.items())]
    if lost.restart is not None:  # a collective that is cut may have all slots ask for it
        parts.append(lost.restart.evidence)
    parts += [evidence for _, evidence in sorted(lost.again.items())]
    parts += [evidence for _, evidence in sorted(lost.handovers.items())]
    parts += [evidence for _, evidence in sorted(lost.records.items())]
    return "; ".join(parts)


def some_of(slots: list[int]) -> str:
    """Many slots are counted: a wait is told again with every change, and its text must not grow with the job."""
    return f"slots {slots}" if len(slots) <= 8 else f"{len(slots)} slots, the first of them {slots[:8]},"


def exits_of(lost: Losses) -> tuple[WorkerExit, ...]:
    """The first that was told comes first; those of one node in the order of its own clock."""
    told = [*lost.workers.values(), *lost.restarts.values()]
    return tuple(
        exit_ for failure in told for exit_ in sorted(failure.exits, key=lambda exit_: exit_.timestamp_s)
    )


def clipped(exits: tuple[WorkerExit, ...]) -> tuple[WorkerExit, ...]:
    """What of *exits* fits into one record: the messages of the first, and of the others as many as there is room."""
    left = MAX_MESSAGES
    found: list[WorkerExit] = []
    for exit_ in exits:
        size = len(json.dumps(exit_.message))
        left -= size
        found.append(exit_ if left >= 0 or not found else replace(exit_, message=LEFT_OUT if exit_.message else ""))
    return tuple(found)


def failed_ranks(generation: GenerationRecord, slot: int, failure: FailureRecord) -> list[int]:
    return [generation.first_rank(slot) + local_rank for local_rank in failure.local_ranks]


def replaced_in(generation: GenerationRecord, slot: int, local_rank: int) -> int:
    """The last generation that was to start this process again, since the slot last trained: all processes that are
    older are known to be lost. 0: none."""
    if local_rank in generation.lost.get(slot, ()):
        return generation.number
    return generation.replaced.get(slot, {}).get(local_rank, 0)


def changes_of(view: View, generation: GenerationRecord) -> dict[str, Any]:
    """What the history says of *generation*, which follows on that of *view*: only the newest roster is kept, and this
    is how those before it are found. *moved*: slot -> its former owner, "" if there was none, and its new one.
    *said*: of the worker that failed first, what it has left: its traceback, or the end of its standard error.
    """
    before, moved = view.generation, dict[str, list[str]]()
    for slot in range(max(len(generation.slots), len(before.slots)) if before is not None else 0):
        old, new = _owner(before, slot), _owner(generation, slot)
        if old is None or new is None or old.incarnation != new.incarnation:
            moved[str(slot)] = [old.node_id if old else "", new.node_id if new else ""]
    lost = {
        str(slot): {"kind": failure.kind, "local_ranks": list(failure.local_ranks),
                    "evidence": failure.evidence[:MAX_EVIDENCE]}
        for slot, failure in sorted(view.failures.items())[:MAX_TOLD]
    }  # fmt: skip
    exits = exits_of_failures(view)
    said = [{"rank": one.rank, "host": one.host, "message": one.message[-MAX_SAID:]} for one in exits if one.message]
    found = {"slots": len(generation.slots), "world_size": generation.world_size, "moved": moved, "lost": lost}
    return {**found, "said": said[:1]} if said else found


def exits_of_failures(view: View) -> list[WorkerExit]:
    """Of the current generation, the first that was told first."""
    told = sorted(view.failures.items(), key=lambda item: view.told.get(item[0], 0))
    return [exit_ for _, failure in told for exit_ in sorted(failure.exits, key=lambda one: one.timestamp_s)]


def _owner(generation: GenerationRecord | None, slot: int) -> Owner | None:
    return generation.slots[slot] if generation is not None and slot < len(generation.slots) else None
