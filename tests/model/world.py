"""A small job as a value: everything that can happen next is an action, and two ways to the same state are one state.

Real are the cores (membership, lifecycle, planning, view), the transactions (those of `Coordinator._step` and
`Executor`, taken before they reach the store), entering and leaving a job, and the store's semantics
(`MemoryStore`). Played are only processes, leases and the wire:

- What a node does by itself is one step with what caused it: its worker answers at once, a view is acted on at once.
- Each transaction is a step of its own, so that anything may fail between any two of them, and any may come too late.
- Every node sees all keys, also those that only a coordinator follows (`Keys.for_coordinator`).
- A node sees changes at once unless it is late, frozen or cut off: these are failures, and are counted as such.
- No clock runs (see `conftest.py`): what was seen stays fresh, and "stale" is a failure.
- Who is cut off from etcd still hears the other nodes, and its worker those of the others. Its own clock comes to the
  end of what `tenure` gives it ("doubt") before its lease can end. While etcd is away for all no lease ends.

`World.check` holds after every step; `World.settled` where nothing more can happen.
"""

from __future__ import annotations

import copy
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from swift_agent.agent.executor import Executor
from swift_agent.agent.lifecycle import commands
from swift_agent.agent.lifecycle import events as msg
from swift_agent.agent.lifecycle import machine as lc
from swift_agent.agent.lifecycle import state as state_module
from swift_agent.agent.lifecycle.planning import plan_generation
from swift_agent.agent.loop import Agent
from swift_agent.agent.record_writer import Write
from swift_agent.agent.transactions import Transaction
from swift_agent.wire import messages as wire
from swift_recovery.planning.plan import Plan
from swift_recovery.planning.reports import ranges_of
from swift_rendezvous.codec import decode, encode
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.node import registration
from swift_rendezvous.node.coordinator import Coordinator
from swift_rendezvous.node.registration import JobOver, PlaceLost, enter_job, leave_job
from swift_rendezvous.roster.accusations import bare_ranks
from swift_rendezvous.roster.decision import Rules
from swift_rendezvous.roster.draining import is_alive
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.losses import losses
from swift_rendezvous.roster.records import (
    DrainRecord,
    GenerationRecord,
    JobRecord,
    NodeRecord,
    ResultRecord,
    StoreRecord,
    WorkerExit,
)
from swift_rendezvous.roster.setbacks import MOST
from swift_rendezvous.roster.view import Change, View, apply, apply_all
from swift_rendezvous.store import tenure
from swift_rendezvous.store.kv import Compare, Delete, Op, Put, TransactionResult
from tests.support.memory_store import MemoryLease, MemoryStore

KEYS = Keys("job")
EVENTS = KEYS.prefix + "events/"
TTL_S = 5
RULES = Rules(1e9, 1e9)  # nobody gives up waiting: who waits although enough nodes live has a defect

Action = tuple[str, int, int]  # what, which node, and a second one for `accuse` and `part`
Response = tuple[Change, ...]

FAULTS = ("crash", "freeze", "cut", "late", "kill", "lapse", "part")
# The loss of a peer is told too late: it is dropped, and looked at again.
STALE = "stale"
# A node without a slot takes another for lost, and is mistaken; much later something else happens.
ALARM = "alarm"
# Of etcd, for everybody.
OUTAGES = ("outage",)
# An operator's, and taking it back: counted like failures.
ORDERS = ("drain", "cancel")
# To a node: it shall go, when there is a spare, or at once.
SIGNALS = ("signal", "signal now")
# Of people and strangers who write into the store: something that cannot be read, or remove it.
INTRUSIONS = ("garble", "remove")
GARBAGE = b"?"
# Commands that do nothing but write one record: the same one, whenever the same state gives them.
RECORDS = (
    commands.HostStore,
    commands.WriteTracked,
    commands.WriteFailure,
    commands.WriteProgress,
    commands.WriteResumed,
    commands.WriteFinished,
    commands.WriteExited,
    commands.WritePosition,
    commands.WriteParked,
    commands.WriteHandover,
    commands.WriteTaken,
    commands.TellNotice,
    commands.ForgetSpare,
)
FALSE_ALARM = "a false alarm of long ago"


