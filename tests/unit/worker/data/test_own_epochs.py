"""The epochs that a script tells its samplers: they are kept, and say where a loop without `job.epochs` stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

from swift_agent.worker.data import own_epochs
from swift_agent.worker.data.batches import Looping, Passes
from swift_agent.worker.tracked.position import Position
from tests.unit.worker.data.test_inputs import Script

NUM_BATCHES = 3


@pytest.fixture(autouse=True)
def watched() -> None:
    own_epochs.watch()


def make_loader() -> DataLoader[Any]:
    data = TensorDataset(torch.arange(2 * NUM_BATCHES))
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=1, rank=0))


class Loop:
    """A trainer as tutorials have it: it looks at a batch, tells the sampler the epoch, trains, validates, saves."""

    def __init__(self, target: Position | None = None, *, peeks: bool = True, first_told: int = 0) -> None:
        self.script = Script(target=None if target is None else replace(target))
        self.elsewhere: list[str] = []
        place, passes = self.script.place, self.script.passes
        if target is not None:  # as `Place.take_over` does
            place.here = replace(
                target, passes=target.epoch_passes, sections=target.epoch_sections, batch=0, peeks=()
            )
            place.is_before_epoch = target.is_told
        passes._elsewhere = self.elsewhere.append
        self.loader, self.validation = make_loader(), make_loader()
        self.train: Any = Looping(passes, self.loader, None)
        self.peeks, self.first_told = peeks, first_told
        self.given: list[tuple[int, int, list[int]]] = []  # iteration, epoch, samples
        self.peeked: list[int] = []
        self.at: list[Position] = []  # where a replacement would begin, before each iteration

    def run(self, epochs: Iterable[int], stop_after: int | None = None) -> Loop:
        here = self.script.place.here
        for epoch in epochs:
            if self.peeks:
                self.peeked.append(len(next(iter(self.train))[0]))
            self.loader.sampler.set_epoch(epoch + self.first_told)  # type: ignore[attr-defined]
            for (samples,) in self.train:
                self.at.append(replace(here, batch=here.batch - 1))
                self.given.append((here.iteration, epoch, samples.tolist()))
                self.script.iterate(lambda samples: None, samples)
                if here.iteration == stop_after:
                    return self
            for _ in self.script.batches(self.validation):
                pass
        return self


def expected(epoch: int) -> list[list[int]]:
    loader = make_loader()
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    return [samples.tolist() for (samples,) in loader]


class Repeated(Sampler[int]):
    """Repeated augmentation as DeiT and torchvision's references have it: not a `DistributedSampler`."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        return iter(torch.randperm(self.size, generator=generator).tolist())

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_sampler_of_the_scripts_own_keeps_its_epoch_and_says_where_the_loop_stands() -> None:
    def loop(place: Position | None = None) -> Loop:
        made = Loop(place, peeks=False)
        made.loader = DataLoader(made.loader.dataset, batch_size=2, sampler=Repeated(2 * NUM_BATCHES))
        made.train = Looping(made.script.passes, made.loader, None)
        return made

    whole = loop().run(range(1, 4))
    sampler = Repeated(2 * NUM_BATCHES)
    sampler.set_epoch(1)
    assert [i for _, epoch, samples in whole.given if epoch == 1 for i in samples] == list(sampler)
    for place, (iteration, epoch, _) in zip(whole.at, whole.given, strict=True):
        assert loop(place).run(range(epoch, 4)).given == whole.given[iteration:]


@pytest.mark.parametrize("first_told", [0, 1])
@pytest.mark.parametrize("peeks", [False, True])
def test_the_order_of_an_epoch_is_what_the_script_has_told(peeks: bool, first_told: int) -> None:
    """However many passes lie in between."""
    loop = Loop(peeks=peeks, first_told=first_told).run(range(3))
    assert [samples for _, _, samples in loop.given] == [
        samples for epoch in range(3) for samples in expected(epoch + first_told)
    ]


