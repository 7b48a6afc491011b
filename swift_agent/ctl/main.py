"""`swiftctl`: what operators look at and steer jobs with.

    swiftctl status [JOB] [--watch]      who is in a job, who is missing; without JOB all jobs of the etcd cluster
    swiftctl history JOB                 its generations and recoveries, with the time of each phase
    swiftctl explain JOB [GENERATION]    why it has this generation and this plan
    swiftctl timeline JOB [--html FILE]  what it went through, as a text or as a page              (timeline)
    swiftctl timeline JOB [--html FILE]  what it went through, as a text or as a page              (timeline)
    swiftctl drain JOB NODE              a spare takes the place of a node                          (ctl_drain)
    swiftctl stop JOB                    end a job                                                  (ctl_steer)
    swiftctl gc [--yes]                  remove the records of jobs that no node runs               (ctl_steer)
    swiftctl doctor                      is this machine fit for a job?                             (ctl_doctor)
    swiftctl replay JOURNAL              do today's cores decide as an agent's did?                 (ctl_replay)
    swiftctl plan PROFILE                what would a lost machine cost, with each way to recover   (plan)
    swiftctl simulate PROFILE --hours H  how long does a training take with failures       (simulate)
    swiftctl native build                compile the optional native forwarder

Exit codes: 0 done, 1 etcd or a record does not allow it, or there is no such job, 2 a wrong command line. This module
must never write into etcd, and never print a password.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from swift_agent.ctl.common import add_row, needs_etcd, no_job, opened, records_of, table
from swift_agent.ctl.doctor import doctor
from swift_agent.ctl.drain import drain
from swift_agent.ctl.plan import plan
from swift_agent.ctl.replay import replay
from swift_agent.ctl.reports import explain as explaining
from swift_agent.ctl.reports import jobs
from swift_agent.ctl.simulate import simulate
from swift_agent.ctl.steer import gc, stop
from swift_agent.ctl.timeline.command import timeline
from swift_rendezvous.roster.decision import nodes_are
from swift_rendezvous.roster.keys import ROOT, Keys
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import Compacted, KeyValue, KeyValueStore

NUM_EVENTS_SHOWN = 10


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Look at swift-agent's jobs, and end or clear them.

    Exit codes: 0 done, 1 a problem or no such job, 2 a wrong command line.
    """


cli.add_command(stop)
cli.add_command(drain)
cli.add_command(gc)
cli.add_command(doctor)
cli.add_command(replay)
cli.add_command(plan)
cli.add_command(simulate)
cli.add_command(timeline)
cli.add_command(timeline)


# ---- status --------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("job", required=False)
@click.option("--watch", is_flag=True, help="Show it again after each change, until Ctrl-C or the end of JOB.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for JOB, or a list; a line per change.")
@needs_etcd
def status(config: EtcdConfig, job: str | None, watch: bool, as_json: bool) -> None:
    """Show who is in JOB, who is missing and what happened; without JOB, all jobs.

    Exit codes: 0 shown (also when a watched job has ended, whatever its result), 1 no such job or etcd does not answer,
    2 a wrong command line.
    """
    with opened(config) as store:
        if watch:
            _watch(store, config, job, as_json)
            return
        entries, _ = store.get_prefix(Keys(job).prefix if job else ROOT)
        if job and not entries:
            raise no_job(config, job)
        found = _look(job, entries)
    if as_json:
        click.echo(json.dumps(found))
    else:
        Console().print(_draw(found))


def _look(job: str | None, entries: list[KeyValue]) -> Any:
    return jobs.summarize(job, entries) if job else jobs.summarize_all(entries)


def _watch(store: KeyValueStore, config: EtcdConfig, job: str | None, as_json: bool) -> None:
    """Show it after each change. Ctrl-C is how one leaves: no error."""
    try:
        if as_json:
            _follow(store, config, job, lambda found: click.echo(json.dumps(found)))
            return
        with Live(auto_refresh=False, vertical_overflow="visible") as live:
            _follow(store, config, job, lambda found: live.update(_draw(found), refresh=True))
    except KeyboardInterrupt:
        return


