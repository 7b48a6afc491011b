"""The checksum sees every flipped bit and every exchange, and nothing that does not matter."""

import hashlib
import struct
from collections.abc import Iterator

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swift_recovery.errors import StateError
from swift_recovery.state import checksum as module
from swift_recovery.state.checksum import _SMALL_BYTES, ROW_WORDS, _DeviceStream, _HostStream, _weights, checksum

SIZES = [1, 3, 4, 5, 1000, ROW_WORDS * 4 - 1, ROW_WORDS * 4 + 3, _SMALL_BYTES, _SMALL_BYTES + 1, 300_001]


@pytest.fixture(autouse=True, scope="module", params=[_HostStream, lambda: _DeviceStream(torch.device("cpu"))],
                ids=["host", "device"])  # fmt: skip
def stream(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways to compute it, on the CPU; what is particular to a GPU is only where the sums are made."""
    before = module._stream_on
    module._stream_on = lambda device: request.param()
    yield
    module._stream_on = before


def random_bytes(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=150)
@given(st.sampled_from(SIZES), st.data())
def test_a_flipped_bit_shows(size: int, data: st.DataObject) -> None:
    tensor = random_bytes(size) if data.draw(st.booleans()) else torch.zeros(size, dtype=torch.uint8)
    others = [random_bytes(7, 1), tensor, random_bytes(9, 2)]
    before = checksum(others)
    tensor[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(others) != before


@settings(max_examples=150)
@given(
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.int64]),
    st.sampled_from([2, 9, 5000, 200_000]),
    st.data(),
)
def test_two_elements_that_changed_places_show(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    tensor = torch.zeros(size, dtype=dtype)
    i, j = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    value = data.draw(st.integers(1, 100))
    # Equal but for the sign: the hardest pair, its words differ in the highest bit only.
    tensor[i], tensor[j] = value, -value if data.draw(st.booleans()) else 0
    before = checksum([tensor])
    tensor[[i, j]] = tensor[[j, i]]
    assert checksum([tensor]) != before


def test_order_and_boundaries_of_tensors_show() -> None:
    a, b = random_bytes(40, 1), random_bytes(40, 2)
    joined = torch.cat([a, b])
    assert len({checksum(x) for x in ([a, b], [b, a], [joined], [joined[:39], joined[39:]], [a], [a, a], [])}) == 7
    big, bigger = random_bytes(_SMALL_BYTES, 3), random_bytes(_SMALL_BYTES * 3, 4)
    assert checksum([big, bigger]) != checksum([bigger, big])


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.uint16],
)
def test_strides_and_offsets_do_not_matter(dtype: torch.dtype) -> None:
    base = random_bytes(4096).view(torch.uint8)
    tensor = (base > 127).view(8, 64, 8) if dtype == torch.bool else base.view(dtype).view(8, -1, 8)
    expected = checksum([tensor])
    assert checksum([tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)]) == expected
    padded = torch.empty(tensor.numel() + 1, dtype=dtype)
    padded[1:].copy_(tensor.reshape(-1))
    assert checksum([padded[1:].view(tensor.shape)]) == expected
    assert checksum([tensor.permute(2, 0, 1)]) != expected
    wide = torch.empty((8, tensor.shape[1], 16), dtype=dtype)
    wide[..., ::2] = tensor
    assert checksum([wide[..., ::2]]) == expected


def test_scalars_empty_tensors_and_gradients() -> None:
    one = torch.tensor(1.0)
    assert checksum([one]) == checksum([one.reshape(1)]) == checksum([torch.nn.Parameter(one)])
    assert checksum([torch.tensor(0.0)]) != checksum([torch.tensor(-0.0)])
    assert checksum([torch.empty(0), one]) != checksum([one, torch.empty(0)])
    assert -(1 << 63) <= checksum([one]) < 1 << 63


def test_conjugated_views_count_by_value() -> None:
    tensor = torch.randn(10, dtype=torch.complex64)
    assert checksum([tensor.conj()]) == checksum([tensor.conj().resolve_conj()]) != checksum([tensor])


def test_weights_are_those_of_splitmix64() -> None:
    weights = [int(w) & ((1 << 64) - 1) for w in _weights(torch.device("cpu"))]
    # The first outputs of the reference implementation with seed 0, made odd.
    assert weights[:3] == [0xE220A8397B1DCDAF | 1, 0x6E789E6AA1B965F4 | 1, 0x06C45D188009454F | 1]
    # What the exchange of two words that differ in the sign bit relies on.
    assert len({w & 0xFFFFFFFF for w in weights}) == ROW_WORDS


def test_the_value_is_that_of_the_definition(request: pytest.FixtureRequest) -> None:
    tensors = [torch.arange(50_000, dtype=torch.int32), torch.arange(3.0), torch.tensor([True])]
    data = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    value = xxhash.xxh3_64(data).intdigest() if "host" in request.node.name else sum_of_words(data)
    digest = hashlib.blake2b(struct.pack("<3q", 200_000, 12, 1), digest_size=8).digest()
    mixed = (int.from_bytes(digest, "little") * 0x9E3779B97F4A7C15 + value) % (1 << 64)
    assert checksum(tensors) % (1 << 64) == mixed


def sum_of_words(data: bytes) -> int:
    weights = [int(w) for w in _weights(torch.device("cpu"))]
    words = [int.from_bytes(data[i : i + 4].ljust(4, b"\0"), "little", signed=True) for i in range(0, len(data), 4)]
    starts = range(0, len(words), ROW_WORDS)
    rows = [sum(w * x for w, x in zip(weights, words[start:], strict=False)) for start in starts]
    return sum(w * row for w, row in zip(weights, rows, strict=False)) % (1 << 64)


def test_tensors_without_memory_are_refused() -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(StateError):
            checksum([tensor])
