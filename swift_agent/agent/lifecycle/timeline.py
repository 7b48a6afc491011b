"""The story of one recovery: when each phase began, as the acting coordinator's agent saw it. Pure bookkeeping.

It must never read a clock: times come in as arguments (seconds of one monotonic clock).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swift_rendezvous.roster.records import GenerationRecord
from swift_rendezvous.roster.view import View

# In the order in which they happen. The first three are seen by the coordinator, the others are measured by workers.
# What a replay has to wait for, "logs", is none of it.
PHASES = ("agree", "plan", "start", "set-up", "regroup", "transfer", "verify", "logs", "replay", "iteration")


@dataclass
class Timeline:
    """Watches views go by; `summary` is one recovery, complete once all slots have resumed."""

    failed_s: float | None = None
    why: str = ""
    marks: dict[str, float] = field(default_factory=dict)
    _reported: int = 0

    def observe(self, view: View, now_s: float) -> dict[str, float] | None:
        """Take note of *view*; returns the seconds per phase when a recovery has just been completed."""
        generation = view.generation
        if generation is None:
            return None
        if view.failures and self.failed_s is None and not view.released:
            self.failed_s = now_s
        if generation.number == 1:
            return None
        if generation.number <= max(self._reported, view.recovered):
            if not view.failures:
                self.failed_s, self.marks = None, {}  # told, if not by this agent then by the coordinator before it
            return None
        if self.failed_s is None:
            self.failed_s = now_s
        self.marks.setdefault(f"generation {generation.number}", now_s)
        if view.plan is not None:
            self.marks.setdefault(f"plan {generation.number}", now_s)
        if len(view.resumed) < len(generation.slots):
            return None
        phases = self._phases(view, generation, now_s)
        self.why = generation.why
        self.failed_s, self.marks, self._reported = None, {}, generation.number
        return phases

    def _phases(self, view: View, generation: GenerationRecord, now_s: float) -> dict[str, float]:
        assert self.failed_s is not None
        agreed = self.marks[f"generation {generation.number}"]
        planned = self.marks.get(f"plan {generation.number}", now_s)
        phases = {"agree": agreed - self.failed_s}
        if generation.asks:
            phases["plan"] = planned - agreed
        for record in view.resumed.values():
            merge_phases(phases, record.phases_s)
        ordered = {name: phases[name] for name in PHASES if name in phases}
        return {**ordered, "total": now_s - self.failed_s}


def merge_phases(phases_s: dict[str, float], more_s: Mapping[str, float]) -> None:
    """Fold the phases of another worker into *phases_s*: the slowest counts, except where all wait for the last to
    come. In their first iteration they wait for one that replays the iterations of its predecessor.
    """
    waiting = {"regroup", "iteration"} if "replay" in {*phases_s, *more_s} else {"regroup"}
    for name, seconds in more_s.items():
        known = phases_s.get(name, seconds)
        phases_s[name] = min(known, seconds) if name in waiting else max(known, seconds)


def describe(phases_s: dict[str, float]) -> str:
    """`agree 3 ms, plan 2 ms, ... total 95 ms`."""
    return ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in phases_s.items())
