"""Checksum of tensors, to compare the replicas of a model without sending it.

Computed with torch where the tensors are: only the final eight bytes leave the device. Must never write to a tensor.
It finds accidents (a wrong copy, a flipped bit), not forgeries: it is no cryptographic hash.

The bytes are read as 32-bit words ``x`` in rows of ``ROW_WORDS``; the value of a row is ``sum(w[i] * x[i])`` modulo
2**64, with fixed odd 64-bit weights ``w``. Row values are summed up in the same way, as 64-bit words, until one is left
for each device; these and the sizes of the tensors are mixed. An odd weight is invertible, so a single flipped bit
always shows. Words of 32 bits under 64-bit products keep every bit of a difference, even of the sign, so two unequal
elements that changed places show as well, but for a coincidence of about 1 in 2**32.
"""

import functools
import hashlib
import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from swift_recovery.tensors import layout_of, logical_bytes

ROW_WORDS = 1 << 14
_ROW_BYTES = ROW_WORDS * 4
# Rows per step: on a CPU the step has to stay in the cache; a GPU wants few large steps (64 MiB).
_CPU_ROWS, _DEVICE_ROWS = 16, 512
# Tensors below this are joined first: a step of their own would cost more than their bytes.
_SMALL_BYTES = 4 * _ROW_BYTES
_BATCH_BYTES = 4 << 20


def checksum(tensors: Iterable[Tensor]) -> int:
    """Checksum of *tensors*, in their order: a signed 64-bit integer.

    Equal for equal bytes, sizes and order; strides, devices' indices and ``requires_grad`` do not matter, shapes and
    dtypes only through the bytes. 0.0 and -0.0 differ, as do different NaNs. Blocks until the result is on the host.
    Raises :class:`StateError` for a tensor without plain memory (sparse, quantized, meta).
    """
    sizes: list[int] = []
    batches: dict[torch.device, _Stream] = {}
    with torch.no_grad():
        for tensor in tensors:
            layout_of(tensor)
            flat = logical_bytes(tensor)
            sizes.append(flat.numel())
            batches.setdefault(flat.device, _Stream(flat.device)).add(flat)
        values = [stream.finish() for stream in batches.values()]
    digest = hashlib.blake2b(struct.pack(f"<{len(sizes)}q", *sizes), digest_size=8).digest()
    mixed = int.from_bytes(digest, "little")
    for value in values:
        # Invertible in each value: nothing that the sums told apart is lost here.
        mixed = mixed * 0x9E3779B97F4A7C15 + value
    return _signed(mixed)


class _Stream:
    """The bytes of all tensors of one device."""

    def __init__(self, device: torch.device) -> None:
        self._weights = _weights(device)
        self._rows: list[Tensor] = []
        self._small: list[Tensor] = []
        self._small_bytes = 0
        num_rows = _CPU_ROWS if device.type == "cpu" else _DEVICE_ROWS
        self._num_rows = num_rows
        self._wide: Tensor | None = None

    def add(self, flat: Tensor) -> None:
        """Take in *flat* (uint8, one-dimensional)."""
        if flat.numel() >= _SMALL_BYTES:
            self._flush()
            self._sum_rows(flat)
            return
        self._small.append(flat)
        self._small_bytes += flat.numel()
        if self._small_bytes >= _BATCH_BYTES:
            self._flush()

    def finish(self) -> int:
        """Sum of all rows, as a signed 64-bit integer."""
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
            for step in part.view(torch.int32).view(-1, ROW_WORDS).split_with_sizes(self._steps(part)):
                if self._wide is None:
                    self._wide = self._weights.new_empty(self._num_rows, ROW_WORDS)
                wide = self._wide[: step.shape[0]]
                self._rows.append(self._times_weights(wide.copy_(step)))

    def _steps(self, part: Tensor) -> list[int]:
        num_rows, size = part.numel() // _ROW_BYTES, self._num_rows
        return [min(size, num_rows - first) for first in range(0, num_rows, size)]

    def _times_weights(self, rows: Tensor) -> Tensor:
        # CUDA has no matrix product of integers.
        return rows @ self._weights if rows.device.type == "cpu" else (rows * self._weights).sum(dim=1)


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
