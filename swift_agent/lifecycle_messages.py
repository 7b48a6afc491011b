"""What happens to an agent and what it does: the events and commands of `lifecycle`. Pure data.

Events are facts in the past tense, commands are orders; neither knows how it came about or how it is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swift_rendezvous.keys import FailureRecord, FinishedRecord, ResultRecord, WorkerExit
from swift_rendezvous.view import View

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
class WorkerFinished:
    local_rank: int
    pid: int
    generation: int
    end: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerPromised:
    """It begins no iteration beyond *iteration* before it knows the boundary."""

    local_rank: int
    pid: int
    generation: int
    iteration: int


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
    """The answer to `AskIteration`: the first iteration that it has not begun."""

    local_rank: int
    pid: int
    iteration: int


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
    | WorkerFinished
    | WorkerPromised
    | WorkerParked
    | WorkerKept
    | WorkerAt
    | WorkerUnfit
    | WorkerApart
    | WorkerDeaf
    | WorkerExited
    | PeerLost
    | PeerDoubted
    | PlaceReclaimed
    | StoodStill
    | Tick
    | PlaceRead
    | RateTick
)

# ---- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartWorkers:
    """*warm*: from the standby server. Cold processes are what torchrun would start."""

    local_ranks: tuple[int, ...]
    generation: int
    warm: bool


@dataclass(frozen=True)
class KillWorkers:
    """*graceful*: SIGTERM first, as torchrun; otherwise SIGKILL at once."""

    local_ranks: tuple[int, ...]
    why: str
    graceful: bool


@dataclass(frozen=True)
class SendStop:
    local_ranks: tuple[int, ...]
    generation: int
    why: str


@dataclass(frozen=True)
class SendGo:
    local_ranks: tuple[int, ...]
    generation: int


@dataclass(frozen=True)
class SendLeave:
    """As `SendGo`, to workers of a drained node: they hand their state over and take no further part."""

    local_ranks: tuple[int, ...]
    generation: int


@dataclass(frozen=True)
class SendKeep:
    """To an old worker when the job changes its size: it writes its state into the file of this node."""

    local_ranks: tuple[int, ...]
    generation: int


@dataclass(frozen=True)
class DropKept:
    """Remove that file."""


@dataclass(frozen=True)
class SendPause:
    """Ask where they are; they promise to go no further than they say (see `swift_rendezvous.draining`)."""

    local_ranks: tuple[int, ...]
    generation: int


@dataclass(frozen=True)
class SendBoundary:
    """They stop before *iteration*."""

    local_ranks: tuple[int, ...]
    generation: int
    iteration: int


@dataclass(frozen=True)
class AskIteration:
    local_ranks: tuple[int, ...]


@dataclass(frozen=True)
class TellRate:
    """Have the speed of the job written. *per_s*: iterations per second."""

    generation: int
    iteration: int
    per_s: float | None


@dataclass(frozen=True)
class SendRelease:
    local_ranks: tuple[int, ...]


@dataclass(frozen=True)
class HostStore:
    """Start the c10d store of a generation on this node and publish its address."""

    generation: int


@dataclass(frozen=True)
class WriteTracked:
    """Some worker uses `swift.init()`: from now on failures are recovered in place."""


@dataclass(frozen=True)
class WriteFailure:
    generation: int
    failure: FailureRecord


@dataclass(frozen=True)
class WriteProgress:
    generation: int
    slot: int
    reports: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class WriteResumed:
    generation: int
    slot: int
    iteration: int
    phases_s: Mapping[str, float]


@dataclass(frozen=True)
class WriteFinished:
    generation: int
    record: FinishedRecord


@dataclass(frozen=True)
class WriteExited:
    generation: int
    slot: int


@dataclass(frozen=True)
class WritePosition:
    generation: int
    slot: int
    iteration: int


@dataclass(frozen=True)
class WriteParked:
    generation: int
    slot: int


@dataclass(frozen=True)
class WriteHandover:
    """What the workers of a drained node hold."""

    generation: int
    slot: int
    reports: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class WriteTaken:
    """The slot of a drained node trains here."""

    generation: int
    slot: int


@dataclass(frozen=True)
class ForgetSpare:
    """A node without a slot is lost: nobody may choose it as a replacement."""

    node_id: str
    incarnation: str


@dataclass(frozen=True)
class LookAgain:
    """What was seen of a peer is too old to be acted on, and was not told: it is watched again."""

    incarnation: str


@dataclass(frozen=True)
class PauseWorkers:
    """Nobody can be asked whether the slot of this node was given away: its workers stand still, with their state."""

    why: str


@dataclass(frozen=True)
class ReadPlace:
    """Ask etcd which generation the job is in; `PlaceRead` is the answer, if there is one."""


@dataclass(frozen=True)
class ResumeWorkers:
    """Etcd has answered: the slot is still that of this node."""


@dataclass(frozen=True)
class Reclaim:
    """The record of this node is gone, but nobody has its slot: get another lease. The workers train on."""


@dataclass(frozen=True)
class Rejoin:
    """The slot was given to another node: come back as a spare, under a new incarnation."""

    why: str


@dataclass(frozen=True)
class LeaveJob:
    """For good: workers of this node failed too often, and another node has its slot; or it was drained."""

    result: ResultRecord


@dataclass(frozen=True)
class EndJob:
    """The job has a result."""


Command = (
    StartWorkers
    | KillWorkers
    | SendStop
    | SendGo
    | SendLeave
    | SendKeep
    | DropKept
    | SendPause
    | SendBoundary
    | AskIteration
    | TellRate
    | SendRelease
    | HostStore
    | WriteTracked
    | WriteFailure
    | WriteProgress
    | WriteResumed
    | WriteFinished
    | WriteExited
    | WritePosition
    | WriteParked
    | WriteHandover
    | WriteTaken
    | ForgetSpare
    | LookAgain
    | PauseWorkers
    | ReadPlace
    | ResumeWorkers
    | Reclaim
    | Rejoin
    | LeaveJob
    | EndJob
)
