"""`optimizer.step(closure)`: the forward and the backward are inside the step.

    step --> closure, which may be cut --> the update begins --> parameters change --> end of the step

So the update begins when the closure has returned. An optimizer that is not torch's own may change parameters before it
calls its closure, or call it again in between (sharpness-aware minimization): it is watched in its first step, and
what it overwrites is kept meanwhile. This module must never change a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from swift_agent.errors import UsageError


class StepClosure:
    """The closure of one step. *begins* is called when the first call has returned, *again* makes every later one;
    without *begins*, the first one too."""

    def __init__(
        self, optimizer: Optimizer, closure: Callable[[], Any], begins: Callable[[StepClosure], None] | None,
        again: Callable[[Callable[[], Any]], Any],
    ) -> None:  # fmt: skip
        self._optimizer, self._closure, self._begins, self._again = optimizer, closure, begins, again
        self._versions = self._now()
        self.num_calls = 0
        self.is_late = False
        """Parameters had been changed when it was first called."""

    def __call__(self) -> Any:
        self.num_calls += 1
        if self.num_calls == 1:
            self.is_late = self._now() != self._versions
            if self._begins is not None:
                result = self._closure()
                self._begins(self)
                return result
        return self._again(self._closure)

    @property
    def is_plain(self) -> bool:
        """It was called once, before the optimizer had changed anything."""
        return self.num_calls == 1 and not self.is_late

    def check(self, name: str) -> None:
        """The step of optimizer *name* is over. Raises `UsageError` if the closure was not called."""
        if not self.num_calls:
            raise UsageError(
                f"optimizer '{name}' has made a step without calling its closure: call the closure before the step, "
                "and the step without it."
            )

    def _now(self) -> list[int]:
        return [p._version for group in self._optimizer.param_groups for p in group["params"]]


def closure_of(args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What was given to a step, whose first argument is the optimizer; None if there is none."""
    return args[1] if len(args) > 1 else named.get("closure")


def with_closure(closure: Any, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """These arguments with another closure."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), dict(named)
    return tuple(args), {**named, "closure": closure}


def within(name: str) -> str:
    return (
        f"optimizer '{name}' changes parameters before it calls its closure, or calls it again: where ranks hold "
        "different parts of a model such an update could not be recovered. Make it in two iterations."
    )


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Or ours: its step calls the closure first, and once (but for LBFGS, which is refused)."""
    # Adafactor says that it is of torch.optim itself.
    return f"{type(optimizer).__module__}.".startswith(("torch.optim.", "swift_recovery."))
