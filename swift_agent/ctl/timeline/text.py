"""A `Timeline` in a few lines for a terminal. Pure.

Must never be longer than what one reads: a paragraph for each incident.
"""

from __future__ import annotations

from swift_agent.agent.lifecycle.timeline import describe
from swift_agent.ctl.timeline.model import Incident, Timeline, mean_recovery_s
from swift_agent.ctl.timeline.words import (
    again,
    duration,
    goodput,
    money,
    outcome,
    per_s,
    rank_time,
    time_of_day,
)  # fmt: skip


def lines(timeline: Timeline, gpu_hour_cost: float | None = None) -> list[str]:
    """The text, by line."""
    mean_s = mean_recovery_s(timeline)
    price = money(timeline.cost_rank_s, gpu_hour_cost)
    found = [
        f"job {timeline.job}: {timeline.state}, generation {timeline.generation}, {timeline.world_size} ranks",
        f"  time         {time_of_day(timeline.begin_s)} to {time_of_day(timeline.end_s)}, "
        f"{duration(timeline.elapsed_s)}",
        f"  goodput      {goodput(timeline)}; stood still for {duration(timeline.stalled_s)}, "
        f"{rank_time(timeline.cost_rank_s)}" + (f", {price} in money" if price else ""),
        f"  speed        {per_s(timeline.usual_per_s)} (median)"
        + ("" if timeline.iteration is None else f", at iteration {timeline.iteration}"),
        f"  incidents    {len(timeline.incidents)}" + ("" if mean_s is None else f", {duration(mean_s)} each"),
    ]
    for incident in timeline.incidents:
        found += _incident(incident, timeline, gpu_hour_cost)
    found += [f"note: {note}" for note in timeline.notes]
    return found


def _incident(incident: Incident, timeline: Timeline, gpu_hour_cost: float | None) -> list[str]:
    price = money(incident.cost_rank_s, gpu_hour_cost)
    found = [f"{time_of_day(incident.failed_s, 3)}  generation {incident.generation}: {incident.title}"]
    evidence = [loss.evidence for loss in incident.losses if loss.evidence][:2] or [incident.why]
    found += [f"  {one}" for one in evidence]
    found.append(f"  {outcome(incident, timeline)}; {again(incident)}" if incident.resumed_s is not None else
                 f"  {outcome(incident, timeline)}")  # fmt: skip
    if incident.plan is not None:
        found.append(f"  strategy: {incident.way} ({incident.plan.why})")
    if incident.phases_s:
        found.append(f"  phases: {describe(dict(incident.phases_s))}")
    found.append(f"  cost: {rank_time(incident.cost_rank_s)}" + (f", {price} in money" if price else ""))
    return found
