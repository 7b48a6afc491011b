"""What a node does for a rank that others have lost: it starts a helper, has it go, and ends it. Pure.

    named in the generation --> started --hello, plan to repeat that rank--> goes --> ends by itself
                                   |                                          |
                                   '----- not wanted any more -----> killed <-'

A helper repeats the iterations of a lost rank together with its replacement (SWIFT, section 5.2). It is no worker of
its node and has no place in the job: nothing waits for it, and what becomes of it is no failure. This module must never
look at a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swift_agent.agent.lifecycle.commands import Command, KillHelper, SendHelp, StartHelper
from swift_agent.agent.lifecycle.events import (
    Event,
    HelperExited,
    HelperStarted,
    HelperUnfit,
    HelperWaits,
)
from swift_agent.agent.lifecycle.state import AgentState, HelperProcess
from swift_agent.wire.environment import helper_number
from swift_recovery.planning.plan import Plan
from swift_rendezvous.roster.losses import told_losses
from swift_rendezvous.roster.records import GenerationRecord, Helper
from swift_rendezvous.roster.view import View, once_per_view


@once_per_view
def helpers_of(view: View) -> tuple[Helper, ...]:
    """Those who repeat what the plan of this generation has repeated; () where that is not just the rank they help."""
    generation, plan = view.generation, view.plan
    if generation is None or plan is None or plan.restart or not generation.helpers:
        return ()
    try:
        replays = Plan.from_json(plan.content).replays
    except (KeyError, TypeError, ValueError):
        return ()
    return helpers_for(generation, replays)


def helpers_for(generation: GenerationRecord, replays: Sequence[int]) -> tuple[Helper, ...]:
    """Those of *generation* that repeat what *replays* do: they help one rank, if it is the only one."""
    helpers = generation.helpers
    return helpers if helpers and tuple(replays) == (helpers[0].rank,) else ()


def fold(state: AgentState, event: Event) -> AgentState:
    """What is known of helpers after *event*. Of an older process under the same number nothing is heard."""
    match event:
        case HelperStarted(number, generation, pid):
            helper = state.helpers.get(number)
            if helper is None or helper.generation != generation:
                return state
            return _with(state, number, replace(helper, pid=pid))
        case HelperWaits(number, pid):
            return _update(state, number, pid, waits=True)
        case HelperUnfit(number, pid, why):
            return _update(state, number, pid, unfit=why)
        case HelperExited(number, pid):
            return _update(state, number, pid, gone=True)
    return state


def reconcile(state: AgentState) -> tuple[AgentState, tuple[Command, ...]]:
    """The helpers of this node as the newest generation wants them, each started once; and what has to be done."""
    commands: list[Command] = []
    wanted, why_not = _wanted(state)
    number = state.view.number
    for local_rank, helper in state.helpers.items():
        if helper.gone:
            if helper.generation != number:
                helpers = {other: one for other, one in state.helpers.items() if other != local_rank}
                state = replace(state, helpers=helpers)
        elif not helper.killed:
            unfit = f"it cannot help: {helper.unfit}" if helper.unfit else ""
            why = unfit or ("" if local_rank in wanted and helper.generation == number else why_not)
            if why:
                commands.append(KillHelper(local_rank, helper.rank, why))
                state = _with(state, local_rank, replace(helper, killed=True))
    for local_rank, rank in wanted.items():
        if local_rank not in state.helpers:
            commands.append(StartHelper(local_rank, rank, number))
            state = _with(state, local_rank, HelperProcess(rank, number))
    view = state.view
    if view.store is not None and helpers_of(view) and not told_losses(view):
        for local_rank, helper in state.helpers.items():
            if helper.waits and not (helper.went or helper.killed or helper.gone):
                commands.append(SendHelp(local_rank, number))
                state = _with(state, local_rank, replace(helper, went=True))
    return state, tuple(commands)


def _wanted(state: AgentState) -> tuple[dict[int, int], str]:
    """By number, the ranks that this node helps; and why there are no others."""
    view = state.view
    generation = view.generation
    if generation is None or view.result is not None:
        return {}, "the job has ended"
    if state.paused:
        return {}, "the place of this node may be another's"
    if view.plan is not None and not helpers_of(view):
        return {}, "its rank gets its state in another way"
    if view.recovered >= generation.number:
        return {}, "its rank trains"
    mine = [helper for helper in generation.helpers if helper.incarnation == state.incarnation]
    wanted = {}
    for helper in mine:
        first = generation.first_rank(generation.slot_with(helper.rank))
        wanted[helper_number(helper.share, helper.rank - first)] = helper.rank
    return wanted, "another generation has begun"


def _with(state: AgentState, local_rank: int, helper: HelperProcess) -> AgentState:
    return replace(state, helpers={**state.helpers, local_rank: helper})


def _update(state: AgentState, local_rank: int, pid: int, **changes: object) -> AgentState:
    helper = state.helpers.get(local_rank)
    if helper is None or helper.pid not in (pid, 0) or helper.gone:  # 0: it is not known yet
        return state
    changed: HelperProcess = replace(helper, pid=pid, **changes)  # type: ignore[arg-type]
    return _with(state, local_rank, changed)
