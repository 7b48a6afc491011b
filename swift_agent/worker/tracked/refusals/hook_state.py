"""What a communication hook of DDP keeps from one call to the next beside its `state`: the error of a compression in a
closure, say.

    the hook --> closure, bound object, arguments of a partial, defaults, variables of its script --> what can change

A replacement's starts over, and survivors that run an iteration again change theirs twice. What cannot be looked into
counts as something that changes. This module must never run anything of the script's, or change it.
"""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import logging
import sys
from collections.abc import Collection, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from swift_agent.worker.line.in_script import is_of_script

_FIXED = (
    bool, int, float, complex, str, bytes, type(None), range, enum.Enum, BuiltinFunctionType, ModuleType, type,
    logging.Logger, dist.ProcessGroup, DeviceMesh, dist.ReduceOp, dist.ReduceOp.RedOpType, torch.dtype, torch.device,
    torch.Stream,
)  # fmt: skip
_CHANGES = frozenset(("STORE_SUBSCR", "STORE_ATTR", "DELETE_SUBSCR", "DELETE_ATTR"))
_CHANGING = frozenset((
    "__dict__", "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft",
    "remove", "reverse", "setattr", "setdefault", "sort", "update", "vars",
))  # fmt: skip


def kept_by_hook(hook: Any, known: Collection[int]) -> str:
    """The kind of the first thing that it keeps and that may change, else ''. *known*: by id, what the job has."""
    reached = _Reached(known)
    reached.walk(hook, None)
    may_change = any(map(_changes, reached.codes))
    found = reached.changing or (reached.settings if may_change else [])
    return type(found[0]).__name__ if found else ""


class _Reached:
    """*changing*: what holds a state. *settings*: what does if any of the *codes* changes something. Both as the
    outermost object in which they are."""

    def __init__(self, known: Collection[int]) -> None:
        self._seen = set(known)
        self.codes = set[CodeType]()
        self.changing: list[Any] = []
        self.settings: list[Any] = []

    def walk(self, value: Any, top: Any) -> None:
        is_ours = type(value).__module__.partition(".")[0] == "swift_agent"
        if isinstance(value, _FIXED) or is_ours or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            self._walk_function(value)
        elif isinstance(value, MethodType):
            self._walk_all((value.__func__, value.__self__), None)
        elif isinstance(value, functools.partial):
            self._walk_all((value.func, *value.args, *value.keywords.values()), None)
        elif isinstance(value, (tuple, frozenset)):
            self._walk_all(value, top)
        else:
            self._walk_object(value, value if top is None else top)

    def _walk_all(self, values: Iterable[Any], top: Any) -> None:
        for value in values:
            self.walk(value, top)

    def _walk_function(self, function: FunctionType) -> None:
        codes = set(_codes_of(function.__code__))
        self.codes |= codes
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            if name in _set_by(codes, "STORE_DEREF"):
                self.changing.append(value)
            self.walk(value, None)
        self._walk_all((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()), None)
        if is_of_script(function.__code__.co_filename):
            sets = _set_by(codes, "STORE_GLOBAL")
            for name in sorted({name for code in codes for name in code.co_names}.intersection(function.__globals__)):
                value = function.__globals__[name]
                if name in sets:
                    self.changing.append(value)
                self.walk(value, None)

    def _walk_object(self, value: Any, top: Any) -> None:
        """Also a container. One that no code changes may hold settings."""
        kind = type(value)
        if kind is object:
            return
        if kind in (dict, list, set) and value:
            self.settings.append(top)
            self._walk_all(list(value.values() if kind is dict else value), top)
        elif kind in (argparse.Namespace, SimpleNamespace) or all(map(_is_plain_kind, kind.__mro__[:-1])):
            self.settings.append(top)
            for base in kind.__mro__:
                methods = [getattr(one, "__func__", one) for name, one in vars(base).items() if name != "__init__"]
                for method in methods:
                    if isinstance(method, FunctionType) and is_of_script(method.__code__.co_filename):
                        self.codes |= set(_codes_of(method.__code__))
            self._walk_all(list(object.__getattribute__(value, "__dict__").values()), top)
        else:
            self.changing.append(top)


def _is_plain_kind(kind: type) -> bool:
    """Whether it is a class of the script, and all that it keeps are attributes."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return is_of_script(path or "<") and "__slots__" not in vars(kind)


def _changes(code: CodeType) -> bool:
    """Whether it changes what hangs at something."""
    return not _CHANGING.isdisjoint(code.co_names) or any(one.opname in _CHANGES for one in dis.get_instructions(code))


def _set_by(codes: Iterable[CodeType], operation: str) -> set[str]:
    return {str(one.argval) for code in codes for one in dis.get_instructions(code) if one.opname == operation}


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_of(constant)
