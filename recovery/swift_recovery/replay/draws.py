"""How many numbers a generator has given between two states, and the way to a later state without what drew them.

A process that leaves out a part of a computation puts its generators where that would have left them. This module must
never guess: what cannot be counted is None.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

# CPUGeneratorImplStateLegacy of aten/src/ATen/CPUGeneratorImpl.cpp: seed, left, seeded, next; 624 words of 64 bits.
_HEAD = struct.Struct("<QiiQ")
_WORDS_END = _HEAD.size + 624 * 8
# More than that are not counted: it takes a microsecond for a hundred.
MAX_DRAWS = 1 << 26
# Of a device: a seed and an offset, which counts them.
_DEVICE_BYTES = 16


def states(devices: Iterable[torch.device] = ()) -> dict[str, Tensor]:
    """Of torch's generators of the processor and of these devices, by name."""
    found = {"cpu": torch.get_rng_state()}
    for device in devices:
        if device.type == "cuda":
            found[str(device)] = torch.cuda.get_rng_state(device)
    return found


def put_back(kept: Mapping[str, Tensor]) -> None:
    """The generators go on from there."""
    for name, state in kept.items():
        if name == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, torch.device(name))


def between(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, int] | None:
    """So many numbers were drawn from each, those from which some were; None if that cannot be counted."""
    found: dict[str, int] = {}
    for name, state in before.items():
        number = _on_processor(state, after[name]) if name == "cpu" else _on_device(state, after[name])
        if number is None:
            return None
        if number:
            found[name] = number
    return found


def skip(numbers: Mapping[str, int]) -> None:
    """The generators go on as if so many had been drawn."""
    for name, number in numbers.items():
        if name == "cpu":
            _draw(torch.default_generator, number)
        else:
            device = torch.device(name)
            state = torch.cuda.get_rng_state(device)
            state.view(torch.int64)[1] += number
            torch.cuda.set_rng_state(state, device)


def _on_device(before: Tensor, after: Tensor) -> int | None:
    if before.numel() != _DEVICE_BYTES or after.numel() != _DEVICE_BYTES:
        return None
    begin, end = before.view(torch.int64).tolist(), after.view(torch.int64).tolist()
    return end[1] - begin[1] if begin[0] == end[0] and end[1] >= begin[1] else None


def _on_processor(before: Tensor, after: Tensor) -> int | None:
    if torch.equal(before, after):
        return 0
    if not torch.equal(before[_WORDS_END:], after[_WORDS_END:]):
        return None  # one of a pair of normal numbers is kept for the next call
    generator, state, count = torch.Generator(), before, 0
    generator.set_state(before)
    (_, _, _, end), words = _HEAD.unpack(after[: _HEAD.size].numpy().tobytes()), after[_HEAD.size : _WORDS_END]
    while count <= MAX_DRAWS:
        _, left, _, at = _HEAD.unpack(state[: _HEAD.size].numpy().tobytes())
        if at <= end and torch.equal(state[_HEAD.size : _WORDS_END], words):
            return int(count + end - at)
        _draw(generator, left)  # the last of them begins the next 624
        count, state = count + left, generator.get_state()
    return None


def _draw(generator: torch.Generator, number: int) -> None:
    """One word of the twister for each."""
    while number > 0:
        size = min(number, 1 << 20)
        torch.empty(size, dtype=torch.int32).random_(generator=generator)
        number -= size