class Violation(AssertionError):
    """An invariant does not hold."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass(frozen=True)
class Proc:
    """A node's worker process. *go*: the generation it is in; *live*: the one in which it is connected.

    *asked*: in which it was asked where it is; *boundary*: -1 while it is not told. *leaves*: it only hands over.
    """

    rank: int
    generation: int
    pid: int
    go: int = 0
    live: int = 0
    stopped: int = 0
    status: str = "fresh"
    iteration: int = 0
    finished_in: int = 0
    asked: int = 0
    promised: int = 0
    boundary: int = -1
    leaves: bool = False
    plan: Plan | None = None

    @property
    def held(self) -> bool:
        """It begins no iteration; nor does it reach its end."""
        at = self.promised if self.boundary < 0 else self.boundary
        return self.asked == self.go and self.live == self.go and self.iteration >= at

    @property
    def inside(self) -> bool:
        return self.go > self.stopped

    def key(self) -> tuple[Any, ...]:
        plan = self.plan and (self.plan.kind, self.plan.iteration, self.plan.handovers,
                              *sorted(self.plan.sources.items()))  # fmt: skip
        return (self.rank, self.generation, self.pid, self.go, self.live, self.stopped, self.status, self.iteration,
                self.finished_in, self.asked, self.promised, self.boundary, self.leaves, plan)  # fmt: skip


@dataclass(frozen=True)
class Pending:
    """A transaction on its way. *number*: the generation that its author believed in; *wanted*: see
    `record_writer.Write`; *peer*: the incarnation whose loss it tells."""

    what: str
    guards: tuple[Compare, ...]
    ops: tuple[Op, ...]
    number: int
    incarnation: str
    wanted: Any = None
    peer: str = ""


@dataclass(slots=True)
class Node:
    """One agent with its coordinator, its worker and what is on its way to and from it."""

    name: str
    life: int = 0
    where: str = "up"  # up, late, frozen, cut, crashed, ended
    record: NodeRecord = None  # type: ignore[assignment]
    lease_id: int = 0
    job: int = 0
    view: View = field(default_factory=View)
    queue: tuple[Response, ...] = ()
    state: state_module.AgentState = None  # type: ignore[assignment]
    writes: tuple[Pending, ...] = ()
    decided: tuple[Pending, ...] = ()
    dirty: bool = False
    proc: Proc | None = None
    num_procs: int = 0
    doubted: bool = False
    """Its own clock has passed the time until which it may act, counted from the last word of etcd."""
    paused: bool = False
    asked: tuple[int, int] = (0, 0)
    """The generations, of etcd and of its own view, about which it has been asked last while it stood still."""

    def twin(self) -> Node:
        return Node(*_all_of_a_node(self))

    @property
    def here(self) -> bool:
        return self.where not in ("crashed", "ended")

    @property
    def online(self) -> bool:
        """Can read and write the store."""
        return self.where in ("up", "late")

    @property
    def runs(self) -> bool:
        return self.where in ("up", "late", "cut")


_all_of_a_node = attrgetter(*(one.name for one in fields(Node)))


class Known:
    """What came out for values that never change, shared by all twins of a world. Most steps of a search do what
    others have done before beside something else, and a value is then the same object.

    Keyed by identity: each entry holds what it is the answer for, so that no other object gets the same `id`.
    """

    def __init__(self) -> None:
        self.folded: dict[tuple[int, Response], tuple[View, View]] = {}
        self.steps: dict[tuple[int, float, object], tuple[object, object, state_module.Step]] = {}
        self.decided: dict[tuple[int, str, int, int], tuple[View, tuple[Pending, ...], list[Put]]] = {}
        self.written: dict[int, tuple[object, Pending]] = {}
        self.parts: dict[int, tuple[object, Part]] = {}
        self.views: dict[tuple[Part, int], View] = {}
        self.states: dict[tuple[Part, int], state_module.AgentState] = {}

    def part(self, value: View | Response | Pending | Proc | state_module.AgentState) -> Part:
        known = self.parts.get(id(value))
        if known is None:
            self.parts[id(value)] = known = (value, _part_of(value))
        return known[1]

    def view(self, view: View) -> View:
        """The first one that is equal to *view*."""
        first = self.views.setdefault((_part_of(view), view.revision), view)
        return first if first == view else view

    def state(self, state: state_module.AgentState) -> state_module.AgentState:
        first = self.states.setdefault((_part_of(state), id(state.view)), state)
        return first if first == state else state


class Driver(Agent):
    """The agent's own code for its commands, on a node of a world. One object per name: closures of writes hold it."""

    def __init__(self, name: str) -> None:
        config: Any = SimpleNamespace(node_id=name, job_id="job")
        stores: Any = SimpleNamespace(
            host=lambda number, now_s: StoreRecord("h", number), token=lambda number, record: ""
        )
        self._config, self._stores, self._end = config, stores, None
        self._executor = self.hands = Hands(config, stores, lambda: self._state, lambda: self._presence)

    def take(self, world: World, node: Node, events: deque[msg.Event]) -> None:
        self._state, self._end = node.state, None
        self.hands.take(world, node, events)
        revision = world.stored_revision
        self._presence = SimpleNamespace(  # type: ignore[assignment]
            me=node.record, journal=None, liveness=SimpleNamespace(reconsider=lambda _: None),
            read_place=lambda: events.append(msg.PlaceRead(revision)),
            reclaim=lambda: None,  # the agent asks in a thread: it is a step of its own, `notice`
        )

    def look(self, node: Node) -> None:
        self._state = node.state

    def _rejoin(self, why: str) -> None:
        self.hands.rejoin()


class Hands(Executor):
    """Plays what the executor of an agent has: its worker and the thread that writes."""

    def __init__(self, config: Any, stores: Any, state: Any, presence: Any) -> None:
        directories: Any = SimpleNamespace(socket="", messages="")
        writer: Any = SimpleNamespace(submit=self._submit)
        crew: Any = SimpleNamespace(end=self._end_worker, signal=self._signal_workers)
        channels: Any = SimpleNamespace(send=self._send)
        super().__init__(config, None, directories, writer, crew, channels, stores,  # type: ignore[arg-type]
                         state=state, presence=presence, doubt=lambda peer: None, timers="")  # fmt: skip

    def take(self, world: World, node: Node, events: deque[msg.Event]) -> None:
        self._world, self._node, self._events = world, node, events
        self.pending: Pending | None = None

    def rejoin(self) -> None:
        self._world.rejoin(self._node)

    def _write(self, transaction: Transaction, at_s: float = 0.0) -> None:
        self._peer = transaction.lost_peer or ""
        super()._write(transaction, at_s)

    def _submit(self, write: Write) -> None:
        node = self._node
        pending = Pending(write.what, tuple(write.guards), tuple(write.ops), self._state().view.number,
                          node.record.incarnation, write.wanted, self._peer)  # fmt: skip
        node.writes = (*node.writes, pending)
        self.pending = pending

    def _start(self, local_ranks: tuple[int, ...], warm: bool) -> None:
        node, view = self._node, self._state().view
        generation = view.generation
        assert generation is not None
        slot = generation.slot_of(node.record.incarnation)
        assert slot is not None
        demand(node.proc is None, "a worker is started beside one that lives")
        node.num_procs += 1
        node.proc = Proc(slot, generation.number, node.num_procs)
        self._events.append(msg.WorkerStarted(0, generation.number, node.num_procs))
        self._events.append(msg.HelloReceived(0, node.num_procs))

    def _end_worker(self, local_rank: int, graceful: bool) -> None:
        self._world.keep_the_last_copy(self._node)
        self._world.end_proc(self._node, -15, self._events)

    def _send(self, local_ranks: tuple[int, ...], message: wire.ToWorker) -> None:
        node, proc = self._node, self._node.proc
        if proc is None:
            return
        match message:
            case wire.Stop(generation):
                node.proc = replace(proc, stopped=max(proc.stopped, generation))
                report = {"rank": proc.rank, "status": proc.status, "iteration": proc.iteration, "sections": 0,
                          "replicas": ranges_of(self._world.ranks) if proc.status == "holding" else ""}  # fmt: skip
                self._events.append(msg.ReportReceived(0, proc.pid, generation, report))
            case wire.Go(number):
                plan = Plan.from_json(message.plan)
                demand(number > proc.go and proc.stopped == proc.go, "a worker is sent on without a report")
                status = proc.status
                if plan.kind == "fresh":
                    demand(status == "fresh", f"a worker that is {status} is told to start over")
                elif status in ("fresh", "setup"):
                    status = "empty"
                node.proc = replace(proc, go=number, plan=plan, status=status, leaves=message.leaves)
            case wire.Pause(generation):
                node.proc = replace(proc, asked=generation, promised=proc.iteration, boundary=-1)
                self._events.append(msg.WorkerPromised(0, proc.pid, generation, proc.iteration, saves=True))
            case wire.Boundary(generation, iteration):
                demand(proc.iteration <= iteration, "a worker has passed the boundary")
                node.proc = proc = replace(proc, boundary=iteration)
                if proc.held:
                    node.proc = replace(proc, status="holding")  # it waits where its first iteration would begin
                    self._events.append(msg.WorkerParked(0, proc.pid, generation))
            case wire.Release():
                self._world.end_proc(node, 0, self._events)

    def _signal_workers(self, signum: int) -> None:
        self._node.paused, self._node.asked = signum == signal.SIGSTOP, (0, 0)


