"""The moment of a fault that a person has ordered, in the worker that it is for: it says that it is there, and stops
itself until its agent has struck.

Only made where the agent was started with `--allow-injection` (`ENV_INJECTION`); a look at a file in each iteration is
all that it costs then. Hooks are there in the ordered iteration only. Must never strike by itself: one that is killed
leaves no word.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from swift_agent.wire.environment import WorkerEnvironment
from swift_agent.wire.injected import NEXT, ORDERED, REACHED
from swift_recovery.state.training_state import TrainingState


class Injection:
    """*models*, *optimizers*: those that are tracked."""

    def __init__(self, directory: str, local_rank: str, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        self._order, self._reached = (Path(directory, f"{name}-{local_rank}") for name in (ORDERED, REACHED))
        self._models, self._optimizers = models, optimizers
        self._handles: list[Any] = []
        self._id = ""

    def begins(self, iteration: int) -> None:
        """An iteration does."""
        if self._handles:
            self._take_off()
            self._tell("missed")  # no such call was made in that iteration
        if not self._order.exists():
            return
        try:
            order = json.loads(self._order.read_text())
        except (OSError, ValueError):  # it was taken back
            return
        if order["id"] == self._id or order["iteration"] > iteration:
            return
        self._id = order["id"]
        if order["iteration"] not in (NEXT, iteration):
            self._tell("past")
            return
        phase, part, nth = order["phase"], order["part"], order["micro_batch"]
        if phase == "begin":
            self._stop()
        elif phase == "forward":
            modules = [module for model in self._models for module in model.modules() if not list(module.children())]
            self._count(part, nth, [module.register_forward_hook for module in modules])
        elif phase == "backward":
            parameters = [one for model in self._models for one in model.parameters() if one.requires_grad]
            self._count(part, nth, [one.register_post_accumulate_grad_hook for one in parameters])
        elif phase == "step":
            self._count(0.0, 1, [optimizer.register_step_pre_hook for optimizer in self._optimizers])
        else:
            self._count(1.0, 1, [optimizer.register_step_post_hook for optimizer in self._optimizers])

    def _count(self, part: float, nth: int, register: list[Callable[[Any], Any]]) -> None:
        """Stop in the call that makes *part* of the hooks have been called *nth* times; the first one of them for 0."""
        left = max(1, round(part * len(register)))
        counts = [0] * len(register)

        def called(index: int, *_: Any) -> None:
            nonlocal left
            counts[index] += 1
            if counts[index] == nth:
                left -= 1
                if left == 0:
                    self._stop()

        self._handles = [one(functools.partial(called, index)) for index, one in enumerate(register)]
        if not register:
            self._tell("missed")

    def _stop(self) -> None:
        self._take_off()
        self._tell("here")
        if self._order.exists():  # else it was given up, and nobody would wake this process
            os.kill(os.getpid(), signal.SIGSTOP)

    def _tell(self, what: str) -> None:
        new = self._reached.with_suffix(".new")
        new.write_text(f"{self._id} {what}")
        new.replace(self._reached)

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def of_this_worker(told: WorkerEnvironment, state: TrainingState) -> Injection | None:
    """*state*: what is tracked. None where nothing may be injected; helpers are left alone."""
    if not told.injection or told.share:
        return None
    models, optimizers = list(state.models.values()), list(state.optimizers.values())
    return Injection(told.injection, str(told.number), models, optimizers)
