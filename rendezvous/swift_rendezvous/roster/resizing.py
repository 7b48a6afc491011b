"""How large a job is whose `--nnodes` gives a range. Pure.

    start:   all of MAX are here, or MIN and the last call is over
    growth:  nodes without a slot, and fewer than MAX have one: all workers start again with them, at once if that makes
             MAX, else when the last call, which begins with the first of them, is over
    loss:    a node without a slot takes the place; if there is none, the rest go on without it when the last call is
             over, unless fewer than MIN would

A job that is recovered in place starts all workers again, too, but loses no iteration (mode `resize`): before it grows
they stop at a common boundary (see `draining`); then each node says what its workers hold, one worker with the newest
state keeps it in a file of its node, and the new workers go on from there. Until all of them train a failure
leads to another such generation, in which what is newest is kept again.

The last call is torchrun's: it lets several nodes that come one after the other cost one start. While it lasts workers
train on, where they can. Slots are numbered again: nodes that were there keep their order, new ones follow.

This module must never read a clock, talk to a store or log.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from swift_rendezvous.roster.accusations import bare_ranks
from swift_rendezvous.roster.records import FailureRecord, GenerationRecord, JobRecord, NodeRecord, Owner, Trouble
from swift_rendezvous.roster.view import View

Stage = Literal["", "join", "last call", "replacement"]
"""What a job of a range waits for; the time of each wait is its own."""


def is_elastic(job: JobRecord | None) -> bool:
    return job is not None and job.max_nodes > job.num_nodes


def most_nodes(job: JobRecord) -> int:
    return max(job.num_nodes, job.max_nodes)


def sizes(job: JobRecord) -> str:
    """As `--nnodes` has it."""
    return f"{job.num_nodes}:{job.max_nodes}" if is_elastic(job) else str(job.num_nodes)


def owner_of(node: NodeRecord, usual: int) -> Owner:
    """*node* as the owner of a slot, with as many workers as it has. *usual*: `num_workers` of the generation."""
    num_workers = 0 if node.num_workers == usual else node.num_workers
    return Owner(node.node_id, node.incarnation, node.host, num_workers, node.role)


def stage(view: View, num_free: int, num_vacant: int) -> Stage:
    """*num_free*: nodes that could take a slot, *num_vacant*: slots without a node. Empty for a job of one size, which
    waits for one thing at a time."""
    job = view.job
    if job is None or not is_elastic(job):
        return ""
    if view.generation is None:
        return "join" if num_free < job.num_nodes else "last call"
    num_nodes = len(view.generation.slots) - num_vacant + num_free
    if num_vacant > num_free:
        return "replacement" if num_nodes < job.num_nodes else "last call"
    return "last call" if num_new(view, num_free) else ""


def num_new(view: View, num_free: int) -> int:
    """How many of *num_free* nodes shall be taken in beside the present ones: 0 where nothing can be gained, or the job
    is about to end."""
    job, generation = view.job, view.generation
    if job is None or generation is None or not is_elastic(job):
        return 0
    if view.plan is None or view.plan.restart or view.released or view.finished or view.exited:
        return 0
    return max(0, min(num_free, most_nodes(job) - len(generation.slots)))


def roster(
    job: JobRecord, old: GenerationRecord, vacant: Collection[int], free: Sequence[NodeRecord]
) -> tuple[Owner, ...] | None:
    """The nodes that train when all workers start again: the owners of slots of *old* that are not *vacant*, then
    *free* nodes up to MAX. None if they are fewer than MIN."""
    kept = [owner for slot, owner in enumerate(old.slots) if slot not in vacant]
    kept += [owner_of(node, old.num_workers) for node in free[: most_nodes(job) - len(kept)]]
    return tuple(kept) if len(kept) >= job.num_nodes else None


def grown(view: View, free: Sequence[NodeRecord]) -> GenerationRecord | None:
    """The next generation, with those of *free* nodes that came late; None if there is nothing to gain."""
    job, old = view.job, view.generation
    count = num_new(view, len(free))
    if job is None or old is None or not count:
        return None
    slots = roster(job, old, (), free)
    assert slots is not None
    what = f"{', '.join(node.node_id for node in free[:count])} came late"
    mode: Literal["restart", "resize"] = "resize" if view.tracked else "restart"
    return renewed(old, slots, what, {}, mode, bare_ranks(view, old), counts=False)


def is_under_way(view: View) -> bool:
    """Whether not all workers of a `resize` train yet."""
    generation = view.generation
    return generation is not None and generation.mode == "resize" and len(view.resumed) < len(generation.slots)


def renewed(
    old: GenerationRecord, slots: tuple[Owner, ...], what: str, failed: Mapping[int, FailureRecord],
    mode: Literal["restart", "resize"], bare: Mapping[int, Collection[int]], *, counts: bool,
) -> GenerationRecord:  # fmt: skip
    """All workers start again, on *slots*. *failed*: by old slot, whose own workers failed; *bare*: by old slot, the
    local ranks that hold no state; *counts*: it is one of --max-restarts."""
    number = old.number + 1
    done = "all workers restart on" if mode == "restart" else "the job goes on with"
    new = replace(
        old,
        number=number,
        mode=mode,
        slots=slots,
        # The first node that was there before: it is known to be healthy.
        store_slot=0,
        why=f"{what}; {done} {len(slots)} node{'s' if len(slots) > 1 else ''}",
        epoch=number,
        lost={slot: failure.local_ranks for slot, failure in failed.items()},
        num_restarts=old.num_restarts + (1 if counts else 0),
        handover={},
        bare={} if mode == "restart" else _bare_after(old, slots, bare),
        helpers=(),
        replaced={},
    )
    return replace(new, troubles=_troubles_after(old, new))


def _troubles_after(old: GenerationRecord, new: GenerationRecord) -> tuple[Trouble, ...]:
    """Those of *old*, by the ranks that its nodes have now; those of a node that has gone are dropped."""
    ranks: dict[int, int] = {}
    for slot, owner in enumerate(old.slots):
        now = new.slot_of(owner.incarnation)
        if now is not None:
            ranks.update(zip(old.ranks_of(slot), new.ranks_of(now), strict=False))
    return tuple(replace(one, rank=ranks[one.rank]) for one in old.troubles if one.rank in ranks)


def _bare_after(
    old: GenerationRecord, slots: tuple[Owner, ...], bare: Mapping[int, Collection[int]]
) -> dict[int, tuple[int, ...]]:
    """By new slot: a node that was there has what was kept, if it had any state; a new one has none."""
    found = {}
    for slot, owner in enumerate(slots):
        before = old.slot_of(owner.incarnation)
        ranks = range(owner.num_workers or old.num_workers) if before is None else bare.get(before, ())
        if ranks:
            found[slot] = tuple(sorted(ranks))
    return found
