"""The steps of `machine.reconcile`: each brings the node closer to what the records ask for. Pure.

`machine` decides which of them are taken, and in which order. A step must never carry anything out: it returns the new
state and adds to the commands. It must never read a clock: times come in as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from swift_agent.agent.lifecycle import drain, resize
from swift_agent.agent.lifecycle.commands import (
    Command,
    DropKept,
    ForgetSpare,
    HostStore,
    KillWorkers,
    SendGo,
    SendKeep,
    SendLeave,
    SendLogGroup,
    SendRelease,
    SendStop,
    StartWorkers,
    WriteExited,
    WriteFailure,
    WriteFinished,
    WriteHandover,
    WriteMeasured,
    WriteProgress,
    WriteResumed,
    WriteTaken,
)
from swift_agent.agent.lifecycle.state import (
    INSIDE,
    OUTSIDE,
    AgentState,
    Worker,
    _issue,
    _mark,
    _rank,
    _with,
    describe_exit,
)
from swift_agent.agent.lifecycle.timeline import merge_phases
from swift_recovery.planning.plan import Plan
from swift_rendezvous.roster.draining import slot_left
from swift_rendezvous.roster.losses import replaced_in, told_losses
from swift_rendezvous.roster.records import (
    FailureRecord,
    FinishedRecord,
    GenerationRecord,
)
from swift_rendezvous.roster.resizing import is_elastic
from swift_rendezvous.roster.view import View


def _forget_restarts(state: AgentState, now_s: float) -> AgentState:
    """Those that are older than `--max-restarts-window`."""
    oldest_s = now_s - state.restarts_window_s
    if not state.restarted_s or state.restarted_s[0] >= oldest_s:
        return state
    kept = tuple(at_s for at_s in state.restarted_s if at_s >= oldest_s)
    return replace(state, restarted_s=kept, restarts_used=len(kept))


def _count_restart(state: AgentState, generation: GenerationRecord, slot: int, now_s: float) -> AgentState:
    """A failure of a local worker uses up one of --max-restarts; a node that was lost elsewhere does not."""
    if generation.number == state.restarts_counted_in:
        return state
    failed = any(not w.alive and not w.done and _is_replaced(generation, slot, w) for w in state.workers.values())
    unfit = generation.mode == "restart" and any(w.unfit for w in state.workers.values())
    if failed or unfit:
        state = replace(state, restarts_used=state.restarts_used + 1)
        if state.restarts_window_s:
            state = replace(state, restarted_s=(*state.restarted_s, now_s))
    return replace(state, restarts_counted_in=generation.number)


def _host_store(state: AgentState, generation: GenerationRecord, slot: int, commands: list[Command]) -> AgentState:
    if generation.store_slot != slot or state.store_started >= generation.number:
        return state
    commands.append(HostStore(generation.number))
    return replace(state, store_started=generation.number)


def _processes(state: AgentState, generation: GenerationRecord, slot: int, commands: list[Command]) -> AgentState:
    """Every local rank has a process that is not older than the epoch; a lost one is replaced once that is agreed."""
    outdated = [w for w in state.workers.values() if w.alive and w.generation < generation.epoch_of(slot)]
    if not resize.may_begin(state.view, slot, state.workers, state.kept):
        return state
    if outdated:
        fresh = tuple(w.local_rank for w in outdated if not w.killed)
        if fresh:
            commands.append(KillWorkers(fresh, generation.why, graceful=True))
            state = _mark(state, fresh, killed=True)
        return state  # all are started together once the last one is gone
    missing = []
    for local_rank in range(generation.workers_of(slot)):
        worker = state.workers.get(local_rank)
        if worker is None or worker.generation < generation.epoch_of(slot):
            missing.append(local_rank)
        elif not worker.alive and not worker.done:
            agreed = _is_replaced(generation, slot, worker)
            if agreed:
                missing.append(local_rank)
    warm = generation.asks
    # A cold process gets the store's address in its environment; a warm one is told when it asks.
    if missing and (warm or state.view.store is not None):
        commands.append(StartWorkers(tuple(missing), generation.number, warm))
        for local_rank in missing:
            state = _with(state, Worker(local_rank, generation.number))
    return state


def _is_replaced(generation: GenerationRecord, slot: int, worker: Worker) -> bool:
    """All agree that this process is lost: by this generation, or by an earlier one that was not seen here."""
    return worker.generation < replaced_in(generation, slot, worker.local_rank)


def _is_empty(state: AgentState, generation: GenerationRecord, slot: int) -> bool:
    """None of this node's workers has the state: all were started since the slot last trained, and wait for it."""
    bare = generation.bare.get(slot, ())
    return len(bare) == generation.workers_of(slot) and not any(w.alive and w.holds for w in state.workers.values())


