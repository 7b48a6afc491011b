"""Several loops in one script: a replacement, or a restart with a checkpoint, goes on in the right one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from swift_agent.worker.job.job import Job
from swift_agent.worker.tracked.epoch_loops import told_missing
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.position import Position, Units
from swift_agent.worker.tracked.seeds import Seeds
from swift_recovery.state.training_state import TrainingState

Given = tuple[int, str, int, list[float]]
"""An iteration: its number, its loop, the number of that loop's epoch, and what it is given."""


class Stop(Exception):
    """The script has been followed far enough."""


class Script:
    """The loops of a job without groups. *target*: of a replacement, *loop_is_known*: by a version that counts them."""

    def __init__(self, target: Position | None = None, *, stop_after: int | None = None) -> None:
        seeds = Seeds("iteration", 5, 0)
        seeds.settle()
        self.place, self.restored = Place(0, seeds, threading.RLock()), 0
        self.place.status = "fresh" if target is None else "empty"
        self.place.point = SimpleNamespace(restore=self.restore, restore_generators=lambda: None)  # type: ignore[assignment]
        running: Any = SimpleNamespace(at_point=self.at_point, loop_is_over=lambda: None, iterate=self.iterate)
        running.section = self.section
        self.job = Job(0, 0, 1, torch.device("cpu"), self.place, running, None)
        self.target, self.stop_after = target, stop_after
        self.job._begin = self.job._passes.begin = self.begin  # type: ignore[method-assign]
        self.given: list[Given] = []
        self.points: list[Position] = []
        self.sections: list[tuple[str, str]] = []
        self.data = DistributedSampler(range(8), num_replicas=1, rank=0)
        self.loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, sampler=self.data)
        self.train: Callable[..., None] = self.job.iteration(lambda *given: self.given.append(self.of(*given)))

    def begin(self) -> None:
        """As `Place.take_over` leaves a replacement."""
        if not self.job._begun and self.target is not None:
            nothing = TrainingState({})
            self.place.tracked = SimpleNamespace(
                count_on=id, settle=lambda: None, state=nothing, objects=SimpleNamespace(take=lambda offered: None)
            )  # type: ignore[assignment]
            self.place.tracked.give_first_steps = lambda steps: None  # type: ignore[union-attr,method-assign]
            self.place.point.install = lambda tree, rng: None  # type: ignore[method-assign]
            self.place.start = SimpleNamespace(by_hand=SimpleNamespace(settle=lambda: None))  # type: ignore[assignment]
            offer = {"position": self.offered(self.target), "start": None, "point": {}, "units": asdict(Units(1, 2))}
            self.place.take_over(offer, self.target.iteration)
            self.place.dry_sections = self.target.sections
        self.job._begun = True

    def offered(self, target: Position) -> dict[str, Any]:
        return asdict(target)

    def of(self, loop: str, epoch: int, given: list[float]) -> Given:
        return self.place.here.iteration, loop, epoch, given

    def restore(self) -> None:
        self.restored += 1

    def at_point(self) -> None:
        self.points.append(replace(self.place.here))

    def iterate(self, call: Callable[[], None]) -> None:
        call()
        self.place.here.iteration += 1
        self.place.drawn = 0
        if len(self.given) == self.stop_after:
            raise Stop

    def section(self, call: Callable[[], Any]) -> Any:
        place, here = self.place, self.place.here
        is_dry = place.is_before_epoch or here.sections < place.dry_sections
        name = call()
        self.sections.append(("dry" if is_dry else "with the others", name))
        here.sections += not place.is_before_epoch

    def epochs(self, name: str, num: int, *, num_sections: int = 0, start: int | None = None) -> None:
        for epoch in self.job.epochs(num, start=start):
            self.passes(name, epoch, self.job.batches(self.loader), num_sections)

    def passes(self, name: str, epoch: int, batches: Iterator[Any], num_sections: int = 0) -> None:
        for (batch,) in batches:
            self.train(name, epoch, batch.tolist())
            if self.place.here.batch <= num_sections:
                self.validate(f"{name} {epoch}")

    def validate(self, name: str) -> None:
        self.job.resilient(lambda: name)()


def two_phases(script: Script) -> None:
    script.epochs("head", 2)
    script.epochs("all", 4)


