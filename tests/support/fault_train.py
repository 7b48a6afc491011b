"""The training script of the fault tests: a small job in which exactly one fault (or several) fires at a named moment.

Reads its orders from the JSON in $FAULT_ORDERS: {"dir", "model", "iterations", "faults": [{"at", "iteration", "rank",
"scope"}], "pause_s"}. A fault fires once in the whole job: the process that fires it creates its marker file first, and
dies after that, or (scope "wait") waits for the file `go.{index}`. After each iteration it pauses, until a file `hurry`
is there. With "checkpoint" there is one before each iteration which that divides, below `checkpoints` or in "store"; if
"patient" the iteration waits until it counts. With "pace_s" an iteration takes that long until the test makes the file
`free`. With "stretch_s" it takes about that long, spread over its parts at random, until there is a file `hurry`.
"timeout_s" is that of the groups. With "begins_again" the head is made new at the begin of that epoch. The file `last`
may hold the number of iterations after which the job ends, if that is sooner: a whole number of epochs, far ahead when
the file is made. With "device" and "backend" it trains on a GPU. With "held" (`tests/support/injected.py`) training
begins when there is a file `go`.

`calls.{rank}` has a line for each call of the iteration, `times.{rank}` one for each end. Leaves `result.{rank}.json`
(hash of the state, pid, iterations) at its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import swift_agent as swift

ORDERS = json.loads(os.environ["FAULT_ORDERS"])
DIR = Path(ORDERS["dir"])
RANK = int(os.environ["RANK"])
# Of a helper, which has the rank of the worker that it helps; what it writes is its own.
SHARE = int(os.environ.get("SWIFT_HELPER", "0"))
OF = "helper." if SHARE else ""
ITERATIONS = ORDERS.get("iterations", 12)
DEVICE = torch.device(ORDERS.get("device", "cpu"))
now = {"iteration": -1}
STRETCHED = ("forward", "backward", "before_step", "after_step", "between")
# Not the generator of the module `random`, which belongs to the job's state.
stretches = random.Random()


def mark(name: str) -> bool:
    """True for the one process that creates the marker."""
    try:
        os.close(os.open(DIR / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def die(scope: str) -> None:
    """SIGKILL this process; with scope "node" also its agent and all that the agent has started."""
    if scope == "node":
        agent = os.getppid()
        # Those of a loader would outlive this process, which dies with the agent. Torch must not raise for them.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        others = children(agent) - {os.getpid()}
        # The agent first: it must not see its workers die.
        os.kill(agent, signal.SIGKILL)
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def children(parent: int) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if ppid == parent:
                found |= {int(entry.name), *children(int(entry.name))}
    return found


def fault(at: str, iteration: int | None = None) -> None:
    """Fire what is ordered for this place, this rank and this iteration."""
    if "stretch_s" in ORDERS and at in STRETCHED:
        wait_for(DIR / "hurry", stretches.uniform(0.0, 2 * ORDERS["stretch_s"] / len(STRETCHED)))
    iteration = now["iteration"] if iteration is None else iteration
    for index, order in enumerate(ORDERS.get("faults", ())):
        if order["at"] != at or order["rank"] != RANK or order.get("iteration", iteration) != iteration:
            continue
        if order.get("share", 0) != SHARE:
            continue
        after = order.get("after")
        if after is not None and not (DIR / f"fired.{after}").exists():
            continue
        if mark(f"fired.{index}"):
            if order["scope"] == "wait":
                wait_for(DIR / f"go.{index}", 60.0)
                assert (DIR / f"go.{index}").exists(), f"fault {index} waits for ever"
            elif order["scope"] == "sleep":
                time.sleep(order["s"])
            elif order["scope"] == "go":  # on with one that waits
                (DIR / f"go.{order['on']}").touch()
            elif at == "init" and order["scope"] == "node":
                # The others of this node are lost with it, so they must have begun.
                for rank in ranks_of_this_node():
                    wait_for(DIR / f"pids.{rank}", 60.0)
                die("node")
            elif "delay_s" in order:
                threading.Thread(target=lambda order=order: (time.sleep(order["delay_s"]), die(order["scope"]))).start()
            else:
                die(order["scope"])


def ranks_of_this_node() -> range:
    first = RANK - int(os.environ["LOCAL_RANK"])
    return range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))


def update(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    fault("before_step")
    for optimizer in optimizers:
        optimizer.step()
    fault("after_step")


def wait_for(path: Path, timeout_s: float) -> None:
    """Until the test has made this file."""
    deadline_s = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)


class Points(Dataset):
    def __len__(self) -> int:
        return 32 * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        fault("data", now["iteration"] + 1)
        generator = torch.Generator().manual_seed(index)
        # Drawn from the global generator, as augmentation does.
        return torch.randn(16, generator=generator) + 0.01 * torch.randn(16), index % 4


class Net(nn.Module):
    """BatchNorm, dropout, and one layer with a second bucket's worth of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.wide = nn.Linear(64, 64)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        if self.training:
            fault("forward")
        x = self.drop(F.relu(self.wide(x)))
        out = self.last(x)
        if out.requires_grad:
            out.register_hook(lambda grad: fault("backward"))
        return out


