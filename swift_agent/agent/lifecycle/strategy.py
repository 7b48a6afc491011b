"""From what all workers have measured to how the job recovers: its profile, the ways compared, its log groups. Pure.

Must never read a clock, and never decide twice in a run: what is written first holds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from swift_agent.agent.lifecycle.helping import helpers_for
from swift_recovery.planning.plan import Plan
from swift_recovery.strategy import sentences
from swift_recovery.strategy.budget import groups_within, parse_budget
from swift_recovery.strategy.choose import Helpers, Way, paying_helpers, ways
from swift_recovery.strategy.grouping import Groups
from swift_recovery.strategy.measured import JobMeasured, RankMeasured, put_together, to_file
from swift_recovery.strategy.predict import (
    Predicted,
    cautious,
    in_place,
    is_sooner,
    learned,
    rollback,
    slowdown_of,
)
from swift_recovery.strategy.profile import Profile, ProfileError, parse
from swift_rendezvous.roster.records import ProfileRecord
from swift_rendezvous.roster.view import View

# A part of the time of iterations. Less is not worth a word.
_DEAR = 0.01
SLOWER = "helpers made the last two recoveries longer: from now on a lost stage is repeated by its replacement alone"


def decide(view: View, job_id: str) -> ProfileRecord | None:
    """None: it is decided, or not all slots have been measured, or what they said cannot be read."""
    if view.profile is not None:
        return None
    job, logs, _ = _measured(view, job_id)
    if job is None:
        return None
    found = _ways(view, job, logs)
    taken = sentences.taken(found, _wanted(view), _may_help(view))
    groups = _groups(view, job, taken)
    if groups:
        found = _ways(view, job, logs, groups)
        before, taken = taken, sentences.taken(found, _wanted(view), _may_help(view))
        if (before, taken) == ("log+parallel", "log"):
            # Helpers do not pay in those groups: others are better without them.
            groups = _groups(view, job, taken)
            found = _ways(view, job, logs, groups)
    begin_now = groups if view.job is not None and view.job.log_budget else ()
    said = sentences.lines(job, found, taken, begin_now, _allows(view))
    chosen = tuple(tuple(group) for group in groups if len(group) > 1)
    lines = (*said, *_remarks(view, job, found, taken))
    return ProfileRecord(to_file(job), lines, taken, chosen, _paying(job, taken, groups))


def refine(view: View, job_id: str) -> ProfileRecord | None:
    """What was decided holds, with what has been measured since: a checkpoint. None: nothing more is known. What
    there is to remark is asked again: how slow a disk is may show with the first checkpoint only."""
    known = view.profile
    if known is None or known.is_final:
        return None
    job, logs, is_all = _measured(view, job_id)
    if job is None or not is_all:
        return None
    groups = _whole_groups(view, job) if view.log_groups else ()
    found = _ways(view, job, logs, groups)
    said = sentences.lines(job, found, known.way, (), _allows(view))
    if SLOWER in known.lines:  # what helpers should save is not what they do
        remarks = (*_remarks(view, job, tuple(way for way in found if way.name != "log+parallel"), known.way), SLOWER)
    else:
        remarks = _remarks(view, job, found, known.way)
    lines = (*said, *remarks)
    pay = _paying(job, known.way, groups)
    return replace(known, content=to_file(job), lines=lines, helpers=pay, is_final=True)


def _wanted(view: View) -> str:
    return view.job.strategy if view.job is not None else ""


def _may_help(view: View) -> bool:
    return view.job is not None and view.job.helpers != 0


def _allows(view: View) -> str:
    """What is to be typed for helpers."""
    if _may_help(view):
        return ""
    return "--strategy log+parallel" if _wanted(view) else "--helpers N"


def _paying(job: JobMeasured, taken: str, groups: Groups) -> tuple[tuple[int, ...], ...]:
    """By slot, how many helpers pay; () if none are taken."""
    if taken != "log+parallel":
        return ()
    machines = range(len(job.profile.machines))
    helped = {group[0] for group in groups if len(group) == 1} if groups else machines
    return tuple(paying_helpers(job.profile, slot) if slot in helped else () for slot in machines)


def told_again(record: ProfileRecord, before: ProfileRecord) -> tuple[str, ...]:
    """Of the lines of *record*, which follows *before*, those that are news: what was measured, and new remarks."""
    known = set(before.lines)
    return (*record.lines[:1], *(line for line in record.lines[1:] if line[:1] != " " and line not in known))


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


def _ways(view: View, job: JobMeasured, logs: bool, groups: Groups = ()) -> tuple[Way, ...]:
    found = ways(job.profile, groups=groups, most_helpers=_most_helpers(view))
    return tuple(_possible(way, job, logs, _wanted(view)) for way in found)


def _most_helpers(view: View) -> int | None:
    """That were named."""
    return view.job.helpers if view.job is not None and view.job.helpers > 0 else None


def _groups(view: View, job: JobMeasured, taken: str) -> Groups:
    """Of all nodes, those that are named or those within a budget; () if there are none."""
    if view.job is None or taken not in ("log", "log+parallel"):
        return ()
    if view.job.log_groups:
        return _whole_groups(view, job)
    if not view.job.log_budget or _size_of_nothing(view, job):
        return ()
    budget = parse_budget(view.job.log_budget)
    helpers: Helpers = "one machine" if taken == "log+parallel" else "nobody"
    return groups_within(job.profile, budget, helpers, job.elsewhere_of, _most_helpers(view))


def _size_of_nothing(view: View, job: JobMeasured) -> tuple[str, ...]:
    """What is to be said of a budget that cannot be kept."""
    if view.job is None or not view.job.log_budget or view.job.log_groups or job.takes_checkpoints:
        return ()
    if parse_budget(view.job.log_budget).is_part:
        return ()
    return (
        f"--log-budget {view.job.log_budget}: a size is for what is logged between two checkpoints, and the script "
        "takes none (job.checkpoint): no groups are chosen",
    )


def predicted(view: View) -> Predicted | None:
    """The recovery of the current generation, as its plan has it and as the last ones went, None where nothing is
    known."""
    found, known = _uncorrected(view), view.profile
    return None if found is None or known is None else found.corrected(known.errors)


def errors_of(view: View, phases_s: Mapping[str, float]) -> dict[str, float]:
    """What the recovery of the current generation says of the next predictions; {} where nothing was known."""
    found = _uncorrected(view)
    repeated_s = phases_s.get("logs", 0.0) + phases_s.get("replay", 0.0)
    # Until all agree it may wait for a node, which no way is to blame for.
    took_s = phases_s["total"] - phases_s.get("agree", 0.0)
    return {} if found is None else found.errors_of(took_s, repeated_s)


def _uncorrected(view: View) -> Predicted | None:
    job, generation = profile_of(view), view.generation
    if generation is not None and generation.mode == "restart":
        # What was lost on the way is made again after that.
        return None if job is None else rollback(job, 0)
    plan = _plan(view)
    return None if plan is None else _of_plan(view, plan)


def _plan(view: View) -> Plan | None:
    try:
        return None if view.plan is None else Plan.from_json(view.plan.content)
    except (KeyError, TypeError, ValueError):
        return None


def after(view: View, found: Mapping[str, float]) -> ProfileRecord | None:
    """What is known of the job after a recovery that gave *found* (`errors_of`). Where the job may choose, helpers that
    the last two recoveries show to be slower than the replacement alone are taken no more. None: nothing is new."""
    if view.profile is None or not found:
        return None
    record = replace(view.profile, errors=learned(view.profile.errors, found))
    job, generation, plan = profile_of(view), view.generation, _plan(view)
    if record.way != "log+parallel" or _wanted(view) or job is None or generation is None or plan is None:
        return record
    helped, alone = _of_plan(view, plan), in_place(job, plan, generation.slot_with)
    if helped is None or alone is None or helped.way != "log+parallel":
        return record
    if helped.corrected(cautious(record.errors, helped.way, min)).repeated_s <= alone.repeated_s:
        return record
    return replace(record, way="log", helpers=(), lines=(*record.lines, SLOWER))


def _of_plan(view: View, plan: Plan) -> Predicted | None:
    """In the current generation."""
    job, generation = profile_of(view), view.generation
    if job is None or generation is None:
        return None
    return in_place(job, plan, generation.slot_with, 1 + len(helpers_for(generation, plan.replays)))


def profile_of(view: View) -> Profile | None:
    """As the job was measured; None: it was not yet, or with other nodes."""
    known, generation = view.profile, view.generation
    if known is None or generation is None:
        return None
    try:
        job = parse(json.dumps(known.content))
    except ProfileError:
        return None
    return job if len(job.machines) == len(generation.slots) else None


def _iterations_per_s(view: View) -> float | None:
    """As last seen of the workers that were in the generation before; None where rank 0's node is gone."""
    rate, generation = view.rate, view.generation
    if rate is None or generation is None or rate.generation < generation.epoch:
        return None
    return rate.per_s


