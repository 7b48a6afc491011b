"""What a journal holds: events, commands, decisions and views as JSON objects, one per line, and back. Pure.

    {"journal": 1, "version", "job", "node", "incarnation", "rules", "time_s", "now_s"}     the first line
    {"state": {...}}                                       how the lifecycle began; what is left out is the default
    {"view": 3, "changes": {...}}                          a view, as what it changes of view 2 (view 0 is empty)
    {"event": {"type": ..., ...}, "now_s", "commands"}     one call of `machine.on_event` and what it ordered
    {"decision": {...}, "view": 3, "now_s", "waiting_since_s"}         one call of `membership.decide` on view 3
    {"decision": {...}, "view": 3, "now_s", "absent_since_s", "unbroken_s"}  one of `.missing`; null is infinity
    {"plan": {...}, "of": "view" | "decision"}             one call of the planner: on the view of the last decision,
                                                           or on the generation that the last decision publishes

Records are written as `swift_rendezvous.codec` writes them: none holds a secret. This module must never open a file or
decide anything.
"""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, replace
from typing import Any, TypeVar

from swift_agent.agent.lifecycle import commands as cmd
from swift_agent.agent.lifecycle import events as msg
from swift_agent.agent.lifecycle import state as state_module
from swift_rendezvous.codec import RecordError, from_plain, to_plain
from swift_rendezvous.roster import decision as decisions
from swift_rendezvous.roster.decision import Decision
from swift_rendezvous.roster.view import View

FORMAT = 1
# An event or a decision names one of so many views at most; older ones need not be kept.
NUM_VIEWS_KEPT = 64

T = TypeVar("T")
Types = Mapping[str, type[Any]]


def types_of(union: Any) -> Types:
    return {kind.__name__: kind for kind in typing.get_args(union)}


EVENTS = types_of(msg.Event)
COMMANDS = types_of(cmd.Command)
DECISION_COMMANDS = types_of(decisions.Command)


def line_of(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def tagged(value: Any) -> dict[str, Any]:
    """An event or a command with the name of its type."""
    return {"type": type(value).__name__, **to_plain(value)}


def untagged(types: Types, data: Any) -> Any:
    """The event or command of *data*. Raises `RecordError` for one that this version does not have."""
    name = str(data.get("type")) if isinstance(data, dict) else ""
    if name not in types:
        raise RecordError(f"this version knows no event or command {name!r}")
    return from_plain(types[name], {key: item for key, item in data.items() if key != "type"}, name)


def event_line(event: msg.Event, now_s: float, commands: tuple[cmd.Command, ...], view: int | None) -> dict[str, Any]:
    """*view*: the number of the view of a `ViewChanged`, which is written by that number only."""
    told = {"type": type(event).__name__, "view": view} if isinstance(event, msg.ViewChanged) else tagged(event)
    line: dict[str, Any] = {"event": told, "now_s": now_s}
    # Most events are ticks without consequences: their lines are short.
    return {**line, "commands": [tagged(command) for command in commands]} if commands else line


def event_of(data: Any, view_of: Callable[[Any], View]) -> msg.Event:
    if isinstance(data, dict) and data.get("type") == msg.ViewChanged.__name__:
        return msg.ViewChanged(view_of(data.get("view")))
    event: msg.Event = untagged(EVENTS, data)
    return event


def decision_plain(decision: Decision) -> dict[str, Any]:
    commands = [tagged(command) for command in decision.commands]
    rest = {f.name: getattr(decision, f.name) for f in fields(decision) if f.name != "commands"}
    return {"commands": commands, **{name: value for name, value in rest.items() if value not in (None, "")}}


def state_plain(state: state_module.AgentState) -> dict[str, Any]:
    """What of *state* is not the default of its field; an agent begins with little."""
    return {
        f.name: to_plain(getattr(state, f.name)) for f in fields(state) if getattr(state, f.name) != _default_of(f)
    }


def _default_of(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def state_of(data: Any) -> state_module.AgentState:
    state: state_module.AgentState = from_plain(state_module.AgentState, data, "state")
    return state


def view_changes(old: View, new: View) -> dict[str, Any]:
    """What *new* has that *old* has not. Costs a comparison of identities per record and the records that differ."""
    changes: dict[str, Any] = {}
    for name in _view_hints():
        before, after = getattr(old, name), getattr(new, name)
        if before is after:
            continue
        if isinstance(after, Mapping):
            put = {str(key): to_plain(item) for key, item in after.items() if not _same(before.get(key), item)}
            gone = [str(key) for key in before if key not in after]
            if put or gone:
                changes[name] = {"put": put, "gone": gone}
        elif before != after:
            changes[name] = to_plain(after)
    return changes


def _same(before: Any, after: Any) -> bool:
    return before is after or bool(before == after)


def changed_view(view: View, changes: Any) -> View:
    """The view that `view_changes` was given as the new one, but for secrets. Raises `RecordError`."""
    hints = _view_hints()
    if not isinstance(changes, dict):
        raise RecordError("the changes of a view are no object")
    values: dict[str, Any] = {}
    for name, data in changes.items():
        if name not in hints:
            continue  # of another version, which the cores of this one cannot have looked at
        kind = hints[name]
        if typing.get_origin(kind) is Mapping:
            if not isinstance(data, dict):
                raise RecordError(f"view.{name}: not what a journal holds")
            put, gone = from_plain(kind, data.get("put", {}), f"view.{name}"), set(data.get("gone", []))
            kept = {key: item for key, item in getattr(view, name).items() if str(key) not in gone}
            values[name] = {**kept, **put}
        else:
            values[name] = from_plain(kind, data, f"view.{name}")
    return replace(view, **values)


@functools.cache
def _view_hints() -> dict[str, Any]:
    return typing.get_type_hints(View)