class Recorder:
    """In the place of a coordinator's store: its transactions go on one by one, as if each had succeeded.

    `Coordinator._step` asks for nothing but success, and ends at the first failure; so does who carries them out.
    """

    def __init__(self) -> None:
        self.taken: list[tuple[tuple[Compare, ...], tuple[Op, ...]]] = []

    def transaction(self, compare: Sequence[Compare], success: Sequence[Op]) -> TransactionResult:
        self.taken.append((tuple(compare), tuple(success)))
        return TransactionResult(True, 0, ())


class World:
    """*faults* may still happen. *ordered*: who could act takes turns in one order; else every order is an action."""

    def __init__(self, num_nodes: int = 3, num_slots: int = 2, *, faults: int = 0, target: int = 1,
                 ordered: bool = False, max_restarts: int = 1000, kinds: Sequence[str] = FAULTS) -> None:  # fmt: skip
        self.faults, self.target, self.ordered, self.kinds = faults, target, ordered, tuple(kinds)
        self.num_slots, self.max_restarts = num_slots, max_restarts
        self.ranks = list(range(num_slots))
        self.away = False
        self.store = MemoryStore()
        self.view = View()  # of somebody who sees all at once
        self.given_up: frozenset[str] = frozenset()
        self.job = JobRecord(num_slots, 1, "c", max_restarts)
        self.ends: tuple[int, ...] = ()
        """The ranks of processes that did not end well."""
        self.state = ""
        """That of the job's result, once there is one."""
        self.drivers = {f"n{index}": Driver(f"n{index}") for index in range(num_nodes)}
        self.coordinators: dict[tuple[str, int, int], Coordinator] = {}
        self.known = Known()
        self.nodes = [Node(name) for name in self.drivers]
        self._published = 0
        for node in self.nodes:
            self._join(node, None)

    def clone(self) -> World:
        twin = copy.copy(self)
        twin.nodes = [node.twin() for node in self.nodes]
        twin.store = self.store.twin()
        twin._published = 0
        return twin

    # ---- what may happen ----

    def actions(self) -> list[Action]:
        """Without failures. What ends a failure is one of them, so none lasts for ever."""
        turns: list[Action] = []
        found: list[Action] = []
        if self.away:
            found.append(("back", 0, 0))
        for index, node in enumerate(self.nodes):
            ends = node.lease_id in self.store._leases and not self.away
            if not node.here:
                if node.where == "crashed" and node.lease_id in self.store._leases:
                    found += [("expire", index, 0)] if ends else []
                    found += self._accusers(index)
                continue
            if node.where in ("frozen", "cut"):
                found.append(("return", index, 0))
                if ends and (node.doubted or node.where == "frozen"):
                    found.append(("expire", index, 0))
                if node.lease_id in self.store._leases and node.where == "cut":
                    found += self._accusers(index)
            if (node.where == "cut" or (self.away and node.runs)) and not node.doubted:
                found.append(("doubt", index, 0))
            mine = turns if node.where == "up" else found
            if node.where == "late":
                found.append(("see", index, 0))
            if node.online and not self.away:
                if node.paused and node.lease_id in self.store._leases and node.asked != self._answer(node):
                    mine.append(("ask", index, 0))
                away = node.lease_id not in self.store._leases or state_module.RECLAIM in node.state.issued
                if away and "generation" not in self.view.damaged:  # else it is tried again later
                    mine.append(("notice", index, 0))
                if node.decided:
                    mine.append(("decide", index, 0))
                if node.writes:
                    mine.append(("write", index, 0))
            if self._works(node):
                # Who is cut off takes no turns with the others.
                (found if node.where == "cut" else turns).append(("work", index, 0))
        return [*turns[:1], *found] if self.ordered else [*turns, *found]

    def failures(self) -> list[Action]:
        if not self.faults:
            return []
        found: list[Action] = [(kind, index, 0) for kind in INTRUSIONS if kind in self.kinds
                               for index in range(len(self.targets(kind)))]  # fmt: skip
        if "outage" in self.kinds and not self.away:
            found.append(("outage", 0, 0))
        for index, node in enumerate(self.nodes):
            if not node.here:
                continue
            if node.where == "up":
                found += [(kind, index, 0) for kind in ("freeze", "cut", "late") if kind in self.kinds]
                if "lapse" in self.kinds and node.lease_id in self.store._leases:
                    found.append(("lapse", index, 0))
            if "crash" in self.kinds:
                found.append(("crash", index, 0))
            drain = self.view.drains.get(node.name)
            if drain is None and "drain" in self.kinds and node.where == "up":
                found.append(("drain", index, 0))
            if node.state.notice is None and node.where == "up":
                found += [(kind, index, 0) for kind in SIGNALS if kind in self.kinds]
            if drain is not None and "cancel" in self.kinds:
                found.append(("cancel", index, 0))
            if "part" in self.kinds and node.runs:
                # One way to another is closed for a moment: this node calls it lost.
                found += [("part", index, other) for other, peer in enumerate(self.nodes)
                          if other != index and peer.here
                          and peer.record.incarnation not in node.state.lost_peers]  # fmt: skip
            if STALE in self.kinds and node.online and node.writes and node.writes[0].peer:
                found.append((STALE, index, 0))
            generation = self.view.generation
            if ALARM in self.kinds and node.where == "up" and generation is not None and node.proc is None:
                found += [(ALARM, index, other) for other, peer in enumerate(self.nodes) if peer.where == "up"
                          and generation.slot_of(peer.record.incarnation) is not None
                          and generation.slot_of(node.record.incarnation) is None]  # fmt: skip
            if node.proc is not None and node.where != "frozen" and "kill" in self.kinds:
                found.append(("kill", index, 0))
        return found

    def targets(self, kind: str) -> list[str]:
        """The keys that may be garbled or removed."""
        if kind == "remove":
            return [KEYS.generation, KEYS.job]
        number = self.view.number
        return [KEYS.generation, KEYS.coordinator, KEYS.job, KEYS.result, KEYS.plan(number), KEYS.store(number),
                KEYS.failure(number, 0), KEYS.progress(number, 0), KEYS.finished(number, 0), KEYS.exited(number, 0),
                KEYS.node("n0"), KEYS.node("x"), KEYS.drain("x")]  # fmt: skip

    def _accusers(self, lost: int) -> list[Action]:
        incarnation = self.nodes[lost].record.incarnation
        return [("accuse", index, lost) for index, node in enumerate(self.nodes)
                if index != lost and node.runs and incarnation not in node.state.lost_peers]  # fmt: skip

    def do(self, action: Action) -> None:
        """Carry it out, and check."""
        what, index, other = action
        node = self.nodes[index] if what not in INTRUSIONS else self.nodes[0]
        if what in (*FAULTS, *ORDERS, *SIGNALS, *INTRUSIONS, *OUTAGES, ALARM, STALE):
            self.faults -= 1
        match what:
            case "crash":
                node.where, node.proc = "crashed", None
                node.queue, node.writes, node.decided, node.dirty = (), (), (), False
            case "freeze":
                node.where = "frozen"
            case "garble":
                self.store.put(self.targets(what)[index], GARBAGE)
            case "remove":
                self.store.delete(self.targets(what)[index])
            case "cut" | "late":
                node.where = what
            case "drain":
                order = Put(KEYS.drain(node.name), encode(DrainRecord(node.name, node.record.incarnation, "w", 0.0)))
                self.store.transaction([Compare.exists(KEYS.node(node.name))], [order])
            case "signal" | "signal now":
                for_s = 1e9 if what == "signal" else 0.0
                self.handle(node, deque([msg.Noticed("SIGTERM", for_s, for_s)]))
            case "cancel":
                handing = self.view.generation.handover.values() if self.view.generation else ()
                if all(owner.node_id != node.name for owner in handing):
                    self.store.delete(KEYS.drain(node.name))
            case "kill":
                events: deque[msg.Event] = deque()
                self.end_proc(node, -9, events)
                self.handle(node, events)
            case "return":
                was_frozen, node.where = node.where == "frozen", "late"
                if node.lease_id in self.store._leases and not self.away:
                    node.doubted = False  # it is renewed
                elif was_frozen and not node.doubted:
                    # Its worker has stood still by its own clock; the agent looks at its own first.
                    node.doubted = True
                    self.handle(node, deque([self._tick_in_doubt(node)]))
            case "outage":
                self.away = True
            case "back":
                self.away = False
                for one in self.nodes:
                    one.doubted = one.doubted and one.where == "cut"
            case "doubt":
                node.doubted = True
                events = deque[msg.Event]([self._tick_in_doubt(node)])
                self.handle(node, events)
            case "ask":
                node.asked = self._answer(node)
                self.handle(node, deque([msg.Tick()]))
            case "expire" | "lapse":
                self.store.revoke(self.store._leases[node.lease_id])
            case "notice":
                self.reclaim(node)
            case "accuse" | "part":
                peer = self.nodes[other]
                is_dead = what == "accuse" and not peer.here
                self.handle(node, deque([msg.PeerLost(peer.record.incarnation, "lost", is_dead)]))
            case "alarm":
                self.handle(node, deque([msg.PeerLost(self.nodes[other].record.incarnation, FALSE_ALARM)]))
                self.handle(node, deque([msg.Tick()]), now_s=1e6)
            case "stale":
                stale, node.writes = node.writes[0], node.writes[1:]
                self.handle(node, deque([msg.PeerDoubted(stale.peer)]))
            case "see":
                if node.queue:
                    self._see(node)
                if not node.queue and node.where == "late":
                    node.where = "up"
            case "write":
                self._write(node)
            case "decide":
                self._decide(node)
            case "work":
                self._work(node)
        self.settle()
        self.check()

    def _tick_in_doubt(self, node: Node) -> msg.Tick:
        """At the end of what it was given: what is proven by then is what it sees of the one member that there is."""
        sight: tenure.Sight = "refused" if self.away and node.where != "cut" else "silent"
        held = tenure.fold(tenure.Tenure(), tenure.MembersRead({1: "etcd"}))
        held = tenure.fold(held, tenure.Renewed(0.0, TTL_S))
        now_s = held.acts_until_s
        for at_s in (now_s - 1.0, now_s - 0.5, now_s):
            held = tenure.fold(held, tenure.Probed(1, sight, at_s, at_s))
        return msg.Tick(tenure.holds(held, now_s=now_s), is_away=True, why="cut off")

    # ---- store and views ----

    def settle(self) -> None:
        """Everybody who is neither late nor away sees what was written, until nobody writes at once."""
        while True:
            while self._published < len(self.store._history):
                response = self.store._history[self._published]
                self._published += 1
                changes = tuple(
                    Change(e.kv.key, e.kv.value if e.kind == "put" else None, e.kv.mod_revision, e.kv.create_revision)
                    for e in response.events if not e.kv.key.startswith(EVENTS)
                )  # fmt: skip
                self._entered(changes)
                self.view = self._fold(self.view, changes)
                for node in self.nodes:
                    if node.here and node.life:
                        node.queue = (*node.queue, changes)
            behind = next((node for node in self.nodes if node.where == "up" and node.queue), None)
            if behind is None:
                return
            self._see(behind)

    def _see(self, node: Node) -> None:
        node.view = self._fold(node.view, node.queue[0])
        node.queue = node.queue[1:]
        self._viewed(node)

    def _viewed(self, node: Node) -> None:
        node.dirty = True
        self.handle(node, deque([msg.ViewChanged(node.view)]))
        self._coordinate(node)

    def _fold(self, view: View, changes: Response) -> View:
        known = self.known.folded.get((id(view), changes))
        if known is None:
            new = view
            for change in changes:
                new = apply(new, KEYS, change)
            self.known.folded[id(view), changes] = known = (view, self.known.view(new))
        return known[1]

    def _join(self, node: Node, known_job: int | None) -> None:
        node.life += 1
        node.record = NodeRecord(node.name, f"{node.name}.{node.life}", "h", 1, 1, "c")
        used = node.state.restarts_used if node.state else 0
        try:
            entry = enter_job(self.store, KEYS, self.job, node.record, TTL_S, known_job)
        except JobOver:
            self._gone(node)
            return
        node.lease_id, node.job = entry.lease.id, entry.job
        node.state = state_module.AgentState(
            node.name, node.record.incarnation, self.max_restarts, 10.0, restarts_used=used
        )
        node.where, node.queue, node.writes, node.decided = "up", (), (), ()
        node.doubted = node.paused = False
        node.asked = (0, 0)
        self.settle_others(node)
        listing = [Change(kv.key, kv.value, kv.mod_revision, kv.create_revision)
                   for kv in self.store.get_prefix(KEYS.prefix)[0] if not kv.key.startswith(EVENTS)]  # fmt: skip
        node.view = self.known.view(apply_all(View(), KEYS, listing))
        self._viewed(node)
        self.settle()

    def settle_others(self, node: Node) -> None:
        """What was written so far is in the listing that *node* makes next."""
        life, node.life = node.life, 0
        try:
            self.settle()
        finally:
            node.life = life

    def rejoin(self, node: Node) -> None:
        self.keep_the_last_copy(node)
        self._leave_lease(node)
        node.proc = None
        self.settle_others(node)
        self._join(node, node.job)

    def reclaim(self, node: Node) -> None:
        """Its lease is gone: it gets another one in place, or comes back as a spare."""
        try:
            node.lease_id = registration.reclaim_place(self.store, KEYS, node.record, node.job, TTL_S).id
        except (PlaceLost, JobOver):
            self.rejoin(node)
            return
        demand(node.record.incarnation not in self.given_up, f"{node.record.incarnation} comes back after its slot")
        node.doubted = False
        self.settle()
        self.handle(node, deque([msg.PlaceReclaimed()]))

    def _leave_lease(self, node: Node) -> None:
        lease = self.store._leases.get(node.lease_id)
        if lease is not None:
            self.store.revoke(lease)

    def _gone(self, node: Node) -> None:
        node.where, node.proc = "ended", None
        node.queue, node.writes, node.decided, node.dirty = (), (), (), False

    # ---- the agent ----

    def handle(self, node: Node, events: deque[msg.Event], now_s: float = 0.0) -> None:
        driver, life = self.drivers[node.name], node.life
        while events and node.runs and node.life == life:
            step = self._step(node.state, events.popleft(), now_s)
            node.state = step.state
            for command in step.commands:
                again = self.known.written.get(id(command))
                if again is not None:
                    node.writes = (*node.writes, again[1])
                    continue
                driver.take(self, node, events)
                driver._execute(command)
                if isinstance(command, RECORDS) and driver.hands.pending is not None:
                    self.known.written[id(command)] = (command, driver.hands.pending)
                if node.life != life:
                    return
                if driver._end is not None:
                    self._end(node)
                    return

    def _step(self, state: state_module.AgentState, event: msg.Event, now_s: float) -> state_module.Step:
        # The text of a view is long, and there are few views.
        name = id(event.view) if isinstance(event, msg.ViewChanged) else repr(event)
        known = self.known.steps.get((id(state), now_s, name))
        if known is None:
            step = lc.on_event(state, event, now_s=now_s)
            step = replace(step, state=self.known.state(step.state))
            self.known.steps[id(state), now_s, name] = known = (state, event, step)
        return known[2]

    def _end(self, node: Node) -> None:
        """As `Agent._leave`: what is still to be written is written first."""
        if not self.state:
            self.keep_the_last_copy(node)
        node.proc = None
        while node.writes:
            self._write(node)
        lease = self.store._leases.get(node.lease_id) or MemoryLease(self.store, node.lease_id, TTL_S)
        leave_job(self.store, KEYS, node.record, lease)
        self._gone(node)

    def _write(self, node: Node) -> None:
        write, node.writes = node.writes[0], node.writes[1:]
        self.drivers[node.name].look(node)
        if not write.wanted():
            return
        number = self._stored_number()
        lives = KEYS.node(node.name) in self.store._keys
        revision = self.store._revision
        if not self.store.transaction(write.guards, write.ops).succeeded:
            return
        if write.what == "forget":
            return  # of a spare: guarded by that node's own record
        told = [op.value for op in write.ops if isinstance(op, Put)]
        demand(not any(FALSE_ALARM.encode() in value for value in told), f"told as a loss: {FALSE_ALARM}")
        demand(number == write.number, f"a late '{write.what}' of generation {write.number} counts in {number}")
        demand(lives, f"'{write.what}' of a node that was given up takes effect")
        demand(self.store._revision > revision, "an empty write")

    def _answer(self, node: Node) -> tuple[int, int]:
        return self._stored_number(), node.view.number

    @property
    def stored_revision(self) -> int:
        stored = self.store._keys.get(KEYS.generation)
        return stored.mod_revision if stored else 0

    def _stored_number(self) -> int:
        stored = self.store._keys.get(KEYS.generation)
        if stored is None or stored.value == GARBAGE:
            return self.view.number
        return decode(GenerationRecord, stored.value).number

    # ---- the coordinator ----

    def _coordinate(self, node: Node) -> None:
        """Its thread takes the newest view, once it has carried out what it decided before."""
        if not node.dirty or node.decided or not node.runs:
            return
        node.dirty = False
        key = (id(node.view), node.name, node.life, node.lease_id)
        known = self.known.decided.get(key)
        if known is None:
            self.known.decided[key] = known = (node.view, *self._decision(node))
        _, decided, puts = known
        self._sound(node.view, puts)
        node.decided = decided

    def _decision(self, node: Node) -> tuple[tuple[Pending, ...], list[Put]]:
        """The same for the same view: a coordinator remembers nothing but since when it waits, and no clock runs."""
        life = (node.name, node.life, node.lease_id)
        coordinator = self.coordinators.get(life)
        recorder = Recorder()
        if coordinator is None:
            coordinator = Coordinator(recorder, KEYS, node.record, node.lease_id, plan_generation, RULES,  # type: ignore
                                      lambda _: None)  # fmt: skip
            self.coordinators[life] = coordinator
        coordinator._store = recorder  # type: ignore[assignment]
        coordinator._step(node.view)
        decided = tuple(
            Pending("decision", guards, tuple(op for op in ops if not getattr(op, "key", "").startswith(EVENTS)),
                    node.view.number, node.record.incarnation)
            for guards, ops in recorder.taken
        )  # fmt: skip
        return decided, [op for _, ops in recorder.taken for op in ops if isinstance(op, Put)]

    def _sound(self, view: View, puts: list[Put]) -> None:
        """A new roster has no node that its author knows to be lost. (What it did not know is lost in the next.) And it
        does not give away the last copy of the state, as far as that is known.
        """
        old = view.generation
        if old is None:
            return
        holders = {node.record.incarnation for node in self.nodes if node.where in ("up", "late") and node.proc
                   and node.proc.status == "holding" and node.lease_id in self.store._leases
                   and old.slot_of(node.record.incarnation) is not None}  # fmt: skip
        # Who has not trained yet in the first generation has what the others began with. A death may be untold yet.
        unknown = any((node.proc is not None and node.proc.status == "setup")
                      or any(write.what == "failure" for write in node.writes) for node in self.nodes)  # fmt: skip
        unknown = unknown or self.view.released  # then it is refused
        # Whom its author counts on, who may have gone untold.
        bare = bare_ranks(view, old)
        counted = {owner.incarnation for slot, owner in enumerate(old.slots)
                   if is_alive(view, owner) and len(bare.get(slot, ())) < old.workers_of(slot)}  # fmt: skip
        lost = {view.generation.slots[slot].incarnation for slot in losses(view).nodes}
        for put in puts:
            if put.key == KEYS.generation:
                new = decode(GenerationRecord, put.value)
                if new == old:
                    continue  # it is restored
                owners = {owner.incarnation for owner in new.slots}
                demand(not lost & owners, f"a slot is given to {lost & owners}, known to be lost")
                kept = owners | {owner.incarnation for owner in new.handover.values()}
                demand(not holders or unknown or bool((holders | counted) & kept),
                       f"{holders} hold the state, and all lose their slots")  # fmt: skip

    def _decide(self, node: Node) -> None:
        decision, node.decided = node.decided[0], node.decided[1:]
        before = self.store._keys.get(KEYS.coordinator)
        number = self._stored_number()
        elects = any(isinstance(op, Put) and op.key == KEYS.coordinator for op in decision.ops)
        try:
            succeeded = self.store.transaction(decision.guards, decision.ops).succeeded
        except RendezvousError:
            succeeded = False  # its lease is gone
        if not succeeded:
            node.decided = ()
        elif not elects:
            holder = before.value.decode() if before else "nobody"
            demand(f'"{decision.incarnation}"' in holder, f"{decision.incarnation} decides, but {holder} coordinates")
            only_forgets = all(isinstance(op, Delete) for op in decision.ops)
            demand(number == decision.number or only_forgets, f"a decision of generation {decision.number} in {number}")
        self.settle()
        self._coordinate(node)

    # ---- the worker ----

    def end_proc(self, node: Node, code: int, events: deque[msg.Event]) -> None:
        proc, node.proc = node.proc, None
        if proc is not None:
            self.ends += (proc.rank,) if code else ()
            exit_ = WorkerExit(proc.rank, 0, proc.pid, code, "h", generation=proc.generation)
            events.append(msg.WorkerExited(exit_))

    def _at_rank(self, rank: int, number: int) -> tuple[Node, Proc] | None:
        for node in self.nodes:
            proc = node.proc
            if node.here and proc is not None and proc.rank == rank and proc.go == number and not proc.leaves:
                return node, proc
        return None

    def _predecessor(self, rank: int, number: int) -> Proc | None:
        for node in self.nodes:
            proc = node.proc
            if node.runs and proc is not None and proc.rank == rank and proc.go == number and proc.leaves:
                return proc if proc.inside else None
        return None

    def _works(self, node: Node) -> bool:
        return node.runs and not node.paused and node.proc is not None and self._can_work(node.proc)

    def _can_work(self, proc: Proc) -> bool:
        if not proc.inside or proc.finished_in == proc.go or proc.leaves or proc.held:
            return False
        assert proc.plan is not None
        if proc.live < proc.go and proc.rank in proc.plan.handovers and not self._predecessor(proc.rank, proc.go):
            return False
        source = proc.plan.sources.get(proc.rank)
        if proc.live < proc.go and source in proc.plan.handovers:
            giver = self._at_rank(source, proc.go)
            if giver is None or giver[1].live < proc.go:
                return False  # the source gets the state itself first, from its predecessor
        if proc.live == proc.go and proc.iteration >= self.target:
            return True
        for rank in self.ranks:
            found = self._at_rank(rank, proc.go)
            if found is None:
                return False
            node, other = found
            moves = node.runs and not node.paused and other.inside
            if proc.live < proc.go:
                if not moves:
                    return False
            else:
                behind = other.iteration < proc.iteration or (other.iteration == proc.iteration and not moves)
                if other.live != proc.live or behind:
                    return False
        return True

    def _work(self, node: Node) -> None:
        proc = node.proc
        assert proc is not None and proc.plan is not None
        events: deque[msg.Event] = deque()
        if proc.live < proc.go:
            plan = proc.plan
            for rank in self.ranks:
                found = self._at_rank(rank, proc.go)
                assert found is not None
                demand(found[1].plan == plan, f"two plans in generation {proc.go}")
            if plan.kind == "fresh":
                proc = replace(proc, status="setup", live=proc.go)
            else:
                source = plan.sources.get(proc.rank)
                if proc.rank in plan.handovers:
                    old = self._predecessor(proc.rank, proc.go)
                    assert old is not None
                    has = (old.status, old.iteration)
                    demand(has == ("holding", plan.iteration), f"the predecessor of {proc.rank} holds {has}")
                elif source is None:
                    has = (proc.status, proc.iteration)
                    demand(has == ("holding", plan.iteration), f"rank {proc.rank} holds {has}, not what the plan says")
                else:
                    giver = self._at_rank(source, proc.go)
                    assert giver is not None
                    has = (giver[1].status, giver[1].iteration)
                    demand(has[0] == "holding" and has[1] >= plan.iteration, f"source {source} of a state holds {has}")
                proc = replace(proc, status="holding", iteration=plan.iteration, live=proc.go)
                events.append(msg.WorkerResumed(0, proc.pid, proc.go, proc.iteration, {}))
            if proc.held and proc.boundary >= 0:  # it was told before it was there
                proc = replace(proc, status="holding")
                events.append(msg.WorkerParked(0, proc.pid, proc.go))
        else:
            if proc.iteration < self.target:
                proc = replace(proc, status="holding", iteration=proc.iteration + 1)
            if proc.held and proc.boundary >= 0:
                events.append(msg.WorkerParked(0, proc.pid, proc.go))
            elif proc.iteration == self.target:
                proc = replace(proc, finished_in=proc.go)
                end = {"iteration": proc.iteration, "checksum": "aa", "replicas": ranges_of(self.ranks)}
                events.append(msg.WorkerFinished(0, proc.pid, proc.go, end))
        node.proc = proc
        self.handle(node, events)

    # ---- what must hold ----

    def _entered(self, changes: Response) -> None:
        """Everything that holds between a record and the one before it."""
        for change in changes:
            if change.value is None or change.value == GARBAGE:
                continue
            mends = change.key[len(KEYS.prefix) :] in self.view.damaged
            if mends and change.key == KEYS.generation:
                restored = decode(GenerationRecord, change.value)
                demand(restored == self.view.generation, f"generation {restored.number} is restored as another")
            elif change.key == KEYS.generation:
                self._new_generation(self.view.generation, decode(GenerationRecord, change.value))
            elif change.key == KEYS.plan(self.view.number):
                once = change.create_revision == change.mod_revision
                demand(once or mends, "the plan of a generation is written twice")
            elif change.key == KEYS.result:
                demand(self.view.result is None, "the job ends twice")
                self._new_result(change.value)

    def _new_generation(self, old: GenerationRecord | None, new: GenerationRecord) -> None:
        owners = [owner.incarnation for owner in new.slots]
        demand(len(set(owners)) == len(owners) == self.num_slots, f"a slot has not one owner: {owners}")
        number = old.number if old else 0
        demand(new.number == number + 1, f"generation {new.number} follows generation {number}")
        demand(not self.given_up.intersection(owners), f"a slot is given to a node that is lost: {owners}")
        if old is None:
            return
        self._new_troubles(old, new)
        pause = self.view.pause
        if pause is not None and pause.boundary is not None and not losses(self.view) and new.mode == "replace":
            at = [node.proc.iteration for node in self.nodes if node.here and node.proc and node.proc.go == number]
            demand(set(at) <= {pause.boundary}, f"workers at {at} are cut, the boundary is {pause.boundary}")
        demand(not self.view.released, "a new generation after the workers were released")
        for slot, (before, after) in enumerate(zip(old.slots, new.slots, strict=True)):
            if before == after:
                continue
            returns = old.handover.get(slot) == after
            demand(slot in new.lost or returns, f"slot {slot} moves although it was not lost")
            demand(old.slot_of(after.incarnation) is None, f"{after.incarnation} moves to slot {slot}")
            if new.handover.get(slot) != before:
                self.given_up |= {before.incarnation}

    def _new_troubles(self, old: GenerationRecord, new: GenerationRecord) -> None:
        """Each failure counts once, whatever node its rank is on; nobody advances far enough here to be forgiven."""
        before = {trouble.rank: trouble.setbacks for trouble in old.troubles}
        after = {trouble.rank: trouble.setbacks for trouble in new.troubles}
        tried = {trouble.rank for trouble in new.troubles if trouble.tried}  # a spare has its slot
        demand(before.keys() <= after.keys(), f"failures of {before.keys() - after.keys()} are forgotten")
        for rank, setbacks in after.items():
            known = before.get(rank, ())
            demand(setbacks[: len(known)] == known, f"failures of rank {rank} are forgotten")
            numbers = [setback.generation for setback in setbacks]
            demand(numbers == sorted(set(numbers)), f"a failure of rank {rank} counts twice: {numbers}")
            demand(len(setbacks) <= self.ends.count(rank), f"more failures of rank {rank} count than there were")
            demand(len(setbacks) < MOST + (rank in tried), f"rank {rank} goes on after {len(setbacks)} failures")

    def _new_result(self, value: bytes) -> None:
        view = self.view
        self.state = decode(ResultRecord, value).state
        # Somebody may have written over what the decision was made on.
        ended = all(slot in view.exited or f"exited/{view.number}/{slot}" in view.damaged for slot in self.ranks)
        if self.state == "failed" and view.released:
            demand(not ended, "failed, though all have exited with code 0")
        elif self.state == "failed":
            most = max((self.ends.count(rank) for rank in self.ranks), default=0)
            demand(self.max_restarts < 0 and most >= MOST, f"the job ends after failures of ranks {self.ends}")
        elif self.state == "stopped" and any(node.state.notice for node in self.nodes):
            generation = view.generation
            owners = {owner.incarnation for owner in generation.slots} if generation else set()
            stay = [n.name for n in self.nodes if n.where == "up" and n.record.incarnation in owners
                    and n.state.notice is None]  # fmt: skip
            demand(not stay, f"the job ends, though nobody has told {stay} to go")
        if b'"succeeded"' in value:
            demand(ended, f"succeeded, but only {sorted(view.exited)} have exited")

    def keep_the_last_copy(self, node: Node) -> None:
        """Before *node* ends its worker: where nobody dies, and only links break, no state may be lost."""
        if self.kinds != ("part",) or node.proc is None or node.proc.status != "holding":
            return
        others = [other.proc.status for other in self.nodes if other is not node and other.proc is not None]
        demand("holding" in others or "setup" in others, f"{node.name} ends the last worker that holds the state")

    def check(self) -> None:
        ranks = [node.proc.rank for node in self.nodes if node.proc is not None and node.proc.inside
                 and node.where != "frozen" and node.proc.go == self.view.number and not node.proc.leaves]  # fmt: skip
        demand(len(set(ranks)) == len(ranks), f"two workers of one rank: {ranks}")
        if "cut" not in self.kinds or "lapse" in self.kinds:
            return  # a lease that an operator revokes is over before its time
        training = [node.proc.rank for node in self.nodes if self._works(node) and node.proc
                    and 0 < node.proc.live == node.proc.go and not node.proc.finished_in]  # fmt: skip
        demand(len(set(training)) == len(training), f"two owners train one rank: {training}")

    def settled(self) -> None:
        """Nothing more can happen: the job has ended, or waits for nodes that do not exist."""
        living = [node for node in self.nodes if node.here]
        demand(all(node.where == "up" for node in living), "somebody is still away")
        if living and all(node.state.notice for node in living) and self.view.generation is not None:
            raise Violation(f"nobody is left to train, and the job has not ended: {self.describe()}")
        # Who was told to leave counts for nothing: the job may wait for another.
        living = [node for node in living if node.name not in self.view.drains]
        if len(living) >= self.num_slots:
            raise Violation(f"the job stands still, though {[node.name for node in living]} live: {self.describe()}")

    @property
    def resumed(self) -> bool:
        return all(slot in self.view.resumed for slot in self.ranks)

    def describe(self) -> str:
        nodes = [(n.name, n.life, n.where, n.proc, len(n.queue), n.writes, n.decided) for n in self.nodes]
        return f"{nodes} {replace(self.view, nodes={}, joined={}, job=None)}"

    # ---- one name per state ----

    def key(self) -> int:
        """Equal for states that behave alike: revisions are renamed to their ranks, texts for people are left out."""
        numbers: list[int] = []
        parts: list[Any] = [self._part(self.view, numbers)]
        for node in self.nodes:
            if node.where == "ended":
                parts.append("ended")
                continue
            alive = node.lease_id in self.store._leases
            if node.where == "crashed":
                parts.append(("crashed", alive, node.record.incarnation))
                continue
            parts.append((
                node.life, node.where, node.dirty, node.doubted, node.paused, node.asked, node.num_procs, alive,
                self._part(node.proc, numbers) if node.proc else None,
                self._part(node.state, numbers),
                self._part(node.view, numbers),
                *[self._part(response, numbers) for response in node.queue], "|",
                *[self._part(write, numbers) for write in node.writes],
                *[self._part(write, numbers) for write in node.decided],
            ))  # fmt: skip
        ranks = {number: rank for rank, number in enumerate(sorted({0, *numbers}))}
        renamed = tuple([ranks[number] for number in numbers])
        return hash((self.faults, self.away, self.given_up, tuple(parts), renamed))

    def _part(self, value: View | Response | Pending | Proc | state_module.AgentState, numbers: list[int]) -> int:
        """The name of a part, whose revisions go to *numbers*: how many there are is in the name."""
        name, revisions = self.known.part(value)
        numbers += revisions
        return name


