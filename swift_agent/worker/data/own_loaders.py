"""DataLoaders that a script goes through by itself, from iteration to iteration: `batch = next(it)`.

Nobody but the script knows where it is in one, and a replacement starts over with it. What its order is drawn from may
be something else there, so that its first batch need not be what the run began with (`own_data`); and an iteration that
draws from it draws the next one when it is run again. So it counts that an iterator goes on:

    a batch for iteration 4, of an iterator that has given one for iteration 3, to nobody of the job --> goes on

A whole pass between two iterations, or in a section, does not. This module must never change what a loader gives.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from swift_agent.torch_private import loaders
from swift_agent.worker.tracked.loop_state import Place

_DRAWN_FOR = "_swift_drawn_for"
_num_of_job = 0


class OfTheJob(Iterator[Any]):
    """*batches*, which the job draws: from whatever loaders, they are not the script's own."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        global _num_of_job
        _num_of_job += 1
        try:
            return next(self._batches)
        finally:
            _num_of_job -= 1


class OwnLoaders:
    """One per job. *goes_on*: the script has such an iterator; *is_drawn_inside*: and an iteration draws from it."""

    def __init__(self, place: Place) -> None:
        self._place, self._script = place, threading.get_ident()
        self.goes_on = self.is_drawn_inside = False

    def watch(self) -> None:
        """From now on."""
        loaders.watch_draws(self._look)

    def _look(self, batches: Any) -> None:
        """One is about to be drawn."""
        place = self._place
        is_inside = place.inside == "iteration"
        passes_by = place.inside == "section" or place.is_past_section
        if _num_of_job or passes_by or threading.get_ident() != self._script:
            return
        number = place.here.iteration + (place.owed is not None and not is_inside)
        last = vars(batches).get(_DRAWN_FOR)
        vars(batches)[_DRAWN_FOR] = number
        if loaders.has_given(batches) and last is not None and last != number:
            self.goes_on = True
            self.is_drawn_inside = self.is_drawn_inside or is_inside

