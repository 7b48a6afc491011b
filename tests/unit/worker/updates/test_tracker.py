"""Whether the update of an iteration has been made, at every point where a stop can cut it; with a real supervisor."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from swift_agent.errors import PeerFailure, UsageError
from swift_agent.wire import messages as wire
from swift_agent.wire.channel import WorkerChannel
from swift_agent.worker.in_place import Way
from swift_agent.worker.line import agent_line
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.updates.around_steps import _Seen
from swift_agent.worker.updates.tracker import UpdateTracker
from swift_recovery.planning.plan import Plan
from tests.support.asked import Asked
from tests.support.odd_optimizers import Counted, Listed, Momentum


class Worker:
    """Two models, one optimizer each, tracked under a supervisor whose agent is this test."""

    def __init__(
        self, make: Callable[[Any], torch.optim.Optimizer], num: int, agree: Callable[[], None] | None = None
    ) -> None:
        torch.manual_seed(0)
        self.models = [nn.Linear(3, 2) for _ in range(num)]
        self.optimizers = [make(model.parameters()) for model in self.models]
        ours, theirs = socket.socketpair()
        self.agent = WorkerChannel(theirs)
        self.agent.sock.settimeout(5.0)
        self.supervisor = Supervisor(WorkerChannel(ours), 0)
        named = {str(i): opt for i, opt in enumerate(self.optimizers)}
        self.in_place = Asked()
        self.tracker = UpdateTracker(named, self.supervisor, agree, self.in_place)
        self.heard = threading.Event()
        self.supervisor.start(wire.Hello(0, 1), self.report, lambda why, generation: self.heard.set())
        assert self.agent.receive()["op"] == "hello"
        self.enter(1)

    def go(self, generation: int) -> None:
        self.agent.send({"op": "go", "generation": generation, "plan": Plan("fresh", "w").to_json(), "world_size": 1,
                         "store": {"host": "h", "port": 1, "session_port": 2, "token": ""}})

    def enter(self, generation: int) -> None:
        self.go(generation)
        self.supervisor.wait_go()

    def report(self) -> dict[str, Any]:
        return {"updated": self.tracker.updated, "mixed": self.tracker.mixed, "state": self.values()}

    def stop(self, generation: int = 1) -> None:
        """The stop is heard when this returns; the report comes as soon as it may."""
        self.heard.clear()
        self.agent.send({"op": "stop", "generation": generation, "why": "w"})
        assert self.heard.wait(5.0)

    def reported(self) -> dict[str, Any]:
        message = self.agent.receive()
        assert message["op"] == "report"
        found: dict[str, Any] = message["report"]
        return found

    def values(self) -> list[list[float]]:
        return [p.detach().flatten().tolist() for model in self.models for p in model.parameters()]

    def backward(self, index: int, value: float = 1.0) -> None:
        self.optimizers[index].zero_grad()
        self.models[index](torch.full((2, 3), value)).sum().backward()

    def stopped_before_the_step(self) -> list[list[float]]:
        """Begin an iteration, which is stopped; its step does not begin. The values that it leaves as they were."""
        self.tracker.begin()
        self.backward(0)
        before = self.values()
        self.stop()
        assert self.reported() == {"updated": False, "mixed": False, "state": before}
        with pytest.raises(PeerFailure):
            self.optimizers[0].step()
        return before

    def iteration(self, apart: bool = False) -> None:
        """A whole one; *apart*: a backward between the steps."""
        self.tracker.begin()
        if not apart:
            for i in range(len(self.models)):
                self.backward(i)
        for i, optimizer in enumerate(self.optimizers):
            if apart:
                self.backward(i)
            optimizer.step()
        assert self.tracker.updated
        self.tracker.finish()

    def close(self) -> None:
        self.supervisor.close()
        self.agent.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, 0.1)

    def build(
        optimizer: Callable[[Any], torch.optim.Optimizer] = adam, num: int = 1, agree: Callable[[], None] | None = None
    ) -> Worker:
        made.append(Worker(optimizer, num, agree))
        return made[-1]

    yield build
    for worker in made:
        worker.close()


def test_untouched_before_the_step_and_complete_after_it(make: Callable[..., Worker]) -> None:
    worker = make()
    worker.tracker.begin()
    worker.backward(0)
    assert not worker.tracker.updated and worker.tracker.num_steps == 0
    worker.optimizers[0].step()
    assert worker.tracker.updated and worker.tracker.num_steps == 1
    worker.tracker.finish()
    assert not worker.tracker.updated


def test_a_stop_before_the_step_lets_no_step_begin(make: Callable[..., Worker]) -> None:
    worker = make()
    before = worker.stopped_before_the_step()
    worker.tracker.cut()
    assert worker.values() == before and not worker.tracker.updated and not worker.tracker.mixed


def test_a_stop_inside_the_step_waits_for_its_end(make: Callable[..., Worker]) -> None:
    worker = make()
    worker.tracker.begin()
    worker.backward(0)
    worker.optimizers[0].register_step_pre_hook(lambda *_: worker.stop())  # behind the fence
    worker.optimizers[0].step()
    assert worker.reported() == {"updated": True, "mixed": False, "state": worker.values()}
    worker.tracker.cut()
    assert worker.tracker.updated


def test_a_step_with_a_closure_that_is_cut_leaves_no_state_and_no_deadlock(make: Callable[..., Worker]) -> None:
    worker = make(lambda p: torch.optim.LBFGS(p, lr=0.1))
    worker.tracker.begin()
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        worker.backward(0)
        if calls == 2:  # parameters have moved since the first
            worker.stop()
            raise RuntimeError("a collective was aborted")
        return float(sum(p.detach().sum() for p in worker.models[0].parameters()))

    with pytest.raises(RuntimeError, match="aborted"):
        worker.optimizers[0].step(closure)
    worker.tracker.cut()
    assert worker.reported()["mixed"] is True and worker.tracker.mixed


@pytest.mark.parametrize("num", [1, 2])
def test_an_agreement_that_was_cut_goes_on_if_all_do(make: Callable[..., Worker], num: int) -> None:
    """From where the step stands. A later stop is answered when the update is whole."""
    cut = False

    def agree() -> None:
        if cut:
            worker.stop()
            raise ConnectionError("the agreement was cut")

    worker = make(num=num, agree=agree)
    worker.iteration()  # now it is known that no backward lies between the steps
    cut = True
    reports: list[dict[str, Any]] = []

    def goes_on(error: Exception) -> Way:
        reports.append(worker.reported())  # what all do is decided from the reports
        worker.supervisor.enter()
        return "update" if isinstance(error, ConnectionError) else ""

    worker.in_place.when_agreeing = goes_on
    worker.tracker.begin()
    for index in range(num):
        worker.backward(index)
    before = worker.values()
    worker.optimizers[-1].register_step_pre_hook(lambda *_: worker.stop(2))
    for optimizer in worker.optimizers:
        optimizer.step()
    assert worker.tracker.updated and worker.values() != before
    assert reports == [{"updated": False, "mixed": False, "state": before}]
    assert worker.reported() == {"updated": True, "mixed": False, "state": worker.values()}
    worker.tracker.finish()


def test_who_stays_in_its_iteration_agrees_again(make: Callable[..., Worker]) -> None:
    """Whether it was cut in the agreement or right after it."""
    errors: list[Exception] = []
    cuts = ["in it", "after it", "in it"]

    def agree() -> None:
        kind = cuts.pop(0) if cuts else ""
        if kind:
            worker.stop(worker.supervisor.generation)
        if kind == "in it":
            raise ConnectionError("the agreement was cut")

    worker = make(agree=agree)

    def goes_on(error: Exception) -> Way:
        errors.append(error)
        worker.reported()
        worker.enter(worker.supervisor.generation + 1)
        return "agree"

    worker.in_place.when_agreeing = goes_on
    worker.iteration()
    assert [type(error) for error in errors] == [ConnectionError, PeerFailure, ConnectionError]
    worker.stop(worker.supervisor.generation)
    worker.reported()  # no step is under way any more
    cuts.append("in it")
    worker.enter(worker.supervisor.generation + 1)
    worker.tracker.begin()
    worker.tracker.join_agreement()
    assert len(errors) == 4
    worker.tracker.finish()


def test_after_a_first_step_an_agreement_that_was_cut_is_the_end_of_the_iteration(make: Callable[..., Worker]) -> None:
    """A backward lay between the steps, so nobody has said that he could still make the update; and to wait for what
    all do, with a step under way, would be to wait for ever."""
    cut = False

    def agree() -> None:
        if cut:
            raise ConnectionError("the agreement was cut")

    worker = make(num=3, agree=agree)
    worker.in_place.when_agreeing = lambda error: pytest.fail("asked")

    def steps() -> None:
        worker.tracker.begin()
        worker.backward(0)
        worker.optimizers[0].step()
        for index in (1, 2):
            worker.backward(index)
        for optimizer in worker.optimizers[1:]:
            optimizer.step()

    steps()  # now it is known that a backward lies between the first two only
    worker.tracker.finish()
    before, cut = worker.values(), True
    with pytest.raises(ConnectionError):
        steps()
    worker.stop()
    worker.tracker.cut()
    assert worker.reported()["updated"] is False
    assert worker.values() == before or worker.tracker.mixed


def test_who_makes_no_step_agrees_too(make: Callable[..., Worker]) -> None:
    """The others wait for all."""
    agreed: list[int] = []
    worker = make(agree=lambda: agreed.append(worker.tracker.num_steps))
    worker.tracker.begin()
    worker.tracker.join_agreement()
    worker.tracker.finish()
    worker.tracker.begin()
    worker.backward(0)
    worker.optimizers[0].step()
    worker.tracker.join_agreement()
    worker.tracker.finish()
    assert agreed == [0, 0]
    with worker.tracker.repeating():
        worker.tracker.begin()
        worker.tracker.join_agreement()
    worker.tracker.begin(dry_run=True)
    worker.tracker.join_agreement()
    assert agreed == [0, 0]


def test_an_update_that_a_stopped_generation_counts_on_is_not_made(make: Callable[..., Worker]) -> None:
    worker = make()
    worker.stop(1)
    worker.reported()
    worker.go(2)
    go = worker.supervisor.peek_go()
    assert worker.supervisor.enter_update(go.generation)
    worker.supervisor.leave()
    worker.stop(2)
    assert not worker.supervisor.enter_update(go.generation)
    with worker.supervisor.fence:
        assert not worker.supervisor.is_ahead(go)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # what `die` raises
def test_a_worker_that_has_ended_well_is_not_killed_for_what_it_is_still_asked(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent asks for the rate from time to time; the answer may find the channel closed."""
    died: list[str] = []

    def die(why: str) -> NoReturn:
        died.append(why)
        raise SystemExit  # of this thread: nothing of the worker goes on

    monkeypatch.setattr(agent_line, "_die", die)
    worker = make()
    worker.supervisor.close()
    worker.supervisor.send(wire.At(7))
    assert not died
    other = make()
    other.agent.close()
    deadline_s = time.monotonic() + 10.0
    while not died and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert died[0] == "its agent is gone"


