"""The agent's part in a change of the job's size: its old workers say what they hold, one keeps it, all end. Pure.

    generation (resize) --> SendStop --> reports --> ~progress/{g}/{slot} --> plan
    --> SendKeep to one old worker, if the plan names one here --> kept --> old workers end, new ones are started

See `swift_rendezvous.roster.resizing` for the whole. Must never read a clock, touch a process, a socket or the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift_agent.agent.lifecycle.state import Worker
from swift_recovery.planning.plan import Plan
from swift_recovery.planning.resize import FILE, Held
from swift_rendezvous.roster.records import GenerationRecord
from swift_rendezvous.roster.view import View

Workers = Mapping[int, Worker]


def held(generation: GenerationRecord, workers: Workers, kept: Held | None) -> tuple[Mapping[str, Any], ...] | None:
    """What this node has, None while an old worker that may hold something has not said so."""
    found = [] if kept is None else [kept]
    is_full = any(worker.keeps and worker.unfit for worker in workers.values())  # the disk, for all of them
    for worker in workers.values():
        if not worker.alive or worker.killed or worker.unfit or worker.generation >= generation.epoch:
            continue
        if worker.phase in ("started", "waiting"):
            continue  # it has not begun, and is told no more
        if worker.phase != "stopped" or worker.report is None:
            return None
        report = worker.report
        if report["status"] == "holding":
            iteration, sections = int(report["iteration"]), int(report.get("sections", 0))
            is_mixed = bool(report.get("updated"))
            found.append(Held(worker.local_rank, iteration, sections, is_mixed=is_mixed, is_full=is_full))
    return tuple(one.to_json() for one in found)


def keeper(view: View, slot: int, workers: Workers, kept: Held | None) -> Worker | None:
    """The old worker that has to keep its state; None if there is none, or it is kept."""
    generation = view.generation
    if generation is None or generation.mode != "resize" or view.plan is None or view.plan.restart:
        return None
    plan = Plan.from_json(view.plan.content)
    local_rank = plan.keepers.get(slot, FILE)
    if local_rank == FILE or (kept is not None and kept.iteration == plan.iteration):
        return None
    worker = workers.get(local_rank)
    return worker if worker is not None and worker.generation < generation.epoch else None


def may_begin(view: View, slot: int, workers: Workers, kept: Held | None) -> bool:
    """Whether this node's old workers, living or dead, are not needed any more."""
    generation = view.generation
    if generation is None or generation.mode != "resize":
        return True
    if view.plan is None:
        return all(worker.generation >= generation.epoch for worker in workers.values()) and bool(workers)
    return not view.plan.restart and keeper(view, slot, workers, kept) is None
