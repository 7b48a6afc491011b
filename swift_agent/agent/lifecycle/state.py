"""What an agent knows of its workers, as values; and how a step changes them. Pure.

All values are frozen: a change makes new ones. This module must never decide what an agent does (that is `machine` and
`steps`), and must never read a clock.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from swift_agent.agent.lifecycle import rate
from swift_agent.agent.lifecycle.commands import (
    Command,
)
from swift_agent.agent.lifecycle.events import Noticed
from swift_recovery.planning.resize import Held
from swift_rendezvous.roster.records import (
    GenerationRecord,
    WorkerExit,
)
from swift_rendezvous.roster.view import View

RECLAIM = ("reclaim",)


Phase = Literal["started", "waiting", "running", "finished", "stopping", "stopped", "exited"]
# In these it is in its generation; in those it can be told to enter one.
INSIDE: Final[tuple[Phase, ...]] = ("running", "finished")
OUTSIDE: Final[tuple[Phase, ...]] = ("waiting", "stopped")


@dataclass(frozen=True)
class Worker:
    """One local process and what is known of it.

    Most fields are the number of the generation in which something was last done, 0: never. What they say together is
    `phase`.
    """

    local_rank: int
    generation: int
    """In which it was started."""
    pid: int = 0
    """0: not known yet."""
    hello: bool = False
    current: int = 0
    """Which it was told to enter."""
    stop_sent: int = 0
    """Which it was told to leave."""
    stop_sent_s: float = 0.0
    stopped: int = 0
    """Which it has left and reported on."""
    report: Mapping[str, Any] | None = None
    """What it held then."""
    resumed: int = 0
    """In which it trains again."""
    resumed_iteration: int = 0
    measured_in: int = 0
    """In which it has measured itself."""
    measured: Mapping[str, Any] | None = None
    holds: bool = False
    """It has the state of some iteration, whichever."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    finished: Mapping[str, Any] | None = None
    """What it said at the end of its script."""
    asked: int = 0
    """In which it was asked for a promise, for a drain."""
    promised_in: int = 0
    promised: int = 0
    """The first iteration that it does not begin."""
    saves: bool = False
    """It takes checkpoints."""
    told: int = 0
    """In which it was told the boundary."""
    parked: int = 0
    """In which it stands there."""
    keeps: int = 0
    """In which it was told to keep its state in a file."""
    released: bool = False
    unfit: str = ""
    """Why it cannot go on in place."""
    deaf_for_s: float = 0.0
    apart: int = 0
    """In which it could not be connected with the others."""
    apart_why: str = ""
    is_hopeless: bool = False
    """It is unfit, and so would be those that are started again."""
    log_group: tuple[int, ...] = ()
    """The ranks that it was told not to log messages for."""
    killed: bool = False
    exit: WorkerExit | None = None

    @property
    def alive(self) -> bool:
        return self.exit is None

    @property
    def done(self) -> bool:
        return self.exit is not None and self.exit.exit_code == 0

    @property
    def phase(self) -> Phase:
        """Its place in the picture of `machine`."""
        if not self.alive:
            return "exited"
        if not self.hello:
            return "started"
        if self.current == 0:
            return "waiting"
        if self.stop_sent == self.current:
            return "stopped" if self.stopped == self.current else "stopping"
        return "finished" if self.finished is not None else "running"


@dataclass(frozen=True)
class HelperProcess:
    """A process of this node that helps *rank* (see `helping`), in that generation only. *pid*: 0: not known yet."""

    rank: int
    generation: int
    pid: int = 0
    waits: bool = False
    """It has said hello."""
    went: bool = False
    """It was told to go."""
    unfit: str = ""
    """Why it cannot help."""
    killed: bool = False
    gone: bool = False
    """It is kept until the generation is over: nobody starts it again."""


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
    helpers: Mapping[int, HelperProcess] = field(default_factory=dict)
    """By number, see `swift_agent.wire.environment.helper_number`."""
    lost_peers: Mapping[str, Suspicion] = field(default_factory=dict)
    """By incarnation."""
    restarts_used: int = 0
    restarts_counted_in: int = 0
    restarts_window_s: float = 0.0
    """A restart counts for so long; 0: for ever."""
    restarted_s: tuple[float, ...] = ()
    """When the restarts were that count, if they do so for a time."""
    store_started: int = 0
    paused: bool = False
    """Its workers stand still, and so do those that a spare starts: another node may have their places."""
    notice: Noticed | None = None
    """This node was told to go."""
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


def holds_slot(state: AgentState) -> bool:
    """No other node has its place, as far as it knows; before the first generation there are none."""
    generation = state.view.generation
    return generation is None or generation.slot_of(state.incarnation) is not None


def _is_registered(state: AgentState, view: View) -> bool:
    mine = view.nodes.get(state.node_id)
    return mine is not None and mine.incarnation == state.incarnation


def is_spare(state: AgentState) -> bool:
    """It has neither a place that another could get, nor workers of one that it had."""
    generation = state.view.generation
    return not state.workers and (generation is None or generation.slot_of(state.incarnation) is None)


def describe_exit(exit_: WorkerExit) -> str:
    """One clause for people: which rank, where, and how."""
    if exit_.pid == 0:
        return f"rank {exit_.rank} on {exit_.host}: {exit_.message}"
    # What is said of a process that was killed begins with one clause of ours, if the kernel knows more.
    first = exit_.message.partition("\n")[0]
    why = f": {first}" if exit_.exit_code < 0 and first.startswith("the kernel") else ""
    return f"rank {exit_.rank} on {exit_.host} (pid {exit_.pid}) {how_it_ended(exit_)}{why}"


def how_it_ended(exit_: WorkerExit) -> str:
    """In words, of a process that has run."""
    code = exit_.exit_code
    return f"killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"


def signal_name(number: int) -> str:
    """`signal 9 (SIGKILL)`."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


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
