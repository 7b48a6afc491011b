"""`swiftctl plan`: what a lost machine would cost a job, by its profile. Reads one file, asks nobody, writes nothing
but what `--plot` names.

It must never predict for a profile that has a mistake, and never call best what this version does not do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console, RenderableType

from swift_agent.ctl.common import add_row, finite, table
from swift_agent.ctl.plots import Chart, Line, draw, plot_option
from swift_recovery.strategy import intervals, just_in_time
from swift_recovery.strategy.budget import UNITS, Budget, groups_within, parse_budget
from swift_recovery.strategy.choose import Way, best_groups, chain_of, choose, from_logs_s, ways
from swift_recovery.strategy.grouping import alone
from swift_recovery.strategy.profile import Profile, ProfileError, parse
from swift_recovery.strategy.sentences import by_waste, size_of, taken, text_of
from swift_recovery.strategy.trade_off import Algorithm, curve

_PARTS = (1.0, 0.75, 0.5, 0.25, 0.1)
_DAY_S = 86400.0


def _budget(context: click.Context, parameter: click.Parameter, given: str | None) -> Budget | None:
    if given is None:
        return None
    try:
        return parse_budget(given)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("profile", type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path))
@click.option("--log-budget", callback=_budget, metavar="SIZE",
              help="For message logs: 2TiB, of each machine between two checkpoints, or 20% of all messages. Without "
              "it all messages between machines are logged.")  # fmt: skip
@click.option("--gpu-hour-cost", type=click.FloatRange(min=0), callback=finite, metavar="MONEY",
              help="What one GPU costs in an hour.")  # fmt: skip
@plot_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    profile: Path, log_budget: Budget | None, gpu_hour_cost: float | None, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Predict, from PROFILE, what each way to recover a lost machine costs, and which one is best.

    PROFILE is a JSON file that you write: machines, bytes, times. docs/profiles.md says what is in it.

    --plot draws what logs take against how long a recovery takes, for groups of machines (SWIFT, figure 11).

    Exit codes: 0 predicted, 1 the profile has mistakes, 2 a wrong command line.
    """
    try:
        job = parse(profile.read_text())
    except (ProfileError, OSError, UnicodeDecodeError) as error:
        raise click.ClickException("\n".join(f"{profile}: {line}" for line in str(error).splitlines())) from None
    if plot and len(job.boundary_bytes) < 2:
        raise click.ClickException(
            f"{profile}: --plot draws what message logs cost; that takes boundary_bytes, and three machines or more"
        )
    if log_budget and not job.boundary_bytes:
        raise click.ClickException(f"{profile}: --log-budget is for message logs; that takes boundary_bytes")
    found = ways(job, groups=groups_within(job, log_budget) if log_budget else ())
    best = choose(found, job.mtbf_s)
    if plot:
        draw(space_time(job, found, best), plot)
    if as_json:
        click.echo(json.dumps(_to_json(job, found, best, gpu_hour_cost)))
        return
    # What is piped is not cut to the width of a terminal that is not there.
    console = Console(width=None if Console().is_terminal else 140)
    for part in _shown(job, found, best, gpu_hour_cost):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))


def _all_bytes(job: Profile) -> float:
    chain = chain_of(job)
    return chain.log_bytes(alone(chain))


def _wasted_per_day(job: Profile, way: Way) -> float:
    """GPU hours."""
    return way.wasted(job.mtbf_s) * len(job.machines) * job.gpus_per_machine * 24


def _lost(gpu_hours: float, gpu_hour_cost: float | None) -> str:
    money = f" ({gpu_hours * gpu_hour_cost:,.0f})" if gpu_hour_cost is not None else ""
    return f"{gpu_hours:.1f} GPU hours{money}"


def _intervals(job: Profile) -> list[tuple[str, float | None, float]]:
    """Name, seconds between two checkpoints (None: they are taken after a failure), GPU hours lost in a day."""
    num_gpus = len(job.machines) * job.gpus_per_machine
    fleet = just_in_time.Fleet(
        num_gpus, 1 / (job.mtbf_s * num_gpus), job.checkpoint_s, job.restart_s + job.load_s, job.iteration_s
    )
    found = [
        ("as this profile says", job.checkpoint_every * job.iteration_s),
        ("c* of Just-In-Time (Young)", 1 / just_in_time.best_frequency(fleet)),
        ("Daly", intervals.daly_s(job.checkpoint_s, job.mtbf_s)),
    ]
    shown: list[tuple[str, float | None, float]] = [
        (name, seconds, just_in_time.periodic(fleet, 1 / seconds) * 24) for name, seconds in found
    ]
    if all(machine.has_replica for machine in job.machines):
        shown += [
            ("just in time, by the script (not in this version)", None, just_in_time.by_the_script(fleet) * 24),
            ("just in time, transparent (not in this version)", None, just_in_time.transparent(fleet) * 24),
        ]
    return shown


