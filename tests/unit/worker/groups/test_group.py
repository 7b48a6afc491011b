"""What is remembered of process groups."""

from __future__ import annotations

import os

import pytest

from swift_agent.wire.environment import worker_env
from swift_agent.worker.groups.group import kinds_of
from tests.unit.wire.test_environment import PLACE

ERRORS, MONITORING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [({}, ("0", "0")), ({ERRORS: "1"}, ("0", "0")), ({ERRORS: "3", MONITORING: "1"}, ("3", "1"))],
    ids=["nothing", "torchrun's default", "something"],
)
def test_nccl_ends_no_survivor(
    wanted: dict[str, str], found: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a worker's environment as our agent makes it; what the user wants is respected."""
    monkeypatch.setattr(os, "environ", worker_env(PLACE, 0, wanted))
    kinds_of("gloo")
    assert os.environ[ERRORS] == wanted.get(ERRORS, "1")
    assert kinds_of("cpu:gloo,cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    assert (os.environ[ERRORS], os.environ[MONITORING]) == found