@pytest.mark.parametrize("num_before", [0, 2])
def test_steps_apart_are_taken_back(make: Callable[..., Worker], num_before: int) -> None:
    """A backward lies between the steps: cut there, parameters and optimizer state are those before the iteration."""
    worker = make(num=2)
    for _ in range(num_before):
        worker.iteration(apart=True)
    before, states = worker.values(), [dict(o.state_dict()["state"]) for o in worker.optimizers]
    moments = [{k: v.clone() for k, v in s.items()} for s in states[0].values()]
    worker.tracker.begin()
    worker.backward(0)
    worker.optimizers[0].step()
    assert worker.values() != before
    worker.stop()
    assert worker.reported()["updated"] is False
    worker.tracker.cut()
    assert worker.values() == before and not worker.tracker.mixed and not worker.tracker.updated
    now = list(worker.optimizers[0].state_dict()["state"].values())
    assert len(now) == len(moments)
    assert all(torch.equal(a[k], b[k]) for a, b in zip(now, moments, strict=True) for k in a)
    # Run again, it gives what an undisturbed run gives.
    worker.enter(2)
    worker.iteration(apart=True)
    undisturbed = make(num=2)
    for _ in range(num_before + 1):
        undisturbed.iteration(apart=True)
    assert worker.values() == undisturbed.values()


