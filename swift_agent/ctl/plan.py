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
from swift_agent.ctl.common import time_text as _time
from swift_agent.ctl.plots import Chart, Line, draw, plot_option
from swift_recovery.planning.reports import ranges_of
from swift_recovery.strategy import intervals, just_in_time
from swift_recovery.strategy.budget import UNITS, Budget, groups_within, parse_budget
from swift_recovery.strategy.choose import Way, chain_of, choose, from_logs_s, helpers_of, ways
from swift_recovery.strategy.grouping import Groups, alone
from swift_recovery.strategy.profile import Profile, ProfileError, parse
from swift_recovery.strategy.sentences import by_waste, size_of, taken, text_of
from swift_recovery.strategy.trade_off import Algorithm, curve

_PARTS = (1.0, 0.75, 0.5, 0.25, 0.1)
# A part of the time, lost: as long as it is small failures hardly meet each other.
_RARE = 0.2
NOTHING = "nothing brings back what a lost machine holds: all workers would start over"


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
    found = _ways(job, log_budget)
    best = None if all(way.impossible for way in found) else choose(found, job.mtbf_s)
    if plot:
        draw(space_time(job, found, best), plot)
    if as_json:
        click.echo(json.dumps(_to_json(job, found, best, gpu_hour_cost)))
        return
    # What is piped is not cut to the width of a terminal that is not there.
    console = Console(width=None if Console().is_terminal else 160)
    for part in _shown(job, found, best, gpu_hour_cost):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))


def _ways(job: Profile, log_budget: Budget | None) -> tuple[Way, ...]:
    """Each with the groups that the coordinator would take for it."""
    if not log_budget:
        return ways(job)
    return ways(
        job, groups=groups_within(job, log_budget), helped_groups=groups_within(job, log_budget, helpers_of(job))
    )


def _all_bytes(job: Profile) -> float:
    chain = chain_of(job)
    return chain.log_bytes(alone(chain))


def _wasted_per_day(job: Profile, way: Way) -> float:
    """GPU hours."""
    return min(1.0, way.wasted(job.mtbf_s)) * _gpu_hours_of_a_day(job)


def _gpu_hours_of_a_day(job: Profile) -> float:
    return len(job.machines) * job.gpus_per_machine * 24.0


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
        *([("as this profile says", job.checkpoint_every * job.iteration_s)] if job.takes_checkpoints else []),
        ("c* of Just-In-Time (Young)", 1 / just_in_time.best_frequency(fleet)),
        ("Daly", intervals.daly_s(job.checkpoint_s, job.mtbf_s)),
    ]
    shown: list[tuple[str, float | None, float]] = [
        (name, seconds, min(just_in_time.periodic(fleet, 1 / seconds) * 24, _gpu_hours_of_a_day(job)))
        for name, seconds in found
    ]
    if all(machine.has_replica for machine in job.machines):
        shown += [
            ("just in time, by the script (not in this version)", None, just_in_time.by_the_script(fleet) * 24),
            ("just in time, transparent (not in this version)", None, just_in_time.transparent(fleet) * 24),
        ]
    return shown


def space_time(job: Profile, found: tuple[Way, ...], best: Way | None) -> Chart:
    """Log bytes against recovery time (SWIFT, figure 11), for a job with a pipeline of three machines or more."""
    chain = chain_of(job)
    largest = _all_bytes(job)
    unit = next((name for name in ("PiB", "TiB", "GiB", "MiB", "KiB") if largest >= 2 * UNITS[name]), "")
    time, length_s = ("minutes", 60.0) if max(way.recovery_s for way in found) >= 600 else ("seconds", 1.0)

    def at(num_bytes: float, seconds: float) -> tuple[float, float]:
        return num_bytes / UNITS[unit], seconds / length_s

    # Their parallel recovery is by all machines, which swift-run does not do: its own is a mark.
    algorithms: dict[Algorithm, str] = {"greedy": "greedy groups, as in the paper", "optimum": "the best groups"}
    lines = [
        Line(
            f"{name}{', parallel recovery as there' if helpers else ''}",
            [at(one.log_bytes, one.recovery_s) for one in curve(job, algorithm, helpers)],
        )
        for helpers in (False, True)
        for algorithm, name in algorithms.items()
    ]
    (rollback,) = (way for way in found if way.name == "checkpoint")
    if not rollback.impossible:
        lines.append(Line("nothing logged, all restart", [at(0, rollback.recovery_s)], is_mark=True))
    if best is not None:
        chosen = at(chain.log_bytes(best.groups) if best.groups else 0, best.recovery_s)
        lines.append(Line(f"chosen: {best.name}, as swift-run does it", [chosen], is_mark=True))
    return Chart(
        f"{job.name}:\nspace and time of recovery from message logs",
        f"logs between two checkpoints, {unit or 'bytes'}",
        f"expected recovery of a lost machine, {time}", lines, from_zero=True,
    )  # fmt: skip


