"""One test per private API of torch: a new torch that changes one fails here, by name, and not in a recovery."""

from __future__ import annotations

import _thread
import collections
import contextlib
import copy
import inspect
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from swift_agent.torch_private import (
    autograd as torch_autograd,
)
from swift_agent.torch_private import (
    ddp as torch_ddp,
)
from swift_agent.torch_private import (
    fsdp as torch_fsdp,
)
from swift_agent.torch_private import groups as torch_private
from swift_agent.torch_private import (
    launcher as torch_launcher,
)
from swift_agent.torch_private import (
    messages as torch_messages,
)
from swift_agent.torch_private import pipeline_parts, pipelining
from swift_agent.torch_private import (
    works as torch_works,
)
from swift_agent.worker.tracked import ddp_buckets as surgery
from tests.support.job import ROOT

MINUTE = timedelta(minutes=1)


@pytest.fixture
def world() -> Iterator[None]:
    """A default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Group creation goes through the wrapper; returns the arguments it has seen. Undone at the end."""
    monkeypatch.setattr(c10d, "_new_process_group_helper", c10d._new_process_group_helper)
    seen: list[dict[str, Any]] = []

    def wrapper(original: Any, arguments: dict[str, Any]) -> Any:
        seen.append(arguments)
        return torch_private.create_on_fake(original, arguments)

    torch_private.wrap_group_creation(wrapper)
    return seen


def small(**options: Any) -> DDP:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    return DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.0004, **options)


def backward(model: DDP) -> None:
    model(torch.ones(2, 8)).sum().backward()


# ------------------------------------------------------------------------------------------------ c10d


def test_every_creation_passes_the_wrapper(wrapped: list[dict[str, Any]]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=2, timeout=MINUTE)
    try:
        group = dist.new_group([1])
        dist.new_group([0])
        from torch.distributed.device_mesh import init_device_mesh

        init_device_mesh("cpu", (2, 1))
    finally:
        dist.destroy_process_group()
    first, second = wrapped[:2]
    assert (first["group_size"], first["group_rank"], list(first["global_ranks_in_group"])) == (2, 1, [])
    assert (second["group_size"], second["group_rank"], list(second["global_ranks_in_group"])) == (1, 0, [1])
    assert first["timeout"] == MINUTE and str(first["backend"]) == "gloo" and first["group_name"] == "0"
    assert {"store", "backend_options", "device_id", "group_desc"} <= first.keys()
    assert group is not None and len(wrapped) > 3, "DeviceMesh makes its groups another way"


def test_a_group_on_fake_answers_as_what_was_asked_for(wrapped: list[dict[str, Any]]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=3)
    try:
        group = dist.group.WORLD
        assert dist.get_backend() == "gloo" and dist.get_backend_config() == "cpu:gloo,cuda:gloo"
        assert type(group) is dist.ProcessGroup and group.name() == "custom"
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1, 1] and not group._has_hooks()
        backward(small())  # its constructor communicates
    except RuntimeError as error:  # a backward on fake fails: torch's fake futures hold nothing
        assert "Expected GenericDict" not in str(error)
    finally:
        dist.destroy_process_group()


