"""The screen of `swiftctl status JOB --watch`: nodes, speed, the phase of a running recovery, the last events.

Drawn again a few times a second from what was last heard, so that times go on and the screen fits the terminal. Must
never wait for etcd, nor read what comes out of it as markup.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from swift_agent.agent.lifecycle.timeline import describe
from swift_agent.ctl.reports import explain, jobs, phase
from swift_agent.ctl.timeline.from_etcd import paces
from swift_agent.ctl.timeline.words import duration, ranks
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.kv import KeyValue

# How far back the speed is shown.
SPAN_S = 120.0
COLOURS = {
    "training": "green", "succeeded": "green", "recovering": "yellow", "starting": "yellow", "stopped": "red",
    "failed": "red", "abandoned": "red", "unreadable": "red", "trains": "green", "trains again": "green", "lost": "red",
    "lost workers": "red", "starts workers": "magenta", "waits, holds the state": "yellow",
    "is drained": "yellow", "waits for others": "yellow",
}  # fmt: skip

# Who is shown last where there is no room for all; the others come first.
URGENCY = {"waits, holds the state": 1, "trains again": 1, "trains": 2, "spare": 2}


@dataclass(frozen=True)
class Heard:
    """What the records said at *at_s* (monotonic). *phase_s*: since when the running phase was seen here."""

    job: str
    summary: dict[str, Any]
    view: View
    episodes: tuple[explain.Episode, ...]
    points: tuple[tuple[float, int], ...]
    at_s: float
    phase: phase.Phase | None = None
    phase_s: float = 0.0
    recovering_s: float | None = None
    """Since when a recovery was seen here."""


def heard(job: str, entries: Iterable[KeyValue], before: Heard | None, now_s: float) -> Heard:
    """*before*: what was heard last; *now_s*: monotonic."""
    listed = list(entries)
    view = jobs.view_of(job, listed)
    running = phase.phase_of(view)
    known = before.phase if before is not None else None
    same = running is not None and known is not None and running.name == known.name
    since_s = before.recovering_s if before is not None else None
    return Heard(
        job, jobs.summarize(job, listed), view, explain.history(jobs.events_of(job, listed)),
        tuple((point.at_s, point.iteration) for point in paces(job, listed)), now_s, running,
        before.phase_s if before is not None and same else now_s,
        None if running is None else since_s if since_s is not None else now_s,
    )  # fmt: skip


@dataclass
class Screen:
    """What is on the terminal now; *heard* is replaced by the thread that follows the job."""

    heard: Heard | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.heard is not None:
            height = options.height or console.size.height
            is_plain = not (console.encoding or "").lower().startswith("utf")
            yield draw(self.heard, options.max_width, height, time.monotonic(), time.time(), is_plain)


def draw(
    heard: Heard, width: int, height: int, now_s: float, time_s: float, is_plain: bool = False
) -> RenderableType:
    """At most *height* lines. *now_s*: monotonic; *time_s*: Unix. *is_plain*: of letters of ASCII."""
    summary = heard.summary
    parts: list[RenderableType] = [*_head(heard, now_s), *_speed(heard, width, time_s, is_plain)]
    if heard.phase is not None:
        parts += _recovery(heard, heard.phase, width, now_s, is_plain)
    troubles = [Text(f"drain of {one['node']} ({one['why']}): {one['progress']}") for one in summary["drains"]]
    troubles += [
        Text(f"slot {one['slot']} ({one['kind']}): {one['evidence']}", style="red") for one in summary["failures"]
    ]
    if summary["machines"]:
        troubles.append(Text(f"not all ranks compute alike: {summary['machines']}"))
    troubles += [Text(f"the record {one['record']} {one['why']}; it counts as none") for one in summary["damaged"]]
    parts += _cut(troubles[:5])
    room = height - len(parts) - 1
    if room < 3:
        return Group(*parts[: max(1, height)])
    # Two thirds for the nodes, the rest for what happened; each takes what the other does not need.
    rows, events = _node_rows(heard), _event_lines(heard)
    for_nodes = min(len(rows) + 2, room, max(4, room - min(len(events) + 2, max(3, room // 3))))
    parts += _nodes(rows, for_nodes, width)
    parts += _events(events, room - for_nodes)
    return Group(*parts)


def _cut(lines: Iterable[Text]) -> list[Text]:
    """One line on the screen each."""
    found = []
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
        found.append(line)
    return found


def _head(heard: Heard, now_s: float) -> list[Text]:
    summary, ago_s = heard.summary, max(0.0, now_s - heard.at_s)
    mode = f" ({summary['mode']})" if summary["mode"] else ""
    first = Text.assemble(
        ("job ", "dim"), (summary["job"], "bold"), "  ",
        (summary["state"], f"bold {COLOURS.get(summary['state'], '')}"), f"  generation {summary['generation']}{mode}",
        (f"  coordinator {summary['coordinator'] or 'none'}", "dim"),
        (f"  heard {duration(ago_s) if ago_s >= 1 else 'just now'}{' ago' if ago_s >= 1 else ''}", "dim"),
    )  # fmt: skip
    lines = [first]
    if summary["why"]:
        lines.append(Text.assemble(("why ", "dim"), summary["why"]))
    return _cut(lines)


def _speed(heard: Heard, width: int, time_s: float, is_plain: bool) -> list[Text]:
    summary, rate = heard.summary, heard.summary["rate"]
    iteration = "-" if summary["iteration"] is None else str(summary["iteration"])
    per_s = None if rate is None else rate["iterations_per_s"]
    told = f"iteration {iteration}, {'?' if per_s is None else f'{per_s:.3g}'} per second"
    # Marks come every few seconds: what is newer than the last is not known yet.
    end_s = min(heard.points[-1][0], time_s) if heard.points else time_s
    number = max(10, min(width - len(told) - 16, 80))
    bars = phase.ASCII_BARS if is_plain else phase.BARS
    line = phase.sparkline(phase.speeds(heard.points, end_s, SPAN_S, number), bars)
    return _cut([Text.assemble((told, "bold"), "  ", (line, "cyan"), (f"  {duration(SPAN_S)}", "dim")), Text()])


def _recovery(heard: Heard, running: phase.Phase, width: int, now_s: float, is_plain: bool) -> list[Text]:
    whole_s = now_s - (heard.recovering_s if heard.recovering_s is not None else now_s)
    counted = f", {running.done} of {running.total} nodes" if running.total else ""
    line = Text.assemble(
        (f"recovery for {duration(whole_s)}", "bold yellow"),
        f"  phase {running.name}, for {duration(now_s - heard.phase_s)}: {running.what}{counted}",
    )
    lines = [line]
    if running.total:
        full = max(10, min(width - 4, 60))
        done = full * running.done // running.total
        filled, empty = ("#", "-") if is_plain else ("\u2588", "\u2591")
        lines.append(Text(filled * done + empty * (full - done), style="yellow"))
    return _cut([*lines, Text()])


def _node_rows(heard: Heard) -> list[tuple[str, str, str, str, str]]:
    """Slot, node, host, ranks, state; those with something else to do than to train first."""
    view, states = heard.view, phase.node_states(heard.view)
    generation, rows = view.generation, list[tuple[str, str, str, str, str]]()
    for slot, owner in enumerate(generation.slots if generation is not None else ()):
        assert generation is not None
        held = ranks(generation.ranks_of(slot)).replace("\u2013", "-")
        rows.append((str(slot), owner.node_id, owner.host, held, states[owner.node_id]))
    placed = {row[1] for row in rows}
    for node_id, node in sorted(view.nodes.items()):
        if node_id not in placed:
            rows.append(("-", node_id, node.host, f"{node.num_workers} workers", states[node_id]))
    return sorted(rows, key=lambda row: URGENCY.get(row[4], 0))


def _nodes(rows: list[tuple[str, str, str, str, str]], room: int, width: int) -> list[RenderableType]:
    if not rows or room < 3:
        return []
    shown = rows if len(rows) + 2 <= room else rows[: max(1, room - 3)]
    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    names = ("SLOT", "NODE", "HOST", "RANKS", "STATE")
    wanted = [index for index, name in enumerate(names) if name != "HOST" or width >= 80]
    for index in wanted:
        made.add_column(names[index], no_wrap=True, overflow="ellipsis", min_width=4 if index == 0 else None)
    for row in shown:
        made.add_row(*(Text(row[index], style=COLOURS.get(row[index], "") if index == 4 else "") for index in wanted))
    more = [Text(f"... and {len(rows) - len(shown)} more nodes", style="dim")] if len(shown) < len(rows) else []
    return [made, *more, Text()]


def _event_lines(heard: Heard) -> list[Text]:
    """The newest first."""
    lines = []
    for one in reversed(heard.episodes):
        at = f"{datetime.fromtimestamp(one.time_s).astimezone():%H:%M:%S}"
        phases = f"{describe(dict(one.phases_s))}; " if one.phases_s else ""
        lines.append(Text.assemble((f"{at} ", "dim"), (f"generation {one.generation} ", ""), (f"{one.what}: ", "bold"),
                                   f"{phases}{one.why}"))  # fmt: skip
    return lines


def _events(lines: list[Text], room: int) -> list[Text]:
    if not lines or room < 2:
        return []
    return [Text("LAST EVENTS", style="bold"), *_cut(lines[: room - 1])]