@pytest.mark.parametrize("peeks", [False, True])
@pytest.mark.parametrize("snapshot", [0, 1, 2])
def test_a_loop_that_begins_with_a_snapshot_of_its_own_finds_its_place(peeks: bool, snapshot: int) -> None:
    """`for epoch in range(snapshot, 4)`, where all others have begun with 0."""
    whole = Loop(peeks=peeks).run(range(4))
    for place, (iteration, epoch, _) in zip(whole.at, whole.given, strict=True):
        if epoch < snapshot:
            continue
        replacement = Loop(place, peeks=peeks).run(range(snapshot, 4))
        assert replacement.given == whole.given[iteration:] and not replacement.elsewhere
        told = [note for note in replacement.script.notes if f"skips the training of epochs before {epoch}" in note]
        assert len(told) == (epoch > snapshot)
        assert replacement.peeked == [2] * (4 - snapshot) * peeks
        assert replace(replacement.at[-1], peeks=()) == replace(whole.at[-1], peeks=())


def test_a_counter_of_batches_that_begins_with_the_position_is_right_in_a_replacement() -> None:
    """`for i, batch in enumerate(job.batches(loader), start=job.position.batch)`."""

    def counted(loop: Loop) -> dict[int, int]:
        found = {}
        place, train = loop.script.place, loop.train

        class Counting:
            def __iter__(self) -> Iterator[Any]:
                for number, batch in enumerate(train, start=(place.target or place.here).batch):
                    found[place.here.iteration] = number
                    yield batch

        loop.train = Counting()
        loop.run(range(3))
        return found

    whole = Loop(peeks=False)
    numbers = counted(whole)
    assert list(numbers.values()) == [*range(NUM_BATCHES)] * 3
    for place, (iteration, _, _) in zip(whole.at, whole.given, strict=True):
        assert counted(Loop(place, peeks=False)) == {at: n for at, n in numbers.items() if at >= iteration}


def test_a_snapshot_that_is_newer_than_the_place_of_the_loop_is_told() -> None:
    place = Loop().run(range(4), stop_after=NUM_BATCHES + 1).at[-1]
    replacement = Loop(place, peeks=False)
    sampler: Any = replacement.loader.sampler
    sampler.set_epoch(2)
    next(iter(replacement.train), None)
    assert "begins with epoch 2, and has to go on in epoch 1" in replacement.elsewhere[0]


def test_numbers_in_no_order_say_nothing_of_the_place() -> None:
    loop = Loop(peeks=False).run([0, 5, 3])
    assert not any(place.is_told for place in loop.at[2 * NUM_BATCHES :])
    place, (iteration, _, _) = loop.at[-1], loop.given[-1]
    assert Loop(place, peeks=False).run([0, 5, 3]).given == loop.given[iteration:]


def test_a_batch_that_is_only_looked_at_is_there_in_a_replacement() -> None:
    """`next(iter(loader))` in an epoch of `job.epochs`, in which others have looked at it."""
    script = Script()
    script.passes.has_epochs = True
    looked: Any = Looping(script.passes, make_loader(), None)

    def epoch(script: Script, looked: Any) -> Iterator[list[int]]:
        assert len(next(iter(looked))[0]) == 2
        for (samples,) in looked:
            yield samples.tolist()
            script.iterate(lambda samples: None, samples)

    seen, at = [], []
    for samples in epoch(script, looked):
        at.append(replace(script.place.here, batch=script.place.here.batch - 1))
        seen.append(samples)
    assert asdict(at[-1])["peeks"] == (0,) and at[-1].passes == 1
    replacement = Script(target=at[-1])
    replacement.passes.has_epochs = True
    assert list(epoch(replacement, Looping(replacement.passes, make_loader(), None))) == seen[-1:]
    # A loop that is left early is no look: the others have been through it.
    left = Script(target=Position(iteration=1, passes=1))
    assert [batch for batch in left.batches(make_loader())] == []


def test_what_libraries_tell_their_samplers_is_not_the_scripts() -> None:
    loader, code = make_loader(), "def tell(sampler): sampler.set_epoch(7)"
    for name, told in (("accelerate.data_loader", None), ("trainer", 7)):
        namespace: dict[str, Any] = {"__name__": name}
        exec(code, namespace)
        namespace["tell"](loader.sampler)
        assert own_epochs.of_loader(loader) == told
    with own_epochs.not_the_script():
        loader.sampler.set_epoch(8)  # type: ignore[attr-defined]
    assert own_epochs.of_loader(loader) == 7
    assert isinstance(Script().passes, Passes)
