"""How a replica set whose members were cut in the middle of an update gets to one state. Pure.

With updates that overlap the backward (`job.track(overlap_update=True)`) each survivor has updated some parameters with
update t and not the others: a mixture, a state that no run passes through. The set leaves it in one of two ways:

1. *forward* to t+1, if for every parameter there is a survivor that has updated it: one rank gets the parameters that
   it lacks from the others, and then holds exactly what a run without failure has. Nothing is lost.
2. *back* to t: a parameter that some survivor has not updated is copied from there, which is exact as well; one that
   all have updated is undone by each for itself (within the bound of `undo`, or exactly, where a copy was kept).

Forward comes first, so that nothing is undone that need not be. SWIFT section 4 knows only the undo. This module must
never choose a way that gives up exactness: those are in `lossy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """*parameters* (by number) and their optimizer state go from *source* to *targets*, as the source holds them."""

    parameters: tuple[int, ...]
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Back:
    """*undone*: the parameters that every rank of the set has updated, and undoes."""

    patches: tuple[Patch, ...]
    undone: tuple[int, ...]


def can_finish(updated: Iterable[frozenset[int]], num_parameters: int) -> bool:
    """Whether the survivors, of which each has *updated* some parameters, have all of them together."""
    return len(frozenset().union(*updated)) == num_parameters


def forward(updated: Mapping[int, frozenset[int]], num_parameters: int) -> tuple[int, tuple[Patch, ...]]:
    """The rank that gets the whole state after the update, the one that has most of it, and what it gets for that.

    *updated*: by rank, for which `can_finish`.
    """
    lead = min(updated, key=lambda rank: (-len(updated[rank]), rank))
    sources = {}
    for number in sorted(set(range(num_parameters)) - updated[lead]):
        sources[number] = min(rank for rank, have in updated.items() if number in have)
    return lead, _patches({number: (source, (lead,)) for number, source in sources.items()})


def back(updated: Mapping[int, frozenset[int]]) -> Back:
    """How all survivors, by rank with what each has *updated*, get to the state before the update."""
    moves: dict[int, tuple[int, tuple[int, ...]]] = {}
    undone = []
    for number in sorted(frozenset().union(*updated.values())):
        untouched = sorted(rank for rank, have in updated.items() if number not in have)
        if untouched:
            # The parameters are spread over the ranks that have them, so that their transfers run side by side.
            source = untouched[len(moves) % len(untouched)]
            moves[number] = (source, tuple(sorted(rank for rank, have in updated.items() if number in have)))
        else:
            undone.append(number)
    return Back(_patches(moves), tuple(undone))


def _patches(moves: Mapping[int, tuple[int, tuple[int, ...]]]) -> tuple[Patch, ...]:
    """One for each source and set of targets; all ranks work through them in this order."""
    grouped: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, move in moves.items():
        grouped.setdefault(move, []).append(number)
    return tuple(Patch(tuple(numbers), source, targets) for (source, targets), numbers in sorted(grouped.items()))
