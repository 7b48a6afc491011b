"""What `swiftctl simulate --sweep` varies: how often machines fail, or how often checkpoints are taken.

Figures 13 and 14 of SWIFT. It must never leave out a value without a word: where a training does not end there is a
gap, and that is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import click
from rich.table import Table

from swift_agent.ctl.common import add_row, table
from swift_agent.ctl.plots import Chart, Line, number
from swift_recovery.strategy.profile import Profile

Name = Literal["mtbf", "checkpoint_every"]
MAX_VALUES = 50
_FACTORS = (0.125, 0.25, 0.5, 1, 2, 4, 8)


@dataclass(frozen=True)
class Sweep:
    """*values*: hours from one failure of the job to the next (mtbf), or iterations between two checkpoints; () for
    some around those of the profile."""

    name: Name
    values: tuple[float, ...] = ()

    @property
    def column(self) -> str:
        """Of its values, in JSON and CSV."""
        return "mtbf_hours" if self.name == "mtbf" else "checkpoint_every"

    def of(self, job: Profile) -> Sweep:
        """With values."""
        if self.values:
            return self
        here = job.mtbf_s / 3600 if self.name == "mtbf" else job.checkpoint_every
        found = (here * factor for factor in _FACTORS)
        if self.name == "checkpoint_every":
            found = (max(1, round(value)) for value in found)
        return replace(self, values=tuple(dict.fromkeys(found)))

    def applied(self, job: Profile, value: float) -> Profile:
        """The job with one of the values."""
        if self.name == "mtbf":
            return replace(job, machine_mtbf_hours=value * len(job.machines))
        return replace(job, checkpoint_every=int(value))


def parsed(context: click.Context, parameter: click.Parameter, given: str | None) -> Sweep | None:
    """Of `--sweep`: "mtbf", "mtbf=4,8,17", "checkpoint_every=10,100"; rising."""
    if given is None:
        return None
    name, is_given, text = given.partition("=")
    if name not in ("mtbf", "checkpoint_every"):
        raise click.BadParameter(f"{given!r}: type mtbf or checkpoint_every, or with values: mtbf=4,8,17")
    kind: Name = "mtbf" if name == "mtbf" else "checkpoint_every"
    if not is_given:
        return Sweep(kind)
    values = tuple(map(_number, text.split(",")))
    if not all(0 < value <= 1e9 for value in values) or len(set(values)) < len(values) or len(values) > MAX_VALUES:
        what = "hours from one failure to the next" if kind == "mtbf" else "iterations"
        raise click.BadParameter(f"{given!r}: type {what}, above 0, each once, at most {MAX_VALUES}: {kind}=4,8,17")
    if kind == "checkpoint_every" and any(value != int(value) for value in values):
        raise click.BadParameter(f"{given!r}: iterations are whole numbers")
    return Sweep(kind, tuple(sorted(values)))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def shown(sweep: Sweep, rows: Iterable[dict[str, Any]]) -> Table:
    """A row for each way, a column for each value; "-" where the training does not end."""
    unit = " h" if sweep.name == "mtbf" else ""
    heading = "HOURS, BY TIME BETWEEN FAILURES" if sweep.name == "mtbf" else "HOURS, BY CHECKPOINT EVERY"
    made = table(heading, *(f"{number(value)}{unit}" for value in sweep.values))
    for way, points in _by_way(sweep, rows).items():
        add_row(made, (way, *(None if hours is None else f"{hours:.1f}" for _, hours in points)))
    return made


def chart(sweep: Sweep, job: Profile, rows: Iterable[dict[str, Any]], hours: float, runs: str) -> Chart:
    """Hours of a training against what varies, a line for each way."""
    labels = {
        "mtbf": "hours from one failure of the job to the next",
        "checkpoint_every": "iterations between two checkpoints",
    }
    lines = [Line(way, points) for way, points in _by_way(sweep, rows).items()]
    lines.append(Line("without failures", [(value, hours) for value in (sweep.values[0], sweep.values[-1])]))
    return Chart(
        f"{job.name}:\n{hours:g} h of training with failures, {runs}", labels[sweep.name],
        "hours that the training takes", lines, log_x=True, ticks=sweep.values if len(sweep.values) <= 12 else (),
    )  # fmt: skip


def _by_way(sweep: Sweep, rows: Iterable[dict[str, Any]]) -> dict[str, Sequence[tuple[float, float | None]]]:
    found: dict[str, list[tuple[float, float | None]]] = {}
    for row in rows:
        found.setdefault(row["way"], []).append((row[sweep.column], row["hours"]))
    return {**found}
