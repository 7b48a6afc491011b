"""Carries out a plan in one worker: connect, get the state or hand it on, compare, go on.

    wait for a generation --> rebuild groups --> layouts --> state --> checksums --> live
              ^                    |  a peer fails meanwhile  |          |
              '--------------------'---------------------------'---------'

Every step may be cut by the next failure; then it begins again with the next generation. Until a receiver has all of a
state it keeps what it had (a survivor) or holds nothing (a newcomer), so a cut transfer never spoils a source.

This module must never decide who gets what from whom; that is the plan's.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from swift_agent.ddp import Layout
from swift_agent.errors import PeerFailure, ReplicaMismatch, SwiftError
from swift_agent.process_group import GroupsAborted, ProcessGroups, RebuildFailed
from swift_agent.supervisor import Go, Supervisor
from swift_agent.tracking import Tracked
from swift_recovery.plan import Plan
from swift_recovery.replica import GroupLink, receive_state, send_state

if TYPE_CHECKING:
    from swift_agent.session import Job

log = logging.getLogger(__name__)

# The longest that survivors wait in `rebuild` for a replacement that neither comes nor is reported lost.
CONNECT_TIMEOUT = timedelta(minutes=10)


class Rejoin:
    """One object per worker. *phases_s*: seconds per phase of the last successful run."""

    def __init__(self, job: Job, supervisor: Supervisor, groups: ProcessGroups, tracked: Tracked) -> None:
        self._job, self._supervisor, self._groups, self._tracked = job, supervisor, groups, tracked
        self.phases_s: dict[str, float] = {}

    def run(self) -> None:
        """Return when this worker is live in the newest generation, with the state that its plan says."""
        while True:
            go = self._supervisor.wait_go()
            try:
                self._enter(go)
                if not self._supervisor.interrupted:
                    return
            except (GroupsAborted, RebuildFailed, PeerFailure, dist.DistError, RuntimeError) as error:
                if isinstance(error, SwiftError) and not isinstance(error, PeerFailure):
                    raise
                if not self._supervisor.confirm(error):
                    raise
                self._groups.wait_quiet(timedelta(seconds=20))

    def _enter(self, go: Go) -> None:
        job, plan = self._job, go.plan
        if plan.kind != "copy":
            raise SwiftError(f"generation {go.generation} asks a running worker to begin anew ({plan.why})")
        clock = _Clock()
        leads = job.rank not in plan.layouts
        layouts = self._tracked.layouts_for(plan.iteration) if leads else None
        self._groups.rebuild(go.session_store, go.generation, CONNECT_TIMEOUT, go.token)
        clock.mark("regroup")
        self._tracked.restore_layouts(self._agree_on_layouts(plan, layouts))
        self._exchange_state(go)
        clock.mark("transfer")
        self._compare()
        clock.mark("verify")
        self._pay_debt(plan.iteration)
        job._ghost_sections = max(job._ghost_sections, plan.sections)
        self.phases_s = clock.phases_s

    def _agree_on_layouts(self, plan: Plan, mine: list[Layout | None] | None) -> list[Layout | None]:
        """All ranks must reduce the same buckets in the same order, else sums differ, or gloo ends the process."""
        if not self._tracked.keepers:
            return []
        store = PrefixStore("layouts", self._groups.store)
        if mine is not None:
            store.set(str(self._job.rank), json.dumps(mine))
            return mine
        content: list[Layout | None] = json.loads(store.get(str(plan.layouts[self._job.rank])))
        return content

    def _exchange_state(self, go: Go) -> None:
        job, plan = self._job, go.plan
        targets = plan.targets_of(job.rank)
        state = self._tracked.state
        if targets:
            extra = {"position": asdict(job._point_at), "point": job._point.tree(), "start": job.start_tree()}
            send_state(state, extra, [self._link(target) for target in targets])
        if job.rank not in plan.sources:
            return
        link = self._link(plan.sources[job.rank])
        skips = job._owed is not None and job._owed.iteration < plan.iteration
        if job._status == "holding" and (skips or not self._tracked.updates.mixed):
            self._roll_forward(link, plan.iteration)
            return
        extra = receive_state(state, link, staged=False)
        job.take_place(
            extra["position"], extra["point"], extra["start"], plan.iteration, rng=job._rng == "user"
        )

    def _roll_forward(self, link: GroupLink, iteration: int) -> None:
        """A survivor that lacks the update gets the state, but keeps what its own script has done to small things."""
        job = self._job
        if job._owed is None or job._owed.iteration + 1 != iteration:
            raise SwiftError(
                f"rank {job.rank} stands at iteration {job._here.iteration} and cannot skip to {iteration}"
            )
        mine = self._tracked.script_side()
        mine.take()
        receive_state(self._tracked.state, link, staged=True)
        mine.restore(buffers=False)
        with self._supervisor.changed:
            job._here.iteration = iteration
            job._owed = None
            self._tracked.updates.mixed = False

    def _compare(self) -> None:
        """Parameters and optimizer state must be equal on all replicas before training goes on."""
        mine = self._tracked.checksum()
        everyone = self._groups.all_gather_ints([mine])
        differing = [rank for rank in self._tracked.replicas if everyone[rank][0] != mine]
        if differing:
            found = {rank: f"{everyone[rank][0] & (1 << 64) - 1:016x}" for rank in self._tracked.replicas}
            raise ReplicaMismatch(f"replicas differ after the recovery, checksums by rank: {found}")

    def _pay_debt(self, iteration: int) -> None:
        """An update that was promised by a replica which is lost as well is made after all."""
        owed = self._job._owed
        if owed is None:
            return
        if owed.iteration != iteration:
            raise SwiftError(
                f"rank {self._job.rank} waits for iteration {owed.iteration + 1}, the plan has {iteration}"
            )
        owed.run()

    def _link(self, peer: int) -> GroupLink:
        group = dist.group.WORLD
        assert group is not None
        device = torch.device("cpu") if dist.get_backend() != "nccl" else self._job.device
        return GroupLink(group, peer, device)


class _Clock:
    """Seconds per phase."""

    def __init__(self) -> None:
        self.phases_s: dict[str, float] = {}
        self._last_s = time.monotonic()

    def mark(self, phase: str) -> None:
        now_s = time.monotonic()
        self.phases_s[phase] = now_s - self._last_s
        self._last_s = now_s
