"""`swiftctl drain`: have a node leave a job without loss of work. Must never order about another incarnation than the
one that was looked at."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import click

from swift_agent.ctl.common import needs_etcd, no_job, opened, records_of
from swift_agent.ctl.reports import jobs
from swift_agent.ctl.steer import POLL_S, who
from swift_rendezvous.node import drain_orders
from swift_rendezvous.roster.draining import is_handed_over, needs_state, progress_of
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.losses import absent_handovers, spares
from swift_rendezvous.roster.records import DrainRecord
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import KeyValueStore

DRAIN_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """*state*: `drained`, `waiting` (the order stands), `cancelled` or `job ended`."""

    state: str
    text: str
    slot: int | None = None
    new_owner: str | None = None


@click.command()
@click.argument("job")
@click.argument("node")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until the node has left.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), default=DRAIN_TIMEOUT_S, show_default=True,
              metavar="SECONDS", help="How long to wait; the order stands afterwards.")
@click.option("--cancel", is_flag=True, help="Take the order back, if the node has its slot still.")
@click.option("--why", metavar="TEXT", help="The reason that is kept. Default: your name and this host.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@needs_etcd
def drain(
    config: EtcdConfig, job: str, node: str, wait: bool, timeout_s: float, cancel: bool, why: str | None, as_json: bool
) -> None:
    """Have NODE leave JOB: a spare takes its slot and state between two iterations; then its swift-run exits with 0.

    While there is no spare the order waits for one. Exit codes: 0 the node has left (with --no-wait: the order is
    written; with --cancel: it is taken back), 1 no such job or node, the script does not use swift_agent.init(), the
    node is still there after the timeout, the order was taken back or is too late to be, or etcd does not answer, 2 a
    wrong command line.
    """
    keys = Keys(job)
    with opened(config) as store:
        view = jobs.view_of(job, records_of(store, config, job))
        incarnation = _checked(config, view, job, node, cancel)
        if cancel:
            outcome = _cancel(store, keys, view, node)
        else:
            reason = why or f"{who()} ran swiftctl drain"
            # What becomes of it, also if it could not be written, `_follow` finds.
            drain_orders.order(store, keys, view, DrainRecord(node, incarnation, reason, time.time()))
            outcome = _follow(store, keys, node, incarnation, timeout_s if wait else 0.0, quiet=as_json)
    if as_json:
        found = {"state": outcome.state, "why": outcome.text, "slot": outcome.slot, "new_owner": outcome.new_owner}
        click.echo(json.dumps({"job": job, "node": node, **found}))
    elif outcome.state == "drained" or cancel:
        click.echo(f"job {job}: {outcome.text}")
    elif outcome.state != "waiting" or wait:
        note = f"; after {timeout_s:g} s the order stands" if outcome.state == "waiting" else ""
        raise click.ClickException(f"job {job!r}: {outcome.text}{note}")
    done = {"cancelled"} if cancel else {"drained"} if wait else {"drained", "waiting"}
    if outcome.state not in done:
        raise click.exceptions.Exit(1)


def _checked(config: EtcdConfig, view: View, job: str, node: str, cancel: bool) -> str:
    """The incarnation of *node*; raises what the user has to be told."""
    if view.job is None:
        raise no_job(config, job)
    if view.result is not None:
        raise click.ClickException(f"job {job!r} has ended ({view.result.state}): {view.result.why}")
    record = view.nodes.get(node)
    if record is None:
        here = ", ".join(sorted(view.nodes)) or "none"
        raise click.ClickException(f"job {job!r} has no node {node!r}; its nodes are: {here}")
    if needs_state(view, record.incarnation) and not cancel:
        raise click.ClickException(
            f"the script of job {job!r} has not called swift_agent.init(): nothing could be handed over, and all "
            "workers would start again. Stop the node instead if that is meant"
        )
    return record.incarnation


def _cancel(store: KeyValueStore, keys: Keys, view: View, node: str) -> Outcome:
    drain = view.drains.get(node)
    if drain is None:
        raise click.ClickException(f"node {node!r} of job {keys.job_id!r} is not being drained")
    if drain.signal:
        raise click.ClickException(f"node {node!r}: {drain.why}, and goes in any case")
    if is_handed_over(view, node):
        raise click.ClickException(f"it is too late: node {node!r} has handed its slot over already")
    if not drain_orders.take_back(store, keys, view, node):
        raise click.ClickException(f"the job has just changed; look at `swiftctl status {keys.job_id}` and try again")
    return Outcome("cancelled", f"node {node} is not drained any more")


def _follow(
    store: KeyValueStore, keys: Keys, node: str, incarnation: str, timeout_s: float, quiet: bool
) -> Outcome:
    """Wait for the end of the order, and tell on the way how far it is."""
    deadline_s = time.monotonic() + timeout_s
    told = ""
    slot: int | None = None
    while True:
        view = jobs.view_of(keys.job_id, store.get_prefix(keys.prefix)[0])
        outcome = _judge(view, node, incarnation, slot)
        slot = outcome.slot
        if outcome.state == "waiting" and outcome.text != told and not quiet:
            click.echo(outcome.text)
            told = outcome.text
        if outcome.state != "waiting" or time.monotonic() >= deadline_s:
            return outcome
        time.sleep(POLL_S)


def _judge(view: View, node: str, incarnation: str, slot: int | None) -> Outcome:
    """Where the order is. *slot*: the one that the node had when it was last looked at."""
    generation = view.generation
    if view.job is None or view.result is not None:
        why = f" ({view.result.state}): {view.result.why}" if view.result else ""
        return Outcome("job ended", f"it ended before node {node} was drained{why}", slot)
    if generation is not None:
        slots = [*enumerate(generation.slots), *generation.handover.items()]
        slot = next((number for number, owner in slots if owner.incarnation == incarnation), slot)
    record = view.nodes.get(node)
    if record is None or record.incarnation != incarnation:
        owner = generation.slots[slot] if generation is not None and slot is not None else None
        if owner is None:
            return Outcome("drained", f"node {node} has left; it had no slot", slot)
        if any(one.incarnation == incarnation for one in absent_handovers(view).values()):
            why = f"its lease in etcd is gone, but it may still hold the state of slot {slot} and come back"
            return Outcome("waiting", f"node {node}: {why}", slot)
        if owner.incarnation != incarnation:
            return Outcome("drained", f"node {node} has left, {owner.node_id} has slot {slot}", slot, owner.node_id)
        return Outcome("drained", f"node {node} was lost; slot {slot} is being replaced", slot)
    if node not in view.drains:
        return Outcome("cancelled", f"the order to drain node {node} was taken back", slot)
    return Outcome("waiting", f"node {node}: {progress_of(view, node, has_spare=bool(spares(view)))}", slot)