def _follow(store: KeyValueStore, config: EtcdConfig, job: str | None, show: Callable[[Any], None]) -> None:
    """One listing, then the watch that goes on from its revision; listed again if the history was compacted."""
    prefix = Keys(job).prefix if job else ROOT
    seen = False
    while True:
        listing, revision = store.get_prefix(prefix)
        entries = {entry.key: entry for entry in listing}
        if job and not entries and not seen:
            raise no_job(config, job)
        seen = True
        try:
            with store.watch_prefix(prefix, revision + 1) as watch:
                shown = _show(job, entries, None, show)
                while not (job and jobs.has_ended(job, entries)):
                    entries = jobs.follow(entries, next(watch))
                    shown = _show(job, entries, shown, show)
                return
        except Compacted:
            continue


def _show(job: str | None, entries: dict[str, KeyValue], shown: Any, show: Callable[[Any], None]) -> Any:
    """Show *entries* unless they look like what was *shown*; records that are gone leave the last picture."""
    if job and not entries:
        return shown
    found = _look(job, list(entries.values()))
    if found != shown:
        show(found)
    return found


def _draw(found: Any) -> RenderableType:
    return _draw_jobs(found) if isinstance(found, list) else _draw_job(found)


def _draw_jobs(found: list[dict[str, Any]]) -> RenderableType:
    if not found:
        return Text("no jobs")
    rows = table("JOB", "STATE", "GENERATION", "NODES", "SPARES", "WORKERS", "ITERATION", "PER SECOND", "WHY")
    for job in found:
        active = len(job["nodes"]) - job["num_spares"]
        # Before the first generation no node has a place; the nodes that are here count.
        nodes = f"{active if job['generation'] else len(job['nodes'])}"
        nodes += f" of {job['num_nodes']}" if job["num_nodes"] else ""
        nodes += f" to {job['max_nodes']}" if job["max_nodes"] != job["num_nodes"] else ""
        spares = job["num_spares"] if job["generation"] else 0
        per_s = job["rate"] and job["rate"]["iterations_per_s"]
        speed = None if per_s is None else f"{per_s:.3g}"
        cells = (job["state"], job["generation"], nodes, spares, job["world_size"], job["iteration"], speed, job["why"])
        add_row(rows, (job["job"], *cells))
    return rows


def _speed(job: dict[str, Any]) -> str:
    rate = job["rate"]
    if rate is None:
        return ", at the last recovery"
    at = datetime.fromtimestamp(rate["time_s"]).astimezone().isoformat(" ", "seconds")
    speed = "?" if rate["iterations_per_s"] is None else f"{rate['iterations_per_s']:.3g}"
    return f", {speed} per second at {at}"


def _draw_job(job: dict[str, Any]) -> RenderableType:
    generation = f"generation {job['generation']}" + (f" ({job['mode']})" if job["mode"] else "")
    lines: list[RenderableType] = [Text(f"job {job['job']}: {job['state']}, {generation}")]
    if job["why"]:
        lines.append(Text(f"  why          {job['why']}"))
    if job["iteration"] is not None:
        lines.append(Text(f"  iteration    {job['iteration']}{_speed(job)}"))
    lines.append(Text(f"  coordinator  {job['coordinator'] or 'none'}"))
    rows = table("SLOT", "NODE", "HOST", "WORKERS", "")
    for node in sorted(job["nodes"], key=lambda node: (node["slot"] is None, node["slot"] or 0, node["node"])):
        slot = ("spare" if job["generation"] else "waits") if node["slot"] is None else node["slot"]
        add_row(rows, (slot, node["node"], node["host"], node["num_workers"], ""))
    for gap in job["missing_slots"]:
        add_row(rows, (gap["slot"], gap["last_owner"], gap["host"], None, "missing"))
    lines.append(rows)
    for order in job["drains"]:
        lines.append(Text(f"  drain of {order['node']} ({order['why']}): {order['progress']}"))
    for failure in job["failures"]:
        lines.append(Text(f"  failure in slot {failure['slot']} ({failure['kind']}): {failure['evidence']}"))
    for damaged in job["damaged"]:
        lines.append(Text(f"  the record {damaged['record']} {damaged['why']}; it counts as none"))
    for event in job["events"][-NUM_EVENTS_SHOWN:]:
        lines.append(Text(f"  generation {event['generation']}: {event['what']}: {event['why']}"))
    return Group(*lines)


