"""Gradients that an iteration leaves without an update are a part of the state until the next one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from swift_agent.errors import PeerFailure, UsageError
from swift_agent.worker.job.job import Job
from swift_agent.worker.tracked.others import Owed
from swift_agent.worker.tracked.position import Position
from swift_agent.worker.tracked.tracked import Tracked
from swift_agent.worker.updates.left_behind import Touched, digest
from tests.support.alone_worker import AloneWorker


class Worker(AloneWorker):
    def __init__(self, rank: int = 0) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.1), rank=rank)

    def accumulate(self, value: float = 1.0) -> None:
        self.model(torch.full((4, 3), value)).sum().backward()

    def begin(self) -> None:
        self.place.keep_point()
        self.place.keep_start()
        self.tracked.begin(self.place.here.iteration)
        self.place.enter("iteration")

    def iteration(self, value: float = 1.0, *, step: bool = False) -> None:
        self.begin()
        self.accumulate(value)
        if step:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.loop.iterations.complete()

    def gradients(self) -> list[list[float] | None]:
        return [None if p.grad is None else p.grad.flatten().tolist() for p in self.model.parameters()]

    def close(self) -> None:
        # Of an iteration that is left in its middle.
        if self.tracked._carried is not None:
            self.tracked._carried.begin(dry_run=True)
        self.tracked.uses_gradients()
        self.supervisor.close()
        self.agent.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker()
    yield one
    one.close()


@pytest.fixture
def other() -> Iterator[Worker]:
    one = Worker(1)
    yield one
    one.close()


def test_a_cut_iteration_begins_again_with_what_its_predecessor_has_left(worker: Worker) -> None:
    """Twice, and with a scheduler or a section in between nothing is lost."""
    worker.iteration()
    assert worker.tracked.state.carried
    left = worker.gradients()
    for _ in range(2):
        worker.begin()
        worker.accumulate(5.0)
        worker.loop.recovery.restore_start()
        worker.place.leave()
        assert worker.gradients() == left
    worker.iteration(step=True)
    assert not worker.tracked.state.carried and worker.gradients() == [None, None]
    worker.begin()
    worker.accumulate()
    worker.loop.recovery.restore_start()
    assert worker.gradients() == [None, None]


@pytest.mark.parametrize("to_none", [True, False])
def test_what_the_script_clears_between_two_iterations_stays_cleared(worker: Worker, to_none: bool) -> None:
    worker.iteration()
    worker.optimizer.zero_grad(set_to_none=to_none)
    cleared = worker.gradients()
    worker.begin()
    worker.accumulate()
    worker.loop.recovery.restore_start()
    assert worker.gradients() == cleared


def test_a_step_that_a_scaler_leaves_out_leaves_its_gradients(worker: Worker) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pending = {"models": {"m": worker.model}, "optimizers": {"o": worker.optimizer}, "others": {"scaler": scaler}}
    tracked = Tracked(pending, [0, 1], 2, worker.supervisor)
    tracked.begin(0)
    scaler.scale(worker.model(torch.full((4, 3), float("inf"))).sum()).backward()
    scaler.step(worker.optimizer)
    scaler.update()
    assert not tracked.updates.num_steps and tracked.carry_gradients()


def test_a_replacement_gets_them_wherever_its_source_stands(worker: Worker, other: Worker) -> None:
    worker.iteration()
    left = worker.gradients()
    worker.place.keep_point()
    at_point = copy.deepcopy(worker.place.offer())
    worker.begin()
    worker.accumulate(3.0)
    inside = copy.deepcopy(worker.place.offer())
    for offer in (at_point, inside):
        other.place.status = "empty"
        other.place.take_over(offer, 1)
        assert other.place.carried == worker.place.carried != 0
        other.place.arrive()
        other.place.keep_start()
        assert other.gradients() == left and other.tracked.state.carried == worker.tracked.state.carried


def test_who_owes_the_iteration_gets_what_it_has_left(worker: Worker, other: Worker) -> None:
    """Its own are of a run without the others; but what its script has cleared since is cleared at its source, too."""
    worker.iteration()
    left = worker.gradients()
    worker.place.keep_point()
    other.begin()
    other.accumulate(9.0)
    other.place.leave()
    other.place.owed = Owed(0, lambda: None)
    other.place.roll_forward(1, lambda: copy.deepcopy(worker.place.offer()))
    assert other.gradients() == left and other.place.carried == worker.place.carried
    other.begin()
    other.accumulate(9.0)
    other.loop.recovery.restore_start()
    assert other.gradients() == left


@pytest.mark.parametrize("clears", [False, True])
def test_who_makes_it_after_all_leaves_them(worker: Worker, clears: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.loop.recovery, "wait_quiet", lambda: None)
    worker.begin()
    values = iter([7.0, 1.0])  # alone it sees other ones
    worker.loop.iterations.over.run(lambda: worker.accumulate(next(values)))
    if clears:
        worker.optimizer.zero_grad()
    assert worker.place.owed is not None
    worker.place.owed.run()
    expected = Worker()
    expected.iteration()
    assert worker.gradients() == ([None, None] if clears else expected.gradients())
    assert worker.place.here.iteration == 1 and worker.tracked.state.carried == expected.tracked.state.carried
    expected.close()


def test_an_iteration_is_repeated_with_the_modes_that_it_began_with(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that a replacement has from another rank right before it."""
    recovery, model, seen = worker.loop.recovery, worker.model, list[tuple[bool, ...]]()

    def begin(number: int) -> None:
        model.weight.requires_grad_(False)
        recovery.modes.is_due = False

    def function() -> None:
        seen.append((model.weight.requires_grad, model.bias.requires_grad, model.training))
        model.eval()
        model.bias.requires_grad_(False)
        if len(seen) == 1:
            raise PeerFailure("cut")

    recovery.modes.is_due = True
    monkeypatch.setattr(recovery.modes, "begin", begin)
    monkeypatch.setattr(recovery, "wait_quiet", lambda: None)
    monkeypatch.setattr(recovery, "was_cut", lambda error: isinstance(error, PeerFailure))
    monkeypatch.setattr(recovery, "run", lambda: True)
    monkeypatch.setattr(worker.loop.iterations, "_next_if_ahead", lambda: None)
    worker.loop.iterations.run(function)
    assert seen == [(False, True, True)] * 2


