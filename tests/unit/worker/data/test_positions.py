"""Batches from a position on: the same batches as without the skip, and the skipped ones not loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from swift_agent.worker.data.positions import iterate, set_epoch


class Counting(Dataset[Any]):
    def __init__(self, size: int = 23) -> None:
        self.size = size
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(23))


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(Counting(), batch_size=4),
    "shuffled": lambda: DataLoader(Counting(), batch_size=4, shuffle=True),
    "own generator": lambda: DataLoader(
        Counting(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "drop last": lambda: DataLoader(Counting(), batch_size=4, drop_last=True),
    "batch sampler": lambda: DataLoader(Counting(), batch_sampler=BatchSampler(RandomSampler(range(23)), 4, False)),
    "no batching": lambda: DataLoader(Counting(), batch_size=None, shuffle=True),
    "weighted": lambda: DataLoader(Counting(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 23, 23)),
    "distributed": lambda: DataLoader(Counting(), batch_size=4, sampler=DistributedSampler(Counting(), 2, 1)),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
    "a list": lambda: list(range(9)),
}


def batches(loader: Any, skip: int) -> list[Any]:
    torch.manual_seed(1)
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in iterate(loader, skip)]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_the_rest_is_the_same(make: Any) -> None:
    whole = batches(make(), 0)
    for skip in (1, 3, len(whole) - 1, len(whole), len(whole) + 5):
        loader = make()
        assert batches(loader, skip) == whole[skip:]
        if isinstance(getattr(loader, "dataset", None), Counting):
            assert len(loader) == len(make()), "the loader is as it was"
    if not isinstance(make(), list):
        loader = make()
        skipped, after, plain = batches(loader, 2), batches(loader, 0), make()
        assert (skipped, after) == (batches(plain, 0)[2:], batches(plain, 0))


@pytest.mark.parametrize("name", [name for name in LOADERS if name not in ("iterable", "a list")])
def test_what_is_skipped_is_not_loaded(name: str) -> None:
    loader = LOADERS[name]()
    rest = batches(loader, 3)
    seen = [i for batch in rest for i in (batch if isinstance(batch, list) else [batch])]
    assert loader.dataset.loaded == seen and len(seen) < 23


@pytest.mark.parametrize("name", ["shuffled", "batch sampler", "no batching", "weighted"])
def test_the_order_is_drawn_before_the_first_batch(name: str) -> None:
    """The session seeds before each batch: what a sampler draws must not depend on which batch is the first."""
    orders = []
    for skip, seed in ((0, 2), (3, 9)):
        torch.manual_seed(1)
        iterator = iterate(LOADERS[name](), skip)
        torch.manual_seed(seed)
        orders.append([batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in iterator])
    assert orders[0][3:] == orders[1]


def test_the_random_state_after_a_pass_is_that_of_a_whole_pass() -> None:
    after = []
    for skip in (0, 4):
        batches(DataLoader(Counting(), batch_size=4, shuffle=True), skip)
        after.append(torch.rand(3).tolist())
    assert after[0] == after[1]


def test_a_loader_with_worker_processes() -> None:
    whole = batches(DataLoader(Counting(), batch_size=4), 0)
    assert batches(DataLoader(Counting(), batch_size=4, num_workers=1), 2) == whole[2:]


def test_persistent_workers_skip_once() -> None:
    """Such a loader keeps the sampler of its first pass; what that pass skipped belongs to the passes after it."""
    whole = batches(DataLoader(Counting(), batch_size=4), 0)
    loader = DataLoader(Counting(), batch_size=4, num_workers=1, persistent_workers=True)
    try:
        assert [batches(loader, skip) for skip in (2, 0, 3)] == [whole[2:], whole, whole[3:]]
    finally:
        loader._iterator._shutdown_workers()  # type: ignore[union-attr]


def test_a_loader_whose_pass_is_under_way_is_not_disturbed() -> None:
    loader = DataLoader(Counting(), batch_size=4)
    first = iterate(loader, 1)
    assert next(first).tolist() == [4, 5, 6, 7]
    assert next(iterate(loader, 2)).tolist() == [8, 9, 10, 11]
    assert next(first).tolist() == [8, 9, 10, 11]


def test_an_iterator_that_fails_to_start_leaves_the_loader_alone() -> None:
    class Bad(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            raise RuntimeError("no order")

    loader = DataLoader(Counting(), batch_size=None, sampler=Bad(range(23)))
    with pytest.raises(RuntimeError, match="no order"):
        batches(loader, 2)
    assert isinstance(loader.sampler, Bad)


def test_set_epoch_reaches_a_distributed_sampler_wherever_it_is() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Counting(), 2, 0)
    set_epoch(DataLoader(Counting(), batch_size=4, sampler=sampler), 3)
    assert sampler.epoch == 3
    set_epoch(DataLoader(Counting(), batch_sampler=BatchSampler(sampler, 4, False)), 4)
    assert sampler.epoch == 4

    class Own(BatchSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    own = Own(SequentialSampler(range(23)), 4, False)
    set_epoch(DataLoader(Counting(), batch_sampler=own), 5)
    assert own.epoch == 5
    set_epoch([1, 2], 6)  # nothing to tell
