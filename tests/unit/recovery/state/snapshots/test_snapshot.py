"""A snapshot puts back all that an interrupted iteration changed, and the iteration repeated gives the same bits."""

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from swift_recovery.errors import StateError
from swift_recovery.state.checksum import checksum
from swift_recovery.state.codec import decode, encode
from swift_recovery.state.randomness import capture_generators, restore_generators, seed_series
from swift_recovery.state.snapshots.buffer_copy import ALWAYS_COPIED_BYTES
from swift_recovery.state.snapshots.snapshot import Snapshot
from swift_recovery.state.training_state import TrainingState


class Loop:
    """A training loop whose iteration can be cut after the forward, the backward or the scheduler's step."""

    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
        self.unused = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = lr_scheduler.SequentialLR(
            self.optimizer,
            [lr_scheduler.LinearLR(self.optimizer), lr_scheduler.MultiStepLR(self.optimizer, [2, 3])],
            [2],
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.state = TrainingState(
            {"model": self.model, "unused": self.unused},
            {"optimizer": self.optimizer},
            {"scheduler": self.scheduler, "scaler": self.scaler},
        )

    def iteration(self, index: int, stop: str = "") -> None:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(index))
        loss = self.model(x).square().mean() + random.random() + float(np.random.rand())
        if stop == "forward":
            return
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        if stop == "backward":
            return
        if stop == "scheduler":
            self.scaler.update()
            self.scheduler.step()
            return
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def everything(self) -> Any:
        gradients = [p.grad is None for p in self.state.parameters()]
        values = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        others = self.scheduler.state_dict(), self.scaler.state_dict()
        return checksum(self.state.tensors()), gradients, values, others


@pytest.mark.parametrize("stop", ["forward", "backward", "scheduler"])
@pytest.mark.parametrize("rng", [False, True])
def test_a_cut_iteration_repeated_gives_the_same_bits(stop: str, rng: bool) -> None:
    def run(cut: bool) -> tuple[Any, Any]:
        loop = Loop()
        snapshot = Snapshot(loop.state)
        seed_series(3, 0, 0)(0)
        for index in range(5):
            if not rng:
                seed_series(5, 0, 0)(index)
            snapshot.take(rng=rng)
            before = loop.everything()
            for _ in range(2 if cut else 0):
                loop.iteration(index, stop)
                assert loop.everything() != before
                snapshot.restore()
                assert loop.everything() == before
                if not rng:
                    seed_series(5, 0, 0)(index)
            loop.iteration(index)
        return loop.everything(), (torch.rand(3).tolist(), random.random(), np.random.rand())

    assert run(cut=True) == run(cut=False)