Part = tuple[int, tuple[int, ...]]


def _part_of(value: View | Response | Pending | Proc | state_module.AgentState) -> Part:
    match value:
        case Proc():
            return hash(value.key()), ()
        case state_module.AgentState() as state:
            workers = tuple(_worker_key(worker) for worker in state.workers.values())
            return hash((state.paused, workers, _lost_key(state), state.restarts_used, state.restarts_counted_in,
                         state.store_started, state.issued, state.view.number)), ()  # fmt: skip
        case View() as view:
            damaged = [view.damaged[name].revision for name in sorted(view.damaged)]
            joined = [view.joined[name] for name in sorted(view.joined)]
            revisions = (*damaged, view.generation_revision, view.coordinator_revision, *joined)
            return hash((_content(view), len(damaged), len(joined))), revisions
        case Pending() as write:
            guards = tuple((guard.target, guard.key, None if isinstance(guard.operand, int) else guard.operand)
                           for guard in write.guards)  # fmt: skip
            numbers = tuple(guard.operand for guard in write.guards if isinstance(guard.operand, int))
            return hash((write.what, write.number, write.incarnation, _ops_key(write.ops), guards)), numbers
    texts: list[Any] = []
    found: list[int] = []
    for change in value:
        value_key = change.value[:60] if change.value and change.key == KEYS.generation else change.value
        texts.append((change.key, value_key))
        if change.key == KEYS.generation or change.key == KEYS.coordinator:
            found.append(change.mod_revision)
        elif change.key.startswith(KEYS.nodes) and change.value is not None:
            found.append(change.create_revision)
    return hash(tuple(texts)), tuple(found)


