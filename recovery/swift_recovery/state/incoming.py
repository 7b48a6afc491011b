"""Memory for a state that is being received, and its installation.

Made by ``TrainingState.prepare``. A model may have got buffers, or larger ones, since its set-up (a mask, a table of
angles): these are installed as well. Must never touch live state before ``commit`` unless that state was given up for
being received into.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from swift_recovery.errors import StateError
from swift_recovery.state.codec import decode
from swift_recovery.state.sharded import like
from swift_recovery.state.tensors import Layout, copy_all, has_layout, new_tensor

PLAIN = (bool, int, float, str, type(None))
# What torch keeps in each module.
_TORCHS = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Beginning:
    """What a model was when its training began: a replacement makes that in its set-up, and no more.

    By path: kind and shape of parameters; of buffers, None where a name is registered without one, besides with which
    they are shared; plain attributes of modules, which often belong to a buffer (for what length it was made)."""

    parameters: Mapping[str, tuple[Any, ...]]
    buffers: Mapping[str, tuple[Any, ...] | None]
    attributes: Mapping[str, Mapping[str, Any]]


def beginning_of(model: nn.Module) -> Beginning:
    return Beginning(
        {path: _kind_of(parameter) for path, parameter in model.named_parameters()},
        _kinds_of_buffers(model),
        {path: plain_attributes(module) for path, module in _modules(model).items()},
    )


def changed_parameters(model: nn.Module, began: Beginning) -> list[str]:
    """Paths of those that were not there, are not there any more, or have another kind or shape."""
    now = {path: _kind_of(parameter) for path, parameter in model.named_parameters()}
    return [path for path in {**began.parameters, **now} if began.parameters.get(path) != now.get(path)]


def grown_buffers(model: nn.Module, began: Beginning) -> dict[str, dict[str, Any]]:
    """Those that were not there, or not as they are, when its training began: by path what a receiver needs besides the
    values. *aliases*: other paths of the same tensor."""
    paths: dict[int, list[str]] = {}
    for path, buffer in model.named_buffers(remove_duplicate=False):
        paths.setdefault(id(buffer), []).append(path)
    now, modules, found = _kinds_of_buffers(model), _modules(model), {}
    for first, *aliases in paths.values():
        if all(now[path] == began.buffers.get(path) for path in (first, *aliases)):
            continue
        parent, _, key = first.rpartition(".")
        owner = modules[parent]
        attributes = {one: _changed_attributes(modules, one, began) for one in {_parent(p) for p in (first, *aliases)}}
        found[first] = {
            "shape": list(owner._buffers[key].shape),  # type: ignore[union-attr]
            "aliases": aliases,
            "persistent": key not in owner._non_persistent_buffers_set,
            "attributes": attributes,
        }
    return found


def install_buffers(
    model: nn.Module, grown: Mapping[str, Mapping[str, Any]], values: Mapping[str, Tensor]
) -> None:
    """Have *model* hold the buffers that are *grown* at the source, with these *values*."""
    modules = _modules(model)
    for path, how in grown.items():
        value = values[path]
        value = value if list(value.shape) == how["shape"] else value.expand(how["shape"])
        for one in (path, *how["aliases"]):
            parent, _, key = one.rpartition(".")
            owner = modules[parent]
            vars(owner).pop(key, None)
            owner._buffers[key] = value
            owner._non_persistent_buffers_set.discard(key)
            if not how["persistent"]:
                owner._non_persistent_buffers_set.add(key)
        for parent, attributes in how["attributes"].items():
            vars(modules[parent]).update(attributes)


def has_place_for(model: nn.Module, paths: Iterable[str]) -> bool:
    """Whether *model* could have buffers there."""
    modules = _modules(model)
    for path in paths:
        parent, _, key = path.rpartition(".")
        if (owner := modules.get(parent)) is None or key in owner._parameters or key in owner._modules:
            return False
        if not isinstance(vars(owner).get(key), Tensor | None):
            return False
    return True


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    return (None, ()) if nn.parameter.is_lazy(tensor) else (tensor.dtype, tuple(tensor.shape))


def _kinds_of_buffers(model: nn.Module) -> dict[str, tuple[Any, ...] | None]:
    first: dict[int, str] = {}
    kinds: dict[str, tuple[Any, ...] | None] = {}
    for parent, module in _modules(model).items():
        for key, buffer in module._buffers.items():
            path = f"{parent}.{key}" if parent else key
            kinds[path] = None
            if buffer is not None:
                kinds[path] = (*_kind_of(buffer), first.setdefault(id(buffer), path))
    return kinds


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in PLAIN and name not in _TORCHS}


def _changed_attributes(modules: Mapping[str, nn.Module], path: str, began: Beginning) -> dict[str, Any]:
    before, missing = began.attributes.get(path, {}), object()
    now = plain_attributes(modules[path])
    return {name: value for name, value in now.items() if value != before.get(name, missing)}


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
