"""One rank of tests/integration/test_replica_transfer.py: ``replica_worker.py SCENARIO RANK WORLD_SIZE STORE_FILE``.

Rank 0 is the source, rank 1 a replacement, rank 2 a survivor that is behind. Prints one JSON line: what it found.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from swift_recovery.state.checksum import checksum
from swift_recovery.state.snapshots.snapshot import Snapshot
from swift_recovery.state.training_state import TrainingState
from swift_recovery.transfer.replica import GroupLink, Pending, receive_state, send_state

# Small, so that the small model needs several chunks of both kinds.
CHUNK_BYTES = 64 << 10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40)))
        self.wide = nn.Linear(8, 9000)
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wide(self.layers(self.norm(self.conv(x)).mean((2, 3))))
        return out


class Worker:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.state = TrainingState({"model": self.model}, {"optimizer": self.optimizer}, {"scheduler": self.scheduler})
        self.snapshot = Snapshot(self.state)

    def train(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(5)
        for _ in range(steps):
            self.model(torch.randn(4, 3, 6, 6, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()


class DyingLink(GroupLink):
    """Kills its own process before the message of number *last*."""

    left = 5

    def send(self, tensor: Tensor) -> Pending:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().send(tensor)


def copy(rank: int, group: Any) -> dict[str, Any]:
    """Source at step 3 -> replacement (not staged) and survivor at step 2 (staged); then all go on alike."""
    torch.manual_seed(rank)
    # One with the wrapper, in a group of its own, the others without: names must not depend on it.
    alone = dist.new_group([2])
    net = Net()
    worker = Worker(DistributedDataParallel(net, process_group=alone) if rank == 2 else net)
    worker.train({0: 3, 1: 0, 2: 2}[rank])
    worker.snapshot.take(rng=True)
    if rank == 0:
        links = [GroupLink(group, peer) for peer in (1, 2)]
        extra: Any = {"snapshot": worker.snapshot.tree(), "iteration": 3}
        num_bytes = send_state(worker.state, extra, links, chunk_bytes=CHUNK_BYTES)
        draw = torch.rand(2).tolist()
    else:
        extra = receive_state(worker.state, GroupLink(group, 0), staged=rank == 2)
        worker.snapshot.install(extra["snapshot"])
        num_bytes, draw = -1, torch.rand(2).tolist()
    after_copy = checksum(worker.state.tensors())
    worker.train(2)
    return {
        "iteration": extra["iteration"],
        "bytes": num_bytes,
        "copied": after_copy,
        "trained": checksum(worker.state.tensors()),
        "lr": worker.optimizer.param_groups[0]["lr"],
        "draw": draw,
    }


def cut(rank: int, group: Any) -> dict[str, Any]:
    """The source dies in the middle; a staged survivor must be whole."""
    torch.manual_seed(rank)
    worker = Worker(Net())
    worker.train(2)
    before = checksum(worker.state.tensors()), worker.scheduler.state_dict()
    if rank == 0:
        send_state(worker.state, None, [DyingLink(group, 1)], chunk_bytes=CHUNK_BYTES)
        return {"error": None}
    try:
        receive_state(worker.state, GroupLink(group, 0), staged=True)
    except RuntimeError as error:
        whole = (checksum(worker.state.tensors()), worker.scheduler.state_dict()) == before
        return {"error": str(error), "whole": whole}
    return {"error": None}


def speed(rank: int, group: Any) -> dict[str, Any]:
    """96 MB, half of it in large tensors and half in small ones."""
    model = nn.ModuleList([nn.Linear(2048, 3072, bias=False), nn.Linear(2048, 3072, bias=False)])
    model.extend(nn.Linear(128, 128, bias=False) for _ in range(768))
    state = TrainingState({"model": model})
    best_s = float("inf")
    for _ in range(3):
        dist.barrier()
        start_s = time.perf_counter()
        if rank == 0:
            num_bytes = send_state(state, None, [GroupLink(group, 1)])
        else:
            receive_state(state, GroupLink(group, 0), staged=False)
            num_bytes = 0
        best_s = min(best_s, time.perf_counter() - start_s)
    return {"seconds": best_s, "bytes": num_bytes, "sum": checksum(state.tensors())}


def main() -> None:
    scenario, rank, world_size, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    found = {"copy": copy, "cut": cut, "speed": speed}[scenario](rank, dist.group.WORLD)
    if scenario == "copy":
        # Nobody leaves while another may still read from it.
        dist.barrier()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
