"""Every private API of torch that swift-agent uses, one small function each, with `torch_pipelining`; nothing else may
touch one.

tests/unit/agent/test_torch_private.py has a test per function that fails when a new torch changes it. Tested with torch
2.13; the names have been there since 2.10. It must never hold a decision: what is done when is up to the callers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.elastic.timer.file_based_local_timer import FileTimerServer
from torch.nn.parallel import DistributedDataParallel as DDP

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

Backend = Any  # c10d::Backend and its subclasses; torch exports no common Python name for them
Layout = list[list[int]]  # bucket -> indices into the reducer's parameters, in reduction order

FAKE_NUMBER = 6  # BackendType.CUSTOM: what torch registers its fake backend under
# --------------------------------------------------------------------------------------------- c10d: creating groups


def wrap_group_creation(wrapper: Callable[[Callable[..., Any], dict[str, Any]], Any]) -> None:
    """From now on `wrapper(original, arguments)` makes every group of init_process_group, new_group and DeviceMesh.

    `arguments` has every parameter of torch's `_new_process_group_helper` by name; the result is (group, store), or
    (GroupMember.NON_GROUP_MEMBER, None).
    """
    original = c10d._new_process_group_helper
    signature = inspect.signature(original)

    def create(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return wrapper(original, dict(bound.arguments))

    c10d._new_process_group_helper = create


def wrap_split_group(replacement: Callable[..., Any]) -> None:
    """`dist.split_group` becomes `replacement` (same parameters), for DeviceMesh too."""
    from torch.distributed import device_mesh

    for module in (c10d, dist, device_mesh):
        if hasattr(module, "split_group"):
            setattr(module, "split_group", replacement)  # noqa: B010 - mypy refuses to assign to a function


def uses_torchcomms() -> bool:
    """Whether torch makes groups on torchcomms communicators, which cannot be exchanged."""
    enabled = getattr(c10d, "_use_torchcomms_enabled", None)
    return bool(enabled and enabled())


def backends_by_device(backend: str) -> dict[str, str]:
    """"gloo", "cpu:gloo,cuda:nccl", "undefined", ... -> {device type: backend}, as torch understands it."""
    config = c10d.BackendConfig(c10d.Backend(backend))
    return {device: str(name) for device, name in config.get_device_backend_map().items()}


def create_on_fake(original: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Make the group with torch's own code on torch's fake backend: no network, collectives return at once.

    torch records the backend that was asked for. Returns (group, store); the group is None for a non-member.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers "fake"

    asked = str(arguments["backend"])
    devices = backends_by_device(asked)
    fake = ",".join(f"{device}:fake" for device in devices)
    # No device_id: with one, torch connects eagerly and splits communicators, which nobody could make again.
    group, store = original(**{**arguments, "backend": fake, "backend_options": None, "device_id": None})
    if group is None or group is c10d.GroupMember.NON_GROUP_MEMBER:
        return None, None
    c10d._world.pg_map[group] = (c10d.Backend(asked), store)
    c10d._world.pg_backend_config[group] = ",".join(f"{device}:{name}" for device, name in devices.items())
    set_default_backend(group, FAKE_NUMBER)
    return group, store


def group_count() -> int:
    """Torch's counter from which the names of the next groups are made; must be equal on all ranks."""
    return int(c10d._world.group_count)


def set_group_count(count: int) -> None:
    c10d._world.group_count = count


def forget_group(group: Any, name: str) -> None:
    """Undo the registration of a group whose creation failed."""
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)
    world.pg_to_tag.pop(group, None)
    for tagged in world.tags_to_pg.values():
        if group in tagged:
            tagged.remove(group)
    c10d._unregister_process_group(name)  # type: ignore[attr-defined, arg-type]


def is_registered(group: Any) -> bool:
    """False once the user has destroyed the group."""
    return group in c10d._world.pg_map


