"""What an agent does next, from what it sees. Pure.

The agent's shell turns everything that happens into events; `on_event` folds an event into the state and `reconcile`
compares the state with what the records of the job ask for. `reconcile` is level-triggered: it never remembers that it
wanted something, only what was done, so an event that comes twice, late or merged with another leads to the same end.

    worker:  started --hello--> waiting --go--> running --stop--> stopping --report--> stopped --go--> running ...
             running --finished--> (release) --> exited

This module must never read a clock, touch a process, a socket or the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from swift_agent import keeping, leaving, rate
from swift_agent.isolation import pausing
from swift_agent.lifecycle_messages import (
    Command,
    DropKept,
    EndJob,
    Event,
    ForgetSpare,
    HelloReceived,
    HostStore,
    KillWorkers,
    LeaveJob,
    LookAgain,
    PauseWorkers,
    PeerDoubted,
    PeerLost,
    PlaceRead,
    PlaceReclaimed,
    RateTick,
    ReadPlace,
    Reclaim,
    Rejoin,
    ReportReceived,
    ResumeWorkers,
    SendGo,
    SendKeep,
    SendLeave,
    SendRelease,
    SendStop,
    StartWorkers,
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
    WorkerParked,
    WorkerPromised,
    WorkerResumed,
    WorkerStarted,
    WorkerUnfit,
    WriteExited,
    WriteFailure,
    WriteFinished,
    WriteHandover,
    WriteProgress,
    WriteResumed,
    WriteTaken,
    WriteTracked,
)
from swift_agent.timeline import merge_phases
from swift_recovery.plan import Plan
from swift_recovery.resize import FILE, Held
from swift_rendezvous.keys import (
    AS_LONG_AS_IT_ADVANCES,
    FailureRecord,
    FinishedRecord,
    GenerationRecord,
    ResultRecord,
    WorkerExit,
)
from swift_rendezvous.membership import absent, told_losses
from swift_rendezvous.resizing import is_elastic
from swift_rendezvous.view import View

RECLAIM = ("reclaim",)
# What was seen of a peer counts for so long; a write takes milliseconds. What is older has to be seen again: a node
# that was cut off for a moment must not accuse the others when it is back, nor a spare, hours later, when it gets a
# slot.
EVIDENCE_S = 0.5


@dataclass(frozen=True)
class Worker:
    """One local process and what is known of it.

    *generation*: in which it was started. *current*: the last generation it was told to enter, 0 before the first.
    *stopped*: the generation that it has left and reported on (== *current*: it waits). *resumed*: it trains in that
    one. *asked*, *promised_in*, *told*, *parked*: the generation in which that part of a drain was last done; *keeps*:
    that in which it was told to keep its state in a file. *holds*: it has the state of some iteration, whichever.
    *apart*: the last generation in which it could not be connected with the others.
    """

    local_rank: int
    generation: int
    pid: int = 0
    hello: bool = False
    current: int = 0
    stop_sent: int = 0
    stop_sent_s: float = 0.0
    stopped: int = 0
    report: Mapping[str, Any] | None = None
    resumed: int = 0
    resumed_iteration: int = 0
    holds: bool = False
    phases_s: Mapping[str, float] = field(default_factory=dict)
    finished: Mapping[str, Any] | None = None
    asked: int = 0
    promised_in: int = 0
    promised: int = 0
    told: int = 0
    parked: int = 0
    keeps: int = 0
    released: bool = False
    unfit: str = ""
    deaf_for_s: float = 0.0
    apart: int = 0
    apart_why: str = ""
    is_hopeless: bool = False
    killed: bool = False
    exit: WorkerExit | None = None

    @property
    def alive(self) -> bool:
        return self.exit is None

    @property
    def done(self) -> bool:
        return self.exit is not None and self.exit.exit_code == 0


@dataclass(frozen=True)
class Suspicion:
    """What was seen of a peer. *seen_s*: when, on the clock of `on_event`."""

    evidence: str
    is_dead: bool
    seen_s: float


@dataclass(frozen=True)
class AgentState:
    """All that `reconcile` looks at. *workers* is keyed by local rank."""

    node_id: str
    incarnation: str
    max_restarts: int = 0
    stop_deadline_s: float = 10.0
    view: View = field(default_factory=View)
    workers: Mapping[int, Worker] = field(default_factory=dict)
    lost_peers: Mapping[str, Suspicion] = field(default_factory=dict)
    """By incarnation."""
    restarts_used: int = 0
    restarts_counted_in: int = 0
    store_started: int = 0
    paused: bool = False
    """Its workers stand still: another node may have their places."""
    kept: Held | None = None
    """What a file of this node has, for a change of the job's size."""
    rate: rate.Meter = field(default_factory=rate.Meter)
    issued: frozenset[tuple[Any, ...]] = frozenset()
    """Writes and messages of the current generation that are on their way."""


