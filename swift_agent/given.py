"""What iterations were given, in a page of the agent's directory that outlives the worker.

A replacement on the same node runs the iteration again in which its predecessor was lost. With the fingerprint of what
that one was given it finds out that a loader begins somewhere else, or that a batch was drawn before the iteration,
before it has any effect.

    slot: iteration + 1, how many things were given, fingerprint, the three in one (a write may be cut)

This module must never wait for a device: of a tensor that is not on the processor only shape and type count.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash

NUM_SLOTS = 16
_SLOT = struct.Struct("<4Q")
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


class GivenPage:
    """Of one rank. *predecessor*: what the process before this one has left: iteration -> (how many, fingerprint)."""

    def __init__(self, path: Path, *, is_replacement: bool) -> None:
        size = NUM_SLOTS * _SLOT.size
        with open(path, "a+b") as stream:
            stream.truncate(size)
            self._page = mmap.mmap(stream.fileno(), size)
        if not is_replacement:
            self._page[:] = bytes(size)
        self.predecessor = self._read()

    def put(self, iteration: int, count: int, digest: int) -> None:
        number = iteration + 1
        _SLOT.pack_into(
            self._page, iteration % NUM_SLOTS * _SLOT.size, number, count, digest, number ^ count ^ digest ^ _MARK
        )

    def _read(self) -> dict[int, tuple[int, int]]:
        found = {}
        for number, count, digest, check in _SLOT.iter_unpack(self._page[:]):
            if number and number ^ count ^ digest == check ^ _MARK:
                found[number - 1] = (count, digest)
        return found


class Given:
    """What this process gives its iterations, one after the other. *page*: None where nobody could read it.
    *iteration*: the one that is given something now; *count*: and so many things it has got."""

    def __init__(self, page: GivenPage | None) -> None:
        self._page = page
        self.iteration, self.count, self._digest = -1, 0, 0

    def begin(self, iteration: int) -> None:
        self.iteration, self.count, self._digest = iteration, 0, 0

    def add(self, value: Any) -> bool:
        """The iteration has got *value*. False: its predecessor had got something else."""
        if self._page is None:
            self.count += 1
            return True
        self._digest = fingerprint(value, self._digest)
        self.count += 1
        count, digest = self._page.predecessor.get(self.iteration, (0, 0))
        if self.count > count:
            self._page.put(self.iteration, self.count, self._digest)
        return self.count != count or self._digest == digest
