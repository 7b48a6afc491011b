"""What the coordinator decides: the commands of `membership`; and what the user allows it. Pure data.

`node.coordinator` writes them, in their order. They must never hold anything but plain values and records: a journal
writes them down, and a replay compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_rendezvous.roster.mending import RemoveDamaged, RestoreGeneration, RestoreJob
from swift_rendezvous.roster.records import (
    FailureRecord,
    GenerationRecord,
    PauseRecord,
    ResultRecord,
)


@dataclass(frozen=True)
class Rules:
    """What the user allows, in seconds: waits for a replacement, and for enough nodes to begin.

    *return_s*, *outage_s*: see `missing`. *last_call_s*: see `resizing`.
    """

    replacement_timeout_s: float = 300.0
    join_timeout_s: float = 600.0
    return_s: float = 0.0
    outage_s: float = 0.0
    last_call_s: float = 30.0


@dataclass(frozen=True)
class PublishGeneration:
    """Write the next generation."""

    generation: GenerationRecord


@dataclass(frozen=True)
class PublishPlan:
    """Ask the recovery room for the plan of the current generation, and write it."""


@dataclass(frozen=True)
class PublishRelease:
    """Let the workers of a finished job exit."""


@dataclass(frozen=True)
class PublishResult:
    """End the job."""

    result: ResultRecord


@dataclass(frozen=True)
class ForgetNode:
    """Remove the record of a node that is known to be lost, before its lease runs out."""

    node_id: str
    incarnation: str


@dataclass(frozen=True)
class PublishLoss:
    """Write down that the node of a slot has not come back: from there on it cannot."""

    failure: FailureRecord


@dataclass(frozen=True)
class PublishPause:
    """Ask the workers of the current generation where they are, or tell them where to stop (see `draining`)."""

    pause: PauseRecord


@dataclass(frozen=True)
class ForgetDrain:
    """Remove an order whose node has gone."""

    node_id: str


Command = (
    PublishGeneration
    | PublishPlan
    | PublishRelease
    | PublishResult
    | PublishPause
    | PublishLoss
    | ForgetNode
    | ForgetDrain
    | RestoreGeneration
    | RestoreJob
    | RemoveDamaged
)


@dataclass(frozen=True)
class Decision:
    """*commands* in the order in which they must be written; *waiting* names what the job waits for, if anything.

    *deadline_s*: `decide` must be called again at this time (seconds, the clock of *now_s*) even if nothing changes.
    """

    commands: tuple[Command, ...] = ()
    why: str = ""
    waiting: str = ""
    deadline_s: float | None = None


def nodes_are(num: int) -> str:
    """How a sentence about so many nodes begins."""
    return "1 node is" if num == 1 else f"{num} nodes are"


def last_call(what: str, since_s: float, rules: Rules) -> Decision:
    """Enough nodes are here, and others may come: they have a moment, from *since_s* on."""
    waiting = f"{what}; others have {rules.last_call_s:g} s to come (--rdzv-conf last_call_timeout)"
    return Decision(waiting=waiting, deadline_s=since_s + rules.last_call_s)
