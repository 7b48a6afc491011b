"""DDP training whose workers are killed one after the other ends with the bits of a run without failure."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.gloo_job import (  # noqa: F401 - fixtures
    HOST,
    TOKEN,
    Job,
    control,
    hear,
    make_job,
    native_library,
    nursery,
    rank,
    store_of,
    tell,
    watch,
    world_size,
)

MakeJob = Callable[[str, int], Job]
WORLD_SIZE = 3
ITERATIONS = 7
LONG = timedelta(seconds=25)

# (iteration, point, victim) of each failure: in the first backward; in the forward that agrees on the bucket layout,
# with rank 0, which decides it; later, in the middle of a backward.
FAILURES = [(0, "backward", 2), (1, "forward", 0), (4, "backward", 1)]
# A second iteration that is repeated counts as the first of a static graph; see BucketKeeper.
STATIC_FAILURES = [(0, "backward", 2), (3, "forward", 0), (4, "backward", 1)]


class Branches(torch.nn.Module):
    """One of two branches is unused in each iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.even, self.odd = (torch.nn.Linear(16, 16) for _ in range(3))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.odd if self.turn % 2 else self.even)(self.first(x))


def build(variant: str) -> DDP:
    torch.manual_seed(0)
    if variant == "unused":
        return DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=0.0005)
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(16, 16), torch.nn.Tanh()]
    if variant == "batchnorm":
        layers.insert(3, torch.nn.BatchNorm1d(16))
    options = {"static": {"static_graph": True}, "view": {"gradient_as_bucket_view": True}}.get(variant, {})
    model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.0015, **options)
    if variant == "hook":
        model.register_comm_hook(None, halve_and_sum)
    elif variant == "builtin_hook":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return model


