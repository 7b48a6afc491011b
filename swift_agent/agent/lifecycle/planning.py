"""Joins the two lower rooms: reads what ranks hold from the records and has the recovery room plan. Pure.

It must never decide what recovers whom: it reads, asks `planner`, has the result weighed against a restart, and writes
down what that says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, get_args

from swift_agent.agent.lifecycle.strategy import weigh
from swift_recovery.planning.plan import Plan, Way
from swift_recovery.planning.planner import make_plan
from swift_recovery.planning.reports import RankReport
from swift_recovery.planning.resize import Held, make_resize_plan
from swift_rendezvous.roster.records import GenerationRecord, PlanRecord, ProgressRecord
from swift_rendezvous.roster.view import View

Reports = Mapping[int, ProgressRecord]
T = TypeVar("T")


def plan_generation(generation: GenerationRecord, view: View) -> PlanRecord:
    """The plan of *generation*; everything is set up again unless workers are replaced in place.

    *view*: with what the workers of each slot hold, and those of drained former owners. Where a report cannot be read
    it is unknown what that worker holds, and its author would not write it again: all start over.
    """
    try:
        plan = _plan(generation, view)
    except _Unread as error:
        plan = Plan("restart", str(error))
    return PlanRecord(generation.number, plan.to_json(), plan.why, restart=plan.kind == "restart")


class _Unread(Exception):
    """A report that no worker of this version has written."""


def _plan(generation: GenerationRecord, view: View) -> Plan:
    if generation.mode == "resize":
        held = {slot: _read(Held.from_json, slot, record) for slot, record in view.progress.items()}
        return make_resize_plan(held, [generation.workers_of(slot) for slot in range(len(generation.slots))])
    if generation.mode != "replace":
        return Plan("fresh", generation.why)
    ways: dict[str, Way] = {way: way for way in get_args(Way)}
    way = ways.get(generation.recovery, "exact")
    num_ranks = generation.world_size
    plan = make_plan(_reports(view.progress, num_ranks), num_ranks, _reports(view.handovers, num_ranks), way)
    return weigh(replace(view, generation=generation), plan)


def _reports(records: Reports, num_ranks: int) -> list[RankReport]:
    def from_json(data: dict[str, Any]) -> RankReport:
        report = RankReport.from_json(data)
        if strange := [rank for rank in (report.rank, *report.replicas) if not 0 <= rank < num_ranks]:
            raise ValueError(f"there is no rank {strange[0]}")
        return report

    return [report for slot, record in records.items() for report in _read(from_json, slot, record)]


def _read(from_json: Callable[[dict[str, Any]], T], slot: int, record: ProgressRecord) -> list[T]:
    """Raises `_Unread`."""
    try:
        return [from_json(report) for report in record.reports]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"[:200]
        raise _Unread(f"the report of slot {slot} cannot be read ({why})") from None
