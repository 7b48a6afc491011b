"""What follows a loss: the next generation, a wait for nodes, or the end of the job. Pure.

A `Situation` is worked out once from the records. Then the first of these that applies is done, in this order:

    ends      nothing may be tried any more: no progress, or no restart is left
    resizes   an elastic job goes on with the nodes that there are
    waits     a place has no node yet
    goes on   lost ranks are replaced, or all workers restart

This module must never read a clock; times come in as arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from swift_rendezvous.roster import draining, resizing, setbacks
from swift_rendezvous.roster.accusations import bare_ranks
from swift_rendezvous.roster.decision import (
    Decision,
    ForgetNode,
    PublishGeneration,
    PublishPlan,
    PublishResult,
    Rules,
    last_call,
    nodes_are,
)
from swift_rendezvous.roster.losses import Losses, describe, exits_of, failed_ranks, replaced_in, some_of, spares
from swift_rendezvous.roster.records import (
    AS_LONG_AS_IT_ADVANCES,
    AS_MANY_AS_PAY,
    GenerationRecord,
    Helper,
    NodeRecord,
    Owner,
    ResultRecord,
    WorkerExit,
)
from swift_rendezvous.roster.view import View


@dataclass(frozen=True)
class Situation:
    """What is lost, and what there is to put in its place. Slots are numbers of places in *old*."""

    view: View
    old: GenerationRecord
    lost: Losses
    free: list[NodeRecord]
    """Spares, in the order in which they came."""
    verdict: setbacks.Verdict
    advances: bool
    """See `setbacks`: no number of restarts is counted down."""
    restart: bool
    """All workers have to start again."""
    resizes: bool
    """The job was about to change its size, and what its workers hold goes on."""
    worn: list[int]
    """Slots of workers that may not be tried there again."""
    handover: dict[int, Owner]
    """Slots that a drained node could have back: it still has their workers and their state."""
    needed: list[int]
    """Slots that need a node, those of *handover* last."""
    takers: Mapping[int, NodeRecord]
    """By slot, the spare that takes it."""
    short: int
    """So many slots have no node."""
    forget: tuple[ForgetNode, ...]
    """Lost nodes whose records are still there."""

    @property
    def vacant(self) -> list[int]:
        """Slots whose node is lost, or not trusted with their workers any more."""
        return sorted({*self.lost.nodes, *self.worn})

    @property
    def what(self) -> str:
        """What is lost, in words."""
        return "; ".join([describe(self.old, self.lost), *self.verdict.restart.values()])

    def failed(self, why: str, exits: tuple[WorkerExit, ...] | None = None, advice: str = "") -> Decision:
        """The job ends. *exits*: of the workers that are its cause; None: of all that have failed."""
        result = ResultRecord("failed", why, exits_of(self.lost) if exits is None else exits, advice)
        return Decision((*self.forget, PublishResult(result)), why=why)


def next_generation(view: View, lost: Losses, rules: Rules, now_s: float, waiting_since_s: float | None) -> Decision:
    """What the coordinator writes next, where something is lost."""
    now = situation_of(view, lost)
    if lost.restart is not None and lost.restart.is_final:
        return now.failed(lost.restart.evidence, exits_of(lost))
    since_s = now_s if waiting_since_s is None else waiting_since_s
    return _ends(now) or _resizes(now, rules, now_s, since_s) or _waits(now, rules, now_s, since_s) or _goes_on(now)


def situation_of(view: View, lost: Losses) -> Situation:
    old = view.generation
    assert old is not None
    restart = not view.tracked or bool(lost.restarts)
    resizes = resizing.is_under_way(view) and not restart
    if resizing.is_elastic(view.job) and (restart or resizes) and lost.nodes:
        # Workers that fail while a node is known to be lost fail of that: it is no restart of their own.
        lost = replace(lost, workers={})
    advances = view.tracked and view.job is not None and view.job.max_restarts == AS_LONG_AS_IT_ADVANCES
    verdict = setbacks.Verdict()
    if view.tracked:
        nodes = {one.rank: failure.incarnation for failure in lost.workers.values() for one in failure.exits}
        verdict = setbacks.judge(old.troubles, exits_of(lost), old.epoch, counted=not advances, nodes=nodes)
    if verdict.restart:
        restart, resizes = True, False
    worn = [slot for slot, failure in lost.workers.items() if failure.restarts_left <= 0]
    if advances:
        worn = sorted({old.slot_with(rank) for rank in verdict.hopeless})
    handover = {} if restart or resizes else draining.open_handovers(view)
    needed = sorted({*lost.nodes, *worn}, key=lambda slot: (slot in handover, slot))
    free = spares(view)
    takers = draining.takers(old, needed, free)
    return Situation(
        view=view, old=old, lost=lost, free=free, verdict=verdict, advances=advances, restart=restart, resizes=resizes,
        worn=worn, handover=handover, needed=needed, takers=takers,
        short=sum(slot not in handover and slot not in takers for slot in needed),
        forget=tuple(
            ForgetNode(old.slots[slot].node_id, old.slots[slot].incarnation)
            for slot in sorted(lost.nodes)
            if draining.is_alive(view, old.slots[slot])
        ),
    )  # fmt: skip


def _ends(now: Situation) -> Decision | None:
    """Nothing may be tried any more."""
    asked = now.lost.restart
    if now.advances and now.worn:
        may_move = now.verdict.movable.issuperset(now.verdict.hopeless) and not (now.restart or now.resizes)
        if not (may_move and len(draining.takers(now.old, now.vacant, now.free)) == len(now.vacant)):
            return _without_progress(now)
    if now.worn and (now.restart or now.resizes or now.short > 0):
        # As torchrun: a worker that fails once more than --max-restarts ends the job, unless a spare can take over.
        failure = now.lost.workers[now.worn[0]]
        return now.failed(f"{failure.evidence}; no restart is left (--max-restarts)", failure.exits)
    if asked is not None and asked.restarts_left <= 0 and not now.lost.nodes and not now.advances:
        return now.failed(
            f"{asked.evidence}; the workers would have to be restarted and no restart is left (--max-restarts)"
        )
    return None


def _without_progress(now: Situation) -> Decision:
    verdict, troubles = now.verdict, {trouble.rank: trouble for trouble in now.verdict.troubles}
    # The cause first; ranks behind it may have failed of that.
    rank, reason = next(iter(verdict.hopeless.items()))
    exits = tuple(sorted(exits_of(now.lost), key=lambda exit_: exit_.rank != rank))
    return now.failed(setbacks.describe(troubles[rank], reason), exits, setbacks.advice(troubles[rank]))


def _resizes(now: Situation, rules: Rules, now_s: float, since_s: float) -> Decision | None:
    """An elastic job that has to change: it goes on with the nodes that there are, if they are enough."""
    job, old = now.view.job, _with_troubles(now)
    if job is None or not resizing.is_elastic(job) or not (now.restart or now.resizes or now.short > 0):
        return None
    left = resizing.roster(job, old, now.lost.nodes, now.free)
    if left is None:
        return None
    if now.short > 0 and not now.resizes and now_s - since_s < rules.last_call_s:
        return replace(last_call(f"{now.what}; {nodes_are(len(left))} left", since_s, rules), commands=now.forget)
    workers = {} if now.lost.nodes else now.lost.workers  # their slots may be others now
    counts = now.restart and bool(workers or now.lost.restarts or now.verdict.restart)
    new = resizing.renewed(
        old, left, now.what, workers, "restart" if now.restart else "resize", bare_ranks(now.view, old), counts=counts
    )
    plan = (PublishPlan(),) if now.restart else ()
    return Decision((PublishGeneration(new), *plan, *now.forget), why=new.why)


def _waits(now: Situation, rules: Rules, now_s: float, since_s: float) -> Decision | None:
    if now.short == 0:
        return None
    what, limit_s = now.what, rules.replacement_timeout_s
    if now_s - since_s < limit_s:
        waiting = f"{what}; slots {now.vacant} wait for a node (at most {limit_s:g} s)"
        if now.free:
            waiting += f" of the same --nproc-per-node and --role; {', '.join(n.node_id for n in now.free)} differs"
        return Decision(now.forget, why=what, waiting=waiting, deadline_s=since_s + limit_s)
    why = f"{what}; no node took slots {now.vacant} within {limit_s:g} s (--replacement-timeout)"
    return Decision((*now.forget, PublishResult(ResultRecord("stopped", why, exits_of(now.lost)))), why=why)


def _goes_on(now: Situation) -> Decision:
    """Every place has a node: what is lost is replaced, or all workers restart."""
    old, lost, vacant = _with_troubles(now), now.lost, now.vacant
    slots, handover = list(old.slots), dict(now.handover)
    taken: list[str] = []
    for slot, node in now.takers.items():
        slots[slot] = resizing.owner_of(node, old.num_workers)
        taken.append(f"{node.node_id} takes slot {slot}")
    returned = [slot for slot in now.needed if slot not in now.takers]
    for slot in returned:
        slots[slot] = handover.pop(slot)
        taken.append(f"{slots[slot].node_id} has slot {slot} back")
    keep = [slot for slot in range(len(slots)) if slot not in vacant]
    replaced = [
        f"ranks {failed_ranks(old, slot, lost.workers[slot])} are replaced on {slots[slot].node_id}"
        for slot in sorted(lost.workers)
        if slot not in vacant
    ]
    done = "all workers restart" if now.restart else ", ".join([*taken, *replaced]) or "all others go on"
    # A slot whose node is new has lost all its ranks; its agent starts all of them in any case.
    gone = {slot: tuple(range(old.workers_of(slot))) for slot in vacant if slot not in returned}
    gone |= {slot: failure.local_ranks for slot, failure in lost.workers.items() if slot not in vacant}
    counts = bool(lost.workers or lost.restarts)
    bare = bare_ranks(now.view, old)
    for slot, ranks in gone.items():
        bare.setdefault(slot, set()).update(ranks)
    # A drained node must be able to hand over what it holds.
    back = [] if now.restart else [slot for slot in _go_back(now.view, gone) if slot not in handover]
    for slot in back:
        bare.setdefault(slot, set()).update(range(old.workers_of(slot)))
    with_them = [slot for slot in back if slot not in gone]
    if with_them:
        done += f"; {some_of(with_them)} of the same log group begin again with them"
    bare = {} if now.restart else {slot: bare[slot] for slot in sorted(bare) if slot not in returned}
    helpers = () if now.restart or handover else helpers_of(now, slots, bare)
    if helpers:
        names, rank = ", ".join(dict.fromkeys(helper.node_id for helper in helpers)), helpers[0].rank
        if len(helpers) == 1:
            done += f"; 1 helper repeats rank {rank} with it, on {names}"
        else:
            done += f"; {len(helpers)} helpers repeat rank {rank} with it, on {names}"
    new = GenerationRecord(
        number=old.number + 1,
        mode="restart" if now.restart else "replace",
        slots=tuple(slots),
        num_workers=old.num_workers,
        # The store must live on a node that is known to be healthy, and not on a new one if that can be helped.
        store_slot=keep[0] if keep else 0,
        why=f"{now.what}; {done}",
        epoch=old.number + 1 if now.restart else old.epoch,
        lost=gone,
        num_restarts=old.num_restarts + (1 if now.restart and counts else 0),
        handover=handover,
        bare={slot: tuple(sorted(ranks)) for slot, ranks in bare.items()},
        recovery=old.recovery,
        troubles=old.troubles,
        epochs={} if now.restart else {**old.epochs, **dict.fromkeys(back, old.number + 1)},
        helpers=helpers,
        replaced=_replaced(old, bare, gone),
    )
    plan = (PublishPlan(),) if now.restart else ()
    return Decision((PublishGeneration(new), *plan, *now.forget), why=new.why)


def _replaced(
    old: GenerationRecord, bare: Mapping[int, Collection[int]], gone: Mapping[int, Collection[int]]
) -> dict[int, dict[int, int]]:
    """See `GenerationRecord`. *gone*: by slot, what is to be started in the next generation."""
    found: dict[int, dict[int, int]] = {}
    for slot, ranks in bare.items():
        before = {rank: replaced_in(old, slot, rank) for rank in ranks if rank not in gone.get(slot, ())}
        if any(before.values()):
            found[slot] = {rank: number for rank, number in before.items() if number}
    return found


def helpers_of(now: Situation, slots: Sequence[Owner], bare: Mapping[int, Collection[int]]) -> tuple[Helper, ...]:
    """Who repeats what is lost together with its replacement, if that is one rank: processes on spares that nobody
    needs, then one on each node of the others, last the replacement's own. *slots*: the new owners. *bare*: by slot,
    the local ranks that hold no state."""
    ranks = [now.old.first_rank(slot) + local_rank for slot, of_slot in bare.items() for local_rank in of_slot]
    if len(ranks) != 1:
        return ()  # also a log group that goes back together
    slot = now.old.slot_with(ranks[0])
    taken = [node.incarnation for node in now.takers.values()]
    idle = [node for node in now.free if node.incarnation not in taken and node.role == slots[slot].role]
    places = [(node.node_id, node.incarnation) for node in idle for _ in range(node.num_workers)]
    others = [*slots[:slot], *slots[slot + 1 :], slots[slot]]
    places += [(owner.node_id, owner.incarnation) for owner in others if owner.role == slots[slot].role]
    most = _most_helpers(now.view, slot, len(places))
    return tuple(Helper(ranks[0], share, *place) for share, place in enumerate(places[:most], 1))


def _most_helpers(view: View, slot: int, num_places: int) -> int:
    """For a rank of that slot. Of a job with a strategy as many as were named, if any were; else as many as pay."""
    job, known = view.job, view.profile
    if job is None or not job.helpers or (known is not None and known.way != "log+parallel"):
        return 0  # its state comes back in another way
    if job.strategy and job.helpers != AS_MANY_AS_PAY:
        # More processes than micro-batches would have nothing to do.
        most = known.content.get("micro_batches") if known is not None else None
        return min(job.helpers, most - 1) if isinstance(most, int) else job.helpers
    if known is None or len(known.helpers) != len(view.generation.slots if view.generation else ()):
        return 1  # nothing is known of these nodes
    most_places = num_places if job.helpers == AS_MANY_AS_PAY else min(job.helpers, num_places)
    return max((count for count in known.helpers[slot] if count <= most_places), default=0)


def _go_back(view: View, hit: Collection[int]) -> list[int]:
    """The slots whose log group is hit: nobody could repeat there what one of them has lost."""
    return sorted({slot for group in view.log_groups if not set(group).isdisjoint(hit) for slot in group})


def _with_troubles(now: Situation) -> GenerationRecord:
    """The generation that was, with what is remembered of ranks that fail again and again."""
    troubles = now.verdict.troubles
    if now.advances:
        troubles = setbacks.moved(troubles, now.verdict.hopeless)
    return replace(now.old, troubles=troubles)
