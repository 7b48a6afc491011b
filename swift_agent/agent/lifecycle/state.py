"""What an agent knows of its workers, as values; and how a step changes them. Pure.

All values are frozen: a change makes new ones. This module must never decide what an agent does (that is `machine` and
`steps`), and must never read a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from swift_agent.agent.lifecycle import rate
from swift_agent.agent.lifecycle.commands import (
    Command,
)
from swift_recovery.planning.resize import Held
from swift_rendezvous.roster.records import (
    GenerationRecord,
    WorkerExit,
)
from swift_rendezvous.roster.view import View

RECLAIM = ("reclaim",)


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


def _is_registered(state: AgentState, view: View) -> bool:
    mine = view.nodes.get(state.node_id)
    return mine is not None and mine.incarnation == state.incarnation


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
    """The worker's place in the picture of `machine`, for status lines."""
    if not worker.alive:
        return "exited"
    if not worker.hello:
        return "started"
    if worker.current == 0:
        return "waiting"
    if worker.stop_sent == worker.current:
        return "stopped" if worker.stopped == worker.current else "stopping"
    return "finished" if worker.finished is not None else "running"