def test_a_stop_between_steps_that_follow_each_other_waits_for_the_last(make: Callable[..., Worker]) -> None:
    """Nothing was kept: a report between the steps would promise a state that is gone."""
    worker = make(num=2)
    worker.iteration()  # learns that no backward lies between
    worker.tracker.begin()
    for i in range(2):
        worker.backward(i)
    worker.optimizers[0].step()
    worker.stop()
    worker.agent.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        worker.agent.sock.recv(1)
    worker.agent.sock.settimeout(5.0)
    worker.optimizers[1].step()
    assert worker.reported() == {"updated": True, "mixed": False, "state": worker.values()}


def test_a_backward_that_is_new_between_the_steps_and_is_cut_is_found_out(make: Callable[..., Worker]) -> None:
    worker = make(num=2)
    worker.iteration()
    worker.tracker.begin()
    for i in range(2):
        worker.backward(i)
    worker.optimizers[0].step()
    worker.stop()  # inside the unexpected backward
    worker.tracker.cut()
    assert worker.reported()["mixed"] is True


def test_an_optimizer_that_is_left_out_blocks_no_report(make: Callable[..., Worker]) -> None:
    """A gradient scaler skips a step whose gradients are infinite."""
    worker = make(num=2)
    worker.iteration()
    worker.tracker.begin()
    for i in range(2):
        worker.backward(i)
    worker.optimizers[0].step()
    worker.tracker.finish()
    worker.stop()
    assert worker.reported()["updated"] is False


