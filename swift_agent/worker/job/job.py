"""What a training script gets from `init()`: the `Job`.

    init --> set-up (models, track) --> loop over batches: iteration, iteration, ... --> end
                                         '-- a peer fails --> recover --'

The loop has two kinds of places. At a *point* (a batch is asked for, a section or the end is reached) user code is
between two steps, and a replacement that starts its script there sees what the survivors see; what is small is kept
there as the point's snapshot. Inside an *iteration* (or a `@job.resilient` section) user code may be cut and is run
again. This module walks the loop; `protected` runs what is inside.

Without an agent (plain `torchrun`, plain `python`) the same script runs, unprotected. It must never communicate, nor
decide what is done about a failure.
"""

from __future__ import annotations

import atexit
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

import torch

from swift_agent.errors import UsageError
from swift_agent.worker.data import accelerated, own_epochs
from swift_agent.worker.data.batches import Looping, Passes, group_size
from swift_agent.worker.data.draws import Draws
from swift_agent.worker.data.inputs import Inputs
from swift_agent.worker.data.made_before import MadeBefore
from swift_agent.worker.job import first_point, restarts
from swift_agent.worker.job.own_values import OwnValues
from swift_agent.worker.job.set_up import SetUp
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.loop.outside import Outside
from swift_agent.worker.loop.unprotected import Running
from swift_agent.worker.tracked import epoch_loops
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.named import Named, make_deterministic
from swift_recovery.checkpoint.writer import Settings

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class JobPosition:
    """*iteration*, *epoch*: their numbers; *passes*: so many passes over loaders are done; *batch*: and so many batches
    of the current one."""

    iteration: int
    epoch: int
    passes: int
    batch: int


