"""What a `Job` needs of who runs its iterations and sections; and the one without an agent, who protects nothing.

It must never do anything that makes training differ from that under an agent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch.distributed as dist

from swift_agent.worker.checks.checks import Checks
from swift_agent.worker.in_place import Alone, InPlace
from swift_agent.worker.rejoin.witness import Witnesses
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.tracked import Tracked

R = TypeVar("R")


class Running(InPlace, Protocol):
    """What a `Job` needs; `begin` comes first, once."""

    def begin(self, tracked: Tracked, witnesses: Witnesses | None) -> None:
        """The first point of the loop: from here on this worker holds state, or gets it from a survivor. *witnesses*:
        of what its iterations are given, None without an agent."""

    def at_point(self) -> None:
        """User code is between two steps."""

    def loop_is_over(self) -> None:
        """A loop of the script is: what it saves now is to be no state of which others are known to differ."""

    def iterate(self, call: Callable[[], R]) -> R:
        """Run one iteration until it counts; its result."""

    def section(self, call: Callable[[], R]) -> R:
        """Run a `@job.resilient` section until it counts; its result."""

    def barrier(self, call: Callable[[], None], way: str) -> None:
        """Make a barrier of all ranks between iterations, until it counts. *way*: to where the script makes it."""

    @property
    def checks(self) -> Checks | None:
        """What collectives are to be shown to; None without an agent."""

    def close(self) -> None:
        """The end of the run: return once no other rank can need this one."""


class Unprotected(Alone):
    """Without an agent: the same order of seeds and counts, so that the same script trains the same model."""

    checks = None

    def __init__(self, place: Place) -> None:
        self._place = place

    def begin(self, tracked: Tracked, witnesses: Witnesses | None) -> None:
        self._tracked = tracked
        number = [self._place.seeds.number]
        if dist.is_initialized():
            dist.broadcast_object_list(number)
        self._place.seeds.common = number[0]

    def at_point(self) -> None: ...

    def loop_is_over(self) -> None: ...

    def iterate(self, call: Callable[[], R]) -> R:
        place, tracked = self._place, self._tracked
        place.seeds.for_iteration(place.here.iteration)
        tracked.begin(place.here.iteration)
        place.enter("iteration")
        try:
            result = call()
        finally:
            place.leave()
        tracked.updates.finish()
        place.here.iteration += 1
        return result

    def section(self, call: Callable[[], R]) -> R:
        place = self._place
        place.seeds.for_section(place.here.sections)
        place.here.sections += 1
        return call()

    def barrier(self, call: Callable[[], None], way: str) -> None:
        self._place.here.sections += 1  # as it is a section under an agent
        call()

    def close(self) -> None: ...
