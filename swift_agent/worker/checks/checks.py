"""What is looked at where ranks could part without a word: the collectives that they make after a recovery, in sections
and between iterations, data of the script's own making, and parameters that a section changes.

This module must never make or repeat a collective, or change anything: it tells, or has all workers start again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from swift_agent.worker.checks.meetings import Meetings
from swift_agent.worker.checks.own_data import OwnData
from swift_agent.worker.checks.section_calls import SectionCalls
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.tracked import Tracked
from swift_agent.worker.updates import touched

# Collectives of a section before which it is looked whether that has changed parameters.
_NUM_LOOKED_AT = 8

# What `Place.begun` calls a step, for people.
_STEPS = {"iteration": "an iteration", "section": "a section (@job.resilient)", "barrier": "a barrier"}


def elsewhere(mine: str, others: tuple[str, int, int] | None, where: str) -> str:
    """A replacement would make step *mine*, at *where*, and meet the others in another one: one collective would be
    taken for another. *others*: what they have begun."""
    assert others is not None
    step, theirs = mine.partition(" ")[0], others[0].partition(" ")[0]
    return (
        f"a replacement has come to {_STEPS[step]} ({where}), and the others are in "
        f"{'another barrier' if step == theirs else _STEPS[theirs]}: what they did since their last batch is "
        "outside of iterations and sections, and the replacement did not do the same. Decorate the function that "
        "has it with @job.resilient"
    )


class Checks:
    """One per worker. *restart*: has all workers start again, with that reason."""

    def __init__(
        self, place: Place, supervisor: Supervisor, groups: ProcessGroups, restart: Callable[[str], NoReturn]
    ) -> None:
        self.sections = SectionCalls(place.rank, restart, lambda: supervisor.interrupted)
        self.meetings = Meetings(place, supervisor, groups)
        self.own_data = OwnData(place.rank, lambda: groups.store, restart, lambda: supervisor.interrupted)
        self._place, self._supervisor, self._groups, self._restart = place, supervisor, groups, restart
        self._tracked: Tracked | None = None
        self._parameters: touched.ChangedInSection | None = None
        self._is_in_section, self._num_looks = False, 0
        self._has_told = False

    def recovered(self) -> None:
        """From here on ranks are compared."""
        self.sections.recovered()
        self.own_data.recovered()

    def begin_section(self, number: int, tracked: Tracked | None) -> None:
        """Section *number* begins to run. *tracked*: None where the script has no say in it."""
        if tracked is not None:
            if self._tracked is not tracked or self._parameters is None:
                self._tracked, self._parameters = tracked, touched.ChangedInSection(tracked.state.optimizers.values())
            self._parameters.begin()
            self._is_in_section, self._num_looks = True, 0
        self.sections.begin(number, self._groups.store, self._groups.generation)

    def look_in_section(self) -> None:
        """A collective comes in it, where it may be cut: weights that it has put in for a while are in the model now,
        and no more at its end."""
        is_due = self._parameters is not None and self._parameters.is_due
        if self._is_in_section and is_due and not self._has_told and self._num_looks < _NUM_LOOKED_AT:
            self._num_looks += 1
            self._tell_changed()

    def end_section(self) -> None:
        """It counts."""
        if not self._has_told:
            self._tell_changed()
        self._leave_section()

    def _tell_changed(self) -> None:
        if why := self._changed(is_cut=False):
            self._has_told = True
            if self._place.rank == 0:
                self._supervisor.note(why)

    def cut_section(self) -> None:
        """It was cut, and may run again; nothing of its groups touches a tensor any more."""
        why = self._changed(is_cut=True)
        self._leave_section()
        if why:
            self._restart(f"{why}. It was cut")

    def _leave_section(self) -> None:
        self._is_in_section = False
        if self._parameters is not None:
            self._parameters.end()

    def _changed(self, *, is_cut: bool) -> str:
        if not self._is_in_section:
            return ""
        assert self._tracked is not None and self._parameters is not None
        ids = self._parameters.ids(is_cut=is_cut)
        return touched.told_of_section(self._tracked.names_of(ids)) if ids else ""
