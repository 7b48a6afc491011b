"""From what every rank holds to how every rank gets the state of one consensus iteration. Pure.

Order of preference per replica set: roll forward to the newest state that a survivor has finished,
or can finish with the gradients it has, or that survivors cut in the middle of an update have together; else take a
survivor that has not begun the update; else take a half-done update back, which is exact but for the parameters that
all have updated: these are undone (see `consistency`; `lossy` has other ways, for who asks for them). Ranks of which
nobody holds a replica repeat their iterations from the logs of the others, if these have all that they were sent, since
the newest checkpoint if there is one; then survivors stay in the middle of the iteration that was cut, unless one of
them cannot. Where nothing of that is possible all workers start again, with that checkpoint.

This module must never look at tensors, clocks or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from swift_recovery.consistency import Patch, back, can_finish, forward
from swift_recovery.lossy import Deviation, immediate_rollback, lossy_forward
from swift_recovery.progress import RankReport, ranges_of, ranks_of

PlanKind = Literal["fresh", "copy", "restart"]
# What becomes of a half-done update (`--recovery`): see `consistency` and `lossy`.
Way = Literal["exact", "immediate-rollback", "lossy-forward"]
# What a status says, where the report says no more.
_LACKS = {"setup": "were cut before their training loop began", "empty": "had no state yet"}


@dataclass(frozen=True)
class Plan:
    """What each rank does to enter a generation.

    `fresh`: nobody holds state yet; all create their process groups together and run their set-up together.
    `copy`: training goes on with the state of *iteration*; `sources[rank]` is the rank that sends its state to *rank*,
    ranks that are no key hold it already. *handovers*: ranks that get it from their own predecessors instead, processes
    of the same rank on a node that is leaving. *sections*: how many `@job.resilient` calls count as finished.
    `layouts[rank]` is the rank whose DDP bucket layout *rank* takes over (of a rank in *handovers*: its predecessor's);
    a rank that is no key leads its replica set.
    *undone*, *patches*: how survivors cut in the middle of an update leave it, before anything else is sent: each rank
    undoes these parameters, then the patches move, in this order. *deviation*: where that is not to be exact.
    *replays*: new ranks that repeat all iterations before *iteration*, from what the others have logged, beginning with
    the newest checkpoint or with what the script's set-up gives; they are no key of *sources* or *layouts*.
    *checkpoint*: the newest that a rank knows to count. *stays*: survivors that are in the middle of *iteration* stay
    there, and whoever begins it is given what they had sent in it; else all begin it anew.
    `restart`: state cannot be brought back in place; all begin with the newest checkpoint, or anew. *keepers*,
    *loads*: when the job goes on with another number of ranks (see `resize`): by slot, which local rank of the former
    workers keeps its state in a file (or that it is there already), and the ranks that load one.
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
    undone: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    patches: tuple[Patch, ...] = ()
    deviation: Deviation = field(default_factory=Deviation)
    replays: tuple[int, ...] = ()
    checkpoint: int = 0
    stays: bool = False

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
        } | {name: value for name in ("checkpoint", "stays") if (value := getattr(self, name))}

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
        )


def _deviation_of(data: Mapping[str, Any]) -> Deviation:
    return Deviation(
        tuple(int(rank) for rank in data.get("keeps", ())),
        {int(rank): ranks_of(numbers) for rank, numbers in data.get("resumed", {}).items()},
        tuple(int(rank) for rank in data.get("silent", ())),
    )


