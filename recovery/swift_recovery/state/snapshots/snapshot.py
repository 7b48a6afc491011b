"""The small part of a training state at one point of the loop, so that an interrupted iteration can be repeated.

Kept: buffers of models, with the plain attributes beside them (the length for which a mask was made), hyper-parameters
of optimizers, state of the other objects, which gradients did not exist and, when asked, the generators, and modes (the
training flag of each module, ``requires_grad`` of each parameter); gradients, where ``TrainingState.carried`` says that
an update is yet to use them. Never kept: parameters and optimizer state, which an iteration changes at its end only.
Taken at every iteration, so it must never wait for a device and must cost microseconds.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from swift_recovery.errors import StateError
from swift_recovery.state import stateful
from swift_recovery.state.codec import join_path
from swift_recovery.state.incoming import PLAIN, plain_attributes, replace_values
from swift_recovery.state.randomness import capture_generators, restore_generators
from swift_recovery.state.sharded import local_of
from swift_recovery.state.snapshots import changes
from swift_recovery.state.snapshots.buffer_copy import BufferCopy, has_values_of, received
from swift_recovery.state.snapshots.by_hand import ByHand
from swift_recovery.state.tensors import copy_all
from swift_recovery.state.training_state import TrainingState

_IS_TRAINING, _REQUIRES_GRADIENT = itemgetter("training"), attrgetter("requires_grad")


_Owner = tuple[str, dict[str, Tensor | None], dict[str, BufferCopy | None]]
"""The path of a module that has buffers, these, and what is kept of them."""


class Snapshot:
    """Small state of the objects of *state*; empty until :meth:`take` or :meth:`install`.

    Modules with buffers are looked up once, here; one that registers its first buffer later is seen from :meth:`look`.
    A scheduler and the learning rate that it wrote into an optimizer are kept together. *watch*: the class `Watch` of
    swift-agent's native library, which makes taking faster. *by_hand*: with parameters that no optimizer updates, as
    far as they change; *modes*: with modes. These are restored, but in no :meth:`tree`. *stays*: by optimizer,
    hyper-parameters, by the number of their group, that :meth:`restore` leaves as they are.
    """

    def __init__(
        self, state: TrainingState, watch: Any | None = None, *, by_hand: bool = False, modes: bool = False,
        stays: Mapping[str, Collection[tuple[int, str]]] | None = None,
    ) -> None:  # fmt: skip
        self._state, self._stays = state, stays or {}
        self.by_hand = ByHand(state.loose_parameters() if by_hand else ())
        self._buffers: list[_Owner] = []
        self._found_later: set[str] = set()
        self._beside: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._attributes: dict[str, dict[str, Any]] = {}
        self._parameters = state.parameters()
        # As mappings: to ask a module takes three times as long. A wrapper without a flag of its own has another's.
        flags = [vars(module) for model in state.models.values() for module in model.modules()] if modes else []
        self._flags = [each for each in flags if "training" in each]
        self._switched = self._parameters if modes else []
        self._modes: tuple[list[bool], list[bool]] = [], []
        self._devices = {parameter.device for parameter in self._parameters}
        self._groups: dict[str, list[dict[str, Any]]] = {}
        self._others: dict[str, Any] = {}
        self._no_gradient: list[bool] = []
        self._gradients: list[Tensor | None] | None = None
        self._carried = 0
        self._generators: dict[str, Any] | None = None
        self._taken = False
        self._watch = watch(self._parameters, list(state.optimizers.values())) if watch else None
        self.is_current: Callable[[], bool] = _never
        """Whether `take`, without generators, would keep what is kept already. Cheaper than to take it; may be false
        although it is so."""
        self._find_buffers()
        if self._watch is not None and not self._buffers and not state.others and not self.by_hand:
            is_same = self._watch.is_same
            self.is_current = (lambda: is_same() and self._modes == self._modes_now()) if modes else is_same

    def look(self) -> None:
        """See modules that have buffers now, and had none. What those are now counts as kept."""
        for path, owner, saved in self._find_buffers():
            self._found_later.add(path)
            for key, live in owner.items():
                saved[key] = None if live is None else BufferCopy(live)
            copies = [buffer for buffer in saved.values() if buffer is not None]
            copy_all([buffer.copy for buffer in copies], [buffer.target for buffer in copies])
            self.is_current = _never

    def _find_buffers(self) -> list[_Owner]:
        """What is new."""
        known = {path for path, _, _ in self._buffers}
        found: list[_Owner] = [
            (path, module._buffers, {})
            for name, model in self._state.models.items()
            for within, module in model.named_modules()
            if module._buffers and (path := join_path(name, within) if within else name) not in known
        ]
        self._buffers += found
        modules = {id(module._buffers): module for model in self._state.models.values() for module in model.modules()}
        for path, owner, _ in found:
            module = modules[id(owner)]
            if not type(module).__module__.startswith("torch."):
                self._beside[path] = vars(module), plain_attributes(module)
        return found

    def take(self, rng: bool = False) -> None:
        """Keep the state as it is now, with the generators if *rng*. Replaces what was kept before.

        With *watch* under 2 us if there are neither buffers nor other objects and nothing has changed, otherwise 10 us
        (a few times that where an iteration has just emptied the caches); a buffer adds about 1 us and the time to copy
        it, modes 10 us for 100 modules with a parameter each.
        """
        self._taken = False
        if self._buffers:
            self._take_buffers()
        if self.by_hand:
            self.by_hand.take()
        if self._watch is None or not self._watch.is_same():
            self._take_groups_and_gradients()
        if self._state.carried or self._carried:
            self._take_carried()
        if self._state.others:
            self._others = {n: stateful.copy_tree(stateful.capture(other)) for n, other in self._state.others.items()}
        self.keep_modes()
        self._generators = capture_generators(self._devices) if rng else None
        self._taken = True

    def keep_modes(self) -> None:
        """Of all that is kept the modes alone, as they are now: by themselves they need no other."""
        self._modes = self._modes_now()

    def _modes_now(self) -> tuple[list[bool], list[bool]]:
        return [*map(_IS_TRAINING, self._flags)], [*map(_REQUIRES_GRADIENT, self._switched)]

    def _put_modes(self) -> None:
        training, required = self._modes
        for flags, flag in zip(self._flags, training, strict=True):
            flags["training"] = flag
        for parameter, flag in zip(self._switched, required, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)

    def _take_buffers(self) -> None:
        for path, (own, first) in self._beside.items():
            self._attributes[path] = {n: value for n in first if type(value := own.get(n, own)) in PLAIN}
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for _, owner, saved in self._buffers:
            if saved.keys() != owner.keys():
                saved.clear()
            for key, live in owner.items():
                if live is None:
                    saved[key] = None
                    continue
                buffer = saved.get(key)
                if buffer is None or buffer.live is not live or buffer.shape != live.shape:
                    buffer = saved[key] = BufferCopy(live)
                if not buffer.is_current():
                    targets.append(buffer.copy)
                    sources.append(buffer.target)
        if targets:
            copy_all(targets, sources)

    def _take_groups_and_gradients(self) -> None:
        optimizers = self._state.optimizers
        self._groups = {name: [values_of(group) for group in each.param_groups] for name, each in optimizers.items()}
        self._no_gradient = [parameter.grad is None for parameter in self._parameters]
        if self._watch is not None:
            values = (value for groups in self._groups.values() for group in groups for value in group.values())
            if all(map(_is_immutable, values)):
                self._watch.keep()
            else:
                self._watch.forget()  # a tensor, for one, may change in place

    def _take_carried(self) -> None:
        self._carried = self._state.carried
        self._gradients = gradients_of(self._parameters) if self._carried else None
        self.forget()

    def forget(self) -> None:
        """What is kept may not be current, whatever `is_current` would say."""
        if self._watch is not None:
            self._watch.forget()

    def changed(self) -> changes.Changed:
        """What the iteration has changed so far of buffers, and of parameters that no optimizer updates."""
        self._check_taken()
        found = [
            changes.of_buffer(join_path(path, key), owner, key, live, None if kept is None else kept.copy)
            for path, owner, saved in self._buffers
            for key, live in owner.items()
            if live is not None and not has_values_of(live, kept := saved.get(key))
        ]
        names = self._state.parameter_names()
        known = {id(local_of(parameter)): names[id(parameter)] for parameter in self._parameters}
        for live, before, values, since in self.by_hand.changed():
            found.append(changes.of_parameter(known.get(id(live), ""), live, before, values, since))
        return changes.Changed(found)

    def replace_others(self, trees: Mapping[str, Any]) -> None:
        """Of these objects keep what *trees*, made by `stateful.capture`, say, in the place of what was taken."""
        self._check_taken()
        self._others |= {name: stateful.copy_tree(tree) for name, tree in trees.items()}

    def is_spoilt(self) -> bool:
        """Something has changed since the last :meth:`take` that cannot be put back: what it was is not kept, or may be
        of before that."""
        buffers = (buffer for _, _, saved in self._buffers for buffer in saved.values() if buffer is not None)
        return self.by_hand.is_spoilt() or any(buffer.is_lost() for buffer in buffers)

    def restore(self, *, buffers: bool = True) -> None:
        """Put everything back; the snapshot stays as it is and can be restored again. *buffers* False: all but these,
        and parameters.

        Buffers and tensors of hyper-parameters are written in place. A gradient that did not exist becomes None; one
        that existed becomes zero, because its sum is spoilt and an iteration that does not clear it first left it zero
        (and None is not the same: an optimizer skips such a parameter, but decays one whose gradient is zero), unless
        it was carried into the iteration: then it is what it was.
        A ``GradScaler`` forgets that it has unscaled. Generators are put back if the snapshot has them.
        Raises :class:`StateError` if nothing has been taken.
        """
        self._check_taken()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for _, owner, saved in self._buffers if buffers else ():
            for key in [key for key in owner if key not in saved]:
                del owner[key]
            for key, buffer in saved.items():
                # The tensor object as well: the iteration may have put another one in its place.
                owner[key] = None if buffer is None else buffer.live
                if buffer is not None:
                    targets.append(buffer.restored())
                    sources.append(buffer.copy)
        copy_all(targets, sources)
        if buffers:
            for path, attributes in self._attributes.items():
                self._beside[path][0].update(attributes)
            self.by_hand.put_back()
        self._put_modes()
        # Before the hyper-parameters: a scheduler's load_state_dict may write a learning rate of its own.
        for name, tree in self._others.items():
            stateful.apply(self._state.others[name], stateful.copy_tree(tree))
        for name, groups in self._groups.items():
            stays = self._stays.get(name, ())
            for number, saved_values in enumerate(groups):
                group = self._state.optimizers[name].param_groups[number]
                now = {key: group[key] for where, key in stays if where == number and key in group}
                put_values(group, saved_values | now if now else saved_values)
        for parameter, had_none in zip(self._parameters, self._no_gradient, strict=True):
            if had_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach().zero_()
            else:
                parameter.grad = torch.zeros_like(parameter)
        if self._gradients is not None:
            put_gradients(self._parameters, self._gradients)
        self.restore_generators()

    def restore_generators(self) -> None:
        """Put back the generators alone, if the snapshot has them."""
        if self._generators is not None:
            restore_generators(self._generators)

    def tree(self) -> dict[str, Any]:
        """The snapshot as a tree for the codec. Its tensors are those of the snapshot: send it before the next take."""
        self._check_taken()
        buffers = {
            path: {key: None if buffer is None else buffer.copy for key, buffer in saved.items()}
            for path, _, saved in self._buffers
        }
        # What has not changed may be of this rank alone.
        attributes = {
            path: {n: value for n, value in kept.items() if value != self._beside[path][1][n]}
            for path, kept in self._attributes.items()
        }
        return {
            "buffers": buffers,
            "attributes": attributes,
            "groups": self._groups,
            "others": self._others,
            "no_gradient": self._no_gradient,
            "gradients": self._gradients,
            "carried": self._carried,
            "generators": self._generators,
        }

    def install(self, tree: Mapping[str, Any], rng: bool = True) -> None:
        """Take over a :meth:`tree` from another worker and put it in force, generators only if *rng*.

        Raises :class:`StateError` if it is of another model or script; then live state has not been changed.
        """
        self.look()
        self.take()
        self._taken = False
        self.forget()
        # The source may not have looked since it has got those that were found here later.
        left = self._found_later.difference(tree["buffers"])
        mine = {path: (owner, saved) for path, owner, saved in self._buffers if path not in left}
        _check_same("buffers", tree["buffers"], mine)
        _check_same("optimizers", tree["groups"], self._groups)
        _check_same("others", tree["others"], self._others)
        for name, groups in self._groups.items():
            if len(tree["groups"][name]) != len(groups):
                raise StateError(f"snapshot: optimizer '{name}' has another number of parameter groups at its source")
        if {len(tree["no_gradient"]), len(tree.get("gradients") or self._parameters)} != {len(self._parameters)}:
            raise StateError("snapshot: another number of parameters at its source")
        for path, (owner, saved) in mine.items():
            for key, values in tree["buffers"][path].items():
                saved[key] = None if values is None else received(owner.get(key), values)
            for key in [key for key in saved if key not in tree["buffers"][path]]:
                del saved[key]
        for path, (_, first) in self._beside.items():
            self._attributes[path] = {**first, **tree.get("attributes", {}).get(path, {})}
        self._groups = stateful.copy_tree(tree["groups"])
        self._others = stateful.copy_tree(tree["others"])
        self._no_gradient = list(tree["no_gradient"])
        self._gradients = tree.get("gradients")
        self._carried = self._state.carried = tree.get("carried", 0)
        self._generators = tree["generators"] if rng else None
        self._taken = True
        self.restore()

    def _check_taken(self) -> None:
        if not self._taken:
            raise StateError("this snapshot is empty: nothing has been taken since it was made")


@torch.no_grad()
def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """A copy of them, for `put_gradients`."""
    return [None if p.grad is None else local_of(p.grad.detach()).clone() for p in parameters]


@torch.no_grad()
def put_gradients(parameters: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    """Make the gradients of *parameters* these; of sharded ones the part that is here."""
    for parameter, value in zip(parameters, values, strict=True):
        if value is None:
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local_of(parameter.grad.detach()).copy_(value)


def _never() -> bool:
    return False


def values_of(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of the hyper-parameters of a parameter group, for `put_values`."""
    # As few calls as can be: this runs with cold caches, after an iteration.
    values = group.copy()
    del values["params"]
    for key, value in values.items():
        if type(value) not in stateful.SCALARS:
            values[key] = stateful.copy_tree(value)
    return values


def _is_immutable(value: Any) -> bool:
    kind = type(value)
    return kind in stateful.SCALARS or (kind is tuple and stateful.SCALARS.issuperset(map(type, value)))


def put_values(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Make the hyper-parameters of a parameter group *saved*; tensors are written in place."""
    values = {}
    for key, value in saved.items():
        live = group.get(key)
        if isinstance(value, Tensor) and isinstance(live, Tensor) and live.shape == value.shape:
            live.detach().copy_(value)
            values[key] = live
        else:
            values[key] = stateful.copy_tree(value)
    replace_values(group, values)


def _check_same(what: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    different = sorted(set(theirs) ^ set(mine))
    if different:
        raise StateError(f"snapshot: {what} {', '.join(different)} exist on one side only; start every worker alike")
