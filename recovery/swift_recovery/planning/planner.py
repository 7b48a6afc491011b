"""Plans, from what every rank holds, how every rank gets the state of one consensus iteration. Pure.

Order of preference per replica set: roll forward to the newest state that a survivor has finished,
or can finish with the gradients it has, or that survivors cut in the middle of an update have together; else take a
survivor that has not begun the update; else take a half-done update back, which is exact but for the parameters that
all have updated: these are undone (see `half_done_updates`; `lossy` has other ways, for jobs that ask for them). Ranks
without a replica repeat their iterations from the logs of the others, if these have all that they were sent,
since the newest checkpoint if there is one; then survivors stay in the middle of the iteration that was cut, unless one
of them cannot. Where nothing of that is possible all workers start again, with that checkpoint.

This module must never look at tensors, clocks or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swift_recovery.planning.half_done_updates import Patch, back, can_finish, forward
from swift_recovery.planning.lossy import Deviation, immediate_rollback, lossy_forward
from swift_recovery.planning.plan import _LACKS, Plan, Way
from swift_recovery.planning.reports import RankReport
from swift_recovery.planning.sentences import _from, _why, _why_inexact, _why_mended


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
    if apart := sorted(rank for rank, report in holding.items() if not set(report.unlogged).isdisjoint(orphans)):
        why = f"ranks {orphans} would have to repeat iterations without ranks {apart}, which log nothing for them"
        return Plan("restart", f"{why}{_from(checkpoint)}")
    new = [rank for members in sets for rank in members if rank not in holding]
    if orphans and new:
        why = f"ranks {orphans} would have to repeat iterations without what ranks {new}, lost too, had sent to them"
        return Plan("restart", f"{why}{_from(checkpoint)}")
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
        # All can still make that update, but a lost rank could not repeat what some have taken part in.
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
        # A rank that gets its own state from elsewhere passes it on only if no other has it.
        sound = [rank for rank in sound if rank not in leaving] or sound
        # Spread the targets over the sources: their transfers run side by side.
        sources |= {rank: sound[index % len(sound)] for index, rank in enumerate(needy)}
        # One rank of the set leads: a replacement has no buckets of its own, and a rank that is behind has older ones.
        layouts |= {rank: sound[0] for rank in members if rank != sound[0] or rank in leaving}
    # If no rank holds it yet, all stand in the middle of the update before it.
    there = [report for report in holding.values() if _holds(report, iteration)] or list(holding.values())
    sections = max(report.sections for report in there)
    new = sorted(rank for rank in sources if rank not in holding or rank in leaving)
    moved = sorted(set(sources) - set(new))
    handovers = tuple(sorted(rank for rank in leaving if leaving[rank].iteration == iteration))
    stays, why_here = _stays(holding, iteration, new) if not leaving else (False, [])
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
    """Whether to go on from there if the state before it is there as well: all have it, whichever is lost next; or one
    counts it already. Else a replica set could let go of what was before, when another one loses the ranks that have
    it."""
    return all(
        _holds(report, iteration) or (report.iteration == iteration - 1 and _is_whole(report)) for report in reports
    ) or any(report.iteration == iteration for report in reports)


def _is_whole(report: RankReport) -> bool:
    """It has made all of the update after its iteration, and can take it back."""
    return bool(report.updated) and len(report.updated) == report.num_parameters


def _stays(holding: Mapping[int, RankReport], iteration: int, new: list[int]) -> tuple[bool, list[str]]:
    """Whether ranks in the middle of that iteration stay there, and why, where messages are logged. *new*: those that
    are given the state of a replica, and have nothing of what their predecessors had sent."""
    if not all(report.logs for report in holding.values()):
        return False, []
    if new:
        return False, [f"all begin iteration {iteration} again: ranks {new} have nothing of what was sent in it"]
    reasons: dict[str, list[int]] = {}
    for rank, report in sorted(holding.items()):
        # A rank that is one behind makes its update, and is then before that iteration.
        if report.iteration == iteration and report.unwinds:
            reasons.setdefault(report.unwinds, []).append(rank)
    if reasons:
        said = "; ".join(f"ranks {ranks} {reason}" for reason, ranks in reasons.items())
        return False, [f"all begin iteration {iteration} again: {said}"]
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
    """Bring the ranks of a set that were cut in the middle of an update to *iteration*, or leave them to be given the
    state. Adds to *undone* and *patches*; returns the ranks that then hold it."""
    updated = {rank: frozenset(report.updated) for rank, report in mixed.items()}
    first = next(iter(mixed.values()))
    if iteration > first.iteration:
        # A rank that has made all of it and waits for the others has the state after it.
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
