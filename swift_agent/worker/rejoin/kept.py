"""What modules keep from one call to the next: buffers, and whatever hangs at their attributes.

A process that leaves micro-batches out must not use modules that change by them. What is looked at: numbers, texts,
tensors, generators, containers, objects and closures, a few steps deep; no variables of a script's modules. This module
must never change what it looks at.
"""

from __future__ import annotations

import io
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from swift_recovery.state.checksum import checksum_of

Look = Any
"""Equal for what is equal."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CODE = (BuiltinFunctionType, ModuleType, type)
# What torch keeps in each module: hooks, mostly none; and what is looked at elsewhere.
_TORCHS = {name: bool(value) for name, value in vars(torch.nn.Module()).items()}
_ELSEWHERE = {"_parameters", "_buffers", "_modules"}
_DEPTH = 6
# Of the items of a container, the first and the last; and of all that hangs at one attribute.
_ITEMS = 1000
_MOST = 20_000


def kept_by(
    modules: Iterable[torch.nn.Module], others: Mapping[str, Any], is_thorough: bool = False
) -> dict[tuple[int, str], Look]:  # fmt: skip
    """By the number of a module, and the name of what it keeps, for people; and of *others*, by their names.
    *is_thorough*: parameters that train are compared, too, which takes as long as to read them; else a change of one is
    seen where torch counts it (not by `.data`)."""
    found = {(-1, name): _Looker(is_thorough).look(value) for name, value in others.items()}
    for number, module in enumerate(modules):
        own = {name: one for name, one in vars(module).items() if name not in _TORCHS or bool(one) != _TORCHS[name]}
        for name, value in {**module._buffers, **module._parameters, **own}.items():
            if name in _ELSEWHERE:
                continue
            found[number, f"{type(module).__name__}.{name}"] = _Looker(is_thorough).look(value)
    return found


def differing(before: Mapping[tuple[int, str], Look], after: Mapping[tuple[int, str], Look]) -> list[str]:
    """The names of what is not as it was."""
    return [key[1] for key in {**before, **after} if before.get(key) != after.get(key)]


class _Looker:
    """At one attribute."""

    def __init__(self, is_thorough: bool) -> None:
        self._is_thorough, self._num_left = is_thorough, _MOST
        self._path: set[int] = set()

    def look(self, value: Any, depth: int = _DEPTH) -> Look:
        """What *value* is, as plain data that can be compared."""
        if isinstance(value, _PLAIN):
            return type(value).__name__, repr(value)
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            return self._trained(value, depth)
        if isinstance(value, Tensor):
            return _of_tensor(value)
        if isinstance(value, numpy.ndarray):
            return str(value.dtype), value.shape, value.tobytes()
        if (state := state_of_generator(value)) is not None:
            return "generator", state
        if isinstance(value, Iterator) and not hasattr(value, "__dict__") and not isinstance(value, io.IOBase):
            return object()  # it goes on with each use, and cannot be looked into: never equal
        if isinstance(value, torch.nn.Module):
            depth = _DEPTH  # it may be deep inside of others
        self._num_left -= 1
        if isinstance(value, _CODE) or depth == 0 or self._num_left <= 0 or id(value) in self._path:
            return type(value).__name__, id(value)
        self._path.add(id(value))
        try:
            return type(value).__name__, *self._inside(value, depth - 1)
        finally:
            self._path.discard(id(value))

    def _trained(self, value: Tensor, depth: int) -> Look:
        """Gradients of parameters are summed up. What else hangs at one (`main_grad`) is not, nor the gradient of a
        tensor that is no parameter."""
        is_parameter = isinstance(value, torch.nn.Parameter)
        own = [(name, self.look(one, depth - 1)) for name, one in vars(value).items()] if depth > 0 else []
        gradient = None if is_parameter or value.grad is None else _of_tensor(value.grad)
        content = _of_tensor(value) if self._is_thorough or not is_parameter else None
        return "parameter", id(value), value._version, content, own, gradient

    def _inside(self, value: Any, depth: int) -> tuple[Look, ...]:
        if isinstance(value, Mapping):
            return len(value), [(self.look(key, depth), self.look(one, depth)) for key, one in _some(value.items())]
        if isinstance(value, (list, tuple, deque)):
            return len(value), [self.look(one, depth) for one in _some(value)]
        if isinstance(value, (set, frozenset)):
            return len(value), sorted(repr(self.look(one, depth)) for one in _some(value))
        return id(value), [(name, self.look(one, depth)) for name, one in _some(_attributes(value))]


def _of_tensor(value: Tensor) -> Look:
    shape = str(value.dtype), tuple(value.shape)
    if not has_plain_memory(value):
        return *shape, id(value), value._version
    return *shape, checksum_of(value.detach())


def has_plain_memory(value: Tensor) -> bool:
    """Of which there is a checksum."""
    is_plain = value.layout == torch.strided and not value.is_meta and not value.is_quantized
    return is_plain and not hasattr(value, "_local_tensor")


def state_of_generator(value: Any) -> Any:
    """Of a generator of random numbers; None of anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state())
    return None


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, MethodType):
        yield "self", value.__self__
        return
    if isinstance(value, partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if isinstance(value, FunctionType):
        yield from (("defaults", value.__defaults__), ("keyword defaults", value.__kwdefaults__))
    for cell in getattr(value, "__closure__", None) or () if isinstance(value, FunctionType) else ():
        try:
            yield "closure", cell.cell_contents
        except ValueError:  # it is empty
            continue
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)
    yield from getattr(value, "__dict__", {}).items()


def _some(items: Iterable[Any]) -> list[Any]:
    found = list(items)
    return found if len(found) <= _ITEMS else [*found[: _ITEMS // 2], *found[-_ITEMS // 2 :]]
