"""Some parameters with their optimizer state, on their way to a replica that holds them before or after an update.

For `replica.send_state` and `replica.receive`, in place of a whole `TrainingState`. Must never touch live state before
`Incoming.commit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_recovery.errors import StateError
from swift_recovery.state.codec import decode, encode
from swift_recovery.state.incoming import Incoming, Slot
from swift_recovery.state.sharded import local_of
from swift_recovery.state.tensors import Layout, layout_of, unexpanded
from swift_recovery.state.training_state import Outgoing

VERSION = 1


class PatchState:
    """*members*: parameters, each with the optimizer that updates it; the same on both sides, in the same order."""

    def __init__(self, members: Sequence[tuple[Optimizer, Tensor]]) -> None:
        self._members = list(members)

    def collect(self, extra: Any = None) -> Outgoing:
        """See `TrainingState.collect`."""
        entries = [{"parameter": p.detach(), "state": optimizer.state.get(p)} for optimizer, p in self._members]
        body, tensors = encode({"entries": entries, "extra": extra})
        layouts = [layout_of(tensor) for tensor in tensors]
        head, _ = encode({"patch": VERSION, "layouts": [layout.to_text() for layout in layouts]})
        return Outgoing(head + b"\n" + body, tensors, layouts)

    def prepare(self, manifest: bytes, staged: bool) -> Incoming:
        """See `TrainingState.prepare`. Raises `StateError` for a patch of other parameters; nothing has changed."""
        try:
            head, _, body = manifest.partition(b"\n")
            header = decode(head, ())
            if header.get("patch") != VERSION:
                raise StateError(f"not a patch of version {VERSION}")
            slots = [Slot(Layout.from_text(layout)) for layout in header["layouts"]]
            entries = decode(body, slots)["entries"]
            if len(entries) != len(self._members):
                raise StateError(f"a patch of {len(entries)} parameters for {len(self._members)}")
            taken: dict[int, Slot] = {}
            for (optimizer, parameter), entry in zip(self._members, entries, strict=True):
                self._bind(optimizer, parameter, entry, taken)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise StateError(f"malformed patch: {type(error).__name__}: {error}") from None
        for slot in slots:
            slot.allocate(staged)
        return Incoming(slots, body, self._install)

    def _bind(self, optimizer: Optimizer, parameter: Tensor, entry: Any, taken: dict[int, Slot]) -> None:
        slot, here = entry["parameter"], layout_of(parameter)
        there = slot.layout
        if (here.dtype, here.shape, here.device_type) != (there.dtype, there.shape, there.device_type):
            raise StateError(f"a patch for {there}, but the parameter here is {here}")
        slot.live, slot.device = parameter, parameter.device
        existing = optimizer.state.get(parameter) or {}
        for key, value in (entry["state"] or {}).items():
            if isinstance(value, Slot):
                value.wish(existing.get(key), parameter.device, taken)

    def _install(self, tree: Any) -> Any:
        for (optimizer, parameter), entry in zip(self._members, tree["entries"], strict=True):
            if entry["state"] is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = entry["state"]
        return tree["extra"]


Copy = tuple[Tensor, Callable[[], Any] | None]
"""Of a parameter; and what makes its state what it was, None if it had none."""


def copy_of(optimizer: Optimizer, parameter: Tensor, *, on_host: bool = False) -> Copy:
    """A copy of a parameter and its state, for `put_back`; *on_host*: in the memory of the host."""
    entry = optimizer.state.get(parameter)
    return _values_of(parameter, on_host), keep_tree(entry, on_host=on_host) if entry else None


@torch.no_grad()
def put_back(optimizer: Optimizer, parameter: Tensor, copy: Copy) -> None:
    """Make a parameter and its state what they were, bit for bit; tensors that there were keep their identity."""
    value, state = copy
    _put_values(parameter, value)
    if state is None:
        optimizer.state.pop(parameter, None)
    else:
        optimizer.state[parameter] = state()


def keep_tree(value: Any, *, on_host: bool = False) -> Callable[[], Any]:
    """What makes *value* again what it is now, in place, and returns it: containers (SOAP keeps lists of tensors) and
    tensors keep their identity."""
    if isinstance(value, Tensor):
        return functools.partial(_put_values, value, _values_of(value, on_host))
    if isinstance(value, dict):
        items = {key: keep_tree(item, on_host=on_host) for key, item in value.items()}
        return functools.partial(_put_items, value, items)
    if isinstance(value, (list, tuple)):
        return functools.partial(_put_sequence, value, [keep_tree(item, on_host=on_host) for item in value])
    if isinstance(value, set) or (hasattr(value, "__array_interface__") and hasattr(value, "__setitem__")):
        return functools.partial(_put_plain, value, value.copy())
    return lambda: value


def _values_of(tensor: Tensor, on_host: bool) -> Tensor:
    source = _memory_of(tensor)
    return source.to("cpu", copy=True) if on_host else source.clone()


def _memory_of(tensor: Tensor) -> Tensor:
    local = local_of(tensor).detach()
    return unexpanded(local) if local.layout is torch.strided else local


@torch.no_grad()
def _put_values(live: Tensor, values: Tensor) -> Tensor:
    target = _memory_of(live)
    if target.shape == values.shape and target.dtype == values.dtype:
        target.copy_(values)
    else:
        local_of(live).data = values.to(target.device)  # another one was put into its place
    return live


def _put_items(live: dict[Any, Any], items: dict[Any, Callable[[], Any]]) -> dict[Any, Any]:
    live.clear()
    for key, put in items.items():
        live[key] = put()
    return live


def _put_sequence(live: Any, items: list[Callable[[], Any]]) -> Any:
    values = [put() for put in items]
    if isinstance(live, list):
        live[:] = values
    return live  # the items of a tuple are the same ones


def _put_plain(live: Any, values: Any) -> Any:
    if isinstance(live, set):
        live.clear()
        live.update(values)
    else:
        live[...] = values
    return live
