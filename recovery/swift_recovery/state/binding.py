"""What a source sends, matched with what is here: each tensor of its manifest is given the live one that it belongs to,
by name.

It must never change a live tensor, only say where values are to go; what does not match is told with its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from swift_recovery.errors import StateError
from swift_recovery.state import incoming
from swift_recovery.state.codec import join_path, path_of
from swift_recovery.state.incoming import Slot
from swift_recovery.state.sharded import local_of
from swift_recovery.state.tensors import Layout, layout_of, unexpanded

_SAME_SCRIPT = "start every worker with the same script and options"


def layout_at(path: str | tuple[object, ...], tensor: Tensor) -> Layout:
    try:
        return layout_of(tensor)
    except StateError as error:
        raise StateError(f"{path if isinstance(path, str) else path_of(path)}: {error}") from None


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: local_of(parameter) for name, parameter in model.named_parameters()}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: unexpanded(buffer) for name, buffer in model.named_buffers()}


def extra_state_of(model: nn.Module) -> dict[str, Any]:
    return {
        path: module.get_extra_state()
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def check_names(what: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    for name in [*theirs, *mine]:
        if name not in mine or name not in theirs:
            where = "at the source but not here" if name not in mine else "here but not at the source"
            raise StateError(f"{what}: '{name}' exists {where}; {_SAME_SCRIPT}")


def bind_model(name: str, model: nn.Module, tree: dict[str, Any], taken: dict[int, Slot]) -> None:
    aliases = {path: how["aliases"] for path, how in tree.get("grown", {}).items()}
    grown = {path for path, others in aliases.items() if incoming.has_place_for(model, (path, *others))}
    for path in grown:  # there is none yet, or another one, which stays what it is
        tree["buffers"][path].wish(None, _device_of(model), taken)
    left_out = grown | {alias for path in grown for alias in aliases[path]}
    for section, mine in (("parameters", parameters_of(model)), ("buffers", buffers_of(model))):
        left = left_out if section == "buffers" else set()
        mine = {path: live for path, live in mine.items() if path not in left}
        theirs = {path: slot for path, slot in tree[section].items() if path not in left}
        check_names(f"{name} {section}", theirs, mine)
        for path, live in mine.items():
            _bind(theirs[path], live, join_path(name, path), taken)
    check_names(f"{name} extra state", tree["extra_state"], extra_state_of(model))


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _bind(slot: Any, live: Tensor, path: str, taken: dict[int, Slot]) -> None:
    here = layout_at(path, live)
    if not isinstance(slot, Slot):
        raise StateError(f"{path}: the manifest has no tensor for it")
    there = slot.layout
    if (here.dtype, here.shape, here.device_type) != (there.dtype, there.shape, there.device_type):
        raise StateError(f"{path}: the source holds {there}, this worker {here}; {_SAME_SCRIPT}")
    if slot.live is not None and slot.live is not live:
        raise StateError(f"{path}: shared with another parameter at the source but not here; {_SAME_SCRIPT}")
    if taken.setdefault(id(live), slot) is not slot:
        raise StateError(f"{path}: shared with another parameter here but not at the source; {_SAME_SCRIPT}")
    slot.live, slot.device = live, live.device


def bind_optimizer(
    name: str, optimizer: Optimizer, tree: dict[str, Any], names: dict[int, str], taken: dict[int, Slot]
) -> None:
    kind = type(optimizer).__name__
    if tree["kind"] != kind:
        raise StateError(f"optimizer '{name}': {tree['kind']} at the source, {kind} here; {_SAME_SCRIPT}")
    held = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    theirs = [group["params"] for group in tree["groups"]]
    if list(map(sorted, held)) != list(map(sorted, theirs)):
        raise StateError(
            f"optimizer '{name}': its parameter groups hold {_first_difference(theirs, held)}; {_SAME_SCRIPT}"
        )
    parameters = [parameter for group in _arranged(optimizer, tree, names) for parameter in group]
    for index, entry in tree["state"].items():
        parameter = parameters[index]
        existing = optimizer.state.get(parameter, {})
        for key, slot in _slots(entry):
            mine = existing.get(key)
            slot.wish(local_of(mine) if isinstance(mine, Tensor) else mine, parameter.device, taken)
    for group, new in zip(optimizer.param_groups, tree["groups"], strict=True):
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        for key, slot in _slots(new["values"]):
            slot.wish(group.get(key), device, taken)


def _arranged(optimizer: Optimizer, tree: dict[str, Any], names: dict[int, str]) -> list[list[Tensor]]:
    """The parameters of its groups, in the order that they have at the source."""
    arranged = []
    for group, new in zip(optimizer.param_groups, tree["groups"], strict=True):
        by_name = {names[id(parameter)]: parameter for parameter in group["params"]}
        arranged.append([by_name[name] for name in new["params"]])
    return arranged


def arrange(optimizer: Optimizer, tree: dict[str, Any], names: dict[int, str]) -> None:
    """Give the parameters of its groups that order: a group that was made of a set has another one in each process. It
    matters to an optimizer that adds up over its parameters."""
    for group, parameters in zip(optimizer.param_groups, _arranged(optimizer, tree, names), strict=True):
        group["params"][:] = parameters


def _first_difference(theirs: list[list[str]], mine: list[list[str]]) -> str:
    if len(theirs) != len(mine):
        return f"{len(theirs)} groups at the source and {len(mine)} here"
    number = next(i for i, (a, b) in enumerate(zip(theirs, mine, strict=True)) if a != b)
    pairs = zip(theirs[number], mine[number], strict=False)
    for index, (there, here) in enumerate(pairs):
        if there != here:
            return f"'{there}' as parameter {index} of group {number} at the source, '{here}' here"
    return f"{len(theirs[number])} parameters in group {number} at the source, {len(mine[number])} here"


def _slots(tree: Any, key: Any = None) -> Iterator[tuple[Any, Slot]]:
    """Slots in *tree*, each with its key if it lies directly in the outermost dict, else None."""
    if isinstance(tree, Slot):
        yield key, tree
    elif isinstance(tree, dict):
        for name, item in tree.items():
            for _, slot in _slots(item):
                yield name if item is slot else None, slot
    elif isinstance(tree, list | tuple | set):
        for item in tree:
            for _, slot in _slots(item):
                yield None, slot
