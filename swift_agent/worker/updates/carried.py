"""Gradients that an iteration goes on adding to although its predecessor has made the update: a script without
`zero_grad`.

They are a part of the state that no replica sends and no iteration that was cut can put back, so they are an error, in
the second iteration of a process. This module must never change a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from swift_agent.errors import UsageError
from swift_recovery.state.sharded import is_sharded, local_of


class GradientWatch:
    """Whether an iteration adds to gradients that are there when it begins: from `start` to `stop`."""

    def __init__(self, optimizers: Iterable[Optimizer], sharded: Iterable[Any] = ()) -> None:
        """*sharded*: modules whose backward adds to gradients without the hooks of their parameters (FSDP2)."""
        self._optimizers, self._sharded = list(optimizers), list(sharded)
        self._found: dict[int, tuple[Tensor, Tensor]] = {}
        self._undo: list[Callable[[], object]] = []

    @property
    def is_on(self) -> bool:
        return bool(self._undo)

    @property
    def has_seen(self) -> bool:
        """It has added to one, and not cleared it since: an auxiliary backward may come before they are."""
        return any(parameter.grad is grad for parameter, grad in self._found.values())

    def start(self) -> None:
        self.stop()
        in_shards: list[Callable[[Tensor], None]] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if not parameter.requires_grad or parameter.grad is None:
                        continue
                    watch = _watch(parameter, self._found)
                    if is_sharded(parameter):
                        in_shards.append(watch)
                    # FSDP2's parts never have a gradient of autograd's, those of tensor parallelism do.
                    self._undo.append(parameter.register_hook(watch).remove)
            self._notice_clearing(optimizer)

        def at_backward(gradient: Tensor) -> None:
            for watch in in_shards:
                watch(gradient)

        def after_forward(module: Any, arguments: Any, result: Any) -> None:
            for output in _tensors(result):
                if output.requires_grad:
                    output.register_hook(at_backward)  # type: ignore[no-untyped-call]

        if in_shards:
            self._undo += [module.register_forward_hook(after_forward).remove for module in self._sharded]
        original = nn.Module.zero_grad

        def zero_grad(module: nn.Module, *args: Any, **named: Any) -> None:
            self._found.clear()
            original(module, *args, **named)

        nn.Module.zero_grad = zero_grad  # type: ignore[assignment,method-assign]
        self._undo.append(lambda: setattr(nn.Module, "zero_grad", original))

    def _notice_clearing(self, optimizer: Optimizer) -> None:
        original, own = optimizer.zero_grad, vars(optimizer).get("zero_grad")

        def zero_grad(*args: Any, **named: Any) -> None:
            self._found.clear()
            original(*args, **named)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        self._undo.append(
            (lambda: delattr(optimizer, "zero_grad")) if own is None else lambda: setattr(optimizer, "zero_grad", own)
        )

    def stop(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._found.clear()


class CarriedGradients:
    """`begin` before each iteration and `end` after each that is complete, until that says that it has seen enough."""

    def __init__(self, optimizers: Iterable[Optimizer], sharded: Iterable[Any] = ()) -> None:
        self._watch = GradientWatch(optimizers, sharded)
        self._follows_update = False

    def begin(self, *, dry_run: bool) -> None:
        follows, self._follows_update = self._follows_update, False
        self._watch.stop()
        if follows and not dry_run:
            self._watch.start()

    def end(self, *, updated: bool) -> bool:
        """Whether this was all; *updated*: the iteration has made an update. Raises `UsageError`."""
        if not self._watch.is_on:
            self._follows_update = updated
            return False
        carried = self._watch.has_seen
        self._watch.stop()
        if carried:
            raise UsageError(
                "an iteration has added to gradients of the one before, whose update was made: what they were could "
                "not be recovered. Call optimizer.zero_grad() in each iteration."
            )
        return True


def _watch(parameter: Tensor, found: dict[int, tuple[Tensor, Tensor]]) -> Callable[[Tensor], None]:
    """Called before something is added to the gradient."""
    before = parameter.grad
    assert before is not None
    version = local_of(before)._version

    def watch(_: Tensor) -> None:
        grad = parameter.grad
        if grad is before and local_of(grad)._version == version and bool(local_of(grad).detach().any()):
            found[id(parameter)] = (parameter, grad)

    return watch


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    parts = result.values() if isinstance(result, Mapping) else result if isinstance(result, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
