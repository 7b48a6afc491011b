"""Parallel recovery (SWIFT, section 5.2): which process repeats which micro-batches of a lost stage, and when that
gives the same result. Pure.

    rehearsal: one step that each process makes alone --> why_not? --> every other step: each its share, summed up

Process 0 is the replacement; the others help. Each has a block of neighbouring micro-batches, and gradients are added
in the order of these blocks: the sums are those of one process, bit for bit. This module must never look at a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Sum = str
"""How gradients are added: "ordered", as one process would; or "unordered", block by block, which needs less memory and
gives other roundings."""
SUMS = ("ordered", "unordered")


def shares(order: Sequence[int], num_processes: int) -> list[tuple[int, ...]]:
    """The micro-batches of each process: blocks of *order*, in which one process would add their gradients. Their sizes
    differ by one at most, larger ones first."""
    size, larger = divmod(len(order), num_processes)
    begins = [number * size + min(number, larger) for number in range(num_processes + 1)]
    return [tuple(order[begin:end]) for begin, end in pairwise(begins)]


@dataclass(frozen=True)
class Rehearsal:
    """What one step of a schedule has shown that was made as a whole. Stages are numbered in the order in which the
    process has them."""

    num_micro_batches: int
    added: Sequence[tuple[int, int]]
    """(stage, micro-batch) of each time that gradients of parameters were added to."""
    shared_parameters: int = 0
    """So many parameters belong to more than one stage of this process."""
    num_collectives: int = 0
    """Collectives that the step has made."""
    num_uncounted: int = 0
    """Micro-batches whose random numbers cannot be counted."""
    changed: Sequence[str] = ()
    """What modules keep, and have changed: buffers, numbers."""
    other: str = ""
    """Another reason, found where the step was made."""


def why_not(rehearsal: Rehearsal) -> str:
    """Why steps like that one cannot be shared; '' if they can."""
    if rehearsal.other:
        return rehearsal.other
    if rehearsal.num_micro_batches < 2:
        return "there is one micro-batch only"
    if rehearsal.num_collectives:
        return "its stages make collectives, which belong to the order of their micro-batches"
    if rehearsal.changed:
        return f"its stages change {rehearsal.changed[0]}, from one micro-batch to the next"
    if rehearsal.num_uncounted:
        return "the random numbers that its micro-batches draw cannot be counted"
    if rehearsal.shared_parameters:
        return "two of its stages have the same parameters"
    if not order_of(rehearsal):
        return "its stages add gradients in different orders"
    return ""


def order_of(rehearsal: Rehearsal) -> tuple[int, ...]:
    """The order in which all stages add the gradients of micro-batches; () if they differ, or one is not added once."""
    stages = {stage for stage, _ in rehearsal.added}
    orders = {tuple(number for one, number in rehearsal.added if one == stage) for stage in stages}
    order = next(iter(orders), ())
    is_one = len(orders) == 1 and sorted(order) == list(range(rehearsal.num_micro_batches))
    return order if is_one else ()
