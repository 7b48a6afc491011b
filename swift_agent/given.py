"""What iterations were given, in a page of the agent's directory that outlives the worker.

A replacement on the same node runs the iteration again in which its predecessor was lost. With the fingerprint of what
that one was given it finds out that a loader begins somewhere else, or that a batch was drawn before the iteration,
before it has any effect.

    slot: iteration + 1, generation in which all began, pass, whether the iteration was called, how many things were
    given, fingerprint, the six in one (a write may be cut)

What a script takes between two iterations need not be for the one to come: it may be a validation in the loop, which is
a pass of its own. So things are compared within a pass, and once an iteration is called its pass is, too. The page may
be one of an earlier run, before all began anew: nothing in it says anything then.

This module must never wait for a device: of a tensor that is not on the processor only shape and type count.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import operator
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash

NUM_SLOTS = 16
_SLOT = struct.Struct("<7Q")
_MARK = 0x5357_4749_5645_4E31
_NUM_SAMPLES = 512
_MAX_LEAVES = 64


def leaves(value: Any) -> Iterator[Any]:
    """The first things that *value* consists of, through lists, tuples and mappings."""
    return itertools.islice(_leaves(value), _MAX_LEAVES)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def fingerprint(value: Any, begin: int = 0) -> int:
    """Of the tensors, arrays, numbers and texts in *value*, of samples of those that are large."""
    state = xxhash.xxh3_64(seed=begin)
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            try:
                content = _content(leaf)
            except (RuntimeError, TypeError):
                content = f"{leaf.dtype}{leaf.layout}".encode()  # a kind that has no plain numbers (nested, quantized)
            state.update(content)
        elif isinstance(leaf, numpy.ndarray):
            state.update(f"{leaf.dtype}{leaf.shape}".encode())
            if leaf.dtype.kind in "biufc" and leaf.size:
                step = max(1, leaf.size // _NUM_SAMPLES)
                state.update(numpy.ascontiguousarray(leaf.reshape(-1)[::step]).data)
        elif isinstance(leaf, (bool, int, float, str)):
            state.update(repr(leaf).encode())
    return state.intdigest()


def _content(tensor: torch.Tensor) -> bytes:
    content = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous() and tensor.numel():
        flat = tensor.detach().view(-1)
        step = flat.numel() // _NUM_SAMPLES
        samples = (flat[::step] if step > 1 else flat).resolve_conj().resolve_neg().contiguous()
        content += samples.view(torch.uint8).numpy().tobytes()
    return content


@dataclass(frozen=True)
class Slot:
    """What iteration *iteration* has been given, in pass *passes*. *run*: the generation in which all began."""

    iteration: int = -1
    run: int = 0
    passes: int = 0
    is_called: bool = False
    count: int = 0
    digest: int = 0


_NOTHING = Slot()


class GivenPage:
    """Of one rank. *predecessor*: what the process before this one has left, by iteration."""

    def __init__(self, path: Path, *, is_replacement: bool) -> None:
        size = NUM_SLOTS * _SLOT.size
        with open(path, "a+b") as stream:
            stream.truncate(size)
            self._page = mmap.mmap(stream.fileno(), size)
        if not is_replacement:
            self._page[:] = bytes(size)
        self.predecessor = self._read()

    def put(self, slot: Slot) -> None:
        words = slot.iteration + 1, slot.run, slot.passes, int(slot.is_called), slot.count, slot.digest
        check = functools.reduce(operator.xor, words, _MARK)
        _SLOT.pack_into(self._page, slot.iteration % NUM_SLOTS * _SLOT.size, *words, check)

    def _read(self) -> dict[int, Slot]:
        found = {}
        for *words, check in _SLOT.iter_unpack(self._page[:]):
            number, run, passes, is_called, count, digest = words
            if number and check == functools.reduce(operator.xor, words, _MARK):
                found[number - 1] = Slot(number - 1, run, passes, bool(is_called), count, digest)
        return found


class Given:
    """What this process gives its iterations, one after the other. *page*: None where nobody could read it.
    *iteration*: the one that is given something now; *count*: and so many things it has got."""

    def __init__(self, page: GivenPage | None) -> None:
        self._page = page
        self.iteration, self.count, self._digest = -1, 0, 0
        self._run = self._passes = 0
        self._is_called = False

    def begin(self, iteration: int, *, run: int = 0, passes: int = 0) -> None:
        """In that pass, and in the run that began with generation *run*."""
        self.iteration, self.count, self._digest = iteration, 0, 0
        self._run, self._passes, self._is_called = run, passes, False

    def call(self) -> bool:
        """What has been given is used now. False: the predecessor had called this iteration in another pass."""
        self._is_called = True
        if self._page is None:
            return True
        before = self._page.predecessor.get(self.iteration, _NOTHING)
        if before.is_called and before.run == self._run and before.passes != self._passes:
            return False
        if self.count:
            self._put(self._page, before)
        return True

    @property
    def digest(self) -> int:
        """Of what it has got so far; 0 where nobody could read it."""
        return self._digest

    def add(self, value: Any) -> bool:
        """The iteration has got *value*. False: its predecessor had got something else."""
        if self._page is None:
            self.count += 1
            return True
        self._digest = fingerprint(value, self._digest)
        self.count += 1
        before = self._page.predecessor.get(self.iteration, _NOTHING)
        self._put(self._page, before)
        is_comparable = (before.run, before.passes, before.count) == (self._run, self._passes, self.count)
        return not is_comparable or self._digest == before.digest

    def _put(self, page: GivenPage, before: Slot) -> None:
        """But no less than the predecessor had got: a successor shall find that."""
        is_more = self.count > before.count or (self._is_called and not before.is_called)
        if (before.run, before.passes) != (self._run, self._passes) or is_more:
            page.put(Slot(self.iteration, self._run, self._passes, self._is_called, self.count, self._digest))
