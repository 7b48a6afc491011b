"""Text codec for trees such as a ``state_dict``, without pickle.

What a peer sends must never run as code here, so only data passes: a fixed list of types, each written out below.
Everything else raises :class:`StateError` with the path of the value. Tensors are not written; they are collected
in a list and referred to by index, so that their bytes travel on a faster way. Pure: no clock, no I/O, no logging.

A document is one line of ASCII JSON: ``{"codec": 1, "tree": node}``. A node is null, true, false, a 64-bit integer, a
finite float, a string, or an array whose first item is a tag. Every value comes back with its exact type.
"""

import base64
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from swift_recovery.errors import StateError

VERSION = 1
MAX_DEPTH = 100
_INT_LIMIT = 1 << 63
# The value types that a defaultdict may have been given as its factory; anything else would be code.
_FACTORIES: dict[str, type] = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str}
_NUMPY_KINDS = "biufcSU"


def encode(tree: Any, keys: list[tuple[object, ...]] | None = None) -> tuple[bytes, list[torch.Tensor]]:
    """Write *tree* and collect its tensors.

    Returns the document and the tensors in the order of their first appearance; a tensor object that appears
    twice is listed once. The tensors are the objects of the tree, not copies. *keys*, if given, gets for each its keys
    from the root, for :func:`path_of`.
    Raises :class:`StateError` for a value that is not plain data, for a tree that contains itself and for one deeper
    than ``MAX_DEPTH``.
    """
    writer = _Writer()
    node = writer.node(tree)
    if keys is not None:
        keys += writer.tensor_keys
    text = json.dumps({"codec": VERSION, "tree": node}, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii"), writer.tensors


def decode(data: bytes, tensors: Sequence[Any]) -> Any:
    """Read what :func:`encode` wrote; *tensors* are put in the places of the collected ones.

    *tensors* may be any objects (a reader that only wants to know where each one goes passes placeholders).
    Raises :class:`StateError` for anything malformed. Nothing but builtin, torch and numpy data types is ever created.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StateError(f"not a state document: {error}") from None
    if not isinstance(document, dict) or document.get("codec") != VERSION or "tree" not in document:
        found = document.get("codec") if isinstance(document, dict) else None
        raise StateError(f"state document of codec version {found!r}; this worker reads version {VERSION}")
    try:
        return _Reader(tensors).value(document["tree"])
    except StateError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, struct.error) as error:
        raise StateError(f"malformed state document: {type(error).__name__}: {error}") from None


def join_path(path: str, key: object) -> str:
    """Path of the item *key* of the container at *path*, as it is named in messages: ``a.b[0]['x y']``."""
    if isinstance(key, str) and key and all(part.isidentifier() or part.isdigit() for part in key.split(".")):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def path_of(keys: Iterable[object]) -> str:
    """Path of the value under *keys*, from the root; empty for the root itself."""
    path = ""
    for key in keys:
        path = join_path(path, key)
    return path


class _Writer:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.tensor_keys: list[tuple[object, ...]] = []
        self._index: dict[int, int] = {}
        # Keys from the root to the value at hand; made into a path only when somebody reads it.
        self._keys: list[object] = []
        self._open: set[int] = set()

    def node(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -_INT_LIMIT <= value < _INT_LIMIT else ["int", hex(value)]
        if kind is float:
            # JSON has no inf and nan; the bits keep the payload of a nan as well.
            return value if math.isfinite(value) else ["float", struct.pack(">d", value).hex()]
        if kind is str:
            return value if _is_plain(value) else ["str", _base64(value.encode("utf-8", "surrogatepass"))]
        if isinstance(value, torch.Tensor):
            return ["tensor", self._tensor(value)]
        tag = _CONTAINERS.get(kind)
        if tag is not None:
            return self._container(tag, value)
        return _leaf(value, kind, self._path())

    def _path(self) -> str:
        return path_of(self._keys) or "state"

    def _tensor(self, tensor: torch.Tensor) -> int:
        index = self._index.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
            self.tensor_keys.append(tuple(self._keys))
        return index

    def _container(self, tag: str, value: Any) -> list[Any]:
        if id(value) in self._open:
            raise StateError(f"{self._path()}: {type(value).__name__} contains itself and cannot be copied")
        if len(self._open) >= MAX_DEPTH:
            raise StateError(f"{self._path()}: nested deeper than {MAX_DEPTH} levels")
        self._open.add(id(value))
        try:
            head: list[Any] = [tag]
            if tag not in _MAPPING_TAGS:
                nodes = [self._item(key, item) for key, item in enumerate(value)]
                # Two workers with equal sets must write equal bytes, whatever the order in memory.
                return head + (sorted(nodes, key=json.dumps) if tag in ("set", "frozenset") else nodes)
            if tag == "defaultdict":
                head.append(_factory_name(value, self._path()))
            for key, item in value.items():
                if isinstance(key, torch.Tensor):
                    raise StateError(f"{self._path()}: a tensor as a key cannot be copied to a replacement")
                head.append([self._item(key, key), self._item(key, item)])
            return head
        finally:
            self._open.discard(id(value))

    def _item(self, key: object, item: Any) -> Any:
        self._keys.append(key)
        node = self.node(item)
        self._keys.pop()
        return node


def _leaf(value: Any, kind: type, path: str) -> list[Any]:
    if kind is bytes:
        return ["bytes", _base64(value)]
    if kind is complex:
        return ["complex", struct.pack(">dd", value.real, value.imag).hex()]
    if kind is torch.dtype:
        return ["dtype", dtype_name(value)]
    if kind is torch.device:
        return ["device", str(value)]
    # numpy is not required: a value of its types can only exist once somebody has imported it.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        is_array = isinstance(value, numpy.ndarray)
        if value.dtype.kind in _NUMPY_KINDS and (not is_array or kind is numpy.ndarray):
            code, data = value.dtype.str, _base64(value.tobytes())
            return ["ndarray", code, list(value.shape), data] if is_array else ["numpy", code, data]
    if callable(value) and hasattr(value, "__qualname__"):
        what = "class" if isinstance(value, type) else "function"
    else:
        what = f"object of type {kind.__module__}.{kind.__qualname__}"
    raise StateError(f"{path}: {what} cannot be copied to a replacement")


class _Reader:
    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = tensors

    def value(self, node: Any) -> Any:
        if not isinstance(node, list):
            if isinstance(node, dict):
                raise StateError("malformed state document: bare object")
            return node
        tag, body = node[0], node[1:]
        if tag == "tensor":
            (index,) = body
            if type(index) is not int or not 0 <= index < len(self._tensors):
                raise StateError(f"malformed state document: tensor {index!r} of {len(self._tensors)}")
            return self._tensors[index]
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.value(item) for item in body)
        if tag in _MAPPINGS:
            return _MAPPINGS[tag](self._pairs(body))
        if tag == "defaultdict":
            factory = None if body[0] is None else _FACTORIES[body[0]]
            return defaultdict(factory, self._pairs(body[1:]))
        if tag in _LEAVES:
            return _LEAVES[tag](*body)
        raise StateError(f"malformed state document: unknown tag {tag!r}")

    def _pairs(self, body: list[Any]) -> dict[Hashable, Any]:
        return {self.value(key): self.value(item) for key, item in body}


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Inverse of :func:`dtype_name`; raises :class:`StateError` for a dtype that this torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"this torch has no dtype {name!r}")
    return dtype


def _numpy_dtype(code: str) -> Any:
    import numpy

    dtype = numpy.dtype(code)
    if dtype.kind not in _NUMPY_KINDS:
        raise StateError(f"malformed state document: numpy dtype {code!r}")
    return dtype


def _read_numpy(code: str, data: str) -> Any:
    dtype = _numpy_dtype(code)
    import numpy

    raw = base64.b64decode(data, validate=True)
    # An empty string or bytes scalar has no bytes to read from.
    return numpy.frombuffer(raw, dtype)[0] if dtype.itemsize else dtype.type()


def _read_ndarray(code: str, shape: list[int], data: str) -> Any:
    dtype = _numpy_dtype(code)
    import numpy

    raw = base64.b64decode(data, validate=True)
    if not raw:
        return numpy.zeros(shape, dtype)
    return numpy.frombuffer(raw, dtype).reshape(shape).copy()


def _counter(pairs: dict[Hashable, Any]) -> "Counter[Any]":
    counter: Counter[Any] = Counter()
    # Not Counter(pairs): that would add, and fail on counts that are not numbers.
    dict.update(counter, pairs)
    return counter


def _factory_name(value: Any, path: str) -> str | None:
    if value.default_factory is None:
        return None
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return name
    raise StateError(f"{path}: the default factory of a defaultdict cannot be copied to a replacement")


def _is_plain(text: str) -> bool:
    # Neighbouring lone surrogates would be joined by JSON.
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _read_device(text: str) -> torch.device:
    if not isinstance(text, str):  # torch takes numbers too, if it is built for a GPU
        raise TypeError(text)
    return torch.device(text)


def _unhex(text: str, layout: str) -> tuple[float, ...]:
    return struct.unpack(layout, bytes.fromhex(text))


_CONTAINERS: dict[type, str] = {
    list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size", dict: "dict",
    OrderedDict: "odict", Counter: "counter", defaultdict: "defaultdict",
}  # fmt: skip
_MAPPING_TAGS = ("dict", "odict", "counter", "defaultdict")
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset,
    "size": lambda items: torch.Size(tuple(items)),
}  # fmt: skip
_MAPPINGS: dict[str, Callable[[dict[Hashable, Any]], Any]] = {"dict": dict, "odict": OrderedDict, "counter": _counter}
_LEAVES: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: _unhex(text, ">d")[0],
    "complex": lambda text: complex(*_unhex(text, ">dd")),
    "str": lambda text: base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "dtype": dtype_of,
    "device": _read_device,
    "numpy": _read_numpy,
    "ndarray": _read_ndarray,
}
