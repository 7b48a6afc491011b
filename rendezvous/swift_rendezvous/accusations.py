"""Whom to believe when nodes call each other lost. Pure.

If only the link between two nodes breaks, each takes the other for dead, and both can write that down before the next
generation is made. To believe both would give away two slots, and with them maybe every copy of the state, where one
node is enough to part the two. So of two that accuse each other the one with the lower slot is kept; should it be lost
as well, the next generation hears of it from others.
"""

from __future__ import annotations

from collections.abc import Mapping

from swift_rendezvous.keys import FailureRecord, GenerationRecord


def believed(generation: GenerationRecord, failures: Mapping[int, FailureRecord]) -> Mapping[int, FailureRecord]:
    """*failures* without those that say of a node that it is lost, where that node says the same of the reporter."""
    accused = {
        generation.slots[slot].node_id: (slot, failure.reporter)
        for slot, failure in failures.items()
        if failure.kind == "node" and failure.incarnation == generation.slots[slot].incarnation
    }
    kept = set()
    for node, (slot, reporter) in accused.items():
        other, other_reporter = accused.get(reporter, (slot, ""))
        if other_reporter == node and slot < other:
            kept.add(slot)
    return {slot: failure for slot, failure in failures.items() if slot not in kept} if kept else failures
