"""Feeds a journal to today's cores and compares what they say with what was said then. Pure.

    header, state --> fold: event --> lifecycle.on_event, decision --> membership.decide or .missing, plan --> planner
                      until the first difference, or to the end

What is compared is the JSON form, in which tuples and lists are the same. Must never read a file or print.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from swift_agent.agent.journal.format import (
    DECISION_COMMANDS,
    NUM_VIEWS_KEPT,
    changed_view,
    decision_plain,
    event_of,
    state_of,
    tagged,
    untagged,
)
from swift_agent.agent.journal.reading import CUT, JournalError, lines_of
from swift_agent.agent.lifecycle import machine as lc
from swift_agent.agent.lifecycle import state
from swift_agent.agent.lifecycle.planning import plan_generation
from swift_rendezvous.codec import RecordError, from_plain, to_plain
from swift_rendezvous.roster.decision import Decision, PublishGeneration, Rules
from swift_rendezvous.roster.losses import missing
from swift_rendezvous.roster.membership import decide
from swift_rendezvous.roster.records import GenerationRecord
from swift_rendezvous.roster.view import View


@dataclass(frozen=True)
class Difference:
    """*asked*: what the core was asked, as written. *then* and *today*: the answers, as JSON has them."""

    line: int
    what: str
    asked: dict[str, Any]
    then: Any
    today: Any

    def diff(self) -> list[str]:
        """Lines of a unified diff from then to today."""
        then, today = (json.dumps(side, indent=2, sort_keys=True).splitlines() for side in (self.then, self.today))
        return list(difflib.unified_diff(then, today, "then", "today", lineterm="", n=3))


@dataclass
class Replay:
    """What has been compared so far, and the first difference, if there is one."""

    header: dict[str, Any] = field(default_factory=dict)
    num_events: int = 0
    num_decisions: int = 0
    num_plans: int = 0
    cut_at: int | None = None
    """The line in whose middle the journal ends: its agent was killed, or the disk was full."""
    difference: Difference | None = None


def replay(lines: Iterable[bytes]) -> Replay:
    """Compare until the first difference. *lines* end with a newline, all but one that was cut.

    Raises `JournalError` for what is no journal of this format, or is damaged in another place than its end.
    """
    fold = _Fold()
    for number, line in lines_of(lines):
        if line is CUT:
            fold.found.cut_at = number
            break
        if number == 1:
            fold.begin(line)
            continue
        try:
            fold.take(number, line)
        except (RecordError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise JournalError(f"line {number} cannot be read by this version: {error}") from error
        if fold.found.difference is not None:
            break
    return fold.found


class _Fold:
    def __init__(self) -> None:
        self.found = Replay()
        self._state: state.AgentState | None = None
        self._views: dict[int, View] = {0: View()}
        self._newest = 0
        self._rules = Rules()
        self._decided: tuple[View, GenerationRecord | None] = (View(), None)

    def begin(self, header: dict[str, Any]) -> None:
        self.found.header = header
        try:
            self._rules = from_plain(Rules, header.get("rules"), "rules")
        except RecordError as error:
            raise JournalError(f"line 1: {error}") from None

    def take(self, number: int, line: dict[str, Any]) -> None:
        if "changes" in line:
            self._view(line)
        elif "event" in line:
            self._event(number, line)
        elif "decision" in line:
            self._decision(number, line)
        elif "plan" in line:
            self._plan(number, line)
        elif "state" in line:
            self._state = state_of(line["state"])
        else:
            raise RecordError(f"neither view, event, decision nor plan: {sorted(line)}")

    def _view(self, line: dict[str, Any]) -> None:
        view = changed_view(self._views[self._newest], line["changes"])
        self._newest = line["view"]
        self._views[self._newest] = view
        self._views.pop(self._newest - NUM_VIEWS_KEPT, None)

    def _event(self, number: int, line: dict[str, Any]) -> None:
        if self._state is None:
            raise RecordError("an event before the state in which the agent began")
        event = event_of(line["event"], lambda view: self._views[view])
        step = lc.on_event(self._state, event, now_s=line["now_s"])
        self._state = step.state
        self.found.num_events += 1
        then, today = line.get("commands", []), [tagged(command) for command in step.commands]
        asked = {key: item for key, item in line.items() if key != "commands"}
        self._compare(number, f"event {line['event']['type']}", asked, then, today)

    def _decision(self, number: int, line: dict[str, Any]) -> None:
        view, now_s = self._views[line["view"]], line["now_s"]
        if "absent_since_s" in line:
            unbroken_s = math.inf if line["unbroken_s"] is None else line["unbroken_s"]
            found = missing(
                view, self._rules, now_s=now_s, absent_since_s=line["absent_since_s"], unbroken_s=unbroken_s
            )
            decision = found or Decision()
        else:
            decision = decide(view, self._rules, now_s=now_s, waiting_since_s=line["waiting_since_s"])
        commands = [untagged(DECISION_COMMANDS, command) for command in line["decision"]["commands"]]
        published = [command.generation for command in commands if isinstance(command, PublishGeneration)]
        self._decided = (view, published[-1] if published else None)
        self.found.num_decisions += 1
        asked = {key: item for key, item in line.items() if key != "decision"}
        self._compare(number, "decision", asked, line["decision"], decision_plain(decision))

    def _plan(self, number: int, line: dict[str, Any]) -> None:
        view, published = self._decided
        generation = view.generation if line["of"] == "view" else published
        if generation is None:
            raise RecordError("a plan without a generation")
        plan = plan_generation(generation, view)
        self.found.num_plans += 1
        asked = {"generation": generation.number, "of": line["of"]}
        self._compare(number, f"plan of generation {generation.number}", asked, line["plan"], to_plain(plan))

    def _compare(self, number: int, what: str, asked: dict[str, Any], then: Any, today: Any) -> None:
        # As it would have been written: what JSON cannot tell apart is the same.
        today = json.loads(json.dumps(today))
        if then != today:
            self.found.difference = Difference(number, what, asked, then, today)
