"""`swiftctl`: what operators look at and steer jobs with.

    swiftctl status [JOB] [--watch]      who is in a job, who is missing; without JOB all jobs of the etcd cluster
    swiftctl history JOB                 its generations and recoveries, with the time of each phase
    swiftctl explain JOB [GENERATION]    why it has this generation and this plan
    swiftctl timeline JOB [--html FILE]  what it went through, as a text or as a page              (timeline)
    swiftctl timeline JOB [--html FILE]  what it went through, as a text or as a page              (timeline)
    swiftctl drain JOB NODE              a spare takes the place of a node                          (ctl_drain)
    swiftctl stop JOB                    end a job                                                  (ctl_steer)
    swiftctl inject JOB KIND             strike it with a fault, if it allows that                (injection/)
    swiftctl campaign JOB                with one after the other, and report them                (injection/)
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
from datetime import datetime

import click
from rich.text import Text

from swift_agent.ctl.common import add_row, needs_etcd, opened, output, records_of, table
from swift_agent.ctl.doctor import doctor
from swift_agent.ctl.drain import drain
from swift_agent.ctl.injection.campaign import campaign
from swift_agent.ctl.injection.inject import inject
from swift_agent.ctl.plan import plan
from swift_agent.ctl.replay import replay
from swift_agent.ctl.reports import explain as explaining
from swift_agent.ctl.reports import jobs
from swift_agent.ctl.simulate import simulate
from swift_agent.ctl.status.command import status
from swift_agent.ctl.steer import gc, stop
from swift_agent.ctl.timeline.command import timeline
from swift_rendezvous.roster.decision import nodes_are
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.etcd_config import EtcdConfig


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Look at swift-agent's jobs, and end or clear them.

    Exit codes: 0 done, 1 a problem or no such job, 2 a wrong command line.
    """


cli.add_command(status)
cli.add_command(stop)
cli.add_command(drain)
cli.add_command(inject)
cli.add_command(campaign)
cli.add_command(gc)
cli.add_command(doctor)
cli.add_command(replay)
cli.add_command(plan)
cli.add_command(simulate)
cli.add_command(timeline)
cli.add_command(timeline)


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
    console = output()
    if not episodes:
        console.print(Text(f"job {job}: no generation yet"))
        return
    for episode in episodes:
        at = datetime.fromtimestamp(episode.time_s).astimezone().isoformat(" ", "milliseconds")
        iteration = "" if episode.iteration is None else f", goes on at iteration {episode.iteration}"
        console.print(Text(f"{at}  generation {episode.generation}: {episode.what}{iteration}", style="bold"))
        console.print(Text(f"  {episode.why}"))
        for line in episode.said:
            console.print(Text(f"    {line}"))
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
        kept = ", ".join(dict.fromkeys(str(episode.generation) for episode in episodes)) or "none"
        raise click.ClickException(f"nothing is known of generation {number} of job {job!r}; kept: {kept}")
    if as_json:
        plan = found.plan.to_json() if found.plan else None
        click.echo(
            json.dumps({"job": job, "generation": number, "sentences": list(found.sentences), "plan": plan})
        )
        return
    console = output()
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
