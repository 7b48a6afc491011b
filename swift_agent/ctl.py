"""`swiftctl`: what operators look at and steer jobs with.

    swiftctl status                 all jobs of the etcd cluster
    swiftctl status gpt --json      one job, for a program
    swiftctl native build           compile the optional native forwarder

This module must never write into the keys of a job, and never print a node's token or a password.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swift_rendezvous.etcd_config import EtcdConfig
from swift_rendezvous.keys import EventRecord, Keys, RecordError, decode
from swift_rendezvous.kv import KeyValue, RendezvousError
from swift_rendezvous.view import Change, View, apply_all

ROOT = "/swift/"


def jobs_in(entries: Iterable[KeyValue]) -> list[str]:
    """Ids of the jobs that have a key among *entries*, sorted."""
    return sorted({entry.key[len(ROOT) :].partition("/")[0] for entry in entries if entry.key.startswith(ROOT)})


def summarize(job_id: str, entries: Iterable[KeyValue]) -> dict[str, Any]:
    """What the keys of a job say, as plain JSON types. Raises `RecordError` if a record cannot be read.

    `state` is `starting`, `training`, `recovering` or, at the end, what the result says. A slot whose owner is not
    alive is listed under `missing_slots`; a living node without a slot is a spare and has `slot` null.
    """
    keys, listed = Keys(job_id), list(entries)
    changes = [Change(kv.key, kv.value, kv.mod_revision, kv.create_revision) for kv in listed]
    view = apply_all(View(), keys, changes)
    generation = view.generation
    alive = {node.incarnation for node in view.nodes.values()}
    slots = generation.slots if generation else ()
    events = [(kv.key, decode(EventRecord, kv.value)) for kv in listed if kv.key.startswith(f"{keys.prefix}events/")]
    return {
        "job": job_id,
        "state": _state(view),
        "generation": view.number,
        "why": view.result.why if view.result else generation.why if generation else "",
        "num_nodes": view.job.num_nodes if view.job else None,
        "world_size": generation.world_size if generation else None,
        "coordinator": view.coordinator.node_id if view.coordinator else None,
        "nodes": [
            {
                "node": node_id,
                "host": node.host,
                "slot": generation.slot_of(node.incarnation) if generation else None,
                "num_workers": node.num_workers,
            }
            for node_id, node in sorted(view.nodes.items())
        ],
        "missing_slots": [
            {"slot": slot, "last_owner": owner.node_id, "host": owner.host}
            for slot, owner in enumerate(slots)
            if owner.incarnation not in alive and view.result is None
        ],
        "failures": [
            {"slot": slot, "kind": failure.kind, "local_ranks": list(failure.local_ranks), "evidence": failure.evidence}
            for slot, failure in sorted(view.failures.items())
        ],
        "events": [
            {"time_s": event.time_s, "generation": event.generation, "what": event.what, "why": event.why}
            for _, event in sorted(events, key=lambda item: item[0])
        ],
    }


def _state(view: View) -> str:
    if view.result is not None:
        return view.result.state
    if view.generation is None:
        return "starting"
    being_replaced = view.generation.mode == "replace" and len(view.resumed) < len(view.generation.slots)
    return "recovering" if view.failures or being_replaced else "training"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Look at swift-agent's jobs."""


