"""The state that a replacement was given, kept in the memory of the host until its script is where it has to go on.

For a script that may change parameters, or the state of an optimizer, on its way there (between two loops, at the begin
of an epoch): it did so before the state was taken. Where a checkpoint gave it, nothing else would find that out, since
all ranks do the same.
This module must never keep anything once the script is there.
"""

from __future__ import annotations

from swift_recovery.state.tensors import copy_all
from swift_recovery.state.training_state import TrainingState
from swift_recovery.transfer.state_file import StateCopy


class GivenState:
    """A copy of *state* as it is now."""

    def __init__(self, state: TrainingState) -> None:
        self._state, self._copy = state, StateCopy(state, None)

    def put_back(self) -> None:
        """Whatever the script has done since then, it has never been."""
        given = self._copy.collect()
        incoming = self._state.prepare(given.manifest, staged=True)
        copy_all(incoming.tensors, given.tensors)
        incoming.commit()
