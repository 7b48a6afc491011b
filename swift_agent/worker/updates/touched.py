"""Parameters that an optimizer updates, and the script changes too, in an iteration: clamped weights, a decay by hand.

An iteration that is repeated, or run for its result only, does that once more. It may do no harm, so it is told, after
the second update of a process. An update that no tracked optimizer's step makes is an error: nobody would know of it.
This module must never change a parameter.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from operator import mul

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from swift_recovery.state.sharded import local_of
from swift_recovery.state.snapshots.by_hand import Looks

_NUM_NAMED = 3
# Iterations without a step in which it is looked: the first may have a learning rate of 0.
_NUM_LOOKS = 4
# Parameters of which a section's changes are known without a counter: of all of 1500, in cold memory, it took 5 ms.
_NUM_SAMPLED = 64


class TouchedParameters:
    """`begin` before each iteration and `end` after each that is complete, until that says that it has seen enough.

    *found*: by id, or the id of the part that is here."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._undo: list[Callable[[], object]] = []
        self._looks: list[Looks] = []
        self._follows_update = False
        self.found: set[int] = set()

    def begin(self, *, dry_run: bool) -> None:
        follows, self._follows_update = self._follows_update, False
        self._stop()
        if not follows or dry_run:
            return
        for optimizer in self._optimizers:
            # Two optimizers may update the same one.
            self._looks.append(Looks(local_of(p) for group in optimizer.param_groups for p in group["params"]))
            self._undo += [
                optimizer.register_step_pre_hook(lambda *_: self._note()).remove,
                optimizer.register_step_post_hook(lambda *_: self._look_again()).remove,
            ]

    def end(self, *, updated: bool) -> bool:
        """Whether this was all; *updated*: the iteration has made an update."""
        if not self._undo:
            self._follows_update = updated
            return False
        self._note()
        self._stop()
        return True

    def _note(self) -> None:
        self.found.update(id(parameter) for looks in self._looks for parameter in looks.changed())

    def _look_again(self) -> None:
        for looks in self._looks:
            looks.again()

    def _stop(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._looks.clear()


class ChangedWithoutStep:
    """Whether an iteration has made an update by other means than the step of an *optimizer*: by that of one inside it,
    as SAM's `second_step` does. `begin` and `end` as above."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._looks: list[Looks] = []
        self._num_left = _NUM_LOOKS
        self.found: list[Tensor] = []

    def begin(self, *, dry_run: bool) -> None:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self._looks = [] if dry_run else [Looks(local_of(p) for p in group["params"]) for group in groups]

    def end(self, *, updated: bool) -> bool:
        """Whether this was all; what has changed is in *found*."""
        if not updated:
            self.found = [parameter for looks in self._looks for parameter in looks.differ()]
        self._looks = []
        self._num_left -= 1
        return updated or bool(self.found) or not self._num_left


class ChangedInSection:
    """Which parameters of *optimizers* a section has changed: `begin` before each, `ids` in it or after it.

    A change is known by the parameter's counter. One by way of `.data` (`parameter.data.copy_(average)`) has none: such
    a section puts other weights into the model, all of them as a rule, so one element of each of some parameters is
    compared too. With 1500 parameters 2 ms for a section."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._num_sections = 0
        self._locals: list[Tensor] = []
        self._before: list[tuple[int, int]] = []
        self._elements: list[_Elements] = []

    @torch.no_grad()
    def begin(self) -> None:
        self._num_sections += 1
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        self._locals = [local_of(parameter) for parameters in groups for parameter in parameters]
        self._before = self._look()
        self._elements = _elements_of(self._locals)

    def end(self) -> None:
        self._locals, self._before, self._elements = [], [], []

    @property
    def is_due(self) -> bool:
        """This section is the first, second, fourth, ..."""
        return not self._num_sections & (self._num_sections - 1)

    @torch.no_grad()
    def ids(self, *, is_cut: bool) -> set[int]:
        """Of the parts that are here. *is_cut*: it counts, so elements are compared on a device too, which waits for
        it; else there in sections that are due only."""
        found = {id(local) for local, a, b in zip(self._locals, self._before, self._look(), strict=True) if a != b}
        for elements in self._elements:
            if is_cut or self.is_due or elements.is_on_host:
                found |= elements.changed()
        return found

    def _look(self) -> list[tuple[int, int]]:
        return [(local._version, local.data_ptr()) for local in self._locals]


class _Elements:
    """The bytes of one element of each of *tensors*, which are all on one device. No view of them is held: their memory
    may be given up."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._before = _middles(tensors)
        self.is_on_host = tensors[0].device.type == "cpu"

    def changed(self) -> set[int]:
        those = [(one, other) for one, other in zip(self._tensors, self._before, strict=True) if _middle_of(one) >= 0]
        if not those:
            return set()
        now, before = _middles([tensor for tensor, _ in those]), [other for _, other in those]
        if torch.equal(torch.cat(now), torch.cat(before)):
            return set()
        pairs = zip(now, before, strict=True)
        return {id(tensor) for (tensor, _), pair in zip(those, pairs, strict=True) if not torch.equal(*pair)}


def _middles(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, as bytes."""
    views = [one.detach().as_strided((1,), (1,), _middle_of(one)).view(torch.uint8) for one in tensors]
    return list(torch.split(torch.cat(views), [view.numel() for view in views]))


def _middle_of(tensor: Tensor) -> int:
    """Where in its storage an element in its middle is, whatever the order in memory; -1: its memory was given up."""
    at = tensor.storage_offset() + sum(map(mul, tensor.stride(), [size // 2 for size in tensor.shape]))
    return at if (at + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes() else -1


def _is_plain(tensor: Tensor) -> bool:
    """Has elements with bytes. Of others only counters are looked at."""
    is_strided = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and tensor.numel() > 0 and not (tensor.is_meta or tensor.is_conj() or tensor.is_neg())


def _elements_of(tensors: Sequence[Tensor]) -> list[_Elements]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for number in _sampled(len(tensors)):
        tensor = tensors[number]
        if _is_plain(tensor) and _middle_of(tensor) >= 0:
            by_device.setdefault(tensor.device, []).append(tensor)
    return [_Elements(some) for some in by_device.values()]


@functools.lru_cache(maxsize=4)
def _sampled(num_parameters: int) -> tuple[int, ...]:
    """Of so many. At random, as layers come again and again; always the same ones."""
    if num_parameters <= _NUM_SAMPLED:
        return tuple(range(num_parameters))
    return tuple(random.Random(num_parameters).sample(range(num_parameters), _NUM_SAMPLED))


def told_of_section(names: Sequence[str]) -> str:
    """A section has changed these."""
    return (
        f"a section (@job.resilient) changes parameters that an optimizer has ({_some(names)}), and all workers start "
        "again if a failure cuts it then. Do that outside of it (optimizer.train() and optimizer.eval(), for one)"
    )


def without_step(names: Sequence[str]) -> str:
    return (
        f"parameters have changed in an iteration without a step() of the tracked optimizer ({_some(names)}): such an "
        "update could not be recovered. Track the optimizer whose step() makes it; if two passes make one update "
        "(SAM), make it by optimizer.step(closure)."
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more


def told(names: Sequence[str]) -> str:
    return (
        f"the script itself changes parameters that an optimizer has ({_some(names)}): an iteration that a failure "
        "cuts does so twice. Let it be a change that may be made twice (clamping), or give the optimizer only what it "
        "updates."
    )


def told_twice(number: int, names: Sequence[str]) -> str:
    return (
        f"a failure interrupted iteration {number} after its update. The iteration changes {_some(names)} twice, "
        "before and after the update. The second change may be missing. Change it once in an iteration, or make no "
        "collective after the update."
    )