def test_a_script_touches_gradients_in_any_way() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(5)]
    for parameter in parameters[:4]:
        parameter.grad = torch.ones(2)
    touched = Touched(parameters)
    parameters[1].grad = None
    cast(Tensor, parameters[2].grad).zero_()
    parameters[3].grad = torch.ones(2)
    assert touched.by(parameters) == [False, True, True, True, False]


def test_who_was_cut_when_all_had_agreed_to_no_update_keeps_them(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.loop.recovery, "wait_quiet", lambda: None)
    worker.begin()
    worker.accumulate()
    left = worker.gradients()
    worker.tracked.updates.updated = True  # `join_agreement` has come to its end, or `finish_update`
    worker.loop.iterations.over.run(lambda: worker.accumulate(7.0))
    assert worker.gradients() == left and worker.tracked.state.carried and worker.place.here.iteration == 1


def test_an_update_that_was_cut_afterwards_has_used_them(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.loop.recovery, "wait_quiet", lambda: None)
    worker.iteration()

    def train() -> None:
        worker.accumulate()
        worker.optimizer.step()

    worker.begin()
    train()
    worker.loop.iterations.over.run(train)
    assert not worker.tracked.state.carried and worker.place.here.iteration == 2


def test_an_iteration_that_is_run_for_its_result_has_its_own_number(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it makes the update by that, and clears its gradients, which the next one adds to."""
    monkeypatch.setattr(worker.loop.recovery, "wait_quiet", lambda: None)
    job = Job(0, 0, 2, torch.device("cpu"), worker.place, worker.protected, None)

    def train() -> None:
        worker.accumulate()
        if job.iteration_number == 1:
            worker.optimizer.step()
            worker.optimizer.zero_grad()

    worker.iteration()
    worker.begin()
    train()
    worker.loop.iterations.over.run(train)
    assert worker.gradients() == [None, None] and job.iteration_number == 2


def test_zeros_are_none_and_what_cannot_be_sent_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(4))
    assert digest([parameter]) == 0
    parameter.grad = torch.zeros(4)
    assert digest([parameter]) == 0
    parameter.grad = torch.tensor([0.0, float("nan"), 0.0, 0.0])
    assert digest([parameter]) != 0
    with pytest.raises(UsageError, match=r"without a step of a tracked optimizer \(overlap_update=True\)"):
        digest([parameter], why_not="overlap_update=True")
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="some of them are sparse"):
        digest(embedding.parameters())
    assert digest(embedding.parameters(), may_refuse=False) == 0


def test_snapshots_notice_that_they_are_not_current(worker: Worker) -> None:
    place = worker.place
    worker.iteration(step=True)
    place.keep_point()
    place.here = Position(1)
    worker.iteration()
    assert not place.point.is_current() and not place.start.is_current()
    place.keep_point()
    assert place.offer()["point"]["gradients"] is not None


@pytest.mark.parametrize("clears", [True, False])
def test_whether_the_next_iteration_uses_them(worker: Worker, clears: bool) -> None:
    """Also if it is cut, and begun again."""
    told: list[str] = []
    worker.protected.out.give_up = lambda why, **_: told.append(why)  # type: ignore[assignment,method-assign]
    worker.iteration()
    worker.place.gradients_differ = True  # as a recovery has found
    worker.tracked.watch_gradients()

    def train() -> None:
        if clears:
            worker.optimizer.zero_grad(set_to_none=False)
        worker.accumulate()
        worker.optimizer.step()

    worker.begin()
    train()
    worker.tracked.updates.cut()
    worker.place.leave()
    worker.begin()
    train()
    assert told == []
    worker.loop.iterations.complete()
    assert len(told) == (not clears) and not worker.place.gradients_differ
    if told:
        assert "ended with gradients, but without a step" in told[0] and "each rank has its own" in told[0]
