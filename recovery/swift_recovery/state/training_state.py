"""The training state of one worker: what it is, how a peer is told, and how it is put in place.

A :class:`TrainingState` holds live references to models, optimizers and other stateful objects. A source *collects* it:
a manifest (names, layouts, numbers) and the list of live tensors whose bytes follow. A receiver *prepares* memory for
such a manifest, has it filled and *commits*. Must never change live state before ``commit`` when staged, never change
the identity of a parameter, and never touch ``grad`` or ``requires_grad``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from swift_recovery.errors import StateError
from swift_recovery.state import incoming, stateful
from swift_recovery.state.codec import decode, encode, join_path, path_of
from swift_recovery.state.incoming import Beginning, Incoming, Slot, install_optimizer
from swift_recovery.state.sharded import is_sharded, local_of
from swift_recovery.state.tensors import Layout, layout_of, unexpanded

VERSION = 2
_SAME_SCRIPT = "start every worker with the same script and options"


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
                _layout(path, local_of(parameter))
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
                            f"optimizer '{name}': parameter {index} of group {number} ({_layout(name, parameter)}) "
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
                    _layout(tensor_keys, tensor)
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
        layouts = [_layout(keys_of, tensor) for keys_of, tensor in zip(keys, tensors, strict=True)]
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
            _check_names(section, tree[section], mine)
        # Each live tensor takes one value: by id, the slot that it belongs to.
        taken: dict[int, Slot] = {}
        for name, model in self.models.items():
            _bind_model(name, model, tree["models"][name], taken)
        names = self.parameter_names()
        for name, optimizer in self.optimizers.items():
            _bind_optimizer(name, optimizer, tree["optimizers"][name], names, taken)
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
            _arrange(optimizer, tree["optimizers"][name], self.parameter_names())
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


def _layout(path: str | tuple[object, ...], tensor: Tensor) -> Layout:
    try:
        return layout_of(tensor)
    except StateError as error:
        raise StateError(f"{path if isinstance(path, str) else path_of(path)}: {error}") from None


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: unexpanded(buffer) for name, buffer in model.named_buffers()}


def _model_tree(model: nn.Module, began: Beginning) -> dict[str, Any]:
    tree = {"parameters": _parameters(model), "buffers": _buffers(model), "extra_state": _extra_state(model)}
    return {**tree, "grown": incoming.grown_buffers(model, began)}


def _extra_state(model: nn.Module) -> dict[str, Any]:
    return {
        path: module.get_extra_state()
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: local_of(parameter) for name, parameter in model.named_parameters()}


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


def _check_names(what: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    for name in [*theirs, *mine]:
        if name not in mine or name not in theirs:
            where = "at the source but not here" if name not in mine else "here but not at the source"
            raise StateError(f"{what}: '{name}' exists {where}; {_SAME_SCRIPT}")


def _bind_model(name: str, model: nn.Module, tree: dict[str, Any], taken: dict[int, Slot]) -> None:
    aliases = {path: how["aliases"] for path, how in tree.get("grown", {}).items()}
    grown = {path for path, others in aliases.items() if incoming.has_place_for(model, (path, *others))}
    for path in grown:  # there is none yet, or another one, which stays what it is
        tree["buffers"][path].wish(None, _device_of(model), taken)
    left_out = grown | {alias for path in grown for alias in aliases[path]}
    for section, mine in (("parameters", _parameters(model)), ("buffers", _buffers(model))):
        left = left_out if section == "buffers" else set()
        mine = {path: live for path, live in mine.items() if path not in left}
        theirs = {path: slot for path, slot in tree[section].items() if path not in left}
        _check_names(f"{name} {section}", theirs, mine)
        for path, live in mine.items():
            _bind(theirs[path], live, join_path(name, path), taken)
    _check_names(f"{name} extra state", tree["extra_state"], _extra_state(model))


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _bind(slot: Any, live: Tensor, path: str, taken: dict[int, Slot]) -> None:
    here = _layout(path, live)
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


def _bind_optimizer(
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


def _arrange(optimizer: Optimizer, tree: dict[str, Any], names: dict[int, str]) -> None:
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