def test_the_meaning_of_backend_names() -> None:
    assert torch_private.backends_by_device("gloo") == {"cpu": "gloo", "cuda": "gloo"}
    assert torch_private.backends_by_device("cpu:gloo,cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    assert torch_private.backends_by_device("nccl") == {"cuda": "nccl"}
    assert (torch_private.backend_number("gloo"), torch_private.backend_number("nccl")) == (1, 2)
    assert torch_private.backend_number("fake") == torch_private.FAKE_NUMBER


def test_a_forgotten_group_leaves_its_name_free(world: None) -> None:
    count = torch_private.group_count()
    group = dist.new_group([0])
    assert torch_private.is_registered(group) and torch_private.global_ranks(group) == [0]
    torch_private.forget_group(group, group.group_name)
    torch_private.set_group_count(count)
    assert not torch_private.is_registered(group)
    assert dist.new_group([0]).group_name == group.group_name


def test_new_groups_take_the_default_groups_store(world: None) -> None:
    store = dist.HashStore()
    torch_private.set_group_store(dist.group.WORLD, store)
    dist.barrier(dist.new_group([0]))
    assert store.num_keys() > 0


def test_a_number_keeps_its_first_backend(world: None) -> None:
    group = dist.group.WORLD
    fakes = [torch_private.make_fake(0, 1) for _ in range(2)]
    for number, fake in ((70, fakes[0]), (71, fakes[1]), (70, fakes[1])):
        torch_private.register_backend(group, ["cpu"], number, fake)
        torch_private.set_names(group, "0", "default_pg")
    assert torch_private.get_backend(group, "cpu") is fakes[0]
    assert group.group_name == "0" and group.group_desc == "default_pg"


def test_gloo_is_made_as_torch_makes_it(world: None) -> None:
    ours = torch_private.make_gloo(dist.HashStore(), 0, 1, MINUTE, "name", [0])
    assert ours.options._timeout == MINUTE and ours.options.group_name == "name"
    assert list(ours.options.global_ranks_in_group) == [0]
    tensor = torch.ones(1)
    ours.allreduce([tensor]).wait()
    assert "backend_class.options.group_name = group_name" in _source_that_makes("gloo"), "torch sets other options now"


def _source_that_makes(backend: str) -> str:
    """Since torch 2.14 there is a function for each, which gets all at once."""
    own = getattr(c10d, f"_create_{backend}_process_group", None)
    source = inspect.getsource(own or c10d._new_process_group_helper)
    return source.replace("opts.group_id", "group_name").replace("opts.", "")


def test_nccl_options_are_those_that_torch_sets() -> None:
    """Without a GPU only torch's own code can be compared."""
    source = _source_that_makes("nccl")
    for line in (
        "backend_options = ProcessGroupNCCL.Options()",
        "backend_options.is_high_priority_stream = False",
        "backend_options._timeout = timeout",
        "backend_options.global_ranks_in_group = global_ranks_in_group",
        "backend_options.group_name = group_name",
    ):
        assert line in source


def test_torchcomms_is_off_by_default() -> None:
    assert not torch_private.uses_torchcomms()


def test_split_group_is_replaced_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import device_mesh

    for module in (c10d, dist, device_mesh):
        monkeypatch.setattr(module, "split_group", module.split_group)
    replacement = object()
    torch_private.wrap_split_group(replacement)  # type: ignore[arg-type]
    assert dist.split_group is c10d.split_group is device_mesh.split_group is replacement


# ------------------------------------------------------------------------------------------------ DDP


def test_a_layout_is_read_and_installed(world: None) -> None:
    model = small()
    assert torch_ddp.num_reducer_parameters(model) == 8
    assert torch_ddp.read_layout(model) == [list(range(8))]
    layout = [[7, 0], [3], [6, 5, 4], [1, 2]]
    assert torch_ddp.rebuild_layout(model, layout)
    assert torch_ddp.read_layout(model) == layout and model._has_rebuilt_buckets
    backward(model)
    backward(model)
    assert torch_ddp.read_layout(model) == layout
    assert not torch_ddp.rebuild_layout(model, layout), "it rebuilds once"
    assert model.reducer is not None and model.process_group is dist.group.WORLD


def test_the_order_of_arrival_gives_torchs_own_layout(world: None) -> None:
    ours, theirs = small(), small()
    assert not torch_ddp.rebuild_layout(ours, None)
    for model in (ours, theirs):
        backward(model)
    assert torch_ddp.rebuild_layout(ours, None)
    theirs(torch.ones(2, 8))
    assert torch_ddp.read_layout(ours) == torch_ddp.read_layout(theirs) != [list(range(8))]


def test_a_layout_of_another_model_is_refused(world: None) -> None:
    with pytest.raises(RuntimeError, match="bucket layout of 3 entries"):
        torch_ddp.rebuild_layout(small(), [[0, 1]])


@pytest.mark.parametrize("when", ["before anybody looked", "after that"])
def test_a_reducer_keeps_its_parameters_whatever_is_frozen_later(world: None, when: str) -> None:
    """As the discriminator of a GAN, while the generator has its turn; one layer was frozen from the beginning."""

    def made() -> DDP:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8) for _ in range(4)]
        layers[1].requires_grad_(False)
        return DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.0004)

    model, expected = made(), made()
    if when == "after that":
        assert torch_ddp.num_reducer_parameters(model) == 6
    model.requires_grad_(False)
    model.module[1].requires_grad_(True)
    assert torch_ddp.num_reducer_parameters(model) == 6 and torch_ddp.is_frozen(model)
    assert torch_ddp.read_layout(model) == torch_ddp.read_layout(expected)
    switched = [parameter.requires_grad for parameter in model.parameters()]
    torch_ddp.renew_reducer(model)
    assert [parameter.requires_grad for parameter in model.parameters()] == switched
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        parameter.requires_grad_(other.requires_grad)
    assert not torch_ddp.is_frozen(model)
    for each in (model, expected):
        backward(each)
        backward(each)
    model.requires_grad_(False)
    assert torch_ddp.read_layout(model) == torch_ddp.read_layout(expected)
    assert len(torch_ddp.read_layout(model)) > 1 and model._has_rebuilt_buckets
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert other.grad is None or (parameter.grad is not None and parameter.grad.equal(other.grad))


def test_an_unfinished_backward_is_found_and_reset(world: None) -> None:
    model = small()
    backward(model)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("in the middle")

    handle = next(iter(model.parameters())).register_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        backward(model)
    handle.remove()
    assert torch_ddp.has_unfinished_backward(model)
    torch_ddp.reset_reducer(model)
    assert not torch_ddp.has_unfinished_backward(model) and not model._has_rebuilt_buckets
    backward(model)


