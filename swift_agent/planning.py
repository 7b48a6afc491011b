"""Joins the two lower rooms: reads what ranks hold from the records and has the recovery room plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from swift_recovery.plan import Plan, make_plan
from swift_recovery.progress import RankReport
from swift_rendezvous.keys import GenerationRecord, PlanRecord, ProgressRecord


def plan_generation(generation: GenerationRecord, progress: Mapping[int, ProgressRecord]) -> PlanRecord:
    """The plan of *generation*; everything is set up anew unless workers are replaced in place."""
    if generation.mode != "replace":
        plan = Plan("fresh", generation.why)
    else:
        reports = [RankReport.from_json(report) for record in progress.values() for report in record.reports]
        plan = make_plan(reports, generation.world_size)
    return PlanRecord(generation.number, plan.to_json(), plan.why, restart=plan.kind == "restart")
