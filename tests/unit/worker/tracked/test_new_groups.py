"""Groups of an optimizer that no replacement could have are refused where the script adds them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from swift_agent.errors import UsageError
from swift_agent.worker.tracked.tracked import Tracked


def test_a_group_that_is_added_while_it_trains_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": [model[0].bias]})  # the set-up may
    Tracked({"models": {"m": model}, "optimizers": {"o": optimizer}, "others": {}}, [0], 1, None)
    with pytest.raises(UsageError, match="optimizer 'o' gets another group of parameters while it trains"):
        optimizer.add_param_group({"params": [model[0].weight]})
    assert len(optimizer.param_groups) == 2


def test_what_a_script_does_with_the_optimizer_besides_goes_on() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    Tracked({"models": {"m": model}, "optimizers": {"o": optimizer}, "others": {}}, [0], 1, None)
    optimizer.load_state_dict(optimizer.state_dict())
    for another in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        another.add_param_group({"params": [nn.Parameter(torch.ones(2))]})  # that one is not tracked
        assert len(another.param_groups) == 2