def make_plan(
    reports: Iterable[RankReport], world_size: int, predecessors: Iterable[RankReport] = (), way: Way = "exact"
) -> Plan:
    """Plan the recovery of a job of *world_size* ranks; a rank without a report is a new process.

    *predecessors*: what processes hold whose ranks are taken over by others, on nodes that leave. Such a state goes to
    the successor: it is the rank's own, down to generators and buffers, and may be the only copy.

    Across replica sets all go on from the same iteration: the newest that some rank of every set holds.
    """
    by_rank = {report.rank: report for report in reports}
    holding = {rank: report for rank, report in by_rank.items() if report.status == "holding"}
    # A leaving node stops between two iterations, and mends nothing.
    leaving = {report.rank: report for report in predecessors if report.status == "holding" and not report.updated}
    leaving = {rank: report for rank, report in leaving.items() if rank not in holding}
    holding |= leaving
    if not holding:
        return _nobody_holds(by_rank)
    sets = _replica_sets(holding, world_size)
    orphans = sorted(set(range(world_size)) - {rank for members in sets for rank in members})
    checkpoint = max((report.checkpoint for report in by_rank.values()), default=0)
    if orphans and (leaving or not all(report.logs for report in holding.values())):
        alive = [by_rank[rank] for rank in orphans if rank in by_rank and by_rank[rank].status != "fresh"]
        lost = sorted(set(orphans).difference(report.rank for report in alive))
        what = [f"ranks {lost} are lost"] if lost else []
        what += [_why_none(alive)] if alive else []
        return Plan(
            "restart", f"{'; '.join(what)} and no survivor holds a replica of their state{_from(checkpoint)}"
        )
    held = [_reachable([holding[rank] for rank in members if rank in holding]) for members in sets]
    common = set.intersection(*held)
    if not common:
        target = min(max(iterations) for iterations in held)
        ahead = sorted(rank for rank, report in holding.items() if report.iteration > target)
        return Plan(
            "restart",
            f"ranks {ahead} are ahead of iteration {target}, the newest that all replica sets can reach, "
            f"and their update cannot be undone{_from(checkpoint)}",
        )
    # Inside a set ranks differ by one at most, so this is the smallest of the newest states of all sets.
    iteration = max(common)
    if orphans and iteration - 1 in common and any(report.unwinds for report in holding.values()):
        # All can still make that update, but who is lost could not repeat what some have taken part in.
        iteration -= 1
    if len(sets) > 1 and iteration - 1 in common and not _is_safe(holding.values(), iteration):
        iteration -= 1
    sources: dict[int, int] = {}
    layouts: dict[int, int] = {}
    undone: dict[int, tuple[int, ...]] = {}
    patches: list[Patch] = []
    deviation = Deviation()
    for members in sets:
        sound = [rank for rank in members if rank in holding and _holds(holding[rank], iteration)]
        mixed = {rank: holding[rank] for rank in members if rank in holding and holding[rank].updated}
        updated = {rank: frozenset(report.updated) for rank, report in mixed.items()}
        if way == "exact" or leaving or any(report.iteration < iteration for report in mixed.values()):
            if mixed:
                sound = _mend(mixed, sound, iteration, undone, patches)
        elif way == "immediate-rollback":
            sound, inexact = immediate_rollback(updated, sound)
            deviation |= inexact
        else:
            new = [rank for rank in members if rank not in holding]
            sound, found, inexact = lossy_forward(updated, sound, members, new)
            patches.extend(found)
            deviation |= inexact
        needy = sorted(set(members) - set(sound))
        # Who gets its own state from elsewhere passes it on only if nobody else has it.
        sound = [rank for rank in sound if rank not in leaving] or sound
        # Spread the targets over the sources: their transfers run side by side.
        sources |= {rank: sound[index % len(sound)] for index, rank in enumerate(needy)}
        # One rank of the set leads: a newcomer has no buckets of its own, and a rank that is behind has older ones.
        layouts |= {rank: sound[0] for rank in members if rank != sound[0] or rank in leaving}
    # If nobody holds it yet, all stand in the middle of the update before it.
    there = [report for report in holding.values() if _holds(report, iteration)] or list(holding.values())
    sections = max(report.sections for report in there)
    new = sorted(rank for rank in sources if rank not in holding or rank in leaving)
    moved = sorted(set(sources) - set(new))
    handovers = tuple(sorted(rank for rank in leaving if leaving[rank].iteration == iteration))
    stays, why_here = _stays(holding, iteration) if not leaving else (False, [])
    why = _why(iteration, new, moved, sources, handovers, orphans, checkpoint)
    why = "; ".join([*_why_mended(iteration, undone, patches), *_why_inexact(iteration, deviation), why, *why_here])
    return Plan(
        "copy", why, iteration, sections, sources, layouts, handovers, undone=undone, patches=tuple(patches),
        deviation=deviation, replays=tuple(orphans), checkpoint=checkpoint, stays=stays,
    )  # fmt: skip


def _holds(report: RankReport, iteration: int) -> bool:
    """Whether the rank has that state, or makes it for itself before anything is sent."""
    if report.reduced and report.iteration + 1 == iteration:
        return True
    return report.iteration == iteration and not report.updated


def _is_safe(reports: Iterable[RankReport], iteration: int) -> bool:
    """Whether to go on from there if the state before it is there as well: all have it, whoever is lost next; or one
    counts it already. Else a replica set could let go of what was before, when another one loses those who have it."""
    return all(
        _holds(report, iteration) or (report.iteration == iteration - 1 and _is_whole(report)) for report in reports
    ) or any(report.iteration == iteration for report in reports)


def _is_whole(report: RankReport) -> bool:
    """It has made all of the update after its iteration, and can take it back."""
    return bool(report.updated) and len(report.updated) == report.num_parameters


def _stays(holding: Mapping[int, RankReport], iteration: int) -> tuple[bool, list[str]]:
    """Whether those who are in the middle of that iteration stay there, and why, where messages are logged."""
    if not all(report.logs for report in holding.values()):
        return False, []
    reasons: dict[str, list[int]] = {}
    for rank, report in sorted(holding.items()):
        # Who is one behind makes its update, and is then before that iteration.
        if report.iteration == iteration and report.unwinds:
            reasons.setdefault(report.unwinds, []).append(rank)
    if reasons:
        said = "; ".join(f"ranks {ranks} {reason}" for reason, ranks in reasons.items())
        return False, [f"all begin iteration {iteration} anew: {said}"]
    return True, [f"survivors stay where they are in iteration {iteration}"]


