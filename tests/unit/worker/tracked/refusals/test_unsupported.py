"""What `track` takes out of wrappers, and what it refuses, with real objects of torch in a world of one."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import logging
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from swift_agent.errors import UsageError
from swift_agent.worker.tracked import named
from swift_agent.worker.tracked.refusals.unsupported import scaler_of, unwrapped_optimizer
from tests.support.agent_forks import ForkServer


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Accelerated(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer by name that has no hooks, over the one that it wraps."""

    def __init__(self, optimizer: Any, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


class Fabric:
    """As Lightning's: it takes the class of the one that it wraps for its own, and its attributes."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("FabricSGD", (self.__class__, type(optimizer)), {})

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def test_an_optimizer_is_taken_out_of_its_wrappers() -> None:
    sgd = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    for wrapped in (sgd, Accelerated(sgd), Fabric(sgd), Accelerated(Fabric(sgd))):
        assert unwrapped_optimizer(wrapped) is sgd


def test_one_over_parameters_of_its_own_stays() -> None:
    """Of master weights, for one: what it wraps is not all there is."""
    wrapper = Accelerated(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))
    inner = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)

    class Master:
        optimizer, param_groups = inner, wrapper.param_groups

    master = Master()
    assert unwrapped_optimizer(master) is master
    with pytest.raises(UsageError, match=r"not a torch\.optim\.Optimizer; track the one that it wraps"):
        named.check({"models": {}, "optimizers": {"optimizer": master}, "others": {}})


def test_one_that_never_calls_its_hooks_is_told_what_to_track() -> None:
    """timm's Lookahead has the dicts of hooks, and a step that does not look at them; its state is another's."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
            self._base_optimizer, self.param_groups, self.defaults = base, base.param_groups, base.defaults
            self.state = defaultdict(dict)

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return self._base_optimizer.step(closure)

    net = nn.Linear(2, 1)
    base = torch.optim.SGD(net.parameters(), lr=0.1)
    assert "a Lookahead whose steps have no hooks: track its ._base_optimizer" in refused(net, Lookahead(base))
    named.check({"models": {"model": net}, "optimizers": {"optimizer": base}, "others": {}})


def test_what_is_no_module_is_told_what_to_track() -> None:
    class Engine:
        module = nn.Linear(2, 1)

    with pytest.raises(UsageError, match=r"model is a Engine, not a torch\.nn\.Module: track its \.module"):
        named.check({"models": {"model": Engine()}, "optimizers": {}, "others": {}})


def test_a_wrapper_gives_its_scaler() -> None:
    sgd = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    assert scaler_of(Accelerated(sgd, scaler)) is scaler
    assert scaler_of(Accelerated(sgd, torch.amp.GradScaler("cpu", enabled=False))) is None
    assert scaler_of(sgd) is None


def refused(model: nn.Module, optimizer: Any = None, **others: Any) -> str:
    optimizers = {"optimizer": optimizer or torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(UsageError) as raised:
        named.check({"models": {"model": model}, "optimizers": optimizers, "others": others})
    return str(raised.value)


def accepted(model: nn.Module, **others: Any) -> None:
    optimizers = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    named.check({"models": {"model": model}, "optimizers": optimizers, "others": others})


def test_fsdp1(world: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
    text = refused(model)
    assert "FullyShardedDataParallel (FSDP1)" in text and "fully_shard on a mesh of two dimensions" in text


def test_zero_and_lbfgs(world: None) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(nn.Linear(2, 2))
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    assert "fully_shard on a mesh of two dimensions" in refused(model, zero)
    assert "LBFGS keeps a history of closures" in refused(model, torch.optim.LBFGS(model.parameters()))


def test_averaging_now_and_then(world: None) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = nn.Linear(2, 2)
    gone = weakref.proxy(nn.Linear(1, 1))  # of something that somebody let go: it raises when it is asked for its class
    accepted(model)
    averager = PeriodicModelAverager(period=4)
    assert "with a PeriodicModelAverager ranks hold different parameters" in refused(model)
    named.check({"models": {"model": model}, "optimizers": {}, "others": {}}, replicas=[0])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "is a PostLocalSGDOptimizer" in refused(model, PostLocalSGDOptimizer(sgd, averager))
    del averager
    gc.collect()  # what was raised holds it
    accepted(model)
    del gone
    ddp = DDP(model)
    ddp.register_comm_hook(PostLocalSGDState(None, None, start_localSGD_iter=1), post_localSGD_hook)
    assert "post_localSGD_hook, with which ranks hold different parameters" in refused(ddp)


def test_communication_hooks(world: None) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    for state in (None, dist.group.WORLD):
        ddp = DDP(nn.Linear(2, 2))
        ddp.register_comm_hook(state, default_hooks.fp16_compress_hook)
        accepted(ddp)
    ddp = DDP(nn.Linear(2, 2))
    state = powerSGD_hook.PowerSGDState(None)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    text = refused(ddp)
    assert "powerSGD_hook" in text and "(a PowerSGDState), which a replacement would lack" in text


class Compressor:
    """With the error of what it has sent, as many have it."""

    def __init__(self) -> None:
        self.errors: dict[int, Any] = {}

    def hook(self, state: Any, bucket: Any) -> Any:
        self.errors[bucket.index()] = bucket.buffer()
        return state

    def __call__(self, state: Any, bucket: Any) -> Any:
        return self.hook(state, bucket)


ERRORS: dict[int, Any] = {}
SETTINGS = argparse.Namespace(scale=2.0, ranks=[0, 1])


def with_an_error(errors: Any, state: Any, bucket: Any) -> Any:
    errors[0] = bucket


def in_a_closure() -> Any:
    errors: dict[int, Any] = {}

    def hook(state: Any, bucket: Any) -> Any:
        errors[0] = bucket

    return hook


def counted() -> Any:
    calls = 0

    def hook(state: Any, bucket: Any) -> Any:
        nonlocal calls
        calls += 1

    return hook


def with_a_default(state: Any, bucket: Any, errors: Any = {}) -> Any:  # noqa: B006 (the mistake in question)
    errors[0] = bucket


def in_a_global(state: Any, bucket: Any) -> Any:
    with_an_error(ERRORS, state, bucket)


def around(scale: Any, inner: Any = None) -> Any:
    return lambda state, bucket: bucket if inner is None else inner(state, scale)


KEEPING = {
    "closure": in_a_closure(), "count": counted(), "method": Compressor().hook, "object": Compressor(),
    "partial": functools.partial(with_an_error, {}), "default": with_a_default, "global": in_a_global,
    "tensor": around(torch.zeros(2)), "inside of another": around(1.0, in_a_closure()),
    "counts in settings": functools.partial(with_an_error, argparse.Namespace(n=1)),
    "library": around(torch.Generator()),
}  # fmt: skip


def registered(hook: Any, model: nn.Module | None = None) -> DDP:
    ddp = DDP(model or nn.Linear(2, 2))
    ddp._comm_hooks.append((hook, None))  # as register_comm_hook does, which minds annotations
    return ddp


@pytest.mark.parametrize("kind", KEEPING)
def test_communication_hooks_that_keep_something_elsewhere(world: None, kind: str) -> None:
    """A replacement's error begins at zero, and survivors add theirs twice."""
    assert "which a replacement would lack" in refused(registered(KEEPING[kind]))
    model = registered(KEEPING[kind])
    optimizers = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    named.check({"models": {"model": model}, "optimizers": optimizers, "others": {}}, replicas=[0])


def test_communication_hooks_that_only_read(world: None) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def reads(state: Any, bucket: Any) -> Any:
        scale = SETTINGS.scale * len(SETTINGS.ranks) / dist.get_world_size()
        return torch.futures.Future[Any](), scale, logging.getLogger("hook")

    net = nn.Linear(2, 2)
    kind = torch.float16
    for hook in (
        reads, default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), around((1.0, kind), reads),
        around(net), around(net.weight), around([0, 1]), functools.partial(reads, None), lambda state, bucket: net,
    ):  # fmt: skip
        accepted(registered(hook, net))
    wrapped = default_hooks.fp16_compress_wrapper(in_a_closure())
    assert "has a state on each rank (a dict)" in refused(registered(wrapped))


SCRIPT = """
import sys
import torch
from torch import nn
import swift_agent as swift

job = swift.init("gloo")
net = nn.Linear(4, 1)
inner = torch.optim.SGD(net.parameters(), lr=0.1)
if sys.argv[1] == "accelerate":
    from accelerate import Accelerator

    library = Accelerator(cpu=True)
    model, optimizer = library.prepare(net, inner)
else:
    from lightning.fabric import Fabric

    library = Fabric(accelerator="cpu", devices=1)
    model, optimizer = library.setup(net, inner)
job.track(model=model, optimizer=optimizer)

@job.iteration
def train(x):
    optimizer.zero_grad()
    library.backward(model(x).square().mean())
    optimizer.step()

before = net.weight.detach().clone()
for _ in job.iterations(2):
    train(torch.randn(3, 4))
assert not torch.equal(net.weight, before)
assert job._named.pending["optimizers"]["optimizer"] is inner and type(inner) is torch.optim.SGD
print("tracked", job.iteration_number)
"""


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_wrappers_of_the_libraries_themselves(library: str, forks: ForkServer, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"no {library}: pip install 'swift-agent[strangers]'")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {"PATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = forks.run([str(script), library], environment, tmp_path, 120)
    assert run.returncode == 0 and "tracked 2" in run.stdout, run.stderr
