"""Values of a script that an iteration carries on to the next: they start over in a replacement, and nobody restores
them.

One that reaches the update through the loss makes the gradients of ranks differ; their reduction makes the parameters
equal again, so no comparison finds it. Which variables the decorated function sets and reads its code says, when the
loop begins. What else changes (attributes, containers, what functions that it calls set) is seen while it runs: if it
is another one after the second iteration and again after the third. The first one may fill caches. What the body of the
loop changes in between, and the iteration is given or reads, is told then as well, where the source says that it is
carried on from turn to turn: what comes from the job (its number, the epoch) is not.

This module must never change anything of the script's, or keep more of it than the function itself and, until then,
mappings of numbers that it is given.
"""

from __future__ import annotations

import argparse
import dis
import inspect
import itertools
import linecache
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from swift_agent.worker.job.changed_values import Glance, advanced, changed, is_light, look
from swift_agent.worker.job.loop_body import LoopBody
from swift_agent.worker.line.in_script import is_of_script

R = TypeVar("R")

MAX_NAMED = 3
# Iterations, until it is known what changes in each.
NUM_SEEN = 3
# Of what an iteration is given: an object of a class of the script is always looked into.
LOOKED_INTO = (dict, argparse.Namespace, types.SimpleNamespace)
NOWHERE = 1 << 30


class OwnValues:
    """One per job. *note* tells people; None: nobody is to be told."""

    def __init__(self, note: Callable[[str], None] | None) -> None:
        self._note = note
        self._functions: list[Callable[..., Any]] = []
        self._known: list[Any] | None = None
        self._told: tuple[str, ...] = ()
        self._num_left = NUM_SEEN if note is not None else 0
        self._changed: dict[str, None] | None = None
        self._after: Glance | None = None
        self._advanced: set[str] | None = None
        self._given: dict[str, Any] = {}
        self._numbers: list[dict[str, Any]] = []

    def add(self, function: Callable[..., Any]) -> None:
        """The script has decorated an iteration."""
        if self._known is not None:
            self._tell(function)  # defined in the loop
        else:
            self._functions.append(function)

    def begin(self, known: Iterable[Any]) -> None:
        """The loop begins. *known*: objects that the job has, whatever variable they are in."""
        self._known = list(known)
        functions, self._functions = self._functions, []
        for function in functions:
            self._tell(function)

    def run(self, function: Callable[..., R], args: tuple[Any, ...], named: Mapping[str, Any]) -> R:
        """An iteration, with its result. The first ones are watched."""
        if not self._num_left:
            return function(*args, **named)
        self._num_left -= 1
        is_first = not self._numbers
        around = self._around(function, args, named, is_first=is_first)
        before = None if is_first else self._look(function, around)
        if before is not None and self._after is not None:
            self._note_advanced(set(advanced(self._after, before)))
        result = function(*args, **named)
        after = self._after = self._look(function, around)
        if is_first:
            return result
        found = {} if before is None or after is None else changed(before, after)
        self._changed = {name: None for name in found if self._changed is None or name in self._changed}
        if not self._num_left:
            self._tell_changed(function, [name for name in self._changed if name not in self._told])
            self._tell_advanced(function)
            self._after, self._given, self._numbers = None, {}, []
        return result

    def _around(
        self, function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any], *, is_first: bool
    ) -> dict[str, Any]:
        """What it is given, by name; of mappings those that it was given before as well, as others are batches."""
        inner = plain_function(function)
        first = getattr(function, "__self__", None)
        given = (first, *args) if first is not None else args
        names = inner.__code__.co_varnames if inner is not None else ()
        around = dict(zip(names, given, strict=False)) | dict(named)
        self._numbers.append({name: value for name, value in around.items() if type(value) in (int, float)})
        before, containers = self._given, {n: one for n, one in around.items() if type(one) in LOOKED_INTO}
        self._given = {name: one for name, one in containers.items() if is_light(one)}
        kept = {name for name, one in self._given.items() if is_first or before.get(name) is one}
        return {name: one for name, one in around.items() if name not in containers or name in kept}

    def _look(self, function: Callable[..., Any], around: Mapping[str, Any]) -> Glance | None:
        """None: it cannot be looked at."""
        inner = plain_function(function)
        if inner is None:
            self._num_left = 0
            return None
        try:
            return look(inner, around, self._known or ())
        except Exception:  # objects of a script may be of any kind; training does not depend on it
            self._num_left = 0
            return None

    def _note_advanced(self, names: set[str]) -> None:
        self._advanced = names if self._advanced is None else self._advanced & names

    def _tell_advanced(self, function: Callable[..., Any]) -> None:
        """What the loop's body has carried on, and the iteration reads or is given."""
        assert self._changed is not None
        numbers = [name for name in self._numbers[0] if _differs([one.get(name) for one in self._numbers])]
        names = [name for name in self._advanced or () if name not in self._told and name not in self._changed]
        inner = plain_function(function)
        if self._note is None or inner is None or not (numbers or names):
            return
        try:
            body = _loop_body()
            positions = {name: number for number, name in enumerate(inner.__code__.co_varnames)}
            shift = getattr(function, "__self__", None) is not None
            where = {name: positions.get(name, NOWHERE) - shift for name in numbers}
            found = [name for name in numbers if body.given(inner.__name__, where[name], name)]
            found += sorted(name for name in names if body.advances(name))
        except Exception:  # a source of another kind, or none
            return
        if found:
            self._note(told_of_body(inner.__name__, found))

    def _tell_changed(self, function: Callable[..., Any], names: list[str]) -> None:
        if names and self._note is not None:
            inner = plain_function(function)
            self._note(told(function.__name__ if inner is None else inner.__name__, names, does="changes"))

    def _tell(self, function: Callable[..., Any]) -> None:
        if self._note is None or self._told:
            return
        inner = plain_function(function)
        if inner is None:
            return
        assert self._known is not None
        values, known = _values(inner), {id(one) for one in self._known}
        if names := [name for name in carried_by(inner.__code__) if not _is_known(values.get(name), known)]:
            self._note(told(inner.__name__, names))
            self._told = tuple(names)  # once


