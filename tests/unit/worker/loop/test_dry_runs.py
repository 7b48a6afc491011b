"""What runs for its result only is no place to join the others at."""

from __future__ import annotations

import contextlib
import copy
import threading
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from swift_agent.wire.environment import NO_AGENT
from swift_agent.wire.standing import MyStanding
from swift_agent.worker.checks.checks import Checks
from swift_agent.worker.job.job import Job
from swift_agent.worker.loop.dry_runs import DryRuns
from swift_agent.worker.loop.passed_over import PassedOver
from swift_agent.worker.loop.protected import Protected
from swift_agent.worker.loop.sections import Sections
from swift_agent.worker.loop.ways_out import WaysOut
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.object_results import ObjectResults
from swift_agent.worker.tracked.seeds import Seeds
from swift_agent.worker.tracked.tracked import Tracked
from swift_recovery.state.snapshots import by_hand


class Running:
    """Counts sections."""

    num_sections = 0

    def section(self, call: Any) -> Any:
        self.num_sections += 1
        return call()


def test_a_section_inside_a_dry_run_is_a_part_of_it() -> None:
    """Taken for one by itself it would have the others joined, and what is left of the dry run would speak to them."""
    place, running = Place(0, Seeds("iteration", 0, 0), threading.RLock()), Running()
    job = Job(0, 0, 1, torch.device("cpu"), place, cast(Any, running), None)
    job._begun = True
    section = job.resilient(lambda: 5)
    nothing = lambda *args, **kwargs: None  # noqa: E731
    dry_runs = DryRuns(place, cast(Any, SimpleNamespace(aborted=None, local=contextlib.nullcontext)))
    dry_runs.tracked = cast(Any, SimpleNamespace(
        restore_layouts=nothing, layouts_for=nothing, begin=nothing, end=nothing,
        without_reduction=lambda finite: contextlib.nullcontext(), updates=SimpleNamespace(cut=nothing),
        state=SimpleNamespace(loose_parameters=list), objects=ObjectResults(1),
    ))  # fmt: skip
    assert dry_runs.iteration(section, 0) == dry_runs.iteration_of_replacement(section) == 5
    outer = job.resilient(section)
    assert dry_runs.section(outer) == 5
    assert running.num_sections == 0
    assert section() == 5 and running.num_sections == 1


class Worker:
    """A model, an optimizer and an average of the weights, tracked without an agent."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.ema = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.place = Place(0, Seeds("iteration", 0, 0), threading.RLock())
        pending = {"models": {"model": self.model, "ema": self.ema}, "optimizers": {"o": self.optimizer}, "others": {}}
        self.tracked = Tracked(pending, [0, 1], 2, None)
        self.place.hold(self.tracked)
        self.dry_runs = DryRuns(self.place, cast(Any, SimpleNamespace(aborted=None, local=contextlib.nullcontext)))
        self.dry_runs.tracked = self.tracked

    def iteration(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 3)).sum().backward()
        self.optimizer.step()
        self.average()

    def average(self) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)

    def values(self) -> list[list[float]]:
        return [p.flatten().tolist() for p in self.tracked.state.parameters()]

    def take(self, source: Worker) -> None:
        for mine, theirs in zip(self.tracked.state.parameters(), source.tracked.state.parameters(), strict=True):
            mine.data.copy_(theirs)
        self.place.take_over(copy.deepcopy(source.place.offer()), 1)


def worker_that_has_done_one() -> Worker:
    worker = Worker()
    worker.place.keep_point()
    worker.place.keep_start()
    worker.tracked.begin(0)
    worker.iteration()
    worker.tracked.updates.finish()
    worker.place.here.iteration = 1
    worker.place.keep_start()  # of a section after it
    return worker


def test_what_a_replacement_does_on_its_way_changes_no_average() -> None:
    """In the iteration that it runs for its result, and after it."""
    source, replacement = worker_that_has_done_one(), Worker()
    replacement.place.status = "empty"
    replacement.take(source)
    replacement.dry_runs.iteration_of_replacement(replacement.iteration)
    assert replacement.values() == source.values()
    replacement.average()
    replacement.place.put_back_arrived()  # a source now
    assert replacement.values() == source.values()
    replacement.average()
    replacement.place.keep_start()
    assert replacement.values() == source.values()
    replacement.average()  # it has caught up
    replacement.place.put_back_arrived()
    assert replacement.values() != source.values()


@pytest.mark.parametrize("owes", [True, False])
@pytest.mark.parametrize("eager_bytes", [by_hand.EAGER_BYTES, 0])
def test_what_a_survivor_runs_once_more_averages_once(
    owes: bool, eager_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut in its second iteration, before its update (which a replica has), or after that."""
    monkeypatch.setattr(by_hand, "EAGER_BYTES", eager_bytes)
    survivor, undisturbed = worker_that_has_done_one(), worker_that_has_done_one()
    survivor.tracked.begin(1)
    if owes:
        survivor.average()  # a momentum encoder's comes first
    else:
        survivor.iteration()
        undisturbed.tracked.begin(1)
        undisturbed.iteration()
    survivor.place.start.restore()
    survivor.place.here.iteration = 1 if owes else 2
    survivor.dry_runs.iteration(survivor.iteration, 1)
    # Owed: it begins as it was, should it be run after all.
    assert survivor.values() == undisturbed.values()
    assert not survivor.place.start.by_hand.is_spoilt()


