"""Parameters that a script changes itself, across an iteration that is cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swift_recovery.state.snapshots import by_hand
from swift_recovery.state.snapshots.by_hand import ByHand, copies_of, put_back
from swift_recovery.state.snapshots.snapshot import Snapshot
from swift_recovery.state.training_state import TrainingState


@pytest.fixture(params=[True, False], ids=["kept from the beginning", "kept when they change"])
def eager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(by_hand, "EAGER_BYTES", 0)
    return bool(request.param)


def average(ema: nn.Parameter, value: float, way: str) -> None:
    with torch.no_grad():
        if way == "counted":
            ema.lerp_(torch.full_like(ema, value), 0.5)
        elif way == "by way of data":
            ema.data.mul_(0.5).add_(0.5 * value)
        else:
            ema.data = ema.data * 0.5 + 0.5 * value


@pytest.mark.parametrize("way", ["counted", "by way of data", "other memory"])
def test_what_a_cut_iteration_has_averaged_is_taken_back(way: str, eager: bool) -> None:
    ema, frozen = nn.Parameter(torch.zeros(40)), nn.Parameter(torch.ones(8))
    kept = ByHand([ema, frozen])
    for number in range(6):
        kept.take()
        average(ema, number + 1.0, way)  # an iteration that counts
        kept.take()
        before = ema.detach().clone()
        for _ in range(2):  # cut twice
            average(ema, 7.0, way)
            assert not kept.is_spoilt()
            kept.put_back()
            assert torch.equal(ema, before)
    assert torch.equal(frozen, torch.ones(8))
    assert (kept._all[1].copy is not None) == eager, "a frozen parameter needs no copy"


def test_the_first_change_of_what_is_not_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_hand, "EAGER_BYTES", 0)
    for way in ("counted", "by way of data", "other memory"):
        ema = nn.Parameter(torch.zeros(40))
        kept = ByHand([ema])
        kept.take()
        assert not kept.is_spoilt()
        average(ema, 1.0, way)
        assert kept.is_spoilt(), way


def test_a_state_that_has_come_is_no_change(eager: bool) -> None:
    ema = nn.Parameter(torch.zeros(4))
    kept = ByHand([ema])
    kept.take()
    with torch.no_grad():
        ema.fill_(5.0)
    kept.settle()
    assert not kept.is_spoilt()
    kept.put_back()
    assert torch.equal(ema, torch.full((4,), 5.0))
    assert (kept._all[0].copy is not None) == eager


def test_copies_are_put_back() -> None:
    parameters = [nn.Parameter(torch.arange(3.0)), nn.Parameter(torch.ones(2))]
    copies = copies_of(parameters)
    for parameter in parameters:
        parameter.data.zero_()
    put_back(copies)
    assert parameters[0].tolist() == [0.0, 1.0, 2.0] and parameters[1].tolist() == [1.0, 1.0]


def test_a_snapshot_has_those_of_no_optimizer() -> None:
    model, ema = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState({"model": model, "ema": ema}, {"o": optimizer})
    snapshot = Snapshot(state, by_hand=True)
    snapshot.take()
    weights = model.weight.detach().clone(), ema.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
        ema.weight.add_(1.0)
    snapshot.restore()
    # An optimizer knows what its step has overwritten.
    assert torch.equal(model.weight, weights[0] + 1.0) and torch.equal(ema.weight, weights[1])
    assert not Snapshot(state).by_hand and not snapshot.is_current()


def test_a_change_that_nobody_counts_begins_late() -> None:
    """The average begins in the ninth iteration; only the tenth compares nothing but what is counted."""
    ema = nn.Parameter(torch.zeros(40))
    kept = ByHand([ema])
    for number in range(1, 12):
        kept.take()
        if number in (9, 10):
            average(ema, 4.0, "by way of data")
    average(ema, 4.0, "by way of data")  # in the eleventh, which is cut
    assert not kept.is_spoilt()
    kept.put_back()
    assert torch.equal(ema, torch.full((40,), 3.0))


@pytest.mark.parametrize("always_bytes", [by_hand.ALWAYS_BYTES, 0])
def test_a_change_may_be_of_a_few_elements(always_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept each time, or one of those that are compared: they are spread over it."""
    monkeypatch.setattr(by_hand, "ALWAYS_BYTES", always_bytes)
    for shape, memory in (((40,), torch.contiguous_format), ((1, 8, 5, 5), torch.channels_last)):
        ema = nn.Parameter(torch.zeros(shape).contiguous(memory_format=memory))
        kept = ByHand([ema])
        for _ in range(9):
            kept.take()
        change = slice(20, None) if len(shape) == 1 else (0, slice(4, None))
        ema.data[change] = 1.0
        kept.put_back()
        assert not ema.any()


def test_what_no_look_has_compared_is_not_taken_for_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, where a comparison would wait, and they are too many to be kept each time."""
    monkeypatch.setattr(by_hand, "EAGER_BYTES", 0)
    ema = nn.Parameter(torch.zeros(40))
    kept = ByHand([ema])
    kept._all[0].is_on_host = False
    kept.take()
    average(ema, 4.0, "counted")
    for number in range(2, 11):
        kept.take()
        assert kept.is_spoilt() == (number == 10)
        if number == 9:
            average(ema, 4.0, "by way of data")
    average(ema, 4.0, "by way of data")
    assert kept.is_spoilt()


@pytest.mark.parametrize("since", ["the start", "the cut iteration", "the ninth iteration"])
def test_a_change_of_one_element_that_nobody_counts(since: str, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of those that no sample has: put back, or told. Frozen ones beside it, some of them NaN, are no reason."""
    monkeypatch.setattr(by_hand, "ALWAYS_BYTES", 0)
    queue, frozen = nn.Parameter(torch.zeros(4000)), nn.Parameter(torch.full((4000,), float("nan")))
    kept = ByHand([frozen, queue])
    for number in range(1, 12):
        kept.take()
        if since == "the start" or (since == "the ninth iteration" and number >= 9):
            queue.data[1] += 1.0
    kept.take()
    before = queue.detach().clone()
    assert kept.is_spoilt() == (since == "the ninth iteration")
    queue.data[1] += 1.0
    assert kept.is_spoilt() == (since != "the start")
    if since == "the start":
        kept.put_back()
        assert torch.equal(queue, before)
    for _ in range(5):
        kept.take()
    queue.data[1] += 1.0
    assert not kept.is_spoilt()  # the sixteenth look was at all of them
