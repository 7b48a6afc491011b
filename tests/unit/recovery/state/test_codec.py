"""The codec gives back what it was given, with exact types, and refuses everything that is not data."""

import contextlib
import enum
import functools
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_recovery.errors import StateError
from swift_recovery.state.codec import MAX_DEPTH, decode, encode, path_of


def same(a: Any, b: Any) -> bool:
    """Equal in type and value all the way down; floats by their bits, dicts with their order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, dict):
        if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
            return False
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


numbers = st.integers() | st.integers(-(1 << 200), 1 << 200) | st.floats() | st.complex_numbers()
texts = st.text(st.characters())
surrogates = st.text(st.sampled_from("a\ud83d\ude00\ud800"))
hashables = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | surrogates | st.binary()
scalars = (
    hashables
    | numbers
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 3])])
    | st.sampled_from([np.float32(0.1), np.int64(-5), np.bool_(True), np.uint8(7), np.str_("ab")])
    | st.sampled_from(
        [np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros((0, 2)), np.array(1.5), np.array(["a", "bc"])]
    )
    | st.builds(torch.zeros, st.integers(0, 3))
)
keys = hashables | st.tuples(hashables, hashables)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(keys, inner, max_size=4)
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | dicts
        | dicts.map(OrderedDict)
        | dicts.map(lambda d: defaultdict(list, d))
        | st.sets(hashables, max_size=4)
        | st.frozensets(hashables, max_size=4)
        | st.dictionaries(hashables, st.integers(), max_size=4).map(Counter)
    )


@settings(max_examples=200)
@given(st.recursive(scalars, containers, max_leaves=12))
def test_round_trip(tree: Any) -> None:
    data, tensors = encode(tree)
    assert data.isascii() and b"\n" not in data
    assert same(decode(data, tensors), tree)


@settings(max_examples=100)
@given(st.sets(hashables, max_size=6))
def test_equal_sets_are_written_alike(values: set[Any]) -> None:
    other: set[Any] = set()
    for value in reversed(list(values)):
        other.add(value)
    assert encode(values)[0] == encode(other)[0]


@settings(max_examples=150)
@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_any_json_is_read_or_refused(node: Any) -> None:
    document = json.dumps({"codec": 1, "tree": node}).encode()
    with contextlib.suppress(StateError):
        decode(document, [])


@pytest.mark.parametrize(
    "tag", ["list", "tensor", "float", "ndarray", "numpy", "dict", "dtype", "device", "size", "set"]
)
def test_malformed_bodies_are_refused(tag: str) -> None:
    for body in ([None, {}], ["x", "y"], [[["list"]], 1], [7]):
        if tag in ("list", "size", "set") and body in (["x", "y"], [7]):
            continue  # that is a good one
        with pytest.raises(StateError):
            decode(json.dumps({"codec": 1, "tree": [tag, *body]}).encode(), [])


def test_tensors_are_listed_once_and_by_reference() -> None:
    a, b = torch.zeros(2), torch.ones(3)
    data, tensors = encode({"x": a, "y": [b, a]})
    assert [id(t) for t in tensors] == [id(a), id(b)]
    tree = decode(data, ["first", "second"])
    assert tree == {"x": "first", "y": ["second", "first"]}


def test_nan_keeps_its_payload() -> None:
    value = struct.unpack(">d", bytes.fromhex("7ff8000000000abc"))[0]
    assert math.isnan(value)
    assert same(decode(encode(value)[0], []), value)


class Colour(enum.IntEnum):
    RED = 1


class Plain:
    pass


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (lambda epoch: 1.0, "function cannot"),
        (math.sin, "function cannot"),
        (Plain, "class cannot"),
        (Plain(), "object of type .*Plain cannot"),
        (Colour.RED, "object of type .*Colour cannot"),
        (functools.partial(print), "object of type functools.partial cannot"),
        (np.array([None]), "object of type numpy.ndarray cannot"),
        (defaultdict(Plain), "default factory"),
    ],
)
def test_code_and_objects_are_refused_by_path(value: Any, what: str) -> None:
    with pytest.raises(StateError, match=rf"^scheduler\.lr_lambdas\[0\]: .*{what}"):
        encode({"scheduler": {"lr_lambdas": [value]}})


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = [1]
    tree.append({"again": tree})
    with pytest.raises(StateError, match=r"\[1\]\.again: list contains itself"):
        encode(tree)


def test_depth_is_bounded() -> None:
    tree: Any = 0
    for _ in range(MAX_DEPTH + 1):
        tree = [tree]
    with pytest.raises(StateError, match="nested deeper"):
        encode(tree)
    with pytest.raises(StateError):
        decode(b'{"codec":1,"tree":' + b'["list",' * 100_000 + b"0" + b"]" * 100_000 + b"}", [])


def test_other_versions_are_refused() -> None:
    for document in (b'{"codec":2,"tree":0}', b"{}", b"[]", b"", b"\xff", b"nonsense"):
        with pytest.raises(StateError):
            decode(document, [])


def test_paths() -> None:
    assert path_of(("model", "0.weight", 3, "a b", (1, 2))) == "model.0.weight[3]['a b'][(1, 2)]"