def tasks(script: Script) -> None:
    for number in range(3):
        script.validate(f"before {number}")
        script.epochs(f"task {number}", 2, num_sections=1)


def warm_up(script: Script) -> None:
    """Passes, and iterations without a loader, before the loop."""
    script.passes("warm-up", 0, script.job.batches(script.loader))
    for number in script.job.iterations(7):
        script.train("iterations", number, [])
    script.validate("before")
    script.epochs("all", 2)


def tail(script: Script) -> None:
    script.epochs("all", 2, num_sections=2)
    script.passes("tail", 0, script.job.batches(script.loader), num_sections=1)
    script.validate("after")
    for number in script.job.iterations(16):
        script.train("iterations", number, [])
        script.validate(f"after {number}")
    script.epochs("last", 1)


def counted(script: Script) -> None:
    for last in (3, 9):
        for number in script.job.iterations(last):
            script.train("iterations", number, [])
            script.validate(f"in {number}")
        script.validate(f"after {last}")
        script.epochs("all", 1)
    script.validate("last")


def iterations_alone(script: Script) -> None:
    for last in (2, 5):
        for number in script.job.iterations(last):
            script.train("iterations", number, [])
            script.validate(f"in {number}")
        script.validate(f"after {last}")


def told(script: Script) -> None:
    """A loop of the script's own, whose epochs it tells, before one of the job's."""
    for epoch in range(2):
        script.data.set_epoch(epoch)
        script.passes("own", epoch, script.job.batches(script.loader))
    script.epochs("all", 2)


FORMS = [two_phases, tasks, warm_up, tail, counted, iterations_alone, told]


@pytest.mark.parametrize("form", FORMS)
def test_a_replacement_goes_on_in_the_loop_of_the_others(form: Callable[[Script], None]) -> None:
    """From each point, with the same iterations, positions and sections as the others; what comes before runs dry."""
    whole = Script()
    form(whole)
    for number, point in enumerate(whole.points):
        replacement = Script(point)
        form(replacement)
        assert replacement.given == whole.given[point.iteration :], point
        assert replacement.points == whole.points[number:], point
        count = len(whole.sections) - point.sections
        made = [name for how, name in replacement.sections if how != "dry"]
        assert made == [name for _, name in whole.sections[len(whole.sections) - count :]], point
        assert replacement.place._given is None and replacement.restored == 1 and not told_missing(replacement.place)


def test_what_does_not_count_loops_means_the_first_one() -> None:
    """Checkpoints of versions before."""

    class Old(Script):
        def offered(self, target: Position) -> dict[str, Any]:
            return {name: value for name, value in super().offered(target).items() if name != "loop"}

    whole = Script()
    whole.epochs("only", 3)
    for point in whole.points:
        begun = Old(point)
        begun.epochs("only", 3)
        assert begun.given == whole.given[point.iteration :]
        assert begun.points[-1] == whole.points[-1], "and is counted from then on"


def test_a_loop_that_has_ended_for_good_is_not_trained_again() -> None:
    """A run with fewer epochs begins with the checkpoint of one that had more: what comes after the loop is whole."""
    whole = Script()
    whole.epochs("only", 3)
    begun = Script(whole.points[-1])
    begun.epochs("only", 2)
    begun.passes("after", 0, begun.job.batches(begun.loader))
    assert [(loop, len(given)) for _, loop, _, given in begun.given] == [("after", 2)] * 4


def test_a_start_of_the_scripts_own_is_that_of_its_loop() -> None:
    """The others had not begun it, and will with the same."""
    whole = Script()
    whole.passes("warm-up", 0, whole.job.batches(whole.loader))
    whole.epochs("all", 3, start=1)
    for point in whole.points:
        replacement = Script(point)
        replacement.passes("warm-up", 0, replacement.job.batches(replacement.loader))
        replacement.epochs("all", 3, start=1)
        assert replacement.given == whole.given[point.iteration :]


def test_a_script_that_ends_before_the_loop_of_the_others_is_told() -> None:
    whole = Script(stop_after=20)
    with pytest.raises(Stop):
        tasks(whole)
    replacement = Script(whole.points[-1])
    replacement.epochs("task 0", 2)
    assert not replacement.given
    assert "ends after 1 loops over job.epochs(), and has to go on in number 3" in told_missing(replacement.place)