def arm_private_places() -> None:
    """Places inside our own code and torch's, reached by wrapping: only in this script, never in the product."""
    from torch.optim import adam

    from swift_agent.worker.groups import process_groups
    from swift_agent.worker.job import job as session
    from swift_agent.worker.rejoin import rejoin

    def before(owner: object, name: str, at: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: object, **kwargs: object) -> object:
            fault(at)
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    before(process_groups.ProcessGroups, "init_default_group", "init")
    before(process_groups.ProcessGroups, "rebuild", "rebuild")
    before(rejoin.Rejoin, "_exchange_state", "transfer")
    before(rejoin.Rejoin, "_compare", "verify")
    before(session.Job, "_begin", "begin")
    before(session.Job, "close", "close")
    functional = adam.adam

    def half(params: list[torch.Tensor], *args: object, **kwargs: object) -> object:
        # "Inside" the step: the first half of the parameters is updated, then the fault may fire.
        wanted = any(
            order["at"] == "step" and order["rank"] == RANK and order["iteration"] == now["iteration"]
            for order in ORDERS.get("faults", ())
        )
        if not wanted:
            return functional(params, *args, **kwargs)
        middle = len(params) // 2

        def part(which: slice) -> list[object]:
            return [value[which] if isinstance(value, list) and len(value) == len(params) else value for value in args]

        functional(params[:middle], *part(slice(middle)), **kwargs)
        fault("step")
        return functional(params[middle:], *part(slice(middle, None)), **kwargs)

    adam.adam = half  # what AdamW calls, too


def arm_agreement() -> None:
    """Places right before and after all ranks agree to make an update."""
    from swift_agent.worker.groups import transfer
    from swift_agent.worker.tracked import tracked

    def armed() -> None:
        fault("agree")
        transfer.agree()
        fault("agreed")

    class Transfer:
        agree = staticmethod(armed)

    tracked.transfer = Transfer  # type: ignore[assignment]


def arm_checkpoints() -> None:
    """Places in the thread that writes a checkpoint."""
    from swift_logging_store.stores import open as store
    from swift_recovery.checkpoint import writer
    from swift_recovery.checkpoint.directory import CheckpointDirectory
    from swift_recovery.transfer import state_file

    settle, settled = writer.Checkpoints._settle, {"iteration": -1}

    def settling(self: writer.Checkpoints, task: Any) -> None:
        settled["iteration"] = task.iteration
        settle(self, task)

    writer.Checkpoints._settle = settling  # type: ignore[method-assign]

    def armed(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: object, **kwargs: object) -> object:
            fault(f"before {label}", settled["iteration"])
            result = original(*args, **kwargs)
            fault(f"after {label}", settled["iteration"])
            return result

        setattr(owner, name, wrapped)

    armed(writer.Checkpoints, "_write", "write")
    armed(CheckpointDirectory, "commit", "commit")
    armed(CheckpointDirectory, "remove", "remove")
    # The mark of one that is removed is gone by then.
    armed(type(store.open_store(str(ORDERS.get("store", DIR)))), "remove_directory", "remove directory")

    write, replace = state_file._FileLink.write, os.replace

    def writing(self: state_file._FileLink, data: bytes | memoryview) -> None:
        if self.num_bytes > 5000:  # of some 32000, in a few writes
            self._stream.flush()
            fault("in write", settled["iteration"])
        write(self, data)

    def replacing(source: Path, target: Path) -> None:
        """A whole file is about to get its name."""
        if not target.name.startswith("timeline-"):
            what = "mark" if target.suffix == ".json" else "part"
            fault(f"before name of {what}", settled["iteration"])
        replace(source, target)

    state_file._FileLink.write = writing  # type: ignore[method-assign]
    os.replace = replacing  # type: ignore[assignment]


def take_checkpoints(job: swift.Job) -> None:
    """If that is ordered: one before each iteration that "checkpoint" divides."""
    if "checkpoint" in ORDERS:
        arm_checkpoints()
        job.checkpoint(ORDERS.get("store", DIR / "checkpoints"), every=ORDERS["checkpoint"])


def until_it_counts(job: swift.Job) -> None:
    """If that is ordered: training goes on only when no checkpoint is under way any more, or a failure has ended it."""
    running: Any = job._running
    while ORDERS.get("patient") and not running._begun.tracked.checkpoints.wait(0.05):
        if running.supervisor.interrupted:
            return


def init() -> swift.Job:
    limit = timedelta(seconds=ORDERS["timeout_s"]) if "timeout_s" in ORDERS else None
    job = swift.init(ORDERS.get("backend"), timeout=limit)
    hold()
    return job


