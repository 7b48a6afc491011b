"""Whom to believe when nodes call each other lost. Pure.

What one node says of another may be true of the link between them only. Two kinds of words are not believed:

- If only that link breaks, each takes the other for dead, and both can write that down before the next generation is
  made. To believe both would give away two slots, and with them maybe every copy of the state, where one node is enough
  to part the two. The one that holds state is kept, else the one with the lower slot; should it be lost as well, the
  next generation hears of it from others.
- A node without state, a newcomer mostly, cannot reach those who have it: it would cost the job the last copies, with
  nothing to lose itself. So it is given up instead, unless the machine of the accused says that the process is gone. If
  the accused is lost indeed its lease tells.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from swift_rendezvous.keys import FailureRecord, GenerationRecord


def believed(
    generation: GenerationRecord, failures: Mapping[int, FailureRecord], empty: Collection[int],
    holders: Collection[int],
) -> Mapping[int, FailureRecord]:  # fmt: skip
    """*failures* without what is not believed, but with what it says of those who said it.

    *empty*: slots whose nodes hold no state, or are gone with it. *holders*: slots whose nodes are there and hold some.
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
        mutual = other is not None and other in accused and slot_of.get(accused[other].reporter) == slot
        if mutual and not failure.is_dead and (slot in empty, slot) < (other in empty, other):
            del found[slot]
    if not holders or not all(slot in accused and slot in found for slot in holders):
        return found
    for slot in holders:
        failure, other = accused[slot], slot_of.get(accused[slot].reporter)
        if other is None or other not in empty or failure.is_dead:
            continue
        del found[slot]
        if other not in accused or other not in found:
            owner, name = generation.slots[other], generation.slots[slot].node_id
            evidence = f"it cannot reach {name}, which holds what is left of the state ({failure.evidence})"
            found[other] = FailureRecord("node", other, owner.incarnation, (), evidence, failure.reporter)
    return found