@dataclass(frozen=True)
class Step:
    """The state after an event, and what has to be done now."""

    state: AgentState
    commands: tuple[Command, ...] = ()


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
    # Whoever has rank 0 keeps an eye on the speed of the job.
    trains = first.alive and first.hello and first.current == generation.number and not step.state.paused
    meter, commands = rate.watch(step.state.rate, event, first.pid, generation.number, trains, now_s)
    return Step(replace(step.state, rate=meter), (*step.commands, *commands))


def _resumed(state: AgentState, now_s: float) -> AgentState:
    """Who was to stop had no time to do so while it stood still."""
    stopping = [w.local_rank for w in state.workers.values() if w.alive and w.stop_sent and w.stopped != w.current]
    return _mark(replace(state, paused=False), stopping, stop_sent_s=now_s)


def _has_place(state: AgentState, revision: int) -> bool:
    """What is known here is what the job is in (*revision*: of the record of its generation), and it wants this node's
    workers."""
    generation = state.view.generation
    if revision != state.view.generation_revision:
        return False
    if generation is None or generation.slot_of(state.incarnation) is not None:
        return True
    return leaving.slot_left(generation, state.incarnation) is not None


def _fold(state: AgentState, event: Event, now_s: float) -> AgentState:
    match event:
        case ViewChanged(view):
            if view.revision < state.view.revision:
                return state  # seen by this node's former incarnation, and delivered late
            old = state.view
            issued = state.issued if view.number == old.number else frozenset()
            if old.tracked and not view.tracked:
                issued -= {("tracked",)}  # somebody removed it
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
        case WorkerHolds(local_rank, pid):
            return _update(state, local_rank, pid, holds=True)
        case WorkerFinished(local_rank, pid, generation, end):
            worker = state.workers.get(local_rank)
            if worker is None or generation != worker.current or worker.stop_sent == worker.current:
                return state
            return _update(state, local_rank, pid, finished=end)
        case WorkerPromised(local_rank, pid, generation, iteration):
            return _update(state, local_rank, pid, promised_in=generation, promised=iteration)
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
        case Tick() | PlaceRead() | RateTick() | WorkerAt():
            return state


