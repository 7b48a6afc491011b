"""Runs what a script has marked, iterations and sections, under an agent. Without one: `unprotected`.

An iteration is run again if a peer fails before the update; if a replica has made the update, its function is run once
more as a *ghost*, without communication and without effect, so that the script gets its result, and the update is
received at the next point.

    iterate --> begin --> function --> counted
                  |          '-- cut in a message, all can stay ---------> recover there, go on
                  |          '-- cut before the update, nobody has it ---> restore, recover, again
                  |          '-- cut after the update ------------------> ghost, then go on; recover at the next point
                  |          '-- cut before it, a replica has it --------> ghost, then go on owing the update

It must never decide from where all go on: the plan says so, in the same words to all ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from swift_agent.errors import CannotConnect, PeerFailure, ReplicaMismatch, UsageError
from swift_agent.wire.environment import ENV_LOCAL_RANK
from swift_agent.wire.standing import MyStanding
from swift_agent.worker.groups.process_groups import ProcessGroups, RebuildFailed, WornOut
from swift_agent.worker.line import in_script
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.line.go import Go
from swift_agent.worker.loop.checkpointing import Checkpointing
from swift_agent.worker.loop.checks import Checks, elsewhere
from swift_agent.worker.loop.dry_runs import Ghosts
from swift_agent.worker.loop.lookout import Lookout
from swift_agent.worker.loop.peer_errors import cause_of, is_communication_error, is_own, own
from swift_agent.worker.messages.collective_counts import REFUSED
from swift_agent.worker.rejoin.rejoin import Rejoin
from swift_agent.worker.rejoin.witness import Witnesses
from swift_agent.worker.replicas.comparison import NEVER, Comparison
from swift_agent.worker.replicas.fingerprints import Fingerprints
from swift_agent.worker.tracked import tracked as tracking
from swift_agent.worker.tracked.loop_state import Owed, Place
from swift_agent.worker.tracked.tracked import Tracked
from swift_agent.worker.updates import left_behind, touched
from swift_agent.worker.updates.left_behind import Touched
from swift_agent.worker.updates.overlapped import OverlappedUpdates
from swift_agent.worker.updates.tracker import Way
from swift_recovery.checkpoint.writer import CheckpointError
from swift_recovery.errors import CannotReplay, CutReplay, LostLog
from swift_recovery.planning.reports import ranges_of
from swift_recovery.state import deviation
from swift_recovery.state.deviation import summarised
from swift_recovery.state.snapshot import gradients_of, put_gradients

R = TypeVar("R")
_UNLOCKED = contextlib.nullcontext()

# At least, between two words of a newcomer that repeats iterations.
TELL_S = 10.0
# Operations of stopped groups end within milliseconds, if at all.
QUIET_TIMEOUT = timedelta(seconds=20)

# At its end a rank waits so long for the last comparison of replicas.
COMPARED_S = 10.0
# And so long, if replicas differ, to be ended.
ENDED_S = 60.0
# Of what a rank tells at its end: it goes into etcd, for each rank.
MAX_PARTS = 32

_NOT_LOGGED = "no log has what this collective gave"


class Protected:
    """Under an agent. *created_s*: when the script's set-up began, on the monotonic clock; *started_s*: seconds from
    the agent's order to that."""

    def __init__(
        self, place: Place, supervisor: Supervisor, groups: ProcessGroups, device: torch.device,
        started_s: float | None, standing: MyStanding | None = None,
    ) -> None:  # fmt: skip
        self.standing = standing or MyStanding()
        self._place, self.supervisor, self._groups, self._device = place, supervisor, groups, device
        self._tracked: Tracked | None = None
        self._checkpointing: Checkpointing | None = None
        self.ghosts = Ghosts(place, groups)
        self._modules_sent = False
        self._created_s = time.monotonic()
        self._phases_s: dict[str, float] = {} if started_s is None else {"start": started_s}
        self._recovered_in = 0
        self._recovered_s = 0.0
        self._told_s = 0.0
        self._repeats_from = 0
        self._witnesses: Witnesses | None = None
        self._comparison: Comparison | None = None
        self._compare_at = NEVER  # so many finished iterations
        self._lookout: Lookout | None = None
        self._has_recovered = False
        self._is_new = True  # it has run no iteration yet
        self._told_local: set[str] = set()
        self.checks = Checks(place, supervisor, groups, self._restart_all)

    def begin(self, tracked: Tracked, witnesses: Witnesses | None = None) -> None:
        """See `unprotected.Running`."""
        look = self.checks.meetings.look
        self._lookout = Lookout(self._place, self.supervisor, self._groups, self._tell_standstill, look)
        self._lookout.at_begin = True
        self._lookout.start()
        self._begin(tracked, witnesses)
        self._lookout.at_begin = False

    def _begin(self, tracked: Tracked, witnesses: Witnesses | None) -> None:
        place, self._witnesses = self._place, witnesses
        self._tracked = self.ghosts.tracked = tracked
        tracked.updates.goes_on = self._goes_on
        if tracked.messages is not None:
            tracked.messages.stays, tracked.messages.was_cut = self._stays, self._was_cut_inside
            tracked.messages.is_alone = lambda: self.ghosts.is_on
        if tracked.pipelines is not None:
            tracked.pipelines.alone = self.ghosts.without_effect
            tracked.pipelines.is_ghost = lambda: self.ghosts.is_on
        if tracked.has_shards_alone and place.rank == 0:
            self.supervisor.note(
                "the model is sharded, and no rank holds a replica of another one's shards: if one is lost all workers "
                f"start again, with {self._begin_with}. On a mesh of two dimensions (replicate, shard) they go on."
            )
        if tracked.checkpoints is not None:
            self._checkpointing = Checkpointing(tracked.checkpoints, place, tracked, self._groups, self.supervisor.note)
        self._rejoin = Rejoin(place, self.supervisor, self._groups, tracked, self._device, self._wait_quiet, witnesses)
        if len(tracked.replicas) > 1:
            self._comparison = Comparison(place, self.supervisor, self._groups, tracked, self._tell_deviation)
            if tracked.checkpoints is not None:
                tracked.checkpoints.why_not = self._comparison.why_not_kept
        if place.status == "empty":
            self._origin()
            self._phases_s["set-up"] = time.monotonic() - self._created_s
            self._recover()
            return
        self._phases_s = {}  # of no recovery
        newest, every = self._checkpointing.find() if self._checkpointing is not None else (0, 0)
        with place.lock:
            # With a checkpoint that another rank may see, this state is not what the job goes on with.
            place.status = "empty" if self._checkpointing is not None else "holding"
        try:
            # Nobody's first iteration begins before everybody's set-up has ended: a peer that is lost in an iteration
            # then never cuts a collective of somebody's set-up, which could not be repeated.
            overlaps = isinstance(tracked.updates, OverlappedUpdates)
            generation = self.supervisor.generation
            everyone = self._groups.all_gather_ints(
                [*self._origin(), newest, every, overlaps, place.seeds.number, generation, *tracked.digests_of_others()]
            )
            place.seeds.common, place.began = everyone[0][5:7]
            if len({told[4] for told in everyone}) > 1:
                # They agree on an update before it, or after it.
                raise UsageError("job.track(): overlap_update=True on some ranks only; say the same on all.")
            self._check_others([everyone[rank][7:] for rank in tracked.replicas])
            if tracked.messages is not None:
                tracked.messages.origins = [told[:2] for told in everyone]
            if witnesses is not None:
                witnesses.enter(self._groups.store, asks=False)
            if self._checkpointing is not None:
                self._checkpointing.begin([(told[2], told[3]) for told in everyone])
            with place.lock:
                place.status = "holding"
            self._compare_from(place.here.iteration, undisturbed=True)
            if witnesses is not None:
                witnesses.begin()
        except Exception as error:
            if not self._was_cut(error):
                raise
            if place.status == "empty":
                self._recover()  # before the script is in a loop

    def _check_others(self, of_replicas: list[list[int]]) -> None:
        """A replacement gets the state of another rank, of a loader of the script's own too: its place in the data."""
        loaders, others = (set(digests) for digests in zip(*of_replicas, strict=True))
        if len(loaders) > 1:
            raise UsageError(
                "job.track(loader=...): its state_dict() differs from rank to rank, and a replacement gets that of "
                "another rank: leave out of it what is the rank's own, or do not track it and give it to job.batches()."
            )
        if len(others) > 1 and self._place.rank == 0:
            self.supervisor.note(
                "objects given to job.track() have another state on other ranks, and a replacement gets that of a "
                f"replica: {', '.join(self._require_tracked().plain_others())}"
            )

    def _origin(self) -> list[int]:
        """What repeated iterations have to begin with: a checksum of the state, and the seed."""
        tracked = self._tracked
        if tracked is None or tracked.messages is None:
            return [0, 0]
        tracked.messages.origin = [tracked.checksum(), self._place.seeds.number]
        return tracked.messages.origin

    def at_point(self) -> None:
        place = self._place
        if place.local_result:
            self._tell_local_result()
        if place.owed is None:
            place.keep_point()
        if self.supervisor.interrupted and not place.replays:
            self._recover()
            # What was received belongs to this point, too. Nothing is owed any more.
            place.keep_point()
        if self._checkpointing is not None:
            self._checkpointing.at_point()

    def close(self) -> None:
        supervisor, place = self.supervisor, self._place
        if self._tracked is not None:
            place.target = None
            place.keep_start()
        elif dist.is_initialized():  # there was no loop; other ranks may wait for it
            self._lookout = Lookout(place, supervisor, self._groups, self._tell_standstill)
            self._lookout.start()
        while True:
            if supervisor.interrupted:
                if self._tracked is None:
                    supervisor.wait_for_end()  # nothing can be recovered: the agent starts all workers again
                self._recover()
            if self._recovered_in:
                self._tell_resumed()
            if supervisor.pausing:
                supervisor.hold(place.here.iteration)
                if supervisor.interrupted:
                    continue
            if not self._last_checkpoint_is_over() or not self._last_comparison_is_over():
                continue
            supervisor.send({"op": "finished", "generation": supervisor.generation, "end": self._end()})
            if self._lookout is not None:
                self._lookout.at_end = True
            if supervisor.wait_release(place.here.iteration):
                break
        if self._lookout is not None:
            self._lookout.stop()
        if self._tracked is not None and self._tracked.messages is not None:
            self._tracked.messages.close()
        supervisor.close()

    def _last_checkpoint_is_over(self) -> bool:
        """False if a failure comes first."""
        while self._checkpointing is not None and not self._checkpointing.is_over(timeout_s=0.05):
            if self.supervisor.interrupted:
                return False
        return True

    def _last_comparison_is_over(self) -> bool:
        """False if a failure comes first. All have come here, or are about to."""
        comparison, deadline_s = self._comparison, time.monotonic() + COMPARED_S
        while comparison is not None and not comparison.is_over(timeout_s=0.05) and time.monotonic() < deadline_s:
            if self.supervisor.interrupted:
                return False
        deadline_s = time.monotonic() + ENDED_S
        while comparison is not None and comparison.has_failed and time.monotonic() < deadline_s:
            if self.supervisor.interrupted:
                return False
            time.sleep(0.05)  # the agent ends this process; if nobody has told it, what all tell at the end differs
        return True

    # ---- iterations ----

    def iterate(self, call: Callable[[], R]) -> R:
        # All that this calls in every iteration runs with cold caches: the fewer calls and objects the better.
        place, supervisor, tracked = self._place, self.supervisor, self._tracked
        assert tracked is not None
        while True:
            if place.owed is not None:
                self._recover()  # the script came here without a point in between
            number = place.here.iteration
            if number < place.ghost_iterations:
                return self.ghosts.iteration_of_newcomer(call)
            if place.repeats:
                if place.replays:
                    return self._iteration_from_logs(call)
                place.repeats = False
            if place.local_result:
                self._give_up(
                    f"{place.local_result} is in a section that the others had finished, so this rank has its own "
                    f"values only, and iteration {number} follows right after it and may use them: have the iteration "
                    f"make that collective. All workers have to start again, with {self._begin_with}"
                )
            if place.begun_by_others is not None and place.is_elsewhere("iteration"):
                self._tell_elsewhere("iteration")
            try:
                place.begun = "iteration", number, place.here.sections
                place.keep_start()
                if place.has_to_remake:
                    self._remake(call, number)
                place.seeds.for_iteration(number)
                tracked.begin(number)
                self.standing.begins(number)
                place.inside = "iteration"
                if supervisor.pausing:
                    supervisor.hold(number)
                if supervisor.interrupted:
                    supervisor.check()
                result = call()
                tracked.updates.join_agreement()
                self._complete_iteration()
                self._is_new = False
                self.standing.finishes()
            except CannotReplay as error:
                # The rest of the iteration that its predecessor was in.
                self._give_up(f"iteration {number} cannot be repeated from logs: {error}")
            except Exception as error:
                if REFUSED in str(error):
                    self._give_up(str(error).partition("\n")[0])
                if not self._was_cut(error):
                    # Also if a peer fails before it has come out of the script: as when all raise the same.
                    own(error)
                    raise
                del error  # its traceback holds the activations of the cut iteration
                if not self._cut_iteration():
                    continue
                return self._pass_over(call)
            if self._recovered_in:
                self._tell_resumed()
            if not self._modules_sent:
                self._send_modules()
            if number >= self._compare_at - 1:
                self._compare(number + 1)
            return result

    def _complete_iteration(self) -> None:
        """Count the iteration, unless it was stopped before its update: then its results are those of a cut
        collective.
        """
        place, supervisor, tracked = self._place, self.supervisor, self._tracked
        assert tracked is not None
        updates, unfit, is_hopeless = tracked.updates, "", False
        supervisor.enter()
        try:
            if not updates.updated and supervisor.interrupted:
                raise PeerFailure("stopped before the update")
            if tracked.state.carried:
                unfit = self._note_use_of_gradients()
            if updates.num_steps or not updates.has_changed_nothing:
                tracked.state.carried = 0
            elif tracked.carry_gradients():
                self._carry_gradients(place.here.iteration + 1)
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
            self._give_up(unfit, is_hopeless=is_hopeless)

    def _cut_iteration(self) -> bool:
        """The iteration was interrupted. False: it has to be run again, on recovered groups. True: its update exists
        already, here or on a replica, and the script goes on after it."""
        place, tracked = self._place, self._require_tracked()
        updates = tracked.updates
        updates.cut()
        self._wait_quiet()
        if updates.updated:
            return True
        while (go := self._next_if_ahead()) is not None:
            if not updates.reduced or place.rank in go.plan.sources:
                return True
            with place.lock:
                if self.supervisor.is_ahead(go):
                    updates.finish_update()
                    return True
        self._restore_start()  # and with that the gradients are gone
        tracked.rewind()
        place.leave()
        # The point's state may be replaced by this; the iteration's own begins anew.
        self._recover()
        return False

    def _goes_on(self, error: Exception) -> Way:
        """The agreement to make an update was cut. If all go on from after it, it is made where the script stands: its
        gradients are complete. If all stay before it, they agree once more."""
        if not self._was_cut(error):
            return ""
        self._wait_quiet()
        while True:
            if (go := self._next_if_ahead()) is not None:
                if not self._require_tracked().updates.reduced or self._place.rank in go.plan.sources:
                    return ""
                if self.supervisor.enter_update(go):
                    return "update"
            elif self._require_tracked().unwinds or not self._rejoin.accepts(self.supervisor.peek_go()):
                return ""
            elif self._recover(staying=True):
                return "agree"

    def _stays(self, error: Exception) -> bool:
        """A message was cut: join the others here, in the middle of the iteration, or after its update. False: it is to
        be begun anew, or passed over."""
        if not self._was_cut_inside(error):
            return False
        tracked = self._require_tracked()
        # A collective, or a thread, may have come after the report; and that waits for an update that is under way.
        if tracked.unwinds or tracked.updates.is_open:
            return False
        if not tracked.updates.updated:
            return self._recover(staying=True)
        assert tracked.messages is not None
        if tracked.messages.passes_over or not self._recover(staying=True):
            return False
        tracked.messages.refuse_collectives()
        return True

    def _was_cut_inside(self, error: Exception) -> bool:
        """Whether *error* comes from the failure of a peer, in an iteration that is not repeated from logs."""
        return self._place.inside == "iteration" and not self._place.replays and self._was_cut(error)

    def _next_if_ahead(self) -> Go | None:
        """The generation to come, if it goes on from after this iteration."""
        go = self.supervisor.peek_go()
        return go if go.plan.kind == "copy" and go.plan.iteration > self._place.here.iteration else None

    def _remake(self, call: Callable[[], object], number: int) -> None:
        """Iteration *number* is to be run, and needs what the one before has left."""
        place, was_there = self._place, not self._is_new
        place.has_to_remake = False
        if place.lacks:
            self._tell_lacking(number)
            if not place.remakes:
                return
        self.ghosts.remake(call, range(number - 1 - was_there, number), has_to_fit=was_there)

    def _tell_lacking(self, number: int) -> None:
        place = self._place
        place.lacks = False
        if place.rank == 0:
            but = (
                f"iteration {number - 1} is run once more for it, without effect, and no rank is left that could say "
                "whether it is the same" if place.remakes else "training goes on with another one than before"
            )  # fmt: skip
            self.supervisor.note(
                f"the checkpoint of iteration {number} does not have a tensor that the iteration before had left: {but}"
            )

    def _pass_over(self, call: Callable[[], R]) -> R:
        """Give the script the result of an iteration that it need not run: without communication, without effect.

        The state after the iteration is here already, or comes when the others are joined at the next point.
        """
        place, tracked = self._place, self._require_tracked()
        updates = tracked.updates
        number, owes = place.here.iteration, not updates.updated
        tracked.pass_over()
        # Where an update has begun, the forward was complete; it may be here that the rest of it is brought to.
        buffers = tracked.copy_buffers() if owes and tracked.updates.done else None
        made = None if owes else place.start.changed()
        if not owes and (unfit := self._note_use_of_gradients()):
            self._give_up(unfit)
        # It had come to its end without a step, and the others agreed to that.
        left = None
        if not owes and not updates.num_steps and updates.has_changed_nothing and tracked.carry_gradients():
            left = gradients_of(tracked.state.parameters())
        elif not owes:
            tracked.state.carried = 0
        self._restore_start()
        with place.lock:
            place.inside = ""
            if not owes:
                place.here.iteration += 1
                tracked.updates.settle()
        self.ghosts.enter()
        if place.remakes:
            self.ghosts.remake(call, range(number - 1, number), has_to_fit=False)
        result = self.ghosts.iteration(call, number, made)
        if made is not None and made.unknown:
            self.supervisor.note(touched.told_twice(number, made.unknown))
        if buffers is not None:
            tracked.put_buffers(buffers)
        if left is not None:
            put_gradients(tracked.state.parameters(), left)
            self._carry_gradients(number + 1)
        if owes:
            since = Touched(tracked.state.parameters())
            place.owed = Owed(number, lambda: self._pay(call, since))
        return result

    def _carry_gradients(self, number: int) -> None:
        """After so many iterations, on all ranks alike: replicas must have the same ones, if the next iteration uses
        them."""
        self._place.carry_gradients()
        if self._comparison is not None and self._comparison.is_due_for_gradients(number):
            self._compare_at = number
            self._require_tracked().watch_gradients()

    def _note_use_of_gradients(self) -> str:
        """Of those that the iteration that is over was begun with. Why nobody can go on, '' if all can."""
        tracked, place = self._require_tracked(), self._place
        uses, differ, place.gradients_differ = tracked.uses_gradients(), place.gradients_differ, False
        if uses and differ:
            why = f"replicas went on with other gradients than others after the recovery. {deviation.OF_EACH_RANK}"
            return f"{why}. All workers have to start again, with {self._begin_with}"
        if uses and self._comparison is not None:
            self._comparison.gradients_are_used(place.here.iteration)
        return ""

    def _iteration_from_logs(self, call: Callable[[], R]) -> R:
        """This newcomer repeats an iteration of its predecessor, with the messages that the others had sent to that."""
        place, tracked = self._place, self._require_tracked()
        messages, number = tracked.messages, place.here.iteration
        assert messages is not None
        place.keep_start()
        place.seeds.for_iteration(number)
        place.enter("iteration")
        try:
            with self._groups.refused(_NOT_LOGGED, among=messages.repeating), tracked.updates.repeating():
                tracked.begin(number)
                result = call()
        except Exception as raised:
            error = cause_of(raised)
            if not isinstance(error, CannotReplay) and not is_communication_error(error):
                own(raised)
                raise
            if isinstance(error, LostLog):
                self._have_this_replaced(f"iteration {number} cannot be repeated: {error}")
            if not place.replays_alone and _NOT_LOGGED not in str(error) and self._was_cut(error):
                self._have_this_replaced(f"iteration {number}, which it repeated together with others, was cut")
            self._give_up(f"iteration {number} cannot be repeated from logs: {error}")
        finally:
            tracked.end()
            place.leave()
        if not place.replays_alone and self.supervisor.interrupted:
            # What was aborted on NCCL raises nothing.
            self._have_this_replaced(f"iteration {number}, which it repeated together with others, was cut")
        with place.lock:
            place.here.iteration += 1
        if place.replays:
            self._tell_how_far()
        else:
            if tracked.carry_gradients(may_refuse=False):  # whether they are needed is not known
                place.carry_gradients()
            try:
                self._rejoin.end_replay()
            except LostLog as error:
                self._have_this_replaced(str(error))
            except CannotReplay as error:
                self._give_up(str(error))
            now_s = time.monotonic()
            self._phases_s |= {"logs": messages.waited_s, "replay": now_s - self._recovered_s - messages.waited_s}
            self._recovered_s = now_s
        return result

    def _restore_start(self, what: str = "iteration") -> None:
        place = self._place
        if place.start.is_spoilt():
            number = place.here.iteration if what == "iteration" else place.here.sections
            self._have_this_replaced(
                f"{what} {number}, which was cut, has changed parameters of no tracked optimizer for the first time in "
                "this process, or by way of .data, which nobody counts, and what they were is not kept"
            )
        place.start.restore()

    def _have_this_replaced(self, why: str, *, by_itself: bool = False) -> NoReturn:
        """Only another process helps. Unless *by_itself* because of the failure of another one."""
        if not by_itself:
            self.standing.excuse()
        self.supervisor.note(f"{why}: this worker has itself replaced")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("this process has ended")

    def _give_up(self, why: str, *, is_hopeless: bool = False) -> NoReturn:
        """Nothing but a restart of all workers helps; nor does that, if it *is_hopeless*."""
        self.supervisor.send({"op": "unfit", "why": why, "hopeless": is_hopeless})
        self.supervisor.wait_for_end()
        raise AssertionError("the agent ends this process")

    def _restart_all(self, why: str) -> NoReturn:
        self._give_up(f"{why}. All workers have to start again, with {self._begin_with}")

    def _pay(self, call: Callable[[], Any], gradients: Touched | None = None) -> None:
        """The replica that had the update is lost too: the iteration is run after all, for its effect. *gradients*: of
        which the script has touched some since it was run for its result."""
        place, tracked = self._place, self._require_tracked()
        parameters = tracked.state.parameters()
        stay_done = gradients.by(parameters) if gradients is not None else [False] * len(parameters)
        # What the script has done since then, to a scheduler for one, stays done.
        since = tracked.script_side()
        since.take(rng=place.seeds.keeps_generators)
        self._restore_start()
        if place.remakes:
            self._remake(call, place.here.iteration)
        place.seeds.for_iteration(place.here.iteration)
        tracked.begin(place.here.iteration)
        place.enter("iteration")
        try:
            call()
            tracked.updates.join_agreement()
            self._complete_iteration()
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
        since.restore(buffers=False)
        if paid is not None:
            done = gradients_of(parameters)
            put_gradients(parameters, [a if stays else b for a, b, stays in zip(done, paid, stay_done, strict=True)])
        place.owed = None

    # ---- sections ----

    def barrier(self, call: Callable[[], None], way: str) -> None:
        """A section that draws nothing, and has no result. *way*: to where the script makes it."""
        place = self._place
        if place.is_before_epoch:
            return
        if place.here.sections < place.ghost_sections:  # the others have passed it
            with place.lock:
                place.here.sections += 1
            return
        self.section(call, seeded=False, what=f"barrier {way}")

    def section(self, call: Callable[[], R], *, seeded: bool = True, what: str = "section") -> R:
        place, supervisor = self._place, self.supervisor
        while True:
            if seeded:
                place.seeds.for_section(place.here.sections)
            try:
                if place.here.sections >= place.ghost_sections and not place.is_before_epoch:
                    if place.is_elsewhere(what):
                        self._tell_elsewhere(what)
                    place.begun = what, place.here.iteration, place.here.sections
                    place.keep_start()
                if supervisor.interrupted and not place.replays:
                    self._recover()
                if place.is_before_epoch:
                    return self.ghosts.section(call)
                if place.here.sections < place.ghost_sections:
                    between = place.repeats and place.here.sections >= place.restored_sections
                    return self._section_between_logs(call) if between else self.ghosts.section(call)
                place.keep_start()  # what was received belongs to it, too
                if seeded:
                    place.seeds.for_section(place.here.sections)
                self.checks.begin_section(place.here.sections, self._tracked if seeded else None)
                place.enter("section")
                result = call()
                self.checks.sections.end()
                with place.lock:
                    supervisor.check()  # what a cut collective gave must not be handed out
                    place.inside = ""
                    place.here.sections += 1
                if self._tracked is not None:
                    self._tracked.end()
                self.checks.end_section()
            except Exception as error:
                if not self._was_cut(error):
                    own(error)
                    raise
                del error
                if place.inside:
                    self._wait_quiet()
                    self.checks.cut_section()
                    self._restore_start("section")
                if self._tracked is not None and self._tracked.pipelines is not None:
                    self._tracked.pipelines.rewind()
                place.leave()
                continue
            if self._recovered_in:
                self._tell_resumed()
            return result

    def _tell_elsewhere(self, what: str) -> NoReturn:
        self._restart_all(elsewhere(what, self._place.begun_by_others, in_script.place_of(sys._getframe())))

    def _section_between_logs(self, call: Callable[[], R]) -> R:
        """A newcomer that repeats iterations really uses what a section gives it: that must not be invented."""
        messages = self._require_tracked().messages
        assert messages is not None
        try:
            with self._place.without_points(), self._groups.refused(_NOT_LOGGED), messages.none_between():
                result = call()
        except Exception as error:
            if not isinstance(error, CannotReplay) and not is_communication_error(error):
                raise
            self._give_up(f"a section cannot be repeated: {error}")
        with self._place.lock:
            self._place.here.sections += 1
        return result

    def _tell_local_result(self) -> None:
        """Of a section whose result no iteration has used so far: mostly a validation, and printed."""
        what, self._place.local_result = self._place.local_result, ""
        if what not in self._told_local:
            self._told_local.add(what)
            self.supervisor.note(
                f"{what} is in a section that the others had finished: this rank has its own values only, and what the "
                "script keeps of them is not what others keep. If training depends on it, track it"
            )

    # ---- failures ----

    def _was_cut(self, error: Exception) -> bool:
        """Whether *error* comes from the failure of a peer. Everything else is the script's own."""
        if isinstance(error, (UsageError, CheckpointError)):
            return False
        if self.supervisor.interrupted:
            return True
        if self._tracked is not None and self._tracked.updates.failed is not None:
            return False
        if not is_communication_error(error) or is_own(error):
            return False
        # A group that the script makes is connected, too.
        hears = self.supervisor.reconnect if isinstance(error, RebuildFailed) else self.supervisor.confirm
        if hears(error):
            return True
        own(error)  # nobody shall wait for that once more
        return False

    def _recover(self, *, staying: bool = False) -> bool:
        """Join the others in the newest generation; returns True with live groups and the plan's state. May take
        several tries. *staying*: in the middle of an iteration; False if that has to be begun anew.
        """
        self._wait_quiet()
        self.ghosts.leave()
        messages = self._require_tracked().messages
        aside = messages.aside() if messages is not None else contextlib.nullcontext()
        try:
            with aside, self._looking_away():
                if not self._rejoin.run(staying=staying):
                    return False
        except (CutReplay, LostLog) as error:
            self._have_this_replaced(str(error))
        except CannotConnect as error:
            # Whom no process can connect is not replaced for ever: it counts as a failure of its own.
            self._have_this_replaced(str(error), by_itself=not isinstance(error.__cause__, WornOut))
        except CannotReplay as error:
            self._give_up(str(error))
        except ReplicaMismatch as error:
            self._restart_all(f"{error}")
        if self._checkpointing is not None:
            self._checkpointing.recovered(self._rejoin.iteration)
        if self._witnesses is not None:
            self._witnesses.begin()
        place = self._place
        self._has_recovered = place.has_recovered = True
        self.checks.recovered()
        place.has_to_remake = place.remakes or place.lacks
        self._compare_from(self._rejoin.iteration, undisturbed=False)
        if self._comparison is not None and self._comparison.is_ahead:
            self._compare(self._place.here.iteration)
        self._phases_s |= self._rejoin.phases_s
        self._recovered_in = self.supervisor.generation
        self._recovered_s = self._told_s = time.monotonic()
        self._repeats_from = self._place.here.iteration
        return True

    @contextlib.contextmanager
    def _looking_away(self) -> Iterator[None]:
        """Inside, nobody takes a wait for one of the script's."""
        lookout = self._lookout
        if lookout is not None:
            lookout.is_aside = True
        try:
            yield
        finally:
            if lookout is not None:
                lookout.is_aside = False

    def _wait_quiet(self) -> None:
        """Until nothing of the stopped groups touches a tensor; a process in which that does not come is replaced."""
        self.supervisor.wait_aborted()
        if not self._groups.wait_quiet(QUIET_TIMEOUT):
            self._have_this_replaced("operations of the stopped process groups do not end", by_itself=True)
        if self._tracked is not None:
            self._tracked.reset_shards()

    # ---- replicas ----

    def _compare_from(self, iteration: int, *, undisturbed: bool) -> None:
        if self._comparison is not None:
            self._comparison.begin(iteration, undisturbed=undisturbed)
            self._compare_at = self._comparison.due

    def _compare(self, number: int) -> None:
        """So many iterations are done, on all ranks alike."""
        assert self._comparison is not None
        self._comparison.take(number)
        self._compare_at = self._comparison.due

    def _tell_deviation(self, why: str, is_hopeless: bool) -> None:
        """In a thread: replicas differ, and nothing in place helps. *is_hopeless*: nor does another start."""
        if not is_hopeless:
            why = f"{why}. All workers have to start again, with {self._begin_with}"
        self.supervisor.send({"op": "unfit", "why": why, "hopeless": is_hopeless})

    def _tell_standstill(self, why: str) -> None:
        """In a thread: ranks wait for each other for ever."""
        why = (
            f"{why}. All ranks must come to the same iterations and sections, and to as many of them: take all batches "
            "of an update in its iteration, let no condition that differs from rank to rank decide, and where a script "
            "begins with a snapshot of its own have job.epochs() or job.iterations() give the numbers of the loop"
        )
        if self._has_recovered:
            why = f"{why}. All workers have to start again, with {self._begin_with}"
        self.supervisor.send({"op": "unfit", "why": why, "hopeless": not self._has_recovered})

    @property
    def _begin_with(self) -> str:
        """What all workers would begin with that are started again."""
        tracked = self._tracked
        return "the newest checkpoint" if tracked is not None and tracked.checkpoints else "what the script loads"

    # ---- messages ----

    def _tell_how_far(self) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_S:
            self._told_s = now_s
            place, begin = self._place, self._repeats_from
            num_done, num = place.here.iteration - begin, place.replays_before - begin
            self.supervisor.note(f"has repeated {num_done} of {num} iterations in {now_s - self._recovered_s:.0f} s")

    def _tell_resumed(self) -> None:
        """The first iteration (or section) after a recovery is done: that is when the job runs again."""
        phases = {**self._phases_s, "iteration": time.monotonic() - self._recovered_s}
        self.supervisor.send(
            {
                "op": "resumed",
                "generation": self._recovered_in,
                "iteration": self._place.here.iteration,
                "phases_s": phases,
            }
        )
        self._recovered_in, self._phases_s = 0, {}

    def _send_modules(self) -> None:
        """Once: what the script has imported, so that standbys import it ahead."""
        self._modules_sent = True
        if os.environ[ENV_LOCAL_RANK] == "0":  # one of each node
            self.supervisor.send({"op": "modules", "names": tracking.imported_packages()})

    def _end(self) -> dict[str, Any]:
        if self._tracked is None:
            return {}
        return {
            "iteration": self._place.here.iteration,
            "replicas": ranges_of(self._tracked.replicas),
            "checksum": f"{self._tracked.checksum():016x}",
            # Of these it says which differ, should the checksums do.
            "parts": summarised(Fingerprints(self._tracked.state).take(whole=True), MAX_PARTS),
        }

    def _require_tracked(self) -> Tracked:
        assert self._tracked is not None
        return self._tracked
