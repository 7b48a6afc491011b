"""A replacement gets the batches that its predecessor would have got, from every kind of loader, with all that the data
set and the body of the loop draw; what cannot be positioned is refused.
"""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from lightning.fabric import Fabric
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from swift_agent.errors import UsageError
from swift_agent.worker.data.batches import Batches, Passes
from swift_agent.worker.data.draws import Draws
from swift_agent.worker.data.inputs import Inputs
from swift_agent.worker.data.loader_order import Pass
from swift_agent.worker.data.positions import Feeds
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.position import Position, Units
from swift_agent.worker.tracked.seeds import Seeds

NUM_SAMPLES, BATCH, NUM_PASSES = 22, 3, 3


class Augmented(Dataset[Any]):
    """Draws from all generators for each sample."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        return index, torch.rand(1), random.random(), float(numpy.random.rand())


class Stream(IterableDataset[Any]):
    """Each process of a loader gives its part, in an order that it draws."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = list(range(NUM_SAMPLES))[info.id :: info.num_workers] if info else list(range(NUM_SAMPLES))
        while mine:
            yield mine.pop(random.randrange(len(mine))), torch.rand(1)


class Reversed(DataLoader[Any]):
    """A subclass that goes through its own order, and does not heed its sampler."""

    def __iter__(self) -> Any:
        for first in range(NUM_SAMPLES - BATCH, -1, -BATCH):
            yield torch.tensor([self.dataset[index][0] for index in range(first, first + BATCH)]), torch.rand(1)


class Epochs(DataLoader[Any]):
    """In the manner of timm's loader of that name: its processes stay, and begin the next pass before this one ends."""

    __module__ = "timm.data.loader"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = None

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        if self.iterator is None:
            self.iterator = super().__iter__()
        for _ in range(len(self)):
            yield next(self.iterator)


Epochs.__name__ = "MultiEpochsDataLoader"


class Repeating:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class PrefetchLoader:
    """In the manner of timm's: one batch ahead, with noise."""

    __module__ = "timm.data.loader"

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        first, held = True, None
        for batch in self.loader:
            if not first:
                yield held
            first, held = False, [*batch, torch.rand(2)]
        yield held