# ---- history, explain ----------------------------------------------------------------------------------------------


@cli.command()
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@needs_etcd
def history(config: EtcdConfig, job: str, as_json: bool) -> None:
    """Show every generation and recovery of JOB that is kept in etcd, oldest first.

    The event of a recovery takes the place of that of its generation. Exit codes: 0 shown, 1 no such job or etcd does
    not answer, 2 a wrong command line.
    """
    with opened(config) as store:
        events, unread = jobs.history_of(job, records_of(store, config, job))
    episodes = explaining.history(events)
    for name, why in unread.items():
        click.echo(f"the record {name} {why}", err=True)
    if as_json:
        click.echo(json.dumps({"job": job, "events": [episode.to_json() for episode in episodes]}))
        return
    console = Console()
    if not episodes:
        console.print(Text(f"job {job}: no generation yet"))
        return
    for episode in episodes:
        at = datetime.fromtimestamp(episode.time_s).astimezone().isoformat(" ", "milliseconds")
        iteration = "" if episode.iteration is None else f", goes on at iteration {episode.iteration}"
        console.print(Text(f"{at}  generation {episode.generation}: {episode.what}{iteration}", style="bold"))
        console.print(Text(f"  {episode.why}"))
        if episode.phases_s:
            rows = table("", *(name.upper() for name in episode.phases_s), "")
            add_row(rows, (" ", *(f"{seconds * 1000:.1f}" for seconds in episode.phases_s.values()), "ms"))
            console.print(rows)


@cli.command()
@click.argument("job")
@click.argument("generation", type=click.IntRange(min=1), required=False)
@click.option("--strategy", is_flag=True, help="Say how JOB recovers what is lost, what that costs, and why.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@needs_etcd
def explain(config: EtcdConfig, job: str, generation: int | None, strategy: bool, as_json: bool) -> None:
    """Say why JOB has this GENERATION (by default the current one) and this plan; or how it recovers.

    Exit codes: 0 said, 1 no such job, nothing kept of this generation, or etcd does not answer, 2 a wrong command line.
    """
    with opened(config) as store:
        entries = records_of(store, config, job)
        view = jobs.view_of(job, entries)
        episodes = explaining.history(jobs.events_of(job, entries))
    if strategy:
        return _explain_strategy(job, view, as_json)
    number = generation or view.number
    if number == 0:
        raise click.ClickException(f"job {job!r} has no generation yet: {nodes_are(len(view.nodes))} here")
    found = explaining.explain(view, episodes, number)
    if found is None:
        kept = ", ".join(str(episode.generation) for episode in episodes) or "none"
        raise click.ClickException(f"nothing is known of generation {number} of job {job!r}; kept: {kept}")
    if as_json:
        plan = found.plan.to_json() if found.plan else None
        click.echo(
            json.dumps({"job": job, "generation": number, "sentences": list(found.sentences), "plan": plan})
        )
        return
    console = Console()
    for sentence in found.sentences:
        console.print(Text(sentence))


def _explain_strategy(job: str, view: View, as_json: bool) -> None:
    known = view.profile
    if known is None:
        raise click.ClickException(
            f"job {job!r} has not been measured yet: that takes 9 iterations in which nothing fails, of a script whose "
            "loop swift-agent knows (job.track)"
        )
    if as_json:
        groups = [list(group) for group in view.log_groups]
        click.echo(json.dumps({"job": job, "way": known.way, "lines": known.lines, "log_groups": groups,
                               "profile": known.content}))  # fmt: skip
        return
    for line in known.lines:
        click.echo(line)


# ---- native --------------------------------------------------------------------------------------------------------


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def native(args: tuple[str, ...]) -> None:
    """Build the optional native forwarder, or say where it is: `native build`, `native info`."""
    # A process of its own: what is compiled or loaded must not stay in ours.
    raise SystemExit(subprocess.call([sys.executable, "-m", "swift_agent.native", *args]))
