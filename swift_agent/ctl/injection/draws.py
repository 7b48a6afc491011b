"""Which faults a campaign orders, and what is left to order: drawn from a seed. Pure.

Never two at the same time, and never one that would take the last copy of the state on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from swift_agent.wire.injected import NEXT, PHASES, Fault, Kind, Phase
from swift_rendezvous.roster.view import View

# Those that every script and machine can have, if none are named.
DEFAULT_KINDS: tuple[Kind, ...] = ("kill-worker", "kill-node", "freeze")


@dataclass(frozen=True)
class Draw:
    """All of these are drawn for each fault, whether it needs them or not: a seed means the same faults, whatever the
    job does."""

    kind: Kind
    phase: Phase
    part: float
    target: float
    """0 to 1: which rank."""
    pause: float
    """0 to 1: how long it waits before, of the pause that was asked for."""


def draws(seed: int, number: int, kinds: Sequence[Kind]) -> list[Draw]:
    random = Random(seed)
    return [
        Draw(random.choice(list(kinds)), random.choice(PHASES), random.random(), random.random(), random.random())
        for _ in range(number)
    ]


def fault_of(draw: Draw, view: View, fault_id: str, for_s: float) -> Fault | None:
    """For the job as it is now. A node is lost only where a spare waits, or the job has more nodes than one; None: it
    has no target."""
    generation = view.generation
    if generation is None or not view.tracked:
        return None
    kind = draw.kind
    has_spare = len(view.nodes) > len(generation.slots)
    if kind == "kill-node" and not has_spare:
        kind = "kill-worker"
    rank = min(int(draw.target * generation.world_size), generation.world_size - 1)
    return Fault(fault_id, kind, rank, iteration=NEXT, phase=draw.phase, part=round(draw.part, 2), for_s=for_s)
