"""Parameters that no optimizer updates: averages and momentum encoders, which a script changes itself, and frozen ones.

An iteration that is repeated would change them twice, so a snapshot keeps those that change as it keeps buffers.
Frozen ones may be most of a model: they are only looked at. Must never change a parameter except in ``put_back``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from swift_recovery.tensors import copy_all, unexpanded

# Together at most this long, they are kept from the beginning.
EAGER_BYTES = 256 << 20
# Of those, ones up to this size are kept anew each time, as buffers are; on a device, where the copy waits for nobody
# and a comparison would, all of them.
ALWAYS_BYTES = 1 << 20
# Of the others so many elements, spread over them, are compared: a change may not be counted (one by way of ``data``).
_NUM_COMPARED = 16
# On a device in the first looks only, and in each whose number is a power of two.
_NUM_FIRST = 4


class _One:
    def __init__(self, live: Tensor, *, is_kept: bool) -> None:
        self.live = live
        self.copy = unexpanded(live.detach()).clone() if is_kept else None
        on_host = live.device.type == "cpu"
        self.is_blind = is_kept and (not on_host or live.nbytes <= ALWAYS_BYTES)
        """It may be changed without being counted: kept anew each time."""
        self.is_on_host = on_host
        self.is_stale = False
        """What is kept may be of before the last ``take``, if a change was not counted."""
        self.look()

    def look(self) -> None:
        self.version = -1 if self.live.is_inference() else self.live._version
        self.memory = self.live.data_ptr()
        self.is_stale = False
        if not self.is_blind:
            self.sample = self._sample().clone()

    def has_changed(self, *, compares: bool) -> bool:
        if self._is_counted():
            return True
        if not self.is_blind and (compares or self.is_on_host):
            self.is_blind = self.has_other_values()
        return self.is_blind

    def _is_counted(self) -> bool:
        """It has changed in a way that torch tells."""
        has_moved = self.live.data_ptr() != self.memory
        return has_moved or (not self.live.is_inference() and self.live._version != self.version)

    def has_other_values(self) -> bool:
        return not torch.equal(self._sample(), self.sample)

    def is_lost(self) -> bool:
        """It has changed since the last ``take``, and what it was then is not kept."""
        if self.copy is not None and (not self.is_stale or self._is_counted()):
            return False
        return self.has_changed(compares=True)

    def kept(self) -> tuple[Tensor, Tensor]:
        """Where its values are to be copied, and they."""
        source = unexpanded(self.live.detach())
        if self.copy is None or self.copy.shape != source.shape or self.copy.dtype != source.dtype:
            self.copy = torch.empty_like(source)
        return self.copy, source

    def put_back(self) -> None:
        if self.copy is not None:
            unexpanded(self.live.detach()).copy_(self.copy)

    def _sample(self) -> Tensor:
        source = unexpanded(self.live.detach())
        if not source.is_contiguous():  # channels last: without a copy, too
            strides = source.stride()
            source = source.permute(sorted(range(source.dim()), key=lambda dim: -strides[dim]))
        flat = source.flatten()
        return flat[:: max(1, -(-flat.numel() // _NUM_COMPARED))]


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
        changed = []
        for one in self._all:
            if one.has_changed(compares=compares):
                changed.append(one)
            elif not compares and not one.is_on_host:
                one.is_stale = True
            else:
                one.is_stale = False
        _keep(changed)

    @torch.no_grad()
    def put_back(self) -> None:
        """The values of the last ``take``."""
        for one in self._all:
            if one.has_changed(compares=True):
                one.put_back()
                one.look()

    @torch.no_grad()
    def changed(self) -> list[tuple[Tensor, Tensor]]:
        """Those whose values are not those of the last ``take``, each with a copy of them in the memory of the host."""
        changed = [(one.live, one.copy) for one in self._all if one.has_changed(compares=True)]
        return copies_of(
            [live for live, copy in changed if copy is not None and not torch.equal(unexpanded(live.detach()), copy)]
        )

    def is_spoilt(self) -> bool:
        """One has changed since the last ``take``, and what it was is not kept (a first change of many)."""
        return any(one.is_lost() for one in self._all)

    @torch.no_grad()
    def settle(self) -> None:
        """They have been given their values, not changed: what was not kept so far is not kept now either."""
        _keep([one for one in self._all if one.copy is not None])
        for one in self._all:
            one.look()


def _keep(those: Sequence[_One]) -> None:
    if those:
        targets, sources = zip(*[one.kept() for one in those], strict=True)
        copy_all(targets, sources)
        for one in those:
            one.look()


class Looks:
    """Whether *parameters* have changed since they were last looked at; nothing of them is kept."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._all = [_One(parameter, is_kept=False) for parameter in parameters]

    @torch.no_grad()
    def changed(self) -> list[Tensor]:
        return [one.live for one in self._all if one.has_changed(compares=True)]

    @torch.no_grad()
    def differ(self) -> list[Tensor]:
        """Those that have other values, wherever they are now."""
        return [one.live for one in self._all if one.has_other_values()]

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
