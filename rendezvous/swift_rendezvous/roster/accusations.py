"""Whom to believe when nodes call each other lost. Pure.

What one node says of another may be true of the link between them only. Two kinds of words are not believed:

- If only that link breaks, each takes the other for dead, and both can write that down before the next generation is
  made. To believe both would give away two slots, and with them maybe every copy of the state, where one node is enough
  to part the two. The one that holds state is kept, else the one with the lower slot; should it be lost as well, the
  next generation hears of it from others.
- A node without state, a new node that has not got it yet, cannot reach those that have it: it would cost the job the
  last copies, with nothing to lose itself. So it is given up instead, unless the kernel of the accused has closed the
  connection and refuses another one. If the accused is lost indeed its lease tells.
  A node all of whose workers have ended is given up, too: it has lost what it had.

The record of the generation names the workers without state (`GenerationRecord.bare`). It is older than what happens
in the generation; so an accuser says of itself whether it has the state by now (`FailureRecord.is_empty`).

This module must never read a clock, a socket or the store, and never ask a node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from swift_rendezvous.roster.records import FailureRecord, GenerationRecord
from swift_rendezvous.roster.view import View


def bare_ranks(view: View, generation: GenerationRecord) -> dict[int, set[int]]:
    """By slot, the local ranks that hold no state, as far as *generation*, the current one, and what came since say.

    Only the coordinator sees which slots have `resumed`; that all have, every agent sees.
    """
    done = view.recovered >= generation.number
    bare = {slot: set(ranks) for slot, ranks in generation.bare.items() if not done and slot not in view.resumed}
    for slot, failure in view.failures.items():
        if failure.kind == "workers" and failure.incarnation == generation.slots[slot].incarnation:
            bare.setdefault(slot, set()).update(failure.local_ranks)
    return bare


def believed(
    generation: GenerationRecord, failures: Mapping[int, FailureRecord], gone: Collection[int],
    holders: Collection[int],
) -> Mapping[int, FailureRecord]:  # fmt: skip
    """*failures* without what is not believed, but with what it says of its authors.

    *gone*: slots whose nodes have no record any more. *holders*: slots whose nodes are there and hold state.
    """
    slot_of = {owner.node_id: slot for slot, owner in enumerate(generation.slots)}
    accused = {
        slot: failure
        for slot, failure in failures.items()
        if failure.kind == "node" and failure.incarnation == generation.slots[slot].incarnation
    }
    if not accused:
        return failures
    found = dict(failures)
    for slot, failure in accused.items():
        other = slot_of.get(failure.reporter)
        if other is None or other not in accused or slot_of.get(accused[other].reporter) != slot or failure.is_dead:
            continue
        # Each says of itself whether it is empty, in what it says of the other.
        mine, theirs = (slot in gone or accused[other].is_empty), (other in gone or failure.is_empty)
        if (mine, slot) < (theirs, other):
            del found[slot]
    if not holders or not all(slot in accused and slot in found for slot in holders):
        return found
    for slot in holders:
        failure, other = accused[slot], slot_of.get(accused[slot].reporter)
        if other is None or failure.is_dead:
            continue
        if not (failure.is_empty or other in gone or _all_ended(generation, failures.get(other), other)):
            continue
        del found[slot]
        if other not in accused or other not in found:
            owner, name = generation.slots[other], generation.slots[slot].node_id
            evidence = f"it cannot reach {name}, which holds what is left of the state ({failure.evidence})"
            found[other] = FailureRecord("node", other, owner.incarnation, (), evidence, failure.reporter)
    return found


def _all_ended(generation: GenerationRecord, failure: FailureRecord | None, slot: int) -> bool:
    """*failure*, what is told of *slot*, says that no worker of it is left."""
    if failure is None or failure.kind != "workers" or failure.incarnation != generation.slots[slot].incarnation:
        return False
    return len(set(failure.local_ranks)) == generation.workers_of(slot)
