"""The agent's part in a drain: brings its workers to the common boundary, and says when a drained node may go. Pure.

    pause/{g} --> SendPause --> promised --> ~position/{g}/{slot}
    its boundary --> SendBoundary --> parked --> ~parked/{g}/{slot}
    a signal --> TellNotice --> drained, or without a spare: WriteFailure, of itself, and LeaveJob

See `swift_rendezvous.roster.draining` for the whole. Must never read a clock, touch a process, a socket or the store.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from swift_agent.agent.lifecycle.commands import (
    Command,
    LeaveJob,
    SendBoundary,
    SendPause,
    WriteFailure,
    WriteParked,
    WritePosition,
)
from swift_agent.agent.lifecycle.events import Noticed
from swift_agent.agent.lifecycle.state import INSIDE, Worker
from swift_rendezvous.roster.draining import is_ordered, slot_left, takers
from swift_rendezvous.roster.losses import spares, told_losses
from swift_rendezvous.roster.records import FailureRecord, ResultRecord
from swift_rendezvous.roster.view import View

# So long after its time a node leaves a last checkpoint that does not come to its end.
LATE_S = 2.0
# So far apart are the signals of a launcher that sends one to all nodes.
OTHERS_S = 2.0


def messages(view: View, workers: Mapping[int, Worker]) -> Iterator[tuple[tuple[int, ...], dict[str, Any], Command]]:
    """What the workers have to be told now: to whom, what is then known of them, and the message."""
    pause, number = view.pause, view.number
    if pause is None or told_losses(view):
        return
    here = [w for w in workers.values() if w.phase in INSIDE and w.current == number]
    unasked = tuple(sorted(w.local_rank for w in here if w.asked < number))
    if unasked:
        yield unasked, {"asked": number}, SendPause(unasked, number)
    untold = tuple(sorted(w.local_rank for w in here if w.told < number))
    if untold and pause.boundary is not None:
        yield untold, {"told": number}, SendBoundary(untold, number, pause.boundary, pause.saves)


def writes(view: View, slot: int, workers: Mapping[int, Worker]) -> Iterator[tuple[str, Command]]:
    """What this slot has to say, each with a name: once per generation."""
    generation, pause = view.generation, view.pause
    if generation is None or pause is None or len(workers) < generation.workers_of(slot):
        return
    number, local = generation.number, list(workers.values())
    if all(w.promised_in == number for w in local):
        saves = all(w.saves for w in local)
        yield "position", WritePosition(number, slot, max(w.promised for w in local), saves)
    if pause.boundary is not None and all(w.parked == number for w in local):
        yield "parked", WriteParked(number, slot)


def reason_to_go(view: View, node_id: str, incarnation: str, workers: Mapping[int, Worker]) -> str:
    """Why this node, which has no slot or was given up, leaves the job for good; empty if it does not."""
    generation = view.generation
    slot = slot_left(generation, incarnation) if generation is not None else None
    node = view.nodes.get(node_id)
    if generation is None or slot is None or node is None or node.incarnation != incarnation:
        ordered = slot is not None or is_ordered(view, node_id, incarnation)
        return f"node {node_id} was drained: it leaves the job" if ordered else ""
    spoilt = sorted(w.local_rank for w in workers.values() if not w.alive or w.killed or w.unfit)
    if spoilt:
        return f"node {node_id} was drained: it leaves the job; local ranks {spoilt} were lost in the handover"
    if slot not in view.taken:
        return ""
    owner = generation.slots[slot].node_id
    return f"node {node_id} was drained: {owner} has slot {slot} and its state; it leaves the job"


def is_told(view: View, node_id: str, incarnation: str) -> bool:
    """The others know that it got a signal."""
    drain = view.drains.get(node_id)
    return drain is not None and drain.incarnation == incarnation and bool(drain.signal)


def end_of_signal(view: View, incarnation: str, why: str, in_hurry: bool) -> tuple[str, ResultRecord | None]:
    """What follows from a signal to this node that does not only tell it to go (Ctrl-C): the line for people, and how
    the node ends; None: it goes on for now. *in_hurry*: one came before.

    It ends the job where this node has a place, and before anybody has one. Else it is for this node alone."""
    generation = view.generation
    if generation is None or generation.slot_of(incarnation) is not None:
        return f"{why}: the job ends here", ResultRecord("stopped", why, cause="operator")
    if slot_left(generation, incarnation) is None:
        line = f"{why}: this spare leaves, and the job goes on"
    elif in_hurry:
        line = f"{why}: it leaves before its successor has its state, which is taken for a loss; the job goes on"
    else:
        # What it holds may be the last copy. The handover takes an iteration.
        line = f"{why}: it leaves as soon as its successor has its state, and the job goes on"
        return f"{line}. Another signal ends it at once", None
    return line, ResultRecord("stopped", line, cause="operator")


def end_of_notice(
    view: View, node_id: str, incarnation: str, notice: Noticed, now_s: float
) -> tuple[Command, ...]:
    """What a node does that got a signal to go and was not drained: nothing while it waits for that.

    In the end it says that its slot is lost, since nobody knows it better, and leaves. A script that tracks nothing
    has no state to hand over: its node leaves as soon as another one can take the slot, and has not been told as well.
    """
    generation, why, told_s = view.generation, f"node {node_id} got {notice.signal}", notice.until_s - notice.grace_s
    slot = generation.slot_of(incarnation) if generation is not None else None
    if generation is None or slot is None:
        if generation is not None and slot_left(generation, incarnation) is not None:
            return ()
        return (LeaveJob(ResultRecord("stopped", f"{why}: it leaves the job", cause="preempted")),)
    # A drain that has begun comes to its end. Not so a last checkpoint: if nobody ends that, etcd is away.
    pause_s = 0.0 if view.pause is None else LATE_S if view.pause.saves else math.inf
    if view.released or (view.pause is not None and now_s < notice.until_s + pause_s):
        return ()
    if now_s >= notice.until_s:
        why += f", and no node took its slot within {notice.grace_s:g} s (--preempt-grace)"
    elif view.tracked or now_s < told_s + OTHERS_S or not takers(generation, [slot], spares(view)):
        return ()
    lost = FailureRecord("node", slot, incarnation, (), why, node_id, is_dead=True)
    result = ResultRecord("stopped", f"{why}: it leaves the job", cause="preempted")
    return (WriteFailure(generation.number, lost), LeaveJob(result))
