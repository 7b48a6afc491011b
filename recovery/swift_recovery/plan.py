"""From what every rank holds to how every rank gets the state of one consensus iteration. Pure.

Order of preference per replica set (DESIGN section 5): roll forward to the newest state that a survivor has finished;
else take a survivor that has not begun the update. Both are exact. Undo, logs and checkpoints are not planned here yet:
where they would be needed the plan is a restart of all workers, and says so.

This module must never look at tensors, clocks or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from swift_recovery.progress import RankReport

PlanKind = Literal["fresh", "copy", "restart"]


@dataclass(frozen=True)
class Plan:
    """What each rank does to enter a generation.

    `fresh`: nobody holds state yet; all create their process groups together and run their set-up together.
    `copy`: training goes on with the state of *iteration*; `sources[rank]` is the rank that sends its state to *rank*,
    ranks that are no key hold it already. *handovers*: ranks that get it from their own predecessors instead, processes
    of the same rank on a node that is leaving. *sections*: how many `@job.resilient` calls count as finished.
    `layouts[rank]` is the rank whose DDP bucket layout *rank* takes over (of a rank in *handovers*: its predecessor's);
    a rank that is no key leads its replica set.
    `restart`: state cannot be brought back in place. *keepers*, *loads*: when the job goes on with another number of
    ranks (see `resize`): by slot, which local rank of the former workers keeps its state in a file (or that it is there
    already), and the ranks that load one.
    """

    kind: PlanKind
    why: str
    iteration: int = 0
    sections: int = 0
    sources: Mapping[int, int] = field(default_factory=dict)
    layouts: Mapping[int, int] = field(default_factory=dict)
    handovers: tuple[int, ...] = ()
    keepers: Mapping[int, int] = field(default_factory=dict)
    loads: tuple[int, ...] = ()

    def targets_of(self, rank: int) -> list[int]:
        """Ranks that *rank* sends its state to, in ascending order."""
        return sorted(target for target, source in self.sources.items() if source == rank)

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
        }

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
        )


def make_plan(reports: Iterable[RankReport], world_size: int, predecessors: Iterable[RankReport] = ()) -> Plan:
    """Plan the recovery of a job of *world_size* ranks; a rank without a report is a new process.

    *predecessors*: what processes hold whose ranks are taken over by others, on nodes that leave. Such a state goes to
    the successor: it is the rank's own, down to generators and buffers, and may be the only copy.

    Across replica sets all go on from the same iteration: the newest that some rank of every set holds.
    """
    by_rank = {report.rank: report for report in reports}
    holding = {rank: report for rank, report in by_rank.items() if report.status == "holding"}
    leaving = {report.rank: report for report in predecessors if report.status == "holding"}
    leaving = {rank: report for rank, report in leaving.items() if rank not in holding}
    holding |= leaving
    if not holding:
        return _nobody_holds(by_rank)
    sets = _replica_sets(holding, world_size)
    orphans = sorted(set(range(world_size)) - {rank for members in sets for rank in members})
    if orphans:
        return Plan("restart", f"ranks {orphans} are lost and no survivor holds a replica of their state")
    held = [{holding[rank].iteration for rank in members if rank in holding} for members in sets]
    common = set.intersection(*held)
    if not common:
        target = min(max(iterations) for iterations in held)
        ahead = sorted(rank for rank, report in holding.items() if report.iteration > target)
        return Plan(
            "restart",
            f"ranks {ahead} are ahead of iteration {target}, the newest that all replica sets can reach, "
            "and their update cannot be undone",
        )
    # Inside a set ranks differ by one at most, so this is the smallest of the newest states of all sets.
    iteration = max(common)
    sources: dict[int, int] = {}
    layouts: dict[int, int] = {}
    for members in sets:
        sound = [rank for rank in members if rank in holding and holding[rank].iteration == iteration]
        needy = sorted(set(members) - set(sound))
        # Who gets its own state from elsewhere passes it on only if nobody else has it.
        sound = [rank for rank in sound if rank not in leaving] or sound
        # Spread the targets over the sources: their transfers run side by side.
        sources |= {rank: sound[index % len(sound)] for index, rank in enumerate(needy)}
        # One rank of the set leads: a newcomer has no buckets of its own, and a rank that is behind has older ones.
        layouts |= {rank: sound[0] for rank in members if rank != sound[0] or rank in leaving}
    there = [report for report in holding.values() if report.iteration == iteration]
    sections = max(report.sections for report in there)
    new = sorted(rank for rank in sources if rank not in holding or rank in leaving)
    moved = sorted(set(sources) - set(new))
    handovers = tuple(sorted(rank for rank in leaving if leaving[rank].iteration == iteration))
    why = _why(iteration, new, moved, sources, handovers)
    return Plan("copy", why, iteration, sections, sources, layouts, handovers)


def _nobody_holds(by_rank: Mapping[int, RankReport]) -> Plan:
    begun = sorted(rank for rank, report in by_rank.items() if report.status != "fresh")
    if not begun:
        return Plan("fresh", "no rank has begun: all set up together")
    return Plan("restart", f"ranks {begun} were cut before the first iteration: no rank holds a complete state")


def _replica_sets(holding: Mapping[int, RankReport], world_size: int) -> list[tuple[int, ...]]:
    # Most ranks name the same set: sorted once per rank, it would be work for the square of their number.
    named: dict[int, frozenset[int]] = {}  # by identity: `progress.ranks_of` gives the same object for the same text
    sets: set[tuple[int, ...]] = set()
    for rank, report in holding.items():
        others = named.get(id(report.replicas))
        if others is None:
            others = named[id(report.replicas)] = frozenset(report.replicas)
            if rank in others:
                sets.add(tuple(sorted(others)))
        if rank not in others:
            sets.add(tuple(sorted({*others, rank})))
    return sorted(members for members in sets if all(0 <= rank < world_size for rank in members))


def _why(
    iteration: int, new: list[int], moved: list[int], sources: Mapping[int, int], handovers: tuple[int, ...]
) -> str:
    parts = []
    if handovers:
        parts.append(f"ranks {list(handovers)} hand their state of iteration {iteration} over to their successors")
    if new:
        parts.append(f"ranks {new} are new and get the state of iteration {iteration} from ranks "
                     f"{sorted({sources[rank] for rank in new})}")
    if moved:
        parts.append(f"ranks {moved} take over the state of iteration {iteration} from ranks "
                     f"{sorted({sources[rank] for rank in moved})}")
    return "; ".join(parts) or f"all ranks hold iteration {iteration}"