def _shown(
    job: Profile, found: tuple[Way, ...], best: Way | None, gpu_hour_cost: float | None
) -> list[RenderableType]:  # fmt: skip
    num_gpus = len(job.machines) * job.gpus_per_machine
    shown: list[RenderableType] = [
        f"{job.name}: {len(job.machines)} machines, {num_gpus} GPUs, {job.iteration_s:.3g} s for an iteration, "
        f"a machine lost every {_time(job.mtbf_s)}\n"
    ]
    of_worker = ("WORKER",) if job.gpus_per_machine > 1 else ()
    compared = table("WAY", "RECOVERY", *of_worker, "OF TWO", "WITHOUT FAILURES", "STORAGE", "LOST PER DAY", "")
    for way in found:
        add_row(compared, _row(job, way, way is best, gpu_hour_cost))
    shown.append(compared)
    if best is None:
        shown.append(NOTHING)
    by_itself = taken(found, "", may_help=False)
    shown += [f"swift-run: {line}" for line in by_waste(found, by_itself, "", job.mtbf_s)]
    if best is not None and best.wasted(job.mtbf_s) > _RARE:
        shown.append(
            "failures are not rare beside what they cost: these figures leave out those that come in a recovery, "
            "which swiftctl simulate counts"
        )
    if job.boundary_bytes:
        groups = table("LOG BUDGET", "LOGGED", "A REPEATED ITERATION", "GROUPS OF MACHINES")
        chain, everything = chain_of(job), _all_bytes(job)
        # Without checkpoints nobody knows how much comes together.
        num = 1 if job.takes_checkpoints else job.checkpoint_every
        for part, some in _budgets(job):
            if len(some) == 1:
                add_row(groups, (f"{part:.0%}", None, None, "none: no two groups log so little"))
                continue
            expected_s = sum(len(group) * from_logs_s(job, group) for group in some) / len(job.machines)
            add_row(groups, (f"{part:.0%}", size_of(chain.log_bytes(some) / num), f"{expected_s:.3g} s", text_of(some)))
        when = "between two checkpoints" if job.takes_checkpoints else "in an iteration"
        title = f"\nmessages between machines, {when}: {size_of(everything / num)}; with a budget for them"
        shown += [f"{title} (swift-run --log-budget):", groups]
    often = table("CHECKPOINTS WHERE ALL RESTART", "ONE EVERY", "LOST PER DAY")
    for name, interval_s, hours in _intervals(job):
        every = _iterations(job, interval_s) if interval_s else "after a failure"
        add_row(often, (name, every, _lost(hours, gpu_hour_cost)))
    shown += [f"\na checkpoint takes {job.checkpoint_s:g} s:", often]
    return shown


def _row(job: Profile, way: Way, is_best: bool, gpu_hour_cost: float | None) -> tuple[str | None, ...]:
    times = [way.recovery_s, *([way.worker_s] if job.gpus_per_machine > 1 else []), way.two_s]
    shown = [_time(time_s) if time_s else None for time_s in times]
    if way.impossible:
        where = f"for machines {ranges_of(way.only)} only" if way.only else "not possible"
        return way.name, *shown, None, None, None, f"{where}: {way.impossible}"
    if way.name in ("log", "log+parallel") and not job.takes_checkpoints:
        return way.name, *(None for _ in shown), None, None, None, "all iterations since the begin are repeated"
    lost = _lost(_wasted_per_day(job, way), gpu_hour_cost)
    return way.name, *shown, f"{way.cost:+.2%}", size_of(way.storage_bytes), lost, "the best" if is_best else ""


def _budgets(job: Profile) -> list[tuple[float, Groups]]:
    """Parts of all messages, and the groups that the coordinator would take for them; one group of all: none fit."""
    return [(part, groups_within(job, Budget(part, is_part=True))) for part in _PARTS] if job.boundary_bytes else []


def _to_json(job: Profile, found: tuple[Way, ...], best: Way | None, gpu_hour_cost: float | None) -> dict[str, Any]:
    def described(way: Way) -> dict[str, Any]:
        if way.impossible:
            return {
                "name": way.name, "possible": False, "why_not": way.impossible, "only": list(way.only),
                "recovery_s": way.recovery_s or None, "worker_s": way.worker_s or None,
            }  # fmt: skip
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
        "name": job.name, "best": None if best is None else best.name, "taken": taken(found, "", may_help=False),
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
            {"budget_bytes": part * _all_bytes(job), "possible": len(groups) > 1,
             "groups": [list(group) for group in groups]}
            for part, groups in _budgets(job)
        ],
    }  # fmt: skip


def _iterations(job: Profile, interval_s: float) -> str:
    return f"{max(1, round(interval_s / job.iteration_s))} iterations"