class Wandering(RandomSampler):
    """Has a generator of Python's, and draws for each index."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.own = random.Random(4)

    def __iter__(self) -> Iterator[int]:
        for _ in range(NUM_SAMPLES):
            yield int(self.own.random() * 1000 + random.random() * 1000) % NUM_SAMPLES


def plain(**options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), BATCH, **options)


def distributed(kind: Callable[..., Any] = DataLoader, **options: Any) -> Any:
    return kind(Augmented(), batch_size=BATCH, sampler=DistributedSampler(Augmented(), 2, 1, seed=3), **options)


def accelerated(seedable: bool = False, **options: Any) -> Any:
    """As Accelerate prepares it for the second of two processes, whose states it would exchange."""
    torch.manual_seed(6)
    loader = prepare_data_loader(
        plain(shuffle=True, **options), num_processes=2, process_index=1, put_on_device=False,
        rng_types=["generator"], use_seedable_sampler=seedable,
    )  # fmt: skip
    loader.rng_types = ["no such thing"]  # it fails if it begins to
    return loader


def fabric(**options: Any) -> Any:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return fabric.setup_dataloaders(distributed(**options), use_distributed_sampler=False)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: plain(shuffle=True),
    "own generator": lambda: plain(shuffle=True, generator=seeded()),
    "own generator, processes": lambda: plain(shuffle=True, generator=seeded(), num_workers=2),
    "own generator, processes that stay": lambda: plain(
        shuffle=True, generator=seeded(), num_workers=2, persistent_workers=True),
    "generator of the sampler": lambda: plain(sampler=RandomSampler(range(NUM_SAMPLES), generator=seeded())),
    "a sampler that draws": lambda: plain(sampler=Wandering(range(NUM_SAMPLES))),
    "a batch sampler that draws, processes": lambda: DataLoader(
        Augmented(), batch_sampler=BatchSampler(Wandering(range(NUM_SAMPLES)), BATCH, False), num_workers=2),
    "processes": lambda: plain(shuffle=True, num_workers=2, prefetch_factor=3),
    "processes that stay": lambda: plain(shuffle=True, num_workers=2, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "stream, processes": lambda: DataLoader(Stream(), BATCH, num_workers=2),
    "stateful": lambda: StatefulDataLoader(Augmented(), BATCH, shuffle=True),
    "stateful, processes": lambda: StatefulDataLoader(Augmented(), BATCH, shuffle=True, num_workers=2),
    "accelerate": accelerated,
    "accelerate, seedable": lambda: accelerated(seedable=True),
    "accelerate, processes": lambda: accelerated(num_workers=2),
    "accelerate, some skipped by the script": lambda: skip_first_batches(accelerated(), 1),
    "fabric": fabric,
    "fabric, processes": lambda: fabric(num_workers=2),
    "timm, epochs": lambda: distributed(Epochs, num_workers=2),
    "timm, epochs, one process": lambda: Epochs(Augmented(), BATCH, shuffle=True),
    "timm, prefetch": lambda: PrefetchLoader(plain(shuffle=True)),
    "timm, prefetch of epochs": lambda: PrefetchLoader(distributed(Epochs, num_workers=2)),
    "a subclass with an order of its own": lambda: Reversed(Augmented(), BATCH),
    "a list": lambda: [torch.full((2,), index) for index in range(7)],
}  # fmt: skip
NOT_LOADED = ["shuffled", "own generator", "a sampler that draws", "accelerate", "fabric", "timm, epochs, one process"]


@pytest.fixture(autouse=True)
def one_process() -> None:
    Accelerator(cpu=True)


def made(name: str) -> Any:
    """By a script that has seeded its generators."""
    torch.manual_seed(8)
    return LOADERS[name]()


def script(loader: Any, *, target: Position | None = None, group: int | None = None) -> list[list[Any]]:
    """What a script gets in each pass, and what it draws itself; of a replacement, from *target* on."""
    seeds = Seeds("iteration", 5, 1)
    seeds.settle()
    seeds.common = 77
    place = Place(1, seeds, threading.RLock())
    place.target, place.target_units = target, Units(2)
    place.point = SimpleNamespace(restore=lambda: None, restore_generators=lambda: None)  # type: ignore[assignment]
    running: Any = SimpleNamespace(at_point=lambda: None)
    inputs = Inputs(place, None, None, print, pytest.fail)
    passes = Passes(place, running, Draws(place, print), inputs, lambda: None, 2, print)
    torch.manual_seed(1 if target is None else 2)
    got = []
    for _ in range(NUM_PASSES):
        got.append([])
        for batch in Batches[Any](passes, loader, group):
            got[-1].append((values(batch), torch.rand(1).item()))
            place.here.iteration += 1
            place.drawn = 0
    return got


def values(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [values(one) for one in batch] if isinstance(batch, (list, tuple)) else batch


@pytest.mark.parametrize("name", LOADERS)
def test_a_replacement_gets_the_same(name: str) -> None:
    whole = script(made(name))
    assert len(whole) == NUM_PASSES and all(whole), "not empty"
    last = len(whole[0]) - 1
    for number, batch in ((0, 2), (1, 1), (2, last)):
        target = Position(iteration=sum(map(len, whole[:number])) + batch, passes=number, batch=batch)
        rest = script(made(name), target=target)
        assert rest[:number] == [[]] * number
        assert rest[number] == whole[number][batch:], f"pass {number} from batch {batch} on"
        assert rest[number + 1 :] == whole[number + 1 :]


@pytest.mark.parametrize("name", NOT_LOADED)
def test_what_is_left_out_is_not_loaded(name: str) -> None:
    loader = made(name)
    script(loader, target=Position(passes=2, batch=5))
    assert len(loader.dataset.loaded) < BATCH * 4


def test_each_pass_is_another_one() -> None:
    for name in ("shuffled", "own generator", "accelerate", "accelerate, seedable", "fabric", "timm, epochs"):
        first, second, third = script(made(name))
        orders = [[batch[0][0] for batch in batches] for batches in (first, second, third)]
        assert orders[0] != orders[1] != orders[2] != orders[0], name


def test_the_first_pass_with_a_generator_is_that_without_a_job() -> None:
    alone = [batch[0].tolist() for batch in plain(shuffle=True, generator=seeded())]
    assert [batch[0][0] for batch in script(plain(shuffle=True, generator=seeded()))[0]] == alone


class AllAtOnce(Augmented):
    """Its samples are loaded together, and it does not iterate over the indices."""

    def __getitems__(self, indices: Any) -> list[Any]:
        chosen = [indices[place] for place in range(len(indices))]
        return [(int(index), *draws) for index, *draws in zip(chosen, torch.rand(len(chosen)).tolist(), strict=True)]


class OfAnotherKind(BatchSampler):
    """Batches of another kind than lists."""

    def __init__(self, kind: Callable[[list[int]], Any]) -> None:
        super().__init__(range(NUM_SAMPLES), BATCH, False)
        self._kind = kind

    def __iter__(self) -> Iterator[Any]:
        return map(self._kind, super().__iter__())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: DataLoader(AllAtOnce(), BATCH, **options),
        lambda **options: DataLoader(Augmented(), batch_sampler=OfAnotherKind(tuple), **options),
        lambda **options: DataLoader(Augmented(), batch_sampler=OfAnotherKind(numpy.asarray), **options),
        lambda **options: DataLoader(Augmented(), batch_size=None, **options),
    ],
    ids=["all at once", "tuples", "arrays", "one by one"],
)
def test_a_replacement_loads_the_same_batch_whatever_kind_its_indices_have(make: Any, num_workers: int) -> None:
    def seventh(skip: int) -> Any:
        # What this process has drawn before is another thing in a replacement; a wrapper may look ahead in it.
        torch.manual_seed(skip)
        loader = make(num_workers=num_workers)
        if not num_workers:
            loader = prepare_data_loader(loader, num_processes=1, process_index=0)
        return list(Feeds().begin(loader, Pass(skip=skip, key=(1, 0))))[6 - skip]

    assert str(seventh(0)) == str(seventh(6))


def test_a_generator_that_the_script_seeds_itself_is_followed() -> None:
    def orders(first_epoch: int) -> list[Any]:
        generator, feeds, got = torch.Generator(), Feeds(), []
        loader = plain(shuffle=True, generator=generator)
        for epoch in range(first_epoch, 3):
            generator.manual_seed(epoch)
            got.append([batch[0].tolist() for batch in feeds.begin(loader, Pass(number=epoch))])
        return got

    whole = orders(0)
    assert orders(1) == whole[1:] and whole[1] != whole[2]


def test_accelerate_exchanges_nothing_and_shards_alike_on_all_ranks() -> None:
    """Each rank has a generator of its own until Accelerate has sent rank 0's to all; the job gives all the same."""
    samples: list[int] = []
    for rank in range(2):
        torch.manual_seed(rank)
        loader = prepare_data_loader(
            plain(shuffle=True), num_processes=2, process_index=rank, put_on_device=False, rng_types=["generator"])
        loader.rng_types = ["no such thing"]
        batches = Feeds().begin(loader, Pass(number=1, common_seed=3))
        samples += [index for batch in batches for index in batch[0].tolist()]
        assert loader.rng_types == ["no such thing"], "the loader is as it was"
    assert set(samples) == set(range(NUM_SAMPLES)) and len(samples) <= NUM_SAMPLES + 2


