"""Parameters that an optimizer updates, and the script changes too, in an iteration: clamped weights, a decay by hand.

An iteration that is repeated, or run for its result only, does that once more. It may do no harm, so it is told, after
the second update of a process. This module must never change a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch.optim import Optimizer

from swift_recovery.by_hand import Looks
from swift_recovery.sharded import local_of

_NUM_NAMED = 3


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


def told(names: Sequence[str]) -> str:
    some = ", ".join(names[:_NUM_NAMED]) + (f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else "")
    return (
        f"the script itself changes parameters that an optimizer has ({some}): an iteration that a failure cuts does "
        "so twice. Let it be a change that may be made twice (clamping), or give the optimizer only what it updates."
    )
