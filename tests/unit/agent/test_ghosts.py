"""What runs for its result only is no place to join the others at."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any, cast

import torch

from swift_agent.ghosts import Ghosts
from swift_agent.place import Place, Seeds
from swift_agent.session import Job


class Running:
    """Counts sections."""

    num_sections = 0

    def section(self, call: Any) -> Any:
        self.num_sections += 1
        return call()


def test_a_section_inside_a_ghost_is_a_part_of_it() -> None:
    """Taken for one by itself it would have the others joined, and what is left of the ghost would speak to them."""
    place, running = Place(0, Seeds("iteration", 0, 0), threading.RLock()), Running()
    job = Job(0, 0, 1, torch.device("cpu"), place, cast(Any, running), None)
    job._begun = True
    section = job.resilient(lambda: 5)
    nothing = lambda *args, **kwargs: None  # noqa: E731
    ghosts = Ghosts(place, cast(Any, SimpleNamespace(aborted=None, local=contextlib.nullcontext)))
    ghosts.tracked = cast(Any, SimpleNamespace(
        restore_layouts=nothing, layouts_for=nothing, begin=nothing, end=nothing,
        without_reduction=lambda finite: contextlib.nullcontext(), updates=SimpleNamespace(cut=nothing),
        state=SimpleNamespace(loose_parameters=list),
    ))  # fmt: skip
    assert ghosts.iteration(section, 0) == ghosts.iteration_of_newcomer(section) == 5
    outer = job.resilient(section)
    assert ghosts.section(outer) == 5
    assert running.num_sections == 0
    assert section() == 5 and running.num_sections == 1
