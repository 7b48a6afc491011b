"""A replacement begins its first iteration with the modes of a rank that was there; by a real store."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from swift_agent.worker.replicas import modes
from swift_agent.worker.replicas.fingerprints import Fingerprints
from swift_agent.worker.replicas.modes import Modes, Part, modes_of, part_of
from swift_recovery.planning.plan import Plan
from swift_recovery.state.deviation import compare, forbids_going_on, sentence
from swift_recovery.state.training_state import TrainingState

LOST_1 = Plan("copy", "rank 1 is lost", iteration=7, sources={1: 0})


class Rank:
    def __init__(self, rank: int, store: Any, replicas: tuple[int, ...] = (0, 1)) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.state = TrainingState({"model": self.model})
        self.notes: list[str] = []
        self.is_cut = False
        self.modes = Modes(self.state, rank, replicas, lambda: store, self.notes.append, lambda: self.is_cut)

    def freeze(self) -> None:
        self.model[1].eval()
        self.model[0].weight.requires_grad_(False)


def pair() -> tuple[Rank, Rank]:
    store = dist.HashStore()
    return Rank(0, store), Rank(1, store)


def test_a_replacement_has_the_modes_of_a_rank_that_was_there() -> None:
    survivor, new = pair()
    survivor.freeze()
    survivor.modes.recovered(LOST_1, was_there=True)
    new.modes.recovered(LOST_1, was_there=False)
    assert survivor.modes.is_due and new.modes.is_due
    reader = threading.Thread(target=new.modes.begin, args=(7,))
    reader.start()  # it may come first
    survivor.modes.begin(7)
    reader.join(10.0)
    assert modes_of(new.state) == modes_of(survivor.state)
    assert not new.model[1].training and new.model.training and not new.model[0].weight.requires_grad
    (said,) = new.notes
    assert "iteration 7 begins with other modes on rank 0" in said and survivor.notes == []
    assert "training of model.1, requires_grad of model.0.weight" in said
    assert not survivor.modes.is_due and not new.modes.is_due


def test_equal_modes_are_not_told() -> None:
    survivor, new = pair()
    survivor.modes.recovered(LOST_1, was_there=True)
    new.modes.recovered(LOST_1, was_there=False)
    survivor.modes.begin(7)
    new.modes.begin(7)
    assert new.notes == survivor.notes == []


def test_nobody_takes_the_modes_of_a_rank_whose_script_is_further_on() -> None:
    """It makes an iteration that it owes in a recovery, or comes to another one; the replacement waits no longer."""
    survivor, new = pair()
    survivor.freeze()
    for does in (lambda: survivor.modes.pay(LOST_1), lambda: survivor.modes.begin(8)):
        survivor.modes.recovered(LOST_1, was_there=True)
        new.modes.recovered(LOST_1, was_there=False)
        does()
        new.modes.begin(7)
        assert new.model[1].training and new.notes == []


def test_nobody_takes_those_of_a_replacement_that_was_cut_before_its_first_iteration() -> None:
    first, second = pair()
    second.model.eval()
    first.modes.recovered(Plan("copy", "", iteration=7, sources={0: 1}), was_there=False)
    first.modes.recovered(LOST_1, was_there=True)
    second.modes.recovered(LOST_1, was_there=False)
    first.modes.begin(7)
    second.modes.begin(7)
    assert not second.model.training


def test_who_is_cut_while_it_waits_waits_no_longer() -> None:
    _, new = pair()
    new.modes.recovered(LOST_1, was_there=False)
    new.is_cut = True
    new.modes.begin(7)
    assert new.notes == []


def test_a_source_that_never_comes_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "PATIENCE_S", 0.0)
    _, new = pair()
    new.modes.recovered(LOST_1, was_there=False)
    new.modes.begin(7)
    assert new.notes == []


@pytest.mark.parametrize(
    ("plan", "rank", "was_there", "part"),
    [
        (LOST_1, 0, True, Part(7, 0, says=True)),
        (LOST_1, 1, False, Part(7, 0, says=False)),
        (LOST_1, 2, True, None),
        (Plan("copy", "", iteration=7, sources={0: 2, 1: 2}), 1, True, None),  # it takes over an update, no more
        (Plan("copy", "", iteration=7, sources={0: 2, 1: 2}), 2, True, Part(7, 2, says=True)),
        (Plan("copy", "", iteration=7, handovers=(1,)), 1, False, Part(7, 0, says=False)),
        (Plan("copy", "", iteration=7, handovers=(1,)), 0, True, Part(7, 0, says=True)),
        (Plan("copy", "", iteration=7, loads=(0, 1, 2)), 1, False, None),  # nobody was there
        (Plan("copy", "", iteration=7, sources={1: 0}, stays=True), 1, False, None),
        (Plan("copy", "", iteration=7, sources={5: 4}), 0, True, None),  # of another part of the model
        (Plan("fresh", ""), 1, False, None),
    ],
)
def test_who_says_and_who_listens(plan: Plan, rank: int, was_there: bool, part: Part | None) -> None:
    assert part_of(plan, rank, (0, 1, 2), was_there=was_there) == part


def test_modes_that_differ_after_a_recovery_stop_training() -> None:
    survivor, new = pair()
    survivor.freeze()
    prints = {0: Fingerprints(survivor.state).take(), 1: Fingerprints(new.state).take()}
    alike = {rank: Fingerprints(survivor.state).take() for rank in (0, 1)}
    assert compare(alike, undisturbed=True) == ([], frozenset())
    wrong, by_design = compare(prints, undisturbed=True)
    assert wrong == [] and "training of model.1" in by_design  # the script's own way
    prints = {rank: type(one)(one.parts, one.shown, frozenset()) for rank, one in prints.items()}
    wrong, _ = compare(prints, undisturbed=False)
    modes_of_both = [one for one in wrong if one.kind == "mode"]
    assert forbids_going_on(modes_of_both)
    said = sentence(prints, modes_of_both, iteration=8, equal_after=None, undisturbed=False, generation=2)
    assert "training of model.1 is False on rank 0, True on rank 1" in said
    assert "by the number of the epoch" in said


def test_at_the_end_of_a_run_modes_say_nothing() -> None:
    survivor, _ = pair()
    before = Fingerprints(survivor.state).take(whole=True)
    survivor.freeze()
    assert Fingerprints(survivor.state).take(whole=True) == before
