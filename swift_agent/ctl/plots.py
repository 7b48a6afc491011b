"""What `--plot FILE` of `swiftctl` draws: lines and marks, into a PNG or an SVG. matplotlib is imported for it only.

It must never let a command begin to compute what it could not draw: `checked` is its option's callback.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

SUFFIXES = (".png", ".svg")
# Told apart without colours, too: by these and by the kind of line.
_MARKERS = "osD^vPX*"
_LINES = ("-", "--", "-.", ":")
# Of Okabe and Ito: for all kinds of eyes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")


@dataclass(frozen=True)
class Line:
    """Through points (x, y); a y of None is a gap. *is_mark*: they are not joined."""

    name: str
    points: Sequence[tuple[float, float | None]]
    is_mark: bool = False


@dataclass(frozen=True)
class Chart:
    """Labels have the units. *log_x*, *log_y*: by powers of ten. *from_zero*: the y axis begins there. *ticks*:
    on a logarithmic x axis, in its unit."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False
    ticks: Sequence[float] = ()


def checked(context: click.Context, parameter: click.Parameter, given: Path | None) -> Path | None:
    """Of `--plot`: a file that can be drawn, or one line that says why not."""
    if given is None:
        return None
    if given.suffix.lower() not in SUFFIXES:
        raise click.BadParameter(f"{str(given)!r} is neither a PNG nor an SVG; type a name that ends in .png or .svg")
    if given.is_dir() or not given.parent.is_dir():
        raise click.BadParameter(f"{str(given)!r} cannot be written: no directory {str(given.parent)!r}, or one itself")
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib; type: pip install 'swift-agent[plot]'")
    return given


plot_option = click.option(
    "--plot", type=click.Path(path_type=Path), callback=checked, metavar="FILE",
    help="Draw it as well, into a .png or .svg. Needs the extra: pip install 'swift-agent[plot]'.",
)  # fmt: skip


def number(value: float) -> str:
    """Without a power of ten: "2.12", "17", "1,250"."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(chart: Chart, path: Path) -> None:
    """Write it. Ends the command with exit code 1 if the file cannot be written."""
    # No pyplot: it looks for a screen, and keeps what it has drawn.
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    # The same input gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": "swiftctl", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(8, 5.6), layout="constrained")
        axes = figure.add_subplot()
        for place, line in enumerate(chart.lines):
            found = [(x, float("nan") if y is None else y) for x, y in line.points]
            style: dict[str, Any] = {"color": _COLOURS[place % len(_COLOURS)], "label": line.name}
            xs, ys = [x for x, _ in found], [y for _, y in found]
            if line.is_mark:
                axes.plot(xs, ys, linestyle="", marker=_MARKERS[place % len(_MARKERS)], markersize=11,
                          markerfacecolor="none", markeredgewidth=2, zorder=5, **style)  # fmt: skip
            else:
                # Of the ninth the marker is that of the first, and the kind of line is not.
                kind = _LINES[(place + place // len(_MARKERS)) % len(_LINES)]
                axes.plot(xs, ys, linestyle=kind, marker=_MARKERS[place % len(_MARKERS)],
                          markersize=5, linewidth=1.6, **style)  # fmt: skip
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        if chart.log_x:
            axes.set_xscale("log")
        if chart.log_y:
            axes.set_yscale("log")
        if chart.from_zero:
            axes.set_ylim(bottom=0)
        if chart.ticks:
            axes.set_xticks(list(chart.ticks))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        try:
            figure.savefig(path, dpi=150, metadata=metadata)
        except OSError as error:
            raise click.ClickException(f"{path} cannot be written: {error}") from None
