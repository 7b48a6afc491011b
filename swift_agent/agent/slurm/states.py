"""What Slurm says of the nodes of a job, and which orders follow from it. Pure.

    sinfo: n2|draining|bad memory --> NodeState --> Decision: n2 is to leave the job, as by `swiftctl drain`
           n2|mixed|none          -->               the same order is taken back

A node that Slurm drains gets no new jobs; what runs on it goes on. So nothing here is in a hurry: an order waits for a
spare. Must never order what `swiftctl drain` would refuse, nor take back what a person or the node itself has ordered.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from swift_rendezvous.roster.draining import is_handed_over, needs_state
from swift_rendezvous.roster.records import DrainRecord
from swift_rendezvous.roster.view import View

# In `DrainRecord.ordered_by`.
SLURM = "slurm"
# The columns that `nodes_of` reads. The reason is the last one: it may have any character.
FORMAT = "%N|%T|%E"
# Long and short names of states.
_DRAINED = {"drain", "drained", "draining", "drng"}
_IN_SERVICE = {
    "alloc", "allocated", "blocked", "comp", "completing", "idle", "maint", "mix", "mixed", "planned", "plnd",
    "reserved", "resv",
}  # fmt: skip
MAX_REASON = 200


@dataclass(frozen=True)
class NodeState:
    """*state*: `other` is a node that is down, fails, or is unknown: whether it is to leave nobody has said."""

    state: Literal["drained", "in service", "other"]
    reason: str = ""


@dataclass(frozen=True)
class Decision:
    """*orders*: to be written in this order. *taken_back*: node ids. *left*: incarnation -> why it gets no order."""

    orders: tuple[DrainRecord, ...] = ()
    taken_back: tuple[str, ...] = ()
    left: tuple[tuple[str, str], ...] = ()


def nodes_of(answer: str) -> dict[str, NodeState]:
    """By name, from what sinfo printed as `FORMAT`, a line for each node and partition. What is no such line is left
    out."""
    found = {}
    for line in answer.splitlines():
        name, _, rest = line.partition("|")
        state, bar, reason = rest.partition("|")
        # Suffixes: `*` does not answer, `@` and `^` is to start again, `$` is reserved for maintenance, and others.
        flags = {match[0] for part in state.lower().split("+") if (match := re.match(r"[a-z]+", part.strip()))}
        if not name.strip() or not bar or not flags:
            continue
        if flags & _DRAINED:
            said = "".join(char if char.isprintable() else "?" for char in reason.strip())[:MAX_REASON]
            found[name.strip()] = NodeState("drained", "" if said == "none" else said)
        else:
            found[name.strip()] = NodeState("in service" if flags <= _IN_SERVICE else "other")
    return found


def decide(view: View, slurm: Mapping[str, NodeState], had: Collection[str], at_s: float) -> Decision:
    """*had*: incarnations that Slurm's state has given an order before: one that is gone was taken back by a person.
    *at_s*: Unix time."""
    generation = view.generation
    if generation is None or view.released or view.result is not None:
        return Decision()
    nothing = NodeState("other")
    drained = {name: slurm[name] for name in sorted(view.nodes) if slurm.get(name, nothing).state == "drained"}
    orders, left = [], []
    for name, state in drained.items():
        one = view.nodes[name].incarnation
        if name in view.drains or one in had:
            continue
        why = "drained in Slurm" + (f": {state.reason}" if state.reason else "")
        if len(drained) == len(view.nodes):
            left.append((one, f"node {name} is {why}; so are all nodes of the job, and none could take its place"))
        elif needs_state(view, one):
            left.append((one, f"node {name} is {why}; it stays: the script has not called swift_agent.init()"))
        else:
            orders.append(DrainRecord(name, one, why, at_s, ordered_by=SLURM))
    # Spares first: none of them is to take the place of another one that goes.
    orders.sort(key=lambda drain: generation.slot_of(drain.incarnation) is not None)
    taken_back = [
        name
        for name, drain in sorted(view.drains.items())
        if drain.ordered_by == SLURM and slurm.get(name, nothing).state == "in service"
        if name in view.nodes and view.nodes[name].incarnation == drain.incarnation and not is_handed_over(view, name)
    ]
    return Decision(tuple(orders), tuple(taken_back), tuple(left))


def still_had(view: View, slurm: Mapping[str, NodeState], had: Collection[str]) -> set[str]:
    """*had* of now: with the orders that stand, even if another agent was the coordinator, and without the nodes that
    Slurm has had in service since. One that is drained again gets an order again."""
    had = {*had, *(drain.incarnation for drain in view.drains.values() if drain.ordered_by == SLURM)}
    service = {name for name, found in slurm.items() if found.state == "in service"}
    return {node.incarnation for name, node in view.nodes.items() if node.incarnation in had and name not in service}
