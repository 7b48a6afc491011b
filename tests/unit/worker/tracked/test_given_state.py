"""What a replacement was given is there again when its script has come to its place."""

from __future__ import annotations

import torch
from torch import nn

from swift_agent.worker.tracked.given_state import GivenState
from swift_recovery.state.training_state import TrainingState


def test_what_a_script_begins_anew_on_its_way_is_put_back() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 2).to(memory_format=torch.channels_last), nn.BatchNorm2d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 1, 3, 3)).sum().backward()
    optimizer.step()
    state = TrainingState({"net": model}, {"main": optimizer})
    before, checksum, weight = state.manifest(), [tensor.clone() for tensor in state.tensors()], model[0].weight
    given = GivenState(state)
    nn.init.zeros_(weight)
    model[1].reset_parameters()
    model(torch.randn(2, 1, 3, 3))
    optimizer.state.clear()
    optimizer.param_groups[0]["lr"] = 0.01
    assert state.manifest() != before
    given.put_back()
    assert model[0].weight is weight and state.manifest() == before
    assert all(map(torch.equal, state.tensors(), checksum))
