"""The training thread's part in checkpoints: which one all begin with, when the next is due, what goes into it.

It must never write or wait for a file itself while iterations run; `checkpoints` has a thread for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swift_agent.checkpoints import CheckpointError, Checkpoints
from swift_agent.place import Place
from swift_agent.process_group import ProcessGroups
from swift_agent.tracking import Tracked
from swift_recovery.errors import StateError


class Checkpointing:
    """One per worker whose script has asked for checkpoints. *note* tells people."""

    def __init__(
        self, checkpoints: Checkpoints, place: Place, tracked: Tracked, groups: ProcessGroups,
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._checkpoints, self._place, self._tracked = checkpoints, place, tracked
        self._groups, self._note = groups, note

    def find(self) -> int:
        """The iteration of the newest one that this rank sees; 0: there is none."""
        return self._checkpoints.find()

    def begin(self, iteration: int) -> None:
        """All ranks together, before the script is in a loop: begin with that one, or the newest older one that all
        can load. Raises `CheckpointError` if there is none; the state is mixed then."""
        place, tracked, checkpoints, reasons = self._place, self._tracked, self._checkpoints, []
        while iteration:
            extra: dict[str, Any] = {}
            try:
                extra = checkpoints.load(iteration, tracked.state)
            except (OSError, StateError) as error:
                reasons.append(str(error))
                self._note(f"the checkpoint of iteration {iteration} cannot be loaded: {error}")
            if all(loaded for (loaded,) in self._groups.all_gather_ints([bool(extra)])):
                place.begin_with(extra["place"], iteration, repeats=False)
                # In other buckets the same gradients would have other sums.
                tracked.restore_layouts(extra["layouts"])
                if tracked.messages is not None:
                    tracked.messages.restore(extra["messages"], iteration)
                if place.rank == 0:
                    self._note(f"all ranks begin with the checkpoint of iteration {iteration}")
                return
            iteration = min(found for (found,) in self._groups.all_gather_ints([checkpoints.find(iteration)]))
        raise CheckpointError(
            f"no checkpoint in {checkpoints.directory} can be loaded on all ranks: "
            f"{'; '.join(reasons) or 'see what other ranks say'}. Nothing there was changed. To begin anew give "
            "job.checkpoint() another directory."
        )

    def at_point(self) -> None:
        """Take one if it is due, and let go what an earlier one has made needless. Raises dist.DistStoreError if the
        generation is at its end; then none is taken."""
        tracked, number = self._tracked, self._place.here.iteration
        checkpoints, messages = self._checkpoints, tracked.messages
        if messages is not None and checkpoints.newest > messages.checkpoint:
            messages.checkpointed(checkpoints.newest)
        if not checkpoints.is_due(number):
            return

        def extra() -> dict[str, Any]:
            logged = messages.begin_checkpoint(number) if messages is not None else None
            return {"place": self._place.offer(), "layouts": tracked.layouts_for(number), "messages": logged}

        checkpoints.take(number, tracked.state, extra, self._groups.store.clone())

    def recovered(self, iteration: int) -> None:
        """All go on with that iteration, in a new generation."""
        self._checkpoints.recovered(iteration)

    def is_over(self, timeout_s: float) -> bool:
        """Whether none is under way, after so long at most."""
        return self._checkpoints.wait(timeout_s)