def _report_losses(state: AgentState, generation: GenerationRecord, slot: int, commands: list[Command]) -> AgentState:
    view = state.view
    for other, owner in enumerate(generation.slots if state.lost_peers else ()):
        lost = state.lost_peers.get(owner.incarnation)
        known = view.failures.get(other)
        if lost is not None and other != slot and (known is None or known.kind != "node"):
            failure = FailureRecord(
                "node", other, owner.incarnation, (), lost.evidence, state.node_id, is_dead=lost.is_dead,
                is_empty=_is_empty(state, generation, slot),
            )  # fmt: skip
            state = _issue(state, commands, ("node", other), WriteFailure(generation.number, failure))
    left = max(state.max_restarts, 0) - state.restarts_used
    epoch = generation.epoch_of(slot)
    dead = [w for w in state.workers.values() if not w.alive and not w.done and w.generation >= epoch]
    dead = [w for w in dead if not _is_replaced(generation, slot, w)]
    keeper = resize.keeper(view, slot, state.workers, state.kept)
    if keeper is not None and (not keeper.alive or keeper.unfit):
        dead.append(keeper)  # before it had kept what only it might hold
    if dead:
        ranks = tuple(sorted(w.local_rank for w in dead))
        exits = tuple(w.exit for w in sorted(dead, key=lambda w: w.local_rank) if w.exit is not None)
        evidence = "; ".join([describe_exit(exit_) for exit_ in exits] + [w.unfit for w in dead if w.unfit and w.alive])
        failure = FailureRecord("workers", slot, state.incarnation, ranks, evidence, state.node_id, left, exits)
        return _issue(state, commands, ("workers", ranks), WriteFailure(generation.number, failure))
    unfit = [w for w in state.workers.values() if w.alive and w.unfit and w.generation >= epoch]
    if unfit:
        evidence = "; ".join(f"rank {_rank(generation, slot, w)}: {w.unfit}" for w in unfit)
        is_final = any(w.is_hopeless for w in unfit)
        failure = FailureRecord(
            "restart", slot, state.incarnation, (), evidence, state.node_id, left, is_final=is_final
        )  # fmt: skip
        return _issue(state, commands, ("restart",), WriteFailure(generation.number, failure))
    early = _left_early(state, generation, slot)
    if early:
        evidence = (
            f"ranks {early} exited with code 0, before swift_agent.init() or without having come to the end of the "
            "training, and other ranks wait for them: have all ranks of the job call init() and end alike, or none "
            "call it"
        )
        failure = FailureRecord(
            "restart", slot, state.incarnation, (), evidence, state.node_id, left, is_final=True
        )  # fmt: skip
        return _issue(state, commands, ("restart",), WriteFailure(generation.number, failure))
    gone: list[Worker] = []
    if generation.mode == "replace" and not view.released:
        # It left before the others had finished, with state that cannot be asked for any more; or it was to
        # replace another, or to begin with the others, and never came to that.
        done = [w for w in state.workers.values() if w.done]
        gone = [w for w in done if view.plan is None or (not w.hello and w.generation > epoch)]
    if gone:
        evidence = f"ranks {[_rank(generation, slot, w) for w in gone]} had exited before the job was finished"
        failure = FailureRecord("restart", slot, state.incarnation, (), evidence, state.node_id, left)
        return _issue(state, commands, ("restart",), WriteFailure(generation.number, failure))
    apart = [w for w in state.workers.values() if w.alive and w.apart == w.current == generation.number]
    if apart and slot not in view.failures:
        evidence = "; ".join(f"rank {_rank(generation, slot, w)} asks for another try: {w.apart_why}" for w in apart)
        failure = FailureRecord("again", slot, state.incarnation, (), evidence, state.node_id, left)
        return _issue(state, commands, ("again",), WriteFailure(generation.number, failure))
    return state


def _left_early(state: AgentState, generation: GenerationRecord, slot: int) -> list[int]:
    """Ranks whose first process is done, and has never said hello, or of another node all that have not said that they
    are at their end, while a worker of this node waits for all: it would wait for ever, and started again as well."""
    view, epoch = state.view, generation.epoch_of(slot)
    mine = [w for w in state.workers.values() if w.generation >= epoch]
    if view.released or not any(w.alive and w.hello and w.finished is None for w in mine):
        return []
    here = [_rank(generation, slot, w) for w in mine if w.done and not w.hello and w.generation == epoch]
    # In a replacement's generation their own node asks for another start (see `_report_losses`).
    others = view.finished.items() if generation.mode != "replace" else ()
    return sorted(here) + sorted(
        rank
        for other, record in others
        if other != slot and other in view.exited
        for rank in generation.ranks_of(other)
        if rank not in record.checksums
    )


