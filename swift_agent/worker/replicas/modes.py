"""The modes of a model: the training flag of each module, and whether each parameter requires a gradient.

A script changes them at some iteration (`if epoch == 3: bn.eval()`), and a replacement may never pass that line. So the
first iteration after a recovery, which all ranks come to at the same place of the script, begins with this:

    a replica that was there: says its modes ---> replacement: has the same, and says what differed

This module must never decide what is wrong: what differs at the end of an iteration `deviation` judges.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from swift_recovery.planning.plan import Plan
from swift_recovery.state.training_state import TrainingState

_SLICE = timedelta(seconds=2)
# The source comes to the iteration as soon as its script does. One that ends there never comes.
PATIENCE_S = 60.0
MAX_NAMED = 3


def modes_of(state: TrainingState) -> dict[str, bool]:
    """By name, of all tracked models."""
    found: dict[str, bool] = {}
    for name, model in state.models.items():
        for path, module in model.named_modules(prefix=name):
            found[f"training of {path}"] = module.training
        for path, parameter in model.named_parameters(name):
            found[f"requires_grad of {path}"] = parameter.requires_grad
    return found


def put_in_force(state: TrainingState, modes: Mapping[str, bool]) -> list[str]:
    """The names of those that were others here."""
    changed = []
    for name, model in state.models.items():
        for path, module in model.named_modules(prefix=name):
            key = f"training of {path}"
            if modes.get(key, module.training) != module.training:
                module.training = modes[key]
                changed.append(key)
        for path, parameter in model.named_parameters(name):
            key = f"requires_grad of {path}"
            if modes.get(key, parameter.requires_grad) != parameter.requires_grad:
                parameter.requires_grad_(modes[key])
                changed.append(key)
    return changed


@dataclass(frozen=True)
class Part:
    """What a rank does before iteration *iteration*: says its modes, or has those that rank *source* says."""

    iteration: int
    source: int
    says: bool


def part_of(plan: Plan, rank: int, replicas: Sequence[int], *, was_there: bool) -> Part | None:
    """Of a rank that enters a generation by *plan*; it *was_there* before, with a state. The first replica that keeps
    its own says it. Nobody begins an iteration again where survivors stay in the middle of it."""
    if plan.kind != "copy" or plan.stays:
        return None
    others = {*plan.sources, *plan.handovers, *plan.loads, *plan.replays}
    source = min((one for one in replicas if one not in others), default=None)
    if source is None or others.isdisjoint(replicas):
        return None
    if rank == source:
        return Part(plan.iteration, source, says=True)
    return None if was_there else Part(plan.iteration, source, says=False)


class Modes:
    """One per worker. *store*: of the generation. *is_cut*: whether this generation ends."""

    def __init__(
        self, state: TrainingState, rank: int, replicas: Sequence[int], store: Callable[[], Any],
        note: Callable[[str], None], is_cut: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._state, self._rank, self._replicas = state, rank, replicas
        self._store, self._note, self._is_cut = store, note, is_cut
        self._part: Part | None = None
        self._lacks = False
        self.is_due = False
        """At the next iteration there is something to do."""

    def recovered(self, plan: Plan | None, *, was_there: bool) -> None:
        """Training begins in another generation, by *plan*; None: it has ended already."""
        self._lacks = self._lacks or not was_there
        if plan is not None:
            self._part = part_of(plan, self._rank, self._replicas, was_there=was_there)
            self.is_due = self._part is not None

    def begin(self, iteration: int) -> None:
        """Iteration *iteration* begins, where the script is on all ranks."""
        part, self._part, self.is_due = self._part, None, False
        if part is None or self._is_cut():
            return
        # Who was lost itself, and has not come to an iteration since, does not know any; nor who is further on.
        knows = iteration == part.iteration and not (part.says and self._lacks)
        try:
            if part.says:
                self._say(part, modes_of(self._state) if knows else {})
            elif knows:
                self._take_over(part)
        except dist.DistStoreError:
            return  # a store that is cut, or away: the next collective finds out
        self._lacks = self._lacks and not knows

    def pay(self, plan: Plan | None) -> None:
        """An iteration that is owed is made after all, while the script is past it: nobody can have its modes."""
        part = part_of(plan, self._rank, self._replicas, was_there=True) if plan is not None else None
        if part is not None:
            with contextlib.suppress(dist.DistStoreError):
                self._say(part, {})

    def _say(self, part: Part, modes: Mapping[str, bool]) -> None:
        self._store().set(_key(part), json.dumps(modes))

    def _take_over(self, part: Part) -> None:
        store, deadline_s = self._store(), time.monotonic() + PATIENCE_S
        while not store.check([_key(part)]):
            if self._is_cut() or time.monotonic() >= deadline_s:
                return
            with contextlib.suppress(dist.DistStoreError):
                store.wait([_key(part)], _SLICE)
        if changed := put_in_force(self._state, json.loads(store.get(_key(part)))):
            self._note(told(changed, part))


def _key(part: Part) -> str:
    return f"modes/{part.source}/{part.iteration}"


def told(changed: Sequence[str], part: Part) -> str:
    """*changed*: names of modes."""
    more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
    named = f"{', '.join(changed[:MAX_NAMED])}{more}"
    return (
        f"iteration {part.iteration} begins with other modes on rank {part.source}, and now with the same here: "
        f"{named}. Have the script set them by the number of the epoch (epoch >= 3, not epoch == 3): a replacement, or "
        "a restart from a checkpoint, may not pass by where they change"
    )
