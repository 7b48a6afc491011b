"""Tracked objects of a script's own, after an iteration that was run for its result only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
from torch import nn

from swift_agent.worker.replicas.fingerprints import Fingerprints
from swift_agent.worker.tracked import others
from tests.support.alone_worker import AloneWorker


class Average:
    """Of the weights, in the form of diffusers' EMAModel, but that it begins with zeros."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [torch.zeros_like(parameter) for parameter in model.parameters()]

    @torch.no_grad()
    def step(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.shadow, model.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = [tensor.clone() for tensor in state["shadow"]]


class Numbers:
    """A mean of this rank's losses, or a schedule of the script's own."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


class Worker(AloneWorker):
    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        self.ema, self.losses, self.schedule, self.rank = Average(model), Numbers(), Numbers(), rank
        kept = {"ema": self.ema, "losses": self.losses, "schedule": self.schedule}
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), kept, rank)
        self.notes: list[str] = []
        cast(Any, self.supervisor).note = self.notes.append
        self.tracked.apart = frozenset({"losses"})

    def begin(self) -> None:
        self.place.keep_point()
        self.place.keep_start()
        self.tracked.begin(self.place.here.iteration)
        self.place.enter("iteration")

    def forward(self) -> None:
        self.losses.values.append(float(self.rank))
        self.model(torch.ones(4, 3)).sum().backward()

    def function(self, averages: bool) -> None:
        self.forward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if averages:
            self.ema.step(self.model)

    def iteration(self, *, averages: bool = True) -> None:
        self.begin()
        self.function(averages)
        self.loop.iterations.complete()

    def is_cut(self, *, averages: bool = True) -> None:
        """Before its step, when a replica has made it."""
        self.begin()
        self.forward()
        self.tracked.updates.cut()
        self.loop.iterations.over.run(lambda: self.function(averages))
        assert self.place.owed is not None

    def gets_update_of(self, source: Worker) -> None:
        outgoing = source.tracked.state.collect(source.place.offer())
        incoming = self.tracked.state.prepare(outgoing.manifest, staged=True)
        for mine, theirs in zip(incoming.tensors, outgoing.tensors, strict=True):
            mine.copy_(theirs)
        self.place.roll_forward(1, incoming.commit)

    def close(self) -> None:
        self.supervisor.close()
        self.agent.close()

    def average(self) -> list[list[float]]:
        return [tensor.flatten().tolist() for tensor in self.ema.shadow]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Worker, Worker]]:
    monkeypatch.setattr(nn.Module, "zero_grad", nn.Module.zero_grad)  # what iterations watch it by goes with them
    both = Worker(0), Worker(1)
    for worker in both:
        monkeypatch.setattr(worker.loop.recovery, "wait_quiet", lambda: None)
    yield both
    for worker in both:
        worker.close()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("stands", ["at its next point", "in its next iteration"])
def test_who_owes_an_update_gets_averages_with_it(workers: tuple[Worker, Worker], inside: bool, stands: str) -> None:
    """Worked out here from the weights before it, in the iteration or right after it. What the script counts, and what
    is each rank's own, stays as the script here has it."""
    owing, source = workers
    source.iteration(averages=inside)
    owing.is_cut(averages=inside)
    for worker in workers:
        if not inside:
            worker.ema.step(worker.model)
        worker.schedule.values.append(0.5)
    source.place.keep_point()
    if stands == "in its next iteration":
        source.schedule.values.append(0.25)  # its script has gone on from the point
        source.begin()
    assert owing.average() != source.average()
    owing.gets_update_of(source)
    assert owing.average() == source.average()
    assert owing.losses.values == [0.0] and owing.schedule.values == [0.5]
    print_of = [Fingerprints(worker.tracked.state).take().parts["object"]["ema"] for worker in workers]
    assert print_of[0] == print_of[1]


@pytest.mark.parametrize("stands", ["at the same point", "at the next one", "in its next iteration, without a point"])
def test_numbers_come_with_the_update_where_the_script_stands_at_the_same_place(
    workers: tuple[Worker, Worker], stands: str
) -> None:
    """A history of the norms of gradients, which alone are others; between two points the script counts in it, too."""
    owing, source = workers
    for worker in workers:
        worker.tracked.apart = frozenset()
    source.iteration()
    if stands.startswith("at"):
        source.place.keep_point()
    owing.is_cut()
    if stands == "at the next one":
        source.losses.values.append(0.5)
        source.place.here.epoch += 1
        source.place.keep_point()
    elif not stands.startswith("at"):
        source.place.keep_start()
    owing.gets_update_of(source)
    assert owing.average() == source.average()
    assert owing.losses.values == ([0.0] if stands == "at the next one" else [1.0])


def test_who_makes_the_iteration_after_all_keeps_the_average_of_that(workers: tuple[Worker, Worker]) -> None:
    owing, undisturbed = workers
    undisturbed.iteration()
    owing.is_cut()
    owing.schedule.values.append(0.5)
    assert owing.place.owed is not None
    owing.place.owed.run()
    assert owing.average() == undisturbed.average()
    assert owing.schedule.values == [0.5] and owing.losses.values == [0.0] and not owing.notes


def test_an_average_that_was_made_outside_of_the_iteration_is_told(workers: tuple[Worker, Worker]) -> None:
    owing, _ = workers
    owing.is_cut(averages=False)
    owing.ema.step(owing.model)
    assert owing.place.owed is not None
    owing.place.owed.run()
    (note,) = owing.notes
    assert "iteration 0 was made after all" in note and "in ema (of job.track())" in note


def test_all_that_can_be_sent_is_in_the_digest() -> None:
    def digest(state: Any) -> str:
        one: Any = SimpleNamespace(state_dict=lambda: state, load_state_dict=print)
        return others.digest_of(*others.contents(one))

    states = [
        {}, {"a": 1}, {"a": 2}, {"b": 1}, {"a": [1]}, {"a": [1, 2]}, {"a": [[1], 2]}, {"a": {1, 2}}, {"a": "1"},
        {"a": torch.ones(2)}, {"a": torch.zeros(2)}, {"a": torch.ones(1, 2)}, {"a": torch.ones(2, dtype=torch.int32)},
        {"a": numpy.ones(2)}, {"a": numpy.zeros(2)},
    ]  # fmt: skip
    assert len({digest(state) for state in states}) == len(states)
    assert digest({"a": 1, "b": torch.ones(2)}) == digest(OrderedDict(b=torch.ones(2), a=1))
    assert digest({"a": object()}) == digest({"a": object()})


def test_a_large_object_is_compared_part_by_part() -> None:
    one, other = Worker(0), Worker(1)
    one.ema.shadow, other.ema.shadow = [torch.ones(256) for _ in range(4)], [torch.ones(256) for _ in range(4)]
    other.ema.shadow[3][7] = 2.0
    both = [Fingerprints(worker.tracked.state) for worker in (one, other)]
    alike = []
    for _ in range(4):
        first, second = (each.take(max_bytes=2048).parts["object"]["ema"] for each in both)
        alike.append(first == second)
    assert alike == [True, False, True, False]
    for worker in (one, other):
        worker.close()
