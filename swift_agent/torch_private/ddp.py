"""Private parts of DistributedDataParallel and its reducer: its buckets, a backward that was cut, its hooks.

It must never decide when a reducer is reset, renewed or rebuilt (that is `worker.tracked.ddp_buckets`), and must never
communicate to rebuild one: the layout comes in as an argument.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from swift_agent.torch_private.works import Finished

Layout = list[list[int]]  # bucket -> indices into the reducer's parameters, in reduction order


class _LayoutSource(dist.ProcessGroup):
    """Stands in for rank 0 while a reducer rebuilds its buckets.

    `Reducer::sync_bucket_indices` broadcasts two int tensors: the parameter indices of all buckets with the number of
    buckets at the end, then the size of each bucket. With `layout` None they keep what the reducer has computed itself.
    """

    def __init__(self, layout: Layout | None) -> None:
        # The types of torch 2.13 do not name this constructor, those of 2.15 do.
        cast(Any, super()).__init__(0, 1)
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


# By module: a reducer, its parameters, and whether it expects sparse gradients of each.
_made_with: weakref.WeakKeyDictionary[DDP, tuple[Any, list[torch.Tensor], list[bool]]] = weakref.WeakKeyDictionary()


def _parameters(ddp: DDP) -> tuple[list[torch.Tensor], list[bool]]:
    """Those of the reducer, in its order, and whether it expects sparse gradients of each. They are those that required
    gradients when it was made; a script may have switched that since (of the network of a GAN whose turn it is not).
    """
    known = _made_with.get(ddp)
    if known is None or known[0] is not ddp.reducer:
        known = _made_with[ddp] = (ddp.reducer, *_find_parameters(ddp))
    return known[1], known[2]


def _find_parameters(ddp: DDP) -> tuple[list[torch.Tensor], list[bool]]:
    parameters, expect_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    made: Any = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    now = (len(parameters), sum(each.nbytes for each in parameters))
    if now == (made.get("num_parameter_tensors"), made.get("total_parameter_size_bytes")):
        return parameters, expect_sparse
    # Memory of the size of all gradients for a moment; so not where nothing was switched.
    held = [each for bucket in ddp.reducer._get_zeros_like_grad_buckets() for each in bucket.parameters()]
    with _requiring_gradients(ddp, held):
        parameters, expect_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    return parameters, expect_sparse


@contextlib.contextmanager
def _requiring_gradients(ddp: DDP, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, these parameters of the module require gradients, and no others."""
    wanted = {id(each) for each in parameters}
    switched = [each for each in ddp.module.parameters() if each.requires_grad != (id(each) in wanted)]
    try:
        for each in switched:
            each.requires_grad_(not each.requires_grad)
        yield
    finally:
        for each in switched:
            each.requires_grad_(not each.requires_grad)


def is_frozen(ddp: DDP) -> bool:
    """No parameter of the reducer requires a gradient now."""
    return not any(each.requires_grad for each in _parameters(ddp)[0])


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
    with _requiring_gradients(ddp, parameters):
        names = ddp._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        ddp.reducer._remove_autograd_hooks()
        ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)  # type: ignore[no-untyped-call]
    _made_with[ddp] = (ddp.reducer, parameters, expect_sparse)
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


def has_comm_hook(ddp: DDP) -> bool:
    """Whether a communication hook for gradients is registered, built in or not."""
    name = ddp._get_ddp_logging_data().get("comm_hook", "")  # type: ignore[no-untyped-call]
    return bool(ddp._comm_hooks) or bool(name)


def comm_hooks(ddp: DDP) -> list[tuple[Any, Any]]:
    """Communication hooks for gradients that are not built in, each with its state."""
    return list(ddp._comm_hooks)