def double(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, as objects
    state.append(bucket.index())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_new_reducer_keeps_hooks_and_starts_over(world: None, static_graph: bool) -> None:
    model = small(static_graph=static_graph)
    calls: list[int] = []
    model.register_comm_hook(calls, double)
    for _ in range(3):
        backward(model)
    assert len(torch_ddp.read_layout(model)) > 1
    old, num_calls = model.reducer, len(calls)
    torch_ddp.renew_reducer(model)
    assert model.reducer is not old and torch_ddp.read_layout(model) == [list(range(8))]
    model.zero_grad()
    backward(model)
    assert len(calls) > num_calls, "the communication hook is gone"
    expected = copy.deepcopy(model.module)
    expected.zero_grad()
    expected(torch.ones(2, 8)).sum().backward()
    for one, other in zip(model.module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad * 2), "the old reducer still runs too"


def test_a_new_reducer_keeps_a_builtin_hook(world: None) -> None:
    model = small()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined]
    with torch.no_grad():
        model.module[0].weight.fill_(1 + 2**-14)
    backward(model)
    torch_ddp.renew_reducer(model)
    model.zero_grad()
    backward(model)
    for one in model.module.parameters():
        assert torch.equal(one.grad, one.grad.half().float())


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.linear(x)


def test_buffers_are_synchronised_after_forward_instead_of_before(world: None) -> None:
    model = DDP(Counting())
    before: list[float] = []
    torch_ddp.hook_buffers_after_forward(model, lambda ddp, buffers: before.append(buffers["seen"].item()))
    assert torch_ddp.has_buffer_hook(model)
    for synchronise in (True, False, True):
        torch_ddp.set_buffer_sync(model, synchronise)
        backward(model)
    assert before == [1, 3], "the hook runs before forward, or DDP decides by something else"
    torch_ddp.broadcast_buffers(model)
    torch_ddp.drop_buffer_hook(model)
    assert not torch_ddp.has_buffer_hook(model)
    backward(model)
    assert before == [1, 3]


def test_join_is_recognised(world: None) -> None:
    model = small()
    assert not torch_ddp.is_in_join(model)
    with model.join():
        assert torch_ddp.is_in_join(model)
        backward(model)


# ------------------------------------------------------------------------------------------------
# swift_agent.worker.tracked.ddp_buckets


def test_a_module_that_cannot_be_carried_over_is_refused(world: None) -> None:
    sparse = DDP(torch.nn.Embedding(4, 4, sparse=True))
    with pytest.raises(surgery.UnsupportedModule, match="sparse"):
        surgery.BucketKeeper(sparse)
    localized = torch.nn.Linear(4, 4)
    localized.weight._st_info = "of torch's _pre_dp_module_transform"  # type: ignore[attr-defined]
    with pytest.raises(surgery.UnsupportedModule, match="use fully_shard on a mesh"):
        surgery.BucketKeeper(DDP(localized))
    with pytest.raises(surgery.UnsupportedModule, match="another model"):
        surgery.adopt_layout(small(), [[0, 1, 2]])
    unused = small(find_unused_parameters=True)
    with pytest.raises(surgery.UnsupportedModule, match="another model"):
        surgery.adopt_layout(unused, [list(range(8))])
    surgery.adopt_layout(unused, surgery.bucket_layout(unused))
    assert surgery.expected_layout(unused) is None


def test_the_keeper_knows_which_layout_belongs_to_which_iteration(world: None) -> None:
    model = small()
    keeper = surgery.BucketKeeper(model)
    keeper.iteration = 5
    with model.no_sync():
        backward(model)
    assert keeper.layout_for(6) is None, "nothing has been synchronised"
    keeper.iteration = 6
    backward(model)
    keeper.iteration = 7
    assert keeper.layout_for(6) is None
    final = keeper.layout_for(7)
    assert final is not None and len(final) > 1
    keeper.restore(None)
    assert surgery.bucket_layout(model) == [list(range(8))] and not surgery.buckets_rebuilt(model)
    backward(model)
    assert keeper.layout_for(8) == final
    keeper.restore(final)
    backward(model)
    assert surgery.bucket_layout(model) == final
    surgery.reset_after_abort(model)
    backward(model)
    assert surgery.bucket_layout(model) == final


def test_the_keeper_of_a_network_that_is_frozen_now_and_then(world: None) -> None:
    """It was when the first forward came, which so had no backward; and is when a failure, or a checkpoint, comes."""
    model = small()
    keeper = surgery.BucketKeeper(model)
    keeper.begin(0)
    model.requires_grad_(False)
    model(torch.ones(2, 8))
    assert keeper.layout_for(1) is None and keeper.is_settled(1)
    model.requires_grad_(True)
    keeper.begin(1)
    backward(model)
    model.requires_grad_(False)
    final = keeper.layout_for(2)
    assert final is not None and len(final) > 1
    replacement = small()
    other = surgery.BucketKeeper(replacement)
    replacement.requires_grad_(False)
    for one in (keeper, other):
        one.restore(final)
        one.ddp.requires_grad_(True)
        backward(one.ddp)
        one.ddp.requires_grad_(False)
        assert surgery.bucket_layout(one.ddp) == one.layout_for(3) == final
        one.restore(None)
    assert surgery.bucket_layout(model) == surgery.bucket_layout(replacement) == [list(range(8))]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("num", [1, 2])