def set_group_store(group: Any, store: Any) -> None:
    """The store that `new_group` (for the default group) and torch's helpers take from now on."""
    c10d._world.pg_map[group] = (c10d._world.pg_map[group][0], store)


def global_ranks(group: Any) -> list[int]:
    """The group's members as ranks of the default group, in group order."""
    return list(dist.get_process_group_ranks(group))


# ------------------------------------------------------------------------------------------- c10d: exchanging backends


def backend_number(name: str) -> int:
    """torch's BackendType of "gloo" (1), "nccl" (2), ..."""
    number: int = c10d.Backend.backend_type_map[name].value
    return number


def register_backend(group: Any, devices: Sequence[str], number: int, backend: Backend) -> None:
    """Route the group's operations on these device types to `backend`.

    A number (BackendType, 0..255) keeps the first backend registered under it for ever: registering it again routes
    back to that one.
    """
    for device in devices:
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType(number), backend)


def set_default_backend(group: Any, number: int) -> None:
    """Which number torch asks for what has no tensor: hooks, sequence numbers, the device of a barrier."""
    group._set_default_backend(dist.ProcessGroup.BackendType(number))


def set_names(group: Any, name: str, description: str) -> None:
    """Needed after every registration: the group's name lives in its backends."""
    group._set_group_name(name)
    group._set_group_desc(description)


def get_backend(group: Any, device: str) -> Backend:
    return group._get_backend(torch.device(device))


def have_fakes_pass_monitored_barriers() -> None:
    """From now on this one, too, returns at once on torch's fake backend, which does not know it."""
    name = "monitored_barrier"  # torch's types lack it
    original = getattr(dist.ProcessGroup, name)

    @functools.wraps(original)
    def monitored_barrier(group: Any, *args: Any, **named: Any) -> None:
        try:
            original(group, *args, **named)
        except RuntimeError as error:
            if "Backend fake does not support" not in str(error):
                raise

    setattr(dist.ProcessGroup, name, monitored_barrier)


def make_fake(rank: int, size: int) -> Backend:
    """torch's FakeProcessGroup: every operation returns at once with local values."""
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup._create_internal(rank, size)


def make_gloo(store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int]) -> Backend:
    """As `_new_process_group_helper` does. Blocks, without the GIL, until all `size` members are connected."""
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    backend.options.global_ranks_in_group = list(ranks)
    backend.options.group_name = name  # type: ignore[assignment]
    backend._set_sequence_number_for_group()
    return backend


