"""Runs sections (`@job.resilient`) and barriers until they count.

A section that a failure cuts begins again with the state that it began with. It must never make an update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from swift_agent.worker.checks.checks import Checks
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.loop.dry_runs import DryRuns
from swift_agent.worker.loop.peer_errors import NOT_LOGGED, is_communication_error, own
from swift_agent.worker.loop.recovery import Recovery
from swift_agent.worker.loop.ways_out import WaysOut
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.tracked import Tracked
from swift_recovery.errors import CannotReplay

R = TypeVar("R")


class Sections:
    """One per worker, from the first point of the loop on."""

    def __init__(
        self, place: Place, supervisor: Supervisor, groups: ProcessGroups, tracked: Tracked, recovery: Recovery,
        dry_runs: DryRuns, out: WaysOut, checks: Checks,
    ) -> None:  # fmt: skip
        self._place, self._supervisor, self._groups, self._tracked = place, supervisor, groups, tracked
        self._recovery, self._dry_runs, self._out, self._checks = recovery, dry_runs, out, checks
        self._told_local: set[str] = set()

    def barrier(self, call: Callable[[], None], way: str) -> None:
        """A section that draws nothing, and has no result. *way*: to where the script makes it."""
        place = self._place
        if place.is_before_epoch:
            return
        if place.here.sections < place.dry_sections:  # the others have passed it
            with place.lock:
                place.here.sections += 1
            return
        self.run(call, seeded=False, what=f"barrier {way}")

    def run(self, call: Callable[[], R], *, seeded: bool = True, what: str = "section") -> R:
        place, supervisor = self._place, self._supervisor
        while True:
            if seeded:
                place.seeds.for_section(place.here.sections)
            try:
                if place.here.sections >= place.dry_sections and not place.is_before_epoch:
                    if place.is_elsewhere(what):
                        self._out.tell_elsewhere(what, place.begun_by_others)
                    place.begun = what, place.here.iteration, place.here.sections
                    place.keep_start()
                if supervisor.interrupted and not place.replays:
                    self._recovery.run()
                if place.is_before_epoch:
                    return self._dry_runs.section(call)
                if place.here.sections < place.dry_sections:
                    between = place.repeats and place.here.sections >= place.restored_sections
                    return self._between_logs(call) if between else self._dry_runs.section(call)
                place.keep_start()  # what was received belongs to it, too
                if seeded:
                    place.seeds.for_section(place.here.sections)
                self._checks.begin_section(place.here.sections, self._tracked if seeded else None)
                self._tracked.objects.begin("section", place.here.sections, dry_run=False)
                place.enter("section")
                result = call()
                self._checks.sections.end()
                with place.lock:
                    supervisor.check()  # what a cut collective gave must not be handed out
                    place.inside = ""
                    place.here.sections += 1
                self._tracked.end()
                self._checks.end_section()
            except Exception as error:
                if not self._recovery.was_cut(error):
                    own(error)
                    raise
                del error
                if place.inside:
                    self._recovery.wait_quiet()
                    self._checks.cut_section()
                    self._recovery.restore_start("section")
                if self._tracked.pipelines is not None:
                    self._tracked.pipelines.rewind()
                place.leave()
                continue
            if self._recovery.is_untold:
                self._recovery.tell_resumed()
            return result

    def _between_logs(self, call: Callable[[], R]) -> R:
        """A replacement that repeats iterations really uses what a section gives it: that must not be invented."""
        messages = self._tracked.messages
        assert messages is not None
        try:
            with self._place.without_points(), self._groups.refused(NOT_LOGGED), messages.none_between():
                result = call()
        except Exception as error:
            if not isinstance(error, CannotReplay) and not is_communication_error(error):
                raise
            self._out.give_up(f"a section cannot be repeated: {error}")
        with self._place.lock:
            self._place.here.sections += 1
        return result

    def tell_local_result(self) -> None:
        """Of a section whose result no iteration has used so far: mostly a validation, and printed."""
        what, self._place.local_result = self._place.local_result, ""
        if what not in self._told_local:
            self._told_local.add(what)
            self._supervisor.note(
                f"the other ranks had finished this section, so {what} gave this rank its own values only. What the "
                "script keeps of them differs from the other ranks. If training depends on it, track it"
            )
