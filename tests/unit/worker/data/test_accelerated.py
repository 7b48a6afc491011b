"""Accelerate's `accumulate()` in iterations: one update of each group, decided the same in every run of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from swift_agent.worker.data import accelerated
from swift_agent.worker.data.draws import Draws, Group
from swift_agent.worker.job.job import Job
from swift_agent.worker.loop.unprotected import Unprotected
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.seeds import Seeds
from swift_agent.worker.updates import left_behind

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import GradientAccumulationPlugin


@pytest.fixture(autouse=True)
def _no_accelerator_is_left() -> Iterator[None]:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    original = Accelerator._do_sync
    yield
    Accelerator._do_sync = original
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def place_of() -> Place:
    return Place(0, Seeds("iteration", 3, 0), threading.RLock())


def watched(place: Place) -> Draws:
    draws = Draws(place, lambda batch: None)
    accelerated.watch(draws, place)
    return draws


def calls(accelerator: Accelerator, num: int) -> Callable[[], list[bool]]:
    def run() -> list[bool]:
        found = []
        for _ in range(num):
            with accelerator.accumulate():
                found.append(accelerator.sync_gradients)
        return found

    return run


@pytest.mark.parametrize("num_batches", [6, 7, 8])
def test_a_group_is_one_update_also_the_last_of_a_pass(num_batches: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    net = nn.Linear(2, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    data = torch.utils.data.DataLoader(torch.ones(num_batches, 2), batch_size=1)
    model, optimizer, loader, scheduler = accelerator.prepare(net, inner, data, schedule)
    place = place_of()
    job = Job(0, 0, 1, torch.device("cpu"), place, Unprotected(place), None)
    job.track(model=model, optimizer=optimizer, scheduler=scheduler)
    synced: list[list[bool]] = []

    @job.iteration
    def train(group: list[Any]) -> None:
        synced.append([])
        for batch in group:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                synced[-1].append(accelerator.sync_gradients)

    for _ in job.epochs(2):
        for group in job.batches(loader, group=3):
            train(group)
    sizes = [min(3, num_batches - at) for at in range(0, num_batches, 3)] * 2
    assert synced == [[False] * (size - 1) + [True] for size in sizes]
    assert scheduler.get_last_lr() == [0.1 * 0.5 ** len(sizes)]


def test_another_run_decides_the_same() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    draws = watched(place_of())
    iteration = draws.remembered(calls(accelerator, 2))
    assert iteration() == iteration() == [False, False]
    assert accelerator.step == 2
    draws.note(Group(3, 3))
    grouped = draws.remembered(calls(accelerator, 3))
    assert grouped() == grouped() == [False, False, True]


def test_a_run_that_was_cut_is_gone_on_with() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    draws = watched(place_of())
    draws.note(Group(2, 3))
    num = [1]
    iteration = draws.remembered(lambda: calls(accelerator, num[0])())
    assert iteration() == [False]
    num[0] = 2
    assert iteration() == [False, True]


def test_other_numbers_and_other_places_are_accelerates_own() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    draws = watched(place_of())
    draws.note(Group(2, 2))
    assert draws.remembered(calls(accelerator, 4))() == [False, False, True, False]
    accelerator.step = 0
    assert calls(accelerator, 3)() == [False, False, True], "between iterations"
    draws.note(Group(3, 3))
    accelerator.step = 1
    assert draws.remembered(calls(accelerator, 2), is_section=True)() == [False, True]


def test_the_rest_of_a_pass_waits_for_the_next_one_where_the_script_says_so() -> None:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    draws = watched(place_of())
    draws.note(Group(1, 3))
    assert draws.remembered(calls(accelerator, 1))() == [False]


def test_a_replacement_counts_from_where_its_predecessor_was() -> None:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    place = place_of()
    draws = watched(place)
    place.here.iteration, place.here.batch = 9, 2  # it is about to use the second batch of a pass
    assert [draws.remembered(calls(accelerator, 1))() for _ in range(3)] == [[False], [True], [False]]


@pytest.mark.parametrize(("each", "num_ranks", "leaves"), [(False, 2, 3), (True, 2, 0), (False, 1, 0)])
def test_a_call_leaves_gradients_of_one_rank(
    each: bool, num_ranks: int, leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=each)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    monkeypatch.setattr(Accelerator, "use_distributed", num_ranks > 1)
    place = place_of()
    draws = watched(place)
    found = []
    for _ in range(3):
        draws.remembered(calls(accelerator, 1))()
        found.append(place.leaves)
    assert found == [leaves, leaves, 0]
    assert "group=3" in left_behind.why_not(3)
