"""Tensors as payloads of records: any dtype that has plain memory, as the bytes that it is. Must never convert."""

from __future__ import annotations

import ctypes
import math

import torch
import xxhash
from torch import Tensor

from swift_logging_store.errors import Damaged, NotLoggable
from swift_logging_store.format.record import Header


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def copy_of(tensor: Tensor) -> bytes:
    """The elements in the order of the indices. Raises `NotLoggable` as `payload_of` does.

    For every message that is sent, with caches that the computation has emptied: as few calls as can be.
    """
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous()
    address = tensor.data_ptr() if plain else 0
    if not address or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return bytes(payload_of(tensor))
    return ctypes.string_at(address, tensor.nbytes)


def digest_of(tensor: Tensor) -> int:
    """A checksum of the elements, 64 bits. Raises `NotLoggable` as `payload_of` does; for every message, like
    `copy_of`."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous()
    address = tensor.data_ptr() if plain else 0
    if not address or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return xxhash.xxh3_64_intdigest(payload_of(tensor))
    return xxhash.xxh3_64_intdigest((ctypes.c_char * tensor.nbytes).from_address(address))


def payload_of(tensor: Tensor) -> memoryview:
    """The elements in the order of the indices; a view of *tensor* if it is contiguous and on the CPU. Raises
    `NotLoggable` for one without plain memory (sparse, quantized, meta, a tensor subclass)."""
    check_plain(tensor)
    try:
        here = tensor.detach().contiguous().cpu()
        if not here.data_ptr():
            here = here.clone()  # zeros that autograd has without memory
    except (NotImplementedError, RuntimeError) as error:
        raise NotLoggable(f"a tensor of {tensor.dtype} cannot be made contiguous: {error}") from None
    return bytes_of(here).numpy().data


def check_plain(tensor: Tensor) -> None:
    """Raise `NotLoggable` for one without plain memory."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise NotLoggable(f"a {type(tensor).__name__} of layout {tensor.layout} has no plain memory")
    if tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
        raise NotLoggable(f"a quantized, conjugated or meta tensor ({tensor.dtype}) has no plain memory")


def tensor_of(header: Header, payload: memoryview) -> Tensor:
    """A new tensor on the CPU. Raises `Damaged` if the header cannot be that of this payload."""
    dtype = getattr(torch, header.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise Damaged(f"{header.channel}: this torch has no dtype {header.dtype!r}")
    if math.prod(header.shape) * dtype.itemsize != len(payload):
        raise Damaged(f"{header.channel}: {len(payload)} bytes are no {header.dtype} {list(header.shape)}")
    tensor = torch.empty(header.shape, dtype=dtype)
    if len(payload):
        bytes_of(tensor).numpy().data[:] = payload
    return tensor


def fill(tensor: Tensor, header: Header, payload: memoryview) -> None:
    """With that message, of the same dtype and as many elements. Raises `Damaged` as `tensor_of` does."""
    there = tensor.data  # what waits for an activation is a leaf that requires a gradient
    is_plain = type(there) is Tensor and there.is_cpu and there.is_contiguous() and there.nbytes == len(payload)
    if is_plain and payload:
        bytes_of(there).numpy().data[:] = payload
    else:
        there.copy_(tensor_of(header, payload).reshape(tensor.shape))


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, shape (bytes,) uint8: for dtypes too on which torch has no operations."""
    offset, length = tensor.storage_offset() * tensor.itemsize, tensor.numel() * tensor.itemsize
    nothing = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return nothing.set_(tensor.untyped_storage(), offset, (length,), (1,))
