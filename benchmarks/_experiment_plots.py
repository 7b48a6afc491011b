"""The figures of experiments.py, from its data. matplotlib is imported for them only.

Must never compute a figure that the data does not have, but rates and differences of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Of Okabe and Ito, as in swift_agent.ctl.plots.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")
BIN_S = 0.5
BEFORE_S, AFTER_S = 3.0, 3.0


def _axes(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    # No pyplot: it looks for a screen, and keeps what it has drawn.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def throughput(data: dict[str, Any], path: Path) -> None:
    """Above what rank 0 does in a second, below how far it has come; time counts from the first kill."""
    figure, axes = _axes(2, 2, (11, 7))
    for place, run in enumerate(data["runs"]):
        column = 0 if run["name"].startswith("pipeline") else 1
        kind, _, label = run["name"].partition(", ")
        failure = run["failures"][0]
        until_s = min(failure["made_up_s"] + AFTER_S, run["ends_s"][-1] - failure["at_s"])
        points = [
            (end_s - failure["at_s"], number)
            for end_s, number in zip(run["ends_s"], run["numbers"], strict=True)
            if -BEFORE_S <= end_s - failure["at_s"] <= until_s
        ]
        starts = [BIN_S * step for step in range(round(-BEFORE_S / BIN_S), int(until_s / BIN_S))]
        rates = [sum(start <= at_s < start + BIN_S for at_s, _ in points) / BIN_S for start in starts]
        style = {"color": COLOURS[place % 2], "linestyle": "-" if place % 2 == 0 else "--", "label": label}
        axes[0][column].step(starts, rates, where="post", **style)
        axes[1][column].plot([at_s for at_s, _ in points], [number for _, number in points], **style)
        axes[0][column].set(title=kind, ylabel="iterations per second")
        axes[1][column].set(xlabel="seconds after the kill", ylabel="iteration")
    for axis in axes.flat:
        axis.axvline(0, color="#999999", linewidth=1)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.legend(frameon=False)
    figure.savefig(path, dpi=150)


def timeline(data: dict[str, Any], path: Path) -> None:
    figure, axes = _axes(1, 1, (10, 3.6))
    axis = axes[0][0]
    phases = list(dict.fromkeys(name for bar in data["bars"].values() for name in bar))
    phases = [name for name in phases if name not in ("total", "from the kill")]
    # The iteration comes last, also in the way that has no replay.
    phases.sort(key=lambda name: name == "iteration")
    left = dict.fromkeys(data["bars"], 0.0)
    hatches = ("", "//", "..")
    for place, phase in enumerate(phases):
        widths = [bar.get(phase, 0.0) * 1e3 for bar in data["bars"].values()]
        axis.barh(list(left), widths, left=list(left.values()), label=phase, color=COLOURS[place % len(COLOURS)],
                  hatch=hatches[place // len(COLOURS)], edgecolor="white", height=0.5)  # fmt: skip
        left = {name: left[name] + width for name, width in zip(left, widths, strict=True)}
    ends = [bar["from the kill"] * 1e3 for bar in data["bars"].values()]
    axis.plot(ends, list(left), linestyle="", marker="|", markersize=38, color="black", label="end, as measured")
    axis.set(xlabel="ms after the kill (phases may overlap, and are drawn one behind the other)")
    axis.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=7, frameon=False)
    figure.savefig(path, dpi=150)


def replicas(data: dict[str, Any], path: Path) -> None:
    names = [run["name"].partition(", ")[2] for run in data["runs"]]
    labels = {"made_up_s": "seconds from the kill until all is made up", "lost": "iterations lost by all"}
    each = {
        label: [[failure[key] for failure in run["failures"]] for run in data["runs"]] for key, label in labels.items()
    }
    _bars(each, names, path)


def logging(data: dict[str, Any], path: Path) -> None:
    ways = data["ways"]
    each = {
        "ms per iteration": [[second * 1e3 for second in way["iteration_s"]] for way in ways.values()],
        "seconds of a recovery": [[way["recovery_s"]] if way["recovery_s"] else [] for way in ways.values()],
    }
    _bars(each, list(ways), path)


def _bars(each: dict[str, list[list[float]]], names: list[str], path: Path) -> None:
    """Medians, with all values as marks; nothing where there are none."""
    figure, axes = _axes(1, len(each), (11, 1.6 + 0.6 * len(names)))
    for axis, (label, values) in zip(axes[0], each.items(), strict=True):
        middles = [statistics.median(of_one) if of_one else 0.0 for of_one in values]
        axis.barh(names, middles, color=COLOURS[: len(names)], height=0.5)
        for name, of_one in zip(names, values, strict=True):
            axis.plot(of_one, [name] * len(of_one), "k|", markersize=9)
        axis.set(xlabel=label)
        axis.invert_yaxis()
        axis.grid(alpha=0.3, axis="x")
    axes[0][1].set_yticks([])
    figure.savefig(path, dpi=150)


def undo(data: dict[str, Any], path: Path) -> None:
    """Above the losses, below how far those of the disturbed runs are from the undisturbed one's."""
    figure, axes = _axes(2, 1, (8, 7))
    undisturbed = data["curves"]["undisturbed"]
    styles = ("-", "--", ":")
    for place, (name, losses) in enumerate(data["curves"].items()):
        style = {"color": COLOURS[place], "linestyle": styles[place], "label": name}
        axes[0][0].plot(losses, **style)
        if name != "undisturbed":
            axes[1][0].plot([a - b for a, b in zip(losses, undisturbed, strict=True)], **style)
    axes[0][0].set(ylabel="loss on rank 0")
    axes[1][0].set(xlabel="iteration", ylabel="difference from the undisturbed run")
    for axis in axes.flat:
        axis.axvline(data["cut_at"], color="#999999", linewidth=1)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=150)


DRAW: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "throughput": throughput, "timeline": timeline, "replicas": replicas, "logging": logging, "undo": undo,
}  # fmt: skip
