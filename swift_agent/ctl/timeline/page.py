"""One page that shows a `Timeline`: it needs no other file, no network and no script. Pure.

Pictures come from `figures`; each has a table that says the same. Must never let a text be markup: everything goes
through `markup.tag`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swift_agent.ctl.reports.explain import plan_sentences
from swift_agent.ctl.timeline.figures import NARROW, WIDE, around, legend, overview, patterns
from swift_agent.ctl.timeline.markup import Content, Markup, join, tag
from swift_agent.ctl.timeline.model import Incident, NodeRow, Timeline, mean_recovery_s
from swift_agent.ctl.timeline.style import SCRIPT, STYLE
from swift_agent.ctl.timeline.words import (
    PHASES,
    again,
    duration,
    goodput,
    money,
    outcome,
    per_s,
    rank_time,
    ranks,
    time_of_day,
)  # fmt: skip

# Nothing is loaded; what is on the page is the page's own.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
# Each with a picture; of a job with more of them the last.
MOST_INCIDENTS = 100


def page(timeline: Timeline, *, written_s: float, version: str, gpu_hour_cost: float | None = None) -> str:
    """The page as text, to be written as UTF-8. *written_s*: Unix time. *gpu_hour_cost*: of one rank's GPU."""
    title = f"Timeline of job {timeline.job}"
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"), tag("meta", name="referrer",
        content="no-referrer"), tag("title", title), tag("style", STYLE),
    )  # fmt: skip
    body = tag(
        "body", tag("a", "To the incidents", href="#incidents", class_="skip"), patterns(),
        tag("main", _head(timeline, gpu_hour_cost), _picture(timeline), _incidents(timeline, gpu_hour_cost),
            _nodes(timeline), _strategy(timeline), _unknown(timeline), _foot(timeline, written_s, version)),
        tag("script", SCRIPT),
    )  # fmt: skip
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


# ---- head -----------------------------------------------------------------------------------------------------------


def _head(timeline: Timeline, gpu_hour_cost: float | None) -> Markup:
    first = f"{time_of_day(timeline.begin_s)} to {time_of_day(timeline.end_s)}, {duration(timeline.elapsed_s)}"
    return tag(
        "header",
        tag("h1", f"Job {timeline.job}", tag("span", timeline.state, class_=f"state {timeline.state}")),
        tag("p", first, class_="soft"),
        tag("p", timeline.why) if timeline.why and timeline.state in ("failed", "stopped", "succeeded") else None,
        _tiles(timeline, gpu_hour_cost),
    )


def _tiles(timeline: Timeline, gpu_hour_cost: float | None) -> Markup:
    mean_s = mean_recovery_s(timeline)
    price = money(timeline.cost_rank_s, gpu_hour_cost)
    repeated = timeline.repeated_s
    beside = "how long iterations were repeated is not known" if repeated is None else (
        f"and {duration(repeated)} for repeated iterations" if repeated else "no iterations repeated")  # fmt: skip
    tiles: list[tuple[str, str, str]] = [
        ("Goodput", goodput(timeline), "of its time, without standstills and repeated iterations"),
        ("Stood still", duration(timeline.stalled_s), beside),
        ("Cost", rank_time(timeline.cost_rank_s), price and f"{price} in money, a GPU for each rank"),
        ("Incidents", str(len(timeline.incidents)), "" if mean_s is None else f"{duration(mean_s)} each on average"),
        ("Speed", per_s(timeline.usual_per_s), "median while nothing was wrong" if timeline.usual_per_s else ""),
        ("Iteration", "not known" if timeline.iteration is None else str(timeline.iteration),
         f"{timeline.world_size} ranks, generation {timeline.generation}"),
    ]  # fmt: skip
    return tag(
        "dl",
        *(tag("div", tag("dt", name), tag("dd", value, tag("small", small) if small else None))
          for name, value, small in tiles),
        class_="tiles",
    )  # fmt: skip


