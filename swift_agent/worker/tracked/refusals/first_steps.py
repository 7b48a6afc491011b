"""What an optimizer has made in its state in its first step: looked at once, while nothing is lost yet.

`job.track()` describes the state while it is still empty. This module must never cost anything after the first step of
each optimizer, nor change one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swift_agent.errors import UsageError
from swift_recovery.errors import StateError
from swift_recovery.state.training_state import TrainingState


class FirstSteps:
    """Of all optimizers of *state*."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._made: list[str] = []
        optimizers = state.optimizers.items()
        self._hooks = {name: each.register_step_post_hook(self._noting(name)) for name, each in optimizers}

    def _noting(self, name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            self._made.append(name)

        return note

    def look(self) -> bool:
        """An iteration is over; whether some are still to come. Raises `UsageError` for state that no replacement could
        be given."""
        for name in self._made:
            if hook := self._hooks.pop(name, None):
                hook.remove()
                try:
                    self._state.check_optimizer(name)
                except StateError as error:
                    raise UsageError(f"{error}") from None
        self._made.clear()
        return bool(self._hooks)
