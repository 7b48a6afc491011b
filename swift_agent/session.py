"""What a training script imports: `init()` and the `Job` that it returns.

    init --> set-up (models, track) --> loop over batches: iteration, iteration, ... --> end
                                         '-- a peer fails --> recover --'

The loop has two kinds of places. At a *point* (a batch is asked for, a section or the end is reached) user code is
between two steps, and a replacement that starts its script there sees what the survivors see; what is small is kept
there as the point's snapshot. Inside an *iteration* (or a `@job.resilient` section) user code may be cut and is run
again.

Without an agent (plain `torchrun`, plain `python`) the same script runs, unprotected.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from swift_agent import data, tracking
from swift_agent.errors import PeerFailure, UsageError
from swift_agent.process_group import ProcessGroups
from swift_agent.rejoin import Rejoin
from swift_agent.supervisor import Supervisor
from swift_agent.tracking import Tracked
from swift_agent.worker_env import ENV_STARTED
from swift_recovery.progress import RankReport, Status
from swift_recovery.snapshot import Snapshot, seed_all

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# What a seed is for; see `randomness.seed_all`.
_SEED_ITERATION, _SEED_DATA, _SEED_PASS, _SEED_SECTION = 1, 2, 3, 4


@dataclass
class Position:
    """Where the loop stands: all that a replacement needs to start its script at the same point.

    *passes* counts finished passes over a loader, *batch* the batches taken in the current one, *sections* the finished
    `@job.resilient` calls. The `epoch_*` fields are the counts at the begin of the current epoch of `job.epochs`.
    """

    iteration: int = 0
    epoch: int = 0
    passes: int = 0
    batch: int = 0
    sections: int = 0
    epoch_passes: int = 0
    epoch_sections: int = 0


@dataclass
class _Owed:
    """An iteration that the script believes done, while its update is still to come from a replica."""

    iteration: int
    run: Callable[[], Any]


class Job:
    """One worker's part in the job. Made by `init()`; there is one per process.

    Attributes: *rank*, *local_rank*, *world_size* as in torch; *device*, the one this worker should use.
    """

    def __init__(
        self, rank: int, local_rank: int, world_size: int, device: torch.device, rng: Literal["iteration", "user"],
        seed: int | None, supervisor: Supervisor | None, groups: ProcessGroups | None,
    ) -> None:  # fmt: skip
        self.rank, self.local_rank, self.world_size, self.device = rank, local_rank, world_size, device
        self._rng, self._seed = rng, seed
        self._supervisor, self._groups = supervisor, groups
        self._status: Status = "fresh"
        self._here = Position()
        self._target: Position | None = None  # where a replacement has to get to
        self._point_at = Position()
        self._tracked: Tracked | None = None
        self._pending: dict[str, dict[str, Any]] = {"models": {}, "optimizers": {}, "others": {}}
        self._replicas: Sequence[int] | None = None
        self._begun = False
        self._inside: Literal["", "iteration", "section"] = ""
        self._ghosts = contextlib.ExitStack()
        self._ghosting = False
        self._owed: _Owed | None = None
        self._ghost_sections = 0
        # A newcomer holds the state before iteration `_ghost_iterations`, its script is still before that; what is
        # small then comes into force when the script gets there.
        self._ghost_iterations = 0
        self._catch_up: Mapping[str, Any] | None = None
        self._moved = False  # an iteration or section has begun since the last point, and `_start` is its snapshot
        self._closed = False
        self._failed = False
        self._loops = 0
        self._phases_s: dict[str, float] = {}
        self._recovered_in = 0
        self._recovered_s = 0.0
        self._modules_sent = False
        self._created_s = time.monotonic()
        if ENV_STARTED in os.environ:
            self._phases_s["start"] = time.time() - float(os.environ[ENV_STARTED])

    # ---- set-up ----

    @property
    def iteration_number(self) -> int:
        """Number of finished iterations of the job."""
        return self._here.iteration

    def track(
        self,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        loader: Any = None,
        scaler: Any = None,
        replicas: Sequence[int] | None = None,
        **others: Any,
    ) -> None:
        """Name the state of this job, before its first iteration. May be called several times.

        *model* and *optimizer*: one, a list, or a dict of names. *scheduler*, *scaler* and any keyword argument:
        objects with `state_dict` and `load_state_dict`. *loader* is accepted for the record: `job.batches` positions
        it.
        *replicas*: the global ranks that hold the same parameters, this one included; found out for
        DistributedDataParallel, otherwise all ranks.

        Raises `UsageError` for state that could not be recovered (an optimizer over parameters of no tracked model,
        sharded parameters, LBFGS, objects without `state_dict`) and after the first iteration.
        """
        if self._begun:
            raise UsageError("job.track() after the first iteration: name all state before the training loop begins.")
        named = tracking.named
        self._pending["models"].update(named("model", model))
        self._pending["optimizers"].update(named("optimizer", optimizer))
        objects = {"scheduler": scheduler, "scaler": scaler, **others}
        for name, value in objects.items():
            self._pending["others"].update(named(name, value))
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            self._pending["others"]["loader"] = loader
        if replicas is not None:
            self._replicas = sorted(replicas)
        tracking.check(self._pending)

    def _begin(self) -> None:
        """The first point of the loop: from here on this worker holds state, or gets it from a survivor."""
        if self._begun:
            return
        self._begun = True
        if not self._pending["models"]:
            raise UsageError(
                "the training loop begins, but nothing is tracked: call job.track(model=..., optimizer=...) first."
            )
        if self._seed is None:
            self._seed = torch.initial_seed()
        self._tracked = Tracked(self._pending, self._replicas, self.world_size, self._supervisor)
        self._point = Snapshot(self._tracked.state)
        self._start = Snapshot(self._tracked.state)
        if self._supervisor is None:
            return
        self._rejoin = Rejoin(self, self._supervisor, self._require_groups(), self._tracked)
        if self._status == "empty":
            self._phases_s["set-up"] = time.monotonic() - self._created_s
            self._recover()
            return
        with self._supervisor.changed:
            self._status = "holding"
        try:
            # Nobody's first iteration begins before everybody's set-up has ended: a peer that is lost in an iteration
            # then never cuts a collective of somebody's set-up, which could not be repeated.
            self._require_groups().all_gather_ints([self.rank])
        except Exception as error:
            if not self._was_cut(error):
                raise

    # ---- the loop ----

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """`range(num_epochs)`; a replacement begins with the epoch in which its predecessor was lost."""
        self._begin()
        here = self._here
        first = True
        for epoch in range(here.epoch if self._target else 0, num_epochs):
            if not (first and self._target):
                here.epoch, here.epoch_passes, here.epoch_sections = epoch, here.passes, here.sections
            first = False
            yield epoch
        self._target = None

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of *loader*; a replacement begins with the one that its predecessor would have got next.

        A `DistributedSampler` is given the number of the epoch (of `job.epochs`, else of the pass).
        """
        self._begin()
        here, target = self._here, self._target
        number = here.passes
        if target is not None and number < target.passes:
            here.passes += 1  # the others have been through it
            return
        skip = 0
        arrives = target is not None and number == target.passes
        if target is not None and arrives:
            skip = target.batch
            self._arrive(target)
        here.batch = skip
        data.set_epoch(loader, here.epoch if here.epoch or here.epoch_passes else number)
        self._seed_for(_SEED_PASS, number)
        # What shuffles may draw when the iterator is made or when its first batch is asked for.
        batches = data.iterate(loader, skip, lambda: self._seed_for(_SEED_PASS, number))
        if arrives:
            self._point.restore_generators()
        self._loops += 1
        try:
            while True:
                self._at_point()
                self._seed_for(*((_SEED_DATA, here.iteration) if here.batch else (_SEED_PASS, number)))
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                here.batch += 1
                yield batch
        finally:
            # Also when the script leaves the loop early.
            self._loops -= 1
            here.passes, here.batch = number + 1, 0

    def iterations(self, num_iterations: int) -> Iterator[int]:
        """Numbers of iterations up to *num_iterations*, from the current one on: a loop without a loader."""
        self._begin()
        here = self._here
        if self._target is not None:
            if self._target.iteration >= num_iterations:
                return  # the others have been through it
            self._arrive(self._target)
            self._point.restore_generators()
        self._loops += 1
        try:
            while True:
                self._at_point()
                before = here.iteration
                if before >= num_iterations:
                    return
                self._seed_for(_SEED_DATA, before)  # the body may draw its data
                yield before
                if here.iteration == before and self._owed is None:
                    raise UsageError(
                        "the body of job.iterations() called no @job.iteration function: it would never end."
                    )
        finally:
            self._loops -= 1

    def run(self, train: Callable[[int], Any], *, iterations: int) -> None:
        """Call `train(t)` for every iteration t up to *iterations*; the form of the SWIFT paper. *train* need not be
        decorated.
        """
        step = train if getattr(train, "_swift_iteration", False) else self.iteration(train)
        for number in self.iterations(iterations):
            step(number)

    def iteration(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate the function that makes one update of the model. It is run again if a peer fails inside it.

        It must make one step of every tracked optimizer (or none), and whatever else it changes must be tracked or
        harmless to repeat. Its result is the caller's; where the update came from a replica instead, the function is
        run once more without effect and without communication to give one.
        """

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            self._begin()
            if self._loops == 0:
                raise UsageError(
                    f"{function.__name__}() was called outside job.batches(), job.iterations() and job.run(): "
                    "a replacement could not find its place in such a loop."
                )
            if self._inside:
                raise UsageError(f"{function.__name__}() was called inside another iteration or section.")
            return self._iterate(lambda: function(*args, **kwargs))

        run._swift_iteration = True  # type: ignore[attr-defined]
        return run

    def resilient(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate other code with collectives, such as an evaluation: it is repeated if a peer fails inside it.

        It must not change tracked state.
        """

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            self._begin()
            if self._inside:
                return function(*args, **kwargs)  # a part of what surrounds it
            return self._section(lambda: function(*args, **kwargs))

        return run

    def close(self) -> None:
        """The end of the run: wait until all ranks are there, so that nobody's state is missed. Called at exit if
        need be.
        """
        if self._closed:
            return
        supervisor = self._supervisor
        if supervisor is None or self._failed:
            self._closed = True
            return
        if self._begun:
            self._target = None
            self._keep_start()
        while True:
            if supervisor.interrupted:
                if not self._begun:
                    supervisor.wait_for_end()  # nothing can be recovered: the agent starts all workers again
                self._recover()
            if self._recovered_in:
                self._tell_resumed()
            supervisor.send({"op": "finished", "generation": supervisor.generation, "end": self._end()})
            if supervisor.wait_release():
                break
        self._closed = True
        supervisor.close()

    # ---- iterations and sections ----

    def _iterate(self, call: Callable[[], R]) -> R:
        here, tracked = self._here, self._require_tracked()
        supervisor = self._supervisor
        while True:
            if supervisor is None:
                self._seed_for(_SEED_ITERATION, here.iteration)
                return self._run_plainly(call)
            if here.iteration < self._ghost_iterations:
                return self._iteration_as_ghost(call)
            try:
                self._keep_start()
                self._seed_for(_SEED_ITERATION, here.iteration)
                tracked.begin(here.iteration)
                self._inside = "iteration"
                supervisor.check()
                result = call()
                self._complete_iteration()
            except Exception as error:
                if not self._was_cut(error):
                    raise
                del error  # its traceback holds the activations of the cut iteration
                if not self._cut_iteration():
                    continue
                return self._pass_over(call)
            if self._recovered_in:
                self._tell_resumed()
            self._send_modules()
            return result

    def _run_plainly(self, call: Callable[[], R]) -> R:
        tracked = self._require_tracked()
        tracked.begin(self._here.iteration)
        self._inside = "iteration"
        try:
            result = call()
        finally:
            self._inside = ""
        tracked.updates.finish()
        self._here.iteration += 1
        return result

    def _complete_iteration(self) -> None:
        """Count the iteration, unless it was stopped before its update: then its results are those of a cut
        collective.
        """
        supervisor, tracked = self._require_supervisor(), self._require_tracked()
        with supervisor.changed:
            if supervisor.interrupted and not tracked.updates.updated:
                raise PeerFailure("stopped before the update")
            if not tracked.updates.num_steps:
                tracked.check_gradients_used()
            tracked.updates.finish()
            self._inside = ""
            self._here.iteration += 1

    def _cut_iteration(self) -> bool:
        """The iteration was interrupted. False: it has to be run again, on recovered groups. True: its update exists
        already, here or on a replica, and the script goes on after it."""
        supervisor, tracked = self._require_supervisor(), self._require_tracked()
        tracked.updates.cut()
        self._wait_quiet()
        if not tracked.updates.updated:
            plan = supervisor.peek_go().plan
            if plan.kind != "copy" or plan.iteration <= self._here.iteration:
                self._start.restore()
                with supervisor.changed:
                    self._inside = ""
                self._recover()
                # The point's state may have been replaced; the iteration's own begins anew.
                return False
        return True

    def _pass_over(self, call: Callable[[], R]) -> R:
        """Give the script the result of an iteration that it need not run: without communication, without effect.

        The state after the iteration is here already, or comes when the others are joined at the next point.
        """
        supervisor, tracked = self._require_supervisor(), self._require_tracked()
        number, owes = self._here.iteration, not tracked.updates.updated
        buffers = None if owes else tracked.copy_buffers()
        self._start.restore()
        with supervisor.changed:
            self._inside = ""
            if not owes:
                self._here.iteration += 1
                tracked.updates.updated = False
        self._enter_ghost()
        result = self._as_ghost(call, number)
        if buffers is not None:
            tracked.put_buffers(buffers)
        if owes:
            self._owed = _Owed(number, lambda: self._as_owed(call))
        return result

    def _as_ghost(self, call: Callable[[], R], number: int) -> R:
        tracked = self._require_tracked()
        # Owed: its layouts are those before the update.
        tracked.restore_layouts(tracked.layouts_for(self._here.iteration))
        tracked.begin(number, ghost=True)
        self._seed_for(_SEED_ITERATION, number)
        with tracked.without_reduction(finite=self._here.iteration > number):
            try:
                return call()
            finally:
                tracked.updates.cut()

    def _iteration_as_ghost(self, call: Callable[[], R]) -> R:
        """The others have finished this iteration, and a newcomer has its update: run it for its result."""
        tracked, groups = self._require_tracked(), self._require_groups()
        tracked.begin(self._here.iteration, ghost=True)
        self._seed_for(_SEED_ITERATION, self._here.iteration)
        if groups.aborted is not None:
            self._enter_ghost()
        with contextlib.nullcontext() if self._ghosting else groups.local(), tracked.without_reduction(finite=False):
            try:
                result = call()
            finally:
                tracked.updates.cut()
        with self._require_supervisor().changed:
            self._here.iteration += 1
        return result

    def _as_owed(self, call: Callable[[], Any]) -> None:
        """The replica that had the update is lost too: the iteration is run after all, for its effect."""
        tracked = self._require_tracked()
        # What the script has done since then, to a scheduler for one, stays done.
        since = tracked.script_side()
        since.take(rng=self._rng == "user")
        self._start.restore()
        self._seed_for(_SEED_ITERATION, self._here.iteration)
        tracked.begin(self._here.iteration)
        self._inside = "iteration"
        try:
            call()
            self._complete_iteration()
        except BaseException:
            tracked.updates.cut()
            with self._require_supervisor().changed:
                self._inside = ""
                if tracked.updates.updated:
                    self._here.iteration += 1
                    self._owed = None
                    tracked.updates.updated = False
            since.restore(buffers=False)
            raise
        since.restore(buffers=False)
        self._owed = None

    def _section(self, call: Callable[[], R]) -> R:
        here, supervisor = self._here, self._supervisor
        while True:
            self._seed_for(_SEED_SECTION, here.sections)
            if supervisor is None:
                here.sections += 1
                return call()
            try:
                if here.sections >= self._ghost_sections:
                    self._keep_start()
                if supervisor.interrupted:
                    self._recover()
                if here.sections < self._ghost_sections:
                    return self._section_as_ghost(call)
                self._keep_start()  # what was received belongs to it, too
                self._seed_for(_SEED_SECTION, here.sections)
                self._inside = "section"
                result = call()
                with supervisor.changed:
                    supervisor.check()  # what a cut collective gave must not be handed out
                    self._inside = ""
                    here.sections += 1
            except Exception as error:
                if not self._was_cut(error):
                    raise
                del error
                if self._inside:
                    self._wait_quiet()
                    self._start.restore()
                self._inside = ""
                continue
            if self._recovered_in:
                self._tell_resumed()
            return result

    def _section_as_ghost(self, call: Callable[[], R]) -> R:
        """The others have finished this section: run it for its result, with local values only."""
        supervisor, groups = self._require_supervisor(), self._require_groups()
        if groups.aborted is None:
            with groups.local():
                result = call()
        else:
            result = call()
        with supervisor.changed:
            self._here.sections += 1
        return result

    # ---- failures ----

    def _was_cut(self, error: Exception) -> bool:
        """Whether *error* comes from the failure of a peer. Everything else is the script's own."""
        supervisor = self._require_supervisor()
        if isinstance(error, UsageError):
            return False
        if supervisor.interrupted:
            return True
        return is_communication_error(error) and supervisor.confirm(error)

    def _recover(self) -> None:
        """Join the others in the newest generation; returns with live groups and the plan's state. May take several
        tries.
        """
        self._wait_quiet()
        self._leave_ghost()
        self._rejoin.run()
        self._phases_s |= self._rejoin.phases_s
        self._recovered_in = self._require_supervisor().generation
        self._recovered_s = time.monotonic()

    def _at_point(self) -> None:
        """User code is between two steps: keep the point, and join the others if a peer has failed."""
        if self._supervisor is not None:
            # Who owes an iteration holds the state before it: a newcomer that gets this must begin before it as well.
            if self._owed is None:
                self._keep_point()
            if self._supervisor.interrupted:
                self._recover()
                # What was received belongs to this point, too.
                self._keep_point()

    def _keep_point(self) -> None:
        self._point.take(rng=self._rng == "user")
        self._point_at = replace(self._here)
        self._moved = False

    def _keep_start(self) -> None:
        """An iteration or section begins: keep what is small. A newcomer has caught up here."""
        if self._supervisor is None or self._owed is not None:
            return
        if self._catch_up is not None:
            self._start.install(self._catch_up, rng=self._rng == "user")
            self._catch_up = None
        self._start.take(rng=self._rng == "user")
        self._moved = True

    def start_tree(self) -> Mapping[str, Any] | None:
        """What is small, for a newcomer, where it differs from that of the point: inside an iteration or section."""
        if self._catch_up is not None:
            return self._catch_up
        return self._start.tree() if self._moved else None

    def _arrive(self, target: Position) -> None:
        """A replacement has reached the point at which it joined: from here on it is like the others."""
        self._here.iteration = target.iteration
        self._here.passes = target.passes
        self._here.sections = target.sections  # those among the batches that are skipped are not called again
        self._target = None

    def _enter_ghost(self) -> None:
        groups = self._require_groups()
        if not self._ghosting:
            self._ghosts.enter_context(groups.ghost())
            self._ghosting = True

    def _leave_ghost(self) -> None:
        if self._ghosting:
            self._ghosts.close()
            self._ghosting = False

    def _wait_quiet(self) -> None:
        self._require_supervisor().wait_aborted()
        if not self._require_groups().wait_quiet(timedelta(seconds=20)):
            self._give_up("operations of the stopped process groups do not end")

    def _give_up(self, why: str) -> None:
        """Have this process replaced."""
        self._require_supervisor().note(f"{why}: this worker has itself replaced")
        os.kill(os.getpid(), 9)

    def take_place(
        self, position: Mapping[str, int], point: Mapping[str, Any], start: Mapping[str, Any] | None, iteration: int, *,
        rng: bool,
    ) -> None:  # fmt: skip
        """The state of another rank before *iteration* has arrived: continue from its point. A newcomer also takes its
        place in the loop; *start* is what is small where *iteration*, or the section after it, begins.
        """
        target = Position(**position)
        self._point.install(point, rng=rng)
        with self._require_supervisor().changed:
            self._require_tracked().updates.mixed = False
            if self._status == "empty":
                self._here = replace(target, passes=target.epoch_passes, sections=target.epoch_sections, batch=0)
                self._target = target
                self._ghost_iterations, self._catch_up = iteration, start
            elif start is not None:
                self._start.install(start, rng=rng)
            self._point_at = target
            self._status = "holding"

    def report(self) -> dict[str, Any]:
        """What this rank holds; called by the supervisor's thread with its lock held, after the fence is up."""
        tracked, status, iteration = self._tracked, self._status, self._here.iteration
        if tracked is not None and status == "holding":
            if tracked.updates.mixed:
                status = "empty"
            elif self._inside == "iteration" and tracked.updates.updated:
                iteration += 1
            iteration = max(iteration, self._ghost_iterations)
        replicas = tuple(tracked.replicas) if tracked is not None else ()
        return RankReport(self.rank, status, iteration, self._here.sections, replicas).to_json()

    # ---- little helpers ----

    def _seed_for(self, tag: int, index: int) -> None:
        if self._rng == "iteration":
            assert self._seed is not None
            seed_all(self._seed, self.rank, tag, index)

    def _tell_resumed(self) -> None:
        """The first iteration (or section) after a recovery is done: that is when the job runs again."""
        supervisor = self._require_supervisor()
        phases = {**self._phases_s, "iteration": time.monotonic() - self._recovered_s}
        supervisor.send(
            {"op": "resumed", "generation": self._recovered_in, "iteration": self._here.iteration, "phases_s": phases}
        )
        self._recovered_in, self._phases_s = 0, {}

    def _send_modules(self) -> None:
        """Once: what the script has imported, so that standbys import it ahead."""
        if self._modules_sent:
            return
        self._modules_sent = True
        if self.rank == 0:
            self._require_supervisor().send({"op": "modules", "names": tracking.imported_packages()})

    def _end(self) -> dict[str, Any]:
        if self._tracked is None:
            return {}
        return {
            "iteration": self._here.iteration,
            "replicas": list(self._tracked.replicas),
            "checksum": f"{self._tracked.checksum():016x}",
        }

    def _require_tracked(self) -> Tracked:
        assert self._tracked is not None
        return self._tracked

    def _require_supervisor(self) -> Supervisor:
        assert self._supervisor is not None
        return self._supervisor

    def _require_groups(self) -> ProcessGroups:
        assert self._groups is not None
        return self._groups


def is_communication_error(error: BaseException) -> bool:
    """Whether *error* is what torch raises when a connection of a process group breaks."""
    if isinstance(error, (dist.DistError, PeerFailure)):
        return True
    text = str(error).lower()
    marks = ("gloo", "nccl", "connection", "socket", "aborted", "swift", "timed out")
    return isinstance(error, RuntimeError) and any(mark in text for mark in marks)