def report_dead(state: AgentState, generation: GenerationRecord, commands: list[Command]) -> AgentState:
    """By a node without a slot: the agents whose own machines say that they are gone. Of one that is merely silent to
    it those know better that train with it."""
    for other, owner in enumerate(generation.slots if state.lost_peers else ()):
        lost, known = state.lost_peers.get(owner.incarnation), state.view.failures.get(other)
        if lost is not None and lost.is_dead and (known is None or known.kind != "node"):
            failure = FailureRecord(
                "node", other, owner.incarnation, (), lost.evidence, state.node_id, is_dead=True, is_empty=True
            )  # fmt: skip
            state = _issue(state, commands, ("node", other), WriteFailure(generation.number, failure))
    return state


def _stop_and_go(
    state: AgentState, generation: GenerationRecord, commands: list[Command], now_s: float, left: int | None = None
) -> AgentState:
    """*left*: the slot that this node was drained from; its workers do not go on, but may have to hand over."""
    view, number = state.view, generation.number
    lost, slot = told_losses(view), generation.slot_of(state.incarnation)
    living = [w for w in state.workers.values() if w.alive and w.hello and not w.killed]
    group = _log_group(view, generation, slot)
    untold = tuple(sorted(w.local_rank for w in living if w.log_group != group))
    if untold:
        commands.append(SendLogGroup(untold, group))
        state = _mark(state, untold, log_group=group)
    # A worker that waits at its end is in no collective, and may yet be released: only a new generation calls it back.
    # Once the workers are released nothing is recovered any more.
    stop = [
        w
        for w in living
        if w.phase in INSIDE
        and not (w.released or view.released)
        and (number > w.current or (lost and w.phase == "running"))
    ]
    for ended in sorted({w.current for w in stop}):
        ranks = tuple(sorted(w.local_rank for w in stop if w.current == ended))
        commands.append(SendStop(ranks, ended, generation.why if number > ended else "a failure was reported"))
        # An end that was reached in the generation that is over counts no more: the worker says so again in the next.
        state = _mark(state, ranks, stop_sent=ended, stop_sent_s=now_s, finished=None)
    for w in [w for w in state.workers.values() if w.alive and not w.killed and w.deaf_for_s]:
        why = f"it hangs: it has taken no message for {w.deaf_for_s:g} s"
        commands.append(KillWorkers((w.local_rank,), why, graceful=False))
        state = _mark(state, (w.local_rank,), killed=True)
    hanging = [
        w.local_rank
        for w in state.workers.values()
        if w.phase == "stopping"
        and not (w.killed or state.paused)
        and now_s - w.stop_sent_s >= state.stop_deadline_s
    ]
    if hanging:
        why = f"could not be stopped within {state.stop_deadline_s:g} s (--stop-deadline)"
        commands.append(KillWorkers(tuple(hanging), why, graceful=False))
        state = _mark(state, hanging, killed=True)
    if lost or view.plan is None or view.plan.restart or view.store is None:
        return state
    if is_elastic(view.job) and not view.tracked:
        return state  # nothing is done that a late node's restart of all workers would undo
    epoch = generation.epoch if slot is None else generation.epoch_of(slot)
    ready = [
        w.local_rank
        for w in living
        if w.phase in OUTSIDE and w.current < number and w.generation >= epoch
    ]
    if left is not None and not set(Plan.from_json(view.plan.content).handovers) & set(generation.ranks_of(left)):
        return state
    if ready:
        commands.append((SendGo if left is None else SendLeave)(tuple(sorted(ready)), number))
        state = _mark(state, ready, current=number, report=None)
    return state


def _log_group(view: View, generation: GenerationRecord, slot: int | None) -> tuple[int, ...]:
    """The ranks of the slot's log group; () if it is alone."""
    group = view.log_group_of(slot) if slot is not None else ()
    return tuple(rank for one in group for rank in generation.ranks_of(one)) if len(group) > 1 else ()


def _pause(state: AgentState, slot: int, commands: list[Command]) -> AgentState:
    for ranks, marks, message in drain.messages(state.view, state.workers):
        commands.append(message)
        state = _mark(state, ranks, **marks)
    for name, write in drain.writes(state.view, slot, state.workers):
        state = _issue(state, commands, (name,), write)
    return state


