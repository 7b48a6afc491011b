"""What the code of an iteration reaches and changes, beside what the job has: seen by looking before and after a call.

    its function --> variables, methods, functions of the script that it names --> objects, and what hangs at them

Objects of libraries (a logger, a progress bar) are left out: of those nobody knows what matters. So is what each call
sets before it reads it. This module must never run anything of the script's (a property, an iterator), change it, or
keep it alive.
"""

from __future__ import annotations

import argparse
import dis
import functools
import itertools
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

from swift_agent.worker.line.in_script import is_of_script
from swift_agent.worker.rejoin.kept import state_of_generator

_CALLED_UNNAMED = ("forward", "__call__", "__getitem__", "__len__", "__iter__", "__next__")
_NAMESPACES = (argparse.Namespace, SimpleNamespace)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# What torch keeps in each module.
_TORCHS = frozenset(vars(torch.nn.Module()))
_DEPTH = 6
# Of the items of a container; of all that is looked at; and of functions.
_ITEMS = 50
_MOST = 5000
_FUNCTIONS = 200
# Of a tensor or an array of this size the values are looked at, of a larger one whether torch has counted a change.
_VALUES = 16


def is_light(value: Any, depth: int = 3) -> bool:
    """Whether that is a mapping, or an object that only holds attributes, with numbers and texts in it."""
    if isinstance(value, _PLAIN):
        return True
    inside = list(value.values() if type(value) is dict else vars(value).values() if type(value) in _NAMESPACES
                  else value if type(value) in (list, tuple) else ())  # fmt: skip
    is_known = type(value) in (dict, list, tuple, *_NAMESPACES)
    return is_known and depth > 0 and len(inside) <= _ITEMS and all(is_light(one, depth - 1) for one in inside)


def look(function: FunctionType, around: Mapping[str, Any], known: Collection[Any]) -> Glance:
    """*around*: what the function is given by name (`self`). *known*: what the job has: only what hangs at modules of
    the script is looked at there."""
    glance = Glance(known)
    glance.reach(function, around)
    return glance


def changed(before: Glance, after: Glance) -> dict[str, None]:
    """Names of what is there in both, and not the same, in their order; but for what the code sets before it reads
    it."""
    found = dict[str, None]()
    for name, (value, ends) in after.values.items():
        if name in before.values and before.values[name][0] != value and not after.is_set_first(ends):
            found[name] = None
    return found


def advanced(before: Glance, after: Glance) -> dict[str, None]:
    """The same, of what the code of the iteration itself reads, or what that calls by name."""
    reads = after.reads_by_name()
    return {name: None for name in changed(before, after) if after.values[name][1] in reads}


