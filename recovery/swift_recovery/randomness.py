"""Random number generators of a worker: their state, and seeds that a replacement can work out by itself.

Covers Python's ``random``, numpy's global generator, torch's CPU generator and those of the
CUDA devices. Generator objects that a script makes itself are not covered. Must never start CUDA.
"""

import hashlib
import random
import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd: its multiples are far apart, modulo 2**32 as well
_HAS_CUDA: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
_seed_torch = torch.default_generator.manual_seed
_seed_numpy = numpy.random.seed
# The generator behind the functions of `random`, and its seeding without the detour for text and bytes.
_PYTHON: random.Random = random.seed.__self__  # type: ignore[attr-defined]
_seed_python = super(random.Random, _PYTHON).seed

SeedAll = Callable[[int, int, int], None]


def seed_generators(torch_seed: int, python_seed: int, numpy_seed: int) -> None:
    """Seed the generators of the processor: 64 bits each, 32 for NumPy."""
    # Not torch.manual_seed: where CUDA has not started yet it queues one more call each time.
    _seed_torch(torch_seed)
    _seed_python(python_seed)
    _PYTHON.gauss_next = None  # type: ignore[attr-defined]  # what random.seed does besides
    _seed_numpy(numpy_seed)


def compiled_seeding(seeder: Any) -> SeedAll:
    """`seed_generators` by the class `Seeder` (*seeder*) of swift-agent's native library."""
    generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]  # public, but not exported
    if not isinstance(generator, numpy.random.MT19937):
        return seed_generators  # which says what numpy says to that
    seed: SeedAll = seeder(generator, _seed_numpy, _PYTHON, _seed_python).seed
    return seed


class SeedSeries:
    """Seeds for every generator, one set per index; the same numbers give the same draws in any process.

    *tag* keeps uses apart (an iteration and the shuffle of an epoch). Series of different jobs, ranks and tags are
    unrelated (BLAKE2b of the three, modulo 2**64 each); *index* adds a multiple of 2**64 over the golden ratio, and the
    generators' own seeding does the rest. One use takes under 10 us, or 25 with cold caches; *seed_all*, a compiled
    `seed_generators`, takes a third of that.
    """

    def __init__(self, job_seed: int, rank: int, tag: int, seed_all: SeedAll = seed_generators) -> None:
        self._seed_all = seed_all
        words = struct.pack("<3Q", job_seed & _MASK, rank & _MASK, tag & _MASK)
        digest = hashlib.blake2b(words, digest_size=24, person=b"swift seed").digest()
        self._torch, self._python, self._numpy = struct.unpack("<QQQ", digest)

    def use(self, index: int) -> None:
        """Seed every generator."""
        step = index * _GOLDEN
        torch_seed = (self._torch + step) & _MASK
        self._seed_all(torch_seed, (self._python + step) & _MASK, (self._numpy + step) & 0xFFFFFFFF)
        if _HAS_CUDA and _cuda_started():
            for generator in torch.cuda.default_generators:
                generator.manual_seed(torch_seed)


def capture_generators(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """State of all generators as a tree for the codec; *devices*: the CUDA devices in use. No device is waited for."""
    tree: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": numpy.random.get_state(),
        "cuda": {},
    }
    if _cuda_started():
        indices = {device.index for device in devices if device.type == "cuda"} | {torch.cuda.current_device()}
        tree["cuda"] = {index: torch.cuda.get_rng_state(index) for index in sorted(indices)}
    return tree


def restore_generators(tree: dict[str, Any]) -> None:
    """Put back what :func:`capture_generators` gave. Devices that are not there are left out."""
    random.setstate(tree["python"])
    torch.set_rng_state(tree["torch"])
    numpy.random.set_state(tree["numpy"])
    if _cuda_started():
        for index, state in tree["cuda"].items():
            if index < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, index)


def _cuda_started() -> bool:
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started