def _age(state: AgentState, commands: list[Command], now_s: float) -> AgentState:
    """Drop what was seen too long ago, and told nobody: by a node without a slot, in an earlier generation, or while
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
    """Compare what is with what the records ask for."""
    view = state.view
    if view.result is not None:
        return _once(state, ("end",), EndJob())
    generation = view.generation
    registered = _is_registered(state, view)
    slot = generation.slot_of(state.incarnation) if generation is not None else None
    # Its lease is gone, but nobody has its slot: even if it was told to leave, it comes back first.
    lapsed = state.node_id not in view.nodes and state.incarnation in {o.incarnation for o in absent(view).values()}
    if view.job is None and registered:
        why = f"the record of the job was removed by somebody; {state.node_id} cannot go on without it"
        return _once(state, ("leave",), LeaveJob(ResultRecord("stopped", why)))
    if not lapsed and (slot is None or not registered):
        why = leaving.reason_to_go(view, state.node_id, state.incarnation, state.workers)
        if why:
            return _once(state, ("leave",), LeaveJob(ResultRecord("succeeded", why)))
    commands: list[Command] = []
    state = _age(state, commands, now_s)
    # Before the first generation all are spares, the coordinator as well: nobody else would notice that it is gone.
    state = _forget_lost_spares(state, commands)
    if lapsed:
        return _once(state, RECLAIM, Reclaim(), commands)
    if not registered and (generation is not None or view.revision):  # without either nothing has been seen yet
        # Nobody can choose a node without a record, not even for its own slot.
        why = f"the record of {state.node_id} was removed: the other nodes took it for lost"
        return _once(state, ("rejoin",), Rejoin(why), commands)
    if generation is None:
        return Step(state, tuple(commands))
    if slot is None:
        left = leaving.slot_left(generation, state.incarnation)
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
    state = _count_restart(state, generation, slot)
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


def _is_registered(state: AgentState, view: View) -> bool:
    mine = view.nodes.get(state.node_id)
    return mine is not None and mine.incarnation == state.incarnation


def _count_restart(state: AgentState, generation: GenerationRecord, slot: int) -> AgentState:
    """A failure of a local worker uses up one of --max-restarts; a node that was lost elsewhere does not."""
    if generation.number == state.restarts_counted_in:
        return state
    failed = slot in generation.lost and any(not w.alive and not w.done for w in state.workers.values())
    unfit = generation.mode == "restart" and any(w.unfit for w in state.workers.values())
    used = state.restarts_used + (1 if failed or unfit else 0)
    return replace(state, restarts_used=used, restarts_counted_in=generation.number)


def _host_store(state: AgentState, generation: GenerationRecord, slot: int, commands: list[Command]) -> AgentState:
    if generation.store_slot != slot or state.store_started >= generation.number:
        return state
    commands.append(HostStore(generation.number))
    return replace(state, store_started=generation.number)


def _processes(state: AgentState, generation: GenerationRecord, slot: int, commands: list[Command]) -> AgentState:
    """Every local rank has a process that is not older than the epoch; a lost one is replaced once that is agreed."""
    outdated = [w for w in state.workers.values() if w.alive and w.generation < generation.epoch]
    if not keeping.may_begin(state.view, slot, state.workers, state.kept):
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
        if worker is None or worker.generation < generation.epoch:
            missing.append(local_rank)
        elif not worker.alive and not worker.done:
            agreed = worker.generation < generation.number and local_rank in generation.lost.get(slot, ())
            if agreed:
                missing.append(local_rank)
    warm = generation.asks
    # A cold process gets the store's address in its environment; a warm one is told when it asks.
    if missing and (warm or state.view.store is not None):
        commands.append(StartWorkers(tuple(missing), generation.number, warm))
        for local_rank in missing:
            state = _with(state, Worker(local_rank, generation.number))
    return state


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
    dead = [w for w in state.workers.values() if not w.alive and not w.done and w.generation >= generation.epoch]
    dead = [w for w in dead if w.generation == generation.number or w.local_rank not in generation.lost.get(slot, ())]
    keeper = keeping.keeper(view, slot, state.workers, state.kept)
    if keeper is not None and (not keeper.alive or keeper.unfit):
        dead.append(keeper)  # before it had kept what only it might hold
    if dead:
        ranks = tuple(sorted(w.local_rank for w in dead))
        exits = tuple(w.exit for w in sorted(dead, key=lambda w: w.local_rank) if w.exit is not None)
        evidence = "; ".join([describe_exit(exit_) for exit_ in exits] + [w.unfit for w in dead if w.unfit and w.alive])
        failure = FailureRecord("workers", slot, state.incarnation, ranks, evidence, state.node_id, left, exits)
        return _issue(state, commands, ("workers", ranks), WriteFailure(generation.number, failure))
    unfit = [w for w in state.workers.values() if w.alive and w.unfit and w.generation >= generation.epoch]
    if unfit:
        evidence = "; ".join(f"rank {_rank(generation, slot, w)}: {w.unfit}" for w in unfit)
        is_final = any(w.is_hopeless for w in unfit)
        failure = FailureRecord(
            "restart", slot, state.incarnation, (), evidence, state.node_id, left, is_final=is_final
        )  # fmt: skip
        return _issue(state, commands, ("restart",), WriteFailure(generation.number, failure))
    gone: list[Worker] = []
    if generation.mode == "replace" and not view.released:
        # It left before the others had finished, with state that nobody can ask for any more; or it was to replace
        # another and never came to that.
        done = [w for w in state.workers.values() if w.done]
        gone = [w for w in done if (view.plan is None if w.hello else w.generation > generation.epoch)]
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


def _stop_and_go(
    state: AgentState, generation: GenerationRecord, commands: list[Command], now_s: float, left: int | None = None
) -> AgentState:
    """*left*: the slot that this node was drained from; its workers do not go on, but may have to hand over."""
    view, number = state.view, generation.number
    lost = told_losses(view)
    living = [w for w in state.workers.values() if w.alive and w.hello and not w.killed]
    # Who waits at its end stands in no collective, and may yet be released: only a new generation calls it back. Once
    # the workers are released nothing is recovered any more.
    stop = [
        w
        for w in living
        if w.current
        and w.stop_sent < w.current
        and not w.released
        and not view.released
        and (number > w.current or (lost and w.finished is None))
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
        if w.alive
        and not w.killed
        and not state.paused
        and w.current
        and w.stop_sent == w.current
        and w.stopped != w.current
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
    ready = [
        w.local_rank
        for w in living
        if w.current < number and (w.current == 0 or w.stopped == w.current) and w.generation >= generation.epoch
    ]
    if left is not None and not set(Plan.from_json(view.plan.content).handovers) & set(generation.ranks_of(left)):
        return state
    if ready:
        commands.append((SendGo if left is None else SendLeave)(tuple(sorted(ready)), number))
        state = _mark(state, ready, current=number, report=None)
    return state


def _pause(state: AgentState, slot: int, commands: list[Command]) -> AgentState:
    for ranks, marks, message in leaving.messages(state.view, state.workers):
        commands.append(message)
        state = _mark(state, ranks, **marks)
    for name, write in leaving.writes(state.view, slot, state.workers):
        state = _issue(state, commands, (name,), write)
    return state


def _keep(state: AgentState, generation: GenerationRecord, slot: int, commands: list[Command]) -> AgentState:
    """The job changes its size: say what is held here, and have it kept (see `keeping`)."""
    view, number = state.view, generation.number
    if not generation.asks and state.kept is not None:
        # All begin anew: what was kept is of another run.
        commands.append(DropKept())
        return replace(state, kept=None)
    if generation.mode != "resize" or told_losses(view):
        return state
    reports = keeping.held(generation, state.workers, state.kept) if view.plan is None else None
    if reports is not None and slot not in view.progress:
        state = _issue(state, commands, ("progress",), WriteProgress(number, slot, reports))
    keeper = keeping.keeper(view, slot, state.workers, state.kept)
    if keeper is not None and keeper.alive and keeper.keeps < number and keeper.stopped == keeper.current:
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
        if worker is None or not worker.alive:
            return state
        if worker.generation < generation.epoch:
            return state  # it is being ended: what it holds is not the state of the one that follows
        rank = _rank(generation, slot, worker)
        if worker.current == 0:
            reports.append({"rank": rank, "status": "fresh"})
        elif worker.stopped == worker.current and worker.report is not None:
            reports.append({**worker.report, "rank": rank})
        else:
            return state
    write = (WriteHandover if leaves else WriteProgress)(generation.number, slot, tuple(reports))
    return _issue(state, commands, ("progress",), write)


def _report_end(state: AgentState, generation: GenerationRecord, slot: int, commands: list[Command]) -> AgentState:
    workers = [state.workers.get(local_rank) for local_rank in range(generation.workers_of(slot))]
    if any(w is None or w.generation < generation.epoch for w in workers):
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


def _forget_lost_spares(state: AgentState, commands: list[Command]) -> AgentState:
    generation, coordinator = state.view.generation, state.view.coordinator
    for node in state.view.nodes.values() if state.lost_peers else ():
        if generation is None:
            # Only the coordinator would see that it was forgotten, and come back; of the others the lease tells.
            may_be = coordinator is not None and coordinator.incarnation == node.incarnation
        else:
            may_be = generation.slot_of(node.incarnation) is None
        if node.incarnation in state.lost_peers and may_be:
            state = _issue(state, commands, ("spare", node.incarnation), ForgetSpare(node.node_id, node.incarnation))
    return state


def describe_exit(exit_: WorkerExit) -> str:
    """One clause for people: which rank, where, and how."""
    if exit_.pid == 0:
        return f"rank {exit_.rank} on {exit_.host}: {exit_.message}"
    how = f"killed by signal {-exit_.exit_code}" if exit_.exit_code < 0 else f"exited with code {exit_.exit_code}"
    return f"rank {exit_.rank} on {exit_.host} (pid {exit_.pid}) {how}"


def _rank(generation: GenerationRecord, slot: int, worker: Worker) -> int:
    return generation.first_rank(slot) + worker.local_rank


def _with(state: AgentState, worker: Worker) -> AgentState:
    return replace(state, workers={**state.workers, worker.local_rank: worker})


def _mark(state: AgentState, local_ranks: Any, **changes: Any) -> AgentState:
    changed = {rank: replace(state.workers[rank], **changes) for rank in local_ranks}
    return replace(state, workers={**state.workers, **changed})


def _update(state: AgentState, local_rank: int, pid: int, **changes: Any) -> AgentState:
    worker = state.workers.get(local_rank)
    # pid 0: started, but its process id is not known yet.
    if worker is None or worker.pid not in (pid, 0) or not worker.alive:
        return state
    return _with(state, replace(worker, pid=pid, **changes))


def _issue(state: AgentState, commands: list[Command], key: tuple[Any, ...], command: Command) -> AgentState:
    """Order a write once per generation; the shell repeats it until it is stored or outdated."""
    if key in state.issued:
        return state
    commands.append(command)
    return replace(state, issued=state.issued | {key})


def _once(state: AgentState, key: tuple[Any, ...], command: Command, commands: list[Command] | None = None) -> Step:
    collected = list(commands or [])
    state = _issue(state, collected, key, command)
    return Step(state, tuple(collected))


WorkerPhase = Literal["started", "waiting", "running", "stopping", "stopped", "finished", "exited"]


def phase_of(worker: Worker) -> WorkerPhase:
    """The worker's place in the picture at the top, for status lines."""
    if not worker.alive:
        return "exited"
    if not worker.hello:
        return "started"
    if worker.current == 0:
        return "waiting"
    if worker.stop_sent == worker.current:
        return "stopped" if worker.stopped == worker.current else "stopping"
    return "finished" if worker.finished is not None else "running"
