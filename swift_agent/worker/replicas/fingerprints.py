"""The fingerprint of what a rank holds: a checksum for each parameter, tensor of optimizer state and buffer, and the
hyper-parameters, the modes of modules and parameters, and of the state of a loader, and of other objects of the
script's own, that it has tracked.

Taken by the training thread where all ranks have made the same updates. Must never write to a tensor, nor communicate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from swift_agent.wire.given import fingerprint
from swift_agent.worker.replicas.modes import modes_of
from swift_agent.worker.tracked import others
from swift_recovery.errors import StateError
from swift_recovery.state.checksum import checksum_of
from swift_recovery.state.deviation import KINDS, Fingerprint, Kind
from swift_recovery.state.sharded import local_of
from swift_recovery.state.stateful import capture, leaves
from swift_recovery.state.training_state import TrainingState, state_of_none

# Of parameters and their state, for one fingerprint: a tenth of a second. What is more comes in the next ones.
MAX_BYTES = 1 << 30
# Of tensors up to this size the values are shown.
MAX_SHOWN = 4


class Fingerprints:
    """Of *state*. Each takes up where the one before has stopped, so all ranks must take the same ones."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._at = 0
        self._objects_at: dict[str, int] = {}

    @property
    def at(self) -> int:
        """The parameter that the next one begins with, counted on and on."""
        return self._at

    def restart(self) -> None:
        """The next one begins with the first parameter."""
        self._at = 0
        self._objects_at = {}

    def take(self, *, whole: bool = False, max_bytes: int | None = None) -> Fingerprint:
        """*whole*: of all parameters, however large, and of no loader, which might begin another pass at the end of
        a run, nor of modes and objects, which say nothing there. *max_bytes*: of fewer than usual, and of an object
        besides."""
        max_bytes = MAX_BYTES if max_bytes is None else max_bytes
        parts: dict[Kind, dict[str, str]] = {kind: {} for kind in KINDS}
        shown: dict[str, str] = {}
        for name, value in self._hyper_parameters():
            parts["hyper"][name] = shown[f"hyper {name}"] = value

        if not whole:
            for name, is_on in modes_of(self._state).items():
                parts["mode"][name] = shown[f"mode {name}"] = repr(is_on)

        if self._state.carried:
            parts["gradient"]["left without a step"] = f"{self._state.carried & ((1 << 64) - 1):016x}"

        if "loader" in self._state.others and not whole:
            parts["loader"]["job.track(loader=...)"] = f"{fingerprint(capture(self._state.others['loader'])):016x}"

        for name, one in others.own(self._state.others).items() if not whole else ():
            parts["object"][name] = self._of_object(name, one, max_bytes)

        def add(kind: Kind, name: str, tensor: Tensor) -> None:
            try:
                parts[kind][name] = f"{checksum_of(tensor):016x}"
            except StateError:
                return  # a buffer without plain memory
            if tensor.numel() <= MAX_SHOWN:
                values = tensor.detach().cpu().flatten().tolist()
                shown[f"{kind} {name}"] = _text(values[0] if len(values) == 1 else values)

        def add_state(entry: Any, of: str) -> int:
            num_bytes = 0
            for path, value in leaves(entry):
                what = f"{path} of {of}"
                if isinstance(value, Tensor):
                    add("state", what, local_of(value))
                    num_bytes += local_of(value).nbytes
                elif isinstance(value, (int, float)):
                    parts["state"][what] = shown[f"state {what}"] = _text(value)
            return num_bytes

        for name, optimizer in self._state.optimizers.items():
            add_state(state_of_none(optimizer), name)
        for model_name, model in self._state.models.items():
            for path, buffer in model.named_buffers(model_name):
                add("buffer", path, local_of(buffer))
        names = self._state.parameter_names()
        parameters, num_bytes = self._state.parameters(), 0
        for _ in range(len(parameters)):
            index = self._at % len(parameters) if not whole else _
            parameter = parameters[index]
            tensor = local_of(parameter)
            add("parameter", names[id(parameter)], tensor)
            num_bytes += tensor.nbytes
            for name, optimizer in self._state.optimizers.items():
                num_bytes += add_state(optimizer.state.get(parameter, {}), f"{names[id(parameter)]} ({name})")
            if not whole:
                self._at += 1
                if num_bytes >= max_bytes:
                    break
        return Fingerprint(parts, shown)

    def _of_object(self, name: str, one: Any, max_bytes: int) -> str:
        """Each has a place of its own, as its tensors may differ in number from rank to rank."""
        part, tensors = others.contents(one)
        at, taken, num_bytes = self._objects_at.get(name, 0), list[Tensor](), 0
        while len(taken) < len(tensors) and num_bytes < max_bytes:
            taken.append(tensors[at % len(tensors)])
            at, num_bytes = at + 1, num_bytes + taken[-1].nbytes
        self._objects_at[name] = at
        return others.digest_of(part, taken)

    def _hyper_parameters(self) -> Iterator[tuple[str, str]]:
        for name, optimizer in self._state.optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                where = f"{name}.param_groups[{number}]" if len(optimizer.param_groups) > 1 else name
                for key in optimizer.defaults:
                    text = _text(group.get(key))
                    if text:
                        yield f"{key} of {where}", text


def _text(value: Any) -> str:
    """Of numbers and what is made of them, else ''."""
    if isinstance(value, Tensor):
        return _text(value.item()) if value.numel() == 1 else ""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        texts = [_text(one) for one in value]
        return f"({', '.join(texts)})" if all(texts) else ""
    return ""
