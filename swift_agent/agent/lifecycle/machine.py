"""What an agent does next, from what it sees. Pure.

The agent's shell turns everything that happens into events; `on_event` folds an event into the state and `reconcile`
compares the state with what the records of the job ask for. `reconcile` is level-triggered: it never remembers that it
wanted something, only what was done, so an event that comes twice, late or merged with another leads to the same end.

    worker:  started --hello--> waiting --go--> running --stop--> stopping --report--> stopped --go--> running ...
             running --finished--> (release) --> exited

This module must never read a clock, touch a process, a socket or the store.
"""

from __future__ import annotations

from dataclasses import replace

from swift_agent.agent.lifecycle import drain, helping, rate
from swift_agent.agent.lifecycle.commands import (
    Command,
    EndJob,
    LeaveJob,
    LookAgain,
    PauseWorkers,
    ReadPlace,
    Reclaim,
    Rejoin,
    ResumeWorkers,
    TellNotice,
    WriteTracked,
)
from swift_agent.agent.lifecycle.events import (
    Event,
    HelloReceived,
    HelperExited,
    HelperStarted,
    HelperUnfit,
    HelperWaits,
    Noticed,
    PeerDoubted,
    PeerLost,
    PlaceRead,
    PlaceReclaimed,
    RateTick,
    ReportReceived,
    StoodStill,
    Tick,
    ViewChanged,
    WorkerApart,
    WorkerAt,
    WorkerDeaf,
    WorkerExited,
    WorkerFinished,
    WorkerHolds,
    WorkerKept,
    WorkerMeasured,
    WorkerParked,
    WorkerPromised,
    WorkerResumed,
    WorkerStarted,
    WorkerUnfit,
)
from swift_agent.agent.lifecycle.isolation import pausing
from swift_agent.agent.lifecycle.state import (
    INSIDE,
    RECLAIM,
    AgentState,
    Step,
    Suspicion,
    _is_registered,
    _issue,
    _mark,
    _once,
    _update,
    _with,
    describe_exit,
    is_spare,
)
from swift_agent.agent.lifecycle.steps import (
    _count_restart,
    _forget_lost_spares,
    _forget_restarts,
    _host_store,
    _keep,
    _pause,
    _processes,
    _report_end,
    _report_losses,
    _report_progress,
    _stop_and_go,
    report_dead,
)
from swift_recovery.planning.resize import FILE, Held
from swift_rendezvous.roster.draining import slot_left
from swift_rendezvous.roster.losses import absentees
from swift_rendezvous.roster.records import (
    AS_LONG_AS_IT_ADVANCES,
    ResultRecord,
)
from swift_rendezvous.roster.view import View

# What was seen of a peer counts for so long; a write takes milliseconds. What is older has to be seen again: a node
# that was cut off for a moment must not accuse the others when it is back, nor a spare, hours later, when it gets a
# slot.
EVIDENCE_S = 0.5


def on_event(state: AgentState, event: Event, *, now_s: float) -> Step:
    """Fold *event* into *state* and say what to do. Events about a process that was replaced meanwhile are ignored."""
    state = _fold(state, event, now_s)
    changed: tuple[Command, ...] = ()
    if isinstance(event, Tick):
        match pausing(state.paused, event.holds, event.is_away):
            case "pause":
                state, changed = replace(state, paused=True), (PauseWorkers(event.why),)
            case "ask":
                changed = (ReadPlace(),)
            case "resume":
                state, changed = _resumed(state, now_s), (ResumeWorkers(),)
    elif isinstance(event, PlaceRead) and state.paused and _has_place(state, event.revision):
        state, changed = _resumed(state, now_s), (ResumeWorkers(),)
    step = reconcile(state, now_s=now_s)
    step = Step(step.state, (*changed, *step.commands))
    generation, first = step.state.view.generation, step.state.workers.get(0)
    if generation is None or first is None or generation.slot_of(state.incarnation) != 0:
        return step
    # The node of rank 0 keeps an eye on the speed of the job.
    trains = first.alive and first.hello and first.current == generation.number and not step.state.paused
    meter, commands = rate.watch(step.state.rate, event, first.pid, generation.number, trains, now_s)
    return Step(replace(step.state, rate=meter), (*step.commands, *commands))


def _resumed(state: AgentState, now_s: float) -> AgentState:
    """A worker that was to stop had no time to do so while it stood still."""
    stopping = [w.local_rank for w in state.workers.values() if w.phase == "stopping"]
    return _mark(replace(state, paused=False), stopping, stop_sent_s=now_s)


