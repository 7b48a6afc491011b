"""State that an optimizer makes in its first step is looked at after that, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from swift_agent.errors import UsageError
from swift_agent.worker.tracked.refusals.first_steps import FirstSteps
from swift_recovery.state.training_state import TrainingState


class Projecting(torch.optim.SGD):
    """As GaLore: an object in its state, made when there is a gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["projector"] = self


def test_an_object_in_the_state_is_told_after_the_first_step_of_its_optimizer() -> None:
    first, late = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizers = {"first": torch.optim.Adam(first.parameters()), "late": Projecting(late.parameters(), lr=0.1)}
    looks = FirstSteps(TrainingState({"a": first, "b": late}, optimizers))
    assert looks.look(), "nobody has made a step"
    first(torch.ones(2)).backward()
    optimizers["first"].step()
    assert looks.look() and not optimizers["first"]._optimizer_step_post_hooks, "and costs nothing any more"
    late(torch.ones(2)).backward()
    optimizers["late"].step()
    with pytest.raises(UsageError, match=r"optimizer 'late': its state of b\.weight: projector: object of type .*Proj"):
        looks.look()
    assert not looks.look()
