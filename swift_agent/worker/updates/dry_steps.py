"""Steps of a dry run, which change nothing: the update is here already, or comes from a replica.

torch's optimizers skip a parameter without a gradient, so gradients are out of sight meanwhile. Others do as they like
then: make zeros of None, and go on by their momentum; count; raise. So theirs are made as ever, which also gives the
script what they return, and all that they have changed is put back. What such a step writes into its groups (the
estimates of Prodigy) belongs to the update, though a group is otherwise the script's: it is what the real step has
made it, or what has been received.

This module must never make a step, nor decide whether one has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_agent.worker.updates.around_steps import Kept
from swift_agent.worker.updates.closures import is_torchs_own
from swift_recovery.state.snapshots.snapshot import put_values, values_of
from swift_recovery.state.stateful import copy_tree

_Values = list[dict[str, Any]]


class DrySteps:
    """Of *optimizers*, by their names."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self.others = frozenset(name for name, each in optimizers.items() if not is_torchs_own(each))
        """Those that are not torch's own."""
        self.written: dict[str, set[tuple[int, str]]] = {name: set() for name in self.others}
        """What their steps write into groups, as far as was seen: by group and name."""
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        self._before: dict[str, _Looks] = {}
        self._made: dict[str, _Values] = {}
        self._puts: dict[str, Callable[[], None]] = {}
        self._depth: dict[str, int] = {}

    def forget(self) -> None:
        """An iteration begins, or its steps have been taken back."""
        self._before.clear()
        self._made.clear()

    def begin(self, name: str, *, dry: bool) -> None:
        """A step begins, before its closure is called. A class may call the step of another one, with hooks of its own.
        """
        if name not in self.others:
            return
        if dry:
            depth = self._depth[name] = self._depth.get(name, 0) + 1
            if depth == 1:
                self._keep(name)
        elif name not in self._before:
            self._before[name] = _Looks(self._optimizers[name])

    def end(self, name: str, *, dry: bool) -> None:
        if name not in self.others:
            return
        if dry:
            self._depth[name] -= 1
            if not self._depth[name]:
                self._puts.pop(name)()
        else:
            self._note(name)

    def _note(self, name: str) -> None:
        changed = self._before[name].changed()
        self.written[name] |= changed
        groups = self._optimizers[name].param_groups
        self._made[name] = [{} for _ in groups]
        for number, key in changed:
            self._made[name][number][key] = copy_tree(groups[number][key])

    def _keep(self, name: str) -> None:
        optimizer = self._optimizers[name]
        # In the memory of the host: there may be no room for another state on the device.
        kept, looks = Kept(optimizer, every=True, on_host=True), _Looks(optimizer)
        values = [values_of(group) for group in optimizer.param_groups]

        def put() -> None:
            self.written[name] |= looks.changed()
            kept.put_back(optimizer)
            made = self._made.get(name) or [{} for _ in values]
            with torch.no_grad():
                for group, before, by_step in zip(optimizer.param_groups, values, made, strict=True):
                    put_values(group, before | by_step)

        self._puts[name] = put

    def hide(self, name: str) -> None:
        """A step of torch's own then changes nothing."""
        if name in self.others:
            return
        for group in self._optimizers[name].param_groups:
            for parameter in group["params"]:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def unhide(self) -> None:
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden.clear()

    def end_all(self) -> None:
        """The dry run is over, perhaps in the middle of a step."""
        self.unhide()
        for put in self._puts.values():
            put()
        self._puts.clear()
        self._depth.clear()


class _Looks:
    """What the values of the groups of *optimizer* look like now; nothing is read out of a tensor."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # With the values themselves: where one is freed the next one may get its id.
        self._before = [(group.copy(), _marks(group)) for group in optimizer.param_groups]

    def changed(self) -> set[tuple[int, str]]:
        """By group and name, those that look otherwise by now."""
        found = set()
        for number, (group, (_, before)) in enumerate(zip(self._optimizer.param_groups, self._before, strict=True)):
            now = _marks(group)
            found |= {(number, key) for key in now if key not in before or now[key] != before[key]}
        return found


def _marks(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _mark(value) for key, value in group.items() if key != "params"}


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if isinstance(value, dict):
        return [(key, _mark(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_mark(item) for item in value]
    return value.tobytes() if hasattr(value, "tobytes") else value