class Glance:
    """*values*: by name what was found, as plain data, and what the code reads and sets there: a variable, an
    attribute, a key."""

    def __init__(self, known: Collection[Any]) -> None:
        self.values: dict[str, tuple[Any, str]] = {}
        self._seen, self._num_left = {id(one) for one in known}, _MOST
        self._codes: set[CodeType] = set()
        self._first: CodeType | None = None
        self._functions: deque[FunctionType] = deque()
        self._reads, self._sets, self._sets_at_once = set[str](), set[str](), frozenset[str]()
        modules = [module for one in known if isinstance(one, torch.nn.Module) for module in one.modules()]
        self._seen |= {id(one) for module in modules for one in (module, *module.parameters(False))}
        self._hooked = modules
        self._modules = [module for module in modules if _is_own(type(module))]

    def is_set_first(self, ends: str) -> bool:
        return ends in self._sets_at_once or (ends in self._sets and ends not in self._reads)

    def reads_by_name(self) -> set[str]:
        """By the function that was looked at, and by what it names, or calls without a name (`forward`)."""
        left = [self._first] if self._first is not None else []
        left += [code for code in self._codes if code.co_name in _CALLED_UNNAMED]
        seen, reads = set(left), set[str]()
        while left:
            code = left.pop()
            reads |= uses_of(code).reads
            named = {*code.co_names, *code.co_freevars}
            inner = {one for one in code.co_consts if isinstance(one, CodeType)}
            more = (inner | {one for one in self._codes if one.co_name in named}) - seen
            seen |= more
            left += more
        return reads

    def reach(self, function: FunctionType, around: Mapping[str, Any]) -> None:
        for module in self._modules:
            self._visit_methods(type(module))
            for name, value in vars(module).items():
                if name not in _TORCHS:
                    self._walk(value, f"{type(module).__name__}.{name}", f".{name}", _DEPTH)
        for module in self._hooked:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for hook in hooks.values():
                    self._walk(hook, f"{type(module).__name__} hook", ".", _DEPTH)
        for name, value in around.items():
            if _is_own(type(value)) or type(value) in (*_NAMESPACES, dict):
                self._walk(value, name, name, _DEPTH)
        self._first = function.__code__
        self._sets_at_once = uses_of(function.__code__).at_once
        self._functions.append(function)
        while self._functions:
            self._reach_names(self._functions.popleft())

    def _reach_names(self, function: FunctionType) -> None:
        if function.__code__ in self._codes or len(self._codes) >= _FUNCTIONS:
            return
        for code in _codes_of(function.__code__):
            self._codes.add(code)
            uses = uses_of(code)
            self._reads |= uses.reads
            self._sets |= uses.sets
        named = {name for code in _codes_of(function.__code__) for name in code.co_names}
        for name, value in _variables_of(function, named):
            if not isinstance(value, ModuleType):
                self._walk(value, name, name, _DEPTH)
            elif is_of_script(getattr(value, "__file__", None) or "<"):
                for attribute in sorted(named.intersection(vars(value))):
                    self._walk(vars(value)[attribute], f"{name}.{attribute}", f".{attribute}", _DEPTH)

    def _walk(self, value: Any, name: str, ends: str, depth: int) -> None:
        self._num_left -= 1
        if isinstance(value, _PLAIN):
            # What is no number is not equal to itself.
            self.values[name] = repr(value) if isinstance(value, (float, complex)) else value, ends
        elif isinstance(value, FunctionType) and is_of_script(value.__code__.co_filename):
            self._functions.append(value)
        elif id(value) in self._seen or depth == 0 or self._num_left <= 0:
            return
        elif isinstance(value, MethodType):
            self._walk(value.__func__, name, ends, depth)
            self._walk(value.__self__, name, ends, depth)
        elif isinstance(value, (Tensor, numpy.ndarray)):
            self._seen.add(id(value))
            if (found := _values_of(value, is_attribute=ends[:1] in ".[")) is not None:
                self.values[name] = found, ends
        elif (state := state_of_generator(value)) is not None:
            self.values[name] = state, ends
        else:
            self._seen.add(id(value))
            self._walk_inside(value, name, ends, depth - 1)

    def _walk_inside(self, value: Any, name: str, ends: str, depth: int) -> None:
        if type(value).__module__ in ("builtins", "collections") and isinstance(value, (dict, list, set, tuple, deque)):
            self.values[name] = len(value), ends
            for key, one in _items_of(value):
                self._walk(one, f"{name}[{key!r}]", f"[{key}]", depth)
        elif isinstance(value, type) and _is_own(value):
            self._visit_methods(value)
            for key, one in vars(value).items():
                if isinstance(one, (*_PLAIN, Tensor, dict, list, set, deque)) and not key.startswith("__"):
                    self._walk(one, f"{name}.{key}", f".{key}", depth)
        elif type(value) is itertools.count:
            self.values[name] = repr(value), ends
        elif isinstance(value, torch.nn.Module) or _is_own(type(value)) or type(value) in _NAMESPACES:
            self._visit_methods(type(value))
            for key, one in _attributes_of(value):
                self._walk(one, f"{name}.{key}", f".{key}", depth)

    def _visit_methods(self, kind: type) -> None:
        for one in kind.__mro__:
            if _is_own(one):
                for value in vars(one).values():
                    inner = getattr(value, "fget", None) if isinstance(value, property) else value
                    inner = getattr(inner, "__func__", inner)  # of static and class methods
                    if isinstance(inner, FunctionType) and is_of_script(inner.__code__.co_filename):
                        self._functions.append(inner)


