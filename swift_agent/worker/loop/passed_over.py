"""Gives a script the result of an iteration that it need not run, because its update exists; and runs one after all, or
once more, for what it has to leave.

It must never decide that an iteration is passed over: `iterations` does, by the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.loop.dry_runs import DryRuns
from swift_agent.worker.loop.recovery import Recovery
from swift_agent.worker.loop.ways_out import WaysOut
from swift_agent.worker.replicas.comparison import Comparison
from swift_agent.worker.tracked import others
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.tracked import Tracked
from swift_agent.worker.updates import touched
from swift_agent.worker.updates.left_behind import Touched
from swift_recovery.state import deviation, stateful
from swift_recovery.state.snapshots.snapshot import gradients_of, put_gradients

R = TypeVar("R")


class PassedOver:
    """One per worker. *complete*: counts the iteration that was run after all."""

    def __init__(
        self, place: Place, supervisor: Supervisor, tracked: Tracked, recovery: Recovery, dry_runs: DryRuns,
        out: WaysOut, comparison: Comparison | None, complete: Callable[[], None],
    ) -> None:  # fmt: skip
        self._place, self._supervisor, self._tracked = place, supervisor, tracked
        self._recovery, self._dry_runs, self._out = recovery, dry_runs, out
        self._comparison, self._complete = comparison, complete
        self.is_new = True
        """This process has run no iteration yet."""

    def run(self, call: Callable[[], R]) -> R:
        """Give the script the result of an iteration that it need not run: without communication, without effect.

        The state after the iteration is here already, or comes when the others are joined at the next point.
        """
        place, tracked = self._place, self._tracked
        updates = tracked.updates
        number, owes = place.here.iteration, not updates.updated
        tracked.pass_over()
        # Where an update has begun, the forward was complete; it may be here that the rest of it is brought to.
        buffers = tracked.copy_buffers() if owes and tracked.updates.done else None
        made = None if owes else place.start.changed()
        if not owes and (unfit := self.note_use_of_gradients()):
            self._out.give_up(unfit)
        # It had come to its end without a step, and the others agreed to that.
        left = None
        if not owes and not updates.num_steps and updates.has_changed_nothing and tracked.carry_gradients():
            left = gradients_of(tracked.state.parameters())
        elif not owes:
            tracked.state.carried = 0
        self._recovery.restore_start()
        with place.lock:
            place.inside = ""
            if not owes:
                place.here.iteration += 1
                tracked.updates.settle()
        self._dry_runs.enter()
        if place.remakes:
            self._dry_runs.remake(call, range(number - 1, number), has_to_fit=False)
        before = others.held(tracked.state.others) if owes else others.NOTHING
        result = self._dry_runs.iteration(call, number, made)
        if made is not None and made.unknown:
            self._supervisor.note(touched.told_twice(number, made.unknown))
        if buffers is not None:
            tracked.put_buffers(buffers)
        if left is not None:
            put_gradients(tracked.state.parameters(), left)
            self.carry_gradients(number + 1)
        if owes:
            since = Touched(tracked.state.parameters())
            dry_run = others.DryRun(before, others.held(tracked.state.others))
            place.owed = others.Owed(number, lambda: self._pay(call, since), dry_run)
        return result

    def _pay(self, call: Callable[[], Any], gradients: Touched | None = None) -> None:
        """The replica that had the update is lost too: the iteration is run after all, for its effect. *gradients*: of
        which the script has touched some since it was run for its result."""
        place, tracked = self._place, self._tracked
        parameters = tracked.state.parameters()
        stay_done = gradients.by(parameters) if gradients is not None else [False] * len(parameters)
        # What the script has done since then, to a scheduler for one, stays done.
        since = tracked.script_side()
        since.take(rng=place.seeds.keeps_generators)
        dry_run, objects = place.owed.dry_run if place.owed is not None else others.DryRun(), tracked.state.others
        now = others.held(objects)
        if behind := dry_run.are_behind(now):
            self._supervisor.note(others.told_behind(place.here.iteration, behind))
        self._recovery.restore_start()
        if place.remakes:
            self.remake(call, place.here.iteration)
        place.seeds.for_iteration(place.here.iteration)
        tracked.begin(place.here.iteration)
        self._recovery.modes.pay(self._recovery.plan)
        place.enter("iteration")
        try:
            call()
            tracked.updates.join_agreement()
            self._complete()
        except BaseException:
            tracked.updates.cut()
            tracked.rewind()
            with place.lock:
                place.inside = ""
                if tracked.updates.updated:
                    place.here.iteration += 1
                    place.owed = None
                    tracked.updates.settle()
            since.restore(buffers=False)
            raise
        if self._comparison is not None:
            self._comparison.take_ahead()
        paid = gradients_of(parameters) if tracked.state.carried else None
        since.replace_others({name: stateful.capture(objects[name]) for name in dry_run.of_iteration(now)})
        since.restore(buffers=False)
        if paid is not None:
            done = gradients_of(parameters)
            put_gradients(parameters, [a if stays else b for a, b, stays in zip(done, paid, stay_done, strict=True)])
        place.owed = None

    def remake(self, call: Callable[[], object], number: int) -> None:
        """Iteration *number* is to be run, and needs what the one before has left."""
        place, was_there = self._place, not self.is_new
        place.has_to_remake = False
        if place.lacks:
            self._tell_lacking(number)
            if not place.remakes:
                return
        self._dry_runs.remake(call, range(number - 1 - was_there, number), has_to_fit=was_there)

    def _tell_lacking(self, number: int) -> None:
        place = self._place
        place.lacks = False
        if place.rank == 0:
            but = (
                f"iteration {number - 1} is run once more for it, without effect, and no rank is left that could say "
                "whether it is the same" if place.remakes else "training goes on with another one than before"
            )  # fmt: skip
            self._supervisor.note(
                f"the checkpoint of iteration {number} does not have what the iteration before had left, a tensor or "
                f"the place in a loader of the script's own: {but}"
            )

    def carry_gradients(self, number: int) -> None:
        """After so many iterations, on all ranks alike: replicas must have the same ones, if the next iteration uses
        them."""
        self._place.carry_gradients()
        if self._comparison is not None and self._comparison.is_due_for_gradients(number):
            self._recovery.compare_at = number
            self._tracked.watch_gradients()

    def note_use_of_gradients(self) -> str:
        """Of those that the iteration that is over was begun with. Why nobody can go on, '' if all can."""
        tracked, place = self._tracked, self._place
        uses, differ, place.gradients_differ = tracked.uses_gradients(), place.gradients_differ, False
        if uses and differ:
            why = f"replicas went on with other gradients than others after the recovery. {deviation.OF_EACH_RANK}"
            return f"{why}. All workers have to start again, with {self._out.begin_with}"
        if uses and self._comparison is not None:
            self._comparison.gradients_are_used(place.here.iteration)
        return ""
