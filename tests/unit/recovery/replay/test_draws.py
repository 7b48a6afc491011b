"""A generator that skips what another process draws is where that one is; what cannot be counted is said so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from swift_recovery.replay import draws

Draw = Callable[[], object]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def counted(draw: Draw) -> dict[str, int] | None:
    """What *draw* draws; a generator that skips it instead is in the same state, and gives the same next."""
    before = draws.states()
    draw()
    after = draws.states()
    found = draws.between(before, after)
    if found is not None:
        draws.put_back(before)
        draws.skip(found)
        assert torch.equal(torch.get_rng_state(), after["cpu"])
        skipped = [torch.rand(3), torch.randn(16), torch.randn(1)]
        draws.put_back(after)
        assert all(map(torch.equal, skipped, [torch.rand(3), torch.randn(16), torch.randn(1)]))
    return found


COUNTED: dict[str, Draw] = {
    "rand": lambda: torch.rand(7),
    "many": lambda: torch.rand(5000),
    "double": lambda: torch.rand(9, dtype=torch.float64),
    "dropout": lambda: F.dropout(torch.ones(31, 17), 0.1),
    "randn of 16": lambda: torch.randn(16),
    "randn of 1000": lambda: torch.randn(1000),
    "randperm": lambda: torch.randperm(100),
    "randint": lambda: torch.randint(10, (33,)),
    "bernoulli": lambda: torch.bernoulli(torch.full((40,), 0.5)),
    "exactly to the end": lambda: torch.rand(624),
    "two kinds": lambda: (torch.rand(3), torch.randn(20), F.dropout(torch.ones(10), 0.5)),
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("begun", [0, 1, 623, 624])
def test_what_is_drawn_is_skipped(name: str, begun: int) -> None:
    torch.manual_seed(5)
    torch.rand(begun)
    found = counted(COUNTED[name])
    assert found is not None and found["cpu"] > 0


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_any_number_from_anywhere(begun: int, number: int) -> None:
    torch.manual_seed(begun)
    torch.rand(begun)
    assert counted(lambda: torch.rand(number)) == ({"cpu": number} if number else {})


def test_nothing_is_nothing() -> None:
    assert counted(lambda: torch.ones(3)) == {}
    draws.skip({})


def test_one_of_a_pair_cannot_be_counted() -> None:
    torch.manual_seed(5)
    assert counted(lambda: torch.randn(1)) is None  # the second one of the pair is kept


def test_what_was_kept_before_and_is_still_there_is_no_matter() -> None:
    torch.manual_seed(5)
    torch.randn(1)
    assert counted(lambda: torch.rand(9)) == {"cpu": 9}


def test_another_seed_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "MAX_DRAWS", 5000)
    torch.manual_seed(5)
    assert counted(lambda: torch.manual_seed(6)) is None


def test_more_than_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "MAX_DRAWS", 5000)
    torch.manual_seed(5)
    assert counted(lambda: torch.rand(4000)) == {"cpu": 4000}
    assert counted(lambda: torch.rand(9000)) is None


def of_device(seed: int, offset: int) -> torch.Tensor:
    return torch.tensor([seed, offset]).view(torch.uint8)


@pytest.mark.parametrize(("after", "found"), [
    (of_device(3, 8), {}),
    (of_device(3, 20), {"cuda:0": 12}),
    (of_device(3, 4), None),
    (of_device(4, 20), None),
    (torch.zeros(24, dtype=torch.uint8), None),
])  # fmt: skip
def test_a_device_counts_by_itself(after: torch.Tensor, found: dict[str, int] | None) -> None:
    same = {"cpu": torch.get_rng_state()}
    assert draws.between({**same, "cuda:0": of_device(3, 8)}, {**same, "cuda:0": after}) == found


def test_a_device_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"cuda:0": of_device(3, 8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: kept[str(device)].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: kept.update({str(device): state}))
    before = draws.states([torch.device("cuda:0"), torch.device("cpu")])
    draws.skip({"cuda:0": 12})
    assert kept["cuda:0"].view(torch.int64).tolist() == [3, 20]
    assert draws.between(before, draws.states([torch.device("cuda:0")])) == {"cuda:0": 12}
    draws.put_back(before)
    assert kept["cuda:0"].view(torch.int64).tolist() == [3, 8]