def weigh(view: View, plan: Plan) -> Plan:
    """*plan*, or to restart all workers where that should be sooner than to repeat what is lost from logs: only if the
    job may choose (`--strategy auto`). What was predicted is said, for a job that is as fast as it was last."""
    job, known = profile_of(view), view.profile
    if job is None or known is None or plan.kind != "copy" or not plan.replays:
        return plan
    plan = replace(plan, slowdown=slowdown_of(job, _iterations_per_s(view)))
    kept = _of_plan(view, plan)
    assert kept is not None
    back, errors = rollback(job.slowed(plan.slowdown), plan.iteration - plan.checkpoint), known.errors
    # It costs everybody's work, so two recoveries must have shown what says so.
    at_most, at_least = cautious(errors, back.way, max), cautious(errors, kept.way, min)
    is_sure = is_sooner(back.corrected(at_most), kept.corrected(at_least))
    kept, back = kept.corrected(errors), back.corrected(errors)
    kept_s, back_s = sentences.time_of(kept.seconds), sentences.time_of(back.seconds)
    # Without a checkpoint the script would begin as it does by itself, which nothing compares with what it had done.
    may_choose = view.job is not None and not view.job.strategy and plan.checkpoint > 0
    if may_choose and is_sure and is_sooner(back, kept):
        return Plan(
            "restart",
            f"to repeat from logs what ranks {list(plan.replays)} have lost should take {kept_s}, to begin again with "
            f"the checkpoint of iteration {plan.checkpoint} {back_s}",
        )
    if may_choose and is_sooner(back, kept):
        return replace(
            plan,
            why=f"{plan.why}; that should take {kept_s}, a restart of all {back_s}: so much less that it would be "
            "taken if more than the last recovery had shown it",
        )
    return replace(plan, why=f"{plan.why}; that should take {kept_s}, a restart of all {back_s}")


