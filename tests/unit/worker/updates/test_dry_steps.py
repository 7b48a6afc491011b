"""What a dry run leaves of a step, of optimizers that do as they like without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from swift_agent.worker.updates.dry_steps import DrySteps
from swift_recovery.undo.rules import RULES
from tests.support.alone_worker import AloneWorker
from tests.support.odd_optimizers import Counted, Decayed, Estimating, Listed, Momentum

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": Momentum, "listed": Listed, "estimating": Estimating, "counted": Counted,
    "decayed": lambda p: Decayed(p, lr=0.1), "torch's": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}  # fmt: skip


class Worker(AloneWorker):
    def __init__(self, kind: str, rank: int = 0) -> None:
        torch.manual_seed(0)
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # its step is wrapped, too
        model = nn.Linear(3, 2)
        super().__init__(model, KINDS[kind](model.parameters()), rank=rank)
        self.loop.recovery.wait_quiet = lambda: None

    def backward(self, value: float) -> None:
        self.optimizer.zero_grad()
        self.model(torch.full((4, 3), value)).sum().backward()

    def train(self, value: float) -> Any:
        """The rate is the script's."""
        self.backward(value)
        result = self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] *= 0.75
        return result

    def begin(self) -> None:
        self.place.keep_point()
        self.place.keep_start()
        self.tracked.begin(self.place.here.iteration)
        self.place.enter("iteration")

    def iterations(self, *values: float) -> Worker:
        for value in values:
            self.begin()
            self.train(value)
            self.loop.iterations.complete()
        return self

    def everything(self) -> Any:
        return plain([list(self.model.parameters()), self.optimizer.state_dict()])

    def send(self, other: Worker) -> Any:
        """Gives *other* what it holds; returns what puts it in place there."""
        self.place.keep_point()
        outgoing = self.tracked.state.collect(self.place.offer())
        incoming = other.tracked.state.prepare(outgoing.manifest, staged=True)
        for target, source in zip(incoming.tensors, outgoing.tensors, strict=True):
            target.copy_(source.detach())
        return incoming.commit

    def close(self) -> None:
        if self.tracked._carried is not None:
            self.tracked._carried.begin(dry_run=True)
        self.supervisor.close()
        self.agent.close()


def plain(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.tolist()
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(one) for one in tree] if isinstance(tree, (list, tuple)) else tree


@pytest.fixture
def make() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def build(kind: str, rank: int = 0) -> Worker:
        made.append(Worker(kind, rank))
        return made[-1]

    yield build
    for worker in made:
        worker.close()


def test_whose_steps_do_nothing_without_gradients() -> None:
    kinds = [*RULES, *KINDS.values()]
    made = {str(number): make([nn.Parameter(torch.ones(2, 2))]) for number, make in enumerate(kinds)}
    others = [type(made[name]) for name in sorted(DrySteps(made).others, key=int)]
    assert others == [Momentum, Listed, Estimating, Counted, Decayed]


@pytest.mark.parametrize("kind", KINDS)
def test_who_was_cut_after_its_update_has_it_once(make: Callable[..., Worker], kind: str) -> None:
    worker, undisturbed = make(kind).iterations(1.0, 2.0), make(kind).iterations(1.0, 2.0, 5.0)
    worker.begin()
    worker.train(5.0)
    worker.tracked.updates.cut()
    assert worker.tracked.updates.updated
    result = worker.loop.iterations.over.run(lambda: worker.train(9.0))
    assert (result is None) == (kind != "counted")
    assert worker.everything() == undisturbed.everything()
    assert worker.place.here.iteration == 3
    for one in (worker, undisturbed):
        one.iterations(1.0, 3.0)
    assert worker.everything() == undisturbed.everything()


@pytest.mark.parametrize("kind", KINDS)
def test_who_owes_the_update_gets_that_of_a_replica(make: Callable[..., Worker], kind: str) -> None:
    """Also what the step has written into groups, while the script's rate stays its own."""
    worker, replica = make(kind).iterations(1.0, 2.0), make(kind, 1).iterations(1.0, 2.0, 5.0)
    before, rate = worker.everything(), worker.optimizer.param_groups[0]["lr"]
    worker.begin()
    worker.backward(5.0)
    worker.tracked.updates.cut()
    worker.loop.iterations.over.run(lambda: worker.train(9.0))
    assert worker.optimizer.param_groups[0]["lr"] == rate * 0.75
    worker.optimizer.param_groups[0]["lr"] = rate
    assert worker.everything() == before
    worker.optimizer.param_groups[0]["lr"] = 0.625
    worker.place.roll_forward(3, replica.send(worker))
    assert worker.optimizer.param_groups[0]["lr"] == 0.625 != replica.optimizer.param_groups[0]["lr"]
    replica.optimizer.param_groups[0]["lr"] = 0.625
    assert worker.everything() == replica.everything()


@pytest.mark.parametrize("kind", KINDS)
def test_who_makes_it_after_all_has_it_once(make: Callable[..., Worker], kind: str) -> None:
    worker, undisturbed = make(kind).iterations(1.0), make(kind).iterations(1.0, 5.0)
    worker.begin()
    worker.backward(5.0)
    worker.tracked.updates.cut()
    values = iter([9.0, 5.0])  # alone it sees other ones
    worker.loop.iterations.over.run(lambda: worker.train(next(values)))
    assert worker.place.owed is not None
    worker.place.owed.run()
    assert worker.everything() == undisturbed.everything()


@pytest.mark.parametrize("kind", KINDS)
def test_who_makes_it_with_all_its_gradients_has_it_once(make: Callable[..., Worker], kind: str) -> None:
    """Where ranks agree on an update, one that was cut after that makes it without its script."""
    worker, undisturbed = make(kind).iterations(1.0), make(kind).iterations(1.0, 5.0)
    worker.begin()
    worker.backward(5.0)
    worker.tracked.updates.cut()
    worker.tracked.updates.finish_update()
    worker.loop.iterations.over.run(lambda: worker.train(9.0))
    assert worker.everything() == undisturbed.everything()


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_that_fails_in_a_step_changes_nothing(make: Callable[..., Worker], kind: str) -> None:
    worker = make(kind).iterations(1.0, 2.0)
    before = worker.everything()

    def fail(*_: Any) -> None:
        raise ValueError("no")

    handle = worker.optimizer.register_step_post_hook(fail)
    worker.optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    worker.tracked.begin(2, dry_run=True)
    worker.backward(9.0)
    with pytest.raises(ValueError, match="no"):
        worker.optimizer.step()
    worker.tracked.updates.cut()
    handle.remove()
    assert worker.everything() == before
    worker.tracked.begin(2, dry_run=True)
    worker.backward(9.0)
    worker.optimizer.step()
    worker.tracked.updates.cut()
    assert worker.everything() == before