def test_the_backward_between_is_learned(make: Callable[..., Worker]) -> None:
    worker = make(num=2)
    for _ in range(2):
        worker.iteration()
    assert not worker.tracker._must_keep("0")
    worker.iteration(apart=True)
    assert worker.tracker._must_keep("0")


def test_a_gradient_at_the_address_of_one_that_was_freed_is_another_one() -> None:
    for _ in range(1000):
        grad = torch.zeros(1)
        seen, address = _Seen(grad), id(grad)
        assert seen.is_still(grad) and not seen.is_still(None)
        del grad
        other = torch.zeros(1)
        assert not seen.is_still(other)
        if id(other) == address:
            break
    else:
        pytest.fail("no address was used again: nothing is shown")
    assert _Seen(None).is_still(None) and not _Seen(None).is_still(other)
    same = _Seen(other)
    other.add_(1)
    assert not same.is_still(other)


def test_a_gradient_that_nobody_but_its_parameter_holds_is_known_again() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.sum().backward()
    assert parameter.grad is not None
    seen = _Seen(parameter.grad)
    gc.collect()
    assert seen.is_still(parameter.grad)
    parameter.grad = None
    parameter.sum().backward()
    assert not seen.is_still(parameter.grad)


def test_a_dry_run_changes_nothing(make: Callable[..., Worker]) -> None:
    worker = make()
    worker.iteration()
    before, moments = worker.values(), worker.optimizers[0].state_dict()["state"][0]["exp_avg"].clone()
    worker.tracker.begin(dry_run=True)
    worker.backward(0)
    grads = [p.grad for p in worker.models[0].parameters()]
    worker.optimizers[0].step()
    assert [p.grad for p in worker.models[0].parameters()] == grads
    worker.tracker.cut()
    assert worker.values() == before
    assert torch.equal(worker.optimizers[0].state_dict()["state"][0]["exp_avg"], moments)
    worker.iteration()
    assert worker.values() != before


