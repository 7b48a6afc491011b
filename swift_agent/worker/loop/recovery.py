"""Joins the others in the newest generation, as often as a peer fails, and knows which errors come from that.

It must never decide what a recovery consists of: the plan does, and `rejoin` carries it out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

import torch

from swift_agent.errors import CannotConnect, ReplicaMismatch, UsageError
from swift_agent.wire import messages as msg
from swift_agent.worker.checks.checks import Checks
from swift_agent.worker.checks.lookout import Lookout
from swift_agent.worker.groups.errors import RebuildFailed, WornOut
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.loop.checkpointing import Checkpointing
from swift_agent.worker.loop.dry_runs import DryRuns
from swift_agent.worker.loop.peer_errors import is_communication_error, is_own, own
from swift_agent.worker.loop.ways_out import WaysOut
from swift_agent.worker.rejoin.rejoin import Rejoin
from swift_agent.worker.rejoin.witness import Witnesses
from swift_agent.worker.replicas.comparison import NEVER, Comparison
from swift_agent.worker.replicas.kernels import Kernels
from swift_agent.worker.replicas.modes import Modes
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.tracked import Tracked
from swift_recovery.checkpoint.writer import CheckpointError
from swift_recovery.errors import CannotReplay, CutReplay, LostLog
from swift_recovery.planning.plan import Plan

# At least, between two words of a replacement that repeats iterations.
TELL_S = 10.0
# Operations of stopped groups end within milliseconds, if at all.
QUIET_TIMEOUT = timedelta(seconds=20)


class Recovery:
    """One per worker, from the first point of the loop on. *phases_s*: seconds of the set-up of a replacement, by
    phase."""

    def __init__(
        self, place: Place, supervisor: Supervisor, groups: ProcessGroups, tracked: Tracked, device: torch.device,
        dry_runs: DryRuns, out: WaysOut, checks: Checks, *, lookout: Lookout | None = None,
        checkpointing: Checkpointing | None = None, comparison: Comparison | None = None,
        witnesses: Witnesses | None = None, phases_s: dict[str, float] | None = None, kernels: Kernels | None = None,
    ) -> None:  # fmt: skip
        self._place, self._supervisor, self._groups, self._tracked = place, supervisor, groups, tracked
        self._dry_runs, self._out, self._checks, self._lookout = dry_runs, out, checks, lookout
        self._checkpointing, self._comparison, self._witnesses = checkpointing, comparison, witnesses
        self._rejoin = Rejoin(place, supervisor, groups, tracked, device, self.wait_quiet, witnesses, kernels)
        self.phases_s: dict[str, float] = phases_s or {}
        """Of the recovery that nobody was told of yet."""
        self.is_untold = 0
        """The generation that this worker has joined in a recovery and has completed no step in; 0: none."""
        self._began_s = 0.0
        """When the part of a recovery that comes after joining began, on the monotonic clock."""
        self._told_s = 0.0
        self._repeats_from = 0
        self.compare_at = NEVER
        """After so many finished iterations replicas are compared."""
        self.modes = Modes(
            tracked.state, place.rank, tracked.replicas, lambda: groups.store, supervisor.note,
            lambda: supervisor.interrupted,
        )  # fmt: skip

    def was_cut(self, error: Exception) -> bool:
        """Whether *error* comes from the failure of a peer. Everything else is the script's own."""
        if isinstance(error, (UsageError, CheckpointError)):
            return False
        if self._supervisor.interrupted:
            return True
        if self._tracked.updates.failed is not None:
            return False
        if not is_communication_error(error) or is_own(error):
            return False
        # A group that the script makes is connected, too.
        hears = self._supervisor.reconnect if isinstance(error, RebuildFailed) else self._supervisor.confirm
        if hears(error):
            return True
        own(error)  # nobody shall wait for that once more
        return False

    def run(self, *, staying: bool = False) -> bool:
        """Join the others in the newest generation; returns True with live groups and the plan's state. May take
        several tries. *staying*: in the middle of an iteration; False if that has to be started over.
        """
        self.wait_quiet()
        self._dry_runs.leave()
        messages, was_there = self._tracked.messages, self._place.status != "empty"
        aside = messages.aside() if messages is not None else contextlib.nullcontext()
        try:
            with aside, self._looking_away():
                if not self._rejoin.run(staying=staying):
                    return False
        except (CutReplay, LostLog) as error:
            self._out.have_replaced(str(error))
        except CannotConnect as error:
            # Whom no process can connect is not replaced for ever: it counts as a failure of its own.
            self._out.have_replaced(str(error), by_itself=not isinstance(error.__cause__, WornOut))
        except CannotReplay as error:
            self._out.cannot_repeat(str(error))
        except ReplicaMismatch as error:
            self._out.restart_all(f"{error}")
        if self._checkpointing is not None:
            self._checkpointing.recovered(self._rejoin.iteration)
        if self._witnesses is not None:
            self._witnesses.begin()
        place = self._place
        place.has_recovered = True
        self._checks.recovered()
        self.modes.recovered(self.plan, was_there=was_there)
        place.has_to_remake = place.remakes or place.lacks
        self.compare_from(self._rejoin.iteration, undisturbed=False)
        if self._comparison is not None and self._comparison.is_ahead:
            self.compare(self._place.here.iteration)
        self.phases_s |= self._rejoin.phases_s
        self.is_untold = self._supervisor.generation
        self._began_s = self._told_s = time.monotonic()
        self._repeats_from = self._place.here.iteration
        return True

    @property
    def plan(self) -> Plan | None:
        """By which this worker has entered its generation; None if there is another one already."""
        go = self._supervisor.entered
        return None if go is None else go.plan

    def may_stay(self) -> bool:
        """Whether the plan to come has this worker stay where it is, in the middle of its iteration."""
        return self._rejoin.accepts(self._supervisor.peek_go())

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

    def wait_quiet(self) -> None:
        """Until nothing of the stopped groups touches a tensor; a process in which that does not come is replaced."""
        self._supervisor.wait_aborted()
        if not self._groups.wait_quiet(QUIET_TIMEOUT):
            self._out.have_replaced("operations of the stopped process groups do not end", by_itself=True)
        self._tracked.reset_shards()

    def restore_start(self, what: str = "iteration") -> None:
        place = self._place
        if place.start.is_spoilt():
            number = place.here.iteration if what == "iteration" else place.here.sections
            self._out.have_replaced(
                f"{what} {number} was interrupted after it had changed parameters that belong to no tracked optimizer, "
                "for the first time in this process or through .data. Their old values were not kept"
            )
        place.start.restore()

    def compare_from(self, iteration: int, *, undisturbed: bool) -> None:
        if self._comparison is not None:
            self._comparison.begin(iteration, undisturbed=undisturbed)
            self.compare_at = self._comparison.due

    def compare(self, number: int) -> None:
        """So many iterations are done, on all ranks alike."""
        assert self._comparison is not None
        self._comparison.take(number)
        self.compare_at = self._comparison.due

    def end_replay(self, *, logs_s: float) -> None:
        """All iterations are repeated, which the others are told; for so long it has waited for logs."""
        try:
            self._rejoin.end_replay()
        except LostLog as error:
            self._out.have_replaced(str(error))
        except CannotReplay as error:
            self._out.cannot_repeat(str(error))
        now_s = time.monotonic()
        self.phases_s |= {"logs": logs_s, "replay": now_s - self._began_s - logs_s}
        self._began_s = now_s

    def tell_how_far(self) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_S:
            self._told_s = now_s
            place, begin = self._place, self._repeats_from
            num_done, num = place.here.iteration - begin, place.replays_before - begin
            self._supervisor.note(f"has repeated {num_done} of {num} iterations in {now_s - self._began_s:.0f} s")

    def starts_over(self, set_up_s: float) -> None:
        """All workers have been started again, for which this one has set up so long: that, too, is over when they have
        loaded the checkpoint, if there is one, and made an iteration."""
        self.phases_s["set-up"] = set_up_s
        self.is_untold = self._supervisor.generation
        self._began_s = time.monotonic()

    def tell_resumed(self) -> None:
        """The first iteration (or section) after a recovery is done: that is when the job runs again."""
        phases = {**self.phases_s, "iteration": time.monotonic() - self._began_s}
        self._supervisor.send(msg.Resumed(self.is_untold, self._place.here.iteration, phases))
        self.is_untold, self.phases_s = 0, {}
