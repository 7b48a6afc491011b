"""Iterations in which some of the tracked optimizers make no step are told once."""

from __future__ import annotations

import socket

import pytest
import torch
from torch import nn

from swift_agent.wire.channel import WorkerChannel
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.tracked.tracked import Tracked


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_that_means_for_a_failure_is_told_once(rank: int, world_size: int) -> None:
    """By one of the replicas. Where ranks hold different parts nobody takes such a step back."""
    ours, theirs = socket.socketpair()
    supervisor = Supervisor(WorkerChannel(ours), 0)
    lines: list[str] = []
    supervisor.note = lines.append  # type: ignore[assignment]
    models = {name: nn.Linear(2, 1) for name in ("coder", "critic")}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    pending = {"models": models, "optimizers": optimizers, "others": {}}
    tracked = Tracked(pending, [0, 1], world_size, supervisor, rank=rank)
    tracked.updates._agree = tracked.updates._agree and (lambda: None)
    told_after = []
    for number, names in enumerate([("coder", "critic"), (), ("coder",), ("critic",), ("coder", "critic")]):
        tracked.begin(number)
        for model in models.values():
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
        for name in names:
            optimizers[name].step()
        tracked.updates.join_agreement()
        tracked.check_repeatable()
        tracked.updates.finish()
        told_after.append(len(lines))
    assert told_after == ([0, 0, 1, 1, 1] if rank == 0 else [0] * 5)
    for line in lines:
        assert line.startswith("an iteration has ended with a step of 'coder', without one of 'critic': ")
        assert ("is copied before it" in line) == (world_size == 2) and "may restart all workers" in line
        assert ". One optimizer with the parameters of all makes one step" in line
    supervisor.close()
    theirs.close()