def test_a_forward_without_a_backward_is_forgotten_where_a_rank_runs_alone(
    world: None, options: dict[str, bool], num: int
) -> None:
    model = small(**options)
    keeper = surgery.BucketKeeper(model)
    for number in range(num):
        keeper.begin(number)
        backward(model)
    layout, gradients = keeper.layout_for(num), [parameter.grad for parameter in model.parameters()]
    before = [None if each is None else each.clone() for each in gradients]
    model(torch.ones(2, 8))
    reduced = list[int]()
    model.register_comm_hook(reduced, double)
    keeper.begin_alone()
    assert [None if parameter.grad is None else parameter.grad.tolist() for parameter in model.parameters()] == [
        None if each is None else each.tolist() for each in before
    ]
    with model.no_sync():
        backward(model)
    assert not reduced and keeper.layout_for(num) == layout
    backward(model)
    assert reduced


def test_what_the_first_backward_has_recorded_is_kept(world: None) -> None:
    model, expected = small(), small()
    keeper = surgery.BucketKeeper(model)
    keeper.begin(0)
    for each in (model, expected):
        backward(each)
    keeper.begin_alone()
    with model.no_sync():
        backward(model)
    for each in (model, expected):
        backward(each)
    assert surgery.bucket_layout(model) == surgery.bucket_layout(expected) != [list(range(8))]


def test_buffers_are_left_alone_where_ddp_would_leave_them(world: None) -> None:
    assert not surgery.sync_buffers_after_forward(small())
    assert not surgery.sync_buffers_after_forward(DDP(Counting(), broadcast_buffers=False))
    model = DDP(Counting())
    assert surgery.sync_buffers_after_forward(model)
    assert not surgery.sync_buffers_after_forward(model), "a hook is there"
    with model.join():
        backward(model)
    assert not torch_ddp.has_buffer_hook(model)


def test_lazily_connected_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from swift_agent.worker.groups import process_groups as process_group

    monkeypatch.setattr(process_group, "_installed", None)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with pytest.raises(RuntimeError, match="TORCH_GLOO_LAZY_INIT"):
        process_group.install()
    assert process_group._installed is None and os.environ["TORCH_GLOO_LAZY_INIT"] == "1"


def test_installing_over_existing_groups_is_refused(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from swift_agent.worker.groups import process_groups as process_group

    monkeypatch.setattr(process_group, "_installed", None)
    with pytest.raises(RuntimeError, match="exist already"):
        process_group.install()


# ------------------------------------------------------------------------------------------------ updates in backward


def test_a_communication_hook_is_seen_however_it_was_registered(world: None) -> None:
    assert not torch_ddp.has_comm_hook(small())
    builtin, own = small(), small()
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)  # type: ignore[attr-defined]
    own.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    assert torch_ddp.has_comm_hook(builtin) and torch_ddp.has_comm_hook(own)


def test_after_backward_means_after_ddps_own_end(world: None) -> None:
    """Then gradients are what the optimizer will see, in the first bucket too."""
    model, found = small(), []
    parameters = list(model.parameters())

    def hook(state: Any, bucket: Any) -> Any:
        torch_autograd.after_backward(lambda: found.append([float(p.grad.sum()) for p in parameters]))  # type: ignore[union-attr]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 2.0))
        return future

    model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    for _ in range(2):  # all in one bucket, then in several
        model.zero_grad()
        backward(model)
    assert len(found) > 2 and found == [[2.0 * p.numel() for p in parameters]] * len(found)


