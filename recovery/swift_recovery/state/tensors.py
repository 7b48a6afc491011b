"""Tensors as bytes: what a tensor looks like on the wire, and views of its memory.

The bytes of a tensor travel in the order in which they lie in the sender's memory, so that nothing is rearranged for
channels-last weights; the receiver is told the strides. Must never copy a tensor where a view does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swift_recovery.errors import StateError
from swift_recovery.state.codec import dtype_name, dtype_of


@dataclass(frozen=True)
class Layout:
    """Type, shape and order in memory of a tensor on the wire.

    ``strides`` is None for a contiguous tensor, else the strides (in elements) of a tensor that fills its memory
    without gaps. ``device_type`` is where the source keeps it ("cpu", "cuda"), without an index.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device_type: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)} on {self.device_type}"

    def to_text(self) -> str:
        """``"float32 64,3,7,7 cpu"``, with the strides as a fourth word if there are any: short, as there are many."""
        text = f"{dtype_name(self.dtype)} {_join(self.shape)} {self.device_type}"
        return text if self.strides is None else f"{text} {_join(self.strides)}"

    @staticmethod
    def from_text(text: str) -> "Layout":
        """Inverse of :meth:`to_text`; raises :class:`StateError` for a layout that cannot be."""
        try:
            name, shape_text, device_type, *rest = text.split(" ")
            shape = _split(shape_text)
            (strides,) = map(_split, rest) if rest else (None,)
        except (AttributeError, ValueError) as error:
            raise StateError(f"malformed tensor layout {text!r}: {error}") from None
        if strides is not None and not _fills(shape, strides):
            raise StateError(f"malformed tensor layout {text!r}: the strides do not fill the shape")
        return Layout(dtype_of(name), shape, strides, device_type)


def layout_of(tensor: Tensor) -> Layout:
    """Layout in which :func:`wire_bytes` writes *tensor*. Raises :class:`StateError` for one without plain memory."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise StateError(f"a {kind} tensor cannot be copied to a replacement")
    if hasattr(tensor, "_local_tensor"):
        raise StateError("a sharded tensor (DTensor) is neither a parameter nor the state of an optimizer")
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not _is_plain(tensor):
        name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise StateError(
            f"a tensor of type {name}, which keeps its values in other tensors, cannot be copied to a replacement"
        )
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    keep = not tensor.is_contiguous() and _fills(shape, strides)
    return Layout(tensor.dtype, shape, strides if keep else None, tensor.device.type)


def memory_bytes(tensor: Tensor) -> Tensor | None:
    """The memory of *tensor* as a one-dimensional uint8 view, or None when it has gaps, overlaps or pending signs.

    Writing to the view writes to *tensor*. The view does not require a gradient.
    """
    if tensor.is_conj() or tensor.is_neg():
        return None
    flat = tensor.detach()
    if not flat.is_contiguous():
        strides = flat.stride()
        flat = flat.permute(sorted(range(flat.dim()), key=lambda dim: -strides[dim]))
        if not flat.is_contiguous():
            return None
    return flat.view(-1).view(torch.uint8)


def wire_bytes(tensor: Tensor) -> Tensor:
    """Bytes of *tensor* in the order of ``layout_of(tensor)``, uint8, one-dimensional: a view where possible."""
    view = memory_bytes(tensor)
    if view is None:
        view = memory_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
    assert view is not None
    return view


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor of a type with operations of its own has its values where those of any other are."""
    try:
        views = [wire_bytes(tensor) for _ in range(2)]
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    is_one = views[0].numel() == 0 or memory_bytes(tensor) is None or views[0].data_ptr() == views[1].data_ptr() != 0
    return is_one and all(type(one) is Tensor and one.numel() == tensor.numel() * tensor.itemsize for one in views)


def logical_bytes(tensor: Tensor) -> Tensor:
    """Bytes of *tensor* in the order of its elements, whatever its strides, uint8, one-dimensional."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return flat.view(-1).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and type are equal, of whichever devices; a NaN is equal to itself."""
    one, other = one.detach(), other.detach()
    if one.device != other.device:
        one, other = one.cpu(), other.cpu()
    if one.stride() != other.stride():
        return torch.equal(logical_bytes(one), logical_bytes(other))
    return torch.equal(wire_bytes(one), wire_bytes(other))


def new_tensor(layout: Layout, device: torch.device) -> Tensor:
    """Uninitialised tensor of *layout* on *device*."""
    if layout.strides is None:
        return torch.empty(layout.shape, dtype=layout.dtype, device=device)
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=device)


def has_layout(tensor: Tensor, layout: Layout) -> bool:
    """Whether the bytes of *layout* can be written into the memory of *tensor* as they come."""
    if tensor.dtype != layout.dtype or tuple(tensor.shape) != layout.shape or memory_bytes(tensor) is None:
        return False
    if layout.strides is None:
        return tensor.is_contiguous()
    pairs = zip(tensor.stride(), layout.strides, layout.shape, strict=True)
    # The stride of a dimension of one element says nothing.
    return all(mine == theirs or size == 1 for mine, theirs, size in pairs)


def unexpanded(tensor: Tensor) -> Tensor:
    """*tensor* without the repetitions that ``expand`` made: each element once, writable in place."""
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    if tensor.numel() == 1 and 0 in tensor.stride():  # of which no bytes can be seen
        tensor = tensor.as_strided(tensor.shape, (1,) * tensor.dim())
    return tensor


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``targets[i].copy_(sources[i])`` for all i, in one call where torch has one: the loop costs 2 us per tensor."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))


def _fills(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of *shape* and *strides* covers its memory exactly once, in some order of its dimensions."""
    if len(shape) != len(strides):
        return False
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _join(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _split(text: str) -> tuple[int, ...]:
    numbers = tuple(map(int, text.split(","))) if text else ()
    if any(number < 0 for number in numbers):
        raise ValueError("a negative size")
    return numbers