def halve_and_sum(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, as objects
    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def step(model: DDP, optimizer: torch.optim.Optimizer, variant: str, t: int) -> None:
    optimizer.zero_grad()
    if variant == "unused":
        model.module.turn = t
    num_micro_batches = 3 if variant == "accumulate" else 1
    for micro in range(num_micro_batches):
        generator = torch.Generator().manual_seed(1000 * t + 10 * rank() + micro)
        x = torch.randn(8, 16, generator=generator)
        with contextlib.nullcontext() if micro == num_micro_batches - 1 else model.no_sync():
            model(x).square().mean().backward()
    optimizer.step()


def digest(model: DDP) -> str:
    tensors = [*model.parameters(), *model.buffers()]
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()


def undisturbed(variant: str) -> str:
    """The same training by torch alone."""
    from swift_agent.wire.store_client import StoreClient

    host, port = store_of(1)
    store = StoreClient(host, port, TOKEN)
    dist.init_process_group("gloo", store=store, rank=rank(), world_size=world_size(), timeout=LONG)
    model = build(variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for t in range(ITERATIONS):
        step(model, optimizer, variant, t)
    return digest(model)


def arm(model: DDP, failures: list[list[Any]], keeper: Any, generation: int) -> None:
    """Kill this process at its point of failure."""
    if generation > len(failures):
        return
    at, point, victim = failures[generation - 1]

    def die(*_: Any) -> None:
        if keeper.iteration == at:
            tell(f"died/{generation}")
            os.kill(os.getpid(), signal.SIGKILL)

    if rank() == victim:
        if point == "forward":
            model.register_forward_pre_hook(die, prepend=True)
        else:
            list(model.parameters())[3].register_post_accumulate_grad_hook(die)


def survive(variant: str, failures: list[list[Any]], generation: int = 1, solo: bool = False) -> dict[str, Any]:
    from swift_agent.worker.groups import process_groups
    from swift_agent.worker.tracked import ddp_buckets

    groups = process_groups.install()
    watch(groups, generation)
    address = ("", 0) if solo else store_of(generation)
    groups.init_default_group(
        "gloo", address, generation, rank(), world_size(), timeout=LONG, solo=solo, store_token=TOKEN
    )
    model = build(variant)
    assert ddp_buckets.sync_buffers_after_forward(model) == (variant == "batchnorm")
    keeper = ddp_buckets.BucketKeeper(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    t, aborted = 0, solo
    pids = os.getpid()
    if solo:
        generation -= 1
    else:
        arm(model, failures, keeper, generation)
    while t < ITERATIONS:
        buffers = [one.clone() for one in model.buffers()]
        try:
            if aborted:
                raise RuntimeError("recover first")
            keeper.iteration = t
            step(model, optimizer, variant, t)
            groups.check()
            t += 1
            continue
        except RuntimeError:
            pass
        # What a session does, in short.
        if not solo:
            hear(f"abort/{generation}")
            while groups.aborted is None:
                time.sleep(0.001)
            assert groups.wait_quiet(timedelta(seconds=10))
            for old, new in zip(model.buffers(), buffers, strict=True):
                old.copy_(new)
        layout = None if solo else keeper.layout_for(t)
        generation += 1
        watch(groups, generation)
        groups.rebuild(store_of(generation), generation, LONG, TOKEN)
        reports = groups.all_gather_ints([-1 if solo else t, layout is not None])
        # Roll forward to whoever has got furthest.
        source = max(range(len(reports)), key=lambda one: (reports[one], -one))
        if rank() == source:
            control().set(f"layout/{generation}", json.dumps(layout))
        t = reports[source][0]
        keeper.restore(json.loads(hear(f"layout/{generation}")))
        for tensor in state_of(model, optimizer, has_stepped=t > 0):
            dist.broadcast(tensor, source)
        solo = aborted = False
        arm(model, failures, keeper, generation)
    return {"digest": digest(model), "pid": pids, "layout": ddp_buckets.bucket_layout(model), "generation": generation}


def state_of(model: DDP, optimizer: torch.optim.Optimizer, has_stepped: bool) -> list[torch.Tensor]:
    tensors = [one.data for one in model.parameters()] + list(model.buffers())
    for parameter in model.parameters() if has_stepped else ():
        state = optimizer.state[parameter]
        if not state:
            state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(parameter),
                         exp_avg_sq=torch.zeros_like(parameter))  # fmt: skip
        tensors += [state["step"], state["exp_avg"], state["exp_avg_sq"]]
    return tensors


@pytest.mark.parametrize(
    ("variant", "mechanism"),
    [(name, "native") for name in
     ("plain", "batchnorm", "unused", "static", "view", "hook", "builtin_hook", "accumulate")] + [("plain", "python")],
)  # fmt: skip
def test_training_ends_with_the_same_bits(make_job: MakeJob, variant: str, mechanism: str) -> None:  # noqa: F811
    reference = make_job(mechanism, WORLD_SIZE)
    reference.open_generation(1)
    expected = set(reference.results(reference.start_all("undisturbed", variant=variant)))
    if variant == "batchnorm":
        # torch leaves the statistics of the last forward different on each rank; here they are rank 0's.
        expected = {reference.workers[0].result()}
    assert len(expected) == 1

    failures = STATIC_FAILURES if variant == "static" else FAILURES
    if variant == "unused":
        # Adam's state of a branch that has not been used yet does not exist: fail when both have been.
        failures = [(2, "backward", 2), (3, "forward", 0), (4, "backward", 1)]
    job = make_job(mechanism, WORLD_SIZE)
    for generation in range(1, len(failures) + 2):
        job.open_generation(generation)
    workers = job.start_all("survive", variant=variant, failures=failures)
    for generation, (_, _, victim) in enumerate(failures, start=1):
        job.wait_for(f"died/{generation}")
        workers[victim].wait()
        job.abort(generation)
        workers[victim] = job.start(
            "survive", victim, variant=variant, failures=failures, generation=generation + 1, solo=True
        )
    results = job.results(workers)
    assert {result["generation"] for result in results} == {len(failures) + 1}
    assert len({json.dumps(result["layout"]) for result in results}) == 1
    assert {result["digest"] for result in results} == expected
