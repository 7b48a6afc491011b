"""What `job.track()` collects over several calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from swift_agent.errors import UsageError
from swift_agent.worker.tracked.named import Named


class Meter:
    """Any object with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"seen": 0}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def name(into: Named, **given: Any) -> None:
    kinds = ("model", "optimizer", "scheduler", "loader", "scaler")
    others = {key: value for key, value in given.items() if key not in kinds}
    into.add(
        *(given.get(kind) for kind in kinds), others, replicas=None, overlap_update=False, exact=False,
        log_messages=None,
    )  # fmt: skip


def test_a_name_is_that_of_one_object() -> None:
    """The networks of a GAN, one call for each: the first would be forgotten."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
    schedulers = [StepLR(one, 1) for one in optimizers]
    into = Named()
    name(into, model=first, optimizer=optimizers[0], scheduler=schedulers[0], meter=Meter())
    for again, what in (
        ({"model": second, "optimizer": optimizers[1]}, r'model was another Linear.*job\.track\(model=\{"a": \.\.\.'),
        ({"optimizer": optimizers[1]}, "optimizer was another SGD"),
        ({"scheduler": schedulers[1]}, "scheduler was another StepLR"),
        ({"meter": Meter()}, "meter was another Meter"),
    ):
        with pytest.raises(UsageError, match=what):
            name(into, **again)
    assert into.pending["models"] == {"model": first} and into.pending["optimizers"] == {"optimizer": optimizers[0]}
    name(into, model={"d": second}, optimizer={"d": optimizers[1]}, scheduler={"d": schedulers[1]})
    assert list(into.pending["models"]) == ["model", "model.d"]
    with pytest.raises(UsageError, match=r'model\.d was another Linear.*job\.track\(model=\{"a"'):
        name(into, model={"d": nn.Linear(2, 1)})


def test_the_same_may_be_named_again() -> None:
    """Also in a wrapper, or out of it."""
    model, meter = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), Meter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    into = Named()
    for _ in range(2):
        name(into, model=model, optimizer=optimizer, meter=meter, loader=meter)
    wrapped = nn.DataParallel(model)
    name(into, model=wrapped)
    assert into.pending["models"]["model"] is wrapped
