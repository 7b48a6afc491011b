"""Finds a batch that was made before the iteration that uses it, and after the one before.

A replacement does not have it: it begins at the point between the two. (`X, Y = get_batch()` in front of the loop and
at the end of each iteration, to load while the device computes; a hidden state that goes from batch to batch.) A tensor
that was there before both iterations was made by the set-up, which a replacement runs, too.

    second point: tensors that are there --> iteration --> third point: tensors that are there --> iteration: its inputs

This module must never keep a tensor alive.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from swift_agent.wire.given import leaves

Alive = dict[int, "weakref.ref[torch.Tensor]"]


def alive() -> Alive:
    """All tensors of this process that Python knows, but for those that a fork was born with; takes some tens of
    milliseconds."""
    everything = gc.get_objects()
    # By type: to ask for the class of anything else may run code of its own.
    kinds = {kind for kind in set(map(type, everything)) if issubclass(kind, torch.Tensor)}
    return {id(one): weakref.ref(one) for one in everything if type(one) in kinds}


def _holds(those: Alive, tensor: torch.Tensor) -> bool:
    found = those.get(id(tensor))
    return found is not None and found() is tensor


class MadeBefore:
    """Of the first iterations of a process. *is_on*: inputs are to be looked at."""

    def __init__(self) -> None:
        self._points = 0
        self._earlier: Alive = {}
        self._later: Alive = {}
        self.is_on = False

    @property
    def is_over(self) -> bool:
        return self._points > 3

    def at_point(self) -> None:
        """User code is between two iterations; not where a point is kept from before."""
        self._points += 1
        if self._points == 2:
            self._earlier = alive()
        elif self._points == 3:
            self._later, self.is_on = alive(), True
        elif self._points == 4:
            self._earlier, self._later, self.is_on = {}, {}, False

    def find(self, inputs: Iterable[Any], handed: Alive) -> torch.Tensor | None:
        """One of *inputs* that was carried over, and was not *handed* out by the job (whose loader may look ahead)."""
        for one in leaves(list(inputs)):
            if not isinstance(one, torch.Tensor) or isinstance(one, torch.nn.Parameter) or _holds(handed, one):
                continue
            if _holds(self._later, one) and not _holds(self._earlier, one):
                return one
        return None
