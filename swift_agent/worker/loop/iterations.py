"""Runs iterations until they count, and decides what becomes of one that a failure cuts.

    run --> begin --> function --> counted
              |          '-- cut in a message, all can stay ---------> recover there, go on
              |          '-- cut before the update, nobody has it ---> restore, recover, again
              |          '-- cut after the update ------------------> run for its result, then go on; recover later
              |          '-- cut before it, a replica has it --------> the same, but owing the update

It must never decide from where all go on: the plan says so, in the same words to all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from swift_agent.errors import PeerFailure
from swift_agent.torch_private import groups
from swift_agent.wire import messages as msg
from swift_agent.wire.standing import MyStanding
from swift_agent.worker import injection
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.in_place import Way
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.line.go import Go
from swift_agent.worker.line.in_script import imported_packages
from swift_agent.worker.loop.dry_runs import DryRuns
from swift_agent.worker.loop.measuring import Measuring
from swift_agent.worker.loop.passed_over import PassedOver
from swift_agent.worker.loop.peer_errors import NotLogged, cause_of, is_communication_error, only_logged, own
from swift_agent.worker.loop.recovery import Recovery
from swift_agent.worker.loop.ways_out import WaysOut
from swift_agent.worker.replicas.comparison import Comparison
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.tracked import Tracked
from swift_agent.worker.updates import left_behind
from swift_recovery.errors import CannotReplay, LostLog

R = TypeVar("R")
_UNLOCKED = contextlib.nullcontext()


class Iterations:
    """One per worker, from the first point of the loop on."""

    def __init__(
        self, place: Place, supervisor: Supervisor, groups: ProcessGroups, tracked: Tracked, recovery: Recovery,
        dry_runs: DryRuns, out: WaysOut, standing: MyStanding, comparison: Comparison | None,
        measuring: Measuring | None = None,
    ) -> None:  # fmt: skip
        self._place, self._supervisor, self._groups, self._tracked = place, supervisor, groups, tracked
        self._recovery, self._dry_runs, self._out = recovery, dry_runs, out
        self._standing, self._comparison = standing, comparison
        self.over = PassedOver(place, supervisor, tracked, recovery, dry_runs, out, comparison, self.complete)
        self._modules_sent, self._measuring = False, measuring
        self._injection = injection.of_this_worker(supervisor.environment, tracked.state)

    def run(self, call: Callable[[], R]) -> R:
        # All that this calls in every iteration runs with cold caches: the fewer calls and objects the better.
        place, supervisor, tracked = self._place, self._supervisor, self._tracked
        while True:
            if place.owed is not None:
                self._recovery.run()  # the script came here without a point in between
            number = place.here.iteration
            if number < place.dry_iterations:
                return self._dry_runs.iteration_of_replacement(call)
            if place.repeats:
                if place.replays:
                    return self._from_logs(call)
                place.repeats = False
            if place.local_result:
                self._out.give_up(
                    f"the other ranks had finished the section of {place.local_result}, so this rank has only its own "
                    f"values. Iteration {number} comes next and may use them. Make that collective inside the "
                    f"iteration. All workers have to start again, with {self._out.begin_with}"
                )
            if place.begun_by_others is not None and place.is_elsewhere("iteration"):
                self._out.tell_elsewhere("iteration", place.begun_by_others)
            try:
                place.begun = "iteration", number, place.here.sections
                place.keep_start()
                if place.has_to_remake:
                    self.over.remake(call, number)
                if self._recovery.modes.is_due:
                    self._recovery.modes.begin(number)
                    place.start.keep_modes()
                place.seeds.for_iteration(number)
                tracked.begin(number)
                self._standing.begins(number)
                if self._injection is not None:
                    self._injection.begins(number)
                supervisor.pace.begins(number)
                place.inside = "iteration"
                if supervisor.pausing:
                    supervisor.hold(number)
                if supervisor.interrupted:
                    supervisor.check()
                if self._measuring is not None:
                    self._measuring.begin()
                result = call()
                tracked.updates.join_agreement()
                self.complete()
                if self._measuring is not None:
                    self._measuring.finish()
                self.over.is_new = False
                self._standing.finishes()
            except CannotReplay as error:
                # The rest of the iteration that its predecessor was in.
                self._out.cannot_repeat(f"iteration {number} cannot be repeated from logs: {error}")
            except Exception as error:
                if refusal := tracked.refusal(cause_of(error)):
                    self._out.give_up(refusal)
                if not self._recovery.was_cut(error):
                    # Also if a peer fails before it has come out of the script: as when all raise the same.
                    own(error)
                    raise
                del error  # its traceback holds the activations of the cut iteration
                if not self._cut():
                    continue
                return self.over.run(call)
            if self._recovery.is_untold:
                self._recovery.tell_resumed()
            if not self._modules_sent:
                self._send_modules()
            if number >= self._recovery.compare_at - 1:
                self._recovery.compare(number + 1)
            return result

    def complete(self) -> None:
        """Count the iteration, unless it was stopped before its update: then its results are those of a cut
        collective. So they may be after it in NCCL, where a cut collective raises nothing.
        """
        place, supervisor, tracked = self._place, self._supervisor, self._tracked
        updates, unfit, is_hopeless = tracked.updates, "", False
        supervisor.enter()
        try:
            if supervisor.interrupted and (not updates.updated or groups.has_nccl()):
                raise PeerFailure("stopped before its results were known to be whole")
            if tracked.state.carried:
                unfit = self.over.note_use_of_gradients()
            if updates.num_steps or not updates.has_changed_nothing:
                tracked.state.carried = 0
            elif tracked.carry_gradients():
                self.over.carry_gradients(place.here.iteration + 1)
                if place.leaves and place.rank == 0 and self._comparison is not None:
                    unfit, is_hopeless = left_behind.why_not(place.leaves), True
            tracked.check_repeatable()
            # Who is stopped may be in the middle of its report.
            with place.lock if supervisor.interrupted else _UNLOCKED:
                updates.finish()
                tracked.end()
                # In this order: who looks between the two finds more iterations begun than there are, never fewer.
                place.here.iteration += 1
                place.inside = ""
        finally:
            supervisor.leave()
        if unfit:
            self._out.give_up(unfit, is_hopeless=is_hopeless)

    def _cut(self) -> bool:
        """The iteration was interrupted. False: it has to be run again, on recovered groups. True: its update exists
        already, here or on a replica, and the script goes on after it."""
        place, tracked = self._place, self._tracked
        updates = tracked.updates
        updates.cut()
        self._recovery.wait_quiet()
        if updates.updated:
            return True
        while (go := self._next_if_ahead()) is not None:
            if not updates.reduced or place.rank in go.plan.sources:
                return True
            with place.lock:
                if self._supervisor.is_ahead(go):
                    updates.finish_update()
                    return True
        self._recovery.restore_start()  # and with that the gradients are gone
        tracked.rewind()
        place.leave()
        # The point's state may be replaced by this; the iteration's own starts over.
        self._recovery.run()
        return False

    def after_cut_agreement(self, error: Exception) -> Way:
        """The agreement to make an update was cut. If all go on from after it, it is made where the script stands: its
        gradients are complete. If all stay before it, they agree once more."""
        if not self._recovery.was_cut(error):
            return ""
        self._recovery.wait_quiet()
        while True:
            if (go := self._next_if_ahead()) is not None:
                if not self._tracked.updates.reduced or self._place.rank in go.plan.sources:
                    return ""
                if self._supervisor.enter_update(go.generation):
                    return "update"
            elif self._tracked.unwinds or not self._recovery.may_stay():
                return ""
            elif self._recovery.run(staying=True):
                return "agree"

    def stays(self, error: Exception) -> bool:
        """A message was cut: join the others here, in the middle of the iteration, or after its update. False: it is to
        be started over, or passed over."""
        if not self.was_cut_inside(error):
            return False
        tracked = self._tracked
        # A collective, or a thread, may have come after the report; and that waits for an update that is under way.
        if tracked.unwinds or tracked.updates.is_open:
            return False
        if not tracked.updates.updated:
            return self._recovery.run(staying=True)
        assert tracked.messages is not None
        if tracked.messages.passes_over or not self._recovery.run(staying=True):
            return False
        tracked.messages.refuse_collectives()
        return True

    def was_cut_inside(self, error: Exception) -> bool:
        """Whether *error* comes from the failure of a peer, in an iteration that is not repeated from logs."""
        return self._place.inside == "iteration" and not self._place.replays and self._recovery.was_cut(error)

    def _next_if_ahead(self) -> Go | None:
        """The generation to come, if it goes on from after this iteration."""
        go = self._supervisor.peek_go()
        return go if go.plan.kind == "copy" and go.plan.iteration > self._place.here.iteration else None

    def _from_logs(self, call: Callable[[], R]) -> R:
        """Repeat an iteration of the predecessor, with the messages that the others had sent to that."""
        place, tracked = self._place, self._tracked
        messages, number = tracked.messages, place.here.iteration
        assert messages is not None
        place.keep_start()
        place.seeds.for_iteration(number)
        place.enter("iteration")
        try:
            with only_logged(self._groups, among=messages.repeating), tracked.updates.repeating():
                tracked.begin(number)
                result = call()
        except Exception as raised:
            error = cause_of(raised)
            if not isinstance(error, CannotReplay) and not is_communication_error(error):
                own(raised)
                raise
            if isinstance(error, LostLog):
                self._out.have_replaced(f"iteration {number} cannot be repeated: {error}")
            if not (place.replays_alone or isinstance(error, NotLogged)) and self._recovery.was_cut(error):
                self._out.have_replaced(f"iteration {number}, which it repeated together with others, was cut")
            self._out.cannot_repeat(f"iteration {number} cannot be repeated from logs: {error}")
        finally:
            tracked.end()
            place.leave()
        if not place.replays_alone and self._supervisor.interrupted:
            # What was aborted on NCCL raises nothing.
            self._out.have_replaced(f"iteration {number}, which it repeated together with others, was cut")
        with place.lock:
            place.here.iteration += 1
        if place.replays:
            self._recovery.tell_how_far()
        else:
            if tracked.carry_gradients(may_refuse=False):  # whether they are needed is not known
                place.carry_gradients()
            self._recovery.end_replay(logs_s=messages.waited_s)
        return result

    def _send_modules(self) -> None:
        """Once: what the script has imported, so that standbys import it ahead."""
        self._modules_sent = True
        if self._supervisor.environment.speaks_for_node:
            self._supervisor.send(msg.Modules(tuple(imported_packages())))
