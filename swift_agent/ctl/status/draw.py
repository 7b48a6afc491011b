"""What `swiftctl status` prints: a summary as a picture for people.

Must never read what comes out of etcd as markup.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from swift_agent.ctl.common import add_row, table

NUM_EVENTS_SHOWN = 10


def picture(found: Any) -> RenderableType:
    """Of a job, or of a list of them, as `jobs.summarize` has it."""
    return all_jobs(found) if isinstance(found, list) else one_job(found)


def all_jobs(found: list[dict[str, Any]]) -> RenderableType:
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


def speed(job: dict[str, Any]) -> str:
    rate = job["rate"]
    if rate is None:
        return ", at the last recovery"
    at = datetime.fromtimestamp(rate["time_s"]).astimezone().isoformat(" ", "seconds")
    speed = "?" if rate["iterations_per_s"] is None else f"{rate['iterations_per_s']:.3g}"
    return f", {speed} per second at {at}"


def one_job(job: dict[str, Any]) -> RenderableType:
    generation = f"generation {job['generation']}" + (f" ({job['mode']})" if job["mode"] else "")
    lines: list[RenderableType] = [Text(f"job {job['job']}: {job['state']}, {generation}")]
    if job["why"]:
        lines.append(Text(f"  why          {job['why']}"))
    if job["iteration"] is not None:
        lines.append(Text(f"  iteration    {job['iteration']}{speed(job)}"))
    lines.append(Text(f"  coordinator  {job['coordinator'] or 'none'}"))
    rows = table("SLOT", "NODE", "HOST", "WORKERS", "")
    for node in sorted(job["nodes"], key=lambda node: (node["slot"] is None, node["slot"] or 0, node["node"])):
        slot = ("spare" if job["generation"] else "waits") if node["slot"] is None else node["slot"]
        add_row(rows, (slot, node["node"], node["host"], node["num_workers"], ""))
    for gap in job["missing_slots"]:
        add_row(rows, (gap["slot"], gap["last_owner"], gap["host"], None, "missing"))
    lines.append(rows)
    if job["machines"]:
        lines.append(Text(f"  not all ranks compute alike: {job['machines']}"))
    for order in job["drains"]:
        lines.append(Text(f"  drain of {order['node']} ({order['why']}): {order['progress']}"))
    for failure in job["failures"]:
        lines.append(Text(f"  failure in slot {failure['slot']} ({failure['kind']}): {failure['evidence']}"))
    for damaged in job["damaged"]:
        lines.append(Text(f"  the record {damaged['record']} {damaged['why']}; it counts as none"))
    for event in job["events"][-NUM_EVENTS_SHOWN:]:
        lines.append(Text(f"  generation {event['generation']}: {event['what']}: {event['why']}"))
    return Group(*lines)
