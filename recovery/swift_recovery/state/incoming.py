"""Memory for a state that is being received, and its installation.

Made by ``TrainingState.prepare``. Must never touch live state before ``commit`` unless that state was given up for
being received into.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_recovery.errors import StateError
from swift_recovery.state.codec import decode
from swift_recovery.state.sharded import like
from swift_recovery.state.tensors import Layout, copy_all, has_layout, new_tensor


class Slot:
    """The place of one tensor of a manifest.

    ``live``: the tensor here that takes its value, or None for a new one; ``device``: where the value is to lie;
    ``memory``: what the bytes of the wire are written to, in the layout of the manifest.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.live: Tensor | None = None
        self.device: torch.device | None = None
        self.memory = torch.empty(0)

    def wish(self, existing: object, device: torch.device, taken: dict[int, "Slot"]) -> None:
        """Prefer *existing* if it fits and is not *taken* by another slot, else *device* if that has the right type."""
        if self.live is not None:
            return
        layout = self.layout
        self.device = device if device.type == layout.device_type else _device(layout)
        if (
            isinstance(existing, Tensor)
            and existing.device == self.device
            and has_layout(existing, layout)
            and not existing.requires_grad
            and taken.setdefault(id(existing), self) is self
        ):
            self.live = existing

    def allocate(self, staged: bool) -> None:
        """Choose ``memory``; see ``TrainingState.prepare``."""
        device = self.device = self.device or _device(self.layout)
        if not staged and self.live is not None and has_layout(self.live, self.layout):
            self.memory = self.live
        else:
            self.memory = new_tensor(self.layout, torch.device("cpu") if staged else device)


class Incoming:
    """A state that is being received. Fill ``tensors``, then :meth:`commit`; to abort, drop it.

    ``tensors``: memory in the order of the manifest; ``memory_bytes`` of each is what the wire carries.
    """

    def __init__(self, slots: Sequence[Slot], body: bytes, install: Callable[[Any], Any]) -> None:
        self._slots = slots
        self._body = body
        self._install = install
        self._committed = False

    @property
    def tensors(self) -> list[Tensor]:
        return [slot.memory for slot in self._slots]

    @property
    def layouts(self) -> list[Layout]:
        return [slot.layout for slot in self._slots]

    def commit(self) -> Any:
        """Put everything in place and return the ``extra`` of the manifest. Call it once, after all bytes are there.

        Parameters and buffers keep their identity and memory; optimizer state that the source does not have is removed.
        Raises :class:`StateError` if an object refuses its state; the state of the worker is then mixed.
        """
        if self._committed:
            raise StateError("this state has been committed already")
        self._committed = True
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        values: list[Tensor] = []
        for slot in self._slots:
            if slot.live is None:
                values.append(slot.memory.to(slot.device))
                continue
            values.append(slot.live)
            if slot.memory is slot.live:
                # Written by the transport, behind autograd's back.
                torch.autograd.graph.increment_version(slot.live)
            else:
                targets.append(slot.live)
                sources.append(slot.memory)
        copy_all(targets, sources)
        return self._install(decode(self._body, values))


def install_optimizer(optimizer: Optimizer, parameters: Sequence[Tensor], tree: dict[str, Any]) -> None:
    """Replace hyper-parameters and state of *optimizer* by those of *tree*, whose tensors are in place already."""
    for group, new in zip(optimizer.param_groups, tree["groups"], strict=True):
        replace_values(group, new["values"])
    optimizer.state.clear()
    for index, entry in tree["state"].items():
        parameter = parameters[index]
        sharded = {name: like(entry[name], parameter) for name in tree["sharded"].get(index, ())}
        optimizer.state[parameter] = {**entry, **sharded}
    optimizer.state.update(tree["state_other"])


def replace_values(group: dict[str, Any], values: dict[str, Any]) -> None:
    """Make the hyper-parameters of a parameter group *values*; "params" stays."""
    for key in [key for key in group if key != "params" and key not in values]:
        del group[key]
    group.update(values)


def _device(layout: Layout) -> torch.device:
    if layout.device_type == "cpu":
        return torch.device("cpu")
    try:
        return torch.empty(0, device=layout.device_type).device
    except (RuntimeError, AssertionError) as error:
        raise StateError(f"the source holds {layout}; this worker has no such device: {error}") from None
