"""Updates in the backward on three real ranks: the bits of plain DDP, and an error for what comes between."""

from __future__ import annotations

import contextlib
import copy
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from swift_agent.errors import UsageError
from swift_agent.wire.channel import WorkerChannel
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.tracked.tracked import Tracked
from swift_agent.worker.updates.device_reductions import Reductions
from swift_agent.worker.updates.overlapped import OverlappedUpdates
from swift_recovery.undo.lamb import Lamb
from tests.support.gloo_job import (  # noqa: F401 - fixtures
    TOKEN,
    Job,
    control,
    make_job,
    native_library,
    nursery,
    rank,
    store_of,
    world_size,
)

MakeJob = Callable[[str, int], Job]
ITERATIONS = 6

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "SGD, tensor lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05), momentum=0.9),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=1e-3),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "Lamb": lambda p: Lamb(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


# torch does not keep the Python object alive, and NCCL asks it for the first time in the first collective.
_stores: list[Any] = []


def join(backend: str = "gloo") -> None:
    from swift_agent.wire.store_client import StoreClient

    limit = timedelta(seconds=25)
    store = StoreClient(*store_of(1), TOKEN, limit)
    _stores.append(store)
    dist.init_process_group(backend, store=store, rank=rank(), world_size=world_size(), timeout=limit)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(t: int, micro: int = 0) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * t + 10 * rank() + micro))


def trained(make: Callable[[Any], torch.optim.Optimizer], overlap: bool, variant: str) -> list[torch.Tensor]:
    """Parameters and optimizer state after some iterations."""
    device = torch.device("cuda" if variant == "cuda" else "cpu")
    net = network().to(device)
    if variant == "frozen":
        net[0].bias.requires_grad = False
    model = DDP(net, bucket_cap_mb=0.0015, gradient_as_bucket_view=variant == "view")
    parts = [net[:3], net[3:]] if variant == "two" else [net]
    optimizers = [make(part.parameters()) for part in parts]
    named = {str(n): optimizer for n, optimizer in enumerate(optimizers)}
    # With one an update passes its fence, and what an undo needs is kept.
    supervisor = Supervisor(WorkerChannel(socket.socketpair()[0]), 0) if variant in ("thread", "cuda") else None
    tracked = Tracked({"models": {"m": model}, "optimizers": named, "others": {}}, None, world_size(), supervisor,
                      overlap_update=overlap)  # fmt: skip
    if overlap and variant == "thread":  # as for an accelerator
        assert isinstance(tracked.updates, OverlappedUpdates)
        tracked.updates._reductions = Reductions(torch.device("cpu"), lambda: False)
    for t in range(ITERATIONS):
        tracked.begin(t)
        for micro in range(2 if variant == "accumulate" else 1):
            with model.no_sync() if variant == "accumulate" and micro == 0 else contextlib.nullcontext():
                model(batch(t, micro).to(device)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=variant != "zeros")
        assert not overlap or tracked.updates.updated
        tracked.updates.finish()
    return [tensor.detach().clone() for tensor in tracked.state.replicated_tensors()]


def compare(names: list[str], variant: str) -> dict[str, bool]:
    join("cpu:gloo,cuda:nccl" if variant == "cuda" else "gloo")
    found = {}
    for name in names:
        plain, overlapped = (trained(OPTIMIZERS[name], overlap, variant) for overlap in (False, True))
        found[name] = len(plain) == len(overlapped) and all(map(torch.equal, plain, overlapped))
    return found


def test_every_optimizer_ends_with_the_bits_of_plain_ddp(make_job: MakeJob) -> None:  # noqa: F811
    job = make_job("native", 3)
    job.open_generation(1)
    for found in job.results(job.start_all("compare", names=list(OPTIMIZERS), variant="plain")):
        assert found == dict.fromkeys(OPTIMIZERS, True)


@pytest.mark.parametrize("variant", ["two", "accumulate", "view", "zeros", "frozen", "thread"])
def test_ways_to_train(make_job: MakeJob, variant: str) -> None:  # noqa: F811
    names = ["SGD", "AdamW, foreach"]
    # Three ranks divide by 3 as DDP does only where gradients are copied into buckets; with views it depends on torch.
    job = make_job("native", 2 if variant == "view" else 3)
    job.open_generation(1)
    for found in job.results(job.start_all("compare", names=names, variant=variant)):
        assert found == dict.fromkeys(names, True)


