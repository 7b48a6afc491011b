"""An `InPlace` whose answers a test gives."""

from __future__ import annotations

from collections.abc import Callable

from swift_agent.worker.in_place import Alone, Way


class Asked(Alone):
    """*when_cut*, *when_stays*, *when_agreeing*: asked with the error; *dry*: what runs is run for its result only.
    *now*: iterations and sections that are over; *inside*: one is under way."""

    def __init__(self) -> None:
        self.dry, self.now, self.inside = False, (0, 0), True
        self.when_cut: Callable[[Exception], bool] = super().was_cut
        self.when_stays: Callable[[Exception], bool] = super().stays
        self.when_agreeing: Callable[[Exception], Way] = super().after_cut_agreement

    @property
    def is_dry_run(self) -> bool:
        return self.dry

    @property
    def at(self) -> tuple[int, int]:
        return self.now

    @property
    def is_inside(self) -> bool:
        return self.inside

    def was_cut(self, error: Exception) -> bool:
        return self.when_cut(error)

    def stays(self, error: Exception) -> bool:
        return self.when_stays(error)

    def after_cut_agreement(self, error: Exception) -> Way:
        return self.when_agreeing(error)
