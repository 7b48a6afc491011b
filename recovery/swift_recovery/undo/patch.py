"""Some parameters with their optimizer state, on their way to a replica that holds them before or after an update.

For `replica.send_state` and `replica.receive`, in place of a whole `TrainingState`. Must never touch live state before
`Incoming.commit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_recovery.errors import StateError
from swift_recovery.state.codec import decode, encode
from swift_recovery.state.incoming import Incoming, Slot
from swift_recovery.state.tensors import Layout, layout_of
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


def copy_of(optimizer: Optimizer, parameter: Tensor) -> tuple[Tensor, dict[str, Any] | None]:
    """A copy of a parameter and its state, for `put_back`."""
    entry = optimizer.state.get(parameter)
    state = None
    if entry:
        state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()}
    return parameter.detach().clone(), state


@torch.no_grad()
def put_back(optimizer: Optimizer, parameter: Tensor, copy: tuple[Tensor, dict[str, Any] | None]) -> None:
    """Make a parameter and its state what they were, bit for bit; tensors that there were keep their identity."""
    value, state = copy
    parameter.copy_(value)
    if state is None:
        optimizer.state.pop(parameter, None)
        return
    live = optimizer.state[parameter]
    for key in [key for key in live if key not in state]:
        del live[key]
    for key, old in state.items():
        if isinstance(old, Tensor) and isinstance(live.get(key), Tensor):
            live[key].copy_(old)
        else:
            live[key] = old
