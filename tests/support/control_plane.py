"""A whole job in virtual time: real lifecycles, coordinators, plans and records; only processes and the wire are
played.

Everything that could happen next is an action; a seeded walk picks one at a time, so any two things happen in any
order: a view comes late, a write waits, a message overtakes an exit. Every command is checked the moment it is given.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from swift_agent.agent import transactions
from swift_agent.agent.lifecycle import commands, events, state
from swift_agent.agent.lifecycle import events as msg
from swift_agent.agent.lifecycle import machine as lc
from swift_agent.agent.lifecycle.planning import plan_generation
from swift_recovery.planning.plan import Plan
from swift_recovery.planning.reports import ranges_of
from swift_rendezvous.codec import decode, encode
from swift_rendezvous.node.coordinator import Coordinator
from swift_rendezvous.node.registration import JobOver, enter_job
from swift_rendezvous.node.watcher import Scope, followed_before, knows_coordinator, scope_of
from swift_rendezvous.roster.decision import Rules
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.losses import told_losses
from swift_rendezvous.roster.records import (
    ExitedRecord,
    GenerationRecord,
    JobRecord,
    NodeRecord,
    ParkedRecord,
    PositionRecord,
    ProgressRecord,
    ResultRecord,
    ResumedRecord,
    StoreRecord,
    WorkerExit,
)
from swift_rendezvous.roster.view import Change, View, apply, apply_all
from swift_rendezvous.store.kv import Compare, Op, Put
from tests.support.memory_store import MemoryStore

MAX_STEPS = 6000
STOP_DEADLINE_S = 5.0

Action = Callable[[], None]


@dataclass(eq=False)
class Proc:
    """A worker process as it is, which is more than its agent knows."""

    node: SimNode
    local_rank: int
    rank: int
    generation: int
    pid: int
    alive: bool = True
    reaped: bool = False
    dying: int = 0
    exit_code: int = 0
    hello: bool = False
    hung: bool = False
    unfit: bool = False
    has_kept: bool = False
    """It has kept its state in a file, and waits for its end."""
    inbox: deque[tuple[Any, ...]] = field(default_factory=deque)
    outbox: deque[events.Event] = field(default_factory=deque)
    go: int = 0
    told: int = 0
    plan: Plan | None = None
    entered: int = 0
    live: int = 0
    verified: int = 0
    stopped: int = 0
    status: str = "fresh"
    iteration: int = 0
    finished_in: int = 0
    released: bool = False
    asked: int = 0
    promised: int = 0
    boundary: int | None = None
    parked: int = 0
    keeps: Plan | None = None

    @property
    def held(self) -> bool:
        """It begins no iteration; nor does it reach its end."""
        at = self.promised if self.boundary is None else self.boundary
        return self.asked == self.entered and self.iteration >= at

    def report(self) -> dict[str, Any]:
        replicas = ranges_of(range(self.node.sim.worlds[self.generation])) if self.status == "holding" else ""
        return {"rank": self.rank, "status": self.status, "iteration": self.iteration, "replicas": replicas,
                "sections": 0}


@dataclass(eq=False)
class HelperProc:
    """*pid*: 0 until its process is there. It repeats nothing: whatever it does must not matter."""

    local_rank: int
    generation: int
    pid: int = 0
    hello: bool = False
    went: bool = False
    dying: bool = False


class SimNode:
    """One agent: its lifecycle state, its coordinator, its processes, and what is on its way to and from it."""

    def __init__(self, sim: Sim, name: str, life: int) -> None:
        self.sim, self.name, self.life = sim, name, life
        self.dead = self.ended = False
        self.files: set[int] = set()
        self.stale: list[View] = []
        self.procs: list[Proc] = []
        self.helpers: list[HelperProc] = []
        self.known_job: int | None = None
        self.join()

    def join(self) -> None:
        sim = self.sim
        self.record = NodeRecord(self.name, f"{self.name}.{self.life}", "127.0.0.1", 1, sim.num_workers, "c")
        entry = enter_job(sim.store, sim.keys, sim.job, self.record, 5, self.known_job)
        self.lease, self.known_job = entry.lease, entry.job
        sim.sync()
        self.state = state.AgentState(self.name, self.record.incarnation, 1000, STOP_DEADLINE_S)
        self.coordinator = Coordinator(
            sim.store, sim.keys, self.record, self.lease.id, plan_generation, Rules(1e6, last_call_s=0.0), sim.say)
        self.writes: deque[tuple[str, list[Compare], list[Op], Callable[[], bool]]] = deque()
        self.orders: list[tuple[int, int]] = []  # warm starts on their way: local rank, generation
        self.peers_lost: list[events.PeerLost] = []
        self.given: set[tuple[Any, ...]] = set()
        self.scope = Scope.FORMING
        self.list_job()
        self.dirty = True
        self.event(events.ViewChanged(self.view))

    # ---- events and commands ----

    def event(self, event: events.Event) -> None:
        if self.dead or self.ended:
            return
        step = lc.on_event(self.state, event, now_s=self.sim.now_s)
        again = lc.reconcile(step.state, now_s=self.sim.now_s)
        assert again.commands == (), f"told twice: {again.commands} after {event}"
        self.state = step.state
        for command in step.commands:
            self.execute(command)

    def list_job(self) -> None:
        sim = self.sim
        sim.sync()
        before = followed_before(sim.keys, max(self.scope, Scope.MEMBER))
        listing = [Change(kv.key, kv.value, kv.mod_revision, kv.create_revision)
                   for kv in sim.store.get_prefix(sim.keys.prefix, before=before)[0]]
        self.view = apply_all(View(), sim.keys, listing)
        self.cursor = len(sim.history)
        wanted = scope_of(self.view, self.record.incarnation)
        if wanted > max(self.scope, Scope.MEMBER):
            self.scope = wanted
            self.list_job()
        self.scope = max(self.scope, wanted)

    def deliver_view(self) -> None:
        """As `JobWatcher`: everybody sees what it needs, and lists the job when that becomes more."""
        before = followed_before(self.sim.keys, self.scope)
        for change in self.sim.history[self.cursor]:
            if before is None or change.key < before:
                self.view = apply(self.view, self.sim.keys, change)
        self.cursor += 1
        wanted = scope_of(self.view, self.record.incarnation)
        if wanted > self.scope or (self.scope is Scope.FORMING and not knows_coordinator(self.view)):
            self.scope = max(self.scope, wanted)
            self.list_job()
        self.dirty = True
        self.event(events.ViewChanged(self.view))

    def coordinate(self) -> None:
        self.dirty = False
        self.coordinator._step(self.view)
        self.sim.sync()

    def proc(self, local_rank: int) -> Proc | None:
        living = [p for p in self.procs if p.local_rank == local_rank and not p.reaped]
        assert len(living) <= 1, f"{self.name}: two processes for local rank {local_rank}"
        return living[0] if living else None

    def once(self, *key: Any) -> None:
        assert key not in self.given, f"{self.name} was told twice: {key}"
        self.given.add(key)

    def execute(self, command: commands.Command) -> None:
        sim, keys = self.sim, self.sim.keys
        generation = self.state.view.generation
        match command:
            case commands.StartWorkers(local_ranks, number, warm):
                assert generation is not None and number == generation.number
                for local_rank in local_ranks:
                    self.once("start", number, local_rank)
                    assert self.proc(local_rank) is None, "started beside a process that lives"
                    assert all(order[0] != local_rank for order in self.orders)
                    if warm:
                        self.orders.append((local_rank, number))
                    else:
                        self.started(local_rank, number)
            case commands.KillWorkers(local_ranks, _, graceful):
                for local_rank in local_ranks:
                    proc = self.proc(local_rank)
                    if proc is not None:
                        self.once("kill", proc.pid)
                        proc.dying = -15 if graceful else -9
            case commands.StartHelper(number, rank, started_in):
                assert generation is not None and started_in == generation.number and sim.helpers
                assert [rank] == [rank for slot, lost in generation.bare.items()
                                  for rank in (generation.first_rank(slot) + one for one in lost)]
                self.once("help", started_in, number)
                assert all(helper.local_rank != number for helper in self.helpers), "started beside one that lives"
                self.helpers.append(HelperProc(number, started_in))
                sim.num_helpers += 1
            case commands.KillHelper(number, _, _):
                (helper,) = (one for one in self.helpers if one.local_rank == number)
                assert not helper.dying
                helper.dying = True
            case commands.SendHelp(number, _):
                (helper,) = (one for one in self.helpers if one.local_rank == number)
                view = self.state.view
                assert view.plan is not None and Plan.from_json(view.plan.content).replays
                assert helper.hello and not helper.went and view.number == helper.generation
                helper.went = True
            case commands.SendStop(local_ranks, number, _):
                for local_rank in local_ranks:
                    proc = self.spoken_to(local_rank)
                    if proc is not None:
                        self.once("stop", proc.pid, number)
                        proc.inbox.append(("stop", number))
            case commands.SendGo(local_ranks, number):
                self.send_go(local_ranks, number)
            case commands.SendPause(local_ranks, number):
                for proc in map(self.spoken_to, local_ranks):
                    if proc is not None:
                        self.once("pause", proc.pid, number)
                        proc.inbox.append(("pause", number))
            case commands.SendBoundary(local_ranks, number, iteration):
                for proc in map(self.spoken_to, local_ranks):
                    if proc is not None:
                        self.once("boundary", proc.pid, number)
                        proc.inbox.append(("boundary", number, iteration))
            case commands.WritePosition(number, slot, iteration):
                position = PositionRecord(slot, self.record.incarnation, iteration)
                self.write("position", [Put(keys.position(number, slot), encode(position))])
            case commands.WriteParked(number, slot):
                parked = ParkedRecord(slot, self.record.incarnation)
                self.write("parked", [Put(keys.parked(number, slot), encode(parked))])
            case commands.SendKeep(local_ranks, number):
                view = self.state.view
                assert view.plan is not None and not told_losses(view)
                for proc in map(self.spoken_to, local_ranks):
                    if proc is not None:
                        self.once("keep", proc.pid, number)
                        proc.inbox.append(("keep", number, Plan.from_json(view.plan.content)))
                        proc.go = number
            case commands.DropKept():
                assert self.files
                self.files.clear()
            case commands.SendRelease(local_ranks):
                assert self.state.view.released
                for local_rank in local_ranks:
                    proc = self.spoken_to(local_rank)
                    if proc is not None:
                        self.once("release", proc.pid)
                        proc.inbox.append(("release",))
            case commands.HostStore(number):
                self.once("store", number)
                self.write("store", [Put(keys.store(number), encode(StoreRecord("127.0.0.1", number)))])
            case commands.WriteTracked():
                self.write("tracked", [Put(keys.tracked, b"1")])
            case commands.WriteFailure(number, failure):
                self.write("failure", [Put(keys.failure(number, failure.slot), encode(failure))])
            case commands.WriteProgress(number, slot, reports):
                self.once("progress", number)
                self.check_progress(slot, reports)
                record = ProgressRecord(slot, self.record.incarnation, tuple(dict(r) for r in reports))
                self.write("progress", [Put(keys.progress(number, slot), encode(record))])
            case commands.WriteResumed(number, slot, iteration, phases_s):
                self.once("resumed", number)
                resumed = ResumedRecord(slot, iteration, dict(phases_s))
                self.write("resumed", [Put(keys.resumed(number, slot), encode(resumed))])
            case commands.WriteFinished(number, record):
                self.once("finished", number)
                for proc in self.procs:
                    if not proc.reaped:
                        assert proc.finished_in == number or not sim.tracked, "finished before it is"
                self.write("finished", [Put(keys.finished(number, record.slot), encode(record))])
            case commands.WriteExited(number, slot):
                self.once("exited", number)
                assert all(self.proc(r) is None for r in range(sim.num_workers)), "exited while processes live"
                exited = ExitedRecord(slot, self.record.incarnation)
                self.write("exited", [Put(keys.exited(number, slot), encode(exited))])
            case commands.ForgetSpare():
                forget = transactions.transaction_of(command, keys, self.state.view, self.record)
                assert forget is not None
                self.write("forget", list(forget.ops), list(forget.guards))
            case commands.Rejoin(_):
                self.rejoin()
            case commands.EndJob():
                self.end()

    def send_go(self, local_ranks: tuple[int, ...], number: int) -> None:
        view = self.state.view
        assert view.plan is not None and view.store is not None and not view.plan.restart \
            and not told_losses(view)
        for local_rank in local_ranks:
            proc = self.spoken_to(local_rank)
            if proc is None:
                continue
            self.once("go", proc.pid, number)
            assert number > proc.go
            known = self.state.workers[local_rank]
            assert proc.go == 0 or known.stopped == proc.go, "sent on without a report"
            proc.inbox.append(("go", number, Plan.from_json(view.plan.content)))
            proc.go = number

    def check_held(self, reports: Any) -> None:
        """What is told when the size changes is there, and is all that is there."""
        found = {report["local_rank"]: report["iteration"] for report in reports}
        kept = self.state.kept
        files = {} if kept is None else {-1: kept.iteration}
        assert kept is None or kept.iteration in self.files
        holding = {p.local_rank: p.iteration for p in self.procs
                   if not p.reaped and p.alive and p.status == "holding" and p.stopped >= p.go > 0 and not p.unfit
                   and not self.state.workers[p.local_rank].killed}
        assert all(found.get(k) == v for k, v in {**holding, **files}.items()), (found, holding, files)
        assert all((k in holding or k in files or self.proc(k) is None or not self.proc(k).alive) for k in found)

    def check_progress(self, slot: int, reports: Any) -> None:
        """What is told of a worker that has begun is what it holds, and cannot change any more."""
        generation = self.state.view.generation
        if generation is not None and generation.mode == "resize":
            self.check_held(reports)
            return
        assert len(reports) == self.sim.num_workers
        for local_rank, report in enumerate(reports):
            assert report["rank"] == slot * self.sim.num_workers + local_rank
            proc = self.proc(local_rank)
            if proc is None:
                assert any(order[0] == local_rank for order in self.orders), "progress of nobody"
                assert report["status"] == "fresh"
            elif proc.go:
                assert proc.stopped == proc.go, "progress of a worker that goes on"
                assert report == proc.report(), "progress is not what the worker holds"
            else:
                assert report["status"] == "fresh"

    def spoken_to(self, local_rank: int) -> Proc | None:
        proc = self.proc(local_rank)
        assert self.state.workers[local_rank].hello
        return proc if proc is not None and proc.alive else None

    def write(self, what: str, ops: list[Op], guards: list[Compare] | None = None) -> None:
        keys, view = self.sim.keys, self.state.view
        if guards is None:
            guards = [Compare.mod_revision(keys.generation, "==", view.generation_revision),
                      Compare.exists(keys.node(self.name))]
        number, life = view.number, self.life
        self.writes.append((what, guards, ops, lambda: self.state.view.number == number and self.life == life))

    def flush_one(self) -> None:
        _, guards, ops, wanted = self.writes.popleft()
        if wanted():
            self.sim.store.transaction(guards, ops)
            self.sim.sync()

    # ---- processes ----

    def started(self, local_rank: int, number: int) -> None:
        generation = self.state.view.generation
        assert generation is not None
        slot = generation.slot_of(self.record.incarnation)
        assert slot is not None
        rank = slot * self.sim.num_workers + local_rank
        proc = Proc(self, local_rank, rank, number, next(self.sim.pids))
        self.procs.append(proc)
        self.event(events.WorkerStarted(local_rank, number, proc.pid))
        worker = self.state.workers.get(local_rank)
        if worker is None or worker.generation != number or worker.killed:
            proc.dying = -9

    def order_done(self, order: tuple[int, int]) -> None:
        self.orders.remove(order)
        self.started(*order)

    def reap(self, proc: Proc) -> None:
        proc.reaped = True
        proc.outbox.clear()
        self.event(events.WorkerExited(WorkerExit(proc.rank, proc.local_rank, proc.pid, proc.exit_code, self.name)))

    def play(self, helper: HelperProc) -> None:
        """What it does next, or what becomes of it."""
        ends = helper.dying or self.sim.rng.random() < 0.2
        if not helper.pid:
            helper.pid = next(self.sim.pids)
            self.event(events.HelperStarted(helper.local_rank, helper.generation, helper.pid))
            known = self.state.helpers.get(helper.local_rank)
            helper.dying |= known is None or known.generation != helper.generation or known.killed
        elif ends:
            self.helpers.remove(helper)
            self.event(events.HelperExited(helper.local_rank, helper.pid))
        elif not helper.hello:
            helper.hello = True
            self.event(events.HelperWaits(helper.local_rank, helper.pid))
        elif self.sim.rng.random() < 0.2:
            self.event(events.HelperUnfit(helper.local_rank, helper.pid, "no log"))

    def end_processes(self) -> None:
        self.helpers.clear()
        for proc in self.procs:
            proc.alive, proc.reaped = False, True
        self.procs.clear()
        self.orders.clear()

    def rejoin(self) -> None:
        self.end_processes()
        self.lease.revoke()
        self.sim.sync()
        old = self.view
        self.life += 1
        try:
            self.join()
        except JobOver:
            self.end()
        else:
            self.stale.append(old)

    def end(self) -> None:
        self.ended = True
        self.end_processes()
        self.lease.revoke()
        self.sim.sync()

    def die(self) -> None:
        self.dead = True
        self.end_processes()
        self.sim.graves.append(self)
        for other in self.sim.living():
            if self.sim.rng.random() < 0.6:
                other.peers_lost.append(events.PeerLost(self.record.incarnation, "connection closed", is_dead=True))


class Sim:
    """*num_failures* of them happen, then the job must come to its end."""

    def __init__(self, seed: int, *, num_nodes: int = 2, num_workers: int = 2, num_spares: int = 1, target: int = 3,
                 tracked: bool = True, num_failures: int = 3, max_nodes: int = 0, num_late: int = 0,
                 log_groups: tuple[tuple[int, ...], ...] = (), helpers: int = 0) -> None:
        self.rng = random.Random(seed)
        self.num_nodes, self.num_workers, self.num_spares = num_nodes, num_workers, num_spares
        self.world_size, self.target, self.tracked = num_nodes * num_workers, target, tracked
        self.num_late = num_late
        self.num_failures, self.happened = num_failures, list[str]()
        self.store, self.keys = MemoryStore(), Keys("job")
        self.job = JobRecord(num_nodes, num_workers, "c", 1000, max_nodes=max_nodes, log_groups=log_groups,
                             helpers=helpers)
        self.helpers, self.num_helpers = helpers, 0
        self.worlds: dict[int, int] = {}
        self.ran: list[tuple[int, int, int]] = []
        # Every iteration that a rank has run: number, rank, size of the world.
        self.sizes: set[int] = set()
        self.watch = self.store.watch_prefix(self.keys.prefix)
        self.seen = self.store.get_prefix(self.keys.prefix)[1]
        self.history: list[list[Change]] = []
        self.now_s = 0.0
        self.pids, self.names = itertools.count(100), itertools.count()
        self.graves: list[SimNode] = []
        self.lines: list[str] = []
        self.number = 0
        self.modes: list[str] = []
        self.result: ResultRecord | None = None
        self.nodes = [SimNode(self, f"n{next(self.names)}", 1) for _ in range(num_nodes + num_spares - num_late)]

    def say(self, line: str) -> None:
        self.lines.append(line)

    def sync(self) -> None:
        """Take note of what the store has published."""
        revision = self.store.get_prefix(self.keys.prefix)[1]
        while self.seen < revision:
            response = next(self.watch)
            self.seen = response.revision
            changes = []
            for event in response.events:
                value = event.kv.value if event.kind == "put" else None
                changes.append(Change(event.kv.key, value, event.kv.mod_revision, event.kv.create_revision))
                if value is not None and event.kv.key == self.keys.generation:
                    self.entered(decode(GenerationRecord, value))
                if value is not None and event.kv.key == self.keys.result:
                    self.result = decode(ResultRecord, value)
            self.history.append(changes)

    def entered(self, generation: GenerationRecord) -> None:
        assert generation.number == self.number + 1, "generations follow each other"
        self.number = generation.number
        self.modes.append(generation.mode)
        self.sizes.add(len(generation.slots))
        self.worlds[generation.number] = generation.world_size
        assert self.num_nodes <= len(generation.slots) <= max(self.num_nodes, self.job.max_nodes), "a size not allowed"
        assert len({owner.node_id for owner in generation.slots}) == len(generation.slots), "one node has two slots"

    def living(self) -> list[SimNode]:
        return [node for node in self.nodes if not node.dead and not node.ended]

    def at_rank(self, rank: int) -> Proc | None:
        """The newest process of a rank."""
        found = [p for n in self.living() for p in n.procs if p.rank == rank]
        return max(found, key=lambda p: p.pid, default=None)

    def together(self, number: int) -> list[Proc] | None:
        """All ranks, if all have entered generation *number* and none was stopped in it."""
        procs = [self.at_rank(rank) for rank in range(self.worlds[number])]
        there = [p for p in procs if p is not None and p.alive and not p.hung and p.entered == number > p.stopped]
        return there if len(there) == self.worlds[number] else None

    # ---- what a process does next ----

    def next_step(self, proc: Proc) -> Action | None:
        if proc.hung or proc.unfit or proc.has_kept:
            return None
        if not self.tracked:
            return lambda: self.step_untracked(proc)
        if not proc.hello:
            return lambda: self.say_hello(proc)
        if proc.released:
            return lambda: self.exit(proc, 0)
        # `go` is what the agent has sent; the plan is there once the message was read.
        if proc.keeps is not None:
            return lambda: self.keep(proc)
        if proc.plan is not None and proc.told > max(proc.entered, proc.stopped):
            return lambda: self.enter(proc)
        if proc.entered <= proc.stopped or proc.entered == 0:
            return None
        if proc.live < proc.entered:
            return (lambda: self.regroup(proc)) if self.may_regroup(proc) else None
        if proc.plan is not None and proc.plan.kind == "copy" and proc.verified < proc.live:
            everybody = [self.at_rank(rank) for rank in range(self.worlds[proc.live])]
            compared = all(p is not None and p.alive and p.live == proc.live for p in everybody)
            return (lambda: self.verify(proc)) if compared else None
        if proc.status == "setup":
            return lambda: setattr(proc, "status", "holding")
        if proc.held and proc.parked < proc.entered and proc.boundary is not None:
            return lambda: self.park(proc)
        if proc.held:
            return None
        if proc.iteration < self.target:
            return (lambda: self.iterate(proc)) if self.can_reduce(proc) else None
        if proc.finished_in < proc.entered:
            return lambda: self.finish(proc)
        return None

    def keep(self, proc: Proc) -> None:
        """As the main thread does, which may have been stopped meanwhile: the state is what it was."""
        assert proc.keeps is not None and (proc.status, proc.iteration) == ("holding", proc.keeps.iteration)
        proc.node.files.add(proc.iteration)
        proc.keeps, proc.has_kept = None, True
        proc.outbox.append(msg.WorkerKept(proc.local_rank, proc.pid, proc.iteration, 0))

    def park(self, proc: Proc) -> None:
        proc.parked = proc.entered
        proc.outbox.append(msg.WorkerParked(proc.local_rank, proc.pid, proc.entered))

    def step_untracked(self, proc: Proc) -> None:
        proc.iteration += 1
        if proc.iteration > self.target:
            self.exit(proc, 0)

    def say_hello(self, proc: Proc) -> None:
        proc.hello = True
        proc.outbox.append(events.HelloReceived(proc.local_rank, proc.pid))

    def enter(self, proc: Proc) -> None:
        assert proc.plan is not None
        proc.entered = proc.told
        if proc.plan.kind == "copy" and proc.status in ("fresh", "setup"):
            proc.status = "empty"
        if proc.plan.kind == "fresh":
            assert proc.status == "fresh", f"a worker that is {proc.status} was told to start over"

    def regroup(self, proc: Proc) -> None:
        plan = proc.plan
        assert plan is not None
        if plan.kind == "fresh":
            proc.status = "setup"
        else:
            source = plan.sources.get(proc.rank)
            if proc.rank in plan.loads:
                assert proc.status == "empty" and plan.iteration in proc.node.files, "nothing is kept for it"
                proc.status, proc.iteration = "holding", plan.iteration
            elif source is None:
                assert (proc.status, proc.iteration) == ("holding", plan.iteration), f"rank {proc.rank} lacks the state"
            else:
                giver = self.at_rank(source)
                assert giver is not None and (giver.status, giver.iteration) == ("holding", plan.iteration)
                proc.status, proc.iteration = "holding", plan.iteration
        proc.live = proc.entered

    def may_regroup(self, proc: Proc) -> bool:
        """All are there, and who has to hold the state before it can send it does."""
        plan = proc.plan
        if plan is None or not self.together(proc.entered):
            return False
        giver = self.at_rank(plan.sources[proc.rank]) if proc.rank in plan.sources else None
        return giver is None or giver.rank not in plan.loads or giver.status == "holding"

    def verify(self, proc: Proc) -> None:
        """Checksums are compared: nobody trains before all hold the state."""
        proc.verified = proc.live
        proc.outbox.append(
            events.WorkerResumed(proc.local_rank, proc.pid, proc.live, proc.iteration, {"regroup": 0.1}))

    def can_reduce(self, proc: Proc) -> bool:
        """Iteration t needs the gradients of all: each has given them, and gone on, or stands there and lives."""
        for rank in range(self.worlds[proc.live]):
            other = self.at_rank(rank)
            if other is None or other.live != proc.live or other.status != "holding":
                return False
            if other.iteration < proc.iteration:
                return False
            if other.iteration == proc.iteration and (not other.alive or other.hung or other.stopped >= other.live):
                return False
        return True

    def iterate(self, proc: Proc) -> None:
        self.ran.append((proc.iteration, proc.rank, self.worlds[proc.live]))
        proc.iteration += 1

    def finish(self, proc: Proc) -> None:
        proc.finished_in = proc.entered
        end = {"iteration": proc.iteration, "checksum": "aa", "replicas": ranges_of(range(self.worlds[proc.entered]))}
        proc.outbox.append(events.WorkerFinished(proc.local_rank, proc.pid, proc.entered, end))

    def exit(self, proc: Proc, code: int) -> None:
        proc.alive, proc.exit_code = False, code

    def hear(self, proc: Proc) -> None:
        message = proc.inbox.popleft()
        if proc.hung:
            return
        match message:
            case ("stop", number):
                proc.stopped = max(proc.stopped, number)
                proc.outbox.append(events.ReportReceived(proc.local_rank, proc.pid, number, proc.report()))
            case ("go", number, plan):
                proc.told, proc.plan = number, plan
            case ("release",):
                proc.released = True
            case ("pause", number):
                proc.asked, proc.promised, proc.boundary = number, proc.iteration, None
                proc.outbox.append(msg.WorkerPromised(proc.local_rank, proc.pid, number, proc.promised))
            case ("boundary", number, iteration):
                if proc.asked == number:
                    assert proc.iteration <= iteration, "a worker has passed the boundary"
                    proc.boundary = iteration
            case ("keep", number, plan):
                proc.told, proc.entered, proc.keeps = number, number, plan

    # ---- what may happen next ----

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for node in self.living():
            if node.cursor < len(self.history):
                found += [node.deliver_view] * 3
            if node.writes:
                found += [node.flush_one] * 2
            if node.dirty:
                found.append(node.coordinate)
            if node.stale:
                found.append(lambda n=node: n.event(events.ViewChanged(n.stale.pop())))  # type: ignore[misc]
            found += [lambda n=node, o=order: n.order_done(o) for order in node.orders]  # type: ignore[misc]
            found += [lambda n=node, h=helper: n.play(h) for helper in node.helpers]  # type: ignore[misc]
            if node.peers_lost:
                found.append(lambda n=node: n.event(n.peers_lost.pop()))  # type: ignore[misc]
            for proc in node.procs:
                found += self.actions_of(node, proc)
        found += [lambda g=grave: self.bury(g) for grave in self.graves]  # type: ignore[misc]
        may_come = self.result is None and (not self.num_late or self.number > 0)
        if may_come and len(self.living()) < self.num_nodes + self.num_spares:
            found.append(self.new_node)
        return found

    def actions_of(self, node: SimNode, proc: Proc) -> list[Action]:
        found: list[Action] = []
        if proc.reaped:
            return found
        if not proc.alive:
            found.append(lambda: node.reap(proc))
        elif proc.dying:
            found.append(lambda: self.exit(proc, proc.dying))
        else:
            if proc.inbox:
                found.append(lambda: self.hear(proc))
            step = self.next_step(proc)
            if step is not None:
                found.append(step)
        if proc.outbox:
            found.append(lambda: node.event(proc.outbox.popleft()))
        return found

    def bury(self, node: SimNode) -> None:
        self.graves.remove(node)
        node.lease.revoke()
        self.sync()

    def new_node(self) -> None:
        returning = [n for n in self.nodes if n.dead and self.store.get(self.keys.node(n.name)) is None
                     and not any(o.name == n.name for o in self.living())]
        if returning and self.rng.random() < 0.5:
            old = self.rng.choice(returning)
            self.nodes.remove(old)
            self.nodes.append(SimNode(self, old.name, old.life + 1))
        else:
            self.nodes.append(SimNode(self, f"n{next(self.names)}", 1))

    def fail(self) -> None:
        node = self.rng.choice(self.living())
        procs = [p for p in node.procs if p.alive]
        kind = self.rng.choice(["kill", "kill", "kill", "node", "node", "accuse", "hang", "unfit"])
        if kind == "node" and len(self.living()) > 1:
            node.die()
        elif kind == "accuse":
            self.rng.choice(self.living()).peers_lost.append(events.PeerLost(node.record.incarnation, "cannot connect"))
        elif procs:
            proc = self.rng.choice(procs)
            training = proc.hello and proc.entered > max(proc.stopped, proc.finished_in)
            if kind == "hang" and training:
                proc.hung = True
                self.exit_peer(proc)
            elif kind == "unfit" and training:
                proc.unfit = True
                proc.outbox.append(events.WorkerUnfit(proc.local_rank, proc.pid, "a collective was cut"))
            else:
                self.exit(proc, self.rng.choice([1, -9, -11]))
        self.happened.append(kind)
        self.num_failures -= 1

    def exit_peer(self, hung: Proc) -> None:
        """A hang is found out only when something else fails."""
        others = [p for n in self.living() for p in n.procs if p.alive and p is not hung]
        if others:
            self.exit(self.rng.choice(others), -9)

    def tick(self) -> None:
        self.now_s += 1.0
        for node in self.living():
            node.event(events.Tick())

    def run(self) -> ResultRecord:
        """Walk until all agents have ended; raises if nothing more happens before that."""
        idle = 0
        every = self.rng.choice([4, 12, 40])
        for _ in range(MAX_STEPS):
            if not self.living():
                break
            if self.num_failures and self.result is None and self.rng.randrange(every) == 0:
                self.fail()
                continue
            actions = self.actions()
            if actions and self.rng.random() > 0.02:
                idle = 0
                self.rng.choice(actions)()
            else:
                idle += 0 if actions else 1
                assert idle < 50, f"nothing happens any more: {self.describe()}"
                self.tick()
        assert not self.living(), f"it does not come to an end: {self.describe()}"
        assert self.result is not None
        self.watch.cancel()
        return self.result

    def describe(self) -> str:
        nodes = [f"{n.name}.{n.life} {[(w.phase, w.current, w.stopped) for w in n.state.workers.values()]} "
                 f"{[(p.rank, p.alive, p.status, p.iteration, p.entered, p.stopped, p.go) for p in n.procs]}"
                 for n in self.living()]
        view = self.living()[0].view
        brief = replace(view, nodes={}, joined={}, job=None)
        return f"{self.happened} {self.modes} {nodes} {brief} {self.lines[-3:]}"
