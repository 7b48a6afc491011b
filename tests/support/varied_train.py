"""Training scripts of many shapes for `tests/faults/test_scripts.py`; $FAULT_ORDERS names the "form" to run.

Each function of `FORMS` is the body of a script as a user might write it. It returns what has to be equal to the run
without failure: models, optimizers, other state, and a list of values that the script has seen. Faults are fired as in
`fault_train`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fault_train import DIR, ORDERS, RANK, fault, mark, now
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import swift_agent as swift

ITERATIONS = 12
State = tuple[list[nn.Module], list[torch.optim.Optimizer], list[Any], list[float]]


class Points(Dataset):
    def __init__(self, size: int = 64, *, augment: bool = True) -> None:
        self._size, self._augment = size, augment

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if torch.utils.data.get_worker_info() is None:
            fault("data", now["iteration"] + 1)
        point = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return (point + 0.01 * torch.randn(16) if self._augment else point), index % 4


class Net(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(dropout)
        self.wide, self.last = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            fault("forward")
        out: Tensor = self.last(F.relu(self.wide(self.drop(F.relu(self.norm(self.first(x)))))))
        if out.requires_grad:
            out.register_hook(lambda grad: fault("backward"))
        return out


def replicated(net: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, bucket_cap_mb=0.01, **options)


def sharded_loader(job: swift.Job, data: Dataset, **options: Any) -> DataLoader:
    sampler = DistributedSampler(data, num_replicas=job.world_size, rank=job.rank, seed=3)
    return DataLoader(data, batch_size=4, sampler=sampler, **options)


def make_step(
    job: swift.Job, model: nn.Module, optimizer: torch.optim.Optimizer, then: Callable[[], object] = lambda: None
) -> Callable[[Tensor, Tensor], Tensor]:
    def train(x: Tensor, y: Tensor) -> Tensor:
        now["iteration"] = job.iteration_number
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        before_step(job)
        optimizer.step()
        after_step()
        then()
        optimizer.zero_grad()
        return loss.detach()

    return job.iteration(train)


def before_step(job: swift.Job) -> None:
    """Here some survivors may be held until they are told of the failure; another has made its step by then.

    Orders: "hold": {"iteration", "ahead": rank, "behind": ranks, "victim": rank}.
    """
    order = ORDERS.get("hold")
    if order and order["iteration"] == now["iteration"] and not (DIR / "fired.0").exists():
        if RANK in order["behind"]:
            mark(f"behind.{RANK}")
            wait_until(lambda: job._supervisor.interrupted)
        elif order["victim"] == RANK:
            wait_until(lambda: (DIR / "ahead").exists())
            wait_until(lambda: all((DIR / f"behind.{rank}").exists() for rank in order["behind"]))
    fault("before_step")


def after_step() -> None:
    order = ORDERS.get("hold")
    if order and order["iteration"] == now["iteration"] and order["ahead"] == RANK:
        mark("ahead")
    fault("after_step")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "what a held rank waits for does not happen"
        time.sleep(0.001)


def mesh(job: swift.Job) -> State:
    """Two replica sets, {0, 2} and {1, 3}, that exchange activations over the other dimension; and a group by hand."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "mp"))
    everyone = dist.new_group([0, 1, 2, 3])
    torch.manual_seed(7 + grid.get_local_rank("mp"))
    net = Net()
    model = replicated(net, process_group=grid.get_group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)
    seen = []

    @job.iteration
    def train(number: int) -> Tensor:
        now["iteration"] = job.iteration_number
        out = model(torch.randn(4, 16))
        other = out.detach().clone()
        dist.all_reduce(other, group=grid.get_group("mp"))
        (out * other).pow(2).mean().backward()
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        dist.all_reduce(norm, group=everyone)
        before_step(job)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    for number in job.iterations(ITERATIONS):
        seen.append(float(train(number)))
    return [net], [optimizer], [], seen[-1:]