class Job:
    """One worker's part in the job. Made by `init()`; there is one per process.

    Attributes: *rank*, *local_rank*, *world_size* as in torch; *device*, the one this worker should use;
    *is_replacement*: this process takes the place of a lost one, and its set-up runs alone.
    """

    def __init__(
        self, rank: int, local_rank: int, world_size: int, device: torch.device, place: Place, running: Running,
        supervisor: Supervisor | None,
    ) -> None:  # fmt: skip
        self.rank, self.local_rank, self.world_size, self.device = rank, local_rank, world_size, device
        self._place, self._running, self._supervisor = place, running, supervisor
        self._named = Named()
        self._checkpoints: Settings | None = None
        self._begun = False
        self._loops = 0
        self._closed = False
        self._failed = False
        self._start: int | None = None  # where the loop begins with a snapshot of the script's own
        self._set_up: SetUp | None = None
        self.is_replacement = place.status == "empty"
        watches = supervisor is not None
        self._inputs = Inputs(place, None, MadeBefore() if watches else None, self._note, self._unfit)
        self._draws = Draws(place, self._inputs.drawn)
        self._passes = Passes(
            place, running, self._draws, self._inputs, self._begin, self.world_size, self._note,
            self._named.has_state, self._is_elsewhere,
        )  # fmt: skip
        self._own_values = OwnValues(self._note if rank == 0 and not self.is_replacement else None)
        own_epochs.watch()

    # ---- set-up ----

    @property
    def iteration_number(self) -> int:
        """Number of finished iterations of the job."""
        place = self._place
        if place.dry_run is not None:
            return place.dry_run
        # Its update may still be on its way from a replica: the script has finished it all the same.
        owes = place.owed is not None and place.inside != "iteration"
        return place.here.iteration + owes

    @property
    def position(self) -> JobPosition:
        """Where the training loop stands; of a replacement, where it has to get to. Its state is that of the others
        then: all of it must have been tracked, as the loop begins with this."""
        self._begin()
        at = self._place.target or self._place.here
        return JobPosition(at.iteration, at.epoch, at.passes, at.batch)

    def track(
        self,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        loader: Any = None,
        scaler: Any = None,
        replicas: Sequence[int] | None = None,
        overlap_update: bool = False,
        exact: bool = False,
        log_messages: bool | None = None,
        deterministic: bool = False,
        **others: Any,
    ) -> None:
        """Name the state of this job, before its first iteration. May be called several times.

        *model* and *optimizer*: one, a list, or a dict of names; of an optimizer in a wrapper (Accelerate's,
        Lightning's) the one inside, with the wrapper's scaler. *scheduler*, *scaler* and any keyword argument:
        objects with `state_dict` and `load_state_dict`; a module among them (an average) is tracked as a model.
        *loader* is accepted for the record: `job.batches` positions it.
        *replicas*: the global ranks that hold the same parameters, this one included; found out for
        DistributedDataParallel, otherwise all ranks.
        *overlap_update*: the parameters of each DDP bucket are updated as soon as its all-reduce is done, while the
        backward goes on; `optimizer.step()` then has nothing left to do, and cannot be left out. What looks at all
        gradients first (clipping, a GradScaler) raises. An update that a failure cuts in the middle is completed or
        taken back, the latter within the rounding of a step for parameters that all survivors have updated. *exact*:
        bit for bit there too, by a copy of parameters and optimizer state while an iteration's update is under way.
        *log_messages*: what this rank sends in iterations is logged, so that a lost neighbour can repeat them. The
        default in a pipeline of `torch.distributed.pipelining` where no other node holds this rank's part of the model.
        *deterministic*: operations that may give other results when they are repeated raise a RuntimeError that names
        them, in the first iteration that has one (`torch.use_deterministic_algorithms`); for this whole process.

        Raises `UsageError` for state that could not be recovered (an optimizer over parameters of no tracked model,
        sharded parameters, LBFGS, FSDP1, averaging now and then, objects without `state_dict`) and after the first
        iteration.
        """
        if self._begun:
            raise UsageError("job.track() after the first iteration: name all state before the training loop begins.")
        if deterministic:
            make_deterministic()
        self._named.add(
            model, optimizer, scheduler, loader, scaler, others, replicas=replicas, overlap_update=overlap_update,
            exact=exact, log_messages=log_messages,
        )  # fmt: skip

    def checkpoint(self, directory: str | os.PathLike[str], *, every: int, keep: int = 2) -> None:
        """Take a checkpoint of all tracked state before each iteration whose number *every* divides, while training
        goes on; begin with the newest one there, if any: in another run of this script, and when all workers of this
        one have to start again. To be called before the first iteration, on all ranks alike.

        *directory*: on a filesystem that all nodes share, made if need be, `hdfs://HOST:PORT/PATH` (a service of
        `HADOOP_CONF_DIR` in the place of host and port, if there is one), or `s3://BUCKET/PREFIX` (credentials as for
        AWS's tools). The newest *keep* stay. A copy of the state of this rank (of one rank of each replica set) is held
        on the CPU until it is written. Without an agent nothing is written or loaded.

        Raises `UsageError` for what cannot be, and after the first iteration.
        """
        mistakes = ["call it before the training loop begins"] if self._begun else []
        if self._checkpoints is not None:
            mistakes.append("it was called before")
        settings = restarts.checkpoints(directory, every, keep, mistakes)
        if self._supervisor is None:
            warnings.warn("without swift-run no checkpoints are written, and none is loaded", stacklevel=2)
        else:
            self._close_at_exit()
        self._checkpoints = settings

    def _begin(self) -> None:
        """The first point of the loop."""
        if self._begun:
            return
        self._begun = True
        self._place.seeds.settle()
        tracked = first_point.tracked(
            self._named, self._checkpoints, self._running, self._supervisor, self.rank, self.world_size,
            draws_alone=self._place.seeds.keeps_generators,
        )  # fmt: skip
        accelerated.watch(self._draws, self._place)
        self._place.hold(tracked)
        self._own_values.begin(one for kind in self._named.pending.values() for one in kind.values())
        if self._set_up is not None:
            models = tracked.state.models.values()
            self._set_up.ends(tensor for one in models for tensor in [*one.parameters(), *one.buffers()])
        is_first = self.rank == 0 and self._place.status != "empty"
        if is_first:
            seeded = not self._place.seeds.keeps_generators
            for text in restarts.told(tracked, self._start, self._place.here.iteration, seeded=seeded):
                self._note(text)
        witnesses = None
        if self._supervisor is not None:
            witnesses = first_point.watch_inputs(
                self._inputs, tracked, self._running, self._supervisor.environment, self._note,
                is_replacement=self.is_replacement,
            )  # fmt: skip
        self._running.begin(tracked, witnesses)
        begin = "the newest checkpoint" if self._checkpoints is not None else "what the script loads"
        # Where any loss has all workers start again, which is told, a section would not help.
        note = self._supervisor.note if self._supervisor is not None and not tracked.has_shards_alone else None
        unfit = self._unfit if self.is_replacement else None
        Outside(self._place, self._running, note, begin, unfit).watch()
        if self.is_replacement and self._place.carries and not self._place.remakes:
            self._unfit(self._place.carries)

    def _note(self, text: str) -> None:
        if self._supervisor is not None:
            self._supervisor.note(text)

    def _is_elsewhere(self, why: str) -> None:
        """The loop cannot get to where it has to be."""
        if not self.is_replacement:
            raise UsageError(why)
        self._unfit(why)

    def _unfit(self, why: str) -> None:
        """This replacement cannot go on as its predecessor would have: nothing but a restart of all workers helps."""
        assert self._supervisor is not None
        self._supervisor.give_up(f"{why}{self._supervisor.may_be_why}")

    # ---- the loop ----

    def epochs(self, num_epochs: int, *, start: int | None = None) -> Iterator[int]:
        """`range(start, num_epochs)`; a replacement begins with the epoch in which its predecessor was lost. Of several
        such loops, one after the other, it passes over those before that.

        *start*: where the script has loaded a snapshot of its own. It is not heeded by a replacement, nor where
        `job.checkpoint` has found a checkpoint. Given, also as 0, it says that there may be such snapshots."""
        self._start = self._start if start is None else start
        self._begin()
        self._passes.has_epochs = True
        yield from epoch_loops.epochs(self._place, start or 0, num_epochs)
        if not self._place.is_before_loop:
            self._running.loop_is_over()

    @overload
    def batches(self, loader: Iterable[T], *, group: None = None) -> Iterator[T]: ...

    @overload
    def batches(self, loader: Iterable[T], *, group: int) -> Iterator[list[T]]: ...

    def batches(self, loader: Iterable[Any], *, group: int | None = None) -> Iterator[Any]:
        """The batches of *loader*; a replacement begins with the one that its predecessor would have got next.

        *group*: lists of so many batches, for an update that takes several; the last one of a pass may be smaller.
        `next()` on the result is allowed inside an iteration: if that is run again, it gets the same batches.
        Inside a function decorated with `@job.resilient` (a validation) it is a pass that starts over whenever that is
        run. Anywhere else one pass has to be over before the next one begins.
        What tells its epoch by `set_epoch` (a `DistributedSampler`, Accelerate's loaders) is given the number of the
        epoch (of `job.epochs`, else of the pass). A `DistributedSampler` that the script tells by itself keeps its own;
        without `job.epochs` the loop is in that epoch then.
        """
        return self._passes.over(loader, group_size(group))

    @overload
    def loader(self, loader: Iterable[T], *, group: None = None) -> Looping[T]: ...

    @overload
    def loader(self, loader: Iterable[T], *, group: int) -> Looping[list[T]]: ...

    def loader(self, loader: Iterable[Any], *, group: int | None = None) -> Looping[Any]:
        """*loader* for code that iterates it by itself, pass after pass: `for batch in it` is `job.batches(loader)`,
        `len(it)` the number of batches (of groups), and all else is the loader's."""
        return Looping(self._passes, loader, group_size(group))

    def iterations(self, num_iterations: int, *, start: int | None = None) -> Iterator[int]:
        """Numbers of iterations up to *num_iterations*, from the current one on: a loop without a loader.

        *start*: the first one, where the script has loaded a snapshot of its own; this must be the first loop then. It
        is not heeded by a replacement, nor where `job.checkpoint` has found a checkpoint. Given, also as 0, it says
        that there may be such snapshots.
        """
        self._start = self._start if start is None else start
        place = self._place
        if start and not self._begun:
            place.here.iteration = start
        self._begin()
        if start and place.target is None and place.here.iteration < start:
            raise UsageError(f"job.iterations(start={start}) after the training loop has begun: it must come first.")
        here = place.here
        epoch_loops.comes_to_another(place)
        if place.target is not None:
            behind = place.target.iteration + (not place.target.is_end)
            if behind > num_iterations or place.is_before_loop:
                return  # the others have been through it
            place.arrive(in_no_loader=True)
            place.point.restore_generators()
        self._loops += 1
        try:
            while True:
                here.is_end = self.iteration_number >= num_iterations
                self._passes.at_point()
                here.is_end = False
                if (before := here.iteration) >= num_iterations:
                    return self._running.loop_is_over()
                place.seeds.for_data(before)  # the body may draw its data
                yield before
                if here.iteration == before and place.owed is None:
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
        harmless to repeat; its arguments are put back. Its result is the caller's; where the update came from a replica
        instead, the function is run once more without effect and without communication to give one.
        """

        self._own_values.add(function)
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if not self._begun:
                self._begin()
            if self._loops == 0 and self._passes.num_open == 0:
                raise UsageError(
                    f"{function.__name__}() was called outside job.batches(), job.loader(), job.iterations() and "
                    "job.run(): a replacement could not find its place in such a loop. Where a library has the loop, "
                    "have it iterate job.loader(loader) (see: Will my script be recovered?)."
                )
            if self._place.inside:
                raise UsageError(f"{function.__name__}() was called inside another iteration or section.")
            if self._place.target is not None:
                self._is_elsewhere(
                    f"{function.__name__}() is called before the loop is where it has to go on: with a batch that was "
                    "not meant for an iteration before. Have a `for` loop take the batches of job.batches()"
                )
            self._inputs.begin(function.__name__, args, kwargs)

            def call() -> R:
                self._inputs.run()
                return self._own_values.run(function, args, kwargs)

            self._place.leaves = 0
            result = self._running.iterate(self._draws.remembered(call))
            self._inputs.ran()
            return result

        run._swift_iteration = True  # type: ignore[attr-defined]
        return run

    def resilient(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate other code with collectives, such as an evaluation: it is repeated if a peer fails inside it.

        It must not change tracked state.
        """

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            self._begin()
            if self._place.inside or not self._place.has_points:
                return function(*args, **kwargs)  # a part of what surrounds it
            call = self._inputs.given_to_section(function, args, kwargs)
            return self._running.section(self._draws.remembered(call, is_section=True))

        return run

    # ---- the end ----

    def close(self) -> None:
        """The end of the run: wait until all ranks are there, so that nobody's state is missed. Called at exit if
        need be.
        """
        if self._closed:
            return
        if not self._failed:
            self._running.close()
        self._closed = True

    def _close_at_exit(self) -> None:
        """Before all that was registered until now, by libraries that the end of the run may need: pyarrow ends its S3
        at exit, and the last checkpoint, if it is still being written then, waits for ever."""
        atexit.unregister(self.close)
        atexit.register(self.close)

    def _fail(self) -> None:
        """The script has failed by itself: `close` shall wait for nobody."""
        self._failed = True
