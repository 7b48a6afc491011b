"""The training state of one worker: what it is, how a peer is told, and how it is put in place.

A :class:`TrainingState` holds live references to models, optimizers and other stateful objects. A source *collects* it:
a manifest (names, layouts, numbers) and the list of live tensors whose bytes follow. A receiver *prepares* memory for
such a manifest, has it filled and *commits*. Must never change live state before ``commit`` when staged, never change
the identity of a parameter, and never touch ``grad`` or ``requires_grad``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from swift_recovery.errors import StateError
from swift_recovery.state import incoming, stateful
from swift_recovery.state.binding import (
    arrange,
    bind_model,
    bind_optimizer,
    buffers_of,
    check_names,
    extra_state_of,
    layout_at,
    parameters_of,
)
from swift_recovery.state.codec import decode, encode, join_path
from swift_recovery.state.incoming import Beginning, Incoming, Slot, install_optimizer
from swift_recovery.state.sharded import is_sharded, local_of
from swift_recovery.state.tensors import Layout

VERSION = 2


@dataclass(frozen=True)
class Outgoing:
    """State on its way out: *manifest* describes *tensors*, which are the live ones; do not change them meanwhile."""

    manifest: bytes
    tensors: list[Tensor]
    layouts: list[Layout]


class TrainingState:
    """Live references to all that a worker has to hand over to its replacement.

    *models*: name -> module; wrappers that only run it (``DistributedDataParallel``, ``torch.compile``) are taken off,
    so names do not depend on them. *optimizers*: name -> optimizer. *others*: name -> object with ``state_dict`` and
    ``load_state_dict`` (scheduler, ``GradScaler``, sampler); their state is copied as it is, so it must not depend on
    the rank.

    Raises :class:`StateError` for an optimizer that holds a parameter of no tracked model, for optimizers whose state
    cannot be copied (``LBFGS``, ``ZeroRedundancyOptimizer``), for parameters that do not exist yet (lazy modules) or
    have no plain memory (sparse, quantized, sharded), and for an object without the two methods.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer] | None = None,
        others: Mapping[str, stateful.Stateful] | None = None,
    ) -> None:
        self.models = {name: _unwrapped(model) for name, model in models.items()}
        self.optimizers = dict(optimizers or {})
        self.others = dict(others or {})
        self.carried = 0
        """A checksum of the gradients that an iteration has left to the next one without an update, as it left them:
        they are a part of the state then, in snapshots. 0: there are none."""
        for name, other in self.others.items():
            if not isinstance(other, stateful.Stateful):
                raise StateError(f"{name}: a {type(other).__name__} has no state_dict and load_state_dict")
        for name, optimizer in self.optimizers.items():
            _check_kind(name, optimizer)
        for name, model in self.models.items():
            for path, parameter in model.named_parameters(name):
                if nn.parameter.is_lazy(parameter):
                    raise StateError(f"{path}: a lazy module has no parameters yet; run a forward pass first")
                layout_at(path, local_of(parameter))
        self.check()
        self._began = {name: incoming.beginning_of(model) for name, model in self.models.items()}

    def check(self) -> None:
        """Raise :class:`StateError` if an optimizer holds a parameter of no tracked model."""
        names = self.parameter_names()
        for name, optimizer in self.optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    if id(parameter) not in names:
                        raise StateError(
                            f"optimizer '{name}': parameter {index} of group {number} ({layout_at(name, parameter)}) "
                            "belongs to no tracked model; track the module that holds it as well"
                        )

    def check_optimizer(self, name: str) -> None:
        """Raise :class:`StateError` for what optimizer *name* has made in its state that cannot be copied."""
        names = self.parameter_names()
        for key, entry in self.optimizers[name].state.items():
            values, where = {key: entry}, "its state"
            if isinstance(key, Tensor):
                values = {what: local_of(one) if isinstance(one, Tensor) else one for what, one in entry.items()}
                where = f"its state of {names.get(id(key), 'a tensor')}"
            try:
                for tensor_keys, tensor in _encoded(values):
                    layout_at(tensor_keys, tensor)
            except StateError as error:
                raise StateError(
                    f"optimizer '{name}': {where}: {error}. Use an optimizer that keeps plain tensors and numbers, or "
                    "have it keep what the object has as entries of its state"
                ) from None

    def changed_parameters(self) -> list[str]:
        """Those that are not what they were when this object was made: no other process could take them over."""
        found = {name: incoming.changed_parameters(model, self._began[name]) for name, model in self.models.items()}
        return [join_path(name, path) for name, paths in found.items() for path in paths]

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, each once, in the order of the models."""
        return list({id(p): p for model in self.models.values() for p in model.parameters()}.values())

    def loose_parameters(self) -> list[Tensor]:
        """Those of no optimizer, of sharded ones the part that is here."""
        held = {id(p) for optimizer in self.optimizers.values() for p in _optimizer_parameters(optimizer)}
        return [local_of(parameter) for parameter in self.parameters() if id(parameter) not in held]

    def replicated_tensors(self) -> list[Tensor]:
        """Parameters and tensors of optimizer state, of sharded ones the part that is here: what replicas hold alike
        (buffers, as of BatchNorm, need not)."""
        parameters = self.parameters()
        tensors: list[Tensor] = [local_of(parameter) for parameter in parameters]
        for optimizer in self.optimizers.values():
            # In the order of the models: a group that was made of a set has another one in each process.
            entries = [optimizer.state.get(parameter, {}) for parameter in parameters]
            for entry in (*entries, state_of_none(optimizer)):
                tensors += [local_of(value) for _, value in stateful.leaves(entry) if isinstance(value, Tensor)]
        return tensors

    def collect(self, extra: Any = None) -> Outgoing:
        """Describe the state as it is now, and *extra*, a tree that the codec can write (it may hold tensors).

        Raises :class:`StateError`, naming the path, for a value that cannot be copied to a replacement.
        """
        self.check()
        names = self.parameter_names()
        tree = {
            "models": {name: _model_tree(model, self._began[name]) for name, model in self.models.items()},
            "optimizers": {name: _optimizer_tree(optimizer, names) for name, optimizer in self.optimizers.items()},
            "others": {name: stateful.capture(other) for name, other in self.others.items()},
            "extra": extra,
        }
        keys: list[tuple[object, ...]] = []
        body, tensors = encode(tree, keys)
        layouts = [layout_at(keys_of, tensor) for keys_of, tensor in zip(keys, tensors, strict=True)]
        head, _ = encode({"state": VERSION, "layouts": [layout.to_text() for layout in layouts]})
        return Outgoing(head + b"\n" + body, tensors, layouts)

    def manifest(self, extra: Any = None) -> bytes:
        """``collect(extra).manifest``."""
        return self.collect(extra).manifest

    def tensors(self) -> list[Tensor]:
        """Live tensors of the state in the order of the manifest; those of an ``extra`` would follow them."""
        return self.collect().tensors

    def prepare(self, manifest: bytes, staged: bool) -> Incoming:
        """Memory for the tensors of *manifest*, to be filled and then committed.

        *staged* False: the live tensors themselves where they fit, so an abort leaves them half filled (a replacement
        has nothing to lose). *staged* True: memory on the CPU; live state is untouched until ``commit``.
        Raises :class:`StateError`, naming the first tensor that differs, for the manifest of another model or script;
        then nothing has been changed.
        """
        self.check()
        try:
            return self._prepare(manifest, staged)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise StateError(f"malformed state manifest: {type(error).__name__}: {error}") from None

    def _prepare(self, manifest: bytes, staged: bool) -> Incoming:
        head, _, body = manifest.partition(b"\n")
        header = decode(head, ())
        if not isinstance(header, dict) or header.get("state") != VERSION:
            raise StateError(f"not a state manifest of version {VERSION}")
        slots = [Slot(Layout.from_text(layout)) for layout in header["layouts"]]
        tree = decode(body, slots)
        for section, mine in (("models", self.models), ("optimizers", self.optimizers), ("others", self.others)):
            check_names(section, tree[section], mine)
        # Each live tensor takes one value: by id, the slot that it belongs to.
        taken: dict[int, Slot] = {}
        for name, model in self.models.items():
            bind_model(name, model, tree["models"][name], taken)
        names = self.parameter_names()
        for name, optimizer in self.optimizers.items():
            bind_optimizer(name, optimizer, tree["optimizers"][name], names, taken)
        for slot in slots:
            slot.allocate(staged)
        return Incoming(slots, body, self._install)

    def _install(self, tree: Any) -> Any:
        for name, model in self.models.items():
            there = tree["models"][name]
            incoming.install_buffers(model, there.get("grown", {}), there["buffers"])
            modules = dict(model.named_modules())
            for path, state in there["extra_state"].items():
                modules[path].set_extra_state(state)
        for name, other in self.others.items():
            try:
                stateful.apply(other, tree["others"][name])
            except Exception as error:
                raise StateError(
                    f"{name}: load_state_dict failed ({type(error).__name__}: {error}); "
                    "the state of this worker is now mixed and it has to be replaced"
                ) from error
        # After the others: a scheduler's load_state_dict may write a learning rate of its own.
        for name, optimizer in self.optimizers.items():
            arrange(optimizer, tree["optimizers"][name], self.parameter_names())
            install_optimizer(optimizer, _optimizer_parameters(optimizer), tree["optimizers"][name])
        return tree["extra"]

    def parameter_names(self) -> dict[int, str]:
        """Its path for the id of each parameter."""
        names: dict[int, str] = {}
        for name, model in self.models.items():
            for path, parameter in model.named_parameters(name):
                names.setdefault(id(parameter), path)
        return names


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _check_kind(name: str, optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise StateError(f"optimizer '{name}': LBFGS keeps a history of closures; it cannot be recovered: use another")
    # By name: importing the class would import all of torch.distributed.optim.
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise StateError(
            f"optimizer '{name}': ZeroRedundancyOptimizer spreads its state over ranks; no replica has it: use the "
            "optimizer itself, or fully_shard on a mesh of two dimensions (replicate, shard)"
        )


def _encoded(tree: Any) -> list[tuple[tuple[object, ...], Tensor]]:
    """The tensors of *tree*, each with its keys. Raises :class:`StateError`, with its path, for what is no plain data.
    """
    keys: list[tuple[object, ...]] = []
    _, tensors = encode(tree, keys)
    return list(zip(keys, tensors, strict=True))


def _model_tree(model: nn.Module, began: Beginning) -> dict[str, Any]:
    tree = {"parameters": parameters_of(model), "buffers": buffers_of(model), "extra_state": extra_state_of(model)}
    return {**tree, "grown": incoming.grown_buffers(model, began)}


def _optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of_none(optimizer: Optimizer) -> dict[Any, Any]:
    """What *optimizer* keeps in its state under keys that are no parameters: a count of its own, for one."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def _optimizer_tree(optimizer: Optimizer, names: dict[int, str]) -> dict[str, Any]:
    index = {id(parameter): i for i, parameter in enumerate(_optimizer_parameters(optimizer))}
    state: dict[int, Any] = {}
    sharded: dict[int, list[str]] = {}
    for key, entry in optimizer.state.items():
        if not isinstance(key, Tensor):
            continue
        if id(key) in index:
            number = index[id(key)]
            state[number] = {name: local_of(value) if is_sharded(value) else value for name, value in entry.items()}
            if names_of := [name for name, value in entry.items() if is_sharded(value)]:
                sharded[number] = names_of
        else:
            raise StateError("the optimizer has state for a tensor that is in none of its groups")
    groups = [
        {
            "params": [names[id(parameter)] for parameter in group["params"]],
            "values": {key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    tree = {"kind": type(optimizer).__name__, "groups": groups, "state": state}
    return {**tree, "state_other": state_of_none(optimizer), "sharded": sharded}