def _picture(timeline: Timeline) -> Markup:
    hidden = timeline.num_hidden
    more = f"{hidden} more nodes are not drawn; those to which something happened come first." if hidden else None
    shown = timeline.incidents[-MOST_INCIDENTS:]
    first = shown[0].generation if shown else 0
    keys = None
    if timeline.incidents:
        text = " go from incident to incident; the numbers are those of the generations that followed."
        keys = tag("p", tag("kbd", "\u2190"), " ", tag("kbd", "\u2192"), text, class_="soft keys")
    return tag(
        "section", tag("h2", "Nodes and ranks over time"),
        tag("div", legend(), overview(timeline, WIDE, first), overview(timeline, NARROW, first),
            tag("p", more) if more else None,
            keys, class_="card"),
    )  # fmt: skip


# ---- incidents -----------------------------------------------------------------------------------------------------


def _incidents(timeline: Timeline, gpu_hour_cost: float | None) -> Markup:
    if not timeline.incidents:
        nothing = tag("p", "Nothing was lost, and nothing had to be changed.", class_="card")
        return tag("section", tag("h2", "Incidents", id="incidents"), nothing)
    shown = timeline.incidents[-MOST_INCIDENTS:]
    rows = [
        (tag("a", str(one.generation), href=f"#incident-{one.generation}") if one in shown else str(one.generation),
         time_of_day(one.failed_s), one.title, duration(one.stalled_s), rank_time(one.cost_rank_s),
         "not known" if one.lost_iterations is None else str(one.lost_iterations))
        for one in timeline.incidents
    ]  # fmt: skip
    heads = ("Generation", "Begins at", "What", "Stood still", "Cost", "Iterations repeated")
    left_out = len(timeline.incidents) - len(shown)
    return tag(
        "section", tag("h2", "Incidents", id="incidents"),
        tag("div", _table(heads, rows, right=(3, 4, 5), wide=(2,)), class_="card"),
        tag("p", f"Only the last {len(shown)} are shown one by one.") if left_out else None,
        *(_incident(incident, timeline, gpu_hour_cost) for incident in shown),
    )  # fmt: skip


def _incident(incident: Incident, timeline: Timeline, gpu_hour_cost: float | None) -> Markup:
    name = f"title-{incident.generation}"
    return tag(
        "article",
        tag("header", tag("span", str(incident.generation), class_="number"), tag("h3", incident.title, id=name)),
        tag("dl", *_facts(incident, timeline, gpu_hour_cost), class_="facts"),
        _around(incident, timeline),
        _phases(incident),
        class_="card incident", id=f"incident-{incident.generation}", tabindex=0, aria_labelledby=name,
    )


def _facts(incident: Incident, timeline: Timeline, gpu_hour_cost: float | None) -> list[Markup]:
    evidence = [f"{loss.evidence}" for loss in incident.losses if loss.evidence]
    places = [f"slot {slot}: {old or 'nobody'} \u2192 {new or 'nobody'}" for slot, old, new in incident.takers]
    cost = f"{duration(incident.stalled_s)} \u00d7 {incident.world_size} ranks = {rank_time(incident.cost_rank_s)}"
    price = money(incident.cost_rank_s, gpu_hour_cost)
    plan: list[Content] = []
    if incident.plan is not None:
        plan = [tag("p", sentence) for sentence in plan_sentences(incident.plan)]
    elif incident.plan_why:
        plan = [tag("p", incident.plan_why)]
    predicted = None
    if incident.predicted_s is not None:
        predicted = f"{duration(incident.predicted_s)} had been predicted"
    told: list[tuple[str, Sequence[Content]]] = [
        ("Noticed at" if incident.losses else "Begins at", [time_of_day(incident.failed_s, 3)]),
        ("Evidence", [tag("p", one) for one in evidence[:8]] or [incident.why]),
        ("Places", [tag("p", one) for one in places[:16]]),
        ("Outcome", [outcome(incident, timeline), f"; {predicted}" if predicted else ""]),
        ("Strategy", [incident.way] if incident.plan is not None else []),
        ("Plan", plan),
        ("Cost", [cost if incident.world_size else duration(incident.stalled_s), f", {price} in money" if price else "",
                  f"; {again(incident)}" if incident.resumed_s is not None else ""]),
    ]  # fmt: skip
    return [join(tag("dt", name), tag("dd", *contents)) for name, contents in told if contents]


