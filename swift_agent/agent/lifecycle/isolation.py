"""When the workers of a node have to stand still, and how long a node that was given up stays away. Pure.

A node that cannot reach the store cannot be told that it was given up; the others go on without it, though it may reach
some of them. This module must never read a clock: times come in as arguments.
"""

from __future__ import annotations

from typing import Literal

from swift_agent.agent.lifecycle.events import Tick
from swift_agent.agent.lifecycle.state import AgentState

# A node that was in the job for less than this before it was given up waits longer and longer before it comes back:
# if only some of the others can reach it, it must not keep them busy.
BRIEF_S = 30.0
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0


Pausing = Literal["", "pause", "ask", "resume"]


def pausing(paused: bool, holds: bool, is_away: bool) -> Pausing:
    """What to do about the workers of a node; *paused*: they stand still now.

    *holds*: no other can have its slot, as `swift_rendezvous.store.tenure` knows it. If not, the workers must not
    touch what they share; they are not ended, because they may hold the only state there is, and only etcd can say
    whether they are still wanted. Its agent asks etcd before workers that stood still go on, since the slot may have
    been given away for another reason than the lease. *is_away*: etcd can give no slot away, nor be asked: they go on.
    """
    if not holds:
        return "" if paused else "pause"
    if not paused:
        return ""
    return "resume" if is_away else "ask"


def why_not_ours(state: AgentState, generation: int, tick: Tick) -> str:
    """Why what the workers of this node have made in *generation* must not count, '' if it may. *tick*: as of now."""
    now = state.view.generation
    if now is None or now.number != generation:
        return f"generation {generation} is over"
    if now.slot_of(state.incarnation) is None:
        return "another node has the place of this one"
    return "" if tick.holds and not state.paused else tick.why or "this node does not know its place yet"


def ending_grace_s(grace_s: float, *, paused: bool, is_told: bool, left_s: float) -> float:
    """How long the workers of a node that ends may take over it, of *grace_s*.

    *is_told*: etcd has that the job ends, so no other gets their places any more. Else they have until another may, in
    *left_s*; and *paused* workers are not woken: a handler of SIGTERM would write over what their successors have.
    """
    if is_told:
        return grace_s
    return 0.0 if paused else min(grace_s, max(0.0, left_s))


def rejoin_delay_s(previous_s: float, stayed_s: float) -> float:
    """How long to stay away after having been in the job for *stayed_s*; *previous_s*: how long it was last time."""
    if stayed_s >= BRIEF_S:
        return 0.0
    return min(MAX_DELAY_S, max(FIRST_DELAY_S, 2 * previous_s))
