"""Joins the two lower rooms: reads what ranks hold from the records and has the recovery room plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import get_args

from swift_recovery.plan import Plan, Way, make_plan
from swift_recovery.progress import RankReport
from swift_recovery.resize import Held, make_resize_plan
from swift_rendezvous.keys import GenerationRecord, PlanRecord, ProgressRecord

Reports = Mapping[int, ProgressRecord]


def plan_generation(
    generation: GenerationRecord, progress: Reports, handovers: Reports = MappingProxyType({})
) -> PlanRecord:
    """The plan of *generation*; everything is set up anew unless workers are replaced in place.

    *handovers*: what the workers of drained former owners hold, by slot.
    """
    if generation.mode == "resize":
        held = {slot: [Held.from_json(report) for report in record.reports] for slot, record in progress.items()}
        plan = make_resize_plan(held, [generation.workers_of(slot) for slot in range(len(generation.slots))])
    elif generation.mode != "replace":
        plan = Plan("fresh", generation.why)
    else:
        ways: dict[str, Way] = {way: way for way in get_args(Way)}
        way = ways.get(generation.recovery, "exact")
        plan = make_plan(_reports(progress), generation.world_size, _reports(handovers), way)
    return PlanRecord(generation.number, plan.to_json(), plan.why, restart=plan.kind == "restart")


def _reports(records: Reports) -> list[RankReport]:
    return [RankReport.from_json(report) for record in records.values() for report in record.reports]
