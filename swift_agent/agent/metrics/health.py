"""Whether an agent is alive, and whether its node does its part: what `/healthz` and `/readyz` answer. Pure.

Alive means that nobody needs to end this process; ready, that its workers train, or that it waits as a warm spare. Each
answer is a reason, "" for yes. Must never read a clock.
"""

from __future__ import annotations

from typing import Literal

from swift_agent.agent.lifecycle.state import INSIDE, AgentState, is_spare
from swift_rendezvous.roster.records import GenerationRecord

# What the agent's loop is at. Only while it runs does it turn.
Stage = Literal["joins", "runs", "comes back", "leaves"]

# The loop turns twice a second. One that hands over or ends workers stands for seconds; for so long, none.
STUCK_S = 60.0


def why_not_alive(stage: Stage, turned_s: float, now_s: float) -> str:
    """*turned_s*: when the loop last did."""
    for_s = now_s - turned_s
    return f"the loop of this agent has stood still for {for_s:.0f} s" if stage == "runs" and for_s > STUCK_S else ""


def why_not_ready(stage: Stage, state: AgentState, is_warm: bool, is_away: bool) -> str:
    """*is_warm*: it has standbys, or can have none; *is_away*: etcd does not answer it."""
    if stage != "runs":
        return {"joins": "it joins the job", "comes back": "it comes back into the job", "leaves": "it leaves"}[stage]
    if state.notice is not None:
        return f"it leaves: it got {state.notice.signal}"
    if state.paused and not is_spare(state):
        return "its workers are paused: etcd does not answer, and another node may have their places"
    if state.paused or is_away:
        return "etcd does not answer"
    generation = state.view.generation
    if generation is None:
        return f"it waits for other nodes: {len(state.view.nodes)} are there"
    slot = generation.slot_of(state.incarnation)
    if slot is None:
        return "" if is_warm else "it is a spare, and its standbys are not ready yet"
    return _why_not_training(state, generation, slot)


def _why_not_training(state: AgentState, generation: GenerationRecord, slot: int) -> str:
    workers = [state.workers.get(local_rank) for local_rank in range(generation.workers_of(slot))]
    missing = [number for number, one in enumerate(workers) if one is None or not (one.pid or one.done)]
    if missing:
        return f"its workers start: {_named(missing)} not there yet"
    gone = [number for number, one in enumerate(workers) if one is not None and not (one.alive or one.done)]
    if gone:
        return f"a worker has failed: {_named(gone)}"
    if not state.view.tracked:
        return ""  # nothing more is known of a script that does not say what it does
    outside = [
        number for number, one in enumerate(workers) if one is not None and not one.done and one.phase not in INSIDE
    ]
    if outside:
        return f"its workers enter generation {generation.number}: {_named(outside)} not there yet"
    recovering = [
        number for number, one in enumerate(workers) if one is not None and not one.done and one.finished is None
        and generation.asks and one.resumed < generation.number
    ]  # fmt: skip
    return f"it recovers in generation {generation.number}: {_named(recovering)} at it" if recovering else ""


def _named(local_ranks: list[int]) -> str:
    return f"local rank{'s' if len(local_ranks) > 1 else ''} {', '.join(map(str, local_ranks))}"
