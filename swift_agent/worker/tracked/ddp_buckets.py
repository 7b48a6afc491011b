"""DistributedDataParallel across a failure: the same bucket layout on survivors and replacement, and its buffers.

Ranks whose reducers have different buckets send messages of different sizes, which terminates gloo processes; and sums
are added in another order, so that results differ in the last bit. DDP uses one layout for the first backward and
another, from the order in which gradients then arrived, ever after. After a failure each rank is therefore put at the
same point again: before the first backward, or after it with the same layout. It must never communicate, except
`sync_buffers_after_forward`: what has to be agreed is passed on by the session.

Call these between `ProcessGroups.wait_quiet` and the next forward: until then cut operations may write into buckets.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from swift_agent.errors import UsageError
from swift_agent.torch_private import ddp as torch_ddp
from swift_agent.torch_private.ddp import Layout as Layout

# Reading a layout from the reducer takes memory of the size of the gradients; it changes at most once per reducer.
_known_layouts: weakref.WeakKeyDictionary[DDP, tuple[Any, bool, Layout]] = weakref.WeakKeyDictionary()


class UnsupportedModule(ValueError):
    """This DDP module is set up in a way that cannot be carried over a failure; the message says what to change."""


def check_supported(ddp: DDP) -> None:
    """Raise UnsupportedModule for what would fail, or give wrong results, only after a failure."""
    if ddp.mixed_precision is not None:
        raise UnsupportedModule("DDP(mixed_precision=...) is not supported: use torch.autocast")
    if torch_ddp.uses_python_reducer(ddp):
        raise UnsupportedModule("DDP with the python_reducer of torch.compile is not supported")
    if torch_ddp.expects_sparse_gradients(ddp):
        raise UnsupportedModule("DDP over sparse embeddings (sparse=True) is not supported")
    if torch_ddp.hides_dtensors(ddp):
        raise UnsupportedModule(
            "DDP over a module whose DTensors torch's _pre_dp_module_transform hides is not supported: they are no "
            "parameters of it any more after its first forward; use fully_shard on a mesh (replicate, shard) instead"
        )


def bucket_layout(ddp: DDP) -> Layout:
    """The current buckets in the order of their reduction, as indices into the parameters that the reducer has."""
    known = _known_layouts.get(ddp)
    if known is None or known[0] is not ddp.reducer or known[1] != buckets_rebuilt(ddp):
        known = (ddp.reducer, buckets_rebuilt(ddp), torch_ddp.read_layout(ddp))
        _known_layouts[ddp] = known
    return [list(bucket) for bucket in known[2]]


def buckets_rebuilt(ddp: DDP) -> bool:
    """Whether the layout is the final one."""
    return torch_ddp.has_rebuilt_buckets(ddp)


def rebuilds_buckets(ddp: DDP) -> bool:
    """False with find_unused_parameters: the layout then never changes and follows from the model alone."""
    return bool(ddp.static_graph or not ddp.find_unused_parameters)


def expected_layout(ddp: DDP) -> Layout | None:
    """The final layout, as far as this rank knows it; None before a first backward has told the order of gradients.

    A survivor whose first backward is complete but which failed before, or in, the broadcast that agrees on the layout
    computes it from its own record, with the code that rank 0 would have run; its reducer has the layout afterwards.
    To be called before `reset_after_abort`, which drops the record.
    """
    if not buckets_rebuilt(ddp):
        if not rebuilds_buckets(ddp):
            return None
        try:
            if not torch_ddp.rebuild_layout(ddp, None):
                return None
        except RuntimeError:
            return None  # the first backward is incomplete
    return bucket_layout(ddp)


def reset_after_abort(ddp: DDP) -> None:
    """Make a survivor's module ready for another forward, whatever the abort has left, at the point where it was:
    with its final layout, or before its first backward."""
    if buckets_rebuilt(ddp):
        adopt_layout(ddp, bucket_layout(ddp))
    else:
        return_to_first_backward(ddp)


def return_to_first_backward(ddp: DDP) -> None:
    """Put the module at the point before its first backward: initial layout, to be rebuilt afterwards."""
    if buckets_rebuilt(ddp) or ddp.static_graph:
        torch_ddp.renew_reducer(ddp)
    else:
        torch_ddp.reset_reducer(ddp)


def adopt_layout(ddp: DDP, layout: Layout) -> None:
    """Put the module, of a survivor or of a replacement, at the point after its first backward, with this final layout.

    It rebuilds its buckets no more. Gradients in `p.grad` keep their values. Raises UnsupportedModule if the layout is
    not one of this module.
    """
    if sorted(index for bucket in layout for index in bucket) != list(range(torch_ddp.num_reducer_parameters(ddp))):
        raise UnsupportedModule(
            f"bucket layout of {sum(map(len, layout))} parameters for a model with "
            f"{torch_ddp.num_reducer_parameters(ddp)}: the replacement has built another model"
        )
    if not rebuilds_buckets(ddp):
        if layout != bucket_layout(ddp):
            raise UnsupportedModule("the replacement has built another model: its DDP buckets differ")
        torch_ddp.reset_reducer(ddp)
        return
    if buckets_rebuilt(ddp) and not ddp.static_graph and layout == bucket_layout(ddp):
        if not torch_ddp.has_unfinished_backward(ddp):
            return
        torch_ddp.reset_reducer(ddp)
    elif buckets_rebuilt(ddp) or ddp.static_graph:
        # A static graph counts gradients in its first iteration, which a replacement has not had: all ranks count
        # again. And a reducer that has rebuilt its buckets once remembers which parameters were in them.
        torch_ddp.renew_reducer(ddp)
    else:
        torch_ddp.reset_reducer(ddp)
    if not torch_ddp.rebuild_layout(ddp, layout):
        raise RuntimeError("torch did not rebuild the buckets")
    _known_layouts[ddp] = (ddp.reducer, True, [list(bucket) for bucket in layout])


_JOIN = (
    "DistributedDataParallel.join(): a rank that has no more batches takes part in iterations of the others without "
    "being in one, so that none of them could be recovered. Give all ranks the same number of batches: "
    "DistributedSampler does, drop_last=True if it shall repeat no sample"
)


class BucketKeeper:
    """Knows in which iteration a module had its first backward, and so which layout belongs to which iteration."""

    def __init__(self, ddp: DDP) -> None:
        """Raises UnsupportedModule. The module must not have been trained yet, else `restore` must follow."""
        check_supported(ddp)
        self.ddp = ddp
        self.iteration = 0
        self._num_to_come = 0
        self._recorded_in: int | None = None
        self._hook: Any = None
        self._wait_for_first_backward()

    def begin(self, iteration: int) -> None:
        """Iteration number *iteration* begins. Raises UsageError inside of `ddp.join()`."""
        self.iteration = iteration
        if torch_ddp.is_in_join(self.ddp):
            raise UsageError(_JOIN)

    def begin_alone(self) -> None:
        """What comes is under `no_sync`, with nobody else. A forward that no backward has followed (of a network that
        was frozen in it, or in a validation) would have the next backward reduce all the same."""
        is_pending = self._recorded_in is not None and not buckets_rebuilt(self.ddp) and rebuilds_buckets(self.ddp)
        if self.ddp.static_graph or is_pending:
            return  # what is recorded of the first backward would be lost
        layout = bucket_layout(self.ddp) if buckets_rebuilt(self.ddp) else None
        torch_ddp.reset_reducer(self.ddp)
        if layout is not None:
            adopt_layout(self.ddp, layout)

    def _wait_for_first_backward(self) -> None:
        self._recorded_in = None
        # With a static graph gradients arrive in recorded order only from the second iteration on.
        self._num_to_come = 2 if self.ddp.static_graph else 1
        if self._hook is None and rebuilds_buckets(self.ddp):
            self._hook = self.ddp.register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, arguments: Any) -> None:
        if not (torch.is_grad_enabled() and self.ddp.require_backward_grad_sync) or torch_ddp.is_frozen(self.ddp):
            return
        self._num_to_come -= 1
        if self._num_to_come == 0:
            self._recorded_in = self.iteration
            self._hook.remove()
            self._hook = None

    def is_settled(self, iteration: int) -> bool:
        """Whether `layout_for` would only look: else torch has yet to rebuild the buckets, on all ranks together."""
        recorded = self._recorded_in is not None and iteration > self._recorded_in
        return not recorded or buckets_rebuilt(self.ddp) or not rebuilds_buckets(self.ddp)

    def layout_for(self, iteration: int) -> Layout | None:
        """The layout with which `iteration` begins; None: there is none yet. Where `is_settled` does not hold only on a
        survivor, before `restore`."""
        if self._recorded_in is None or iteration <= self._recorded_in:
            return None
        return expected_layout(self.ddp)

    def restore(self, layout: Layout | None) -> None:
        """On every rank: what `layout_for` said on the rank that is followed."""
        if layout is None:
            return_to_first_backward(self.ddp)
            self._wait_for_first_backward()
            return
        adopt_layout(self.ddp, layout)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._recorded_in = -1


@contextlib.contextmanager
def stays_unsynchronised(ddp: DDP) -> Iterator[None]:
    """Inside, `no_sync` holds for a forward also where the script sets `require_backward_grad_sync` itself, as it may
    to accumulate; the script finds what it has set."""
    asked: list[bool] = []

    def before(module: Any, arguments: Any) -> None:
        asked.append(module.require_backward_grad_sync)
        module.require_backward_grad_sync = False

    def after(module: Any, arguments: Any, result: Any) -> None:
        module.require_backward_grad_sync = asked.pop()

    hooks = [
        ddp.register_forward_pre_hook(before, prepend=True),
        ddp.register_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def sync_buffers_after_forward(ddp: DDP) -> bool:
    """From now on buffers (BatchNorm statistics) become rank 0's after each forward, not before the next one.

    The values that any forward sees and the number of broadcasts stay the same, but rank 0 is no longer the only one
    to know the result of the last forward. Without effect, returning False: no buffers, broadcast_buffers=False, or a
    buffer hook of the user. All ranks must do the same. From the first `ddp_buckets.join()` on DDP's own way is back.
    """
    if torch_ddp.has_buffer_hook(ddp) or not ddp.broadcast_buffers or not any(True for _ in ddp.module.buffers()):
        return False
    torch_ddp.hook_buffers_after_forward(ddp, _broadcast_buffers)
    ddp.register_forward_pre_hook(_before_forward)
    return True


def buffers_apart(ddps: Iterable[DDP]) -> list[str]:
    """Of modules that a pipeline's schedule runs, under `no_sync`: buffers (BatchNorm statistics) that DDP does not
    make equal then."""
    return sorted(name for ddp in ddps for name, one in ddp.module.named_buffers() if one.is_floating_point())


def _broadcast_buffers(ddp: DDP, buffers: Mapping[str, torch.Tensor]) -> None:
    torch_ddp.broadcast_buffers(ddp)


def _before_forward(module: torch.nn.Module, arguments: Any) -> None:
    assert isinstance(module, DDP)
    # DDP would synchronise before forward t+1 if forward t was one that synchronises gradients; so after forward t.
    torch_ddp.set_buffer_sync(module, torch.is_grad_enabled() and module.require_backward_grad_sync)
    # In join() torch pairs the collectives of ranks that have no more input with those of DDP's own order.
    if torch_ddp.is_in_join(module) and torch_ddp.has_buffer_hook(module):
        torch_ddp.drop_buffer_hook(module)


@contextlib.contextmanager
def without_reduction(ddps: Iterable[DDP]) -> Iterator[None]:
    """Inside, a forward does not make DDP reduce in the backward after it. (A pipeline's stages also run their modules
    to tell each other shapes: the gradients of the first micro-batch would be reduced then.)"""
    with contextlib.ExitStack() as stack:
        for module in ddps:
            stack.enter_context(module.no_sync())
            stack.enter_context(stays_unsynchronised(module))
        yield