@pytest.mark.parametrize("kind", [Momentum, Listed, Counted])
def test_a_step_of_any_optimizer_is_taken_back(make: Callable[..., Worker], kind: Any) -> None:
    """Also of what has no gradient, and what it keeps in lists or under keys of its own."""
    worker = make(kind, num=2)
    for _ in range(3):
        worker.iteration(apart=True)
    optimizer, weight = worker.optimizers[0], worker.models[0].weight
    before, state = worker.values(), repr(optimizer.state_dict())
    worker.tracker.begin()
    worker.backward(0)
    if kind is Momentum:
        worker.models[0].bias.grad = None
    optimizer.step()
    assert repr(optimizer.state_dict()) != state and weight.tolist() != before[0]
    worker.stop()
    assert worker.reported()["mixed"] is False
    worker.tracker.cut()
    assert worker.values() == before and repr(optimizer.state_dict()) == state and not worker.tracker.mixed


def test_a_class_whose_step_calls_that_of_another_is_one_step(make: Callable[..., Worker]) -> None:
    """torch wraps the step of each class, so the hooks run twice, one within the other."""

    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    worker = make(lambda p: Mine(p, lr=0.1))
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # its step is wrapped, too
    for _ in range(3):
        worker.iteration()
    worker.tracker.begin()
    worker.backward(0)

    def stop_once(*_: Any) -> None:
        if not worker.heard.is_set():
            worker.stop()

    worker.optimizers[0].register_step_pre_hook(stop_once)
    worker.optimizers[0].step()
    assert worker.reported() == {"updated": True, "mixed": False, "state": worker.values()}


def test_two_whose_class_calls_the_step_of_another_are_not_done_after_one(make: Callable[..., Worker]) -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    worker = make(lambda p: Mine(p, lr=0.1), num=2)
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # its step is wrapped, too
    worker.iteration(apart=True)
    before = worker.values()
    worker.tracker.begin()
    worker.backward(0)
    worker.optimizers[0].step()
    assert not worker.tracker.updated and worker.tracker.num_steps == 1
    worker.stop()
    assert worker.reported()["updated"] is False
    worker.tracker.cut()
    assert worker.values() == before and not worker.tracker.mixed


def test_an_iteration_in_which_some_make_no_step_is_taken_back(make: Callable[..., Worker]) -> None:
    """A discriminator that begins later, say; an iteration may be cut after all that it does."""
    worker = make(num=2)
    for _ in range(3):
        worker.tracker.begin()
        worker.backward(0)
        worker.optimizers[0].step()
        assert worker.tracker.left_out == ["1"] and not worker.tracker.is_open
        worker.tracker.finish()
    before = worker.values()
    worker.tracker.begin()
    worker.backward(0)
    worker.optimizers[0].step()
    worker.stop()
    assert worker.reported()["updated"] is False
    worker.tracker.cut()
    assert worker.values() == before and not worker.tracker.mixed


def test_who_makes_all_steps_again_keeps_nothing(make: Callable[..., Worker]) -> None:
    """What a scaler leaves out now and then; of the first time nothing is kept."""
    worker = make(num=2)
    worker.iteration()
    is_open = []
    for steps in ((0,), (0,), (0, 1), (0, 1)):
        worker.tracker.begin()
        for index in range(2):
            worker.backward(index)
        for index in steps:
            worker.optimizers[index].step()
            is_open += [worker.tracker.is_open] if index == 0 else []
        worker.tracker.finish()
    assert is_open == [True, False, False, True]


