"""The training thread's part in checkpoints: which one all begin with, when the next is due, what goes into it.

It must never write or wait for a file itself while iterations run; `writer` has a thread for that. The last one, where
all nodes were told to go, is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from swift_agent.errors import SwiftError, UsageError
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.tracked import Tracked
from swift_recovery.checkpoint import timelines
from swift_recovery.checkpoint.writer import CheckpointError, Checkpoints, NotNow
from swift_recovery.errors import StateError

_CONNECT_TIMEOUT = timedelta(seconds=10)
# Of waiting at the end; then after twice as long, and so on.
_FIRST_NOTE_S = 5.0


class UnusableCheckpoints(SwiftError, CheckpointError):
    """`CheckpointError`, where it ends the script: what it catches by `SwiftError` includes this."""


class Checkpointing:
    """One per worker whose script has asked for checkpoints."""

    def __init__(
        self, checkpoints: Checkpoints, place: Place, tracked: Tracked, groups: ProcessGroups, supervisor: Supervisor
    ) -> None:
        self._checkpoints, self._place, self._tracked = checkpoints, place, tracked
        self._groups, self._supervisor, self._note = groups, supervisor, supervisor.note
        supervisor.takes_checkpoints = True
        self._waited_s, self._next_note_s = 0.0, _FIRST_NOTE_S

    def find(self) -> tuple[int, int]:
        """The iteration of the newest one that this rank sees, 0: there is none; and after how many the next comes."""
        return self._newest(), self._checkpoints.every

    def _newest(self, before: int | None = None) -> int:
        try:
            return self._checkpoints.find(before)
        except CheckpointError as error:
            raise UnusableCheckpoints(str(error)) from error

    def begin(self, found: Sequence[tuple[int, int]]) -> None:
        """All ranks together, before the script is in a loop: begin with the newest one that all can load. *found*:
        what `find` says on all ranks, (0, 0) where none was asked for.

        Raises `UnusableCheckpoints` if there is none, or not the same for all; the state is mixed then. `UsageError` if
        the script has not asked for the same on all ranks."""
        place, tracked, checkpoints, reasons = self._place, self._tracked, self._checkpoints, []
        if len({every for _, every in found}) > 1:
            said = {rank: every for rank, (_, every) in enumerate(found)}
            raise UsageError(f"job.checkpoint(every=...) must be the same on all ranks; it is {said} (0: not called)")
        # The newest that any rank sees: what a node lists may be old, what it opens is not.
        iteration = max(number for number, _ in found)
        if not iteration:
            checkpoints.begins(0, self._groups.generation)
            return
        while iteration:
            extra: dict[str, Any] = {}
            taken_by = 0
            try:
                extra = checkpoints.load(iteration, tracked.state)
                taken_by = timelines.number_of(checkpoints.loaded_from)
            except (OSError, StateError) as error:
                reasons.append(str(error))
                self._note(f"the checkpoint of iteration {iteration} cannot be loaded: {error}")
            loaded = {by for (by,) in self._groups.all_gather_ints([taken_by])}
            if len(loaded) == 1 and 0 not in loaded:
                place.begin_with(extra["place"], iteration, repeats=False)
                if len(extra["layouts"]) == len(tracked.keepers):
                    # In other buckets the same gradients would have other sums.
                    tracked.restore_layouts(extra["layouts"])
                if tracked.messages is not None:
                    tracked.messages.restore(checkpoints.counts or extra["place"].get("messages"), iteration)
                    tracked.messages.beginnings.all_began_at = iteration
                if place.rank == 0:
                    self._note(f"all ranks begin with the checkpoint of iteration {iteration}")
                self._compare_seeds(extra, iteration)
                checkpoints.begins(iteration, self._groups.generation)
                return
            iteration = max(older for (older,) in self._groups.all_gather_ints([self._newest(iteration)]))
        raise UnusableCheckpoints(
            f"no checkpoint in {checkpoints.directory} can be loaded on all ranks: "
            f"{'; '.join(reasons) or 'see what other ranks say'}. Do all nodes share it? Nothing there was changed. To "
            "start over give job.checkpoint() another directory."
        )

    def _compare_seeds(self, extra: dict[str, Any], iteration: int) -> None:
        """Another seed is the user's right; who did not mean it should know."""
        place, tracked = self._place, self._tracked
        if place.rank == tracked.replicas[0] and extra.get("seed", place.seeds.number) != place.seeds.number:
            self._note(
                f"rank {place.rank}: the script's seed is not that with which the checkpoint of iteration {iteration} "
                "was taken: from here on generators draw other numbers than without the restart (see init(seed=...))"
            )

    def at_point(self) -> None:
        """Take one if it is due, and let go what an earlier one has made needless."""
        place, tracked, checkpoints = self._place, self._tracked, self._checkpoints
        number = place.here.iteration
        if tracked.messages is not None and checkpoints.newest > tracked.messages.checkpoint:
            tracked.messages.checkpointed(checkpoints.newest)
        last = self._supervisor.saves_at
        if last is not None and number >= last:
            self._take_last(number)
        elif number >= checkpoints.due:
            self._take(number)

    def _take_last(self, number: int) -> None:
        """All have to go: of all that was trained. It is waited for; if it does not count, which all hear alike, it is
        taken again after the next iteration."""
        if self._is_written() and self._checkpoints.newest < number:
            self._take(number)
        if not self._is_written() or self._checkpoints.newest < number:
            return
        self._supervisor.saves_at = None
        if self._place.rank == 0:
            self._note(f"all that was trained is in the checkpoint of iteration {number}")

    def _is_written(self) -> bool:
        """Whether none is under way any more; False if a failure comes first."""
        while not self._checkpoints.wait(0.05):
            if self._supervisor.interrupted:
                return False
        return True

    def _take(self, number: int) -> None:
        place, tracked, checkpoints = self._place, self._tracked, self._checkpoints
        store = self._groups.store
        # On all ranks, or they gather other things next: an evaluation may have left whole parameters behind.
        tracked.reset_shards()
        tracked.structure.look()
        generation = self._groups.generation
        counts = self._counts() if place.rank != tracked.replicas[0] else None
        checkpoints.take(
            number, tracked.state, self._extra, lambda: store.clone(_CONNECT_TIMEOUT), generation, counts=counts
        )

    def _extra(self) -> dict[str, Any]:
        """What belongs to a checkpoint besides the state. Raises `NotNow`."""
        tracked, number = self._tracked, self._place.here.iteration
        if not all(keeper.is_settled(number) for keeper in tracked.keepers):
            raise NotNow("DistributedDataParallel rebuilds its buckets in the next iteration")
        if tracked.messages is not None:
            tracked.messages.begin_checkpoint(number)
        seed = self._place.seeds.number
        return {"place": self._place.offer(), "layouts": tracked.layouts_for(number), "seed": seed}

    def _counts(self) -> Any:
        """What a rank whose state another one writes has to say of its messages."""
        messages = self._tracked.messages
        if messages is None:
            return None
        messages.begin_checkpoint(self._place.here.iteration)
        return messages.counts()

    def recovered(self, iteration: int) -> None:
        """All go on with that iteration, in a new generation."""
        self._checkpoints.recovered(iteration, self._groups.generation)

    def is_over(self, timeout_s: float) -> bool:
        """Whether none is under way, after so long at most. Rank 0 says now and then what is waited for."""
        if self._checkpoints.wait(timeout_s):
            return True
        if self._place.rank == 0:
            self._waited_s += timeout_s
            if self._waited_s >= self._next_note_s:
                self._next_note_s *= 2
                self._note("the end waits for the last checkpoint, which is still being written")
        return False
