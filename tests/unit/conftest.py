"""What is wrapped in torch for the life of a worker is taken off after each test. Hypothesis looks at no clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings

# An example may take long where others have the processor.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    places = [(dist.ProcessGroup, name) for name in ("send", "recv", "recv_anysource")]
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    if schedules is not None:
        places.append((schedules.PipelineScheduleSingle, "_initialize_stage"))
        places.append((schedules.PipelineScheduleMulti, "_initialize_stages"))
    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    yield
    for owner, name, value in before:
        setattr(owner, name, value)