def test_what_an_iteration_leaves_is_made_once_more_without_effect() -> None:
    worker, held = worker_that_has_done_one(), torch.zeros(0)

    def iteration() -> None:
        nonlocal held
        held = torch.rand(3)
        worker.optimizer.param_groups[0]["lr"] *= 0.5
        with torch.no_grad():
            worker.model.bias.mul_(2.0)  # clamping, say
        worker.iteration()

    worker.place.seeds.settle()
    worker.place.keep_start()
    before = worker.values()
    worker.dry_runs.remake(iteration, range(3, 5), has_to_fit=True)
    made = held
    worker.place.seeds.for_iteration(4)
    assert torch.equal(made, torch.rand(3))
    assert worker.values() == before and worker.optimizer.param_groups[0]["lr"] == 0.1
    assert worker.place.remaking is None


@pytest.mark.parametrize("remakes", [True, False])
def test_a_checkpoint_does_not_have_what_an_iteration_had_left(remakes: bool) -> None:
    source, successor = worker_that_has_done_one(), Worker()
    source.place.carries, source.place.remakes = "a tensor", remakes
    successor.place.status = "empty"
    successor.place.take_over(copy.deepcopy(source.place.offer()), 1, from_checkpoint=True)
    assert successor.place.has_to_remake and not successor.place.carries
    notes: list[str] = []
    calls: list[int | None] = []
    over: Any = object.__new__(PassedOver)
    over._place, over._dry_runs, over.is_new = successor.place, successor.dry_runs, True
    over._supervisor = SimpleNamespace(note=notes.append)
    successor.place.keep_start()
    over.remake(lambda: calls.append(successor.place.remaking), 1)
    assert calls == ([0] if remakes else []) and not successor.place.has_to_remake
    assert "the checkpoint of iteration 1 does not have what the iteration before had left" in notes[0]


class Cut(Exception):
    pass


