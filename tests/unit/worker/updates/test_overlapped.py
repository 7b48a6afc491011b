"""What is left of an update that was cut in the middle, and the ways out of it; one rank, real DDP and fence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from swift_agent.errors import PeerFailure, UsageError
from swift_agent.worker.line.fence import Fence
from swift_agent.worker.updates.device_reductions import Reductions
from swift_agent.worker.updates.overlap_checks import mistakes
from swift_agent.worker.updates.overlapped import OverlappedUpdates

UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclass
class Training:
    """*count* models with an optimizer each, updated in the backward."""

    models: list[DDP]
    optimizers: list[torch.optim.Optimizer]
    updates: OverlappedUpdates

    def backward(self, index: int = 0) -> None:
        self.models[index](torch.ones(2, 8)).square().sum().backward()

    def values(self) -> list[torch.Tensor]:
        """Parameters and optimizer state."""
        return [
            tensor.detach().clone()
            for member in self.updates.members
            for tensor in (member.parameter, *self.state_of(member.parameter).values())
        ]

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return next((dict(o.state[parameter]) for o in self.optimizers if o.state.get(parameter)), {})

    def iterate(self) -> None:
        self.updates.begin()
        for index, optimizer in enumerate(self.optimizers):
            self.backward(index)
            optimizer.step()
            optimizer.zero_grad()
        self.updates.join_agreement()
        self.updates.finish()


def training(
    count: int = 1, *, exact: bool = False, view: bool = False, agree: Callable[[], None] | None = None
) -> Training:
    torch.manual_seed(0)
    nets = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))) for _ in range(count)]
    models = [DDP(net, bucket_cap_mb=0.0004, gradient_as_bucket_view=view) for net in nets]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    named = {str(number): optimizer for number, optimizer in enumerate(optimizers)}
    names = {id(p): f"{number}.{path}" for number, net in enumerate(nets) for path, p in net.named_parameters()}
    made = Training(models, optimizers, OverlappedUpdates(models, named, names, Fence(), agree, exact=exact))
    made.iterate()  # so that there are states, and several buckets
    return made


def differ_at_most_by_an_undo(before: list[torch.Tensor], after: list[torch.Tensor], step: list[torch.Tensor]) -> bool:
    """The bound of `swift_recovery.undo.rules` for parameters, which come first of each member's four tensors."""
    return all(
        bool(((old - new).abs() <= 4 * UNIT_ROUNDOFF * (old.abs() + (old - moved).abs())).all())
        for old, new, moved in zip(before[::4], after[::4], step[::4], strict=True)
    )


@pytest.mark.parametrize("view", [False, True])
def test_a_cut_between_two_backwards_is_taken_back(view: bool) -> None:
    """Whatever the script did to the gradients of the first; and the rank holds a state again afterwards."""
    job = training(2, view=view)
    before = job.values()
    job.updates.begin()
    job.backward(0)
    moved = job.values()
    job.optimizers[0].step()
    job.optimizers[0].zero_grad(set_to_none=False)
    with job.models[0].no_sync():
        job.backward(0)
    job.updates.cut()
    assert job.updates.done == tuple(range(6)) and not job.updates.mixed and not job.updates.updated
    said = job.updates.take_back(job.updates.done)
    assert said.startswith("undone, within the rounding of a step: 0.0.weight, 0.0.bias, ")
    assert job.updates.done == () and differ_at_most_by_an_undo(before, job.values(), moved)
    assert job.updates.take_back(range(6)) == "", "nothing is undone twice"


@pytest.mark.parametrize("view", [False, True])
def test_a_complete_update_can_be_taken_back_until_all_have_agreed(view: bool) -> None:
    """Whatever the script did in the rest of the iteration."""

    def agree() -> None:
        if cuts:
            raise RuntimeError("Connection closed by peer")

    cuts: list[int] = []
    job = training(view=view, agree=agree)
    assert not job.updates._before_update, "what all have agreed on is let go"
    before = job.values()
    job.updates.begin()
    job.backward()
    moved = job.values()
    job.optimizers[0].step()
    job.optimizers[0].param_groups[0]["lr"] = 0.5
    job.optimizers[0].zero_grad(set_to_none=False)
    assert not job.updates.updated and job.updates.done == tuple(range(6))
    cuts.append(1)
    with pytest.raises(RuntimeError, match="closed by peer"):
        job.updates.join_agreement()
    job.updates.cut()
    assert job.updates.done == tuple(range(6)) and not job.updates.updated
    job.updates.take_back(job.updates.done)
    assert job.updates.done == () and differ_at_most_by_an_undo(before, job.values(), moved)
    cuts.clear()
    job.updates.settle()
    job.iterate()
    job.updates.begin()
    job.backward()
    job.optimizers[0].step()
    job.updates.join_agreement()
    assert job.updates.updated and job.updates.done == ()


