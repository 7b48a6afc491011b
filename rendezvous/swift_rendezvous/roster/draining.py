"""Planned replacement: a node that was told to leave gives its slot to a spare at an iteration boundary. Pure.

    drain/{node}         pause/{g}             ~position/{g}/*    its boundary
    ordered, spare there --> workers are asked --> where they are --> all stop before it --> ~parked/{g}/*
    --> generation g+1: the slot moved, `handover` --> taken/{g+1}/{slot} --> the node leaves

While a worker is asked it begins no iteration beyond the one it has named, so the largest that was named is a boundary
that no worker has passed and all reach: no iteration is cut, none is run twice. The drained node keeps its
workers, parked with their state, until the new owner of its slot trains; then it leaves. Until then it is as precious
as a node with a slot: it comes back if its lease in etcd was lost (`losses.missing`). Any failure on the way
leads to an ordinary recovery, and the order, which stays until the node has gone, is carried out afterwards.

A node that got a signal to go (an eviction, a drained machine) writes the order itself. If no spare comes in time it
says that its slot is lost, and leaves (`swift_agent.agent.lifecycle.drain`). If all were told so, the job ends.

This module must never read a clock, talk to a store or log.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from swift_rendezvous.roster.records import GenerationRecord, NodeRecord, Owner
from swift_rendezvous.roster.view import View

# At once. The next generation compares two keys for each, and etcd takes 128 comparisons in a transaction.
MOST_MOVES = 48


def is_ordered(view: View, node_id: str, incarnation: str) -> bool:
    """Whether this very incarnation was told to leave."""
    drain = view.drains.get(node_id)
    return drain is not None and drain.incarnation == incarnation


def needs_state(view: View, incarnation: str) -> bool:
    """Whether it has a slot whose state nobody can hand over, since the script tracks none: it cannot be drained."""
    return view.generation is not None and view.generation.slot_of(incarnation) is not None and not view.tracked


def is_handed_over(view: View, node_id: str) -> bool:
    """Another node has its slot already: its order cannot be taken back."""
    return view.generation is not None and any(o.node_id == node_id for o in view.generation.handover.values())


def ordered_slots(view: View) -> list[int]:
    """Slots whose owners were told to leave."""
    slots = view.generation.slots if view.generation else ()
    return [slot for slot, owner in enumerate(slots) if is_ordered(view, owner.node_id, owner.incarnation)]


def all_told(view: View, lost: Collection[int], spares: Sequence[NodeRecord]) -> str:
    """Why nobody is left to train: each node with a slot, or that could have one back, got a signal to go, or is
    *lost*, and none of *spares* can take a slot. Empty if somebody is."""
    generation = view.generation
    if generation is None or view.released:
        return ""
    told = []
    there = [owner for slot, owner in enumerate(generation.slots) if slot not in lost]
    for owner in (*there, *open_handovers(view).values()):
        drain = view.drains.get(owner.node_id)
        if drain is None or not drain.signal or drain.incarnation != owner.incarnation:
            return ""
        told.append(f"{owner.node_id} got {drain.signal}")
    if not told or takers(generation, range(len(generation.slots)), spares):
        return ""
    return f"no node is left to train: {', '.join(told)}"


def least_grace_s(view: View) -> float:
    """How long those that got a signal may stay, all of them."""
    return min((drain.grace_s for drain in view.drains.values() if drain.signal), default=0.0)


def moves(view: View, spares: list[NodeRecord]) -> dict[int, NodeRecord]:
    """slot -> the one of *spares* that takes it. Slots for which there is none wait, and those beyond `MOST_MOVES`."""
    found = takers(view.generation, ordered_slots(view), spares) if view.generation else {}
    return dict(list(found.items())[:MOST_MOVES])


def takers(generation: GenerationRecord, slots: Iterable[int], free: Sequence[NodeRecord]) -> dict[int, NodeRecord]:
    """slot -> the first of the nodes *free* that can take it: one with as many workers, of the same role. Slots for
    which there is none are left out."""
    left, found = list(free), {}
    for slot in slots:
        owner, size = generation.slots[slot], generation.workers_of(slot)
        node = next((one for one in left if one.num_workers == size and one.role == owner.role), None)
        if node is not None:
            found[slot] = node
            left.remove(node)
    return found


def is_settled(view: View) -> bool:
    """All train: nothing is being recovered, and nothing is about to end."""
    generation = view.generation
    if generation is None or not view.tracked or view.plan is None or view.plan.restart:
        return False
    if view.released or view.finished or view.exited or view.result is not None:
        return False
    return not generation.asks or len(view.resumed) == len(generation.slots)


def boundary(view: View) -> int | None:
    """The iteration before which all stop, once all slots have said where they are. A checkpoint is taken at the point
    before an iteration, which who waits for the boundary is past: so one more iteration comes before that."""
    assert view.generation is not None
    slots = range(len(view.generation.slots))
    if any(slot not in view.positions for slot in slots):
        return None
    saves = view.pause is not None and view.pause.saves
    return max(view.positions[slot].iteration for slot in slots) + (1 if saves else 0)


def all_parked(view: View) -> bool:
    assert view.generation is not None
    return all(slot in view.parked for slot in range(len(view.generation.slots)))


def broken_handovers(view: View, with_absent: bool = True) -> dict[int, str]:
    """slot -> evidence, where the drained node was lost before its successor was heard to train. *with_absent*: a
    missing record counts, see `membership.losses`."""
    generation = view.generation
    if generation is None:
        return {}
    return {
        slot: f"{owner.node_id}, which was drained and handed slot {slot} over, is lost"
        for slot, owner in generation.handover.items()
        if slot not in view.taken and not is_alive(view, owner) and (with_absent or owner.node_id in view.nodes)
    }


def open_handovers(view: View) -> dict[int, Owner]:
    """slot -> the drained node that still keeps its workers for it."""
    generation = view.generation
    if generation is None:
        return {}
    return {
        slot: owner
        for slot, owner in sorted(generation.handover.items())
        if slot not in view.taken and is_alive(view, owner)
    }


def fulfilled(view: View) -> list[str]:
    """Node ids of orders whose node has gone, in whatever way."""
    return [
        node_id
        for node_id, drain in sorted(view.drains.items())
        if node_id not in view.nodes or view.nodes[node_id].incarnation != drain.incarnation
    ]


def slot_left(generation: GenerationRecord, incarnation: str) -> int | None:
    """The slot that this node was drained from and for which it still keeps its workers."""
    return next((slot for slot, owner in generation.handover.items() if owner.incarnation == incarnation), None)


def is_alive(view: View, owner: Owner) -> bool:
    node = view.nodes.get(owner.node_id)
    return node is not None and node.incarnation == owner.incarnation


def progress_of(view: View, node_id: str, *, has_spare: bool) -> str:
    """How far an order is, for people; empty if there is none, or none that still matters."""
    drain, node = view.drains.get(node_id), view.nodes.get(node_id)
    if drain is None or node is None or node.incarnation != drain.incarnation:
        return ""
    generation = view.generation
    if generation is None:
        return "the job has not begun"
    slot = generation.slot_of(drain.incarnation)
    if slot is None:
        held = [slot for slot, owner in generation.handover.items() if owner.incarnation == drain.incarnation]
        if held and held[0] not in view.taken:
            return f"slot {held[0]} is being handed over to {generation.slots[held[0]].node_id}"
        return "leaving"
    if not view.tracked:
        return "waits until the script calls swift_agent.init(): without it no state can be handed over"
    if view.released or view.finished or view.exited:
        return "the job is at its end"
    if view.pause is not None:
        at = "is looked for" if view.pause.boundary is None else f"is iteration {view.pause.boundary}"
        return f"workers go on to a common boundary, which {at}"
    if not has_spare:
        return f"slot {slot} waits for a spare node"
    return "waits until all workers train" if not is_settled(view) else "about to begin"
