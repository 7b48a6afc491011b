"""Records as JSON and back, with a version; each field is checked against its type. Pure.

A field that this version does not know is left out. It must never unpickle or evaluate what it reads, which may
come from anywhere, nor know what a record means: types are all that it looks at.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar

CODEC_VERSION = 1

T = TypeVar("T")


class RecordError(ValueError):
    """A stored value is not what this version writes; the message names the record and the field."""


def encode(record: Any) -> bytes:
    """Serialize a record to JSON bytes."""
    return json.dumps({"v": CODEC_VERSION, **_plain(record)}, separators=(",", ":")).encode()


def decode(cls: type[T], value: bytes) -> T:
    """Read a record of type *cls*; raises :class:`RecordError` if *value* was not written by `encode` of this
    version.
    """
    try:
        data = json.loads(value)
    except ValueError as error:
        raise RecordError(f"{cls.__name__}: not JSON: {error}") from None
    except RecursionError:
        raise RecordError(f"{cls.__name__}: nested too deeply") from None
    if not isinstance(data, dict) or data.pop("v", None) != CODEC_VERSION:
        raise RecordError(f"{cls.__name__}: written by another version of swift-agent (codec {CODEC_VERSION} expected)")
    return typing.cast(T, _build(cls, data, cls.__name__))


def to_plain(value: Any) -> Any:
    """*value*, of dataclasses, mappings and sequences, as JSON has it. No record holds a secret."""
    return _plain(value)


def from_plain(kind: Any, data: Any, where: str) -> Any:
    """A value of type *kind* from what `to_plain` made of it. Raises :class:`RecordError`, which begins with
    *where*."""
    return _build(kind, data, where)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _build(kind: Any, data: Any, where: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(data, dict):
            raise RecordError(f"{where}: expected an object, found {type(data).__name__}")
        hints = _hints(kind)
        known = {
            # Most are plain values of the right type: there may be thousands of such records.
            name: item if type(item) is hints[name] else _build(hints[name], item, f"{where}.{name}")
            for name, item in data.items()
            if name in hints
        }
        try:
            return kind(**known)
        except TypeError as error:
            raise RecordError(f"{where}: {error}") from None
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(data, list):
            raise RecordError(f"{where}: expected a list, found {type(data).__name__}")
        return tuple(_build(args[0], item, where) for item in data)
    if origin in (dict, Mapping):
        if not isinstance(data, dict):
            raise RecordError(f"{where}: expected an object, found {type(data).__name__}")
        try:
            return {args[0](key): _build(args[1], item, where) for key, item in data.items()}
        except RecordError:
            raise
        except ValueError:
            raise RecordError(f"{where}: a key is no {args[0].__name__}: {sorted(data)}") from None
    if origin in (typing.Union, types.UnionType):
        return None if data is None else _build(args[0], data, where)
    if origin is Literal:
        if data not in args:
            raise RecordError(f"{where}: {data!r} is none of {args}")
        return data
    if kind is Any:
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError:
            raise RecordError(f"{where}: a number of {len(str(abs(data)))} digits is too large") from None
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise RecordError(f"{where}: expected {kind.__name__}, found {type(data).__name__}")
    return data