def test_a_step_of_some_parameters_is_that_of_the_optimizer_without_its_hooks() -> None:
    def made() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        parameters = [torch.nn.Parameter(torch.full((3,), float(n))) for n in range(4)]
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}]
        return parameters, torch.optim.AdamW(groups, lr=0.1)

    (whole, plain), (parts, optimizer) = made(), made()
    hooks: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: hooks.append("before"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step on the object
    plain.step()
    for some in ([parts[3], parts[0]], [parts[1], parts[2]]):
        groups = [{**group, "params": [p for p in group["params"] if any(p is one for one in some)]}
                  for group in optimizer.param_groups]  # fmt: skip
        torch_autograd.step_groups(optimizer, groups)
    assert all(map(torch.equal, whole, parts)) and not hooks
    assert set(optimizer.state) == set(parts) and [len(group["params"]) for group in optimizer.param_groups] == [2, 2]


def test_an_agent_does_not_import_what_only_models_need() -> None:
    """FSDP, the compiler and sympy take a second, which every node would pay at its start."""
    code = "import swift_agent.run, swift_agent.agent.main, sys; print(sys.modules.keys() & set(sys.argv))"
    heavy = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "sympy"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# ------------------------------------------------------------------------------------------------ point-to-point


def test_pythons_messages_pass_the_wrapper(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("send", "recv", "recv_anysource"):
        monkeypatch.setattr(dist.ProcessGroup, name, getattr(dist.ProcessGroup, name))
    seen: list[tuple[Any, ...]] = []

    def serve(original: Any, group: Any, tensors: list[torch.Tensor], *where: int) -> Any:
        seen.append((original.__name__, group.group_name, len(tensors), *where))
        return torch_works.finished_work()

    torch_messages.intercept_messages("log", serve, serve, serve)
    one, name = torch.zeros(2), dist.group.WORLD.group_name  # type: ignore[union-attr]
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, one, 0, tag=3), dist.P2POp(dist.irecv, one, 0, tag=4)]):
        assert work.wait() and work.is_completed()
    assert dist.irecv(one, 0, tag=5).wait()  # type: ignore[union-attr]
    assert dist.irecv(one, tag=6).wait()  # type: ignore[union-attr]
    assert dist.group.WORLD.send(tensors=[one], tag=8, dstRank=0).wait()  # type: ignore[union-attr]
    assert dist.group.WORLD.recv([one], tag=9, srcRank=0).wait()  # type: ignore[union-attr]
    assert seen == [
        ("send", name, 1, 0, 3), ("recv", name, 1, 0, 4), ("recv", name, 1, 0, 5), ("recv_anysource", name, 1, 6),
        ("send", name, 1, 0, 8), ("recv", name, 1, 0, 9),
    ]  # fmt: skip
    with torch_messages.plain_messages(), contextlib.suppress(RuntimeError):  # gloo has no connection to itself
        dist.isend(one, 0, tag=10)
    with torch_messages.plain_messages(), contextlib.suppress(RuntimeError):
        dist.group.WORLD.recv([one], tag=11, srcRank=0)  # type: ignore[union-attr]
    assert len(seen) == 6
    assert dist.isend(one, 0, tag=12).wait() and seen[6:] == [("send", name, 1, 0, 12)]  # type: ignore[union-attr]


