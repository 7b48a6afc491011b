"""Checksum of tensors, to compare the replicas of a model without sending it.

Computed where the tensors are: only the final eight bytes leave a device. Must never write to a tensor.
It finds accidents (a wrong copy, a flipped bit), not forgeries: it is no cryptographic hash.

On the CPU it is XXH3-64 of the bytes. On a device it is a sum, made with torch: the bytes are read as 32-bit words
``x`` in rows of ``ROW_WORDS``; the value of a row is ``sum(w[i] * x[i])`` modulo 2**64, with fixed odd 64-bit weights
``w``. Row values are summed up in the same way, as 64-bit words, until one is left. An odd weight is invertible, so a
single flipped bit always shows. Words of 32 bits under 64-bit products keep every bit of a difference, even of the
sign, so two unequal elements that changed places show as well, but for a coincidence of about 1 in 2**32.

The values of all devices and the sizes of the tensors are mixed.
"""

import functools
import hashlib
import struct
from collections.abc import Iterable
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from swift_recovery.state.tensors import layout_of, logical_bytes

ROW_WORDS = 1 << 14
_ROW_BYTES = ROW_WORDS * 4
# Rows per step on a device, which wants few large steps: 64 MiB of 64-bit words.
_STEP_ROWS = 512
# Tensors below this are joined first: a step of their own would cost more than their bytes.
_SMALL_BYTES = 4 * _ROW_BYTES
_BATCH_BYTES = 4 << 20


def checksum(tensors: Iterable[Tensor]) -> int:
    """Checksum of *tensors*, in their order: a signed 64-bit integer.

    Equal for equal bytes, sizes and order on the same type of device; strides, devices' indices and ``requires_grad``
    do not matter, shapes and dtypes only through the bytes. 0.0 and -0.0 differ, as do different NaNs. Blocks until the
    result is on the host. Raises :class:`StateError` for a tensor without plain memory (sparse, quantized, meta).
    """
    sizes: list[int] = []
    streams: dict[torch.device, _Stream] = {}
    with torch.no_grad():
        for tensor in tensors:
            layout_of(tensor)
            flat = logical_bytes(tensor)
            sizes.append(flat.numel())
            stream = streams.get(flat.device)
            if stream is None:
                stream = streams[flat.device] = _stream_on(flat.device)
            stream.add(flat)
        values = [stream.finish() for stream in streams.values()]
    digest = hashlib.blake2b(struct.pack(f"<{len(sizes)}q", *sizes), digest_size=8).digest()
    mixed = int.from_bytes(digest, "little")
    for value in values:
        # Invertible in each value: nothing that was told apart is lost here.
        mixed = mixed * 0x9E3779B97F4A7C15 + value
    return _signed(mixed)


def checksum_of(tensor: Tensor) -> int:
    """As :func:`checksum` of one tensor, but another number: unsigned, and cheaper where there are many small ones."""
    if tensor.device.type != "cpu":
        return checksum([tensor]) & ((1 << 64) - 1)
    layout_of(tensor)
    with torch.no_grad():
        value: int = xxhash.xxh3_64_intdigest(logical_bytes(tensor).numpy().data)
    return value


class _Stream(Protocol):
    """The bytes of all tensors of one device."""

    def add(self, flat: Tensor) -> None:
        """Take in *flat* (uint8, one-dimensional)."""

    def finish(self) -> int:
        """The value of all bytes together."""


def _stream_on(device: torch.device) -> _Stream:
    return _HostStream() if device.type == "cpu" else _DeviceStream(device)


class _HostStream:
    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, flat: Tensor) -> None:
        self._hash.update(flat.numpy().data)

    def finish(self) -> int:
        return self._hash.intdigest()


class _DeviceStream:
    def __init__(self, device: torch.device) -> None:
        self._weights = _weights(device)
        self._rows: list[Tensor] = []
        self._small: list[Tensor] = []
        self._small_bytes = 0

    def add(self, flat: Tensor) -> None:
        if flat.numel() >= _SMALL_BYTES:
            self._flush()
            self._sum_rows(flat)
            return
        self._small.append(flat)
        self._small_bytes += flat.numel()
        if self._small_bytes >= _BATCH_BYTES:
            self._flush()

    def finish(self) -> int:
        self._flush()
        if not self._rows:
            return 0
        values = torch.cat(self._rows)
        while values.numel() > 1:
            tail = -values.numel() % ROW_WORDS
            values = self._times_weights(torch.nn.functional.pad(values, (0, tail)).view(-1, ROW_WORDS))
        return int(values.item())

    def _flush(self) -> None:
        if self._small:
            flat, self._small, self._small_bytes = torch.cat(self._small), [], 0
            self._sum_rows(flat)

    def _sum_rows(self, flat: Tensor) -> None:
        whole = flat.numel() // _ROW_BYTES * _ROW_BYTES
        rows, rest = flat[:whole], flat[whole:]
        if rest.numel():
            rest = torch.nn.functional.pad(rest, (0, _ROW_BYTES - rest.numel()))
        for part in (rows, rest):
            if part.storage_offset() % 4:
                part = part.clone()
            words = part.view(torch.int32).view(-1, ROW_WORDS)
            for step in words.split(_STEP_ROWS):  # type: ignore[no-untyped-call]
                self._rows.append(self._times_weights(step.to(torch.int64)))

    def _times_weights(self, rows: Tensor) -> Tensor:
        # CUDA has no matrix product of integers.
        return (rows * self._weights).sum(dim=1)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """``ROW_WORDS`` odd 64-bit numbers: splitmix64 of 1, 2, ...; the same on every machine and with every torch."""
    z = torch.arange(1, ROW_WORDS + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # torch shifts the sign in; the generator wants zeros.
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return (z | 1).to(device)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