def scaler(job: swift.Job) -> State:
    """GradScaler with a step that overflows on one rank only, clipping, a scheduler stepped outside the iteration."""
    torch.manual_seed(7)
    net = Net()
    model = replicated(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    loader = sharded_loader(job, Points())
    job.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scale, loader=loader)

    @job.iteration
    def train(x: Tensor, y: Tensor) -> Tensor:
        now["iteration"] = job.iteration_number
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        factor = 1e38 if RANK == 3 and job.iteration_number in (4, 6) else 1.0
        scale.scale(loss * factor).backward()
        scale.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before_step(job)
        scale.step(optimizer)
        after_step()
        scale.update()
        loss = loss.detach()
        if ORDERS.get("metric"):
            dist.all_reduce(loss)
            fault("after_metric")
        return loss

    for _ in job.epochs(ITERATIONS // len(loader)):
        for x, y in job.batches(loader):
            train(x, y)
            scheduler.step()
    return [net], [optimizer], [scale, scheduler], []


def loader_workers(job: swift.Job) -> State:
    """A loader with two processes of its own."""
    torch.manual_seed(7)
    net = Net()
    model = replicated(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = sharded_loader(
        job, Points(augment=False), num_workers=2, persistent_workers=bool(ORDERS.get("persistent"))
    )
    job.track(model=model, optimizer=optimizer, loader=loader)
    train = make_step(job, model, optimizer)
    for _ in job.epochs(ITERATIONS // len(loader)):
        for x, y in job.batches(loader):
            fault("loaded", job.iteration_number)
            train(x, y)
    return [net], [optimizer], [], []


def shuffled(job: swift.Job) -> State:
    """Every rank shuffles for itself; the sampler draws its seed from the global generator."""
    torch.manual_seed(7)
    net = Net()
    model = replicated(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    num_workers = ORDERS.get("num_workers", 0)
    loader = DataLoader(Points(16, augment=not num_workers), batch_size=4, shuffle=True, num_workers=num_workers)
    job.track(model=model, optimizer=optimizer, loader=loader)
    train = make_step(job, model, optimizer)
    for _ in job.epochs(3):
        for x, y in job.batches(loader):
            train(x, y)
    return [net], [optimizer], [], []


def frozen_later(job: swift.Job) -> State:
    """From an epoch on statistics stay, and a layer does: a replacement that begins later never passes that line."""
    torch.manual_seed(5)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loader = sharded_loader(job, Points())
    job.track(model=net, optimizer=optimizer)

    @job.iteration
    def train(x: Tensor, y: Tensor) -> None:
        now["iteration"] = job.iteration_number
        F.cross_entropy(net(x), y).backward()
        for parameter in net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        for buffer in net.buffers():
            dist.broadcast(buffer, 0)
        fault("before_step")
        optimizer.step()
        optimizer.zero_grad()

    for epoch in job.epochs(ITERATIONS // len(loader)):
        if epoch == 1:
            net.norm.eval()
            net.first.requires_grad_(False)
        for x, y in job.batches(loader):
            train(x, y)
    return [net], [optimizer], [], [float(net.norm.training), float(net.first.weight.requires_grad)]


def run_form(job: swift.Job) -> State:
    torch.manual_seed(7)
    net = Net()
    model = replicated(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.track(model, optimizer)
    step = make_step(job, model, optimizer)

    def train(number: int) -> None:
        step.__wrapped__(torch.randn(4, 16), torch.randint(4, (4,)))

    job.run(train, iterations=ITERATIONS)
    return [net], [optimizer], [], []


def plain_range(job: swift.Job) -> State:
    """`range` instead of `job.epochs`, an evaluation after each epoch, and generators left to the user.

    A replacement takes over the generators of the rank it copies, so all ranks draw alike here.
    """
    torch.manual_seed(7)
    random.seed(7)
    net = Net()
    model = replicated(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = sharded_loader(job, Points())
    job.track(model=model, optimizer=optimizer, loader=loader)
    train = make_step(job, model, optimizer)
    evaluate = make_evaluation(job, net, loader)
    for _ in range(3):
        for x, y in job.batches(loader):
            train(x + 0.1 * random.random(), y)
        evaluate()
    return [net], [optimizer], [], []


def make_evaluation(job: swift.Job, net: nn.Module, loader: Iterable[Any]) -> Callable[[], float]:
    @job.resilient
    def evaluate() -> float:
        fault("evaluate", job.iteration_number)
        net.eval()
        with torch.no_grad():
            total = torch.stack([net(x).square().sum() for x, _ in loader]).sum()
        net.train()
        dist.all_reduce(total)
        fault("evaluated", job.iteration_number)
        return float(total)

    return evaluate


def adversaries(job: swift.Job) -> State:
    """Two models, two optimizers; the second backward comes after the first step and runs through both models."""
    torch.manual_seed(7)
    maker = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    judge = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    maker_ddp, judge_ddp = replicated(maker), replicated(judge)
    judging = torch.optim.Adam(judge.parameters(), lr=1e-2)
    making = torch.optim.RMSprop(maker.parameters(), lr=1e-2, momentum=0.5)
    loader = sharded_loader(job, Points())
    job.track(model={"maker": maker_ddp, "judge": judge_ddp}, optimizer=[judging, making], loader=loader)

    @job.iteration
    def train(x: Tensor) -> Tensor:
        now["iteration"] = job.iteration_number
        judging.zero_grad()
        made = maker_ddp(torch.randn(4, 8))
        scores = judge_ddp(torch.cat([x, made.detach()]))
        F.softplus(torch.cat([-scores[:4], scores[4:]])).mean().backward()
        judging.step()
        fault("between_steps")
        making.zero_grad()
        loss = F.softplus(-judge_ddp(made)).mean()
        loss.backward()
        before_step(job)
        making.step()
        after_step()
        return loss.detach()

    for _ in job.epochs(ITERATIONS // len(loader)):
        for x, _ in job.batches(loader):
            train(x)
    return [maker, judge], [judging, making], [], []


def evaluation_inside(job: swift.Job) -> State:
    """An evaluation every second batch, in the middle of the loop over batches, with a pass of the job's of its own."""
    torch.manual_seed(7)
    net = Net()
    model = replicated(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = sharded_loader(job, Points())
    job.track(model=model, optimizer=optimizer, loader=loader)
    train = make_step(job, model, optimizer)
    evaluate = make_evaluation(job, net, job.loader(loader))
    seen = []
    for _ in job.epochs(ITERATIONS // len(loader)):
        for x, y in job.batches(loader):
            train(x, y)
            if job.iteration_number % 2 == 0:
                seen.append(evaluate())
    return [net], [optimizer], [], seen[-1:]


def two_per_batch(job: swift.Job) -> State:
    """Two updates with every batch, the learning rate changed by the iteration, and an early end of each pass."""
    torch.manual_seed(7)
    net = Net()
    model = replicated(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = sharded_loader(job, Points())
    job.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    @job.iteration
    def train(x: Tensor, y: Tensor) -> Tensor:
        now["iteration"] = job.iteration_number
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        before_step(job)
        optimizer.step()
        after_step()
        optimizer.zero_grad()
        scheduler.step()
        return loss.detach()

    for _ in range(3):
        for number, (x, y) in enumerate(job.batches(loader)):
            train(x, y)
            train(-x, y)
            if job.iteration_number % 6 == 0:
                assert number <= 3
                break
    return [net], [optimizer], [scheduler], []


def barrier(job: swift.Job) -> State:
    """Barriers between iterations, one before and one after a section."""
    torch.manual_seed(7)
    net = Net()
    model = replicated(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = sharded_loader(job, Points())
    job.track(model=model, optimizer=optimizer, loader=loader)
    train = make_step(job, model, optimizer)
    evaluate = make_evaluation(job, net, loader)
    seen = []
    for _ in job.epochs(ITERATIONS // len(loader)):
        for x, y in job.batches(loader):
            train(x, y)
            fault("barrier", job.iteration_number)
            dist.barrier()
        seen.append(evaluate())
        fault("at epoch", job.iteration_number)
        dist.barrier()
    return [net], [optimizer], [], seen[-1:]


def reduced_outside(job: swift.Job) -> State:
    """A collective outside iterations, of the kind that cannot be repeated in place."""
    torch.manual_seed(7)
    net = Net()
    model = replicated(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = sharded_loader(job, Points())
    job.track(model=model, optimizer=optimizer, loader=loader)
    train = make_step(job, model, optimizer)
    for x, y in job.batches(loader):
        train(x, y)
        fault("barrier", job.iteration_number)
        dist.all_reduce(torch.ones(1))  # outside
    return [net], [optimizer], [], []


def loops_in_turn(job: swift.Job) -> State:
    """A warm-up by number, then passes over a loader."""
    torch.manual_seed(7)
    net = Net()
    model = replicated(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = sharded_loader(job, Points())
    job.track(model=model, optimizer=optimizer, loader=loader)
    train = make_step(job, model, optimizer)
    for _ in job.iterations(4):
        train(torch.randn(4, 16), torch.randint(4, (4,)))
    for _ in range(2):
        for x, y in job.batches(loader):
            train(x, y)
    return [net], [optimizer], [], []


def ahead(job: swift.Job) -> State:
    """As most scripts are, with an average of the weights; the scheduler is stepped outside. What a survivor that skips
    an iteration sees is kept."""
    torch.manual_seed(7)
    net = Net()
    model = replicated(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = sharded_loader(job, Points())
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    job.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, average=average)
    train = make_step(job, model, optimizer, lambda: average.update_parameters(net))
    losses = open(DIR / f"losses.{RANK}", "a", buffering=1)  # noqa: SIM115 - kept for the life of the process
    for _ in job.epochs(ITERATIONS // len(loader)):
        for x, y in job.batches(loader):
            loss = train(x, y)
            assert isinstance(loss, Tensor) and torch.isfinite(loss)
            print(now["iteration"], float(loss), file=losses)
            scheduler.step()
    return [net, average], [optimizer], [scheduler], []


FORMS = (
    mesh, scaler, loader_workers, shuffled, frozen_later, run_form, plain_range, adversaries, evaluation_inside,
    two_per_batch, barrier, reduced_outside, loops_in_turn, ahead,
)  # fmt: skip


def digest(models: list[nn.Module], optimizers: list[torch.optim.Optimizer], others: list[Any], seen: Any) -> str:
    result = hashlib.sha256(json.dumps(seen).encode())
    for model in models:
        for name, tensor in sorted(model.state_dict().items()):
            result.update(name.encode() + tensor.numpy().tobytes())
    for optimizer in optimizers:
        for values in optimizer.state_dict()["state"].values():
            for key in sorted(values):
                result.update(torch.as_tensor(values[key]).numpy().tobytes())
        result.update(str([group["lr"] for group in optimizer.param_groups]).encode())
    for other in others:
        result.update(str(sorted(other.state_dict().items())).encode())
    return result.hexdigest()


def arm_transfer() -> None:
    """A place inside the recovery, reached by wrapping: only in this script."""
    from swift_agent.worker.rejoin import rejoin

    original = rejoin.Rejoin._exchange_state

    def wrapped(*args: Any) -> Any:
        fault("transfer")
        return original(*args)

    rejoin.Rejoin._exchange_state = wrapped  # type: ignore[method-assign]


if __name__ == "__main__":
    with open(DIR / f"pids.{RANK}", "a") as stream:
        print(os.getpid(), file=stream)
    torch.set_num_threads(1)
    arm_transfer()
    job = swift.init(rng="user" if ORDERS["form"] == "plain_range" else "iteration")
    state = next(form for form in FORMS if form.__name__ == ORDERS["form"])(job)
    result = {"rank": RANK, "pid": os.getpid(), "iterations": job.iteration_number, "hash": digest(*state)}
    Path(DIR / f"result.{RANK}.json").write_text(json.dumps(result))
    sys.exit(0)
