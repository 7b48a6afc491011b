"""Who trains together: from the records of a job to its next generation. Pure.

`decide` looks at what is stored and says what the coordinator has to write next; it is called after every change and
must give the same answer for the same input, so that another agent can take over between any two writes. A slot is the
place of a node in the job; ranks belong to slots and never move: a replacement takes the slot of the node it replaces.

    no generation --enough nodes--> start --failure--> replace --failure--> replace ... --all finished--> release -->
    result
                                      '----failure of an untracked job----> restart (all workers, as torchrun)

This module must never read a clock, talk to a store or log; times come in as arguments, reasons go out as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from swift_rendezvous.roster import draining, mending, resizing, setbacks
from swift_rendezvous.roster.accusations import bare_ranks
from swift_rendezvous.roster.decision import (
    Command,
    Decision,
    ForgetDrain,
    ForgetNode,
    PublishGeneration,
    PublishPause,
    PublishPlan,
    PublishRelease,
    PublishResult,
    Rules,
)
from swift_rendezvous.roster.losses import MAX_NAMED, Losses, _clipped, _exits, _ranks, _some, describe, losses, spares
from swift_rendezvous.roster.records import (
    AS_LONG_AS_IT_ADVANCES,
    GenerationRecord,
    PauseRecord,
    ResultRecord,
)
from swift_rendezvous.roster.view import View


def decide(view: View, rules: Rules, *, now_s: float, waiting_since_s: float | None) -> Decision:
    """What the coordinator writes next.

    *waiting_since_s*: when the current wait for nodes, that of `stage_of`, began (None: not waiting). All times are
    seconds of one monotonic clock.
    """
    if view.result is not None:
        return Decision()
    mended = _mended(view)
    if mended is not None:
        return mended
    if view.job is None:
        return Decision()
    decision = _decide(view, rules, now_s, waiting_since_s)
    forget = tuple(ForgetDrain(node_id) for node_id in draining.fulfilled(view))
    commands = tuple(
        PublishResult(replace(command.result, exits=_clipped(command.result.exits)))
        if isinstance(command, PublishResult) else command
        for command in decision.commands
    )  # fmt: skip
    return replace(decision, commands=(*commands, *forget))


def _mended(view: View) -> Decision | None:
    """What is done about records without which the job cannot go on; None: all is well (see `mending`)."""
    why = mending.beyond_repair(view)
    if why:
        return Decision((PublishResult(ResultRecord("stopped", why)),), why=why)
    repairs = mending.repairs(view)
    return Decision(repairs, why="records that were removed or overwritten are mended") if repairs else None


def stage_of(view: View) -> resizing.Stage:
    """Which wait is on, where there may be one after another without a pause: see `resizing`."""
    if not resizing.is_elastic(view.job):
        return ""
    return resizing.stage(view, len(spares(view)), len(losses(view).nodes))


def _decide(view: View, rules: Rules, now_s: float, waiting_since_s: float | None) -> Decision:
    if view.generation is None:
        return _start(view, rules, now_s, waiting_since_s)
    lost = losses(view)
    unread = mending.unread_records(view)
    if unread:
        lost = replace(lost, records=unread)
    if view.released:
        lost = replace(lost, handovers={})  # nobody needs what a drained node has handed over
        if lost:
            return _lost_after_release(view, lost)
    if lost:
        return _next_generation(view, lost, rules, now_s, waiting_since_s)
    return _advance(view, rules, now_s, waiting_since_s)


def _start(view: View, rules: Rules, now_s: float, waiting_since_s: float | None) -> Decision:
    job = view.job
    assert job is not None
    free = spares(view)
    if len(free) < job.num_nodes:
        here = f"{len(free)} of {job.num_nodes} nodes are here"
        since = now_s if waiting_since_s is None else waiting_since_s
        if now_s - since < rules.join_timeout_s:
            waiting = f"{here}; the others have {rules.join_timeout_s:g} s to come"
            return Decision(waiting=waiting, deadline_s=since + rules.join_timeout_s)
        why = f"{here} after {rules.join_timeout_s:g} s (--rdzv-conf join_timeout)"
        return Decision((PublishResult(ResultRecord("stopped", why)),), why=why)
    # Those who came first; among them in the order that they ask for, if they do.
    chosen = sorted(free[: resizing.most_nodes(job)], key=lambda node: node.node_rank)
    if len(chosen) < resizing.most_nodes(job):
        since = now_s if waiting_since_s is None else waiting_since_s
        if now_s - since < rules.last_call_s:
            return _last_call(f"{len(chosen)} nodes are here, enough to begin", since, rules)
    why = f"{len(chosen)} nodes are here: {', '.join(node.node_id for node in chosen)}"
    generation = GenerationRecord(
        number=1,
        mode="start",
        slots=tuple(resizing.owner_of(node, job.num_workers) for node in chosen),
        num_workers=job.num_workers,
        store_slot=0,
        why=why,
        recovery=job.recovery,
    )
    return Decision((PublishGeneration(generation), PublishPlan()), why=why)


def _last_call(what: str, since_s: float, rules: Rules) -> Decision:
    waiting = f"{what}; others have {rules.last_call_s:g} s to come (--rdzv-conf last_call_timeout)"
    return Decision(waiting=waiting, deadline_s=since_s + rules.last_call_s)


def _grow(view: View, rules: Rules, now_s: float, waiting_since_s: float | None) -> Decision | None:
    """Take in nodes that came late; None if there is none, or no room."""
    free = spares(view)
    new = resizing.grown(view, free)
    busy = view.pause is not None or not draining.is_settled(view) or bool(draining.moves(view, free))
    if new is None or (view.tracked and busy):
        return None
    since = now_s if waiting_since_s is None else waiting_since_s
    assert view.job is not None
    if len(new.slots) < resizing.most_nodes(view.job) and now_s - since < rules.last_call_s:
        return _last_call(f"{len(new.slots)} nodes are here", since, rules)
    if view.tracked:
        return Decision((PublishPause(PauseRecord()),), why=f"{new.why}, from a common boundary")
    return Decision((PublishGeneration(new), PublishPlan()), why=new.why)


def _advance(view: View, rules: Rules, now_s: float, waiting_since_s: float | None) -> Decision:
    """Nothing is lost: plan the generation, or let a finished job end."""
    generation = view.generation
    assert generation is not None
    slots = range(len(generation.slots))
    if view.plan is None:
        missing = [slot for slot in slots if slot not in view.progress]
        if generation.asks and missing:
            return Decision(waiting=f"{_some(missing)} have not said what they hold")
        silent = [owner.node_id for slot, owner in generation.handover.items() if slot not in view.handovers]
        if silent:
            return Decision(waiting=f"drained nodes {silent} have not said what they hold")
        return Decision((PublishPlan(),), why=generation.why)
    if view.plan.restart:
        why = f"all workers restart: {view.plan.why}"
        new = replace(
            generation,
            number=generation.number + 1,
            mode="restart",
            lost={},
            why=why,
            epoch=generation.number + 1,
            num_restarts=generation.num_restarts + 1,
            handover={},
            bare={},
        )
        return Decision((PublishGeneration(new), PublishPlan()), why=why)
    if all(slot in view.exited for slot in slots):
        return Decision((PublishResult(ResultRecord("succeeded", "all workers exited with code 0")),), why="all done")
    if not view.released and all(slot in view.finished or slot in view.exited for slot in slots):
        return _release(view)
    return _grow(view, rules, now_s, waiting_since_s) or _drain(view, generation)


def _drain(view: View, generation: GenerationRecord) -> Decision:
    """All is well: bring a drain one step on (see `draining`). A pause that was begun is brought to its end even if the
    order was taken back meanwhile: nobody is cut in an iteration."""
    if view.released:
        return Decision()
    moves = draining.moves(view, spares(view))
    if view.pause is None:
        if not moves or not draining.is_settled(view):
            return Decision()
        names = ", ".join(generation.slots[slot].node_id for slot in moves)
        return Decision((PublishPause(PauseRecord()),), why=f"{names} is drained: workers go on to a common boundary")
    if view.pause.boundary is None:
        at = draining.boundary(view)
        if at is None:
            return Decision(waiting="not all slots have said where they are")
        return Decision((PublishPause(PauseRecord(at)),), why=f"all workers stop before iteration {at}")
    if not draining.all_parked(view):
        return Decision(waiting=f"not all workers have come to iteration {view.pause.boundary}")
    grown = None if moves else resizing.grown(view, spares(view))
    if grown is not None:
        return Decision((PublishGeneration(grown),), why=f"before iteration {view.pause.boundary}: {grown.why}")
    slots = list(generation.slots)
    for slot, node in moves.items():
        slots[slot] = resizing.owner_of(node, generation.num_workers)
    taken = [f"{slots[slot].node_id} takes slot {slot} of {generation.slots[slot].node_id}" for slot in moves]
    what = f"drained before iteration {view.pause.boundary}: {', '.join(taken)}"
    if not moves:
        what = f"there is nothing to change any more: all go on with iteration {view.pause.boundary}"
    keep = [slot for slot in range(len(slots)) if slot not in moves]
    new = replace(
        generation,
        number=generation.number + 1,
        mode="replace",
        slots=tuple(slots),
        store_slot=keep[0] if keep else 0,
        why=what,
        lost={slot: tuple(range(generation.workers_of(slot))) for slot in moves},
        handover={slot: generation.slots[slot] for slot in moves},
        bare={slot: tuple(range(generation.workers_of(slot))) for slot in moves},
    )
    return Decision((PublishGeneration(new),), why=what)


def _release(view: View) -> Decision:
    """All have reached the end: compare what several ranks hold one last time, then let the workers exit."""
    seen: dict[str, dict[str, list[int]]] = {}
    ends: dict[int, dict[str, Any]] = {}
    for record in view.finished.values():
        for rank, end in record.checksums.items():
            ends[rank] = end
            held = f"iteration {end.get('iteration')}, checksum {end.get('checksum')}"
            seen.setdefault(str(end.get("replicas")), {}).setdefault(held, []).append(rank)
    for held_by in seen.values():
        if len(held_by) > 1:
            found = "; ".join(f"ranks {sorted(ranks)}: {held}" for held, ranks in held_by.items())
            what = _differing({rank: ends[rank] for ranks in held_by.values() for rank in ranks})
            why = f"the replicas differ at the end of the run: {what}{found}"
            return Decision((PublishResult(ResultRecord("failed", why)),), why=why)
    checked = sum(n for held in seen.values() for n in map(len, held.values()) if n > 1)
    why = "all workers reached their end" + (f"; {checked} replicas have equal checksums" if checked else "")
    return Decision((PublishRelease(),), why=why)


def _differing(ends: Mapping[int, Mapping[str, Any]]) -> str:
    """Of replicas, by rank: the parts of their state that are not alike, with what is told of each."""
    parts = {rank: end.get("parts") or {} for rank, end in ends.items()}
    clauses = []
    for name in dict.fromkeys(name for one in parts.values() for name in one):
        by_value: dict[str, list[int]] = {}
        for rank in sorted(parts):
            by_value.setdefault(str(parts[rank].get(name)), []).append(rank)
        if len(by_value) > 1:
            clauses.append(f"{name} ({', '.join(f'{value} on ranks {ranks}' for value, ranks in by_value.items())})")
    more = f" and {len(clauses) - MAX_NAMED} more" if len(clauses) > MAX_NAMED else ""
    return f"{', '.join(clauses[:MAX_NAMED])}{more}; " if clauses else ""


def _lost_after_release(view: View, lost: Losses) -> Decision:
    """The training is complete and every replica was at its end: nothing is recovered any more, but the truth is
    told.
    """
    exits = _exits(lost)
    if exits:
        why = f"rank {exits[0].rank} failed after the end of training"
        return Decision((PublishResult(ResultRecord("failed", why, exits)),), why=why)
    generation = view.generation
    assert generation is not None
    left = [slot for slot in range(len(generation.slots)) if slot not in view.exited and slot not in lost.nodes]
    if left:
        return Decision(waiting=f"{_some(left)} are still exiting")
    # What a script does after its last iteration (a save, an evaluation) is known to nobody but its processes.
    names = ", ".join(f"{generation.slots[slot].node_id} (slot {slot})" for slot in sorted(lost.nodes))
    why = f"training had ended, but node {names} was lost before its workers had exited: what they still did is lost"
    return Decision((PublishResult(ResultRecord("failed", why)),), why=why)


def _next_generation(view: View, lost: Losses, rules: Rules, now_s: float, waiting_since_s: float | None) -> Decision:
    old = view.generation
    assert old is not None
    forget = tuple(
        ForgetNode(old.slots[slot].node_id, old.slots[slot].incarnation)
        for slot in sorted(lost.nodes)
        if draining.is_alive(view, old.slots[slot])
    )
    free = spares(view)
    vacant = sorted(lost.nodes)
    if lost.restart is not None and lost.restart.is_final:
        why = lost.restart.evidence
        return Decision((*forget, PublishResult(ResultRecord("failed", why, _exits(lost)))), why=why)
    worn = [slot for slot, failure in lost.workers.items() if failure.restarts_left <= 0]
    restart = not view.tracked or lost.restart is not None
    resizes = resizing.is_under_way(view) and not restart
    if resizing.is_elastic(view.job) and (restart or resizes) and lost.nodes:
        # Workers that fail while a node is known to be lost fail of that: it is no restart of their own.
        lost, worn = replace(lost, workers={}), []
    verdict = _verdict(view, lost)
    if verdict.restart:
        restart, resizes = True, False
    troubles, advances = verdict.troubles, _goes_on_while_it_advances(view)
    if advances:
        worn = sorted({old.slot_with(rank) for rank in verdict.hopeless})
        may_move = verdict.movable.issuperset(verdict.hopeless) and not (restart or resizes)
        moving = sorted({*vacant, *worn})
        if worn and not (may_move and len(draining.takers(old, moving, free)) == len(moving)):
            return _hopeless(verdict, lost, forget)
        troubles = setbacks.moved(troubles, verdict.hopeless)
    # A drained node still has the workers and the state of its slot: it can have it back.
    handover = {} if restart or resizes else draining.open_handovers(view)
    needed = sorted({*vacant, *worn}, key=lambda slot: (slot in handover, slot))
    takers = draining.takers(old, needed, free)
    short = len([slot for slot in needed if slot not in handover and slot not in takers])
    if worn and (restart or resizes or short > 0):
        # As torchrun: a worker that fails once more than --max-restarts ends the job, unless a spare can take over.
        failure = lost.workers[worn[0]]
        why = f"{failure.evidence}; no restart is left (--max-restarts)"
        return Decision((*forget, PublishResult(ResultRecord("failed", why, failure.exits))), why=why)
    if lost.restart is not None and lost.restart.restarts_left <= 0 and not lost.nodes and not advances:
        why = f"{lost.restart.evidence}; the workers would have to be restarted and no restart is left (--max-restarts)"
        return Decision((*forget, PublishResult(ResultRecord("failed", why, _exits(lost)))), why=why)
    vacant = sorted({*vacant, *worn})
    what = "; ".join([describe(old, lost), *verdict.restart.values()])
    old = replace(old, troubles=troubles)
    if resizing.is_elastic(view.job) and (restart or resizes or short > 0):
        assert view.job is not None
        left = resizing.roster(view.job, old, lost.nodes, free)
        since = now_s if waiting_since_s is None else waiting_since_s
        if left is not None and short > 0 and not resizes and now_s - since < rules.last_call_s:
            return replace(_last_call(f"{what}; {len(left)} nodes are left", since, rules), commands=forget)
        if left is not None:
            workers = {} if lost.nodes else lost.workers  # their slots may be others now
            counts = restart and bool(workers or lost.restart or verdict.restart)
            bare = bare_ranks(view, old)
            new = resizing.renewed(old, left, what, workers, "restart" if restart else "resize", bare, counts=counts)
            plan = (PublishPlan(),) if restart else ()
            return Decision((PublishGeneration(new), *plan, *forget), why=new.why)
    if short > 0:
        since = now_s if waiting_since_s is None else waiting_since_s
        if now_s - since < rules.replacement_timeout_s:
            waiting = f"{what}; slots {vacant} wait for a node (at most {rules.replacement_timeout_s:g} s)"
            if free:
                waiting += f" of the same --nproc-per-node and --role; {', '.join(n.node_id for n in free)} differs"
            return Decision(forget, why=what, waiting=waiting, deadline_s=since + rules.replacement_timeout_s)
        why = f"{what}; no node took slots {vacant} within {rules.replacement_timeout_s:g} s (--replacement-timeout)"
        return Decision((*forget, PublishResult(ResultRecord("stopped", why, _exits(lost)))), why=why)
    slots = list(old.slots)
    taken: list[str] = []
    for slot, node in takers.items():
        slots[slot] = resizing.owner_of(node, old.num_workers)
        taken.append(f"{node.node_id} takes slot {slot}")
    returned = [slot for slot in needed if slot not in takers]
    for slot in returned:
        slots[slot] = handover.pop(slot)
        taken.append(f"{slots[slot].node_id} has slot {slot} back")
    keep = [slot for slot in range(len(slots)) if slot not in vacant]
    replaced = [
        f"ranks {_ranks(old, slot, lost.workers[slot])} are replaced on {slots[slot].node_id}"
        for slot in sorted(lost.workers)
        if slot not in vacant
    ]
    done = "all workers restart" if restart else ", ".join([*taken, *replaced]) or "all others go on"
    why = f"{what}; {done}"
    # A slot whose node is new has lost all its ranks; its agent starts all of them in any case.
    gone = {slot: tuple(range(old.workers_of(slot))) for slot in vacant if slot not in returned}
    gone |= {slot: failure.local_ranks for slot, failure in lost.workers.items() if slot not in vacant}
    counts = bool(lost.workers or lost.restart)
    bare = bare_ranks(view, old)
    for slot, ranks in gone.items():
        bare.setdefault(slot, set()).update(ranks)
    new = GenerationRecord(
        number=old.number + 1,
        mode="restart" if restart else "replace",
        slots=tuple(slots),
        num_workers=old.num_workers,
        # The store must live on a node that is known to be healthy, and not on the newcomer if that can be helped.
        store_slot=keep[0] if keep else 0,
        why=why,
        epoch=old.number + 1 if restart else old.epoch,
        lost=gone,
        num_restarts=old.num_restarts + (1 if restart and counts else 0),
        handover=handover,
        bare={slot: tuple(sorted(bare[slot])) for slot in sorted(bare) if not restart and slot not in returned},
        recovery=old.recovery,
        troubles=old.troubles,
    )
    publish: tuple[Command, ...] = (PublishGeneration(new), PublishPlan()) if restart else (PublishGeneration(new),)
    return Decision((*publish, *forget), why=why)


def _goes_on_while_it_advances(view: View) -> bool:
    """No --max-restarts was given, and workers are replaced in place: see `setbacks`."""
    return view.tracked and view.job is not None and view.job.max_restarts == AS_LONG_AS_IT_ADVANCES


def _verdict(view: View, lost: Losses) -> setbacks.Verdict:
    generation = view.generation
    assert generation is not None
    if not view.tracked:
        return setbacks.Verdict()
    counted = not _goes_on_while_it_advances(view)
    return setbacks.judge(generation.troubles, _exits(lost), generation.epoch, counted=counted)


def _hopeless(verdict: setbacks.Verdict, lost: Losses, forget: tuple[Command, ...]) -> Decision:
    troubles = {trouble.rank: trouble for trouble in verdict.troubles}
    # The cause first; who is behind it may have failed of that.
    rank, reason = next(iter(verdict.hopeless.items()))
    why = setbacks.describe(troubles[rank], reason)
    exits = sorted(_exits(lost), key=lambda exit_: exit_.rank != rank)
    result = ResultRecord("failed", why, tuple(exits), setbacks.advice(troubles[rank]))
    return Decision((*forget, PublishResult(result)), why=why)


