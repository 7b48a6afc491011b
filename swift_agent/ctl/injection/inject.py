"""`swiftctl inject`: order one fault for a job that was started with `--allow-injection`, and wait until it is done.

Must never strike by itself: the agent of the target does.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import click

from swift_agent.ctl.common import needs_etcd, no_job, opened, records_of
from swift_agent.ctl.reports import jobs
from swift_agent.wire.injected import KINDS, Fault, FaultError, checked, moment_of
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import Compare, Delete, KeyValueStore

TIMEOUT_S = 60.0
POLL_S = 0.05


@click.command()
@click.argument("job")
@click.argument("kind", metavar="KIND", type=click.Choice(KINDS))
@click.option("--rank", type=int, default=-1, metavar="R", help="The worker, or the node that it is on.")
@click.option("--node", default="", metavar="NAME", help="The node.")
@click.option("--at", "moment", metavar="WHEN", help="iteration=120,phase=backward,part=0.5; or iteration=next. "
              "Phases: begin, forward, backward, step, after-step; micro-batch=N is of a forward or backward. "
              "Default: at once.")
@click.option("--for", "for_s", type=float, default=5.0, show_default=True, metavar="S",
              help="How long freeze, cut-network, slow-link and fill-disk last.")
@click.option("--rate", default="10mbit", show_default=True, help="Of slow-link, as tc has it.")
@click.option("--size", "num_bytes", type=int, default=1 << 30, show_default=True, metavar="BYTES",
              help="What fill-disk takes, in the directory of the message logs.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), default=TIMEOUT_S, show_default=True,
              metavar="SECONDS", help="How long to wait until it is done.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@needs_etcd
def inject(
    config: EtcdConfig, job: str, kind: Any, rank: int, node: str, moment: str | None, for_s: float, rate: str,
    num_bytes: int, timeout_s: float, as_json: bool,
) -> None:  # fmt: skip
    """Strike JOB with a fault of KIND: kill-worker, kill-node, freeze, cut-network, slow-link, fill-disk, corrupt-log.

    Only agents that were started with swift-run --allow-injection take such orders. Exit codes: 0 it is done, 1 no such
    job, rank or node, the fault is not possible there, nobody took the order, or etcd does not answer, 2 a wrong
    command line.
    """
    try:
        at = {} if moment is None else moment_of(moment)
        fault = checked(
            Fault(new_id(), kind, rank, node, for_s=for_s, rate=rate, num_bytes=num_bytes, **at)
        )
    except FaultError as error:
        raise click.UsageError("\n".join(error.mistakes)) from None
    with opened(config) as store:
        view = jobs.view_of(job, records_of(store, config, job))
        if view.job is None:
            raise no_job(config, job)
        why = not_there(view, fault)
        if why:
            raise click.ClickException(f"job {job!r}: {why}")
        answer = order(store, Keys(job), fault, timeout_s)
    if as_json:
        click.echo(json.dumps({"job": job, "id": fault.id, **answer}))
    if answer["state"] != "done":
        raise click.ClickException(f"job {job!r}: {answer['what']}") if not as_json else click.exceptions.Exit(1)
    if not as_json:
        click.echo(f"job {job}: injected on node {answer['node']}: {answer['what']}")


def new_id() -> str:
    return secrets.token_hex(6)


def not_there(view: View, fault: Fault) -> str:
    """Why *fault* has no target in that job; "" if it has."""
    generation = view.generation
    if fault.node and fault.node not in view.nodes:
        return f"no node {fault.node}; there are {', '.join(sorted(view.nodes)) or 'none'}"
    if fault.rank >= 0 and generation is None:
        return "it has not begun yet"
    if fault.rank >= 0 and generation is not None and fault.rank >= generation.world_size:
        return f"no rank {fault.rank}; there are 0 to {generation.world_size - 1}"
    takers = {name for name, node in view.nodes.items() if node.takes_faults}
    if view.nodes and not takers & ({fault.node} if fault.node else view.nodes.keys()):
        if fault.node:
            return f"node {fault.node} takes no faults: start it with swift-run --allow-injection"
        return "no node takes faults: start them with swift-run --allow-injection"
    return ""


def order(store: KeyValueStore, keys: Keys, fault: Fault, timeout_s: float) -> dict[str, Any]:
    """Write it, and return the answer of its target: `state` is `done`, `refused` or `unanswered`."""
    store.put(keys.fault(fault.id), fault.encoded())
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = store.get(keys.fault_answer(fault.id))
        if found is not None:
            answer: dict[str, Any] = json.loads(found.value)
            return {name: answer.get(name, "") for name in ("state", "node", "what", "time_s")}
        if time.monotonic() >= deadline_s:
            # Taken back: it must not strike when nobody expects it any more.
            taken = store.transaction(
                [Compare.absent(keys.fault_answer(fault.id))], [Delete(keys.fault(fault.id))]
            )
            if taken.succeeded:
                break
        time.sleep(POLL_S)
    what = (
        f"nobody has answered for {fault.target} within {timeout_s:g} s: its agent has to be started with "
        "--allow-injection" + (", or it has not come to that moment" if fault.iteration is not None else "")
    )
    return {"state": "unanswered", "node": "", "what": what, "time_s": time.time()}