def test_a_step_that_failed_does_not_hold_up_what_comes_after_it(make: Callable[..., Worker]) -> None:
    worker = make()

    def fail(*_: Any) -> None:
        raise ValueError("no such learning rate")

    handle = worker.optimizers[0].register_step_pre_hook(fail)  # behind the fence
    worker.tracker.begin()
    worker.backward(0)
    with pytest.raises(ValueError, match="no such learning rate"):
        worker.optimizers[0].step()
    handle.remove()
    worker.stopped_before_the_step()


def test_what_cannot_be_recovered_is_refused(make: Callable[..., Worker]) -> None:
    worker = make()
    worker.backward(0)
    with pytest.raises(UsageError, match=r"outside a function decorated with @job\.iteration"):
        worker.optimizers[0].step()
    worker.tracker.begin()
    worker.optimizers[0].step()
    with pytest.raises(UsageError, match="second step"):
        worker.optimizers[0].step()


def test_an_empty_parameter_group_is_no_problem(make: Callable[..., Worker]) -> None:
    worker = make(lambda p: torch.optim.SGD([{"params": []}, {"params": list(p)}], lr=0.1))
    worker.iteration()


def test_without_an_agent_nothing_is_in_the_way() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = UpdateTracker({"optimizer": optimizer}, None)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.step()
    tracker.begin()
    optimizer.step()
    assert tracker.updated
    tracker.finish()


# ---- several replica sets: nobody updates before all can ----


def test_all_agree_once_and_before_the_first_step(make: Callable[..., Worker]) -> None:
    seen: list[tuple[bool, int]] = []
    worker = make(num=2, agree=lambda: seen.append((worker.tracker.reduced, worker.tracker.num_steps)))
    for _ in range(3):
        worker.iteration()
        assert not worker.tracker.reduced
    # In the first iteration it is not known yet that no backward lies between the steps.
    assert seen == [(False, 1), (True, 0), (True, 0)]
    worker.tracker.begin(dry_run=True)
    worker.optimizers[0].step()
    worker.tracker.cut()
    assert len(seen) == 3, "a dry run has no effect, and asks nobody"


def test_steps_with_a_backward_between_them_are_agreed_on_before_the_last(make: Callable[..., Worker]) -> None:
    seen: list[tuple[bool, int]] = []
    worker = make(num=2, agree=lambda: seen.append((worker.tracker.reduced, worker.tracker.num_steps)))
    for _ in range(3):
        worker.iteration(apart=True)
    assert seen == [(False, 1)] * 3


def test_who_was_cut_while_agreeing_can_still_make_the_update(make: Callable[..., Worker]) -> None:
    def cut() -> None:
        if worker.stops:
            worker.stop()
            raise PeerFailure("a peer is lost")

    worker, undisturbed = make(agree=cut), make()
    worker.stops = False  # type: ignore[attr-defined]
    worker.iteration(), undisturbed.iteration()
    worker.stops = True  # type: ignore[attr-defined]
    worker.tracker.begin()
    worker.backward(0)
    with pytest.raises(PeerFailure):
        worker.optimizers[0].step()
    worker.tracker.cut()
    assert worker.tracker.reduced and not worker.tracker.updated and not worker.tracker.mixed
    worker.tracker.finish_update()
    undisturbed.iteration()
    assert worker.tracker.updated and worker.values() == undisturbed.values()


def test_a_stop_between_agreement_and_step_leaves_the_same(make: Callable[..., Worker]) -> None:
    worker = make(agree=lambda: worker.stop())
    worker.tracker.begin()
    worker.backward(0)
    before = worker.values()
    with pytest.raises(PeerFailure):
        worker.optimizers[0].step()
    worker.tracker.cut()
    assert worker.tracker.reduced and worker.values() == before


def with_closure(worker: Worker, on_call: Callable[[int], None] = lambda number: None) -> Callable[[], float]:
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        worker.backward(0)
        on_call(calls)
        return 1.0

    return closure


