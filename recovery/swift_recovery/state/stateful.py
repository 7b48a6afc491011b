"""State of an object that is neither a model nor an optimizer: what ``state_dict`` gives, with its exceptions.

The exceptions: a learning-rate scheduler's functions stay where they are (its replacement was built with the same
ones), and a ``GradScaler`` is read without waiting for the device, because its own ``state_dict`` calls ``item()``.
Must never change the object except in :func:`apply`.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.lr_scheduler import LRScheduler

from swift_recovery.errors import StateError
from swift_recovery.state.codec import join_path

SCALARS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})
# The counts of a GradScaler that its update reads; `_scale` and `_growth_tracker` are tensors once it was used.
_SCALER_NUMBERS = ("_growth_factor", "_backoff_factor", "_growth_interval", "_init_scale", "_init_growth_tracker")


@runtime_checkable
class Stateful(Protocol):
    """What torch, too, asks of an object that can be saved."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def capture(value: Any) -> Any:
    """State of *value* as a tree that may share containers and tensors with it: copy it or send it at once."""
    if isinstance(value, torch.amp.GradScaler):
        return _capture_scaler(value)
    tree = value.state_dict()
    if isinstance(value, LRScheduler):
        # load_state_dict updates the scheduler's attributes: what is left out stays as its constructor made it.
        return {key: item for key, item in tree.items() if not callable(item)}
    return tree


def apply(value: Any, tree: Any) -> None:
    """Put *tree*, made by :func:`capture` of such an object, into *value*. *tree* belongs to *value* afterwards."""
    if isinstance(value, torch.amp.GradScaler):
        _apply_scaler(value, tree)
    else:
        value.load_state_dict(tree)


def copy_tree(tree: Any) -> Any:
    """Copy containers and tensors of *tree*; anything else is shared. Tensors are detached and stay on their device."""
    kind = type(tree)
    if kind in SCALARS:
        return tree
    if kind is dict:
        return {key: item if type(item) in SCALARS else copy_tree(item) for key, item in tree.items()}
    if kind is list:
        return [item if type(item) in SCALARS else copy_tree(item) for item in tree]
    if kind is tuple:
        if SCALARS.issuperset(map(type, tree)):
            return tree  # the betas of Adam, in every iteration
        return tuple([copy_tree(item) for item in tree])
    if kind is OrderedDict:
        return OrderedDict((key, copy_tree(item)) for key, item in tree.items())
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if kind is Counter or kind is set or hasattr(tree, "__array_interface__"):
        return tree.copy()
    if isinstance(tree, dict):
        copied = tree.copy()
        for key in copied:
            copied[key] = copy_tree(copied[key])
        return copied
    return tree


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values of *tree* that are no containers, each with its path, in the same order on all replicas."""
    if isinstance(tree, dict):
        for key in sorted(tree, key=str):
            yield from leaves(tree[key], join_path(path, key) if path else str(key))
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from leaves(item, join_path(path, index))
    else:
        yield path, tree


def _capture_scaler(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    if not scaler.is_enabled():
        return {}
    tree: dict[str, Any] = {name: getattr(scaler, name) for name in _SCALER_NUMBERS}
    tree["_scale"], tree["_growth_tracker"] = scaler._scale, scaler._growth_tracker
    return tree


def _apply_scaler(scaler: torch.amp.GradScaler, tree: dict[str, Any]) -> None:
    if scaler.is_enabled() != bool(tree):
        raise StateError("the GradScaler is enabled on one side only; build it the same way on every worker")
    if not tree:
        return
    for name in _SCALER_NUMBERS:
        setattr(scaler, name, tree[name])
    for name in ("_scale", "_growth_tracker"):
        live, saved = getattr(scaler, name), tree[name]
        if live is None or saved is None:
            setattr(scaler, name, saved)
        else:
            live.copy_(saved)
    # An interrupted iteration may have unscaled already; its repetition has to be allowed to do so again.
    scaler._per_optimizer_states.clear()
