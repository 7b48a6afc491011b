"""What a coordinator does about records that a person, a stranger or another version removed or overwrote. Pure.

Most that cannot be read are left out and do no harm: their authors write them again (`machine`), or they are not
needed. Three kinds are mended here:

- the record of the job and that of the generation, without which nothing can be decided: written again as they were
  last read. Where no node knows that, the job ends: beginning it again beside its living workers gives ranks to two;
- a result that cannot be read: it ends nothing, but would keep new nodes away, and is removed;
- what only the coordinator reads, where it waits for nothing else: its author would never learn of it, so another
  generation asks all again.

This module must never remove what it cannot read in any other case: it may be the word of a newer version.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift_rendezvous.roster.records import GenerationRecord, JobRecord
from swift_rendezvous.roster.view import View


@dataclass(frozen=True)
class RestoreGeneration:
    """Write the record of the generation again, as it was, where it was removed or overwritten."""

    generation: GenerationRecord


@dataclass(frozen=True)
class RestoreJob:
    """As `RestoreGeneration`, the job's own record."""

    job: JobRecord


@dataclass(frozen=True)
class RemoveDamaged:
    """Remove what stands in the place of a record and cannot be read. *name*: as in `View.damaged`."""

    name: str


Repair = RestoreGeneration | RestoreJob | RemoveDamaged


def beyond_repair(view: View) -> str:
    """Why the job has to end; empty if it need not. One whose own record was removed is ended by each of its nodes."""
    damaged = view.damaged
    lost = [name for name, record in (("job", view.job), ("generation", view.generation))
            if record is None and name in damaged]  # fmt: skip
    if lost:
        return "; ".join(f"the record {name} {damaged[name].why}, and no node knows what it was" for name in lost)
    if "generation" in damaged and view.generation is not None and view.begun > view.number:
        # To write an older one would give its ranks to nodes that have lost them since.
        return (
            f"the record generation {damaged['generation'].why}, though generation {view.begun} had begun; "
            f"the last that is known here is {view.number}"
        )
    if view.job is not None and view.generation is None and view.begun:
        return f"the record generation is gone, though generation {view.begun} had begun; no node knows what it was"
    return ""


def repairs(view: View) -> tuple[Repair, ...]:
    """What has to be written before anything else is decided."""
    found: list[Repair] = []
    if "job" in view.damaged and view.job is not None:
        found.append(RestoreJob(view.job))
    if "generation" in view.damaged and view.generation is not None:
        found.append(RestoreGeneration(view.generation))
    if "end" in view.damaged:
        found.append(RemoveDamaged("end"))
    return tuple(found)


def unread_records(view: View) -> dict[str, str]:
    """name -> evidence, of records of the current generation that are all that the job waits for, that cannot be read,
    and that their authors, which do not follow them, would not write again: another generation asks again. Pure."""
    generation = view.generation
    if not view.damaged or generation is None or not view.tracked or view.released:
        return {}
    slots = set(range(len(generation.slots)))
    awaited: dict[str, set[int]] = {}
    if view.plan is None and generation.asks:
        awaited = {"~progress": slots - set(view.progress), "~handover": set(generation.handover) - set(view.handovers)}
    elif view.plan is not None and view.pause is None:
        awaited = {"~finished": slots - {*view.finished, *view.exited}}
    elif view.pause is not None and view.pause.boundary is None:
        awaited = {"~position": slots - set(view.positions)}
    elif view.pause is not None:
        awaited = {"~parked": slots - set(view.parked)}
    found = {}
    for name, waiting in awaited.items():
        unread = {slot for slot in waiting if f"{name}/{generation.number}/{slot}" in view.damaged}
        if unread != waiting:
            return {}
        found.update({f"{name}/{generation.number}/{slot}": slot for slot in unread})
    return {name: f"the record {name} {view.damaged[name].why}" for name in found}
