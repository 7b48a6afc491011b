"""What a rank says of what it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from swift_agent.worker.replicas.fingerprints import Fingerprints
from swift_recovery.state.training_state import TrainingState


def test_lists_of_tensors_and_what_belongs_to_no_parameter_are_in_it() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prints = Fingerprints(TrainingState({"m": model}, {"o": optimizer}))
    plain = prints.take(whole=True)
    assert not plain.parts["state"]
    entry: dict[str, Any] = {"GG": [torch.zeros(3, 3), 7], "exp_avg": torch.zeros(9)}
    optimizer.state[model.weight] = entry
    optimizer.state["k"] = 4
    before = prints.take(whole=True)
    names = ["GG[0] of m.weight (o)", "GG[1] of m.weight (o)", "exp_avg of m.weight (o)", "k of o"]
    assert sorted(before.parts["state"]) == names and before.shown["state k of o"] == "4"
    entry["GG"][0].add_(1)
    assert prints.take(whole=True).digest() != before.digest()
    entry["GG"][0].sub_(1)
    assert prints.take(whole=True).digest() == before.digest()
    optimizer.state["k"] = 5
    assert prints.take(whole=True).digest() != before.digest()