def test_a_closure_that_is_cut_has_changed_nothing(make: Callable[..., Worker]) -> None:
    """The backward is in it; the report does not wait for the step either."""
    worker = make()
    worker.iteration()
    before = worker.values()

    def cut(number: int) -> None:
        worker.stop()
        assert worker.reported() == {"updated": False, "mixed": False, "state": before}
        raise RuntimeError("a collective was aborted")

    worker.tracker.begin()
    with pytest.raises(RuntimeError, match="aborted"):
        worker.optimizers[0].step(with_closure(worker, cut))
    worker.tracker.cut()
    assert worker.values() == before and not worker.tracker.updated and not worker.tracker.mixed


def test_a_stop_at_the_end_of_a_closure_lets_no_update_begin(make: Callable[..., Worker]) -> None:
    worker = make()
    before = worker.values()
    worker.tracker.begin()
    with pytest.raises(PeerFailure):
        worker.optimizers[0].step(closure=with_closure(worker, lambda number: worker.stop()))
    worker.tracker.cut()
    assert worker.values() == before and not worker.tracker.mixed
    assert worker.reported() == {"updated": False, "mixed": False, "state": before}


def test_after_its_closure_a_step_is_an_update_as_any(make: Callable[..., Worker]) -> None:
    worker = make()
    worker.tracker.begin()
    worker.optimizers[0].step(with_closure(worker))
    assert worker.tracker.updated and worker.tracker.num_steps == 1
    worker.stop()
    assert worker.reported() == {"updated": True, "mixed": False, "state": worker.values()}


def test_a_dry_runs_closure_changes_nothing(make: Callable[..., Worker]) -> None:
    """Its backward gives new gradients after the step has begun."""
    worker = make()
    worker.iteration()
    before = worker.values()
    worker.tracker.begin(dry_run=True)
    worker.optimizers[0].step(with_closure(worker))
    worker.tracker.cut()
    assert worker.values() == before


def test_all_agree_when_the_closure_has_returned(make: Callable[..., Worker]) -> None:
    told: list[str] = []
    worker = make(agree=lambda: told.append("agreed"))
    worker.tracker.begin()
    worker.optimizers[0].step(with_closure(worker, lambda number: told.append("backward")))
    worker.tracker.finish()
    assert told == ["backward", "agreed"]


class Sharpness(torch.optim.SGD):
    """Goes up along the gradient, calls its closure there, goes back, and makes its step."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        moved = [(p, p.grad.clone()) for p in self.param_groups[0]["params"]]
        with torch.no_grad():
            for p, grad in moved:
                p.add_(grad, alpha=0.1)
            with torch.enable_grad():
                closure()
            for p, grad in moved:
                p.sub_(grad, alpha=0.1)
        super().step()


def test_an_update_with_a_closure_in_its_middle_is_taken_back(make: Callable[..., Worker]) -> None:
    worker = make(lambda p: Sharpness(p, lr=0.1))
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # its step is wrapped, too
    worker.tracker.begin()
    worker.optimizers[0].step(with_closure(worker))
    worker.tracker.finish()
    before = worker.values()

    def cut(number: int) -> None:
        if number == 2:
            worker.stop()
            assert worker.reported()["updated"] is False
            raise RuntimeError("a collective was aborted")

    worker.tracker.begin()
    with pytest.raises(RuntimeError, match="aborted"):
        worker.optimizers[0].step(with_closure(worker, cut))
    worker.tracker.cut()
    assert worker.values() == before and not worker.tracker.mixed
    worker.tracker.begin(dry_run=True)
    worker.optimizers[0].step(with_closure(worker))
    worker.tracker.cut()
    assert worker.values() == before


def test_a_step_that_leaves_its_closure_out_is_refused(make: Callable[..., Worker]) -> None:
    class Idle(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return None

    worker = make(lambda p: Idle(p, lr=0.1))
    worker.tracker.begin()
    with pytest.raises(UsageError, match="without calling its closure"):
        worker.optimizers[0].step(lambda: 1.0)