class Averaging:
    """An iteration with what recipes keep beside the model: a momentum encoder, updated before the forward; an average
    of parameters and of BatchNorm's buffers, after the step; metrics in between, in which it may be cut."""

    def __init__(self, cut_at: str = "") -> None:
        torch.manual_seed(0)
        self.cut_at = cut_at
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.key = copy.deepcopy(self.net).requires_grad_(False)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.place = Place(0, Seeds("iteration", 0, 0), threading.RLock())
        models = {"net": self.net, "key": self.key, "average": self.average}
        self.tracked = Tracked({"models": models, "optimizers": {"o": self.optimizer}, "others": {}}, [0, 1], 2, None)
        self.place.hold(self.tracked)
        groups = SimpleNamespace(aborted="stopped", dry_run=contextlib.nullcontext)
        supervisor = cast(Any, SimpleNamespace(note=pytest.fail, environment=NO_AGENT))
        self.running = Protected(self.place, supervisor, cast(Any, groups), torch.device("cpu"), None)
        self.over = self.running.assemble(self.tracked).iterations.over

    def metric(self, name: str) -> None:
        if name == self.cut_at:
            raise Cut

    def iteration(self) -> None:
        torch.manual_seed(self.place.here.iteration)  # a dry run's own result need not be the same
        x = torch.randn(8, 3)
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.net.parameters(), strict=True):
                mine.data.mul_(0.9).add_(0.1 * theirs)
            self.key(x)
        loss = self.net(x).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.metric("after the step")
        self.average.update_parameters(self.net)
        self.metric("after the average")

    def run(self, number: int) -> None:
        for _ in range(number):
            self.place.keep_start()
            self.tracked.begin(self.place.here.iteration)
            try:
                self.iteration()
            except Cut:
                self.cut_at = ""
                self.over.run(self.iteration)
                self.running.dry_runs.leave()
                continue
            self.tracked.updates.finish()
            self.place.here.iteration += 1

    def values(self) -> dict[str, list[float]]:
        models = nn.ModuleDict(self.tracked.state.models)
        return {name: value.flatten().tolist() for name, value in models.state_dict().items()}


@pytest.mark.parametrize("cut_at", ["after the step", "after the average"])
def test_what_was_cut_after_its_update_ends_as_if_it_had_not_been(cut_at: str) -> None:
    """What had been changed by then stays, and what had not been is changed by the dry run, from what stays."""
    cut, undisturbed = Averaging(), Averaging()
    for worker in (cut, undisturbed):
        worker.run(2)
    cut.cut_at = cut_at
    for worker in (cut, undisturbed):
        worker.run(3)
    assert cut.values() == undisturbed.values()
    assert undisturbed.values()["average.n_averaged"] == [5]


@pytest.mark.parametrize(
    ("theirs", "mine", "told"),
    [
        ("barrier a", "barrier a", ""),
        ("barrier a", "barrier b", "has come to a barrier"),
        ("section", "barrier b", "and the others are in a section"),
        ("iteration", "barrier b", "and the others are in an iteration"),
        ("barrier a", "section", "and the others are in a barrier"),
    ],
)
def test_a_replacement_that_would_meet_the_others_in_another_place_is_told(theirs: str, mine: str, told: str) -> None:
    """Barriers match anywhere, and the collectives after them would give wrong values without a word."""
    source, replacement = worker_that_has_done_one(), Worker()
    source.place.begun = theirs, 1, 0
    replacement.place.status = "empty"
    replacement.take(source)
    second = Worker()
    second.place.status = "empty"
    second.take(replacement)  # a source now, and not there itself
    assert second.place.begun_by_others == replacement.place.begun_by_others == (theirs, 1, 0)
    replacement.dry_runs.iteration_of_replacement(replacement.iteration)
    groups: Any = SimpleNamespace(store=None, generation=2)
    supervisor: Any = SimpleNamespace(interrupted=False, check=lambda: None, may_be_why="")
    recovery: Any = SimpleNamespace(is_untold=0)
    out = WaysOut(replacement.place, supervisor, MyStanding())
    checks = Checks(replacement.place, supervisor, groups, lambda why: pytest.fail(why))
    sections = Sections(
        replacement.place, supervisor, groups, replacement.tracked, recovery, replacement.dry_runs, out, checks
    )  # fmt: skip
    given_up: list[str] = []

    def give_up(why: str, **_: object) -> NoReturn:
        given_up.append(why)
        raise SystemExit

    out.give_up = give_up  # type: ignore[method-assign]
    with pytest.raises(SystemExit) if told else contextlib.nullcontext():
        sections.run(lambda: None, seeded=False, what=mine)
    assert [told in why for why in given_up] == [True] * bool(told)
    assert (replacement.place.begun_by_others is None) == (not told)
