"""What each rank does to enter a generation, as a value and as JSON. Pure.

`planner` makes it, or `resize` where the number of ranks changes; the record of the generation's plan holds it, and all
workers follow it. This module must never choose anything, and must never look at tensors, clocks or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from swift_recovery.planning.half_done_updates import Patch
from swift_recovery.planning.lossy import Deviation
from swift_recovery.planning.reports import ranges_of, ranks_of
from swift_recovery.planning.sentences import _deviation_of

PlanKind = Literal["fresh", "copy", "restart"]
# What becomes of a half-done update (`--recovery`): see `half_done_updates` and `lossy`.
Way = Literal["exact", "immediate-rollback", "lossy-forward"]
# Left out of the record.
_USUALLY: Mapping[str, Any] = {"checkpoint": 0, "stays": False, "slowdown": 1.0}
# What a status says, where the report says no more.
_LACKS = {"setup": "were cut before their training loop began", "empty": "had no state yet"}


@dataclass(frozen=True)
class Plan:
    """What each rank does to enter a generation."""

    kind: PlanKind
    """`fresh`: no rank holds state yet; all create their process groups together and run their set-up together.
    `copy`: training goes on with the state of *iteration*.
    `restart`: state cannot be brought back in place; all begin with the newest checkpoint, or start over."""
    why: str
    iteration: int = 0
    sections: int = 0
    """So many `@job.resilient` calls count as finished."""
    sources: Mapping[int, int] = field(default_factory=dict)
    """By rank: the one that sends it its state. Ranks that are no key hold it already."""
    layouts: Mapping[int, int] = field(default_factory=dict)
    """By rank: the one whose DDP bucket layout it takes over (of a rank in *handovers*: its predecessor's). A rank that
    is no key leads its replica set."""
    handovers: tuple[int, ...] = ()
    """Ranks that get the state from their own predecessors instead: processes of the same rank on a node that is
    leaving."""
    keepers: Mapping[int, int] = field(default_factory=dict)
    """When the job goes on with another number of ranks (see `resize`): by slot, which local rank of the former workers
    keeps its state in a file, or has done so."""
    loads: tuple[int, ...] = ()
    """The ranks that then load such a file."""
    undone: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By rank: parameters whose half-done update it undoes, before anything else is sent."""
    patches: tuple[Patch, ...] = ()
    """They move after that, in this order, to ranks that were cut in the middle of an update."""
    deviation: Deviation = field(default_factory=Deviation)
    """Where that is not to be exact."""
    replays: tuple[int, ...] = ()
    """New ranks that repeat all iterations before *iteration*, from what the others have logged. They begin with the
    newest checkpoint or with what the script's set-up gives, and are no key of *sources* or *layouts*."""
    checkpoint: int = 0
    """The newest that a rank knows to count."""
    stays: bool = False
    """Survivors that are in the middle of *iteration* stay there, and a rank that begins it is given what they had
    sent in it; else all begin it again."""
    slowdown: float = 1.0
    """So many times as long as when they were measured iterations took before the failure; what is predicted for this
    plan counts on it."""

    def targets_of(self, rank: int) -> list[int]:
        """Ranks that *rank* sends its state to, in ascending order."""
        return sorted(target for target, source in self.sources.items() if source == rank)

    @property
    def brought(self) -> frozenset[int]:
        """Ranks whose state comes from outside of the groups: a file, or a process that leaves."""
        return frozenset(self.loads).union(self.handovers)

    @property
    def receivers(self) -> frozenset[int]:
        """Ranks to which a state, or a part of one, is to come."""
        return self.brought.union(self.sources, *(patch.targets for patch in self.patches))

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "why": self.why,
            "iteration": self.iteration,
            "sections": self.sections,
            "sources": {str(rank): source for rank, source in self.sources.items()},
            "layouts": {str(rank): source for rank, source in self.layouts.items()},
            "handovers": list(self.handovers),
            "keepers": {str(slot): local_rank for slot, local_rank in self.keepers.items()},
            "loads": list(self.loads),
            "undone": {str(rank): ranges_of(parameters) for rank, parameters in self.undone.items()},
            "patches": [
                {"parameters": ranges_of(patch.parameters), "source": patch.source, "targets": list(patch.targets)}
                for patch in self.patches
            ],
            "deviation": {
                "keeps": list(self.deviation.keeps),
                "resumed": {str(rank): ranges_of(numbers) for rank, numbers in self.deviation.resumed.items()},
                "silent": list(self.deviation.silent),
            },
            "replays": ranges_of(self.replays),
        } | {name: value for name, usual in _USUALLY.items() if (value := getattr(self, name)) != usual}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        return cls(
            kind=data["kind"],
            why=data["why"],
            iteration=int(data["iteration"]),
            sections=int(data["sections"]),
            sources={int(rank): int(source) for rank, source in data["sources"].items()},
            layouts={int(rank): int(source) for rank, source in data["layouts"].items()},
            handovers=tuple(int(rank) for rank in data.get("handovers", ())),
            keepers={int(slot): int(local_rank) for slot, local_rank in data.get("keepers", {}).items()},
            loads=tuple(int(rank) for rank in data.get("loads", ())),
            undone={int(rank): ranks_of(parameters) for rank, parameters in data.get("undone", {}).items()},
            patches=tuple(
                Patch(ranks_of(one["parameters"]), int(one["source"]), tuple(int(rank) for rank in one["targets"]))
                for one in data.get("patches", ())
            ),
            deviation=_deviation_of(data.get("deviation", {})),
            replays=ranks_of(data.get("replays", "")),
            checkpoint=int(data.get("checkpoint", 0)),
            stays=bool(data.get("stays", False)),
            slowdown=float(data.get("slowdown", 1.0)),
        )