def _is_known(value: Any, known: set[int]) -> bool:
    """Whether the job has it, restores it, or finds out if it is carried: a pass over batches, a batch."""
    is_batch = isinstance(value, torch.Tensor) and value.numel() > 1
    return is_batch or id(value) in known or type(value).__module__.partition(".")[0] == "swift_agent"


def plain_function(function: Callable[..., Any]) -> types.FunctionType | None:
    """What is inside decorators and methods; None: nothing with code of Python's."""
    inner = inspect.unwrap(getattr(function, "__func__", function))
    inner = getattr(inner, "__func__", inner)
    return inner if isinstance(inner, types.FunctionType) else None


def _differs(values: list[Any]) -> bool:
    """From call to call."""
    return None not in values and all(one != other for one, other in itertools.pairwise(values))


def _loop_body() -> LoopBody:
    """Of the line of the script that has called the iteration that is over."""
    frame = sys._getframe()
    while not is_of_script(frame.f_code.co_filename):
        assert frame.f_back is not None
        frame = frame.f_back
    return LoopBody("".join(linecache.getlines(frame.f_code.co_filename)), frame.f_lineno)


def _values(function: types.FunctionType) -> dict[str, Any]:
    """Of its variables that outlive a call."""
    values = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not set yet
            values.pop(name, None)
    return values


def carried_by(code: types.CodeType) -> list[str]:
    """Variables outside of the function that it sets and reads, but for those that each call sets before all else: they
    may carry something from one call to the next."""
    reads, sets, set_first = set[str](), dict[str, None](), set[str]()
    has_branched = False
    for operation, name in _uses(code, frozenset(code.co_freevars)):
        if operation == "branch":
            has_branched = True
        elif operation == "read":
            reads.add(name)
        else:
            sets[name] = None
            if not has_branched and name not in reads:
                set_first.add(name)
    return [name for name in sets if name in reads and name not in set_first]


def _uses(code: types.CodeType, outer: frozenset[str]) -> Iterator[tuple[str, str]]:
    """In order. *outer*: of the variables in cells those that are not this function's own."""
    for one in dis.get_instructions(code):
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            yield "branch", ""
        elif one.opname == "STORE_GLOBAL" or (one.opname == "STORE_DEREF" and one.argval in outer):
            yield "set", str(one.argval)
        elif one.opname == "LOAD_GLOBAL" or (one.opname.startswith("LOAD_DEREF") and one.argval in outer):
            yield "read", str(one.argval)
    yield "branch", ""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a function in it, which may be called at any time
            yield from _uses(constant, outer.intersection(constant.co_freevars))


def told_of_body(function: str, names: list[str]) -> str:
    """*names*: of what *function* uses, and the loop's body carries on."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return (
        f"{function}() uses {', '.join(names[:MAX_NAMED])}{more}, which the body of the loop carries on: in a "
        "replacement that starts over. If the loss depends on it (a weight of a term), ranks then train with different "
        "values, and no comparison shows that. Work it out from job.iteration_number; count batches by "
        "enumerate(job.batches(loader), start=job.position.batch); or keep it in an object with state_dict and "
        "load_state_dict, and give that to job.track()"
    )


def told(function: str, names: list[str], *, does: str = "sets and reads") -> str:
    """*names*: of variables to which *function* does that."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    named = f"{', '.join(names[:MAX_NAMED])}{more}"
    return (
        f"{function}() {does} {named}: in a replacement that starts over, and an iteration that is run again "
        "counts it twice. What is only printed does no harm; but if the loss depends on it (a weight of a term), ranks "
        "then train with different values, and no comparison shows that. Work it out from job.iteration_number, or "
        "keep it in an object with state_dict and load_state_dict, and give that to job.track()"
    )
