"""Which state a replica set goes on from when its members were cut in the middle of an update. Pure.

With updates that overlap the backward each bucket of parameters is, on each survivor, in one of three phases:

    pending ---its gradients are reduced---> reduced ---its parameters are updated---> updated
    state t                                  state t, could be brought to t+1           state t+1

A set either goes forward to t+1 or back to t, all buckets alike (a mixture is a state that no run passes through):

1. *forward*, if every bucket is reduced or updated on some survivor: that one has, or can make, exactly the state that
   a run without failure has. Nothing is lost.
2. *back*, bucket by bucket from a survivor that has not updated it: exact as well.
3. *undo*, only of a bucket that is to go back and that all survivors have updated: within the bound of `undo`, or exact
   where the tensors were kept.

All sets go on from one iteration: a set that could go forward goes back if another one cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """Of one bucket on one survivor, in the order in which they follow each other."""

    PENDING = 0
    REDUCED = 1
    UPDATED = 2


@dataclass(frozen=True)
class Member:
    """A survivor: before update *iteration*, the buckets of which are in *phases*."""

    rank: int
    iteration: int
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class Source:
    """Where a bucket's state comes from. *finishes*: the source updates it first; *undoes*: it takes that back."""

    rank: int
    finishes: bool = False
    undoes: bool = False


@dataclass(frozen=True)
class Resolution:
    """One replica set goes on before update *iteration*; *sources*: one for each bucket. *why*: for people."""

    iteration: int
    sources: tuple[Source, ...]
    why: str

    @property
    def undone(self) -> tuple[int, ...]:
        """The buckets whose state is not that of a run without failure bit for bit, unless their tensors were kept."""
        return tuple(bucket for bucket, source in enumerate(self.sources) if source.undoes)


class Unrecoverable(ValueError):
    """No survivor is left, or they have drifted further apart than one update; the message says which."""


def resolve(sets: Mapping[int, Sequence[Member]]) -> dict[int, Resolution]:
    """For each replica set by its number. Raises `Unrecoverable`.

    Members of a set that stand before different iterations, t and t+1, are brought to one view of update t first: who
    stands before t+1 has updated all of it. All members of a set have the same buckets.
    """
    aligned = {number: _aligned(number, members) for number, members in sets.items()}
    reachable = {
        number: iteration + (1 if _can_finish(members) else 0) for number, (iteration, members) in aligned.items()
    }
    target = min(reachable.values(), default=0)
    found = {}
    for number, (iteration, members) in aligned.items():
        if not iteration <= target <= iteration + 1:
            raise Unrecoverable(
                f"replica set {number} can be brought to iteration {iteration} or {iteration + 1}, another one only "
                f"to {target}"
            )
        forward = target > iteration
        num_buckets = len(next(iter(members.values())))
        sources = tuple(_source(members, bucket, forward) for bucket in range(num_buckets))
        found[number] = Resolution(target, sources, _why(sources, forward))
    return found


def _aligned(number: int, members: Sequence[Member]) -> tuple[int, dict[int, tuple[Phase, ...]]]:
    """The update that the set is in the middle of, and for each rank the phases of its buckets."""
    if not members:
        raise Unrecoverable(f"nobody of replica set {number} is left")
    iteration = min(member.iteration for member in members)
    phases = {}
    for member in members:
        if member.iteration == iteration:
            phases[member.rank] = member.phases
        elif member.iteration == iteration + 1 and set(member.phases) <= {Phase.PENDING}:
            # The next update is reduced by all together, so nothing of it can be there.
            phases[member.rank] = (Phase.UPDATED,) * len(member.phases)
        else:
            raise Unrecoverable(
                f"rank {member.rank} of replica set {number} is in update {member.iteration}, "
                f"another one in {iteration}"
            )
    return iteration, phases


def _can_finish(members: Mapping[int, tuple[Phase, ...]]) -> bool:
    return all(max(phases) >= Phase.REDUCED for phases in zip(*members.values(), strict=True))


def _source(members: Mapping[int, tuple[Phase, ...]], bucket: int, forward: bool) -> Source:
    """The lowest rank that has the wanted state, else the lowest that can make it."""
    phase = {rank: phases[bucket] for rank, phases in sorted(members.items())}
    if forward:
        done = next((rank for rank, at in phase.items() if at is Phase.UPDATED), None)
        if done is not None:
            return Source(done)
        return Source(next(rank for rank, at in phase.items() if at is Phase.REDUCED), finishes=True)
    untouched = next((rank for rank, at in phase.items() if at is not Phase.UPDATED), None)
    return Source(next(iter(phase)), undoes=True) if untouched is None else Source(untouched)


def _why(sources: Sequence[Source], forward: bool) -> str:
    undone = [str(bucket) for bucket, source in enumerate(sources) if source.undoes]
    finished = [str(bucket) for bucket, source in enumerate(sources) if source.finishes]
    if forward:
        return "roll forward" + (f", finishing buckets {', '.join(finished)}" if finished else "")
    if undone:
        return f"back: every survivor has updated buckets {', '.join(undone)}, which are undone; the others are copied"
    return "back: for every bucket there is a survivor that has not updated it"