def space_time(job: Profile, found: tuple[Way, ...], best: Way) -> Chart:
    """Log bytes against recovery time (SWIFT, figure 11), for a job with a pipeline of three machines or more."""
    chain = chain_of(job)
    largest = _all_bytes(job)
    unit = next((name for name in ("PiB", "TiB", "GiB", "MiB", "KiB") if largest >= 2 * UNITS[name]), "")
    time, length_s = ("minutes", 60.0) if max(way.recovery_s for way in found) >= 600 else ("seconds", 1.0)

    def at(num_bytes: float, seconds: float) -> tuple[float, float]:
        return num_bytes / UNITS[unit], seconds / length_s

    algorithms: dict[Algorithm, str] = {"greedy": "greedy groups, as in the paper", "optimum": "the best groups"}
    lines = [
        Line(
            f"{name}{', parallel recovery' if helpers else ''}",
            [at(one.log_bytes, one.recovery_s) for one in curve(job, algorithm, helpers)],
        )
        for helpers in (False, True)
        for algorithm, name in algorithms.items()
    ]
    (rollback,) = (way for way in found if way.name == "checkpoint")
    lines.append(Line("nothing logged, all restart", [at(0, rollback.recovery_s)], is_mark=True))
    chosen = at(chain.log_bytes(best.groups) if best.groups else 0, best.recovery_s)
    lines.append(Line(f"chosen: {best.name}", [chosen], is_mark=True))
    return Chart(
        f"{job.name}:\nspace and time of recovery from message logs",
        f"logs between two checkpoints, {unit or 'bytes'}",
        f"expected recovery of a lost machine, {time}", lines, from_zero=True,
    )  # fmt: skip


def _shown(job: Profile, found: tuple[Way, ...], best: Way, gpu_hour_cost: float | None) -> list[RenderableType]:
    num_gpus = len(job.machines) * job.gpus_per_machine
    shown: list[RenderableType] = [
        f"{job.name}: {len(job.machines)} machines, {num_gpus} GPUs, {job.iteration_s:.3g} s for an iteration, "
        f"a machine lost every {_time(job.mtbf_s)}\n"
    ]
    compared = table("WAY", "RECOVERY", "OF TWO", "WITHOUT FAILURES", "STORAGE", "LOST PER DAY", "")
    for way in found:
        if way.impossible:
            add_row(compared, (way.name, None, None, None, None, None, f"not possible: {way.impossible}"))
            continue
        lost = _lost(_wasted_per_day(job, way), gpu_hour_cost)
        says = "the best" if way is best else ""
        times = _time(way.recovery_s), _time(way.two_s) if way.two_s else None
        add_row(compared, (way.name, *times, f"{way.cost:+.2%}", size_of(way.storage_bytes), lost, says))
    shown.append(compared)
    by_itself = taken(found, "", may_help=False)
    shown += [f"swift-run: {line}" for line in by_waste(found, by_itself, "", job.mtbf_s)]
    if job.boundary_bytes:
        groups = table("LOG BUDGET", "LOGGED", "A REPEATED ITERATION", "GROUPS OF MACHINES")
        chain, everything = chain_of(job), _all_bytes(job)
        for part in _PARTS:
            some = best_groups(job, part * everything)
            expected_s = sum(len(group) * from_logs_s(job, group) for group in some) / len(job.machines)
            add_row(groups, (f"{part:.0%}", size_of(chain.log_bytes(some)), f"{expected_s:.3g} s", text_of(some)))
        title = f"\nmessages between machines, between two checkpoints: {size_of(everything)}; with a budget for them"
        shown += [f"{title} (swift-run --log-budget):", groups]
    often = table("CHECKPOINTS WHERE ALL RESTART", "ONE EVERY", "LOST PER DAY")
    for name, interval_s, hours in _intervals(job):
        every = _iterations(job, interval_s) if interval_s else "after a failure"
        add_row(often, (name, every, _lost(hours, gpu_hour_cost)))
    shown += [f"\na checkpoint takes {job.checkpoint_s:g} s:", often]
    return shown


def _to_json(job: Profile, found: tuple[Way, ...], best: Way, gpu_hour_cost: float | None) -> dict[str, Any]:
    def described(way: Way) -> dict[str, Any]:
        if way.impossible:
            return {"name": way.name, "possible": False, "why_not": way.impossible}
        hours = _wasted_per_day(job, way)
        return {
            "name": way.name, "possible": True,
            "recovery_s": way.recovery_s, "worker_s": way.worker_s, "two_s": way.two_s,
            "cost": way.cost, "storage_bytes": way.storage_bytes,
            "groups": [list(group) for group in way.groups],
            "gpu_hours_lost_per_day": hours,
            "money_lost_per_day": None if gpu_hour_cost is None else hours * gpu_hour_cost,
        }  # fmt: skip

    return {
        "name": job.name, "best": best.name, "taken": taken(found, "", may_help=False),
        "ways": [described(way) for way in found],
        "mtbf_s": job.mtbf_s, "iteration_s": job.iteration_s,
        "interval_s": {"young": intervals.young_s(job.checkpoint_s, job.mtbf_s),
                       "daly": intervals.daly_s(job.checkpoint_s, job.mtbf_s)},
        "intervals": [
            {"name": name, "seconds": seconds, "gpu_hours_lost_per_day": hours,
             "money_lost_per_day": None if gpu_hour_cost is None else hours * gpu_hour_cost}
            for name, seconds, hours in _intervals(job)
        ],
        "budgets": [
            {"budget_bytes": part * _all_bytes(job),
             "groups": [list(group) for group in best_groups(job, part * _all_bytes(job))]}
            for part in (_PARTS if job.boundary_bytes else ())
        ],
    }  # fmt: skip


def _iterations(job: Profile, interval_s: float) -> str:
    return f"{max(1, round(interval_s / job.iteration_s))} iterations"


def _time(seconds: float) -> str:
    for unit, length_s in (("days", _DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