def make_nccl(
    store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int], options: Any
) -> Backend:
    """As `_new_process_group_helper` does, without splitting. The communicator is made by the first collective."""
    nccl = dist.ProcessGroupNCCL
    if options is None:
        options = nccl.Options()
        options.is_high_priority_stream = False
    options._timeout = timeout
    options.split_from = None
    options.global_ranks_in_group = list(ranks)
    options.group_name = name
    backend = nccl(store, rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


# ------------------------------------------------------------------------------------------- DistributedDataParallel


class Finished(dist.Work):
    """An operation that is done. (torch's FakeWork never says that it is, to who asks instead of waiting.)"""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class _LayoutSource(dist.ProcessGroup):
    """Stands in for rank 0 while a reducer rebuilds its buckets.

    `Reducer::sync_bucket_indices` broadcasts two int tensors: the parameter indices of all buckets with the number of
    buckets at the end, then the size of each bucket. With `layout` None they keep what the reducer has computed itself.
    """

    def __init__(self, layout: Layout | None) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._messages: list[list[int]] = []
        if layout is not None:
            indices = [index for bucket in layout for index in bucket]
            self._messages = [[*indices, len(layout)], [len(bucket) for bucket in layout]]

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:  # type: ignore[override]
        if self._messages:
            message = torch.tensor(self._messages.pop(0), dtype=torch.int32)
            if message.shape != tensors[0].shape:
                raise RuntimeError(f"bucket layout of {len(message)} entries for a reducer with {len(tensors[0])}")
            tensors[0].copy_(message)
        return Finished()


def _parameters(ddp: DDP) -> tuple[list[torch.Tensor], list[bool]]:
    """Those of the reducer, in its order, and whether it expects sparse gradients of each."""
    parameters, expect_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    return parameters, expect_sparse


def num_reducer_parameters(ddp: DDP) -> int:
    return len(_parameters(ddp)[0])


def expects_sparse_gradients(ddp: DDP) -> bool:
    return any(_parameters(ddp)[1])


def hides_dtensors(ddp: DDP) -> bool:
    """Whether `torch.distributed.tensor.parallel.ddp._pre_dp_module_transform` was applied to the module."""
    return any(hasattr(parameter, "_st_info") for parameter in ddp.module.parameters())


def uses_python_reducer(ddp: DDP) -> bool:
    """torch.compile's own reduction of gradients, which does not use the reducer."""
    return bool(ddp._use_python_reducer)


def has_rebuilt_buckets(ddp: DDP) -> bool:
    return bool(ddp._has_rebuilt_buckets)


def read_layout(ddp: DDP) -> Layout:
    """The reducer's buckets in reduction order. Allocates (zeroed) memory of the size of all gradients for a moment."""
    index = {id(parameter): i for i, parameter in enumerate(_parameters(ddp)[0])}
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return [[index[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets]


def rebuild_layout(ddp: DDP, layout: Layout | None) -> bool:
    """Let the reducer rebuild its buckets now, without any communication, as `layout` says.

    None: from the order in which it has seen gradients arrive, as the next forward would. Returns False, with nothing
    changed, if the reducer has no reason to rebuild (done already, or never because of find_unused_parameters). Raises
    RuntimeError when the last backward has not ended or not all gradients were seen.
    """
    reducer = ddp.reducer
    if layout is not None:
        reducer._push_all_rebuilt_params()  # without recorded parameters it would not rebuild
    source = _LayoutSource(layout)
    reducer._update_process_group(source)
    try:
        rebuilt = bool(reducer._rebuild_buckets())
    finally:
        reducer._update_process_group(ddp.process_group)
    if rebuilt:
        ddp._has_rebuilt_buckets = True
    return rebuilt


def reset_reducer(ddp: DDP) -> None:
    """Make the reducer forget an unfinished backward. Its buckets stay, but it will rebuild them once more."""
    ddp.reducer._reset_state()
    ddp._has_rebuilt_buckets = False


def has_unfinished_backward(ddp: DDP) -> bool:
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


def renew_reducer(ddp: DDP) -> None:
    """Give the module a new reducer, as its constructor does: initial buckets, same communication hooks.

    Raises RuntimeError for a module whose reducer holds more than can be carried over.
    """
    if ddp.mixed_precision is not None:
        raise RuntimeError("DDP(mixed_precision=...) cannot be given a new reducer")
    builtin = None
    name = ddp._get_ddp_logging_data().get("comm_hook", "")  # type: ignore[no-untyped-call]
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):  # type: ignore[attr-defined]
        if name == str(kind):
            builtin = kind
    parameters, expect_sparse = _parameters(ddp)
    names = ddp._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
    ddp.reducer._remove_autograd_hooks()
    ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)  # type: ignore[no-untyped-call]
    if builtin is not None:
        ddp._register_builtin_comm_hook(builtin)  # type: ignore[no-untyped-call]
    hooks = list(ddp._comm_hooks)
    ddp._comm_hooks.clear()
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        assert ddp.logger is not None
        ddp.logger._set_static_graph()
    ddp._has_rebuilt_buckets = False


def has_buffer_hook(ddp: DDP) -> bool:
    return hasattr(ddp, "buffer_hook")


def hook_buffers_after_forward(ddp: DDP, hook: Callable[[DDP, Mapping[str, torch.Tensor]], None]) -> None:
    """`hook(ddp, buffers)` replaces DDP's broadcast at the start of forward, and runs at its end."""
    ddp._register_buffer_comm_hook(ddp, hook)


def broadcast_buffers(ddp: DDP) -> None:
    """What DDP does by default at the start of forward: all buffers become rank 0's. Blocks."""
    ddp._default_broadcast_coalesced(authoritative_rank=0)  # type: ignore[no-untyped-call]


def drop_buffer_hook(ddp: DDP) -> None:
    """Take the buffer hook off: DDP's own broadcast is back."""
    del ddp.buffer_hook


def set_buffer_sync(ddp: DDP, wanted: bool) -> None:
    """Whether the coming forward synchronises buffers (DDP itself decides it from the forward before)."""
    ddp.require_forward_param_sync = wanted


def is_in_join(ddp: DDP) -> bool:
    """Inside `with ddp.join():`, or after it: torch does not reset it."""
    return bool(ddp._join_config.enable)


# ------------------------------------------------------------------------------------------------------------ launcher


def bind_command_to_numa_node(command: list[str], local_rank: int, options: Any) -> list[str]:
    """The command of a worker with torch's `--numa-binding` applied, as its own launcher does."""
    from torch.numa import binding

    return list(binding._maybe_wrap_command_args_with_numa_binding(
        tuple(command), gpu_index=local_rank, numa_options=options
    ))  # fmt: skip


def parse_rendezvous_config(text: str) -> dict[str, str]:
    """`--rdzv-conf` as `torch.distributed.run` reads it. Raises ValueError."""
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    return _parse_rendezvous_config(text)


# ---------------------------------------------------------------------------------------------------------- rendezvous


def new_rendezvous_state() -> Any:
    """The state of torch's dynamic rendezvous, before anybody has joined."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    return dynamic_rendezvous._RendezvousState()


def rendezvous_node(address: str, pid: int, local_id: int) -> Any:
    """A node in such a state."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    return dynamic_rendezvous._NodeDesc(address, pid, local_id)


def has_comm_hook(ddp: DDP) -> bool:
    """Whether somebody has registered a communication hook for gradients, built in or not."""
    name = ddp._get_ddp_logging_data().get("comm_hook", "")  # type: ignore[no-untyped-call]
    return bool(ddp._comm_hooks) or bool(name)


def comm_hooks(ddp: DDP) -> list[tuple[Any, Any]]:
    """Communication hooks for gradients that are not built in, each with its state."""
    return list(ddp._comm_hooks)


def is_in_backward() -> bool:
    """Whether the calling thread is one of torch's, that works for a backward while another one waits."""
    is_theirs = isinstance(threading.current_thread(), threading._DummyThread)
    return is_theirs and torch._C._current_graph_task_id() >= 0


def after_backward(action: Callable[[], None]) -> None:
    """In a communication hook: run *action* in this thread when the backward is over, DDP's own end of it included."""
    engine = torch.autograd.Variable._execution_engine
    # DDP queues its end when the last bucket is ready, which is later than now: so ours is queued at the end.
    engine.queue_callback(lambda: engine.queue_callback(action))


def step_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Make the optimizer's step for the parameters of *groups* only, with its own state, without its hooks.

    *groups*: copies of its parameter groups with fewer parameters. Several threads may do so for different parameters.
    """
    hooked = type(optimizer).step
    part = object.__new__(type(optimizer))
    part.__dict__.update(optimizer.__dict__)
    part.param_groups = groups
    getattr(hooked, "__wrapped__", hooked)(part)


# -------------------------------------------------------------------------------------------------------------- FSDP2


def is_fsdp(module: torch.nn.Module) -> TypeGuard[FSDPModule]:
    """Whether `fully_shard` was applied to *module*. FSDP is not imported for it: that takes 0.6 s, in agents too."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_fsdp1(module: torch.nn.Module) -> bool:
    """Whether *module* is a `FullyShardedDataParallel`, which is not imported for it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def reset_fsdp(root: FSDPModule) -> None:
    """Make FSDP forget a forward or backward that was cut; nothing before the first forward, where torch cannot."""
    if root._get_fsdp_state()._is_root is None:
        return
    root.reset_iter_state()
    for group in _fsdp_groups(root):
        for parameter in group.fsdp_params:
            # torch leaves what a layer has accumulated before its reduction, and would add to it.
            parameter.unsharded_accumulated_grad = None
            if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
                unsharded.grad = None


def has_unreduced_gradients(root: FSDPModule) -> bool:
    """Whether a backward below that outermost module has left gradients that are not in its parameters yet
    (`set_requires_gradient_sync(False)`, `set_requires_all_reduce(False)`)."""
    for group in _fsdp_groups(root):
        if getattr(group, "_partial_reduce_output", None) is not None:
            return True
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            if parameter.unsharded_accumulated_grad is not None or getattr(unsharded, "grad", None) is not None:
                return True
    return False


def _fsdp_groups(root: FSDPModule) -> Iterator[Any]:
    assert isinstance(root, torch.nn.Module)
    for module in root.modules():
        if is_fsdp(module):
            state = module._get_fsdp_state()
            one = getattr(state, "_fsdp_param_group", None)  # before torch 2.12
            yield from getattr(state, "_fsdp_param_groups", [one] if one else [])


# ------------------------------------------------------------------------------------------------- point-to-point


def wrap_messages(send: Callable[..., Any], recv: Callable[..., Any], recv_from_any: Callable[..., Any]) -> None:
    """From now on Python's point-to-point operations of all groups are `send(original, group, tensors, dst, tag)`,
    `recv(original, group, tensors, src, tag)` and `recv_from_any(original, group, tensors, tag)`; ranks are the
    group's. C++ callers are not affected."""
    _wrap_operation("send", send, ("tensors", "dstRank", "tag"))
    _wrap_operation("recv", recv, ("tensors", "srcRank", "tag"))
    _wrap_operation("recv_anysource", recv_from_any, ())


def _wrap_operation(name: str, wrapper: Callable[..., Any], keywords: Sequence[str]) -> None:
    original = getattr(dist.ProcessGroup, name)

    @functools.wraps(original)
    def operation(group: Any, *args: Any, **named: Any) -> Any:
        return wrapper(original, group, *args, *(named[keyword] for keyword in keywords[len(args) :]))

    setattr(dist.ProcessGroup, name, operation)


# Collectives after which all members of the group have the same, by the methods of ProcessGroup that Python calls. Logs
# have their places in this list: new ones go to its end.
ALIKE = (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "all_gather_single", "barrier",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
)  # fmt: skip
_OUTPUT_KEYWORDS = ("tensors", "tensor", "output_tensors", "output_tensor", "output", "output_lists", "outputs")


def wrap_collectives(wrapper: Callable[[str, Any, Callable[[], list[torch.Tensor]], Callable[[], Any]], Any]) -> None:
    """From now on those of `ALIKE` that Python calls, of all groups, are `wrapper(name, group, outputs, call)`, where
    `call()` makes them and returns torch's work, or None where that waits by itself, and `outputs()` are the tensors
    that they fill. C++ callers are not affected."""
    for name in ALIKE:
        if hasattr(dist.ProcessGroup, name):  # the `single` ones are new in torch 2.13
            _wrap_collective(name, wrapper)


_NOT_ALIKE = (
    "reduce", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base",
    "all_to_all_single",
)  # fmt: skip


def wrap_all_collectives(wrapper: Callable[[str, Any, bool, Callable[[], Any]], Any]) -> None:
    """From now on all collectives that Python calls, of all groups, are `wrapper(name, group, is_async, call)`; only of
    a barrier it is known whether it *is_async*. C++ callers are not affected."""
    for name in (*ALIKE, *_NOT_ALIKE):
        if hasattr(dist.ProcessGroup, name):
            _wrap_any(name, wrapper)


def _wrap_any(name: str, wrapper: Callable[[str, Any, bool, Callable[[], Any]], Any]) -> None:
    original = getattr(dist.ProcessGroup, name)

    @functools.wraps(original)
    def operation(group: Any, *args: Any, **named: Any) -> Any:
        is_async = bool(getattr(named.get("opts"), "asyncOp", False))
        return wrapper(name, group, is_async, lambda: original(group, *args, **named))

    setattr(dist.ProcessGroup, name, operation)


def _wrap_collective(name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(dist.ProcessGroup, name)

    @functools.wraps(original)
    def operation(group: Any, *args: Any, **named: Any) -> Any:
        return wrapper(name, group, lambda: _outputs(name, args, named), lambda: original(group, *args, **named))

    setattr(dist.ProcessGroup, name, operation)


def _outputs(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> list[torch.Tensor]:
    if name == "barrier":
        return []
    return _tensors(args[0] if args else next(named[keyword] for keyword in _OUTPUT_KEYWORDS if keyword in named))


def memory_of(given: Any) -> set[int]:
    """Where tensors, or lists of them, lie."""
    found = set()
    with contextlib.suppress(TypeError, RuntimeError):  # something else, or a tensor without plain memory
        for tensor in _tensors(given):
            found.add(tensor.untyped_storage().data_ptr())
    return found


def _tensors(given: Any) -> list[torch.Tensor]:
    """A tensor, a list of them, or a list of lists."""
    return [given] if isinstance(given, torch.Tensor) else [tensor for one in given for tensor in _tensors(one)]


@contextlib.contextmanager
def plain_messages() -> Iterator[None]:
    """Inside, point-to-point operations are torch's own."""
    names = ("send", "recv", "recv_anysource")
    wrapped = {name: getattr(dist.ProcessGroup, name) for name in names}
    for name, operation in wrapped.items():
        setattr(dist.ProcessGroup, name, _method(inspect.unwrap(operation)))
    try:
        yield
    finally:
        for name, operation in wrapped.items():
            setattr(dist.ProcessGroup, name, operation)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    # What a class gives of a compiled method is no method of another class, nor of the same one.
    return lambda group, *args, **named: function(group, *args, **named)


_symmetric_memory_is_used = False


def watch_symmetric_memory() -> None:
    """From now on it is known when memory is shared between ranks; see `ways_past_c10d`."""
    from torch._C._distributed_c10d import _SymmetricMemory

    original = _SymmetricMemory.rendezvous

    def rendezvous(*args: Any, **named: Any) -> Any:
        global _symmetric_memory_is_used
        _symmetric_memory_is_used = True
        return original(*args, **named)

    _SymmetricMemory.rendezvous = staticmethod(rendezvous)  # type: ignore[method-assign]


def ways_past_c10d() -> list[str]:
    """What of torch this process has set up that sends without process groups."""
    found = []
    rpc = sys.modules.get("torch.distributed.rpc.api")
    if rpc is not None and rpc._is_current_rpc_agent_set():
        found.append("torch.distributed.rpc")
    symmetric = sys.modules.get("torch.distributed._symmetric_memory")
    if _symmetric_memory_is_used or (symmetric is not None and symmetric._group_name_to_store):
        found.append("symmetric memory")
    return found


def finished_work() -> dist.Work:
    """An operation that is done."""
    return Finished()


# ------------------------------------------------------------------------------------------------------ elastic: timers


class FileTimers(FileTimerServer):
    """torch's server of timers, which kills a worker that lets one run out. torch's kills its own process as well."""

    def stop(self) -> None:
        self._stop_signaled = True  # first: it must not begin to read while a writer is there
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                # Its thread waits for a first writer, in the opening of the pipe.
                stack.callback(os.close, os.open(self._file_path, os.O_RDWR | os.O_NONBLOCK))
            super().stop()

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        return worker_pid == os.getpid() or bool(super()._reap_worker(worker_pid, signal))