def _has_place(state: AgentState, revision: int) -> bool:
    """What is known here is what the job is in (*revision*: of the record of its generation), and it wants this node's
    workers, or has given it none."""
    generation = state.view.generation
    if revision != state.view.generation_revision:
        return False
    if generation is None or generation.slot_of(state.incarnation) is not None or is_spare(state):
        return True
    return slot_left(generation, state.incarnation) is not None


def _fold(state: AgentState, event: Event, now_s: float) -> AgentState:
    match event:
        case ViewChanged(view):
            if view.revision < state.view.revision:
                return state  # seen by this node's former incarnation, and delivered late
            old = state.view
            issued = state.issued if view.number == old.number else frozenset()
            if old.tracked and not view.tracked:
                issued -= {("tracked",)}  # its record was removed
            if _is_registered(state, view):
                issued -= {RECLAIM}  # the next loss is another one
            state = replace(state, view=view, issued=issued)
            return _written_again(state) if _has_changed_hands(old, view) else state
        case WorkerStarted(local_rank, generation, pid):
            worker = state.workers.get(local_rank)
            if worker is None or worker.generation != generation:
                return state
            return _with(state, replace(worker, pid=pid))
        case HelloReceived(local_rank, pid):
            return _update(state, local_rank, pid, hello=True)
        case ReportReceived(local_rank, pid, generation, report):
            worker = state.workers.get(local_rank)
            if worker is None or generation != worker.current:
                return state
            return _update(state, local_rank, pid, stopped=generation, report=report, finished=None)
        case WorkerResumed(local_rank, pid, generation, iteration, phases_s):
            what = {"resumed": generation, "resumed_iteration": iteration, "phases_s": phases_s, "holds": True}
            return _update(state, local_rank, pid, **what)
        case WorkerMeasured(local_rank, pid, generation, measured):
            return _update(state, local_rank, pid, measured_in=generation, measured=measured)
        case WorkerHolds(local_rank, pid):
            return _update(state, local_rank, pid, holds=True)
        case WorkerFinished(local_rank, pid, generation, end):
            worker = state.workers.get(local_rank)
            if worker is None or generation != worker.current or worker.phase not in INSIDE:
                return state
            return _update(state, local_rank, pid, finished=end)
        case WorkerPromised(local_rank, pid, generation, iteration, saves):
            return _update(state, local_rank, pid, promised_in=generation, promised=iteration, saves=saves)
        case WorkerParked(local_rank, pid, generation):
            return _update(state, local_rank, pid, parked=generation)
        case WorkerKept(local_rank, pid, iteration, sections):
            return replace(_update(state, local_rank, pid), kept=Held(FILE, iteration, sections))
        case WorkerDeaf(local_rank, pid, for_s):
            return _update(state, local_rank, pid, deaf_for_s=for_s)
        case WorkerApart(local_rank, pid, generation, why):
            return _update(state, local_rank, pid, apart=generation, apart_why=why)
        case WorkerUnfit(local_rank, pid, why, is_hopeless):
            return _update(state, local_rank, pid, unfit=why, is_hopeless=is_hopeless)
        case WorkerExited(exit_):
            return _update(state, exit_.local_rank, exit_.pid, exit=exit_)
        case PeerLost(incarnation, evidence, is_dead, age_s):
            seen = Suspicion(evidence, is_dead, now_s - age_s)
            return replace(state, lost_peers={**state.lost_peers, incarnation: seen})
        case PeerDoubted(incarnation):
            return _doubt(state, incarnation)
        case PlaceReclaimed():
            return _written_again(state)
        case StoodStill(for_s):
            later = {rank: replace(w, stop_sent_s=w.stop_sent_s + for_s) for rank, w in state.workers.items()}
            return replace(state, workers=later)
        case HelperStarted() | HelperWaits() | HelperUnfit() | HelperExited():
            return helping.fold(state, event)
        case Noticed():
            return replace(state, notice=event)
        case Tick() | PlaceRead() | RateTick() | WorkerAt():
            return state


def _age(state: AgentState, commands: list[Command], now_s: float) -> AgentState:
    """Drop what was seen too long ago, and never told: by a node without a slot, in an earlier generation, or while
    the store was away."""
    told = {failure.incarnation for failure in state.view.failures.values() if failure.kind == "node"}
    for incarnation, seen in state.lost_peers.items():
        if now_s - seen.seen_s > EVIDENCE_S and incarnation not in told:
            state = _doubt(state, incarnation)
            commands.append(LookAgain(incarnation))
    return state


def _has_changed_hands(old: View, new: View) -> bool:
    """Somebody wrote into the records of the generation, or it was restored after that: what this node wrote may be
    gone, and what it was about to write was refused."""
    if new.number == old.number and new.generation_revision != old.generation_revision:
        return True
    return any(old.damaged.get(name) != what for name, what in new.damaged.items())