@pytest.mark.parametrize("made", [("log", "schedules"), ("schedules", "log")])
def test_what_a_schedule_is_served_is_not_logged(
    made: tuple[torch_messages.Layer, ...], world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two is made first."""
    for name in ("send", "recv", "recv_anysource"):
        monkeypatch.setattr(dist.ProcessGroup, name, getattr(dist.ProcessGroup, name))
    seen: list[str] = []
    serves = True

    def schedule(original: Any, *args: Any) -> Any:
        seen.append("schedules")
        return torch_works.finished_work() if serves else original(*args)

    def log(original: Any, *args: Any) -> Any:
        seen.append("log")
        assert not hasattr(original, "_layers"), "torch is the last one"
        return torch_works.finished_work()

    for layer in made:
        one = schedule if layer == "schedules" else log
        torch_messages.intercept_messages(layer, one, one, one)
    assert dist.irecv(torch.zeros(2), 0).wait() and seen == ["schedules"]  # type: ignore[union-attr]
    serves = False
    assert dist.isend(torch.zeros(2), 0).wait() and seen == ["schedules", "schedules", "log"]  # type: ignore[union-attr]


def test_a_batch_that_raises_is_over(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would only note the all-reduce, and return."""
    monkeypatch.setattr(c10d, "_coalescing_manager", c10d._coalescing_manager)
    monkeypatch.setattr(torch_messages, "_cut_batches", [])
    torch_messages.mend_batches()
    with pytest.raises(RuntimeError, match="cut"), c10d._coalescing_manager():
        dist.all_reduce(torch.zeros(1))
        raise RuntimeError("cut")
    assert dist.all_reduce(torch.zeros(1), async_op=True) is not None, "it was made"
    with c10d._coalescing_manager(async_ops=True) as batch:
        dist.all_reduce(torch.zeros(1))
    assert len(batch.works) == 1 and not torch_messages.batch_was_cut()


@pytest.mark.parametrize("place", ["begin", "body", "end"])
def test_of_a_batch_that_a_backend_makes_at_once(place: str, world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What raises when such a batch has begun leaves the backend within it."""
    def check(at: str) -> None:
        if at == place:
            raise RuntimeError("cut")

    monkeypatch.setattr(c10d, "_coalescing_manager", c10d._coalescing_manager)
    monkeypatch.setattr(torch_messages, "_cut_batches", [])
    monkeypatch.setattr(dist.ProcessGroup, "_start_coalescing", lambda group, device: check("begin"))
    monkeypatch.setattr(dist.ProcessGroup, "_end_coalescing", lambda group, device: check("end"))
    torch_messages.mend_batches()
    with pytest.raises(RuntimeError, match="cut"), c10d._coalescing_manager(None, torch.device("cpu"), True):
        check("body")
    assert dist.group.WORLD not in c10d._world.pg_coalesce_state
    assert torch_messages.batch_was_cut() == (place != "begin")


def test_collectives_that_give_all_the_same(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that Python calls, by name, with what they fill; and nothing else."""
    for name in torch_messages.ALIKE:
        monkeypatch.setattr(dist.ProcessGroup, name, getattr(dist.ProcessGroup, name))
    seen: list[tuple[str, list[int]]] = []

    def watch(name: str, group: Any, outputs: Any, call: Any) -> Any:
        assert group is dist.group.WORLD
        seen.append((name, [id(tensor) for tensor in outputs()]))
        return call()

    torch_messages.wrap_collectives(watch)
    one, other = torch.ones(2), torch.zeros(2)
    dist.all_reduce(one)
    dist.all_reduce_coalesced([one, other])
    dist.broadcast(one, 0)
    dist.all_gather([other], one)
    dist.all_gather_single(other, one)
    dist.group.WORLD._allgather_base(other, one).wait()  # type: ignore[union-attr]
    dist.barrier()
    dist.group.WORLD.allreduce(tensor=one).wait()  # type: ignore[call-overload, union-attr]
    both = [id(one), id(other)]
    assert seen == [
        ("allreduce", both[:1]), ("allreduce_coalesced", both), ("broadcast", both[:1]), ("allgather", both[1:]),
        ("all_gather_single", both[1:]), ("_allgather_base", both[1:]), ("barrier", []), ("allreduce", both[:1]),
    ]  # fmt: skip
    assert other.tolist() == [1.0, 1.0] and len(seen) == 8
    objects = [None]
    dist.all_gather_object(objects, "anything")
    dist.broadcast_object_list(objects, 0)
    gather = "allgather" if torch.__version__ < "2.15" else "all_gather_single"
    assert objects == ["anything"] and [name for name, _ in seen[8:]] == [gather] * 2 + ["broadcast"] * 2
    dist.reduce(one, 0)
    dist.gather(one, [other])
    assert len(seen) == 12


def test_the_threads_of_a_backward() -> None:
    """Those of a GPU are torch's; here one is made in their way, that Python has not started. The script's are none."""
    seen: list[bool] = []

    def backward() -> None:
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: seen.append(torch_autograd.is_in_backward()))
        y.sum().backward()
        seen.append(torch_autograd.is_in_backward())

    backward()
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert seen == [False] * 4
    done = threading.Event()
    _thread.start_new_thread(lambda: (backward(), done.set()), ())
    assert done.wait(10.0) and seen[4:] == [True, False]


def test_ways_past_process_groups() -> None:
    """Of another process, as they cannot be left again."""
    script = """
import os, torch, torch.distributed as dist
from swift_agent.torch_private import messages as torch_messages
print(torch_messages.ways_past_c10d())
import torch.distributed.rpc as rpc
import torch.distributed._symmetric_memory as symmetric
print(torch_messages.ways_past_c10d())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
symmetric._test_mode  # imported, and not used
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
    init_method="tcp://127.0.0.1:0"))
print(torch_messages.ways_past_c10d())
rpc.shutdown()
torch_messages.watch_symmetric_memory()
try:
    symmetric.rendezvous(torch.zeros(2), dist.group.WORLD)  # which there is not for the CPU
except RuntimeError:
    print(torch_messages.ways_past_c10d())
torch_messages._symmetric_memory_is_used = False
print(torch_messages.ways_past_c10d())
symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)
print(torch_messages.ways_past_c10d())
dist.destroy_process_group()
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    seen = ["[]", "[]", "['torch.distributed.rpc']", "['symmetric memory']", "[]", "['symmetric memory']"]
    assert found.stdout.splitlines() == seen, found.stderr


# ------------------------------------------------------------------------------------------------ FSDP


def test_fsdp_forgets_what_was_cut_and_keeps_what_is_reduced(world: None) -> None:
    """An update may come of gradients that are complete; those that are not would be added to the next ones."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    torch_fsdp.reset_fsdp(fully_shard(torch.nn.Sequential(torch.nn.Linear(3, 3))))  # before its first forward
    mesh = init_device_mesh("cpu", (1,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    root = fully_shard(net, mesh=mesh)
    root(torch.ones(2, 3)).square().sum().backward()
    reduced = [parameter.grad for parameter in net.parameters()]
    kept = [gradient.full_tensor().clone() for gradient in reduced]
    root.set_requires_gradient_sync(False)
    root(torch.ones(2, 3)).square().sum().backward()
    root(torch.ones(2, 3))
    assert torch_fsdp.has_unreduced_gradients(root)
    torch_fsdp.reset_fsdp(root)
    assert not torch_fsdp.has_unreduced_gradients(root)
    assert all(parameter.grad is gradient for parameter, gradient in zip(net.parameters(), reduced, strict=True))
    assert all(map(torch.equal, kept, (gradient.full_tensor() for gradient in reduced)))
    net.zero_grad()
    root.set_requires_gradient_sync(True)
    root(torch.ones(2, 3)).square().sum().backward()
    assert all(map(torch.equal, kept, (parameter.grad.full_tensor() for parameter in net.parameters())))


# ------------------------------------------------------------------------------------------------ pipelining


def test_a_stage_in_ddp_reduces_once_or_not_at_all(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch prepares for the reduction after the last micro-batch whatever `no_sync` says; and in the first step,
    when shapes are found out, also after the first one."""
    from torch.distributed.pipelining import PipelineStage, schedules

    monkeypatch.setattr(schedules.PipelineScheduleSingle, "_initialize_stage",
                        schedules.PipelineScheduleSingle._initialize_stage)  # fmt: skip
    model = DDP(torch.nn.Linear(3, 3))
    pipelining.watch_schedules(lambda schedule, first: model.no_sync())
    reduced: list[int] = []

    def hook(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        reduced.append(step)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, lambda state, bucket: hook(bucket))
    schedule = schedules.Schedule1F1B(PipelineStage(model, 0, 1, torch.device("cpu")), 4, loss_fn=torch.nn.MSELoss())
    for step in range(3):
        with pipelining.without_last_backward() if step == 1 else contextlib.nullcontext():
            schedule.step(torch.ones(8, 3), target=torch.zeros(8, 3))
    assert reduced == [0, 2]


@pytest.mark.parametrize("kind", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_a_cut_step_of_a_pipeline_is_forgotten(kind: str, world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pipeline of one rank, with one stage or two: the step after it gives what it would have given."""
    from torch.distributed.pipelining import PipelineStage, schedules

    for owner, name in ((schedules.PipelineScheduleSingle, "_initialize_stage"),
                        (schedules.PipelineScheduleMulti, "_initialize_stages")):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))
    steps: list[tuple[Any, bool]] = []
    pipelining.watch_schedules(lambda schedule, first: contextlib.nullcontext(steps.append((schedule, first))))
    torch.manual_seed(0)
    num_stages = 1 if kind == "Schedule1F1B" else 2
    modules = [torch.nn.Linear(3, 3) for _ in range(num_stages)]
    stages = [PipelineStage(module, i, num_stages, torch.device("cpu")) for i, module in enumerate(modules)]
    assert [pipelining.pipeline_stage(stage) for stage in stages] == modules
    assert pipelining.pipeline_stage(modules[0]) is None
    cut = 0

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal cut
        cut -= 1
        if cut == 0:
            raise ConnectionError
        return (output - target).square().sum()

    schedule = getattr(schedules, kind)(stages if num_stages > 1 else stages[0], 4, loss_fn=loss_of)

    def step() -> list[torch.Tensor]:
        for module in modules:
            module.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(torch.ones(8, 3), target=torch.zeros(8, 3), losses=losses)
        return [*losses, *(module.weight.grad.clone() for module in modules)]

    reference = step()
    assert all(map(torch.equal, reference, step()))
    cut = 3
    with pytest.raises(Exception):  # noqa: B017 - torch wraps it, or not
        step()
    for stage in stages[1:]:
        (info,) = stage.args_recv_info[3]
        if hasattr(info, "allocate_buffer"):  # from torch 2.15 on there is memory left where a receive was cut
            info.allocate_buffer("cpu")
    pipelining.reset_schedule(schedule, first=False)
    assert all(map(torch.equal, reference, step()))
    pipelining.reset_schedule(schedule, first=True)
    assert all(map(torch.equal, reference, step()))
    assert steps == [(schedule, first) for first in (True, False, False, False, True)]


class Kept:
    """`Parts` that keep what each part has made; once *are_given*, no part is made but given that."""

    def __init__(self) -> None:
        self.are_given = False
        self.made: dict[tuple[str, int, int], Any] = {}

    def step(self, schedule: Any, num_micro_batches: int, given: Any, losses: Any, call: Any) -> Any:
        return call(losses)

    def receive(self, number: int, memory: Any) -> None:
        assert not memory  # there is one rank only

    def forward(self, stage: Any, number: int, call: Any, keeps_output: bool) -> Any:
        key = "output", stage.stage_index, number
        if self.are_given:
            return pipeline_parts.give_output(stage, number, self.made[key], keeps_output)
        output = call()
        self.made[key] = output.detach().clone()
        return output

    def loss(self, schedule: Any, number: int, call: Any) -> Any:
        if self.are_given:
            return pipeline_parts.give_loss(schedule, self.made["loss", 0, number])
        call()
        self.made["loss", 0, number] = pipeline_parts.last_loss(schedule).detach().clone()

    def backward(self, stage: Any, number: int, call: Any) -> Any:
        key = "input", stage.stage_index, number
        if self.are_given:
            return pipeline_parts.give_input_gradients(stage, number, self.made[key])
        call()
        self.made[key] = pipeline_parts.input_gradients(stage, number)

    def weights(self, stage: Any, number: int, call: Any) -> Any:
        return None if self.are_given else call()

    def scale(self, stage: Any, call: Any) -> Any:
        return call()


@pytest.mark.parametrize("kind", ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
def test_parts_of_a_step_are_given_what_was_computed(kind: str, world: None) -> None:
    """Once or several times, and after a step that was cut; nothing of it is left in the step after that."""
    from torch.distributed.pipelining import PipelineStage, schedules

    num_stages = 1 if kind == "Schedule1F1B" else 2
    modules = [torch.nn.Linear(3, 3) for _ in range(num_stages)]
    stages = [PipelineStage(module, i, num_stages, torch.device("cpu")) for i, module in enumerate(modules)]
    cut = 0

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal cut
        cut -= 1
        if cut == 0:
            raise ConnectionError
        return (output - target).square().sum()

    schedule = getattr(schedules, kind)(stages if num_stages > 1 else stages[0], 4, loss_fn=loss_of)
    assert pipeline_parts.keeps_known_parts(schedule) and pipeline_parts.loss_of(schedule) is loss_of
    parts = Kept()

    def step() -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        for module in modules:
            module.zero_grad()
        losses: list[torch.Tensor] = []
        output = schedule.step(torch.ones(8, 3), target=torch.zeros(8, 3), losses=losses)
        return [output, *losses], [module.weight.grad for module in modules]

    assert pipelining.is_first_step(schedule)
    with pipeline_parts.around_parts(parts):
        results, gradients = step()
        assert not pipelining.is_first_step(schedule)
        for _ in range(2):
            parts.are_given = False
            cut = 3
            with pytest.raises(Exception):  # noqa: B017 - torch wraps it, or not
                step()
            parts.are_given = True
            for _ in range(2):
                pipeline_parts.begin_again(schedule)
                again, none = step()
                assert all(map(torch.equal, results, again)) and none == [None] * num_stages
    assert all(getattr(info, "allocate_buffer", None) is None or info.buffer is None  # of torch 2.15
               for stage in stages for infos in stage.args_recv_info.values() for info in infos)  # fmt: skip
    pipeline_parts.begin_again(schedule)
    again, found = step()
    assert all(map(torch.equal, results, again))
    assert all(one is not None and other is not None and torch.equal(one, other)
               for one, other in zip(gradients, found, strict=True))  # fmt: skip


@pytest.mark.parametrize("votes", [[1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0]])
@pytest.mark.parametrize("rank_of", [[0, 1, 2], [2, 0, 1], [0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0]])
def test_stages_agree_by_messages(rank_of: list[int], votes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One on each rank, several, or a pipeline that comes back: all ranks have the least vote, as of an all-reduce."""
    mine = threading.local()
    sent: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = collections.defaultdict(queue.SimpleQueue)

    def send(tensor: torch.Tensor, *, group: Any, group_dst: int) -> None:
        sent[mine.rank, group_dst].put(tensor.clone())

    def recv(tensor: torch.Tensor, *, group: Any, group_src: int) -> None:
        tensor.copy_(sent[group_src, mine.rank].get(timeout=10.0))

    monkeypatch.setattr(dist, "send", send)
    monkeypatch.setattr(dist, "recv", recv)

    def run(rank: int) -> int:
        mine.rank = rank
        stages = [
            SimpleNamespace(stage_index=stage, group_rank=rank, stage_index_to_group_rank=dict(enumerate(rank_of)))
            for stage in range(len(rank_of)) if rank_of[stage] == rank
        ]  # fmt: skip
        vote = torch.tensor([votes[rank]], dtype=torch.int32)
        pipelining.Agreeing(stages).all_reduce(vote, op=dist.ReduceOp.MIN, group="theirs")
        return int(vote.item())

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [min(votes)] * 3
    assert all(each.empty() for each in sent.values())


@pytest.mark.parametrize("compiled", [False, True])
def test_no_sync_holds_where_the_script_sets_the_flag(compiled: bool, world: None) -> None:
    module = DDP(torch.nn.Linear(4, 1))
    reductions: list[int] = []

    def hook(state, bucket):  # DDP reads annotations
        reductions.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    module.register_comm_hook(None, hook)
    model = torch.compile(module, backend="eager") if compiled else module

    def iteration() -> int:
        before = len(reductions)
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            model(torch.ones(3, 4)).sum().backward()
            assert module.require_backward_grad_sync is (micro == 1)
        return len(reductions) - before

    assert [iteration(), iteration()] == [1, 1]
    with module.no_sync(), surgery.stays_unsynchronised(module):
        assert iteration() == 0
    assert iteration() == 1


def test_a_server_of_timers_ends_and_kills_only_workers(tmp_path: Path) -> None:
    """Also one that no worker has written to: its thread waits in the opening of the pipe."""
    before, told = threading.active_count(), []
    server = torch_launcher.FileTimers(str(tmp_path / "pipe"), "job", 0.1, log_event=lambda name, _: told.append(name))
    server.start()
    assert server._reap_worker(os.getpid(), signal.SIGKILL)
    server.stop()
    deadline_s = time.monotonic() + 5.0
    while threading.active_count() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert told == ["watchdog started", "watchdog stopped"] and not (tmp_path / "pipe").exists()


def test_whose_seed_it_is() -> None:
    code = """
import torch
from swift_agent.torch_private import seeds
found = [seeds.is_given()]
for seed in (0, -1, 1 << 60):
    torch.manual_seed(seed)
    found.append(seeds.is_given())
torch.seed()
found.append(seeds.is_given())
torch.manual_seed(7)
torch.default_generator.manual_seed(8)
found.append(seeds.is_given())
assert found == [False, True, True, True, False, False], found
"""
    path = ":".join(str(ROOT / part) for part in (".", "rendezvous", "recovery", "logging_store"))
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path, "PATH": ""}, check=True, timeout=60)
