"""What an iteration had changed when it was cut after its update, besides what the update changes.

It is run once more for its result, with the state after it; what it changes on the way is put right at each step and at
the end. This module must never decide which iterations are run so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from swift_recovery.state.tensors import same_bits, unexpanded


class Change:
    """One buffer (by where its module has it) or parameter that an iteration had changed when it was cut: *before*,
    where the iteration began, and *values*, when it was cut."""

    def __init__(
        self, name: str, live: Callable[[], Tensor | None], put: Callable[[Tensor, bool], None],
        before: Tensor | None, values: Tensor, since_step: bool | None = None,
    ) -> None:  # fmt: skip
        """*since_step*: whether it had been changed since the last step; None: that is not known."""
        self.name, self._live, self._put = name, live, put
        self._before, self._values, self._since_step = before, values, since_step
        self.when: Literal["after", "before", "unknown", ""] = ""
        """It had been changed with regard to the update; "unknown": before it and perhaps after it. Empty: there was
        no update yet."""

    def at_step(self) -> None:
        """The iteration is run once more, with nobody else, and has made a step."""
        if self._since_step is not None:
            self.when = "after" if self._since_step else "before"
            self._put(self._values, False)
            return
        if not self.when:
            alike = self._is_alike
            self.when = "after" if alike(self._before) else "before" if alike(self._values) else "unknown"
        elif not self._is_alike(self._values):
            self.when = "unknown"  # between two steps, too
        if self.when != "before":
            self._put(self._values, False)

    def at_end(self) -> bool:
        """False if it is not known whether all has been changed."""
        if self.when == "before":
            return True  # what was to come after the update had not been made, and has been now
        is_known = self.when != "unknown" or self._is_alike(self._values)
        self._put(self._values, True)
        return is_known

    def _is_alike(self, values: Tensor | None) -> bool:
        live = self._live()
        if live is None or values is None:
            return live is values
        live = unexpanded(live.detach())
        values = unexpanded(values)
        return live.shape == values.shape and live.dtype == values.dtype and same_bits(live, values)


class Changed:
    """What an iteration had changed when it was cut after its update, for when it is run once more for its result.

    What it changes after the update it may or may not have changed by then. If it changes the same before that as well,
    the version of a parameter tells (`ByHand.note_step`). For the others their values have to: if they come out as
    they were at the update. They may not, where other ranks, or parameters that the update has changed, go into them.
    """

    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes
        self.unknown: list[str] = []
        """After `at_end`: what may lack a change that comes after the update."""

    @torch.no_grad()
    def at_step(self) -> None:
        """After each step. Versions stay, as a backward that is yet to come may need what is put back."""
        for change in self._changes:
            change.at_step()

    @torch.no_grad()
    def at_end(self) -> None:
        self.unknown = [change.name for change in self._changes if not change.at_end()]


def of_buffer(
    name: str, owner: dict[str, Tensor | None], key: str, live: Tensor, before: Tensor | None
) -> Change:
    """Of buffer *key* of the module that has *owner*."""

    def put(values: Tensor, counted: bool) -> None:
        now = owner.get(key)
        if now is None or now.shape != values.shape or now.dtype != values.dtype:
            owner[key] = values.clone()
        else:
            (now.detach() if counted else now.data).copy_(values)

    return Change(name, lambda: owner.get(key), put, before, live.detach().clone())


def of_parameter(name: str, live: Tensor, before: Tensor, values: Tensor, since: bool | None) -> Change:
    def put(new: Tensor, counted: bool) -> None:
        (live.detach() if counted else live.data).copy_(new)

    return Change(name, lambda: live, put, before, values, since)
