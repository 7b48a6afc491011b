"""Parameters that no optimizer updates: averages and momentum encoders, which a script changes itself, and frozen ones.

An iteration that is repeated would change them twice, so a snapshot keeps those that change as it keeps buffers.
Frozen ones may be most of a model: they are only looked at. Must never change a parameter except in ``put_back``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from swift_recovery.tensors import unexpanded

# Together at most this long, they are kept from the beginning.
EAGER_BYTES = 256 << 20
# Of each so many elements are compared where a change is not counted (one by way of ``data``).
_NUM_COMPARED = 16
# In the first looks, and in each whose number is a power of two.
_NUM_FIRST = 4


class _One:
    def __init__(self, live: Tensor, *, is_kept: bool) -> None:
        self.live = live
        self.copy = unexpanded(live.detach()).clone() if is_kept else None
        self.is_blind = False
        """It is changed without being counted: kept anew each time."""
        self.look()

    def look(self) -> None:
        self.version = -1 if self.live.is_inference() else self.live._version
        self.memory = self.live.data_ptr()
        self.sample = self._sample().clone()

    def has_changed(self, *, compares: bool) -> bool:
        if self.live.data_ptr() != self.memory:
            return True
        if not self.live.is_inference() and self.live._version != self.version:
            return True
        if compares and not self.is_blind:
            self.is_blind = not torch.equal(self._sample(), self.sample)
        return self.is_blind

    def keep(self) -> None:
        source = unexpanded(self.live.detach())
        if self.copy is None or self.copy.shape != source.shape or self.copy.dtype != source.dtype:
            self.copy = torch.empty_like(source)
        self.copy.copy_(source)

    def put_back(self) -> None:
        if self.copy is not None:
            unexpanded(self.live.detach()).copy_(self.copy)

    def _sample(self) -> Tensor:
        return unexpanded(self.live.detach()).flatten()[:_NUM_COMPARED]


class ByHand:
    """Those *parameters*, of which it keeps what changes."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        parameters = list(parameters)
        is_eager = sum(parameter.nbytes for parameter in parameters) <= EAGER_BYTES
        self._all = [_One(parameter, is_kept=is_eager) for parameter in parameters]
        self._num_looks = 0

    def __bool__(self) -> bool:
        return bool(self._all)

    @torch.no_grad()
    def take(self) -> None:
        """Keep the values of now of those that have changed since they were last looked at."""
        self._num_looks += 1
        number = self._num_looks
        compares = number <= _NUM_FIRST or not number & (number - 1)
        for one in self._all:
            if one.has_changed(compares=compares):
                one.keep()
                one.look()

    @torch.no_grad()
    def put_back(self) -> None:
        """The values of the last ``take``."""
        for one in self._all:
            if one.has_changed(compares=True):
                one.put_back()
                one.look()

    def is_spoilt(self) -> bool:
        """One has changed since the last ``take`` for the first time, and what it was is not kept."""
        return any(one.copy is None and one.has_changed(compares=True) for one in self._all)

    @torch.no_grad()
    def settle(self) -> None:
        """They have been given their values, not changed: what was not kept so far is not kept now either."""
        for one in self._all:
            if one.copy is not None:
                one.keep()
            one.look()


class Looks:
    """Whether *parameters* have changed since they were last looked at; nothing of them is kept."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._all = [_One(parameter, is_kept=False) for parameter in parameters]

    @torch.no_grad()
    def changed(self) -> list[Tensor]:
        return [one.live for one in self._all if one.has_changed(compares=True)]

    @torch.no_grad()
    def again(self) -> None:
        for one in self._all:
            one.look()


@torch.no_grad()
def copies_of(parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each with a copy in the memory of the host, for `put_back`."""
    return [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in parameters]


@torch.no_grad()
def put_back(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    for live, copy in copies:
        live.detach().copy_(copy)
