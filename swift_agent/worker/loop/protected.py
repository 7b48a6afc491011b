"""Runs what a script has marked, iterations and sections, under an agent. Without one: `unprotected`.

An iteration is run again if a peer fails before the update; if a replica has made the update, its function is run once
more for its result only, without communication and without effect, and the update is received at the next point.
What is done is in `iterations`, `sections`, `recovery` and `ending`; this puts them together.

It must never decide anything itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from swift_agent.errors import UsageError
from swift_agent.wire.standing import MyStanding
from swift_agent.worker.checks.checks import Checks
from swift_agent.worker.checks.lookout import Lookout
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.in_place import Way
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.loop.checkpointing import Checkpointing
from swift_agent.worker.loop.dry_runs import DryRuns
from swift_agent.worker.loop.ending import Ending, end_without_loop
from swift_agent.worker.loop.iterations import Iterations
from swift_agent.worker.loop.measuring import Measuring, kept_in
from swift_agent.worker.loop.recovery import Recovery
from swift_agent.worker.loop.sections import Sections
from swift_agent.worker.loop.ways_out import WaysOut
from swift_agent.worker.rejoin.witness import Witnesses
from swift_agent.worker.replicas.comparison import Comparison
from swift_agent.worker.replicas.kernels import Kernels
from swift_agent.worker.tracked import others
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.tracked import Tracked
from swift_agent.worker.updates.overlapped import OverlappedUpdates
from swift_recovery.replay.kernels import computes_with

R = TypeVar("R")


class _Loop:
    """What there is from the first point of the loop on."""

    def __init__(self, protected: Protected, tracked: Tracked, witnesses: Witnesses | None) -> None:
        place, supervisor, groups = protected.place, protected.supervisor, protected.groups
        out, dry_runs, checks, lookout = protected.out, protected.dry_runs, protected.checks, protected.lookout
        self.tracked = tracked
        self.checkpointing: Checkpointing | None = None
        if tracked.checkpoints is not None:
            self.checkpointing = Checkpointing(tracked.checkpoints, place, tracked, groups, supervisor)
        self.comparison: Comparison | None = None
        if len(tracked.replicas) > 1:
            self.comparison = Comparison(place, supervisor, groups, tracked, out.tell_deviation)
            if tracked.checkpoints is not None:
                tracked.checkpoints.why_not = self.comparison.why_not_kept
        self.recovery = Recovery(
            place, supervisor, groups, tracked, protected.device, dry_runs, out, checks, lookout=lookout,
            checkpointing=self.checkpointing, comparison=self.comparison, witnesses=witnesses,
            phases_s=protected.phases_s, kernels=protected.kernels,
        )  # fmt: skip
        self.iterations = Iterations(
            place, supervisor, groups, tracked, self.recovery, dry_runs, out, protected.standing, self.comparison,
            Measuring(place.rank, supervisor, tracked, kept_in(supervisor.environment)),
        )  # fmt: skip
        self.sections = Sections(place, supervisor, groups, tracked, self.recovery, dry_runs, out, checks)
        self.ending = Ending(place, supervisor, tracked, self.recovery, self.checkpointing, self.comparison, lookout)


class Protected:
    """Under an agent. *started_s*: seconds from the agent's order to the beginning of the script's set-up, None where
    nothing is recovered. It is a `Running`, and an `InPlace` of what is tracked."""

    def __init__(
        self, place: Place, supervisor: Supervisor, groups: ProcessGroups, device: torch.device,
        started_s: float | None, standing: MyStanding | None = None,
    ) -> None:  # fmt: skip
        self.place, self.supervisor, self.groups, self.device = place, supervisor, groups, device
        self.standing = standing or MyStanding()
        self.out = WaysOut(place, supervisor, self.standing)
        self.dry_runs = DryRuns(place, groups)
        self.checks = Checks(place, supervisor, groups, self.out.restart_all)
        self.lookout: Lookout | None = None
        self.kernels: Kernels | None = None
        self.phases_s: dict[str, float] = {} if started_s is None else {"start": started_s}
        self._created_s = time.monotonic()
        self._loop: _Loop | None = None

    # ---- a `Running` ----

    def begin(self, tracked: Tracked, witnesses: Witnesses | None = None) -> None:
        """See `unprotected.Running`."""
        look = self.checks.meetings.look
        self.lookout = Lookout(self.place, self.supervisor, self.groups, self.out.tell_standstill, look)
        self.lookout.at_begin = True
        self.lookout.start()
        self._begin(tracked, witnesses)
        self.lookout.at_begin = False

    def assemble(self, tracked: Tracked, witnesses: Witnesses | None = None) -> _Loop:
        """Make what the loop consists of; nothing is communicated."""
        self.dry_runs.tracked = tracked
        if tracked.checkpoints is not None:
            self.out.begin_with = "the newest checkpoint"
        tracked.computes = computes_with(self.device)
        self.kernels = Kernels(self.supervisor.environment, tracked.computes, self.supervisor)
        self.supervisor.may_be_why = self.kernels.may_be_why
        self._loop = _Loop(self, tracked, witnesses)
        return self._loop

    def _begin(self, tracked: Tracked, witnesses: Witnesses | None) -> None:
        place = self.place
        loop = self.assemble(tracked, witnesses)
        kernels = self.kernels
        assert kernels is not None
        recovery, checkpointing = loop.recovery, loop.checkpointing
        if tracked.has_shards_alone and place.rank == 0:
            self.supervisor.note(
                "the model is sharded, and no rank holds a replica of another one's shards: if one is lost all workers "
                f"start again, with {self.out.begin_with}. On a mesh of two dimensions (replicate, shard) they go on."
            )
        if place.status == "empty":
            self._origin(place, tracked)
            recovery.phases_s["set-up"] = time.monotonic() - self._created_s
            recovery.run()
            return
        if self.supervisor.generation > 1:
            recovery.starts_over(time.monotonic() - self._created_s)
        else:
            recovery.phases_s.clear()  # of no recovery
        place.keep_point()  # a section may come before the first batch
        newest, every = checkpointing.find() if checkpointing is not None else (0, 0)
        with place.lock:
            # With a checkpoint that another rank may see, this state is not what the job goes on with.
            place.status = "empty" if checkpointing is not None else "holding"
        try:
            # Nobody's first iteration begins before everybody's set-up has ended: a peer that is lost in an iteration
            # then never cuts a collective of somebody's set-up, which could not be repeated.
            origin, overlaps = self._origin(place, tracked), isinstance(tracked.updates, OverlappedUpdates)
            here = [newest, every, overlaps, place.seeds.number, self.supervisor.generation]
            here.append(kernels.checksum)
            everyone = self.groups.all_gather_ints([*origin, *here, *others.samples(tracked.state.others)])
            place.seeds.common, place.began = everyone[0][5:7]
            if len({told[4] for told in everyone}) > 1:
                # They agree on an update before it, or after it.
                raise UsageError("job.track(): overlap_update=True on some ranks only; say the same on all.")
            self._check_others(tracked, [everyone[rank][8:] for rank in tracked.replicas])
            kernels.compare(self.groups.store, [told[7] for told in everyone])
            if tracked.messages is not None:
                tracked.messages.beginnings.origins = [told[:2] for told in everyone]
            if witnesses is not None:
                witnesses.enter(self.groups.store, asks=False)
            if checkpointing is not None:
                checkpointing.begin([(told[2], told[3]) for told in everyone])
            with place.lock:
                place.status = "holding"
            recovery.compare_from(place.here.iteration, undisturbed=True)
            if witnesses is not None:
                witnesses.begin()
        except Exception as error:
            if not recovery.was_cut(error):
                raise
            if place.status == "empty":
                recovery.run()  # before the script is in a loop

    def _check_others(self, tracked: Tracked, of_replicas: list[list[int]]) -> None:
        """A replacement gets the state of another rank, of a loader of the script's own too: its place in the data."""
        loaders, objects = (set(digests) for digests in zip(*of_replicas, strict=True))
        if len(loaders) > 1:
            raise UsageError(
                "job.track(loader=...): its state_dict() differs from rank to rank, and a replacement gets that of "
                "another rank: leave out of it what is the rank's own, or do not track it and give it to job.batches()."
            )
        tracked.apart_is_told = len(objects) > 1
        if tracked.apart_is_told and self.place.rank == 0:
            self.supervisor.note(others.told_apart(sorted(others.own(tracked.state.others))))

    @staticmethod
    def _origin(place: Place, tracked: Tracked) -> list[int]:
        """What repeated iterations have to begin with: a checksum of the state, and the seed."""
        if tracked.messages is None:
            return [0, 0]
        tracked.messages.beginnings.origin = [tracked.checksum(), place.seeds.number]
        return tracked.messages.beginnings.origin

    def at_point(self) -> None:
        place, loop = self.place, self._begun
        if place.local_result:
            loop.sections.tell_local_result()
        if place.owed is None:
            place.keep_point()
        if self.supervisor.interrupted and not place.replays:
            loop.recovery.run()
            # What was received belongs to this point, too. Nothing is owed any more.
            place.keep_point()
        if loop.checkpointing is not None:
            loop.checkpointing.at_point()

    def loop_is_over(self) -> None:
        self._begun.ending.last_comparison_is_over()

    def iterate(self, call: Callable[[], R]) -> R:
        return self._begun.iterations.run(call)

    def section(self, call: Callable[[], R]) -> R:
        return self._begun.sections.run(call)

    def barrier(self, call: Callable[[], None], way: str) -> None:
        self._begun.sections.barrier(call, way)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.ending.wait()
        else:
            if dist.is_initialized():  # other ranks may wait for it
                self.lookout = Lookout(self.place, self.supervisor, self.groups, self.out.tell_standstill)
                self.lookout.start()
            end_without_loop(self.place, self.supervisor, self.lookout)
        if self.lookout is not None:
            self.lookout.stop()
        self.supervisor.close()

    @property
    def _begun(self) -> _Loop:
        assert self._loop is not None
        return self._loop

    # ---- an `InPlace` ----

    @property
    def is_dry_run(self) -> bool:
        return self.dry_runs.is_on

    @property
    def is_inside(self) -> bool:
        return bool(self.place.inside)

    @property
    def at(self) -> tuple[int, int]:
        place = self.place
        return place.here.iteration if place.dry_run is None else place.dry_run, place.here.sections

    def give_up(self, why: str) -> NoReturn:
        self.out.restart_all(why)

    def dry_run(self) -> AbstractContextManager[None]:
        return self.dry_runs.without_effect()

    def was_cut(self, error: Exception) -> bool:
        return self._begun.iterations.was_cut_inside(error)

    def stays(self, error: Exception) -> bool:
        return self._begun.iterations.stays(error)

    def after_cut_agreement(self, error: Exception) -> Way:
        return self._begun.iterations.after_cut_agreement(error)
