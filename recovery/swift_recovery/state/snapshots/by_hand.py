"""Parameters that no optimizer updates: averages and momentum encoders, which a script changes itself, and frozen ones.

An iteration that is repeated would change them twice, so a snapshot keeps those that change as it keeps buffers.
Frozen ones may be most of a model: they are only looked at. Must never change a parameter except in ``put_back``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from swift_recovery.errors import StateError
from swift_recovery.state.checksum import checksum_of
from swift_recovery.state.tensors import copy_all, same_bits, unexpanded

# Together at most this long, they are kept from the beginning.
EAGER_BYTES = 256 << 20
# Of those, ones up to this size are kept again each time, as buffers are; on a device, where the copy waits for nobody
# and a comparison would, all of them.
ALWAYS_BYTES = 1 << 20
# Of the others so many elements, spread over them, are compared: a change may not be counted (one by way of ``data``).
_NUM_COMPARED = 16
# All of them are in each look whose number is a power of two, at most so many bytes, the rest in the next one; and when
# an iteration has been cut. So a change that nobody counts is known, or at least told.
_LOOK_BYTES = 1 << 30
# On a device in the first looks only, and in each whose number is a power of two.
_NUM_FIRST = 4


class _One:
    def __init__(self, live: Tensor, *, is_kept: bool, is_summed: bool = False) -> None:
        """*is_summed*: if it is not kept, there is a checksum of it."""
        self.live = live
        self.is_summed = is_summed
        self.sum: int | None = None
        self.copy = unexpanded(live.detach()).clone() if is_kept else None
        on_host = live.device.type == "cpu"
        self.is_blind = is_kept and (not on_host or live.nbytes <= ALWAYS_BYTES)
        """It may be changed without being counted: kept again each time."""
        self.is_on_host = on_host
        self.is_stale = False
        """What is kept may be of before the last ``take``, if a change was not counted."""
        self.look()

    def look(self) -> None:
        self.version = _version(self.live)
        self.memory = self.live.data_ptr()
        self.is_stale = False
        if not self.is_blind:
            self.sample = self._sample().clone()
        self.sum = None

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

    def add_up(self) -> None:
        """Once: what has come in a recovery is looked at several times before the next iteration."""
        if self.is_summed and self.copy is None and self.sum is None:
            self.sum = self._checksum()

    def is_lost(self) -> bool:
        """It has changed since the last ``take``, and what it was then is not kept."""
        if self._is_counted() or self.is_blind:
            return self.copy is None
        if self.has_other_values():
            return self.copy is None or self.is_stale
        return self.differs()  # when it did that nobody has seen

    def differs(self) -> bool:
        """All of it from what is kept, or was summed; False if nothing is."""
        if self.copy is not None:
            source = unexpanded(self.live.detach())
            is_alike = self.copy.shape == source.shape and self.copy.dtype == source.dtype
            return not (is_alike and same_bits(self.copy, source))
        return self.sum is not None and self.sum != self._checksum()

    def _checksum(self) -> int | None:
        try:
            return checksum_of(self.live)
        except StateError:
            return None

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
        self._all = [_One(parameter, is_kept=is_eager, is_summed=True) for parameter in parameters]
        self._num_looks = self._next = 0
        self._at_step: list[int] | None = None

    def __bool__(self) -> bool:
        return bool(self._all)

    @torch.no_grad()
    def take(self) -> None:
        """Keep the values of now of those that have changed since they were last looked at."""
        self._at_step = None
        self._num_looks += 1
        number = self._num_looks
        is_power = not number & (number - 1)
        compares = number <= _NUM_FIRST or is_power
        if is_power and number > 1:
            self._look_at_all()
        changed = []
        for one in self._all:
            if one.has_changed(compares=compares):
                changed.append(one)
            elif not compares and not one.is_on_host:
                one.is_stale = True
            else:
                one.is_stale = False
        _keep(changed)
        for one in self._all:
            one.add_up()

    def _look_at_all(self) -> None:
        """Whether one changes without being counted; it is kept again each time then."""
        num_bytes = 0
        for _ in range(len(self._all)):
            one = self._all[self._next % len(self._all)]
            self._next += 1
            if not one.is_blind and not one.has_changed(compares=True):
                num_bytes += one.live.nbytes
                one.is_blind = one.differs()
            if num_bytes >= _LOOK_BYTES:
                return

    @torch.no_grad()
    def put_back(self) -> None:
        """The values of the last ``take``."""
        for one in self._all:
            if one.has_changed(compares=True):
                one.put_back()
                one.look()

    @torch.no_grad()
    def changed(self) -> list[tuple[Tensor, Tensor, Tensor, bool | None]]:
        """Those whose values are not those of the last ``take``: each with what these were, with a copy, in the memory
        of the host, of what they are, and whether it has changed since `note_step`; None: that is not known."""
        found = []
        for index, one in enumerate(self._all):
            live, copy = one.live, one.copy
            if not one.has_changed(compares=True) or copy is None or torch.equal(unexpanded(live.detach()), copy):
                continue
            now, at_step = _version(live), -1 if self._at_step is None else self._at_step[index]
            since = None if at_step < 0 else True if now != at_step else False if now != one.version else None
            found.append((live, copy, live.detach().to("cpu", copy=True), since))
        return found

    def note_step(self, *_: object) -> None:
        """A hook: an optimizer has made its step."""
        self._at_step = [_version(one.live) for one in self._all]

    def is_spoilt(self) -> bool:
        """One has changed since the last ``take``, and what it was is not kept (a first change of many)."""
        return any(one.is_lost() for one in self._all)

    @torch.no_grad()
    def settle(self) -> None:
        """They have been given their values, not changed: what was not kept so far is not kept now either."""
        _keep([one for one in self._all if one.copy is not None])
        for one in self._all:
            one.look()


def _version(live: Tensor) -> int:
    return -1 if live.is_inference() else live._version


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