def _reachable(reports: Iterable[RankReport]) -> set[int]:
    """The iterations that survivors of one replica set can go on from."""
    reachable, mixed = set(), []
    for report in reports:
        reachable.add(report.iteration)  # a half-done update can be taken back
        if report.reduced:
            reachable.add(report.iteration + 1)
        if report.updated:
            mixed.append(report)
    if mixed and can_finish((frozenset(report.updated) for report in mixed), mixed[0].num_parameters):
        reachable.add(mixed[0].iteration + 1)
    return reachable


def _mend(
    mixed: Mapping[int, RankReport], sound: list[int], iteration: int, undone: dict[int, tuple[int, ...]],
    patches: list[Patch],
) -> list[int]:  # fmt: skip
    """Those of a set who were cut in the middle of an update are brought to *iteration*, or left to be given the
    state. Adds to *undone* and *patches*; returns who then holds it."""
    updated = {rank: frozenset(report.updated) for rank, report in mixed.items()}
    first = next(iter(mixed.values()))
    if iteration > first.iteration:
        # Who has made all of it and waits for the others has the state after it.
        sound = sorted({*sound, *(rank for rank, report in mixed.items() if _is_whole(report))})
        if sound:
            return sound
        lead, found = forward(updated, first.num_parameters)
        patches.extend(found)
        return [lead]
    ways = back(updated | {rank: frozenset() for rank in sound})
    if ways.undone:
        undone.update(dict.fromkeys(mixed, ways.undone))
    patches.extend(ways.patches)
    return sorted([*sound, *mixed])


def _nobody_holds(by_rank: Mapping[int, RankReport]) -> Plan:
    if all(report.status == "fresh" for report in by_rank.values()):
        return Plan("fresh", "no rank has begun: all set up together")
    checkpoint = max(report.checkpoint for report in by_rank.values())
    return Plan("restart", f"{_why_none(by_rank.values())}: no rank holds a complete state{_from(checkpoint)}")


def _why_none(reports: Iterable[RankReport]) -> str:
    """Why those of *reports* that have begun hold no complete state."""
    reasons: dict[str, list[int]] = {}
    for report in sorted(reports, key=lambda report: report.rank):
        if report.status != "fresh":
            reason = report.lacks or _LACKS.get(report.status, "hold another iteration")
            reasons.setdefault(reason, []).append(report.rank)
    return "; ".join(f"ranks {ranks} {reason}" for reason, ranks in reasons.items())


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
    iteration: int, new: list[int], moved: list[int], sources: Mapping[int, int], handovers: tuple[int, ...],
    replays: list[int], checkpoint: int,
) -> str:  # fmt: skip
    parts = []
    if handovers:
        parts.append(f"ranks {list(handovers)} hand their state of iteration {iteration} over to their successors")
    if new:
        parts.append(f"ranks {new} are new and get the state of iteration {iteration} from ranks "
                     f"{sorted({sources[rank] for rank in new})}")
    if moved:
        parts.append(f"ranks {moved} take over the state of iteration {iteration} from ranks "
                     f"{sorted({sources[rank] for rank in moved})}")
    if replays:
        parts.append(f"ranks {replays} have no replica and {_what_is_repeated(checkpoint, iteration)}")
    return "; ".join(parts) or f"all ranks hold iteration {iteration}"


def _what_is_repeated(checkpoint: int, iteration: int) -> str:
    if checkpoint >= iteration:
        return f"load the checkpoint of iteration {checkpoint}" if checkpoint else "begin anew"
    said = f"repeat iterations {checkpoint} to {iteration - 1} from the logs of the others"
    return f"load the checkpoint of iteration {checkpoint}, and {said}" if checkpoint else said


def _from(checkpoint: int) -> str:
    return f"; the newest checkpoint known is that of iteration {checkpoint}" if checkpoint else ""


def _why_mended(iteration: int, undone: Mapping[int, tuple[int, ...]], patches: Iterable[Patch]) -> list[str]:
    parts = []
    by_numbers: dict[str, list[int]] = {}  # those of one replica set have the same ones
    for rank, numbers in sorted(undone.items()):
        by_numbers.setdefault(ranges_of(numbers), []).append(rank)
    for parameters, ranks in by_numbers.items():
        parts.append(f"ranks {ranks} undo update {iteration} of parameters {parameters}, which all have made")
    for patch in patches:
        parts.append(f"ranks {list(patch.targets)} get parameters {ranges_of(patch.parameters)} of iteration "
                     f"{iteration} from rank {patch.source}")
    return parts


def _why_inexact(iteration: int, deviation: Deviation) -> list[str]:
    parts = []
    if deviation.keeps:
        parts.append(f"ranks {list(deviation.keeps)} keep half of update {iteration} as it is, and it is made again")
    for numbers in {ranges_of(numbers) for numbers in deviation.resumed.values()}:
        parts.append(f"parameters {numbers} keep update {iteration}")
    if deviation.silent:
        parts.append(f"the gradients of ranks {list(deviation.silent)} do not count in iteration {iteration}")
    return parts