def _keep(state: AgentState, generation: GenerationRecord, slot: int, commands: list[Command]) -> AgentState:
    """The job changes its size: say what is held here, and have it kept (see `resize`)."""
    view, number = state.view, generation.number
    if not generation.asks and state.kept is not None:
        # All start over: what was kept is of another run.
        commands.append(DropKept())
        return replace(state, kept=None)
    if generation.mode != "resize" or told_losses(view):
        return state
    reports = resize.held(generation, state.workers, state.kept) if view.plan is None else None
    if reports is not None and slot not in view.progress:
        state = _issue(state, commands, ("progress",), WriteProgress(number, slot, reports))
    keeper = resize.keeper(view, slot, state.workers, state.kept)
    if keeper is not None and keeper.phase == "stopped" and keeper.keeps < number:
        commands.append(SendKeep((keeper.local_rank,), number))
        state = _mark(state, (keeper.local_rank,), keeps=number, current=number, report=None)
    return state


def _report_progress(
    state: AgentState, generation: GenerationRecord, slot: int, commands: list[Command], leaves: bool = False
) -> AgentState:
    known = state.view.handovers if leaves else state.view.progress
    if generation.mode != "replace" or told_losses(state.view) or slot in known:
        return state
    reports: list[Mapping[str, Any]] = []
    for local_rank in range(generation.workers_of(slot)):
        worker = state.workers.get(local_rank)
        if worker is None or worker.generation < generation.epoch_of(slot):
            return state  # one that is being ended does not hold the state of the one that follows
        rank = _rank(generation, slot, worker)
        if worker.phase in ("started", "waiting"):
            reports.append({"rank": rank, "status": "fresh"})
        elif worker.phase == "stopped" and worker.report is not None:
            reports.append({**worker.report, "rank": rank})
        else:
            return state
    write = (WriteHandover if leaves else WriteProgress)(generation.number, slot, tuple(reports))
    return _issue(state, commands, ("progress",), write)


def _report_end(state: AgentState, generation: GenerationRecord, slot: int, commands: list[Command]) -> AgentState:
    workers = [state.workers.get(local_rank) for local_rank in range(generation.workers_of(slot))]
    if any(w is None or w.generation < generation.epoch_of(slot) for w in workers):
        return state  # the end of a process that is being restarted is not the end of its rank
    if told_losses(state.view) and not state.view.released:
        return state
    local = [w for w in workers if w is not None]
    number = generation.number
    if all(w.resumed == number for w in local):
        phases: dict[str, float] = {}
        for worker in local:
            merge_phases(phases, worker.phases_s)
        iteration = max(w.resumed_iteration for w in local)
        state = _issue(state, commands, ("resumed",), WriteResumed(number, slot, iteration, phases))
        if state.kept is not None:
            # All took part in an iteration: they hold what is in it.
            commands.append(DropKept())
            state = replace(state, kept=None)
        if slot in generation.handover:
            state = _issue(state, commands, ("taken",), WriteTaken(number, slot))
    found = [w.measured for w in local if w.measured_in == number and w.measured is not None]
    if len(found) == len(local):
        state = _measured(state, commands, WriteMeasured(number, slot, tuple(found)))
    if all(w.finished is not None or w.done for w in local):
        checksums = {_rank(generation, slot, w): dict(w.finished) for w in local if w.finished is not None}
        record = FinishedRecord(slot, state.incarnation, checksums)
        state = _issue(state, commands, ("finished",), WriteFinished(number, record))
    if state.view.released:
        waiting = tuple(w.local_rank for w in local if w.finished is not None and w.alive and not w.released)
        if waiting:
            commands.append(SendRelease(waiting))
            state = _mark(state, waiting, released=True)
    if all(w.done for w in local):
        state = _issue(state, commands, ("exited",), WriteExited(number, slot))
    return state


def _measured(state: AgentState, commands: list[Command], order: WriteMeasured) -> AgentState:
    """Once, and again when nothing is left to be measured."""
    known, is_all = state.view.profile, all(one.get("is_all", False) for one in order.ranks)
    if known is None or (is_all and not known.is_final):
        state = _issue(state, commands, ("measured", is_all), order)
    return state


def _forget_lost_spares(state: AgentState, commands: list[Command]) -> AgentState:
    generation, coordinator = state.view.generation, state.view.coordinator
    for node in state.view.nodes.values() if state.lost_peers else ():
        if generation is None:
            # Only the coordinator would see that it was forgotten, and come back; of the others the lease tells.
            may_be = coordinator is not None and coordinator.incarnation == node.incarnation
        else:
            may_be = generation.slot_of(node.incarnation) is None
            left = slot_left(generation, node.incarnation)
            if left is not None and left not in state.view.taken:
                # What it hands over may be the last copy, and it cannot say that it lives: of it, too, the lease tells.
                may_be = node.incarnation in state.lost_peers and state.lost_peers[node.incarnation].is_dead
        if node.incarnation in state.lost_peers and may_be:
            state = _issue(state, commands, ("spare", node.incarnation), ForgetSpare(node.node_id, node.incarnation))
    return state
