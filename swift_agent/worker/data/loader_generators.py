"""Generators that a loader or its samplers have of their own: `DataLoader(shuffle=True, generator=g)`.

What a pass leaves behind in one is on no other machine. So each pass seeds it, from what the script's set-up has given
it and from the number of the pass; the first pass takes it as it is. A replacement's set-up gives it the same.

This module must never touch the global generators.
"""

from __future__ import annotations

import hashlib
import random
import struct
import weakref
from typing import Any

import numpy
import torch

from swift_agent.worker.data import loaders

_MASK = (1 << 64) - 1
_KINDS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)


class OwnGenerators:
    """One per job: of each generator what set-up has given it, from the first pass on that uses it, for as long as it
    lives."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int | None]] = {}  # by id; its origin, our last seed
        self._kept: list[Any] = []  # numpy's, which cannot be held weakly

    def position(self, loader: Any, number: int, common_seed: int) -> None:
        """Pass *number* over *loader* begins."""
        for part in loaders.parts(loader):
            own = getattr(part, "__dict__", {})
            synchronized = own.get("synchronized_generator")
            if isinstance(synchronized, torch.Generator):
                # Of Accelerate, who would send its state from rank 0 to all others.
                synchronized.manual_seed(_mix(common_seed, number))
                self._know(synchronized, common_seed, synchronized.initial_seed())
            for value in own.values():
                if isinstance(value, _KINDS) and value is not synchronized:
                    self._position(value, number)

    def _position(self, generator: Any, number: int) -> None:
        known = self._known.get(id(generator))
        given = generator.initial_seed() if isinstance(generator, torch.Generator) else None
        if known is None or (given is not None and known[1] is not None and given != known[1]):
            # New, or seeded by the script since.
            known = (_origin(generator), None)
        origin, last = known[0], given
        if number:
            last = _mix(origin, number)
            _seed(generator, last)
        self._know(generator, origin, last)

    def _know(self, generator: Any, origin: int, last: int | None) -> None:
        if id(generator) not in self._known:
            try:
                weakref.finalize(generator, self._known.pop, id(generator), None).atexit = False
            except TypeError:
                self._kept.append(generator)
        self._known[id(generator)] = (origin, last)


def _origin(generator: Any) -> int:
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    if isinstance(generator, random.Random):
        state = repr(generator.getstate())
    elif isinstance(generator, numpy.random.RandomState):
        state = repr([part.tolist() if isinstance(part, numpy.ndarray) else part for part in generator.get_state()])
    else:
        state = repr(_plain(generator.bit_generator.state))
    return int.from_bytes(hashlib.blake2b(state.encode(), digest_size=8).digest(), "little")


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, numpy.ndarray) else state


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, numpy.random.RandomState):
        generator.seed([seed & 0xFFFFFFFF, seed >> 32])
    else:
        fresh = type(generator.bit_generator)(seed)
        generator.bit_generator.state = fresh.state


def _mix(origin: int, number: int) -> int:
    """Within 63 bits, which torch gives back as it got them."""
    words = struct.pack("<2Q", origin & _MASK, number & _MASK)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8, person=b"swift pass").digest(), "little") >> 1
