"""What an agent does: the commands of `machine`. Pure data.

Commands are orders; the agent's `loop` carries them out. They must never hold anything but plain values and records: a
journal writes them down, and a replay compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swift_rendezvous.roster.records import FailureRecord, FinishedRecord, ResultRecord


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
class StartHelper:
    """A process that repeats the iterations of *rank*, which is lost, with its replacement. *local_rank*: its number,
    see `swift_agent.wire.environment.helper_number`."""

    local_rank: int
    rank: int
    generation: int


@dataclass(frozen=True)
class KillHelper:
    local_rank: int
    rank: int
    why: str


@dataclass(frozen=True)
class SendHelp:
    """As `SendGo`, to a helper."""

    local_rank: int
    generation: int


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
    """Ask where they are; they promise to go no further than they say (see `swift_rendezvous.roster.draining`)."""

    local_ranks: tuple[int, ...]
    generation: int


@dataclass(frozen=True)
class SendBoundary:
    """They stop before *iteration*; *saves*: after a checkpoint."""

    local_ranks: tuple[int, ...]
    generation: int
    iteration: int
    saves: bool = False


@dataclass(frozen=True)
class SendLogGroup:
    """From their next iteration on they log no messages to these ranks."""

    local_ranks: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class AskIteration:
    local_ranks: tuple[int, ...]


@dataclass(frozen=True)
class TellRate:
    """Have the speed of the job written. *per_s*: iterations per second; *began_s*: when some iterations began that
    were not told yet, by number, monotonic."""

    generation: int
    iteration: int
    per_s: float | None
    began_s: Mapping[int, float] = field(default_factory=dict)


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
class WriteMeasured:
    generation: int
    slot: int
    ranks: tuple[Mapping[str, Any], ...]


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
    saves: bool = False


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
class TellNotice:
    """This node got *signal*: it shall be drained, in *grace_s*."""

    signal: str
    grace_s: float


@dataclass(frozen=True)
class ForgetSpare:
    """A node without a slot is lost: it must not be chosen as a replacement."""

    node_id: str
    incarnation: str


@dataclass(frozen=True)
class LookAgain:
    """What was seen of a peer is too old to be acted on, and was not told: it is watched again."""

    incarnation: str


@dataclass(frozen=True)
class PauseWorkers:
    """It cannot be asked whether the slot of this node was given away: its workers stand still, with their state."""

    why: str


@dataclass(frozen=True)
class ReadPlace:
    """Ask etcd which generation the job is in; `PlaceRead` is the answer, if there is one."""


@dataclass(frozen=True)
class ResumeWorkers:
    """Etcd has answered: the slot is still that of this node."""


@dataclass(frozen=True)
class Reclaim:
    """The record of this node is gone, but no other has its slot: get another lease. The workers train on."""


@dataclass(frozen=True)
class Rejoin:
    """The slot was given to another node: come back as a spare, under a new incarnation."""

    why: str


@dataclass(frozen=True)
class LeaveJob:
    """For good: workers of this node failed too often, and another node has its slot; or it was drained, or told to go.
    """

    result: ResultRecord


@dataclass(frozen=True)
class EndJob:
    """The job has a result."""


Command = (
    StartWorkers
    | KillWorkers
    | StartHelper
    | KillHelper
    | SendHelp
    | SendStop
    | SendGo
    | SendLeave
    | SendKeep
    | DropKept
    | SendPause
    | SendBoundary
    | SendLogGroup
    | AskIteration
    | TellRate
    | SendRelease
    | HostStore
    | WriteTracked
    | WriteFailure
    | WriteProgress
    | WriteResumed
    | WriteMeasured
    | WriteFinished
    | WriteExited
    | WritePosition
    | WriteParked
    | WriteHandover
    | WriteTaken
    | TellNotice
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
