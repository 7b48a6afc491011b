"""Times, numbers and ranks in words, for the text and for the page. Pure.

Must never depend on where it runs: times of day are UTC.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from swift_agent.ctl.timeline.model import Incident, Timeline

# What each phase of a recovery is, in the order in which they happen; "total" is the whole.
PHASES = {
    "agree": "which node takes which place",
    "plan": "what the workers hold, and who gives it to whom",
    "start": "processes of the new workers come to life",
    "set-up": "their script builds model and optimizer",
    "regroup": "new connections under the process groups",
    "transfer": "state on its way to those that lack it",
    "verify": "checksums of all replicas are compared",
    "logs": "a replacement reads the logs that it repeats from",
    "replay": "lost iterations are repeated from message logs",
    "iteration": "the first iteration that all make again",
    "total": "from the first sign of the loss until all ranks train",
}


def duration(seconds: float) -> str:
    """`320 ms`, `5.1 s`, `2 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, name, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // part
            return f"{whole // unit} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def time_of_day(at_s: float, digits: int = 0) -> str:
    """`2026-11-28 20:51:59 UTC`."""
    moment = datetime.fromtimestamp(at_s, tz=UTC)
    fraction = f".{moment.microsecond // 10 ** (6 - digits):0{digits}d}" if digits else ""
    return f"{moment:%Y-%m-%d %H:%M:%S}{fraction} UTC"


def per_s(rate: float | None) -> str:
    """`18.3 per second`, or per minute or hour where that is easier to read."""
    if rate is None:
        return "not known"
    for factor, unit in ((1, "second"), (60, "minute"), (3600, "hour")):
        if rate * factor >= 1 or unit == "hour":
            return f"{rate * factor:.3g} per {unit}"
    raise AssertionError


def percent(part: float | None) -> str:
    """Never `100 %` of what is less."""
    if part is None:
        return "not known"
    for digits in (1, 2, 3):
        text = f"{part * 100:.{digits}f}"
        if part >= 1 or float(text) < 100:
            return f"{text} %"
    return "more than 99.999 %"


def goodput(timeline: Timeline) -> str:
    """In percent; at most that where not all of what it lost is known."""
    bound = "at most " if timeline.repeated_s is None and timeline.goodput is not None else ""
    return bound + percent(timeline.goodput)


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-3, 8` with dashes."""
    if not numbers:
        return "no ranks"
    spans: list[list[int]] = []
    for one in sorted(numbers):
        if spans and one == spans[-1][1] + 1:
            spans[-1][1] = one
        else:
            spans.append([one, one])
    text = ", ".join(str(a) if a == b else f"{a}\u2013{b}" for a, b in spans)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"


def rank_time(rank_s: float) -> str:
    """Seconds, or hours, of one rank each."""
    if rank_s < 3600:
        return f"{rank_s:.3g} rank seconds" if rank_s < 1000 else f"{rank_s:.0f} rank seconds"
    hours = rank_s / 3600
    return f"{hours:.3g} rank hours" if hours < 1000 else f"{hours:,.0f} rank hours"


def money(rank_s: float, gpu_hour_cost: float | None) -> str:
    """What that would cost if each rank has a GPU; "" without a price."""
    if gpu_hour_cost is None:
        return ""
    cost = rank_s / 3600 * gpu_hour_cost
    return f"{cost:,.2f}" if cost >= 1 or cost == 0 else f"{cost:.2g}"


def outcome(incident: Incident, timeline: Timeline) -> str:
    """How it ended, in a clause."""
    if incident.resumed_s is not None:
        at = "" if incident.iteration is None else f" with iteration {incident.iteration}"
        return f"all trained again after {duration(incident.stalled_s)}, going on{at}"
    if incident.untold:
        return "when all trained again is not known: the script does not call swift_agent.init()"
    if incident is timeline.incidents[-1]:
        if timeline.state in ("succeeded", "failed", "stopped"):
            return "the job ended before all trained again"
        return f"not over yet, after {duration(incident.stalled_s)}"
    return "another generation came before all trained again"


def again(incident: Incident) -> str:
    """What was made once more."""
    if incident.lost_iterations is None:
        return "how many iterations were made again is not known"
    if incident.lost_iterations == 0 and incident.plan is not None and incident.plan.handovers:
        return "no iteration was made again"
    if incident.lost_iterations == 0:
        return "no iteration was made again but the one that was interrupted"
    plural = "iterations were" if incident.lost_iterations > 1 else "iteration was"
    return f"at least {incident.lost_iterations} {plural} made again"