def _is_own(kind: type) -> bool:
    """Whether the script defines that class."""
    return is_of_script(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<")


def _variables_of(function: FunctionType, named: Collection[str]) -> Iterator[tuple[str, Any]]:
    """That it may use: those *named* in its code, and those of the functions around. All of them outlive a call."""
    for name, value in function.__globals__.items():
        if name in named:
            yield name, value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if not isinstance(default, _PLAIN):
            yield f"{function.__name__}.__defaults__", default


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_of(constant)


@dataclass(frozen=True)
class Uses:
    """Variables that outlive a call, attributes (`.name`) and keys (`[key]`) of a code: those that it may read before
    it sets them, those that it sets, and those that it sets before all else, whatever it calls."""

    reads: frozenset[str]
    sets: frozenset[str]
    at_once: frozenset[str]


@functools.lru_cache(maxsize=512)
def uses_of(code: CodeType) -> Uses:
    reads, sets, set_first, at_once = set[str](), set[str](), set[str](), set[str]()
    has_branched, has_called, gets, constants = False, False, False, deque[str](maxlen=3)
    for one in dis.get_instructions(code):
        key = next((found for found in reversed(constants) if found), "")
        constants.append(f"[{one.argval}]" if one.opname == "LOAD_CONST" else "")
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            has_branched = True
        has_called = has_called or one.opname.startswith("CALL")
        what, does_set = _use_of(one, key)
        if gets and constants[-1]:
            what = constants[-1]
        gets = what in (".get", ".pop", ".setdefault")
        if what and not does_set and what not in set_first:
            reads.add(what)
        elif what and does_set:
            sets.add(what)
            if not has_branched and what not in reads:
                set_first.add(what)
                at_once |= {what} if not has_called else set()
    return Uses(frozenset(reads), frozenset(sets), frozenset(at_once))


def _use_of(one: dis.Instruction, key: str) -> tuple[str, bool]:
    """What is read or set, '' if nothing; and whether it is set. *key*: the constant before it."""
    if one.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
        return f".{one.argval}", one.opname == "STORE_ATTR"
    if one.opname in ("BINARY_SUBSCR", "STORE_SUBSCR") or one.argrepr == "[]":  # the last: of Python 3.14
        return key, one.opname == "STORE_SUBSCR"
    if one.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "STORE_GLOBAL", "STORE_DEREF"):
        return str(one.argval), one.opname.startswith("STORE")
    return "", False


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        own = dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        own = {}
    if isinstance(value, torch.nn.Module):
        yield from {**value._parameters, **value._buffers, **value._modules}.items()
        own = {name: one for name, one in own.items() if name not in _TORCHS and _is_own(type(value))}
    yield from own.items()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            try:
                yield name, object.__getattribute__(value, name)
            except AttributeError:
                continue


def _items_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """The first of them; of sets none, as they have no names."""
    if isinstance(value, dict):
        items = [(key, one) for key, one in list(value.items())[:_ITEMS] if isinstance(key, (int, str))]
    else:
        items = [] if isinstance(value, set) else list(enumerate(list(value)[:_ITEMS]))
    yield from items


def _values_of(value: Tensor | numpy.ndarray, *, is_attribute: bool) -> Any:
    """None of results that still have their graph. Another tensor in the place of a variable's is a batch, mostly."""
    if isinstance(value, numpy.ndarray):
        return repr(value.tolist()) if value.size <= _VALUES else None
    if value.grad_fn is not None:
        return None
    is_small = value.numel() <= _VALUES and value.device.type == "cpu" and value.layout == torch.strided
    if is_small and type(value) in (Tensor, torch.nn.Parameter):
        return repr(value.detach().tolist())
    return None if value.is_inference() else (id(value) if is_attribute else 0, value._version)
