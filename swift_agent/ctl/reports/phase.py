"""How far a recovery is that is under way, and how fast a job trains, for a screen. Pure.

Must never read a clock: times come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swift_rendezvous.roster.losses import losses
from swift_rendezvous.roster.view import View

BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII_BARS = "_.-=+*%#"


@dataclass(frozen=True)
class Phase:
    """*name*: as in the history. *what*: in words. *done* of *total* slots; 0 of 0: not counted."""

    name: str
    what: str
    done: int = 0
    total: int = 0


def phase_of(view: View) -> Phase | None:
    """Of a recovery that is under way; None if there is none."""
    generation = view.generation
    if generation is None or view.result is not None or view.released:
        return None
    total = len(generation.slots)
    if view.failures:
        lost = sorted(view.failures)
        slots = ", ".join(map(str, lost[:8])) + (" ..." if len(lost) > 8 else "")
        what = f"something is lost in slot{'s' if len(lost) > 1 else ''} {slots}: which node takes which place"
        return Phase("agree", what)
    if not generation.asks or len(view.resumed) >= total:
        return None
    if view.plan is None:
        return Phase("plan", "the nodes say what their workers hold", len(view.progress), total)
    return Phase("transfer", "workers start, connect and get the state", len(view.resumed), total)


def node_states(view: View) -> dict[str, str]:
    """By node id, what it does: a word or two."""
    found: dict[str, str] = {}
    generation = view.generation
    if generation is None:
        return {node_id: "waits for others" for node_id in view.nodes}
    lost, phase = losses(view), phase_of(view)
    for slot, owner in enumerate(generation.slots):
        node = view.nodes.get(owner.node_id)
        if slot in lost.nodes or node is None or node.incarnation != owner.incarnation:
            found[owner.node_id] = "lost"
        elif slot in lost.workers:
            found[owner.node_id] = "lost workers"
        elif phase is None:
            found[owner.node_id] = "trains"
        elif slot in view.resumed:
            found[owner.node_id] = "trains again"
        elif slot in generation.lost:
            found[owner.node_id] = "starts workers"
        else:
            found[owner.node_id] = "waits, holds the state"
    for node_id, order in view.drains.items():
        if node_id in view.nodes and view.nodes[node_id].incarnation == order.incarnation:
            found[node_id] = "is drained"
    for node_id in view.nodes:
        found.setdefault(node_id, "spare")
    return found


def sparkline(values: Sequence[float | None], bars: str = BARS) -> str:
    """A bar for each; a space where nothing is known."""
    most = max((value for value in values if value is not None), default=0.0)
    if most <= 0:
        return "".join(" " if value is None else bars[0] for value in values)
    last = len(bars) - 1
    return "".join(" " if value is None else bars[min(last, round(max(0.0, value) / most * last))] for value in values)


def speeds(points: Sequence[tuple[float, int]], end_s: float, span_s: float, number: int) -> list[float | None]:
    """Iterations per second in each of *number* equal parts of the *span_s* before *end_s*. *points*: time and
    iteration, oldest first; between two of them the speed is the same. None: nothing is known of that part."""
    found: list[float | None] = []
    part_s = span_s / number
    for left in range(number, 0, -1):
        first, last = _at(points, end_s - left * part_s), _at(points, end_s - (left - 1) * part_s)
        found.append(None if first is None or last is None else max(0.0, last - first) / part_s)
    return found


def _at(points: Sequence[tuple[float, int]], at_s: float) -> float | None:
    """How many iterations were done then."""
    low, high = 0, len(points)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if points[middle][0] <= at_s else (low, middle)
    if low == 0 or low == len(points):
        return float(points[-1][1]) if points and points[-1][0] == at_s else None
    (begin_s, before), (end_s, after) = points[low - 1], points[low]
    return before + (after - before) * (at_s - begin_s) / (end_s - begin_s)
