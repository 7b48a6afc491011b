"""The history of a job, and in sentences why it has a generation and a plan; made from records alone. Pure.

Etcd keeps only the event of an older generation: its reason, and after a recovery its plan and phases. It has the
roster of the current one, too, its plan and what was lost since. Must never guess: what is in no record is not
told, or said to be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swift_agent.agent.lifecycle.timeline import PHASES, describe
from swift_recovery.planning.plan import Plan
from swift_rendezvous.roster.losses import losses
from swift_rendezvous.roster.records import EventRecord, GenerationRecord
from swift_rendezvous.roster.view import View


@dataclass(frozen=True)
class Episode:
    """One line of the history. *phases_s* in the order in which they happen, with `total` last."""

    generation: int
    what: str
    why: str
    time_s: float
    iteration: int | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    plan: Plan | None = None
    said: tuple[str, ...] = ()
    """Of the worker that failed first: its traceback, or what it wrote last, line by line."""

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "what": self.what,
            "why": self.why,
            "time_s": self.time_s,
            "iteration": self.iteration,
            "phases_ms": {name: round(seconds * 1000, 3) for name, seconds in self.phases_s.items()},
            "plan": self.plan.to_json() if self.plan else None,
            "said": list(self.said),
        }


@dataclass(frozen=True)
class Explanation:
    """*sentences* say it all; the rest is for programs."""

    generation: int
    sentences: tuple[str, ...]
    plan: Plan | None = None


def history(events: Iterable[EventRecord]) -> tuple[Episode, ...]:
    """The episodes of *events*, oldest first. Details that cannot be read are left out: the line itself is not lost."""
    return tuple(_episode(event) for event in sorted(events, key=lambda event: event.generation))


def _episode(event: EventRecord) -> Episode:
    iteration = event.details.get("iteration")
    phases = event.details.get("phases_s")
    known = {name: float(s) for name, s in phases.items() if _is_number(s)} if isinstance(phases, dict) else {}
    unknown = [name for name in known if name not in (*PHASES, "total")]
    order = [name for name in (*PHASES, *unknown, "total") if name in known]
    return Episode(
        event.generation,
        event.what,
        event.why,
        event.time_s,
        iteration if isinstance(iteration, int) else None,
        {name: known[name] for name in order},
        read_plan(event.details.get("plan")),
        _said(event.details.get("said")),
    )


def _said(found: object) -> tuple[str, ...]:
    first = found[0] if isinstance(found, list) and found else None
    if not isinstance(first, dict):
        return ()
    return (f"rank {first.get('rank')} on {first.get('host')}:", *str(first.get("message", "")).splitlines())


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_plan(content: object) -> Plan | None:
    """The plan in a record, None if there is none that this version can read."""
    if not isinstance(content, dict):
        return None
    try:
        return Plan.from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def explain(view: View, episodes: Sequence[Episode], number: int) -> Explanation | None:
    """Why generation *number* is as it is; None if nothing is known of it."""
    # The last one: where the job ran again its entry says more than that of the generation's begin.
    episode = next((episode for episode in reversed(episodes) if episode.generation == number), None)
    if view.generation is not None and view.generation.number == number:
        return _current(view, view.generation, episode)
    return None if episode is None else _past(episode)


def _past(episode: Episode) -> Explanation:
    why = episode.why
    if episode.plan is not None:
        why = why.removesuffix(f"; {episode.plan.why}")
    sentences = [f"Generation {episode.generation} ({episode.what}) was made because: {why}."]
    if episode.plan is not None:
        sentences += plan_sentences(episode.plan)
    sentences += _end_of_recovery(episode)
    sentences.append("Its roster is not kept in etcd any more: a later generation has taken its place.")
    return Explanation(episode.generation, tuple(sentences), episode.plan)


def _current(view: View, generation: GenerationRecord, episode: Episode | None) -> Explanation:
    number = generation.number
    sentences = [f"Generation {number} ({generation.mode}) was made because: {generation.why}."]
    sentences += _roster(generation)
    plan = read_plan(view.plan.content) if view.plan else None
    if plan is not None:
        sentences += plan_sentences(plan, generation.world_size)
    elif view.plan is not None:
        sentences.append(f"Its plan cannot be read by this version: {view.plan.why}.")
    else:
        silent = [slot for slot in range(len(generation.slots)) if slot not in view.progress]
        waits = generation.asks and silent
        waiting = f": it waits for {_some('slot', silent)} to say which state is held there"
        sentences.append(f"There is no plan yet{waiting if waits else ''}.")
    sentences += _end_of_recovery(episode) if episode else []
    if generation.asks and 0 < len(view.resumed) < len(generation.slots):
        left = [slot for slot in range(len(generation.slots)) if slot not in view.resumed]
        sentences.append(f"Training again: {_some('slot', sorted(view.resumed))}; not yet: {_some('slot', left)}.")
    sentences += _lost_since(view, generation)
    if view.result is not None:
        sentences.append(f"The job has ended ({view.result.state}): {view.result.why}.")
    return Explanation(number, tuple(sentences), plan)


def _roster(generation: GenerationRecord) -> list[str]:
    """Which node has which slot, and which ranks are started for it."""
    sentences = []
    for slot, owner in enumerate(generation.slots):
        first = generation.first_rank(slot)
        ranks = _some("rank", list(generation.ranks_of(slot)))
        line = f"Slot {slot} with {ranks} belongs to {owner.node_id} on {owner.host}"
        lost = [first + local_rank for local_rank in generation.lost.get(slot, ())]
        if generation.mode in ("restart", "resize"):
            line += ": all its workers are started again"
        elif lost and slot in generation.handover:
            line += f": it takes over from {generation.handover[slot].node_id}, which is drained"
        elif lost:
            line += f": {_some('rank', lost)} had been lost and {'is' if len(lost) == 1 else 'are'} started there"
        elif generation.mode == "replace":
            line += ": its workers keep their processes"
        sentences.append(f"{line}.")
    if generation.mode == "restart" and generation.num_restarts:
        sentences.append(f"It is restart {generation.num_restarts} of the job.")
    return sentences


def plan_sentences(plan: Plan, world_size: int | None = None) -> list[str]:
    """What each rank does to enter a generation. Without *world_size* the ranks that need nothing are not named."""
    if plan.kind == "fresh":
        return ["No state is sent: all workers set themselves up together."]
    if plan.kind == "restart":
        return [f"All workers restart: {plan.why}."]
    sentences = [f"The plan: training goes on with the state of iteration {plan.iteration} ({plan.why})."]
    if plan.handovers:
        ranks = _some("rank", plan.handovers).capitalize()
        verb = "hands" if len(plan.handovers) == 1 else "hand"
        sentences.append(f"{ranks} of a drained node {verb} over to the new owner's.")
    if plan.keepers:
        nodes = _some("slot", sorted(plan.keepers)).capitalize()
        sentences.append(f"{nodes}: the node keeps the state in a file, which {_some('rank', plan.loads)} load.")
    for source in sorted(set(plan.sources.values())):
        sentences.append(f"Rank {source} sends its state to {_some('rank', plan.targets_of(source))}.")
    if not plan.sources and not plan.handovers and not plan.loads:
        sentences.append("No rank needs state from another.")
    elif world_size is not None:
        idle = [rank for rank in range(world_size) if rank not in {*plan.sources, *plan.handovers, *plan.loads}]
        if idle:
            sentences.append(f"{_some('rank', idle).capitalize()} {'holds' if len(idle) == 1 else 'hold'} it already.")
    if plan.sections:
        sentences.append(f"{plan.sections} `@job.resilient` sections count as finished.")
    return sentences


def _end_of_recovery(episode: Episode) -> list[str]:
    if not episode.phases_s:
        return []
    at = "" if episode.iteration is None else f" at iteration {episode.iteration}"
    return [f"Training went on{at}; the recovery took: {describe(dict(episode.phases_s))}."]


def _lost_since(view: View, generation: GenerationRecord) -> list[str]:
    """What will lead to the next generation."""
    if view.result is not None:
        return []
    lost = losses(view)
    sentences = [
        f"Since then slot {slot} has lost its node {generation.slots[slot].node_id}: {evidence}."
        for slot, evidence in sorted(lost.nodes.items())
    ]
    for slot, failure in sorted(lost.workers.items()):
        ranks = [generation.first_rank(slot) + local_rank for local_rank in failure.local_ranks]
        sentences.append(f"Since then slot {slot} has lost {_some('rank', ranks)}: {failure.evidence}.")
    if lost.restart is not None:
        sentences.append(f"Since then slot {lost.restart.slot} has asked for a restart: {lost.restart.evidence}.")
    return sentences


def _some(what: str, numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 3`, `ranks 0, 2 and 3`."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if not numbers:
        return f"no {what}"
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{what}s {numbers[0]} to {numbers[-1]}"
    return f"{what}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
