"""Private parts of torch's process groups (`distributed_c10d`), one small function each: how groups are created and
registered, and how their backends are made and exchanged.

Tested with torch 2.13 to 2.15, by tests/unit/torch_private among others. It must never
hold a decision: which group gets which backend, and when, is up to the callers (`worker.groups`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from swift_agent.torch_private.messages import _tensors

Backend = Any  # c10d::Backend and its subclasses; torch exports no common Python name for them

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


def has_nccl() -> bool:
    """Whether a wait may end before its message has come, or its sum is made: one that is aborted raises nothing."""
    return dist.is_initialized() and "nccl" in backends_by_device(dist.get_backend_config()).values()


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
    # No device_id: with one, torch connects eagerly and splits communicators, which could not be made again.
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
    _count_operations(backend)
    return backend


def _count_operations(backend: Backend) -> None:
    """From torch 2.15 on a backend counts by itself, and prints a warning where it is told to."""
    if torch.__version__ < "2.15":
        backend._set_sequence_number_for_group()


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
    _count_operations(backend)
    return backend


# ------------------------------------------------------------------------------------------- DistributedDataParallel


# ------------------------------------------------------------------------------------------------------------ launcher


# ---------------------------------------------------------------------------------------------------------- rendezvous


# -------------------------------------------------------------------------------------------------------------- FSDP2


# ------------------------------------------------------------------------------------------------- point-to-point


def memory_of(given: Any) -> set[int]:
    """Where tensors, or lists of them, lie."""
    found = set()
    with contextlib.suppress(TypeError, RuntimeError):  # something else, or a tensor without plain memory
        for tensor in _tensors(given):
            found.add(tensor.untyped_storage().data_ptr())
    return found


# ------------------------------------------------------------------------------------------------------ elastic: timers