@cli.command()
@click.argument("job", required=False)
@click.option("--rdzv-endpoint", metavar="HOST:PORT[,...]", help="The etcd servers. Default: $SWIFT_ETCD_ENDPOINTS.")
@click.option("--etcd-user", metavar="NAME", help="User name; the password is in a file or $SWIFT_ETCD_PASSWORD.")
@click.option("--etcd-password-file", metavar="FILE", help="File that holds the password.")
@click.option("--etcd-cacert", metavar="FILE", help="Certificates to check the servers' against (TLS).")
@click.option("--etcd-cert", metavar="FILE", help="Our certificate (TLS).")
@click.option("--etcd-key", metavar="FILE", help="Its private key.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for JOB, or a list of them.")
def status(
    job: str | None,
    rdzv_endpoint: str | None,
    etcd_user: str | None,
    etcd_password_file: str | None,
    etcd_cacert: str | None,
    etcd_cert: str | None,
    etcd_key: str | None,
    as_json: bool,
) -> None:
    """Show who is in JOB, who is missing and what happened; without JOB, all jobs."""
    try:
        config = EtcdConfig.from_environment(
            endpoints=rdzv_endpoint,
            user=etcd_user,
            password_file=etcd_password_file,
            ca_cert=etcd_cacert,
            cert=etcd_cert,
            key=etcd_key,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if config is None:
        raise click.UsageError("no etcd named; type --rdzv-endpoint HOST:2379, or set SWIFT_ETCD_ENDPOINTS")
    try:
        entries = _read(config, Keys(job).prefix if job else ROOT)
        found = [
            summarize(name, [kv for kv in entries if kv.key.startswith(Keys(name).prefix)]) for name in jobs_in(entries)
        ]
    except (RendezvousError, RecordError) as error:
        raise click.ClickException(str(error)) from None
    if job and not found:
        raise click.ClickException(
            f"no job {job!r} at {', '.join(config.endpoints)}: it has not started, or it has ended and was cleared; "
            "`swiftctl status` lists all"
        )
    if as_json:
        click.echo(json.dumps(found[0] if job else found))
    elif job:
        _print_job(found[0])
    else:
        _print_jobs(found)


def _read(config: EtcdConfig, prefix: str) -> list[KeyValue]:
    from swift_rendezvous.etcd import EtcdStore  # here: --help and the other commands do without grpc

    store = EtcdStore(config)
    try:
        return store.get_prefix(prefix)[0]
    finally:
        store.close()


# What comes out of etcd is shown as text, never read as rich's markup: hence `Text` everywhere.
def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print_jobs(found: list[dict[str, Any]]) -> None:
    table = _table("JOB", "STATE", "GENERATION", "NODES", "WORKERS", "WHY")
    for job in found:
        nodes = f"{len(job['nodes'])}" + (f" of {job['num_nodes']}" if job["num_nodes"] else "")
        cells = (job["job"], job["state"], job["generation"], nodes, job["world_size"] or "-", job["why"])
        table.add_row(*(Text(str(cell)) for cell in cells))
    Console().print(table if found else Text("no jobs"))


def _print_job(job: dict[str, Any]) -> None:
    console = Console()
    console.print(Text(f"job {job['job']}: {job['state']}, generation {job['generation']}"))
    if job["why"]:
        console.print(Text(f"  why          {job['why']}"))
    console.print(Text(f"  coordinator  {job['coordinator'] or 'none'}"))
    table = _table("SLOT", "NODE", "HOST", "WORKERS", "")
    order = sorted(job["nodes"], key=lambda node: (node["slot"] is None, node["slot"] or 0, node["node"]))
    for node in order:
        slot = "spare" if node["slot"] is None else node["slot"]
        table.add_row(*(Text(str(cell)) for cell in (slot, node["node"], node["host"], node["num_workers"], "")))
    for gap in job["missing_slots"]:
        table.add_row(*(Text(str(cell)) for cell in (gap["slot"], gap["last_owner"], gap["host"], "-", "missing")))
    console.print(table)
    for failure in job["failures"]:
        console.print(Text(f"  failure in slot {failure['slot']} ({failure['kind']}): {failure['evidence']}"))
    for event in job["events"][-10:]:
        console.print(Text(f"  generation {event['generation']}: {event['what']}: {event['why']}"))


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def native(args: tuple[str, ...]) -> None:
    """Build the optional native forwarder, or say where it is: `native build`, `native info`."""
    # A process of its own: what is compiled or loaded must not stay in ours.
    raise SystemExit(subprocess.call([sys.executable, "-m", "swift_agent.native", *args]))


if __name__ == "__main__":
    cli()
