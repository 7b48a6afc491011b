"""From what all workers have measured to how the job recovers: its profile, the ways compared, its log groups. Pure.

Must never read a clock, and never decide twice in a run: what is written first holds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from swift_agent.agent.lifecycle.helping import helpers_of
from swift_recovery.planning.plan import Plan
from swift_recovery.strategy import sentences
from swift_recovery.strategy.budget import groups_within, parse_budget
from swift_recovery.strategy.choose import Way, paying_helpers, shared_s, ways
from swift_recovery.strategy.grouping import Groups
from swift_recovery.strategy.measured import JobMeasured, RankMeasured, put_together, to_file
from swift_recovery.strategy.profile import ProfileError, parse
from swift_rendezvous.roster.records import ProfileRecord
from swift_rendezvous.roster.view import View

# What was predicted worse than that says nothing about the next time.
_MOST_ERROR = 20.0


def decide(view: View, job_id: str) -> ProfileRecord | None:
    """None: it is decided, or not all slots have been measured, or what they said cannot be read."""
    if view.profile is not None:
        return None
    job, logs, _ = _measured(view, job_id)
    if job is None:
        return None
    wanted = view.job.strategy if view.job is not None else ""
    found = _ways(job, logs, wanted)
    groups, remarks = _groups(view, job, _taken(found, wanted))
    if groups:
        found = _ways(job, logs, wanted, groups)
    taken = _taken(found, wanted)
    begin_now = groups if view.job is not None and view.job.log_budget else ()
    said = sentences.lines(job, found, taken, begin_now)
    chosen = tuple(tuple(group) for group in groups if len(group) > 1)
    pay: tuple[tuple[int, ...], ...] = ()
    if taken == "log+parallel":
        pay = tuple(paying_helpers(job.profile, slot) for slot in range(len(job.profile.machines)))
    return ProfileRecord(to_file(job), (*said, *remarks, *_remarks(taken, wanted)), taken, chosen, pay)


def refine(view: View, job_id: str) -> ProfileRecord | None:
    """What was decided holds, with what has been measured since: a checkpoint. None: nothing more is known."""
    known = view.profile
    if known is None or known.is_final:
        return None
    job, logs, is_all = _measured(view, job_id)
    if job is None or not is_all:
        return None
    wanted = view.job.strategy if view.job is not None else ""
    found = _ways(job, logs, wanted, _whole_groups(view, job) if view.log_groups else ())
    said = sentences.lines(job, found, known.way, ())
    return replace(known, content=to_file(job), lines=(*said, *_remarks(known.way, wanted)), is_final=True)


def _whole_groups(view: View, job: JobMeasured) -> Groups:
    """Of all nodes, with those that are alone."""
    firsts = [view.log_group_of(slot)[0] for slot in range(len(job.profile.machines))]
    counts = Counter(firsts)
    return tuple(range(first, first + counts[first]) for first in sorted(counts))


def _measured(view: View, job_id: str) -> tuple[JobMeasured | None, bool, bool]:
    """Put together, whether all messages are logged, and whether nothing is left to be measured."""
    generation = view.generation
    if generation is None or len(view.measured) < len(generation.slots):
        return None, False, False
    try:
        nodes = [[RankMeasured.from_json(data) for data in view.measured[slot].ranks] for slot in sorted(view.measured)]
        job = put_together(job_id, nodes)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None, False, False
    ranks = [one for of_node in nodes for one in of_node]
    return job, all(one.logs for one in ranks), all(one.is_all for one in ranks)


def _ways(job: JobMeasured, logs: bool, wanted: str, groups: Groups = ()) -> tuple[Way, ...]:
    return tuple(_possible(way, job, logs, wanted) for way in ways(job.profile, groups=groups))


def _groups(view: View, job: JobMeasured, taken: str) -> tuple[Groups, tuple[str, ...]]:
    """Of all nodes, those that are named or those within a budget; () if there are none. What is to be said of that."""
    if view.job is None or taken != "log":
        return (), ()
    if view.job.log_groups:
        return _whole_groups(view, job), ()
    if not view.job.log_budget:
        return (), ()
    budget = parse_budget(view.job.log_budget)
    if not budget.is_part and not job.takes_checkpoints:
        said = (
            f"--log-budget {view.job.log_budget}: a size is for what is logged between two checkpoints, and the script "
            "takes none (job.checkpoint): no groups are chosen"
        )
        return (), (said,)
    return groups_within(job.profile, budget), ()


@dataclass(frozen=True)
class Predicted:
    """*way*: by which the state comes back. *seconds*: of a whole recovery, until the first iteration is done."""

    way: str
    seconds: float


def predicted(view: View, errors: Mapping[str, float] = MappingProxyType({})) -> Predicted | None:
    """The recovery of the current generation, as its plan has it, None where nothing is known. *errors*: by way, how
    many times as long as predicted the last one took."""
    found = _predicted(view)
    return None if found is None else Predicted(found.way, found.seconds * errors.get(found.way, 1.0))


def error_of(view: View, took_s: float) -> dict[str, float]:
    """For the next `predicted`; {} where nothing was known."""
    found = _predicted(view)
    return {} if found is None else {found.way: min(max(took_s / found.seconds, 1 / _MOST_ERROR), _MOST_ERROR)}


def _predicted(view: View) -> Predicted | None:
    generation, planned, known = view.generation, view.plan, view.profile
    if generation is None or planned is None or known is None:
        return None
    try:
        job, plan = parse(json.dumps(known.content)), Plan.from_json(planned.content)
    except (ProfileError, KeyError, TypeError, ValueError):
        return None
    if plan.kind != "copy" or len(job.machines) != len(generation.slots):
        return None
    if plan.replays:
        slots = sorted({generation.slot_with(rank) for rank in plan.replays})
        group = range(slots[0], slots[-1] + 1)
        num_shares = 1 + len(helpers_of(view))
        repeated_s = (plan.iteration - plan.checkpoint) * shared_s(job, group, num_shares)
        way = "log" if num_shares == 1 else "log+parallel"
        return Predicted(way, job.replace_s + repeated_s + job.iteration_s)
    moved = max((job.machines[generation.slot_with(rank)].state_bytes for rank in plan.sources), default=0.0)
    return Predicted("replica", job.replace_s + moved / job.network_bytes_per_s + job.iteration_s)


def _possible(way: Way, job: JobMeasured, logs: bool, wanted: str) -> Way:
    """What a profile cannot say: what this script does, and what it was told."""
    if way.name in ("log", "log+parallel") and wanted in ("replica", "checkpoint"):
        return Way(way.name, f"no messages are logged, as --strategy {wanted} has it")
    if way.impossible:
        return way
    if way.name == "checkpoint" and not job.takes_checkpoints:
        return Way(way.name, "the script takes none (job.checkpoint): all workers would start over")
    if way.name in ("log", "log+parallel") and not logs:
        return Way(way.name, "messages are not logged in this job")
    return way


def _taken(found: tuple[Way, ...], wanted: str) -> str:
    """As the planner does it, whatever is lost: a replica if there is one, else logs, else a checkpoint."""
    possible = {way.name for way in found if not way.impossible}
    log = "log+parallel" if wanted == "log+parallel" else "log"
    return next((name for name in ("replica", log, "checkpoint") if name in possible), "")


def _remarks(taken: str, wanted: str) -> tuple[str, ...]:
    if not taken:
        return ("nothing brings back what is lost: all workers would start over. Take checkpoints (job.checkpoint)",)
    return (f"--strategy {wanted}: here that is {taken}, see above",) if wanted not in ("", taken) else ()