@pytest.mark.gpu
def test_on_a_gpu(make_job: MakeJob) -> None:  # noqa: F811
    job = make_job("native", 1)
    job.open_generation(1)
    for found in job.results(job.start_all("compare", names=list(OPTIMIZERS), variant="cuda")):
        assert found == dict.fromkeys(OPTIMIZERS, True)


def misuse() -> dict[str, str]:
    """What a script may do wrong in an iteration, and the error it gets."""
    join()
    found = {}

    def attempt(name: str, train: Callable[[DDP, torch.optim.Optimizer], None]) -> None:
        net = network()
        model = DDP(net, bucket_cap_mb=0.0015)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        tracked = Tracked({"models": {"m": model}, "optimizers": {"sgd": optimizer}, "others": {}}, None, world_size(),
                          None, overlap_update=True)  # fmt: skip
        tracked.begin(0)
        try:
            train(model, optimizer)
            tracked.updates.finish()
            found[name] = ""
        except UsageError as error:
            found[name] = str(error)
        dist.barrier()

    def loss(model: DDP, micro: int = 0) -> torch.Tensor:
        return model(batch(0, micro)).square().mean()

    def clips(model: DDP, optimizer: torch.optim.Optimizer) -> None:
        loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    def schedules(model: DDP, optimizer: torch.optim.Optimizer) -> None:
        loss(model).backward()
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.step()

    def skips(model: DDP, optimizer: torch.optim.Optimizer) -> None:
        loss(model).backward()

    def reduces_nothing(model: DDP, optimizer: torch.optim.Optimizer) -> None:
        with model.no_sync():
            loss(model).backward()
        optimizer.step()

    def twice(model: DDP, optimizer: torch.optim.Optimizer) -> None:
        loss(model).backward()
        loss(model, 1).backward()

    def right(model: DDP, optimizer: torch.optim.Optimizer) -> None:
        loss(model).backward()
        optimizer.step()

    for name, train in copy.copy(locals()).items():
        if name in ("clips", "schedules", "skips", "reduces_nothing", "twice", "right"):
            attempt(name, train)
    return found


def test_what_comes_between_backward_and_step_is_an_error(make_job: MakeJob) -> None:  # noqa: F811
    job = make_job("native", 2)
    job.open_generation(1)
    for found in job.results(job.start_all("misuse")):
        assert "was changed between backward and sgd.step()" in found["clips"]
        assert "hyper-parameters of 'sgd' were changed" in found["schedules"]
        assert "called no step() of sgd" in found["skips"]
        assert "has a gradient that DDP has not reduced" in found["reduces_nothing"]
        assert "a second backward reduces the gradient" in found["twice"]
        assert found["right"] == ""


def refused() -> str:
    join()
    nets = [network() for _ in range(5)]
    nets[4].weight_of_none = nn.Parameter(torch.zeros(1))
    hooked = DDP(nets[2])
    hooked._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)  # type: ignore[attr-defined]
    models = {
        "unused": DDP(nets[0], find_unused_parameters=True), "static": DDP(nets[1], static_graph=True),
        "hooked": hooked, "bare": nets[3],
    }  # fmt: skip
    optimizers = {
        "one": torch.optim.SGD([*nets[0].parameters(), *nets[3].parameters()], lr=0.1),
        "other": torch.optim.SGD(nets[0].parameters(), lr=0.1),
    }
    others = {"scaler": torch.amp.GradScaler("cpu")}
    try:
        Tracked({"models": models, "optimizers": optimizers, "others": others}, None, 1, None, overlap_update=True)
    except UsageError as error:
        return str(error)
    return ""


def test_what_cannot_be_overlapped_is_refused_at_once(make_job: MakeJob) -> None:  # noqa: F811
    job = make_job("native", 1)
    job.open_generation(1)
    (message,) = job.results(job.start_all("refused"))
    assert message.count("find_unused_parameters or static_graph") == 2
    assert "communication hook of its own" in message
    assert "one updates parameters outside DistributedDataParallel" in message
    assert "other and one update the same parameter" in message
    assert "scaler: a GradScaler looks at all gradients" in message
