"""What an agent and its workers say to each other: one class for each message.

    agent: Go(1) ............ Stop(1) ............ Go(2) ... Release
    worker:      trains in 1          Report(1)          enters 2, Holds, Resumed

To say something new, add a class here and to the union and the vocabulary of its direction: mypy then names every
place that does not handle it yet. This module must never do anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swift_agent.wire.vocabulary import Vocabulary

# ---- from an agent to a worker ----


@dataclass(frozen=True)
class Store:
    """Where the stores of a generation listen (see `StoreRecord`)."""

    host: str
    port: int
    session_port: int
    token: str = field(repr=False)


@dataclass(frozen=True)
class Go:
    """Enter a generation."""

    generation: int
    plan: Mapping[str, Any]
    """See `Plan.to_json`."""
    world_size: int
    store: Store
    kept: str = ""
    """The directory where a node keeps a state for its new workers."""
    leaves: bool = False
    """Of a drained node: hand the state over to the successors in the plan, and enter nothing."""
    keeps: bool = False
    """Of a worker that ends because the job changes its size: keep the state in *kept*, and enter nothing."""
    helpers: int = 0
    """So many processes repeat the one rank of the plan together with its replacement (SWIFT, section 5.2)."""
    share: int = 0
    """Of one of those: which share of the micro-batches is its own, from 1. The replacement has share 0."""


@dataclass(frozen=True)
class Stop:
    """That generation is over: abort its process groups and report."""

    generation: int
    why: str


@dataclass(frozen=True)
class Pause:
    """For a drain: promise an iteration that this worker does not pass, and stop there."""

    generation: int


@dataclass(frozen=True)
class Boundary:
    """Stop before *iteration*, as all workers do that were paused. *saves*: after a checkpoint of what is before it."""

    generation: int
    iteration: int
    saves: bool = False


@dataclass(frozen=True)
class LogGroup:
    """From the next iteration on messages to these ranks are not logged; see `JobRecord.log_groups`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Where:
    """Say which iteration comes next."""


@dataclass(frozen=True)
class Wait:
    """The agent cannot know yet whether a peer has failed: the time of a worker that has asked does not run."""


@dataclass(frozen=True)
class Place:
    """The answer to `AskPlace` of that number. *why*: why the place is not the worker's own, '' if it is."""

    number: int
    why: str


@dataclass(frozen=True)
class Refused:
    """This process is not taken for that worker."""

    why: str


@dataclass(frozen=True)
class Release:
    """The job is over."""


ToWorker = Go | Stop | Pause | Boundary | LogGroup | Where | Wait | Place | Refused | Release
TO_WORKER: Vocabulary[ToWorker] = Vocabulary(
    Go, Stop, Pause, Boundary, LogGroup, Where, Wait, Place, Refused, Release
)

# ---- from a worker to its agent ----


@dataclass(frozen=True)
class Hello:
    """The first message: which worker this is, and for which generation it was started."""

    local_rank: int
    generation: int


@dataclass(frozen=True)
class Report:
    """After `Stop`: what this worker has, for the plan of the next generation (see `Place.report` of the loop)."""

    generation: int
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Holds:
    """The state of the plan is complete in this worker."""


@dataclass(frozen=True)
class Resumed:
    """The first iteration after a recovery is done. *phases_s*: how long each phase of the recovery took."""

    generation: int
    iteration: int
    phases_s: Mapping[str, float]


@dataclass(frozen=True)
class Finished:
    """The script has ended. *end*: what it says of its result."""

    generation: int
    end: Mapping[str, Any]


@dataclass(frozen=True)
class Promised:
    """The answer to `Pause`: this worker begins no iteration from *iteration* on. *saves*: it takes checkpoints."""

    generation: int
    iteration: int
    saves: bool = False


@dataclass(frozen=True)
class Parked:
    """This worker stands at the boundary."""

    generation: int


@dataclass(frozen=True)
class Kept:
    """The answer to `Go` that *keeps*: the state before that section of *iteration* is kept on this node."""

    iteration: int
    sections: int


@dataclass(frozen=True)
class At:
    """The answer to `Where`. *began_s*: by iteration, on the clock of this machine (monotonic), when some of those
    since the last answer began."""

    iteration: int
    began_s: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Unfit:
    """This worker lives but cannot go on in place. *hopeless*: nor would workers that are started again."""

    why: str
    hopeless: bool = False


@dataclass(frozen=True)
class Suspect:
    """A collective failed: has a peer?"""

    why: str


@dataclass(frozen=True)
class Again:
    """No peer has failed, but this worker cannot go on in *generation*: it asks for another one."""

    generation: int
    why: str


@dataclass(frozen=True)
class AskPlace:
    """Is the place of this worker its own in *generation*? `Place` of the same number is the answer."""

    number: int
    generation: int


@dataclass(frozen=True)
class Measured:
    """What this worker costs, of a few iterations that nothing has disturbed (see `RankMeasured`)."""

    generation: int
    measured: Mapping[str, Any]


@dataclass(frozen=True)
class Modules:
    """What the script has imported."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Kernels:
    """What the workers of all ranks compute with, as they have told each other: see `KernelsRecord`."""

    texts: tuple[str, ...]
    of: tuple[int, ...]


@dataclass(frozen=True)
class Note:
    """A line for people, shown by the agent."""

    rank: int
    text: str


ToAgent = (
    Hello | Report | Holds | Resumed | Finished | Promised | Parked | Kept | At | Unfit | Suspect | Again | AskPlace
    | Measured | Modules | Kernels | Note
)  # fmt: skip
TO_AGENT: Vocabulary[ToAgent] = Vocabulary(
    Hello, Report, Holds, Resumed, Finished, Promised, Parked, Kept, At, Unfit, Suspect, Again, AskPlace, Measured,
    Modules, Kernels, Note,
)