def test_an_iteration_that_updates_a_part_can_be_agreed_on_as_well() -> None:
    """One of two optimizers rests: who is cut in the agreement gets to the state after it all the same."""

    def agree() -> None:
        if cuts:
            raise RuntimeError("Connection closed by peer")

    cuts: list[int] = []
    job = training(2, agree=agree)
    job.updates.begin()
    job.backward(0)
    job.optimizers[0].step()
    job.updates.join_agreement()
    assert job.updates.updated and not job.updates.reduced
    job.updates.finish()
    cuts.append(1)
    job.updates.begin()
    job.backward(0)
    job.optimizers[0].step()
    moved = job.values()
    with pytest.raises(RuntimeError, match="closed by peer"):
        job.updates.join_agreement()
    job.updates.cut()
    assert job.updates.reduced and job.updates.done == tuple(range(6)) and not job.updates.updated
    job.updates.finish_update()
    assert job.updates.updated and all(map(torch.equal, moved, job.values()))


def test_a_reduction_that_fails_is_an_error_of_the_backward() -> None:
    job = training()
    job.updates._reductions = Reductions(torch.device("cpu"), lambda: False)
    job.updates._reductions._wait = fail  # type: ignore[method-assign]
    job.updates.begin()
    with pytest.raises(Exception, match="a gradient could not be reduced: device-side assert"):
        job.backward()


def fail(work: object) -> None:
    raise ValueError("device-side assert")


def test_an_agreement_that_was_stopped_does_not_count() -> None:
    """The stop comes when all have agreed, and before this rank has noted it."""
    stopped: list[Fence] = []

    def agree() -> None:
        for fence in stopped:
            fence.interrupted = True

    job = training(agree=agree)
    job.updates.begin()
    job.backward()
    assert job.updates._fence is not None
    stopped.append(job.updates._fence)
    with pytest.raises(PeerFailure):
        job.updates.join_agreement()
    assert not job.updates.updated and job.updates.done == tuple(range(6))


def test_exact_puts_back_every_bit() -> None:
    job = training(2, exact=True)
    before = job.values()
    job.updates.begin()
    job.backward(0)
    job.updates.cut()
    assert job.updates.take_back(job.updates.done).startswith("put back from copies, bit for bit: 0.0.weight")
    assert all(map(torch.equal, before, job.values()))


def test_what_was_received_after_the_update_can_be_given_up_again() -> None:
    """A second failure may take those who had the rest of the update: then this rank has to go back as well."""
    here, there = training(2), training(2)
    before = here.values()
    here.updates.begin()
    here.updates.cut()
    there.updates.begin()
    there.backward(0)
    numbers = (1, 2)
    outgoing = there.updates.patch_of(numbers).collect()
    incoming = here.updates.patch_of(numbers).prepare(outgoing.manifest, staged=True)
    for target, source in zip(incoming.tensors, outgoing.tensors, strict=True):
        target.copy_(source)
    here.updates.install(numbers, incoming, updated=True)
    assert here.updates.done == numbers
    for number in numbers:
        mine, theirs = here.updates.members[number].parameter, there.updates.members[number].parameter
        assert torch.equal(mine, theirs)
    here.updates.take_back(numbers)
    assert here.updates.done == () and all(map(torch.equal, before, here.values()))


def test_nothing_is_kept_once_the_iteration_is_counted() -> None:
    job = training(exact=True)
    assert not job.updates._before_update and not job.updates._reduced and job.updates.done == ()


def test_a_parameter_that_came_later_is_an_error() -> None:
    job = training()
    late = nn.Parameter(torch.ones(2))
    job.optimizers[0].add_param_group({"params": [late]})
    job.updates.begin()
    job.backward()
    late.grad = torch.ones(2)
    with pytest.raises(UsageError, match="was not there or was frozen when the first iteration began"):
        job.optimizers[0].step()


def test_an_optimizer_may_rest_for_an_iteration() -> None:
    job = training(2)
    job.updates.begin()
    job.backward(0)
    for optimizer in job.optimizers:
        optimizer.step()
    job.updates.finish()


def test_only_optimizers_whose_step_is_known_are_taken() -> None:
    class Own(torch.optim.SGD):
        pass

    net = nn.Linear(2, 2)
    found = mistakes([DDP(net)], {"own": Own(net.parameters(), lr=0.1)}, {})
    assert len(found) == 1 and "a step of Own cannot be undone: its arithmetic is not known" in found[0]


def test_an_error_of_the_optimizer_is_kept_for_the_script() -> None:
    job = training()
    job.optimizers[0].param_groups[0]["lr"] = "fast"
    job.updates.begin()
    with pytest.raises(Exception):  # noqa: B017 - what comes out of C++ is torch's own
        job.backward()
    assert isinstance(job.updates.failed, Exception) and job.updates.mixed


def test_a_backward_does_not_wait_for_a_thread_that_has_ended() -> None:
    """Whatever it was: the futures that it owed have an error."""

    class Odd(Exception):
        pass

    def odd() -> bool:
        if gone.wait(10.0):
            raise Odd("the device is gone")
        return False

    gone = threading.Event()
    reductions = Reductions(torch.device("cpu"), odd)
    done = SimpleNamespace(wait=lambda: None)
    futures = [reductions.future_of(done, torch.zeros(1)) for _ in range(3)]
    gone.set()
    for future in futures:
        assert "swift-reductions has ended by Odd: the device is gone" in str(future.wait())
    with pytest.raises(RuntimeError, match="cannot be reduced any more"):
        reductions.future_of(done, torch.zeros(1))
