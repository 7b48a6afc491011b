"""What happens to an agent: the events of `machine`. Pure data.

Events are facts in the past tense, and do not know how they came about; `commands` has the orders that follow. They
must never hold anything but plain values and records: a journal writes them down, and a replay reads them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swift_rendezvous.roster.records import WorkerExit
from swift_rendezvous.roster.view import View

# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ViewChanged:
    view: View


@dataclass(frozen=True)
class WorkerStarted:
    local_rank: int
    generation: int
    pid: int


@dataclass(frozen=True)
class HelloReceived:
    local_rank: int
    pid: int


@dataclass(frozen=True)
class ReportReceived:
    local_rank: int
    pid: int
    generation: int
    report: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerHolds:
    """It has got the state, compared with that of the other replicas; it does not train yet."""

    local_rank: int
    pid: int


@dataclass(frozen=True)
class WorkerResumed:
    local_rank: int
    pid: int
    generation: int
    iteration: int
    phases_s: Mapping[str, float]


@dataclass(frozen=True)
class WorkerMeasured:
    local_rank: int
    pid: int
    generation: int
    measured: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerFinished:
    local_rank: int
    pid: int
    generation: int
    end: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerPromised:
    """It begins no iteration beyond *iteration* before it knows the boundary. *saves*: it takes checkpoints."""

    local_rank: int
    pid: int
    generation: int
    iteration: int
    saves: bool = False


@dataclass(frozen=True)
class WorkerParked:
    """It waits at the boundary."""

    local_rank: int
    pid: int
    generation: int


@dataclass(frozen=True)
class WorkerKept:
    """The file of this node has the state of *iteration*, after *sections* `@job.resilient` calls."""

    local_rank: int
    pid: int
    iteration: int
    sections: int


@dataclass(frozen=True)
class WorkerAt:
    """The answer to `AskIteration`: the first iteration that it has not begun. *began_s*: when some before it began."""

    local_rank: int
    pid: int
    iteration: int
    began_s: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerUnfit:
    """The worker lives but cannot go on in place. *is_hopeless*: nor would workers that are started again."""

    local_rank: int
    pid: int
    why: str
    is_hopeless: bool = False


@dataclass(frozen=True)
class WorkerDeaf:
    """It has taken nothing of what it was told for that long, though it is not paused."""

    local_rank: int
    pid: int
    for_s: float


@dataclass(frozen=True)
class WorkerApart:
    """It could not be connected with the others in that generation, or got a state that was altered on its way, and no
    peer is known to have failed."""

    local_rank: int
    pid: int
    generation: int
    why: str


@dataclass(frozen=True)
class WorkerExited:
    exit: WorkerExit


@dataclass(frozen=True)
class HelperStarted:
    """*local_rank*, of this and the next: see `StartHelper`."""

    local_rank: int
    generation: int
    pid: int


@dataclass(frozen=True)
class HelperWaits:
    """It has said hello, and has nothing to do yet."""

    local_rank: int
    pid: int


@dataclass(frozen=True)
class HelperUnfit:
    """It cannot help."""

    local_rank: int
    pid: int
    why: str


@dataclass(frozen=True)
class HelperExited:
    """It has ended, in whatever way, or could not be started."""

    local_rank: int
    pid: int


@dataclass(frozen=True)
class PeerLost:
    """*is_dead*: its kernel has closed the connection and refuses another; else only the way to it may be closed.
    *age_s*: how long ago that was seen."""

    incarnation: str
    evidence: str
    is_dead: bool = False
    age_s: float = 0.0


@dataclass(frozen=True)
class PeerDoubted:
    """Its loss could not be told in time, and may be a thing of the past: it has to be seen again."""

    incarnation: str


@dataclass(frozen=True)
class PlaceReclaimed:
    """This node has another lease. What it wrote while it had none may have been refused."""


@dataclass(frozen=True)
class StoodStill:
    """This agent was frozen for so long. What its workers have said meanwhile is not heard yet."""

    for_s: float


@dataclass(frozen=True)
class Noticed:
    """A signal has told this node to go. *until_s*: how long it waits for a spare, on the clock of `on_event`;
    *grace_s* from now on."""

    signal: str
    grace_s: float
    until_s: float


@dataclass(frozen=True)
class Tick:
    """Time has passed. *holds*, *is_away*: see `isolation.pausing`; *why*: if it does not hold, for people."""

    holds: bool = True
    is_away: bool = False
    why: str = ""


@dataclass(frozen=True)
class PlaceRead:
    """etcd was asked which generation the job is in: the revision of its record."""

    revision: int


@dataclass(frozen=True)
class RateTick:
    """Time has passed for the meter of the job's speed."""


Event = (
    ViewChanged
    | WorkerStarted
    | HelloReceived
    | ReportReceived
    | WorkerHolds
    | WorkerResumed
    | WorkerMeasured
    | WorkerFinished
    | WorkerPromised
    | WorkerParked
    | WorkerKept
    | WorkerAt
    | WorkerUnfit
    | WorkerApart
    | WorkerDeaf
    | WorkerExited
    | HelperStarted
    | HelperWaits
    | HelperUnfit
    | HelperExited
    | PeerLost
    | PeerDoubted
    | PlaceReclaimed
    | StoodStill
    | Noticed
    | Tick
    | PlaceRead
    | RateTick
)

# ---- commands -------------------------------------------------------------------------------------------------------


