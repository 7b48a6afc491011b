"""FSDP2 on a mesh of one dimension, so that nobody holds a shard twice, with snapshots of the script's own by
`torch.distributed.checkpoint`: the newest complete one is loaded. It may be killed while it writes one.
"""

from __future__ import annotations

from typing import Any

import hooks
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import swift_agent as swift

FOLDER = hooks.DIR / "snapshots"


class State:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Writer(dcp.FileSystemWriter):
    """Its rank may be lost when it has written its part, before the snapshot counts."""

    def __init__(self, number: int) -> None:
        super().__init__(FOLDER / str(number))
        self.number = number

    def write_data(self, *args: Any, **named: Any) -> Any:
        written = super().write_data(*args, **named)
        hooks.moment("after", self.number)
        return written


def main() -> None:
    hooks.begin()
    job = swift.init("gloo")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    start = max((int(path.parent.name) for path in FOLDER.glob("*/.metadata")), default=0)
    if start:
        dcp.load({"app": State(model, optimizer)}, checkpoint_id=FOLDER / str(start))
    job.track(model=model, optimizer=optimizer)

    @job.iteration
    def train() -> None:
        number = job.iteration_number
        loss = model(torch.randn(4, 8)).square().mean()
        hooks.moment("inside", number)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for i in job.iterations(12, start=start):
        hooks.moment("before", i)
        train()
        if (i + 1) % 4 == 0:
            dcp.save({"app": State(model, optimizer)}, storage_writer=Writer(i + 1))
    hooks.finish(job, model, optimizer)


if __name__ == "__main__":
    main()