def test_what_rank_0_hands_out_is_refused() -> None:
    loader = prepare_data_loader(plain(), num_processes=1, process_index=0, put_on_device=True, dispatch_batches=True)
    with pytest.raises(UsageError, match=r"dispatch_batches=False"):
        Feeds().begin(loader, Pass())


def test_an_order_that_depends_on_the_time_is_refused() -> None:
    with pytest.raises(UsageError, match="in_order=False"):
        Feeds().begin(plain(num_workers=2, in_order=False), Pass())


def test_an_iterator_has_one_pass() -> None:
    feeds = Feeds()
    numbers = iter(range(9))
    assert list(feeds.begin(numbers, Pass(skip=2))) == [2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(UsageError, match="same iterator for a second pass"):
        feeds.begin(numbers, Pass(number=1))


def test_a_loader_that_the_script_lets_go_is_kept_by_nobody() -> None:
    """One for each epoch, gone through or not."""
    feeds, gone = Feeds(), []
    for number in range(3):
        loader = plain(shuffle=True, generator=seeded())
        stream = (one for one in range(4))
        gone += [weakref.ref(one) for one in (loader, loader.dataset, loader.generator, stream)]
        for source in (loader, stream):
            next(feeds.begin(source, Pass(number=number)))
        del loader, stream, source
    gc.collect()
    assert [one() for one in gone] == [None] * 12
    assert not feeds._orders and not feeds._generators._known


def test_a_long_way_to_its_place_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_agent.worker.data.positions.TELL_S", 0.0)
    told: list[tuple[int, int]] = []
    assert list(Feeds(lambda done, num: told.append((done, num))).begin([1, 2, 3, 4], Pass(skip=2))) == [3, 4]
    assert told == [(1, 2), (2, 2)]


def test_groups() -> None:
    whole = script(plain(shuffle=True), group=3)
    assert [len(group) for group, _ in whole[0]] == [3, 3, 2], "the last one is smaller"
    rest = script(plain(shuffle=True), target=Position(iteration=4, passes=1, batch=3), group=3)
    assert rest == [[], whole[1][1:], whole[2]]
