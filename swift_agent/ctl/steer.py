"""`swiftctl stop` and `swiftctl gc`: the only commands that end a job or remove its keys.

Each write is one guarded transaction: it must never end or remove another job than the one that was looked at.
"""

from __future__ import annotations

import getpass
import json
import socket
import time
from datetime import datetime
from typing import Any

import click
from rich.text import Text

from swift_agent.ctl.common import add_row, needs_etcd, no_job, opened, output, records_of, table
from swift_agent.ctl.reports import jobs
from swift_rendezvous.codec import decode, encode
from swift_rendezvous.node.registration import remove_ended
from swift_rendezvous.roster.keys import ROOT, Keys
from swift_rendezvous.roster.records import ResultRecord
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import Compare, KeyValue, KeyValueStore, Put

POLL_S = 0.2
# Workers get 30 s to end after SIGTERM, as under torchrun; agents then take another moment.
STOP_TIMEOUT_S = 60.0
# Longer than the default lease: a node that lost its lease while etcd was away has then come back.
GRACE_S = 6.0


@click.command()
@click.argument("job")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), default=STOP_TIMEOUT_S, show_default=True,
              metavar="SECONDS", help="How long to wait until all nodes have left; 0 does not wait.")
@click.option("--why", metavar="TEXT", help="The reason that the nodes log. Default: your name and this host.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@needs_etcd
def stop(config: EtcdConfig, job: str, timeout_s: float, why: str | None, as_json: bool) -> None:
    """End JOB: its agents end their workers and leave; `swift-run` then exits with 3 and says why.

    A job that has a result already keeps it. Exit codes: 0 all nodes have left (with --timeout 0: the order is
    written), 1 no such job, nobody runs it, nodes are still there after the timeout, or etcd does not answer, 2 a wrong
    command line.
    """
    reason = why or f"{who()} ran swiftctl stop"
    with opened(config) as store:
        entries = records_of(store, config, job)
        keys = Keys(job)
        record = next((entry for entry in entries if entry.key == keys.job), None)
        if record is None or not any(entry.key.startswith(keys.nodes) for entry in entries):
            raise click.ClickException(f"nobody runs job {job!r} any more; `swiftctl gc --yes` removes its records")
        result, ours = _write_result(store, config, record, ResultRecord("stopped", reason, cause="operator"))
        if not as_json:
            note = "" if ours else " (it had a result already)"
            click.echo(f"job {job}: {result.state}: {result.why}{note}")
        left = _wait(store, keys, record.create_revision, timeout_s)
    if as_json:
        outcome = {"job": job, "state": result.state, "why": result.why, "stopped_by_us": ours, "nodes_left": left}
        click.echo(json.dumps(outcome))
    elif timeout_s and not left:
        click.echo("all nodes have left")
    if left and timeout_s:
        raise click.ClickException(f"after {timeout_s:g} s still there: {', '.join(left)}; the order stands")


def who() -> str:
    try:
        return f"{getpass.getuser()} on {socket.gethostname()}"
    except (KeyError, OSError):  # a user id without a name, as in containers
        return f"somebody on {socket.gethostname()}"


def _write_result(
    store: KeyValueStore, config: EtcdConfig, record: KeyValue, result: ResultRecord
) -> tuple[ResultRecord, bool]:
    """Write *result* if the job of *record* is still there and has none. Returns the result and whether it is ours."""
    keys = Keys(record.key[len(ROOT) :].rpartition("/")[0])
    guards = [Compare.create_revision(keys.job, "==", record.create_revision), Compare.absent(keys.result)]
    written = store.transaction(guards, [Put(keys.result, encode(result))])
    if written.succeeded:
        return result, True
    found = store.get(keys.result)
    if found is None:
        raise no_job(config, keys.job_id)  # it has just ended
    # An answer that was lost: our own first try may have written it.
    return decode(ResultRecord, found.value), written.retried and found.value == encode(result)


def _wait(store: KeyValueStore, keys: Keys, job: int, timeout_s: float) -> list[str]:
    """Names of the nodes that are there at the end. *job*: the create revision of its record; another is another
    job."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        entries, _ = store.get_prefix(keys.prefix)
        same = any(entry.key == keys.job and entry.create_revision == job for entry in entries)
        nodes = [entry.key[len(keys.nodes) :] for entry in entries if entry.key.startswith(keys.nodes)]
        if not same:
            return []
        if not nodes:
            # The last node does so a moment after it has left, unless it was killed: this order leaves nothing behind.
            remove_ended(store, keys)
            return []
        if time.monotonic() >= deadline_s:
            return nodes
        time.sleep(POLL_S)


@click.command()
@click.option("--yes", is_flag=True, help="Remove them; without it they are only listed.")
@click.option("--grace", "grace_s", type=click.FloatRange(min=0), default=GRACE_S, show_default=True, metavar="SECONDS",
              help="How long a node of such a job has to come back before its records are removed.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@needs_etcd
def gc(config: EtcdConfig, yes: bool, grace_s: float, as_json: bool) -> None:
    """List the records of jobs that nobody runs; with --yes, remove them.

    A job is listed when no node of it is alive. It is kept after all if a node enters before the removal. Exit codes: 0
    listed, or removed what was listed, 1 etcd does not answer, 2 a wrong command line.
    """
    with opened(config) as store:
        found = jobs.leftovers(store.get_prefix(ROOT)[0])
        if found and yes:
            time.sleep(grace_s)
        outcomes = [(leftover, _outcome(store, leftover, yes)) for leftover in found]
    if as_json:
        click.echo(json.dumps([_describe(leftover, outcome) for leftover, outcome in outcomes]))
        return
    console = output()
    if not found:
        console.print(Text("nothing to remove: every job has a node"))
        return
    rows = table("JOB", "STATE", "RECORDS", "LAST EVENT", "")
    for leftover, outcome in outcomes:
        last_s = leftover.last_event_s
        last = None if last_s is None else datetime.fromtimestamp(last_s).astimezone().isoformat(" ", "seconds")
        add_row(rows, (leftover.job_id, leftover.state, leftover.num_records, last, outcome))
    console.print(rows)
    if not yes:
        console.print(Text("nothing was removed: --yes removes them"))


def _outcome(store: KeyValueStore, leftover: jobs.Leftover, yes: bool) -> str:
    if not yes:
        return "would be removed"
    guards, ops = jobs.removal(leftover)
    result = store.transaction(guards, ops)
    # After a lost answer the second try finds what the first one has removed.
    gone = result.succeeded or (result.retried and not store.get_prefix(Keys(leftover.job_id).prefix)[0])
    return "removed" if gone else "kept: a node has come"


def _describe(leftover: jobs.Leftover, outcome: str) -> dict[str, Any]:
    return {
        "job": leftover.job_id,
        "state": leftover.state,
        "num_records": leftover.num_records,
        "last_event_s": leftover.last_event_s,
        "removed": outcome == "removed",
        "outcome": outcome,
    }