def _around(incident: Incident, timeline: Timeline) -> Markup:
    heading = tag("h4", "Speed before and after; 0 is its begin")
    pictures = [around(incident, timeline, width) for width in (WIDE, NARROW)]
    if not any(pictures):
        return join(heading, tag("p", "Not known: there are no times of iterations around it.", class_="soft"))
    return join(heading, *pictures)


def _phases(incident: Incident) -> Markup:
    """Their table, each with a bar."""
    if not incident.phases_s:
        return Markup()
    longest = max([*incident.phases_s.values(), 1e-9])
    rows = [
        tag("tr", tag("td", name), tag("td", _ms(seconds), class_="right"),
            tag("td", tag("i", style=f"width:{max(0.4, seconds / longest * 100):.1f}%"), class_="bar"),
            tag("td", PHASES.get(name, ""), class_="meaning soft"), class_="total" if name == "total" else None)
        for name, seconds in incident.phases_s.items()
    ]  # fmt: skip
    head = tag(
        "tr", tag("th", "Phase", scope="col"), tag("th", "ms", scope="col", class_="right"),
        tag("th", "", scope="col", aria_label="As a bar"), tag("th", "What it is", scope="col", class_="meaning"),
    )  # fmt: skip
    return join(tag("h4", "Phases: the slowest worker of each; some overlap"),
                tag("table", tag("thead", head), tag("tbody", *rows), class_="phases"))  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}" if seconds >= 0.01 else f"{seconds * 1000:.1f}"


# ---- the rest -------------------------------------------------------------------------------------------------------


def _nodes(timeline: Timeline) -> Markup:
    rows = [
        (row.node, ", ".join(map(str, row.slots)) or "none", ranks(row.ranks) if row.ranks else "none",
         time_of_day(row.begin_s), "still there" if _is_there(row, timeline) else time_of_day(row.end_s), _fate(row))
        for row in timeline.rows
    ]  # fmt: skip
    heads = ("Node", "Slots", "Ranks", "From", "Until", "What became of it")
    return tag("section", tag("h2", "Nodes"), tag("div", _table(heads, rows, wide=(5,)), class_="card"))


def _is_there(row: NodeRow, timeline: Timeline) -> bool:
    return not row.until and row.end_s >= timeline.end_s


def _fate(row: NodeRow) -> str:
    lost = [f"{ranks(one.ranks)} lost at {time_of_day(one.at_s)}" for one in row.lost if one.ranks]
    return "; ".join([*lost[-3:], *([row.until] if row.until else [])])


def _strategy(timeline: Timeline) -> Markup | None:
    if not timeline.strategy:
        return None
    lines = [tag("li", line.strip()) for line in timeline.strategy]
    title = "How this job recovers, as it has measured itself"
    return tag("section", tag("h2", title), tag("div", tag("ul", *lines, class_="plain"), class_="card"))


def _unknown(timeline: Timeline) -> Markup:
    lines = [tag("li", note) for note in timeline.notes]
    if timeline.points:
        lines.append(tag("li", "Speeds are means between marks of rank 0, a quarter of a second apart at least."))
    return tag("section", tag("h2", "What this page does not know"),
               tag("div", tag("ul", *lines, class_="plain"), class_="card"))  # fmt: skip


def _foot(timeline: Timeline, written_s: float, version: str) -> Markup:
    text = f"Written by swift-agent {version} at {time_of_day(written_s)} from {timeline.source}."
    return tag("footer", tag("p", text, class_="soft"))


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[Content]], right: Sequence[int] = (), wide: Sequence[int] = ()
) -> Markup:
    """Scrolls by itself in a narrow window, also by keys."""

    def kind(index: int) -> str | None:
        return "right" if index in right else "wide" if index in wide else None

    head = tag("tr", *(tag("th", name, scope="col", class_=kind(index)) for index, name in enumerate(heads)))
    body = [tag("tr", *(tag("td", cell, class_=kind(index)) for index, cell in enumerate(row))) for row in rows]
    table = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=heads[0] + " table")
