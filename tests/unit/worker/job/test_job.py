"""What the script is told of its own position; what `track` sets for the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from swift_agent.errors import UsageError
from swift_agent.worker.job import restarts
from swift_agent.worker.job.job import Job, JobPosition
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.named import Named
from swift_agent.worker.tracked.position import Position
from swift_agent.worker.tracked.seeds import Seeds


def number(iteration: int, owed: bool, inside: str, dry_run: int | None = None) -> int:
    here = SimpleNamespace(iteration=iteration)
    place = SimpleNamespace(here=here, owed=object() if owed else None, inside=inside, dry_run=dry_run)
    return Job.iteration_number.__get__(cast(Job, SimpleNamespace(_place=place)))


def test_an_iteration_is_finished_when_its_function_has_returned() -> None:
    """Also where its update is still to come from a replica: what a script does every 100 iterations it does once, and
    on all ranks."""
    assert number(5, owed=False, inside="") == 5
    assert number(5, owed=True, inside="") == 6
    assert number(5, owed=True, inside="section") == 6
    # It has to be run for its effect after all: inside it is the one that it was.
    assert number(5, owed=True, inside="iteration") == 5
    # Run for its result only, when its update has been counted.
    assert number(6, owed=False, inside="", dry_run=5) == 5


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """One that tracks, no more."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    was, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    made = Job.__new__(Job)
    made._begun, made._named = False, Named()
    yield made
    torch.use_deterministic_algorithms(was)
    torch.backends.cudnn.benchmark = benchmark
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_what_is_not_deterministic_is_named(job: Job) -> None:
    model = nn.Linear(2, 2)
    torch.backends.cudnn.benchmark = True
    job.track(model=model)
    values = torch.zeros(4)
    values.put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))  # which one is last?
    job.track(deterministic=True)
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        values.put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and not torch.backends.cudnn.benchmark


def test_it_is_said_when_it_is_too_late_to_be_deterministic(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match="Set CUBLAS_WORKSPACE_CONFIG=:4096:8 where you start swift-run"):
        job.track(deterministic=True)
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    job.track(deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_loader_is_no_state_and_what_cannot_give_its_state_is_named(job: Job) -> None:
    """Accelerate's loaders have a state_dict that fails, unless it is a stateful loader that they are around."""
    loader = prepare_data_loader(DataLoader(TensorDataset(torch.zeros(4))), num_processes=1, process_index=0)
    job.track(model=nn.Linear(2, 2), loader=loader)
    assert not job._named.pending["others"]
    with pytest.raises(UsageError, match=r"DataLoaderShard whose state_dict\(\) fails \(AttributeError.*: leave it"):
        job.track(data=loader)


def looping(*, target: Position | None = None) -> Job:
    """One whose loop begins without groups."""
    place = Place(0, Seeds("user", 1, 0), threading.RLock())
    place.status = "fresh" if target is None else "empty"
    place.point = SimpleNamespace(restore=lambda: None, restore_generators=lambda: None)  # type: ignore[assignment]
    running: Any = SimpleNamespace(at_point=lambda: None, loop_is_over=lambda: None)
    made = Job(0, 0, 1, torch.device("cpu"), place, running, None)

    def begin() -> None:
        made._begun = True
        place.target, place.here = target, place.here if target is None else replace(target, batch=0, loop=0)

    made._begin = begin  # type: ignore[method-assign]
    return made


def test_a_start_says_that_the_script_may_have_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 0 that is all that is known: it may load one after a restart, or start over."""
    monkeypatch.setattr(restarts, "starts_over", lambda tracked: True)
    for name in ("epochs", "iterations"):
        for start, found in ((None, "at iteration 0, or with what"), (0, "the snapshot that the script loads then")):
            made = looping()
            next(getattr(made, name)(3, start=start))
            assert found in restarts.what_a_restart_begins_with(None, made._start)  # type: ignore[arg-type]
        made = looping()
        next(getattr(made, name)(3, start=1))
        assert not restarts.what_a_restart_begins_with(None, made._start)  # type: ignore[arg-type]


def taken(job: Job, numbers: Iterator[int]) -> list[int]:
    got = []
    for number in numbers:
        got.append(number)
        job._place.here.iteration += 1
    return got


def test_a_script_with_a_snapshot_of_its_own_begins_where_that_is() -> None:
    job = looping()
    assert taken(job, job.iterations(6, start=4)) == [4, 5]
    assert list(looping().epochs(5, start=3)) == [3, 4]
    replacement = looping(target=Position(iteration=5, epoch=4))
    assert replacement.is_replacement and replacement.position == JobPosition(5, 4, 0, 0)
    assert taken(replacement, replacement.iterations(6, start=2)) == [5], "the others are further"
    assert list(looping(target=Position(epoch=4, loop=1)).epochs(6, start=1)) == [4, 5]
    late = looping()
    late._begin()
    with pytest.raises(UsageError, match="it must come first"):
        next(late.iterations(6, start=4))


@pytest.mark.parametrize("group", [0, -1, True, 2.0])
def test_a_group_is_a_number_of_batches(group: Any) -> None:
    with pytest.raises(UsageError, match="is no number of batches of at least 1"):
        looping().batches([1], group=group)
