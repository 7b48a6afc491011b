"""Decides which nodes train together: from the records of a job to its next generation. Pure.

`decide` looks at what is stored and says what the coordinator has to write next; it is called after every change and
must give the same answer for the same input, so that another agent can take over between any two writes. A slot is the
place of a node in the job; ranks belong to slots and never move: a replacement takes the slot of the node it replaces.

    no generation --enough nodes--> start --failure--> replace --failure--> replace ... --all finished--> release -->
    result
                                      '----failure of an untracked job----> restart (all workers, as torchrun)

This module must never read a clock, talk to a store or log; times come in as arguments, reasons go out as data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from swift_rendezvous.roster import draining, mending, resizing
from swift_rendezvous.roster.decision import (
    Decision,
    ForgetDrain,
    PublishGeneration,
    PublishPause,
    PublishPlan,
    PublishRelease,
    PublishResult,
    Rules,
    last_call,
    nodes_are,
)
from swift_rendezvous.roster.losses import MAX_NAMED, Losses, clipped, exits_of, losses, some_of, spares
from swift_rendezvous.roster.records import (
    GenerationRecord,
    PauseRecord,
    ResultRecord,
)
from swift_rendezvous.roster.replacing import next_generation
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
        PublishResult(replace(command.result, exits=clipped(command.result.exits)))
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
    told = _told_to_go(view, lost, rules, now_s, waiting_since_s)
    if told is not None:
        return told
    unread = mending.unread_records(view)
    if unread:
        lost = replace(lost, records=unread)
    if view.released:
        lost = replace(lost, handovers={})  # what a drained node has handed over is not needed
        if lost:
            return _lost_after_release(view, lost)
    if lost:
        return next_generation(view, lost, rules, now_s, waiting_since_s)
    return _advance(view, rules, now_s, waiting_since_s)


def _start(view: View, rules: Rules, now_s: float, waiting_since_s: float | None) -> Decision:
    job = view.job
    assert job is not None
    free = spares(view)
    if len(free) < job.num_nodes:
        num = len(free)
        here = f"1 of {job.num_nodes} nodes is here" if num == 1 else f"{num} of {job.num_nodes} nodes are here"
        since = now_s if waiting_since_s is None else waiting_since_s
        if now_s - since < rules.join_timeout_s:
            waiting = f"{here}; the others have {rules.join_timeout_s:g} s to come"
            return Decision(waiting=waiting, deadline_s=since + rules.join_timeout_s)
        why = f"{here} after {rules.join_timeout_s:g} s (--rdzv-conf join_timeout)"
        return Decision((PublishResult(ResultRecord("stopped", why)),), why=why)
    # The nodes that came first; among them in the order that they ask for, if they do.
    chosen = sorted(free[: resizing.most_nodes(job)], key=lambda node: node.node_rank)
    if len(chosen) < resizing.most_nodes(job):
        since = now_s if waiting_since_s is None else waiting_since_s
        if now_s - since < rules.last_call_s:
            return last_call(f"{nodes_are(len(chosen))} here, enough to begin", since, rules)
    why = f"{nodes_are(len(chosen))} here: {', '.join(node.node_id for node in chosen)}"
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


def _told_to_go(
    view: View, lost: Losses, rules: Rules, now_s: float, waiting_since_s: float | None
) -> Decision | None:
    """All nodes got a signal to go: the job ends; if the script takes checkpoints, with one of all that was trained."""
    why, pause = draining.all_told(view, lost.nodes, spares(view)), view.pause
    if not why or (_is_complete(view) and not lost):
        return None
    deadline_s = (now_s if waiting_since_s is None else waiting_since_s) + draining.least_grace_s(view)
    saves = pause is not None and pause.saves
    is_saved = saves and draining.all_parked(view)
    takes_none = not view.tracked or (saves and not all(position.saves for position in view.positions.values()))
    if pause is not None and is_saved:
        why = f"{why}; all workers have stopped"
    elif not takes_none and (lost or now_s >= deadline_s):
        why = f"{why}; there was no time for a last checkpoint, or workers were lost in it"
    if lost or takes_none or is_saved or now_s >= deadline_s:
        return Decision((PublishResult(ResultRecord("stopped", why, cause="preempted")),), why=why)
    at = draining.boundary(view)
    if pause is not None and saves and not view.finished:
        step = Decision()
        if at is not None and pause.boundary is None:
            at_last = PublishPause(replace(pause, boundary=at))
            step = Decision((at_last,), why=f"the last checkpoint comes before iteration {at}, or at the next batch")
    elif pause is None and draining.is_settled(view):
        asked = PublishPause(PauseRecord(saves=True))
        step = Decision((asked,), why=f"{why}: a last checkpoint is taken, if the script takes any")
    else:
        step = _advance(view, rules, now_s, waiting_since_s)  # what is under way comes to its end first
    return replace(step, waiting=f"{why}: the last checkpoint", deadline_s=deadline_s)


def _is_complete(view: View) -> bool:
    """All have come to the end of their scripts."""
    generation = view.generation
    slots = range(len(generation.slots)) if generation is not None else ()
    return bool(slots) and all(slot in view.finished or slot in view.exited for slot in slots)


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
        return last_call(f"{nodes_are(len(new.slots))} here", since, rules)
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
            return Decision(waiting=f"{some_of(missing)} have not said what they hold")
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
            epochs={},
            helpers=(),
            replaced={},
        )
        return Decision((PublishGeneration(new), PublishPlan()), why=why)
    if all(slot in view.exited for slot in slots):
        return Decision((PublishResult(ResultRecord("succeeded", "all workers exited with code 0")),), why="all done")
    if not view.released and _is_complete(view):
        return _release(view)
    return _grow(view, rules, now_s, waiting_since_s) or _drain(view, generation)


def _drain(view: View, generation: GenerationRecord) -> Decision:
    """All is well: bring a drain one step on (see `draining`). A pause that was begun is brought to its end even if the
    order was taken back meanwhile: no worker is cut in an iteration."""
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
        stop = PublishPause(replace(view.pause, boundary=at))
        return Decision((stop,), why=f"all workers stop before iteration {at}")
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
        helpers=(),
        replaced={},
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
    apart = []
    for replicas, held_by in seen.items():
        if len(held_by) > 1:
            of_all = {rank: ends[rank] for ranks in held_by.values() for rank in ranks}
            if _only_round(list(of_all.values())):
                num = len(held_by)
                apart.append(f"replicas {replicas} have {num} checksums: machines of several kinds round otherwise")
                continue
            found = "; ".join(f"ranks {sorted(ranks)}: {held}" for held, ranks in held_by.items())
            why = f"the replicas differ at the end of the run: {_differing(of_all)}{found}"
            return Decision((PublishResult(ResultRecord("failed", why)),), why=why)
    checked = sum(len(ranks) for held in seen.values() for ranks in held.values() if len(held) == 1 < len(ranks))
    more = [f"{len(apart) - MAX_NAMED} more sets as well"] if len(apart) > MAX_NAMED else []
    equal = [f"{checked} replicas have equal checksums"] if checked else []
    why = "; ".join(["all workers reached their end", *equal, *apart[:MAX_NAMED], *more])
    return Decision((PublishRelease(),), why=why)


def _only_round(ends: Sequence[Mapping[str, Any]]) -> bool:
    """Whether replicas may differ because they do not compute alike, of which their workers have told."""
    computes, iterations, hyper = ({end.get(name) for end in ends} for name in ("computes", "iteration", "hyper"))
    is_told = len(computes) > 1 or any(end.get("rounded") for end in ends)
    return is_told and len(iterations) == len(hyper) == 1


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
    exits = exits_of(lost)
    if exits:
        why = f"rank {exits[0].rank} failed after the end of training"
        return Decision((PublishResult(ResultRecord("failed", why, exits)),), why=why)
    generation = view.generation
    assert generation is not None
    left = [slot for slot in range(len(generation.slots)) if slot not in view.exited and slot not in lost.nodes]
    if left:
        return Decision(waiting=f"{some_of(left)} are still exiting")
    # What a script does after its last iteration (a save, an evaluation) is known only to its processes.
    names = ", ".join(f"{generation.slots[slot].node_id} (slot {slot})" for slot in sorted(lost.nodes))
    why = f"training had ended, but node {names} was lost before its workers had exited: what they still did is lost"
    return Decision((PublishResult(ResultRecord("failed", why)),), why=why)
