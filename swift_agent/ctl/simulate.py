"""`swiftctl simulate`: how long a training takes with failures, for each way to recover. Reads files, asks nobody.

It must never print a figure without saying how many runs it is the mean of.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from swift_agent.ctl import sweeps
from swift_agent.ctl.common import add_row, finite, progress, table, time_text
from swift_agent.ctl.plots import draw, plot_option
from swift_recovery.strategy.profile import Profile, ProfileError, parse
from swift_recovery.strategy.simulation import (
    MAX_FAILURES,
    Draw,
    Scheme,
    Times,
    schemes,
    total_as_in_the_paper_s,
    total_s,
)

_HOUR_S = 3600.0
_MOST_POSITIONS = 100_000_000  # of 8 bytes
_KINDS = ("exponential", "weibull", "paper")
Simulate = Callable[[Scheme], Times]


def _scales(context: click.Context, parameter: click.Parameter, given: str) -> tuple[int, ...]:
    try:
        found = tuple(int(number) for number in given.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or len(set(found)) < len(found):
        raise click.BadParameter(f"{given!r}: type whole numbers, each once, as 1,4,16")
    return found


@click.command()
@click.argument("profile", type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path))
@click.option("--hours", type=click.FloatRange(min=0, max=1e6, min_open=True), required=True,
              help="How long the training takes if nothing fails.")  # fmt: skip
@click.option("--failures", default="exponential", show_default=True, metavar="KIND",
              help="exponential, weibull, or paper (SWIFT's Table 5: so many as fit into --hours), by the profile's "
              "machine_mtbf_hours; or a file with the hours from one failure to the next.")  # fmt: skip
@click.option("--shape", type=click.FloatRange(min=0.1), callback=finite, default=0.7, show_default=True,
              help="Of weibull: below 1 failures come in clusters.")  # fmt: skip
@click.option("--runs", type=click.IntRange(1, 1_000_000), default=1000, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--snapshot-every", type=click.IntRange(min=1), default=30, show_default=True, metavar="ITERATIONS",
              help="Of CheckFreq-like and Elastic-Horovod-like snapshots.")  # fmt: skip
@click.option("--scale", "scales", default="1", show_default=True, metavar="N[,N...]", callback=_scales,
              help="So many replicas of the job train as one: failures come so many times as often.")  # fmt: skip
@click.option("--sweep", metavar="WHAT[=N,N...]", callback=sweeps.parsed,
              help="Once for each: mtbf, hours from one failure of the job to the next, or checkpoint_every, "
              "iterations. Without numbers: from an eighth of the profile's to eight times it.")  # fmt: skip
@plot_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--csv", "as_csv", is_flag=True, help="Print a line for each way.")
def simulate(
    profile: Path, hours: float, failures: str, shape: float, runs: int, seed: int, snapshot_every: int,
    scales: tuple[int, ...], sweep: sweeps.Sweep | None, plot: Path | None, as_json: bool, as_csv: bool,
) -> None:  # fmt: skip
    """Simulate a training of HOURS of the job that PROFILE describes, with failures.

    PROFILE is a JSON file that you write: machines, bytes, times. docs/profiles.md says what is in it.

    --plot draws the hours against what --sweep varies (mtbf, if it is not given).

    Exit codes: 0 simulated, 1 a file has mistakes, or the training does not end within 100,000 failures, 2 a wrong
    command line.
    """
    if math.isnan(hours):
        raise click.UsageError("--hours nan: type a number of hours")
    if as_json and as_csv:
        raise click.UsageError("--json or --csv, not both")
    try:
        job = parse(profile.read_text())
    except (ProfileError, OSError, UnicodeDecodeError) as error:
        raise click.ClickException("\n".join(f"{profile}: {line}" for line in str(error).splitlines())) from None
    if not job.takes_checkpoints:
        raise click.ClickException(
            f"{profile}: takes_checkpoints: false, and what is simulated begins with checkpoints: give "
            "checkpoint_every, checkpoint_s and load_s, and leave it out"
        )
    if failures not in _KINDS and scales != (1,):
        raise click.UsageError("--scale goes with --failures exponential, weibull or paper, not with a list of them")
    if plot and sweep is None:
        sweep = sweeps.Sweep("mtbf")
    if sweep:
        if scales != (1,):
            raise click.UsageError("--scale or --sweep (or --plot), not both")
        if failures not in _KINDS and sweep.name == "mtbf":
            raise click.UsageError("--sweep mtbf and --plot go with --failures exponential, weibull or paper")
    training_s = hours * _HOUR_S
    listed = None if failures in _KINDS else _read(failures)
    found = []
    if sweep:
        sweep = sweep.of(job)
        for value in progress(sweep.values):
            varied = sweep.applied(job, value)
            run = _simulation(varied.mtbf_s, training_s, failures, listed, shape, runs, seed)
            for scheme in schemes(varied, snapshot_every):
                found.append({sweep.column: value, **_described(scheme, _ended(run, scheme), hours, varied, 1)})
        if all(row["hours"] is None for row in found):
            raise click.ClickException(f"no training ends, with any of the values, within {MAX_FAILURES} failures")
    for scale in scales if not sweep else ():
        run = _simulation(job.mtbf_s / scale, training_s, failures, listed, shape, runs, seed)
        try:
            found += [
                _described(scheme, run(scheme), hours, job, scale)
                for scheme in progress(schemes(job, snapshot_every, scale))
            ]
        except ValueError as error:
            raise click.ClickException(f"{scale} times the machines: {error}" if scale > 1 else str(error)) from None
    of = f"{runs} runs" if failures in _KINDS else "1 run"
    if sweep and plot:
        draw(sweeps.chart(sweep, job, found, hours, f"means of {of}"), plot)
    if as_json:
        heading = {"name": job.name, "hours": hours, "failures": failures, "runs": runs}
        click.echo(json.dumps({**heading, **({"sweep": sweep.name} if sweep else {}), "ways": found}))
    elif as_csv:
        lines = io.StringIO()
        writer = csv.DictWriter(lines, found[0])
        writer.writeheader()
        writer.writerows(found)
        click.echo(lines.getvalue(), nl=False)
    else:
        _show(job, hours, failures, of, found, sweep)
        if listed is not None:
            _tell_end(listed, found)


def _ended(run: Simulate, scheme: Scheme) -> Times | None:
    """None if it has no end."""
    try:
        return run(scheme)
    except ValueError:
        return None


def _simulation(
    mtbf_s: float, training_s: float, failures: str, listed: list[float] | None, shape: float, runs: int, seed: int
) -> Simulate:  # fmt: skip
    """Each scheme meets the same failures; those that are *listed*, if any are."""
    if failures == "paper":
        num_failures = int(training_s // mtbf_s)
        if runs * num_failures > _MOST_POSITIONS:
            raise click.UsageError(f"{num_failures} failures in each of {runs} runs are too many; type fewer --runs")
        positions = np.random.default_rng(seed).random((runs, num_failures))
        return lambda scheme: total_as_in_the_paper_s(scheme, training_s, mtbf_s, positions)
    draw_of: Callable[[], Draw]
    if failures == "exponential":
        draw_of = lambda: _exponential(mtbf_s, seed)  # noqa: E731
    elif failures == "weibull":
        draw_of = lambda: _weibull(mtbf_s, shape, seed)  # noqa: E731
    else:
        assert listed is not None
        runs = 1
        draw_of = lambda: _listed(listed)  # noqa: E731
    return lambda scheme: total_s(scheme, training_s, runs, draw_of())


def _exponential(mtbf_s: float, seed: int) -> Draw:
    generator = np.random.default_rng(seed)
    return lambda num: generator.exponential(mtbf_s, num)


def _weibull(mtbf_s: float, shape: float, seed: int) -> Draw:
    generator = np.random.default_rng(seed)
    scale_s = mtbf_s / math.gamma(1 + 1 / shape)
    return lambda num: scale_s * generator.weibull(shape, num)


def _listed(times_s: list[float]) -> Draw:
    """One after the other; then no more."""
    left = iter(times_s)
    return lambda num: np.full(num, next(left, np.inf))


def _read(path: str) -> list[float]:
    try:
        lines = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        what = f"{path!r} is none of exponential, weibull, paper, and no file that can be read: {error}"
        raise click.BadParameter(what, param_hint="--failures") from None
    try:
        times_s = [float(line) * _HOUR_S for line in lines]
    except ValueError as error:
        raise click.ClickException(f"{path}: {error}") from None
    if not all(0 <= time_s < np.inf for time_s in times_s):
        raise click.ClickException(f"{path}: hours from one failure to the next are no less than 0")
    return times_s


def _tell_end(times_s: list[float], found: list[dict[str, Any]]) -> None:
    """A list may be shorter than the training: what comes after it would look better than it is."""
    ends_h = sum(times_s) / _HOUR_S
    if any(one["hours"] is not None and one["hours"] > ends_h for one in found):
        click.echo(f"\nthe list of failures ends after {ends_h:g} h: from there on nothing fails")


def _described(scheme: Scheme, totals_s: Times | None, hours: float, job: Profile, scale: int) -> dict[str, Any]:
    num_gpus = len(job.machines) * job.gpus_per_machine * scale
    if totals_s is None:
        names = ("hours", "deviation_hours", "slowest_hours", "wasted", "gpu_hours_lost")
        return {"way": scheme.name, "gpus": num_gpus, **dict.fromkeys(names)}
    totals_h = totals_s / _HOUR_S
    return {
        "way": scheme.name,
        "gpus": num_gpus,
        "hours": float(totals_h.mean()),
        "deviation_hours": float(totals_h.std()),
        "slowest_hours": float(totals_h.max()),
        "wasted": float(np.mean(1 - hours / totals_h)),
        "gpu_hours_lost": float((totals_h.mean() - hours) * num_gpus),
    }


def _show(
    job: Profile, hours: float, failures: str, of: str, found: list[dict[str, Any]], sweep: sweeps.Sweep | None
) -> None:
    console = Console(width=None if Console().is_terminal else 140)
    often = f"one of them is lost every {time_text(job.mtbf_s)}"
    if sweep and sweep.name == "mtbf":
        often = "one of them is lost as often as given"
    if failures not in _KINDS:
        often = "failures as listed"
    console.print(
        f"{job.name}: {hours:g} h of training on {len(job.machines)} machines\n"
        f"{often} ({failures}); means of {of}\n",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if sweep:
        console.print(sweeps.shown(sweep, found), highlight=False)
        if any(one["hours"] is None for one in found):
            console.print(f"\n-: no end after {MAX_FAILURES} failures", highlight=False)
        return
    numbers = list(dict.fromkeys(one["gpus"] for one in found))
    if len(numbers) > 1:
        shown = table("LOST, ON SO MANY GPUS", *(f"{num_gpus:,}" for num_gpus in numbers))
        lost = {(one["way"], one["gpus"]): f"{one['wasted']:.2%}" for one in found}
        for way in dict.fromkeys(one["way"] for one in found):
            add_row(shown, (way, *(lost.get((way, num_gpus)) for num_gpus in numbers)))
        console.print(shown, highlight=False)
        return
    shown = table("WAY", "HOURS", "DEVIATION", "SLOWEST", "LOST", "GPU HOURS LOST")
    for one in sorted(found, key=lambda one: float(one["hours"])):
        cells = [f"{one[name]:.1f}" for name in ("hours", "deviation_hours", "slowest_hours")]
        add_row(shown, (one["way"], *cells, f"{one['wasted']:.2%}", f"{one['gpu_hours_lost']:,.0f}"))
    console.print(shown, highlight=False)
