"""`swiftctl plan`: what a lost machine would cost a job, by its profile. Reads one file, asks nobody, writes nothing.

It must never predict for a profile that has a mistake, and never call best what this version does not do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
from rich.console import Console, RenderableType

from swift_agent.ctl.common import add_row, table
from swift_recovery.strategy import intervals
from swift_recovery.strategy.choose import Way, chain_of, choose, repeat_s, ways
from swift_recovery.strategy.grouping import Groups, alone, optimal
from swift_recovery.strategy.profile import Profile, ProfileError, parse

_UNITS = {"": 1, **{name: 1 << (10 * power) for power, name in enumerate(("KiB", "MiB", "GiB", "TiB", "PiB"), 1)}}
_PARTS = (1.0, 0.75, 0.5, 0.25, 0.1)
_DAY_S = 86400.0


def _budget(context: click.Context, parameter: click.Parameter, given: str | None) -> tuple[float, bool] | None:
    """Bytes, or a part of what all messages are: "200GiB", "20%" -> (200 << 30, False), (0.2, True)."""
    if given is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(%|[KMGTP]iB|)", given.strip())
    if found is None or (found[2] == "%" and float(found[1]) > 100):
        raise click.BadParameter(f"{given!r} is no size; type 500GiB, 2TiB, or 20% of all messages")
    return (float(found[1]) / 100, True) if found[2] == "%" else (float(found[1]) * _UNITS[found[2]], False)


@click.command()
@click.argument("profile", type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path))
@click.option("--log-budget", callback=_budget, metavar="SIZE",
              help="For the message logs between two checkpoints, of all machines together: 2TiB, or 20% of all "
              "messages. Without it all messages between machines are logged.")  # fmt: skip
@click.option("--gpu-hour-cost", type=click.FloatRange(min=0), metavar="MONEY", help="What one GPU costs in an hour.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(profile: Path, log_budget: tuple[float, bool] | None, gpu_hour_cost: float | None, as_json: bool) -> None:
    """Predict, from PROFILE, what each way to recover a lost machine costs, and which one is best.

    PROFILE is a JSON file that you write: machines, bytes, times. docs/planning.md says what is in it.

    Exit codes: 0 predicted, 1 the profile has mistakes, 2 a wrong command line.
    """
    try:
        job = parse(profile.read_text())
    except (ProfileError, OSError, UnicodeDecodeError) as error:
        raise click.ClickException("\n".join(f"{profile}: {line}" for line in str(error).splitlines())) from None
    budget = _bytes_of(job, log_budget)
    found = ways(job, budget)
    best = choose(tuple(way for way in found if _is_built(way)), job.mtbf_s)
    if as_json:
        click.echo(json.dumps(_to_json(job, found, best, gpu_hour_cost)))
        return
    # What is piped is not cut to the width of a terminal that is not there.
    console = Console(width=None if Console().is_terminal else 140)
    for part in _shown(job, found, best, gpu_hour_cost):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))


def _is_built(way: Way) -> bool:
    """Whether this version recovers so: it logs all messages between machines, and one process repeats."""
    return way.name != "log+parallel" and all(len(group) == 1 for group in way.groups)


def _bytes_of(job: Profile, budget: tuple[float, bool] | None) -> float | None:
    if budget is None or not job.boundary_bytes:
        return None
    value, is_part = budget
    return value * _all_bytes(job) if is_part else value


def _all_bytes(job: Profile) -> float:
    chain = chain_of(job)
    return chain.log_bytes(alone(chain))


def _groups_of(job: Profile, budget_bytes: float) -> Groups:
    return optimal(chain_of(job), budget_bytes, lambda group: repeat_s(job, group))


def _wasted_per_day(job: Profile, way: Way) -> float:
    """GPU hours."""
    return way.wasted(job.mtbf_s) * len(job.machines) * job.gpus_per_machine * 24


def _shown(job: Profile, found: tuple[Way, ...], best: Way, gpu_hour_cost: float | None) -> list[RenderableType]:
    num_gpus = len(job.machines) * job.gpus_per_machine
    shown: list[RenderableType] = [
        f"{job.name}: {len(job.machines)} machines, {num_gpus} GPUs, {job.iteration_s:.3g} s for an iteration, "
        f"a machine lost every {_time(job.mtbf_s)}\n"
    ]
    compared = table("WAY", "RECOVERY", "WITHOUT FAILURES", "STORAGE", "LOST PER DAY", "")
    for way in found:
        if way.impossible:
            add_row(compared, (way.name, None, None, None, None, f"not possible: {way.impossible}"))
            continue
        hours = _wasted_per_day(job, way)
        lost = f"{hours:.1f} GPU hours" + (f" ({hours * gpu_hour_cost:,.0f})" if gpu_hour_cost is not None else "")
        says = "the best" if way is best else "" if _is_built(way) else "not in this version: a prediction only"
        add_row(compared, (way.name, _time(way.recovery_s), f"{way.cost:+.2%}", _size(way.storage_bytes), lost, says))
    shown.append(compared)
    if job.boundary_bytes:
        groups = table("LOG BUDGET", "LOGGED", "A REPEATED ITERATION", "GROUPS OF MACHINES")
        chain, everything = chain_of(job), _all_bytes(job)
        for part in _PARTS:
            some = _groups_of(job, part * everything)
            expected_s = sum(len(group) * repeat_s(job, group) for group in some) / len(job.machines)
            add_row(groups, (f"{part:.0%}", _size(chain.log_bytes(some)), f"{expected_s:.3g} s", _text(some)))
        title = f"\nmessages between machines, between two checkpoints: {_size(everything)}; with a budget, which this "
        shown += [f"{title}version does not take:", groups]
    young_s, daly_s = (each(job.checkpoint_s, job.mtbf_s) for each in (intervals.young_s, intervals.daly_s))
    shown.append(
        f"\na checkpoint of {job.checkpoint_s:g} s pays every {_iterations(job, young_s)} (Young; by Daly "
        f"{_iterations(job, daly_s)}) where all restart; this one comes every {job.checkpoint_every}"
    )
    return shown


def _to_json(job: Profile, found: tuple[Way, ...], best: Way, gpu_hour_cost: float | None) -> dict[str, Any]:
    def described(way: Way) -> dict[str, Any]:
        if way.impossible:
            return {"name": way.name, "possible": False, "why_not": way.impossible}
        hours = _wasted_per_day(job, way)
        return {
            "name": way.name, "possible": True, "in_this_version": _is_built(way),
            "recovery_s": way.recovery_s, "cost": way.cost, "storage_bytes": way.storage_bytes,
            "groups": [list(group) for group in way.groups],
            "gpu_hours_lost_per_day": hours,
            "money_lost_per_day": None if gpu_hour_cost is None else hours * gpu_hour_cost,
        }  # fmt: skip

    return {
        "name": job.name, "best": best.name, "ways": [described(way) for way in found],
        "mtbf_s": job.mtbf_s, "iteration_s": job.iteration_s,
        "interval_s": {"young": intervals.young_s(job.checkpoint_s, job.mtbf_s),
                       "daly": intervals.daly_s(job.checkpoint_s, job.mtbf_s)},
        "budgets": [
            {"budget_bytes": part * _all_bytes(job),
             "groups": [list(group) for group in _groups_of(job, part * _all_bytes(job))]}
            for part in (_PARTS if job.boundary_bytes else ())
        ],
    }  # fmt: skip


def _iterations(job: Profile, interval_s: float) -> str:
    return f"{max(1, round(interval_s / job.iteration_s))} iterations"


def _text(groups: Groups) -> str:
    return " ".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)


def _time(seconds: float) -> str:
    for unit, length_s in (("days", _DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _size(num_bytes: float) -> str:
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= _UNITS[unit]:
            return f"{num_bytes / _UNITS[unit]:.3g} {unit}"
    return f"{num_bytes:.0f} B"