def _possible(way: Way, job: JobMeasured, logs: bool, wanted: str) -> Way:
    """What a profile cannot say: what this script does, and what it was told."""
    if way.name in ("log", "log+parallel") and wanted in ("replica", "checkpoint"):
        return Way(way.name, f"no messages are logged, as --strategy {wanted} has it")
    if way.name in ("log", "log+parallel") and not logs:
        return Way(way.name, "messages are not logged in this job: stages of a pipeline without replicas do so")
    if way.impossible:
        return way
    if way.name == "log+parallel" and not job.has_schedule:
        return Way(way.name, "helpers share steps of a schedule (torch.distributed.pipelining), and there is none")
    return way


def _is_dear(job: JobMeasured, found: tuple[Way, ...], taken: str, wanted: str) -> tuple[str, ...]:
    """What is to be said of logs that delay training by more than restarts would, as rare as failures are taken to be.
    They stay: how rare failures are nobody has measured, and a recovery in place is what the job was started for."""
    by_name: dict[str, Way] = {way.name: way for way in found if not way.impossible}
    log, back = by_name.get(taken), by_name.get("checkpoint")
    if wanted or log is None or back is None or log.cost - back.cost < _DEAR:
        return ()
    if log.wasted(job.profile.mtbf_s) <= back.wasted(job.profile.mtbf_s):
        return ()
    part, every = f"{log.cost - back.cost:.1%}", sentences.time_of(job.profile.mtbf_s)
    return (
        f"logs delay training by {part}, more than restarts would if a node is lost every {every}: --log-budget logs "
        "less, --strategy checkpoint nothing",
    )


def _remarks(view: View, job: JobMeasured, found: tuple[Way, ...], taken: str) -> tuple[str, ...]:
    """What people should know beside the ways, as it is now."""
    wanted = view.job.strategy if view.job is not None else ""
    if not taken:
        return (
            "nothing brings back what a lost node holds: all workers would start over. Take checkpoints "
            "(job.checkpoint)",
        )
    said = sentences.by_waste(found, taken, wanted, job.profile.mtbf_s)
    if taken in ("log", "log+parallel"):
        said += _size_of_nothing(view, job)
        said += _is_dear(job, found, taken, wanted)
    return (*said, f"--strategy {wanted}: here that is {taken}, see above") if wanted not in ("", taken) else said