def test_batchnorm_does_not_tell_its_version() -> None:
    # The reason why small buffers are copied every time. When this fails, the version can be trusted.
    norm = nn.BatchNorm1d(4)
    version, before = norm.running_mean._version, norm.running_mean.clone()
    norm(torch.randn(8, 4))
    assert not torch.equal(norm.running_mean, before) and norm.running_mean._version == version


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("large", torch.zeros(ALWAYS_COPIED_BYTES // 4 + 1))
        self.register_buffer("lazy", None)
        self.register_buffer("expanded", torch.zeros(1).expand(5))
        self.small: Tensor
        self.large: Tensor
        self.lazy: Tensor | None
        self.expanded: Tensor


def test_buffers_replaced_added_and_changed_in_place() -> None:
    model = Buffers()
    snapshot = Snapshot(TrainingState({"m": model}))
    for value in (1.0, 2.0):
        small, large = model.small, model.large
        small.fill_(value)
        large.fill_(value)
        snapshot.take()
        model.small = torch.full((4,), 9.0)
        large[0] = 9
        model.lazy = torch.ones(2)
        model.register_buffer("new", torch.ones(1))
        snapshot.restore()
        assert model.small is small and model.large is large
        assert small.tolist() == [value] * 3 and bool((large == value).all())
        assert model.lazy is None and "new" not in model._buffers


def test_a_large_buffer_is_copied_only_when_it_changed() -> None:
    model = Buffers()
    snapshot = Snapshot(TrainingState({"m": model}))
    snapshot.take()
    kept = next(saved["large"] for _, _, saved in snapshot._buffers)
    assert kept is not None
    version = kept.copy._version
    snapshot.take()
    assert kept.copy._version == version
    model.large.add_(1)
    snapshot.take()
    assert kept.copy._version > version and float(kept.copy[0]) == 1
    # Another memory of the same version is another buffer as well.
    model.large.data = torch.full_like(model.large, 5)
    snapshot.take()
    live = model.large
    live.data = torch.zeros(2)
    snapshot.restore()
    assert model.large is live and live.numel() == kept.copy.numel() and bool((live == 5).all())


class SameWatch:
    """The native one, of a loop that changes nothing that it looks at."""

    def __init__(self, parameters: list[Tensor], optimizers: list[Any]) -> None:
        self.kept = False

    def is_same(self) -> bool:
        return self.kept

    def keep(self) -> None:
        self.kept = True

    def forget(self) -> None:
        self.kept = False


def test_modes_are_put_back_and_sent_to_nobody() -> None:
    """A GAN freezes one network while the other has its turn; a section calls eval()."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[0].bias.requires_grad_(False)
    snapshot = Snapshot(TrainingState({"m": model}), SameWatch, modes=True)

    def modes() -> list[bool]:
        return [*(each.training for each in model.modules()), *(each.requires_grad for each in model.parameters())]

    begin = modes()
    snapshot.take()
    assert snapshot.is_current()
    model[1].eval()
    assert not snapshot.is_current()
    model[1].train()
    model.requires_grad_(False)
    assert not snapshot.is_current()
    model.eval()
    snapshot.restore(buffers=False)
    assert modes() == begin
    model.eval()
    model.requires_grad_(True)
    later = modes()
    snapshot.keep_modes()
    snapshot.install(snapshot.tree())
    assert modes() == later
    plain = Snapshot(TrainingState({"m": model}))
    plain.take()
    model.train()
    plain.restore()
    assert model.training


def test_gradients_that_existed_are_cleared_in_place() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.zeros(2, 2)
    kept = model.weight.grad
    snapshot = Snapshot(TrainingState({"m": model}))
    snapshot.take()
    model(torch.ones(1, 2)).sum().backward()
    assert kept.count_nonzero() and model.bias.grad is not None
    snapshot.restore()
    assert model.weight.grad is kept and not kept.count_nonzero() and model.bias.grad is None


def test_tree_goes_to_another_worker() -> None:
    source, other = Loop(1), Loop(2)
    source.iteration(0)
    mine, theirs = Snapshot(source.state), Snapshot(other.state)
    mine.take(rng=True)
    data, tensors = encode(mine.tree())
    draws = torch.rand(2).tolist(), random.random()
    source.iteration(3, "scheduler")
    other.iteration(9)
    theirs.install(decode(data, [tensor.clone() for tensor in tensors]))
    assert (torch.rand(2).tolist(), random.random()) == draws
    mine.restore()
    assert [b.tolist() for b in other.model.buffers()] == [b.tolist() for b in source.model.buffers()]
    assert other.optimizer.param_groups[0]["lr"] == source.optimizer.param_groups[0]["lr"] != 0.1
    assert other.everything()[1:] == source.everything()[1:]
    other.iteration(5)
    # Installed also means kept.
    theirs.restore()
    assert [b.tolist() for b in other.model.buffers()] == [b.tolist() for b in source.model.buffers()]


def test_install_with_other_generators_leaves_them() -> None:
    source, other = Snapshot(Loop(1).state), Snapshot(Loop(2).state)
    source.take(rng=True)
    torch.manual_seed(11)
    expected = torch.rand(2).tolist()
    torch.manual_seed(11)
    other.install(source.tree(), rng=False)
    assert torch.rand(2).tolist() == expected


def test_another_models_tree_is_refused_and_nothing_changes() -> None:
    source, loop = Snapshot(TrainingState({"m": nn.BatchNorm1d(3)})), Loop()
    source.take()
    before = loop.everything()
    with pytest.raises(StateError, match="exist on one side only"):
        Snapshot(loop.state).install(source.tree())
    assert loop.everything() == before


def test_an_empty_snapshot_restores_nothing() -> None:
    snapshot = Snapshot(TrainingState({"m": nn.Linear(1, 1)}))
    for act in (snapshot.restore, snapshot.tree):
        with pytest.raises(StateError, match="empty"):
            act()


def test_an_unused_scaler_and_a_disabled_one() -> None:
    model = nn.Linear(1, 1)
    scaler, off = torch.amp.GradScaler("cpu", init_scale=2.0), torch.amp.GradScaler("cpu", enabled=False)
    snapshot = Snapshot(TrainingState({"m": model}, {}, {"scaler": scaler, "off": off}))
    snapshot.take()
    scaler.scale(torch.ones(1))
    assert scaler._scale is not None
    snapshot.restore()
    assert scaler._scale is None and scaler.get_scale() == 2.0
    with pytest.raises(StateError, match="one side only"):
        other = Snapshot(TrainingState({"m": model}, {}, {"scaler": off, "off": scaler}))
        other.install(snapshot.tree())


def test_a_scheduler_of_any_kind_can_be_taken() -> None:
    makers = {
        "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
        "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
        "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, scale_fn=lambda x: 1.0),
        "one": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
        "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
        "chained": lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.StepLR(o, 1), lr_scheduler.ExponentialLR(o, 0.9)]
        ),
        "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        "tensor": lambda o: lr_scheduler.ConstantLR(o),
    }
    for name, make in makers.items():
        model = nn.Linear(1, 1)
        rate: Any = torch.tensor(0.1) if name == "tensor" else 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        scheduler: Any = make(optimizer)
        snapshot = Snapshot(TrainingState({"m": model}, {"o": optimizer}, {name: scheduler}))
        optimizer.step()
        step = (lambda s=scheduler: s.step(1.0)) if name == "plateau" else scheduler.step
        step()
        snapshot.take()
        encode(snapshot.tree())
        group = optimizer.param_groups[0]

        def rates(group: dict[str, Any] = group, step: Any = step) -> list[float]:
            found = []
            for _ in range(4):
                step()
                found.append(float(group["lr"]))
            return found

        first = rates()
        snapshot.restore()
        assert rates() == first, name


def test_every_kind_of_hyper_parameter_comes_back_whenever_it_was_changed() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.5)}], lr=0.1)
    group, other = optimizer.param_groups
    group["rates"], group["pair"] = [1, 2], (0.9, [3])
    snapshot = Snapshot(TrainingState({"m": model}, {"o": optimizer}, {}))

    def values() -> list[dict[str, Any]]:
        return [decode(*encode({k: v for k, v in g.items() if k != "params"})) for g in optimizer.param_groups]

    def change(step: int) -> None:
        if step == 1:
            group["lr"] = 0.1 + step
        if step == 2:
            group["rates"].append(step)
        if step == 3:
            group["pair"][1].append(step)
        if step == 4:
            other["lr"].add_(step)
        if step == 5:
            group["nesterov"], group["extra"] = True, "new"
        if step == 6:
            del group["extra"]
        if step == 7:
            del group["rates"], group["pair"]

    for step in range(9):  # in the last ones nothing has changed since the snapshot before, and all is immutable
        before = values()
        snapshot.take()
        change(step + 1)
        group["lr"], other["momentum"] = -1.0, 0.25
        group["rates"] = "spoilt"
        snapshot.restore()
        assert str(values()) == str(before)
        change(step + 1)


DRAW = """
import random, numpy, torch
from swift_recovery.state.randomness import seed_series
seed_series(-5, 3, 1)(2**40)
print(torch.rand(2).tolist(), random.random(), numpy.random.rand())
"""


def test_seeds_are_the_same_in_every_process_and_differ_otherwise() -> None:
    def draw(*numbers: int) -> str:
        seed_series(*numbers[:3])(numbers[3])
        return f"{torch.rand(2).tolist()} {random.random()} {np.random.rand()}"

    path = ":".join(sys.path)
    command = [sys.executable, "-c", DRAW]
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == draw(-5, 3, 1, 2**40) == draw(-5, 3, 1, 2**40)
    assert len({draw(*n) for n in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))}) == 5


def test_seeds_forget_what_was_drawn_before() -> None:
    def draws() -> list[float]:
        seed_series(1, 2, 3)(4)
        return [torch.randn(1).item(), random.gauss(0, 1), np.random.randn()]

    first = draws()  # each of these leaves half of a pair of normal numbers behind
    assert draws() == first


def test_generators_come_back() -> None:
    tree = capture_generators()
    data, tensors = encode(tree)
    draws = [torch.rand(1).item(), random.gauss(0, 1), np.random.randn()]
    restore_generators(decode(data, tensors))
    assert [torch.rand(1).item(), random.gauss(0, 1), np.random.randn()] == draws


def test_gradients_that_are_carried_into_an_iteration_are_put_back_and_sent() -> None:
    mine, theirs = Loop(), Loop(2)
    snapshot = Snapshot(mine.state)
    mine.model(torch.ones(2, 4)).sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in mine.state.parameters()]
    mine.state.carried = 5
    snapshot.take()
    for parameter in mine.state.parameters():
        parameter.grad = torch.ones_like(parameter)
    snapshot.restore()
    assert _same(mine, before)
    received = Snapshot(theirs.state)
    body, tensors = encode(snapshot.tree())
    received.install(decode(body, tensors))
    assert _same(theirs, before) and theirs.state.carried == 5
    mine.state.carried = 0
    snapshot.take()
    snapshot.restore()
    assert all(p.grad is None or not p.grad.any() for p in mine.state.parameters())
    assert snapshot.tree()["gradients"] is None


def _same(loop: Loop, gradients: list[Tensor | None]) -> bool:
    for parameter, expected in zip(loop.state.parameters(), gradients, strict=True):
        if (parameter.grad is None) != (expected is None):
            return False
        if parameter.grad is not None and expected is not None and not torch.equal(parameter.grad, expected):
            return False
    return True


class Trace(nn.Module):
    """A buffer that the forward changes, and the script once more after its update."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("trace", torch.zeros(3))

    def forward(self, x: Tensor, add: float) -> Tensor:
        self.trace.mul_(0.5).add_(add)
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("cut", ["before the second change", "after it"])
@pytest.mark.parametrize("others", [0.0, 1.0], ids=["alone", "with what others add"])
def test_what_is_changed_before_an_update_and_after_it(cut: str, others: float) -> None:
    """Run once more, alone, after it was cut behind its update."""
    torch.manual_seed(0)
    model = Trace()
    ema = nn.Parameter(torch.zeros(4), requires_grad=False)
    model.ema = ema
    optimizer = torch.optim.SGD(model.linear.parameters(), lr=0.1)
    snapshot = Snapshot(TrainingState({"m": model}, {"o": optimizer}), by_hand=True)
    optimizer.register_step_post_hook(snapshot.by_hand.note_step)

    def first(add: float) -> None:
        with torch.no_grad():
            ema.lerp_(model.linear.weight.sum().expand(4), 0.25)  # other ones, once the update is made
        model(torch.ones(1, 2), 1.0 + add).sum().backward()
        optimizer.step()

    def second() -> None:
        with torch.no_grad():
            ema.mul_(3.0)
            model.trace.add_(7.0)

    snapshot.take()
    first(others)
    expected = [ema.detach().clone(), model.trace.clone()]
    if cut == "after it":
        second()
        expected = [ema.detach().clone(), model.trace.clone()]
    else:
        expected = [expected[0] * 3.0, expected[1] + 7.0]
    made = snapshot.changed()
    assert not snapshot.is_spoilt()
    snapshot.restore()
    hook = optimizer.register_step_post_hook(lambda *_: made.at_step())
    first(0.0)
    hook.remove()
    second()
    made.at_end()
    unknown = {name for name in made.unknown}
    assert torch.equal(ema, expected[0])
    assert torch.equal(model.trace, expected[1]) or unknown == {"m.trace"}
    assert unknown <= {"m.trace"}
    if cut == "before the second change":
        assert unknown == ({"m.trace"} if others else set())


def test_a_large_buffer_that_is_changed_without_being_counted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_recovery.state.snapshots.buffer_copy.ALWAYS_COPIED_BYTES", 0)
    model = nn.Module()
    model.register_buffer("queue", torch.full((64,), float("nan")))
    model.register_buffer("other", torch.zeros(4))
    snapshot = Snapshot(TrainingState({"m": model}))
    for _ in range(3):
        snapshot.take()
        model.other.add_(1.0)
        assert not snapshot.is_spoilt()
    model.queue.data[3] = 1.0
    assert snapshot.is_spoilt()


class Grows(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("mask", None, persistent=False)
        self.length, self.cache, self.rank = 0, None, rank

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.length:
            self.length = len(x)
            self.mask = torch.full((len(x),), float(len(x)))
        self.cache = x if self.cache is None else self.cache
        return x * self.mask[: len(x)]


def test_plain_attributes_beside_a_buffer_go_with_it() -> None:
    """Else a forward takes a mask for one of the length that it was made for in the cut iteration."""
    model = Grows(0)
    snapshot = Snapshot(TrainingState({"model": model}))
    snapshot.take()
    model(torch.ones(2))
    snapshot.restore()
    assert (model.length, model.mask, model.cache) == (0, None, None)
    model(torch.ones(2))
    snapshot.take()
    model(torch.ones(3))
    assert model.length == 3
    snapshot.restore()
    assert model.length == 2 and model(torch.ones(2)).tolist() == [2, 2] and model.cache is not None


def test_a_receiver_gets_those_that_have_changed_and_else_has_its_own() -> None:
    source, here = Grows(0), Grows(1)
    sent, taken = (Snapshot(TrainingState({"model": one})) for one in (source, here))
    source(torch.ones(2))
    sent.take()
    here(torch.ones(4))
    taken.install(sent.tree())
    assert (here.length, here.mask.tolist(), here.rank) == (2, [2, 2], 1)
    fresh = Snapshot(TrainingState({"model": Grows(2)}))
    fresh.take()
    taken.install(fresh.tree())
    assert (here.length, here.mask, here.rank) == (0, None, 1)
    without = {name: value for name, value in sent.tree().items() if name != "attributes"}
    taken.install(without)  # of an earlier version
    assert here.length == 0 and here.mask.tolist() == [2, 2]