def hold() -> None:
    """If that is ordered: training begins when the test has ordered its faults."""
    if ORDERS.get("held"):
        (DIR / f"held.{RANK}").write_text(os.environ["WORLD_SIZE"])
        wait_for(DIR / "go", 60.0)
        assert (DIR / "go").exists(), "the test has not let it go"


def build(job: swift.Job) -> None:
    torch.manual_seed(7)
    net = Net().to(DEVICE)
    # Small buckets, so that a backward has several all-reduces.
    alone = ORDERS.get("model") == "alone"  # each rank trains a model of its own: there is one copy of each
    model = net if alone else DistributedDataParallel(net, bucket_cap_mb=0.01)
    data = Points()
    sampler = DistributedSampler(data, num_replicas=job.world_size, rank=job.rank, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    kind = ORDERS.get("model", "plain")
    if kind == "two":
        parts = [net.first, net.norm, net.wide]
        optimizers = [
            torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-2),
            torch.optim.SGD(net.last.parameters(), lr=1e-2, momentum=0.9),
        ]
    else:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.8) for optimizer in optimizers]
    replicas = [job.rank] if alone else None
    take_checkpoints(job)
    job.track(model=model, optimizer=optimizers, scheduler=schedulers, loader=loader, replicas=replicas)
    calls = open(DIR / f"calls.{RANK}", "a", buffering=1)  # noqa: SIM115 - kept for the life of the process

    @job.iteration
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        now["iteration"] = job.iteration_number
        print(job.iteration_number, os.getpid(), file=calls)
        until_it_counts(job)
        x, y = x.to(DEVICE), y.to(DEVICE)
        if kind == "accumulate":
            with model.no_sync():
                F.cross_entropy(model(x[:4]), y[:4]).backward()
            loss = F.cross_entropy(model(x[4:]), y[4:])
        else:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        update(optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        if kind == "metric":
            # A collective after the update: survivors may be cut between the two.
            dist.all_reduce(loss.detach())
            fault("after_metric")
        return loss.detach()

    @job.resilient
    def evaluate() -> float:
        fault("evaluate")
        net.eval()
        with torch.no_grad():
            found = [float((model(x.to(DEVICE)).argmax(1) == y.to(DEVICE)).sum()) for x, y in loader]
            right = torch.tensor(found[:2], device=DEVICE).sum()
        net.train()
        dist.all_reduce(right)
        if DEVICE.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            now["gpu_bytes"] = total - free
        fault("evaluated")
        return float(right)

    times = open(DIR / f"times.{RANK}", "a", buffering=1)  # noqa: SIM115 - kept for the life of the process
    epoch_length = len(loader)
    for epoch in job.epochs(ITERATIONS // epoch_length):
        if epoch == ORDERS.get("begins_again"):
            # A head of its own for the rest of the training, and no momentum.
            nn.init.zeros_(net.last.weight)
            for optimizer in optimizers:
                optimizer.state.clear()
        for x, y in job.batches(loader):
            loss = train(x, y)
            assert torch.isfinite(loss)
            print(job.iteration_number, time.time(), os.getpid(), file=times)
            fault("between", job.iteration_number - 1)
            wait_for(DIR / "hurry", ORDERS.get("pause_s", 0.0))
            if "pace_s" in ORDERS and job.iteration_number > 3:
                wait_for(DIR / "free", ORDERS["pace_s"])
        evaluate()
        if (DIR / "last").exists() and job.iteration_number >= int((DIR / "last").read_text()):
            break
    leave_result(job, net, optimizers)


def whole(tensor: Any) -> Any:
    return torch.as_tensor(tensor)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Of any dtype."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes()


def leave_result(
    job: swift.Job, net: nn.Module, optimizers: Iterable[torch.optim.Optimizer], part: Callable[[Any], Any] = whole
) -> None:
    """The hash of the state at the end, and what else the tests look at. *part* of each tensor is in the hash."""
    digest = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        digest.update(name.encode() + bytes_of(part(tensor)))
    for optimizer in optimizers:
        for values in optimizer.state_dict()["state"].values():
            for key in sorted(values):
                digest.update(bytes_of(part(values[key])))
    status = Path("/proc/self/status").read_text()
    result = {
        "rank": RANK,
        "pid": os.getpid(),
        "iterations": job.iteration_number,
        "hash": digest.hexdigest(),
        "gpu_bytes": now.get("gpu_bytes"),  # of all processes on that GPU, in the last evaluation
        "num_threads": int(status.split("Threads:")[1].split()[0]),
        "num_files": len(os.listdir("/proc/self/fd")),
        "rss_kb": int(status.split("VmRSS:")[1].split()[0]),
        "lr": [optimizer.param_groups[0]["lr"] for optimizer in optimizers],
    }
    (DIR / f"result.{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    with open(DIR / f"{OF}pids.{RANK}", "a") as stream:
        print(os.getpid(), file=stream)
    torch.set_num_threads(1)
    arm_private_places()
    build(init())
    sys.exit(0)
