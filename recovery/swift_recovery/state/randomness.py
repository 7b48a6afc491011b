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
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd: its multiples are far apart
_HAS_CUDA: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
_NUM_WORDS = 624  # of the state of a Mersenne Twister, which all generators of the processor are
_COUNTERS = numpy.arange(1, _NUM_WORDS // 2 + 1, dtype=numpy.uint64) * numpy.uint64(_GOLDEN)
# The generator behind the functions of `random`.
_PYTHON: random.Random = random.seed.__self__  # type: ignore[attr-defined]

SeedSeries = Callable[[int], None]
"""Seeds every generator for the use number *index*."""


def seed_generators(torch_key: int, python_key: int, numpy_key: int) -> None:
    """Give the generators of the processor the states that belong to three keys of 64 bits."""
    # Not torch.manual_seed: where CUDA has not started yet it queues one more call each time.
    torch.default_generator.manual_seed(torch_key)
    state = torch.get_rng_state()
    # CPUGeneratorImplStateLegacy of aten/src/ATen/CPUGeneratorImpl.cpp: a word takes 64 bits, the first is the fourth.
    state.view(torch.int64)[3 : 3 + _NUM_WORDS] = torch.from_numpy(_words(torch_key).astype(numpy.int64))
    torch.set_rng_state(state)
    _PYTHON.setstate((_PYTHON.VERSION, (*_words(python_key).tolist(), _NUM_WORDS), None))
    numpy.random.set_state(("MT19937", _words(numpy_key), _NUM_WORDS, 0, 0.0))


def _words(key: int) -> Any:
    """The state of a Mersenne Twister, as uint32: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) from *key* on.

    A twister's own seeding is one long chain of dependent steps; this takes a tenth of that, and no two keys give
    states that are alike.
    """
    return _mixed(_COUNTERS + _mixed(numpy.full(1, key, numpy.uint64))).astype("<u8").view("<u4")


def _mixed(bits: Any) -> Any:
    bits = (bits ^ (bits >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> numpy.uint64(31))


def compiled_seeder(seeder: Any) -> Any | None:
    """The same by the class `Seeder` (*seeder*) of swift-agent's native library; None if it cannot be had here."""
    generator = numpy.random.get_bit_generator()  # type: ignore[attr-defined]  # public, but not exported
    if not isinstance(generator, numpy.random.MT19937):
        return None  # numpy.random.set_state says what it says to that
    try:
        return seeder(generator, numpy.random.seed, _PYTHON)
    except RuntimeError:
        return None  # another Python than those it was written for


def seed_series(job_seed: int, rank: int, tag: int, seeder: Any | None = None) -> SeedSeries:
    """A function that seeds every generator for one use after the other; the same numbers give the same draws in any
    process.

    *tag* keeps uses apart (an iteration and the shuffle of an epoch). The keys of job, rank and tag are unrelated
    (BLAKE2b of the three, modulo 2**64 each); an index adds a multiple of 2**64 over the golden ratio.
    *seeder*: a `compiled_seeder`. A use takes about 2 us with it, and 100 us without.
    """
    words = struct.pack("<3Q", job_seed & _MASK, rank & _MASK, tag & _MASK)
    digest = hashlib.blake2b(words, digest_size=24, person=b"swift seed").digest()
    keys: tuple[int, int, int] = struct.unpack("<QQQ", digest)

    def in_python(index: int) -> None:
        torch_key, python_key, numpy_key = ((key + index * _GOLDEN) & _MASK for key in keys)
        seed_generators(torch_key, python_key, numpy_key)

    on_processor: SeedSeries = in_python if seeder is None else seeder.series(*keys).use
    if not _HAS_CUDA:
        return on_processor

    def with_devices(index: int) -> None:
        on_processor(index)
        if _cuda_started():
            for generator in torch.cuda.default_generators:
                generator.manual_seed((keys[0] + index * _GOLDEN) & _MASK)

    return with_devices


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
