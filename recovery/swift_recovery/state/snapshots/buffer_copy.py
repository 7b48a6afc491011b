"""One buffer of a model, and a copy of its values.

It must never wait for a device: a copy is made where the buffer is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swift_recovery.state.tensors import same_bits, unexpanded

# Buffers up to this size are copied every time. Larger ones (masks, tables) only when their version or their memory
# changed: a kernel may write without telling the version (BatchNorm does), but such buffers are small.
ALWAYS_COPIED_BYTES = 1 << 20


class BufferCopy:
    """One buffer: the tensor object the module had, and a copy of its values."""

    def __init__(self, live: Tensor) -> None:
        self.live = live
        self.shape = live.shape
        self.target = unexpanded(live.detach())
        self.copy = torch.empty_like(self.target)
        self.small = live.nbytes <= ALWAYS_COPIED_BYTES
        self.memory = live.data_ptr()
        self.version = -1

    def is_current(self) -> bool:
        """Whether the copy still has the values; if not, the caller copies ``target`` into it."""
        memory = self.live.data_ptr()
        if memory != self.memory:
            # Somebody assigned to ``data``.
            self.target, self.memory, self.version = unexpanded(self.live.detach()), memory, -1
        if self.small or self.live.is_inference():
            return False
        version, self.version = self.version, self.live._version
        return version == self.version

    def is_lost(self) -> bool:
        """It has other values than the copy, and nobody can say since when (a change by way of ``data``)."""
        if self.small or self.live.is_inference() or self.live._version != self.version:
            return False
        target = unexpanded(self.live.detach())
        is_alike = target.shape == self.copy.shape and target.dtype == self.copy.dtype
        return is_alike and self.live.data_ptr() == self.memory and not same_bits(target, self.copy)

    def restored(self) -> Tensor:
        """The memory that the caller is to copy ``copy`` into; it is that of ``live`` whatever happened to it."""
        target = unexpanded(self.live.detach())
        if target.shape != self.copy.shape or target.dtype != self.copy.dtype:
            self.live.data = target = torch.empty_like(self.copy)
        return target


def received(live: Tensor | None, values: Tensor) -> BufferCopy:
    """A buffer with the given *values*: over the memory of *live* where they fit, else over memory of its own."""
    if live is None or live.dtype != values.dtype or unexpanded(live).shape != values.shape:
        live = torch.empty_like(values, device=live.device if live is not None else values.device)
    buffer = BufferCopy(live)
    buffer.copy.copy_(values)
    return buffer


def has_values_of(live: Tensor, kept: BufferCopy | None) -> bool:
    mine = unexpanded(live.detach())
    if kept is None or mine.shape != kept.copy.shape or mine.dtype != kept.copy.dtype:
        return False
    return torch.equal(mine, kept.copy)
