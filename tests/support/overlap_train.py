"""The training script of test_overlap: updates overlap the backward, and ranks die between two chosen buckets of one.

Orders, as JSON in $FAULT_ORDERS: {"dir", "optimizer", "overlap", "exact", "iterations", "noise", "sets", "device",
"backend", "faults": [{"iteration", "victim", "bucket", "refused": {rank: buckets}, "then": rank, "verify": rank}]}. In
that iteration the victim kills itself when it is about to reduce its bucket number *bucket* (`BUCKETS`: after the
backward; `AGREED`: when all are through), once every other rank has updated all earlier ones but its refused ones, and
ranks that hold another part of the model than it have updated all; the refused ones a rank finds stopped. *sets*: ranks
0 and 2 hold one half of each layer, as tensor parallelism splits it, and 1 and 3 the other. *then*: that rank kills
itself in the recovery, after it has undone what it had to, or has got the first parameters from another rank. *verify*:
that rank kills itself when all have the state again. *noise*: a replacement sees other data in the iteration that is
repeated.

Leaves `result.{rank}.json`: hash of the state at the end, pid, iterations, and for each fault, on a survivor,
`exact`: whether the iteration began again with the same bits, `excess`: by how much the parameters differ beyond the
bound of an undo, `changed`: which ones differ at all, and `made`: which ones the repeated iteration has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import swift_agent as swift
from swift_agent.worker.rejoin.rejoin import Rejoin
from swift_agent.worker.updates.overlapped import OverlappedUpdates
from swift_recovery.undo.lamb import Lamb
from tests.support.split_layers import Sum

ORDERS = json.loads(os.environ["FAULT_ORDERS"])
DIR = Path(ORDERS["dir"])
RANK = int(os.environ["RANK"])
DEVICE = torch.device(ORDERS.get("device", "cpu"))
BUCKETS, STEPS = 3, 5  # of a backward; between changes of the learning rate
AGREED = BUCKETS + 1
UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2
now: dict[str, Any] = {"iteration": -1, "bucket": 0, "buckets": {}, "fault": None}


def fault_of(iteration: int) -> tuple[int, dict[str, Any]] | None:
    """The fault of this iteration, if it is still to come."""
    for index, order in enumerate(ORDERS.get("faults", ())):
        if order["iteration"] == iteration and not (DIR / f"fired.{index}").exists():
            return index, order
    return None


def wait_until(condition: Any) -> None:
    deadline_s = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline_s, "what this rank waits for does not come"
        time.sleep(0.001)


class HeardLate:
    """*work*, a reduction, of whose end this rank hears when it is *stopped*, in a thread that has nothing else to do:
    what follows a reduction that is done at once runs in the thread of the backward, which has to go on here."""

    def __init__(self, work: Any, stopped: Callable[[], bool]) -> None:
        self._work, self._stopped = work, stopped

    def get_future(self) -> torch.futures.Future[Any]:
        late: torch.futures.Future[Any] = torch.futures.Future()

        def tell() -> None:
            try:
                value = self._work.get_future().wait()
                wait_until(self._stopped)
            except Exception as error:  # whatever it is: the backward waits for the future
                late.set_exception(error)
            else:
                late.set_result(value)

        threading.Thread(target=tell, daemon=True).start()
        return late


def refused(order: dict[str, Any], rank: int) -> list[int]:
    buckets: list[int] = order.get("refused", {}).get(str(rank), [])
    return buckets


def is_refused(bucket: int) -> bool:
    return now["fault"] is not None and bucket in refused(now["fault"][1], RANK)


def die_if_due(bucket: int) -> None:
    if now["fault"] is None:
        return
    index, order = now["fault"]
    if order["victim"] != RANK or order["bucket"] != bucket:
        return
    for rank in set(range(int(os.environ["WORLD_SIZE"]))) - {RANK}:
        complete = ORDERS.get("sets") and rank % 2 != RANK % 2
        for earlier in set(range(BUCKETS if complete else min(bucket, BUCKETS))) - set(refused(order, rank)):
            wait_until((DIR / f"updated.{now['iteration']}.{rank}.{earlier}").exists)
    (DIR / f"fired.{index}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def arm() -> None:
    reduce, update, all_reduce = OverlappedUpdates._reduce, OverlappedUpdates._update, dist.all_reduce
    join = OverlappedUpdates.join_agreement
    take_back, install, compare = OverlappedUpdates.take_back, OverlappedUpdates.install, Rejoin._compare

    def armed_reduce(self: OverlappedUpdates, ddp: Any, bucket: Any) -> Any:
        number = now["bucket"]
        die_if_due(number)
        now["buckets"][id(bucket.parameters()[0])] = number
        now["bucket"] += 1
        held = self._reductions is None and is_refused(number)

        def late_all_reduce(*args: Any, **options: Any) -> HeardLate:
            return HeardLate(all_reduce(*args, **options), lambda: self._fence.interrupted)

        dist.all_reduce = late_all_reduce if held else all_reduce
        try:
            return reduce(self, ddp, bucket)
        finally:
            dist.all_reduce = all_reduce

    def armed_update(self: OverlappedUpdates, attempt: int, pairs: Any, future: Any) -> Any:
        future.value()  # as the original does first: a reduction that failed raises
        if not pairs:  # its update was made before the iteration was cut
            return update(self, attempt, pairs, future)
        number = now["buckets"][id(self.members[pairs[0][0]].parameter)]
        if self._reductions is not None and is_refused(number):  # a device's reductions have a thread of their own
            wait_until(lambda: self._fence.interrupted)
        result = update(self, attempt, pairs, future)
        (DIR / f"updated.{now['iteration']}.{RANK}.{number}").touch()
        return result

    def die_in_recovery(at: str) -> None:
        for order in ORDERS.get("faults", ()):
            marker = DIR / f"{at}.{order['iteration']}"
            # A rank that has the update stands at the next iteration.
            due = order.get(at) == RANK and now["iteration"] - order["iteration"] in (0, 1)
            if due and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def armed_take_back(self: OverlappedUpdates, numbers: Any) -> str:
        said = take_back(self, numbers)
        die_in_recovery("then")
        return said

    def armed_install(self: OverlappedUpdates, *args: Any, **options: Any) -> None:
        install(self, *args, **options)
        die_in_recovery("then")

    def armed_join(self: OverlappedUpdates) -> None:
        join(self)
        die_if_due(AGREED)

    def armed_compare(self: Rejoin, *args: Any) -> None:
        die_in_recovery("verify")
        compare(self, *args)

    OverlappedUpdates._reduce, OverlappedUpdates._update = armed_reduce, armed_update
    OverlappedUpdates.take_back, OverlappedUpdates.install = armed_take_back, armed_install
    OverlappedUpdates.join_agreement = armed_join
    Rejoin._compare = armed_compare


class Part(nn.Module):
    """Of a layer what takes half of its inputs. (The gradients of the other half are not summed up: this trains in its
    own way, but the same each time, and no rank waits for another part's in the backward.)"""

    def __init__(self, inputs: int, outputs: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, part = mesh["model"].get_group(), mesh.get_local_rank("model")
        self.columns = slice(part * inputs // 2, (part + 1) * inputs // 2)
        self.layer = nn.Linear(inputs // 2, outputs, bias=False)
        with torch.no_grad():
            self.layer.weight.mul_(1 + part)  # the parts differ

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Sum.apply(self.layer(x[:, self.columns]), self.group)
        return y


def split(net: nn.Module) -> tuple[nn.Module, DeviceMesh]:
    """Each rank holds its half of *net*, and the other dimension of the mesh is data parallel."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("data", "model"))
    return nn.Sequential(Part(16, 64, mesh), nn.Tanh(), Part(64, 64, mesh), nn.Tanh(), Part(64, 4, mesh)), mesh


def make_optimizers(net: nn.Module) -> list[torch.optim.Optimizer]:
    wide = [p for p in net.parameters() if p.ndim == 2]
    narrow = [p for p in net.parameters() if p.ndim != 2]
    kind = ORDERS["optimizer"]
    if kind == "sgd":
        return [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)]
    if kind == "adam":
        return [torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=1e-3)]
    if kind == "adamw":
        return [torch.optim.AdamW([{"params": wide}, {"params": narrow, "weight_decay": 0.0}], lr=1e-2)]
    if kind == "lamb":
        return [Lamb(net.parameters(), lr=1e-2)]
    assert kind == "muon"
    return [torch.optim.Muon(wide, lr=1e-2), torch.optim.SGD(narrow, lr=0.05, momentum=0.9)]


def main() -> None:
    torch.set_num_threads(1)
    if ORDERS["overlap"]:
        arm()
    job = swift.init(ORDERS.get("backend"))
    torch.manual_seed(7)
    net = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4),
    )  # fmt: skip
    if ORDERS.get("sets"):
        net, mesh = split(net)
        net.to(DEVICE)
        model = DistributedDataParallel(net, bucket_cap_mb=0.0004, process_group=mesh["data"].get_group())
    else:
        model = DistributedDataParallel(net.to(DEVICE), bucket_cap_mb=0.01)
    optimizers = make_optimizers(net)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, STEPS, 0.8) for optimizer in optimizers]
    job.track(
        model=model, optimizer=optimizers, scheduler=schedulers, overlap_update=ORDERS["overlap"],
        exact=ORDERS.get("exact", False),
    )  # fmt: skip
    before: dict[int, list[torch.Tensor]] = {}
    found: dict[int, dict[str, Any]] = {}

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        iteration = job.iteration_number
        now.update(iteration=iteration, bucket=0, buckets={}, fault=fault_of(iteration))
        values = [p.detach().clone() for p in net.parameters()]
        if not before and iteration > 0 and ORDERS.get("noise"):
            x = x + torch.arange(16.0)  # in here: what an iteration is given is watched
        again = before.get(iteration)
        before[iteration] = again or values
        loss = F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE))
        loss.backward()
        die_if_due(BUCKETS)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        if again is not None:
            bounds = [
                4 * UNIT_ROUNDOFF * (old.abs() + (p.detach() - old).abs())
                for old, p in zip(again, net.parameters(), strict=True)
            ]
            differences = [(old - value).abs() for old, value in zip(again, values, strict=True)]
            found[iteration] = {
                "exact": not any(bool(d.any()) for d in differences),
                "changed": [number for number, d in enumerate(differences) if bool(d.any())],
                "made": [number for number, (p, value) in enumerate(zip(net.parameters(), values, strict=True))
                         if not torch.equal(p, value)],
                "excess": max(float((d - b).max()) for d, b in zip(differences, bounds, strict=True)),
            }
        return loss.detach()

    for number in job.iterations(ORDERS["iterations"]):
        of_batch = RANK // 2 if ORDERS.get("sets") else RANK
        generator = torch.Generator().manual_seed(100 * number + of_batch)
        x = torch.randn(16, 16, generator=generator)
        assert torch.isfinite(train(x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long()))
    digest = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    for optimizer in optimizers:
        for state in optimizer.state_dict()["state"].values():
            for key in sorted(state):
                digest.update(torch.as_tensor(state[key]).cpu().numpy().tobytes())
    result = {
        "rank": RANK, "pid": os.getpid(), "iterations": job.iteration_number, "hash": digest.hexdigest(),
        "found": {str(iteration): values for iteration, values in found.items()},
    }  # fmt: skip
    (DIR / f"result.{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    with open(DIR / f"pids.{RANK}", "a") as stream:
        print(os.getpid(), file=stream)
    main()
    sys.exit(0)
