"""The pictures of the page, as SVG: nodes and ranks over time with the speed below, and the speed around one incident.

Pure. Each is drawn for one width, in pixels, so that its text is as large as that of the page; a page has one for wide
and one for narrow windows. Must never carry what is not in a table of the page, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swift_agent.ctl.timeline.markup import Content, Markup, join, tag
from swift_agent.ctl.timeline.model import Incident, NodeRow, Piece, Timeline
from swift_agent.ctl.timeline.words import duration, per_s, ranks, time_of_day

WIDE, NARROW = 1120, 360
LANE, LANE_GAP, ROW_GAP, LABEL = 9.0, 2.0, 10.0, 16.0
FLAGS, SPEED, AXIS = 30.0, 120.0, 24.0
STATES = {
    "trains": "trains", "waits": "waits, with its state", "starts": "starts: process, set-up, state",
    "spare": "is a spare",
}  # fmt: skip


@dataclass(frozen=True)
class Frame:
    """Where times and speeds are in a picture."""

    begin_s: float
    end_s: float
    left: float
    right: float

    def x(self, at_s: float) -> float:
        span_s = max(self.end_s - self.begin_s, 1e-9)
        inside = min(max(at_s, self.begin_s), self.end_s)
        return self.left + (inside - self.begin_s) / span_s * (self.right - self.left)


def overview(timeline: Timeline, width: int, first_shown: int) -> Markup:
    """Nodes, ranks, incidents, and the speed below them. *first_shown*: of the incidents that the page has more of."""
    is_narrow = width < 600
    frame = Frame(timeline.begin_s, timeline.end_s, 8.0 if is_narrow else 190.0, width - 10.0)
    parts, y = list[Content](), FLAGS
    for row in timeline.rows:
        if is_narrow:
            y += LABEL
        parts.append(_row(row, frame, y, is_narrow))
        y += _height(row) + ROW_GAP
    bottom = y
    parts.append(_axis(frame, bottom, begins_at_zero=True))
    top = bottom + AXIS + 26
    parts.append(_speed(timeline, frame, top, (timeline.begin_s, timeline.end_s), (frame.right - frame.left) / 2.5))
    bands = [_band(incident, frame, FLAGS - 4, top + SPEED) for incident in timeline.incidents]
    parts = [*bands, *parts, *_flags(timeline.incidents, frame, first_shown)]
    what = f"Nodes and ranks of job {timeline.job} over time, and the speed below. The tables of the page say the same."
    return _svg(width, top + SPEED + 8, what, *parts)


def around(incident: Incident, timeline: Timeline, width: int) -> Markup:
    """The speed before, while and after it (SWIFT, figure 10); nothing if no speed is known there."""
    begin_s, end_s = window(incident, timeline)
    frame = Frame(begin_s, end_s, 46.0, width - 10.0)
    top = 30.0
    plot = _speed(timeline, frame, top, (begin_s, end_s), min((frame.right - frame.left) / 5, (end_s - begin_s) / 0.2))
    if not plot:
        return Markup()
    axis = _axis(frame, top + SPEED, begins_at_zero=False, zero_s=incident.failed_s)
    lines: list[Content] = [_band(incident, frame, top, top + SPEED)]
    begin = "noticed" if incident.losses else "begins"
    lines.append(_mark(frame, incident.failed_s, top, begin, "failed", anchor="end"))
    if incident.resumed_s is not None:
        lines.append(_mark(frame, incident.resumed_s, top, "all train", "resumed", anchor="start"))
    what = f"Speed around incident {incident.generation}: {incident.title}"
    return _svg(width, top + SPEED + AXIS + 4, what, *lines, plot, axis)


def window(incident: Incident, timeline: Timeline) -> tuple[float, float]:
    """What is shown around it: as long before and after as it took twice, some seconds at least."""
    pad_s = max(2 * incident.stalled_s, 4.0)
    return max(timeline.begin_s, incident.failed_s - pad_s), min(timeline.end_s, incident.until_s + pad_s)


def patterns() -> Markup:
    """What the fills of all pictures refer to; once in a page."""
    stripe = tag("path", d="M0 6 L6 0", class_="hatch")
    dot = tag("circle", cx=2, cy=2, r=1, class_="dot")
    defs = tag(
        "defs",
        tag("pattern", tag("rect", width=6, height=6, class_="ground-waits"), stripe, id="waits", width=6, height=6,
            patternUnits="userSpaceOnUse"),
        tag("pattern", tag("rect", width=4, height=4, class_="ground-starts"), dot, id="starts", width=4, height=4,
            patternUnits="userSpaceOnUse"),
    )  # fmt: skip
    return tag("svg", defs, width=0, height=0, aria_hidden="true", class_="defs")


def legend() -> Markup:
    """What the fills mean."""
    items = [
        tag("li", tag("svg", tag("rect", width=22, height=10, class_=f"piece {state}"), width=22, height=10,
                      aria_hidden="true"), f" {text}")
        for state, text in STATES.items()
    ]  # fmt: skip
    cross = tag("svg", _cross(8, 6), width=16, height=12, aria_hidden="true")
    band = tag("svg", tag("rect", width=14, height=12, class_="band"), width=14, height=12, aria_hidden="true")
    return tag("ul", *items, tag("li", cross, " lost"), tag("li", band, " the job does not train"), class_="legend")


# ---- parts ----------------------------------------------------------------------------------------------------------


def _svg(width: float, height: float, what: str, *parts: Content) -> Markup:
    return tag("svg", *parts, viewBox=f"0 0 {width:.0f} {height:.0f}", width=width, height=height, role="group",
               aria_label=what, class_="wide" if width >= 600 else "narrow")  # fmt: skip


def _height(row: NodeRow) -> float:
    return max(1, len(row.lanes)) * (LANE + LANE_GAP)


def _row(row: NodeRow, frame: Frame, y: float, is_narrow: bool) -> Markup:
    parts: list[Content] = []
    height = _height(row)
    held = ranks(row.ranks) if row.ranks else "spare"
    name = row.node if len(row.node) <= 22 else f"{row.node[:10]}\u2026{row.node[-10:]}"
    if is_narrow:
        parts.append(tag("text", tag("tspan", name, class_="node"), f"  {held}", x=frame.left, y=y - 5))
    else:
        middle = y + height / 2 - 1
        if len(row.lanes) > 1:
            parts.append(tag("text", name, x=frame.left - 10, y=middle - 1, text_anchor="end", class_="node"))
            parts.append(tag("text", held, x=frame.left - 10, y=middle + 12, text_anchor="end", class_="small"))
        else:
            text = join(tag("tspan", name, class_="node"), f"  {held}")
            parts.append(tag("text", text, x=frame.left - 10, y=middle + 4, text_anchor="end", class_="small"))
    whole = frame.right - frame.left
    parts.append(tag("rect", x=frame.left, y=y, width=whole, height=height - LANE_GAP, class_="lane"))
    for piece in row.spare:
        parts.append(_piece(piece, f"{row.node}", frame, y, height - LANE_GAP))
    for index, lane in enumerate(row.lanes):
        for piece in lane.pieces:
            parts.append(_piece(piece, f"rank {lane.rank} on {row.node}", frame, y + index * (LANE + LANE_GAP), LANE))
    for lost in row.lost:
        lanes = [index for index, lane in enumerate(row.lanes) if lane.rank in lost.ranks]
        middle = y + height / 2 - 1 if not lanes else y + lanes[0] * (LANE + LANE_GAP) + LANE / 2
        what = f"{ranks(lost.ranks) if lost.ranks else row.node} lost at {time_of_day(lost.at_s)}"
        parts.append(tag("g", tag("title", what), _cross(frame.x(lost.at_s), middle)))
    return tag("g", *parts)


def _piece(piece: Piece, who: str, frame: Frame, y: float, height: float) -> Markup:
    x = frame.x(piece.begin_s)
    what = f"{who} {STATES[piece.state]}, for {duration(piece.end_s - piece.begin_s)}"
    return tag("rect", tag("title", what), x=x, y=y, width=max(0.75, frame.x(piece.end_s) - x), height=height,
               class_=f"piece {piece.state}")  # fmt: skip


def _cross(x: float, y: float) -> Markup:
    size = 4.5
    d = f"M{x - size:.2f} {y - size:.2f} l{size * 2} {size * 2} m0 {-size * 2} l{-size * 2} {size * 2}"
    return join(tag("path", d=d, class_="cross under"), tag("path", d=d, class_="cross"))


def _band(incident: Incident, frame: Frame, top: float, bottom: float) -> Markup:
    x = frame.x(incident.failed_s)
    width = max(1.5, frame.x(incident.until_s) - x)
    return tag("rect", tag("title", f"{incident.title}: {duration(incident.stalled_s)}"), x=x, y=top, width=width,
               height=bottom - top, class_="band")  # fmt: skip


def _flag_text(group: Sequence[Incident]) -> str:
    first, last = group[0].generation, group[-1].generation
    return str(first) if first == last else f"{first}\u2013{last}"


def _half_flag(text: str) -> float:
    """Half of its width."""
    return 9 + 3.7 * (len(text) - 1)


def _flags(incidents: Sequence[Incident], frame: Frame, first_shown: int) -> list[Markup]:
    """A link to each incident; those that are too close to each other share one."""
    groups: list[list[Incident]] = []
    for incident in incidents:
        if groups:
            apart = frame.x(incident.failed_s) - frame.x(groups[-1][0].failed_s)
            if apart < _half_flag(_flag_text(groups[-1])) + 2 * _half_flag(str(incident.generation)) + 8:
                groups[-1].append(incident)
                continue
        groups.append([incident])
    found = []
    for group in groups:
        text = _flag_text(group)
        first = next((one.generation for one in group if one.generation >= first_shown), None)
        what = group[0].title if len(group) == 1 else f"{len(group)} incidents"
        half = _half_flag(text)
        x = min(max(frame.x(group[0].failed_s), half + 1), frame.right + 10 - half)
        shape = tag("rect", x=x - half, y=3, width=2 * half, height=18, rx=9)
        found.append(tag(
            "a", tag("title", what), shape, tag("text", text, x=x, y=16.5, text_anchor="middle"), class_="flag",
            href="#incidents" if first is None else f"#incident-{first}", aria_label=f"Incident {text}: {what}",
        ))  # fmt: skip
    return found


def _mark(frame: Frame, at_s: float, top: float, text: str, kind: str, anchor: str) -> Markup:
    x = frame.x(at_s)
    shift = -4 if anchor == "end" else 4
    if x + shift < frame.left + 50 and anchor == "end":
        anchor, shift = "start", 4
    if x + shift > frame.right - 56 and anchor == "start":
        anchor, shift = "end", -4
    line = tag("line", x1=x, x2=x, y1=top - 8, y2=top + SPEED, class_=f"mark {kind}")
    return join(line, tag("text", text, x=x + shift, y=top - 14, text_anchor=anchor, class_=f"small {kind}"))


def _speed(timeline: Timeline, frame: Frame, top: float, span: tuple[float, float], num_steps: float) -> Markup:
    """Iterations per second as steps; nothing if none is known."""
    begin_s, end_s = span
    steps = timeline.steps(begin_s, end_s, (end_s - begin_s) / max(num_steps, 1.0))
    if not steps:
        return Markup()
    most = nice(max(step.per_s for step in steps))
    bottom = top + SPEED
    y = [bottom - step.per_s / most * SPEED for step in steps]
    area, line = "", ""
    for index, step in enumerate(steps):
        x1, x2 = frame.x(step.begin_s), frame.x(step.end_s)
        goes_on = index > 0 and steps[index - 1].end_s == step.begin_s
        area += f"M{x1:.2f} {bottom:.2f}V{y[index]:.2f}H{x2:.2f}V{bottom:.2f}Z"
        line += f"{'L' if goes_on else 'M'}{x1:.2f} {y[index]:.2f}H{x2:.2f}"
    unit = "per hour" if most < 1 / 60 else "per minute" if most < 1 else "per second"
    factor = {"per hour": 3600, "per minute": 60, "per second": 1}[unit]
    labels = [
        tag("text", f"{most * factor * part:.3g}", x=frame.left - 6 if frame.left > 40 else frame.left, y=at + 4,
            text_anchor="end" if frame.left > 40 else "start", class_="small value")
        for part, at in ((1, top), (0.5, (top + bottom) / 2), (0, bottom))
    ]  # fmt: skip
    grid = [
        tag("line", x1=frame.left, x2=frame.right, y1=at, y2=at, class_="grid")
        for at in (top, (top + bottom) / 2, bottom)
    ]
    fastest = max(steps, key=lambda step: step.per_s)
    head = tag("text", f"iterations {unit}", x=frame.left, y=top - 8, class_="small")
    what = f"Speed: {per_s(fastest.per_s)} at most, {len(steps)} steps"
    return tag("g", tag("title", what), *grid, tag("path", d=area, class_="area"), tag("path", d=line, class_="speed"),
               head if frame.left > 60 or frame.left < 40 else None, *labels)  # fmt: skip


def nice(value: float) -> float:
    """The least of 1, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten that is not below *value*."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((power * one for one in (1, 1.5, 2, 3, 4, 5, 6, 8) if power * one >= value * 0.999999), power * 10)


TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def _axis(frame: Frame, y: float, begins_at_zero: bool, zero_s: float | None = None) -> Markup:
    """Times since *zero_s*, by default the begin."""
    zero_s = frame.begin_s if zero_s is None else zero_s
    span_s = frame.end_s - frame.begin_s
    most = max(2, int((frame.right - frame.left) / 90))
    tick_s = next((one for one in TICKS if span_s / one <= most), 86400 * math.ceil(span_s / 86400 / most))
    first, last = math.ceil((frame.begin_s - zero_s) / tick_s), math.floor((frame.end_s - zero_s) / tick_s)
    parts: list[Content] = [tag("line", x1=frame.left, x2=frame.right, y1=y, y2=y, class_="axis")]
    for index in range(first, last + 1):
        x = frame.x(zero_s + index * tick_s)
        parts.append(tag("line", x1=x, x2=x, y1=y, y2=y + 5, class_="axis"))
        anchor = "start" if x < frame.left + 12 else "end" if x > frame.right - 14 else "middle"
        text = _tick(index * tick_s, begins_at_zero)
        parts.append(tag("text", text, x=x, y=y + 18, text_anchor=anchor, class_="small"))
    return tag("g", *parts)


def _tick(seconds: float, begins_at_zero: bool) -> str:
    if seconds == 0:
        return "0"
    sign = "\u2212" if seconds < 0 else "" if begins_at_zero else "+"
    size = abs(seconds)
    return sign + (f"{size:.3g} s" if size < 60 else duration(size))