def _written_again(state: AgentState) -> AgentState:
    """Writes are idempotent, but for the store: its address is not told twice."""
    hosting = state.view.store is None and state.view.number == state.store_started
    started = state.store_started - 1 if hosting else state.store_started
    return replace(state, issued=state.issued & {RECLAIM}, store_started=started)


def _doubt(state: AgentState, incarnation: str) -> AgentState:
    generation = state.view.generation
    slot = generation.slot_of(incarnation) if generation is not None else None
    lost = {peer: what for peer, what in state.lost_peers.items() if peer != incarnation}
    return replace(state, lost_peers=lost, issued=state.issued - {("node", slot), ("spare", incarnation)})


def reconcile(state: AgentState, *, now_s: float) -> Step:
    """Compare what is with what the records ask for: of helpers first, with which workers have nothing to do."""
    state, of_helpers = helping.reconcile(state)
    step = _reconcile(state, now_s)
    return Step(step.state, (*of_helpers, *step.commands))


def _reconcile(state: AgentState, now_s: float) -> Step:
    view = state.view
    if view.result is not None:
        return _once(state, ("end",), EndJob())
    generation = view.generation
    registered = _is_registered(state, view)
    slot = generation.slot_of(state.incarnation) if generation is not None else None
    # Its lease is gone, but no other has its slot, or what it hands over: even if it was told to leave, it comes back
    # first.
    lapsed = state.node_id not in view.nodes and state.incarnation in {o.incarnation for o in absentees(view)}
    if view.job is None and registered:
        why = f"the record of the job was removed by somebody; {state.node_id} cannot go on without it"
        return _once(state, ("leave",), LeaveJob(ResultRecord("stopped", why)))
    if not lapsed and (slot is None or not registered):
        why = drain.reason_to_go(view, state.node_id, state.incarnation, state.workers)
        if why:
            end = ResultRecord("succeeded", why, cause="drained")
            if state.notice is not None:
                end = ResultRecord("stopped", why, cause="preempted")
            return _once(state, ("leave",), LeaveJob(end))
    commands: list[Command] = []
    notice = state.notice
    if notice is not None:
        last = drain.end_of_notice(view, state.node_id, state.incarnation, notice, now_s)
        if last:
            for command in last:
                state = _issue(state, commands, ("last", type(command)), command)
            return Step(state, tuple(commands))
        if not drain.is_told(view, state.node_id, state.incarnation):
            state = _issue(state, commands, ("notice",), TellNotice(notice.signal, notice.grace_s))
    state = _forget_restarts(_age(state, commands, now_s), now_s)
    # Before the first generation all are spares, the coordinator as well: no other would notice that it is gone.
    state = _forget_lost_spares(state, commands)
    if lapsed:
        return _once(state, RECLAIM, Reclaim(), commands)
    if not registered and (generation is not None or view.revision):  # without either nothing has been seen yet
        # A node without a record cannot be chosen, not even for its own slot.
        why = f"the record of {state.node_id} was removed: the other nodes took it for lost"
        return _once(state, ("rejoin",), Rejoin(why), commands)
    if generation is None:
        return Step(state, tuple(commands))
    if slot is None:
        state = report_dead(state, generation, commands)
        left = slot_left(generation, state.incarnation)
        if left is not None:
            state = _stop_and_go(state, generation, commands, now_s, left)
            state = _report_progress(state, generation, left, commands, leaves=True)
            return Step(state, tuple(commands))
        if state.workers:
            why = f"generation {generation.number} gave the slot of {state.node_id} to another node"
            failed = tuple(w.exit for w in state.workers.values() if w.exit and w.exit.exit_code and not w.killed)
            if failed and state.restarts_used >= state.max_restarts != AS_LONG_AS_IT_ADVANCES:
                # Coming back as a spare, it would be asked to fail again, and the next node as well, for ever.
                why = f"{why}: {'; '.join(map(describe_exit, failed))}, and no restart is left (--max-restarts)"
                return _once(state, ("leave",), LeaveJob(ResultRecord("failed", why, failed)), commands)
            return _once(state, ("rejoin",), Rejoin(why), commands)
        return Step(state, tuple(commands))
    state = _count_restart(state, generation, slot, now_s)
    if any(worker.hello for worker in state.workers.values()) and not view.tracked:
        state = _issue(state, commands, ("tracked",), WriteTracked())
    state = _host_store(state, generation, slot, commands)
    state = _processes(state, generation, slot, commands)
    state = _report_losses(state, generation, slot, commands)
    state = _stop_and_go(state, generation, commands, now_s)
    state = _pause(state, slot, commands)
    state = _report_progress(state, generation, slot, commands)
    state = _keep(state, generation, slot, commands)
    state = _report_end(state, generation, slot, commands)
    return Step(state, tuple(commands))