def _content(view: View) -> int:
    g, plan = view.generation, view.plan
    return hash((
        g and (g.number, g.mode, tuple(o.incarnation for o in g.slots), g.store_slot, g.epoch,
               repr(sorted(g.lost.items())), g.num_restarts, repr(sorted(g.handover.items())),
               repr(sorted(g.bare.items())), repr(sorted(g.replaced.items()))),
        view.coordinator and view.coordinator.incarnation,
        view.job is not None, tuple(sorted(view.damaged)),
        view.tracked, view.store is not None, view.released, view.result and view.result.state,
        plan and (plan.restart, repr({**plan.content, "why": ""})),
        tuple(sorted((s, f.kind, f.incarnation, f.local_ranks, f.restarts_left, f.reporter, f.is_dead, f.is_empty)
                     for s, f in view.failures.items())),
        tuple(sorted((s, p.incarnation, repr(p.reports)) for s, p in view.progress.items())),
        tuple(sorted(view.resumed)), tuple(sorted(view.finished)), tuple(sorted(view.exited)),
        tuple(sorted((n, d.incarnation) for n, d in view.drains.items())), view.pause,
        tuple(sorted((s, p.iteration) for s, p in view.positions.items())), tuple(sorted(view.parked)),
        tuple(sorted(view.taken)),
        tuple(sorted((s, p.incarnation, repr(p.reports)) for s, p in view.handovers.items())),
        tuple(sorted(node.incarnation for node in view.nodes.values())),
    ))  # fmt: skip


def _worker_key(w: state_module.Worker) -> tuple[Any, ...]:
    return (w.local_rank, w.generation, w.pid, w.hello, w.current, w.stop_sent, w.stopped,
            repr(w.report) if w.report else "", w.resumed, w.resumed_iteration, w.finished is not None, w.released,
            w.unfit, w.killed, w.exit and w.exit.exit_code, w.asked, w.promised_in, w.promised, w.told,
            w.parked, w.holds)  # fmt: skip


def _lost_key(state: state_module.AgentState) -> frozenset[tuple[Any, ...]]:
    """Why counts where it is checked: a false alarm and a loss of the same node are two states."""
    return frozenset((peer, seen.is_dead, FALSE_ALARM in seen.evidence) for peer, seen in state.lost_peers.items())


def _ops_key(ops: tuple[Op, ...]) -> tuple[Any, ...]:
    return tuple((op.key, op.value[:60] if op.key == KEYS.generation else op.value) if isinstance(op, Put) else op
                 for op in ops)  # fmt: skip
