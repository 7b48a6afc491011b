"""What the script is told of its own position; what `track` sets for the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from swift_agent.errors import UsageError
from swift_agent.session import Job


def number(iteration: int, owed: bool, inside: str) -> int:
    place = SimpleNamespace(here=SimpleNamespace(iteration=iteration), owed=object() if owed else None, inside=inside)
    return Job.iteration_number.__get__(cast(Job, SimpleNamespace(_place=place)))


def test_an_iteration_is_finished_when_its_function_has_returned() -> None:
    """Also where its update is still to come from a replica: what a script does every 100 iterations it does once, and
    on all ranks."""
    assert number(5, owed=False, inside="") == 5
    assert number(5, owed=True, inside="") == 6
    assert number(5, owed=True, inside="section") == 6
    # It has to be run for its effect after all: inside it is the one that it was.
    assert number(5, owed=True, inside="iteration") == 5


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """One that tracks, no more."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    was, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    made = Job.__new__(Job)
    made._begun = made._is_stage = made._overlap_update = made._exact = False
    made._log_messages = made._replicas = None
    made._pending = {"models": {}, "optimizers": {}, "others": {}}
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
