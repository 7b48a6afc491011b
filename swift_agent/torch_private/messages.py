"""Operations of process groups as Python calls them, wrapped; and what of torch sends past process groups.

It must never log, repeat or refuse an operation: that is up to the wrappers, which are given it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Layer = Literal["schedules", "log"]
# The layers between a script and torch, from the script's side on: what a schedule is served is no message, so it must
# be neither counted nor logged.
LAYERS: tuple[Layer, ...] = ("schedules", "log")
_KEYWORDS = {"send": ("tensors", "dstRank", "tag"), "recv": ("tensors", "srcRank", "tag"), "recv_anysource": ()}


def intercept_messages(
    layer: Layer, send: Callable[..., Any], recv: Callable[..., Any], recv_from_any: Callable[..., Any]
) -> None:
    """From now on Python's point-to-point operations of all groups are `send(original, group, tensors, dst, tag)`,
    `recv(original, group, tensors, src, tag)` and `recv_from_any(original, group, tensors, tag)`; ranks are the
    group's. `original` is the next one in the order of `LAYERS`, torch last, whichever of them was there first. In a
    batch that a backend makes at once, as NCCL does, torch returns None: only the batch has a work. C++
    callers are not affected."""
    for name, wrapper in (("send", send), ("recv", recv), ("recv_anysource", recv_from_any)):
        there = getattr(dist.ProcessGroup, name)
        layers = sorted([(layer, wrapper), *getattr(there, "_layers", [])], key=lambda one: LAYERS.index(one[0]))
        operation = base = getattr(there, "_base", there)
        for _, each in reversed(layers):
            operation = _intercepted(operation, each, _KEYWORDS[name])
        operation._layers, operation._base = layers, base
        setattr(dist.ProcessGroup, name, operation)


def _intercepted(original: Any, wrapper: Callable[..., Any], keywords: Sequence[str]) -> Any:
    @functools.wraps(original)
    def operation(group: Any, *args: Any, **named: Any) -> Any:
        return wrapper(original, group, *args, *(named[keyword] for keyword in keywords[len(args) :]))

    return operation


# Collectives after which all members of the group have the same, by the methods of ProcessGroup that Python calls. A
# new one needs a tag in `swift_logging_store.format.operations`.
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
    "all_to_all_single", "gather_single", "gather_into_tensor",  # the last two are new in torch 2.14
)  # fmt: skip


Wrapper = Callable[[str, Any, Callable[[], bool], Callable[[], Any], Callable[[], str]], Any]


def wrap_all_collectives(wrapper: Wrapper) -> None:
    """From now on all collectives that Python calls, of all groups, are `wrapper(name, group, is_async, call, what)`. A
    barrier `is_async()` if it says so, all others unless they say that they are not. `what()`: its name, and how much
    it gives, where that has to be the same on all ranks. C++ callers are not affected."""
    for name in (*ALIKE, *_NOT_ALIKE):
        if hasattr(dist.ProcessGroup, name):
            _wrap_any(name, wrapper)


def _wrap_any(name: str, wrapper: Wrapper) -> None:
    original = getattr(dist.ProcessGroup, name)

    @functools.wraps(original)
    def operation(group: Any, *args: Any, **named: Any) -> Any:
        return wrapper(
            name, group, lambda: _is_async(name, args, named), lambda: original(group, *args, **named),
            lambda: _what(name, args, named)
        )  # fmt: skip

    setattr(dist.ProcessGroup, name, operation)


def _is_async(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    said = [one.asyncOp for one in (*args, *named.values()) if hasattr(one, "asyncOp")]
    return any(said) or (not said and name != "barrier")


def _what(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    outputs = _outputs(name, args, named) if name in ALIKE else []
    if not outputs:
        return name
    return f"{name} of {sum(tensor.numel() for tensor in outputs)} {str(outputs[0].dtype).removeprefix('torch.')}"


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


_cut_batches: list[str] = []


def mend_batches() -> None:
    """From now on a batch of operations (`batch_isend_irecv`, `_coalescing_manager`) that raises is over. Torch goes on
    as if it were not: from then on it only notes all-reduces, all-gathers and reduce-scatters of its group, for a batch
    that never ends."""
    original = c10d._coalescing_manager

    @contextlib.contextmanager
    @functools.wraps(original)
    def mended(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        group, has_begun = group or dist.group.WORLD, False
        try:
            with original(group, device, async_ops) as batch:
                has_begun = True
                yield batch
        except BaseException:
            c10d._world.pg_coalesce_state.pop(group, None)
            if has_begun and device is not None:
                _cut_batches.append(group.group_name)
            raise

    c10d._coalescing_manager = mended


def batch_was_cut() -> bool:
    """Whether an exception has left a batch that a backend makes at once, as NCCL does. NCCL holds back what its thread
    begins from then on, and to end the batch would use what an abort has freed."""
    return bool(_cut_batches)


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
