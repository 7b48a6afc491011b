"""What the parts of a worker ask the loop when a peer fails in the middle of an iteration.

It must never import one of these parts: they are given this when they are made.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Literal, NoReturn, Protocol

from swift_agent.errors import SwiftError

# What to do about an agreement to an update that was cut.
Way = Literal["update", "agree", ""]


class InPlace(Protocol):
    """How this process goes on where it stands. One per worker; all is asked in the script's own thread."""

    @property
    def is_dry_run(self) -> bool:
        """Whether what runs now is run for its result only: no other process runs it, and it has no effect."""

    @property
    def is_inside(self) -> bool:
        """Whether this process is in an iteration or a section."""

    @property
    def at(self) -> tuple[int, int]:
        """How many iterations and sections are over, of the script that runs here; in a dry run, where that is."""

    def give_up(self, why: str) -> NoReturn:
        """Nothing but a restart of all workers helps."""

    def dry_run(self) -> AbstractContextManager[None]:
        """Around a step that has to have no effect, and that no other rank makes."""

    def was_cut(self, error: Exception) -> bool:
        """Whether *error*, of a wait in an iteration, comes from the failure of a peer."""

    def stays(self, error: Exception) -> bool:
        """Whether this process, of which *error* has cut a message, has joined the others in the middle of its
        iteration (`Messages.rejoin` was called), so that it goes on there."""

    def after_cut_agreement(self, error: Exception) -> Way:
        """The agreement to make an update was cut by *error*. "update": all go on from after this update, so it is
        made; `Supervisor.enter` has been called: no report is made before the update is whole. "agree": this process
        has joined the others where it is, and all agree again. "": the iteration is cut."""


class Alone:
    """Of a worker without an agent: nothing is recovered."""

    @property
    def is_dry_run(self) -> bool:
        return False

    @property
    def is_inside(self) -> bool:
        return True

    @property
    def at(self) -> tuple[int, int]:
        return 0, 0

    def give_up(self, why: str) -> NoReturn:
        raise SwiftError(why)

    def dry_run(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def was_cut(self, error: Exception) -> bool:
        return False

    def stays(self, error: Exception) -> bool:
        return False

    def after_cut_agreement(self, error: Exception) -> Way:
        return ""
