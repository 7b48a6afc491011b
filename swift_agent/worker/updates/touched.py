"""Parameters that an optimizer updates, and the script changes too, in an iteration: clamped weights, a decay by hand.

An iteration that is repeated, or run for its result only, does that once more. It may do no harm, so it is told, after
the second update of a process. An update that no tracked optimizer's step makes is an error: nobody would know of it.
This module must never change a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from swift_recovery.state.by_hand import Looks
from swift_recovery.state.sharded import local_of

_NUM_NAMED = 3
# Iterations without a step in which it is looked: the first may have a learning rate of 0.
_NUM_LOOKS = 4


class TouchedParameters:
    """`begin` before each iteration and `end` after each that is complete, until that says that it has seen enough.

    *found*: by id, or the id of the part that is here."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._undo: list[Callable[[], object]] = []
        self._looks: list[Looks] = []
        self._follows_update = False
        self.found: set[int] = set()

    def begin(self, *, ghost: bool) -> None:
        follows, self._follows_update = self._follows_update, False
        self._stop()
        if not follows or ghost:
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

    def begin(self, *, ghost: bool) -> None:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self._looks = [] if ghost else [Looks(local_of(p) for p in group["params"]) for group in groups]

    def end(self, *, updated: bool) -> bool:
        """Whether this was all; what has changed is in *found*."""
        if not updated:
            self.found = [parameter for looks in self._looks for parameter in looks.differ()]
        self._looks = []
        self._num_left -= 1
        return updated or bool(self.found) or not self._num_left


class ChangedSince:
    """Which parameters of *optimizers* have been changed since this was made, by their counters: `.data` has none.

    With 1500 parameters 0.4 ms for both looks together."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        self._locals = [local_of(parameter) for parameters in groups for parameter in parameters]
        self._before = self._look()

    def _look(self) -> list[tuple[int, int]]:
        return [(local._version, local.data_ptr()) for local in self._locals]

    def ids(self) -> set[int]:
        """Of the parts that are here."""
        now = self._look()
        if now == self._before:
            return set()
        return {id(local) for local, a, b in zip(self._locals, self._before, now, strict=True) if a != b}


def told_of_section(names: Sequence[str]) -> str:
    """A section has changed these."""
    return (
        f"a section (@job.resilient) changes parameters that an optimizer has ({_some(names)}), and would do so twice "
        "if a failure cuts it. Do that outside of it (optimizer.train() and optimizer.eval(), for one)"
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
        f"iteration {number} was cut after its update, and changes {_some(names)} before that and after it: whether it "
        "had come to the second change cannot be told, so that may be missing. Change it once in an iteration, or make "
        "no collective after the update."
    )
