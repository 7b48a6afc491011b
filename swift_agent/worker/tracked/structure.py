"""Whether models are still made of what they were made of when their loop began.

    parameters: others than the set-up has made are told; no process that runs the set-up could take them over
    buffers: new and larger ones are a part of the state; snapshots look where they are

Looked at after the first, second, fourth, eighth ... iteration of a process, and before each checkpoint. This module
must never change a model.
"""

from __future__ import annotations

from collections.abc import Callable

from swift_recovery.state.snapshots.snapshot import Snapshot
from swift_recovery.state.training_state import TrainingState

MAX_NAMED = 3


class Structure:
    """Of *state*, whose loop begins. *note* tells people; None: nobody is to be told. *snapshots*: have to see buffers
    that modules get."""

    def __init__(self, state: TrainingState, note: Callable[[str], None] | None) -> None:
        self._state, self._note = state, note
        self.snapshots: tuple[Snapshot, ...] = ()
        self._num_ended, self._next = 0, 1

    def end(self) -> None:
        """An iteration is over."""
        self._num_ended += 1
        if self._num_ended == self._next:
            self._next *= 2
            self.look()

    def look(self) -> None:
        for snapshot in self.snapshots:
            snapshot.look()
        if self._note is not None and (names := self._state.changed_parameters()):
            self._note(told(names))
            self._note = None


def told(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return (
        "parameters have come, gone or changed their shape since the loop began "
        f"({', '.join(names[:MAX_NAMED])}{more}): neither a replacement nor a later run could take over this state or "
        "its checkpoints, as their set-up makes those of the beginning. Make parameters in the set-up (prune there, "
        "too; or multiply by a mask in a buffer)"
    )
