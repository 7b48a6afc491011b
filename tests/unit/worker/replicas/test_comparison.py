"""Replicas compare what they hold over a real store of their generation; a failure in between ends that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swift_agent.wire.store_client import StoreClient
from swift_agent.wire.store_server import StoreServer
from swift_agent.worker.replicas import comparison
from swift_agent.worker.replicas.comparison import Comparison
from swift_recovery.state.training_state import TrainingState


class Rank:
    def __init__(self, rank: int, replicas: list[int], server: StoreServer, every: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.model.register_buffer("count", torch.zeros(1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.notes: list[str] = []
        self.supervisor: Any = SimpleNamespace(generation=1, interrupted=False, note=self.notes.append)
        self.groups: Any = SimpleNamespace(store=StoreClient("127.0.0.1", server.port))
        checkpoints = SimpleNamespace(every=every) if every else None
        self.tracked: Any = SimpleNamespace(
            state=TrainingState({"model": self.model}, {"optimizer": self.optimizer}),
            replicas=replicas, checkpoints=checkpoints, differed_after=0, computes="", rounded=False,
            apart=frozenset(), apart_is_told=False,
        )  # fmt: skip
        self.told: list[tuple[str, bool]] = []
        self.reader: Any = None
        place: Any = SimpleNamespace(rank=rank)
        self.comparison = Comparison(
            place, self.supervisor, self.groups, self.tracked, lambda why, hopeless: self.told.append((why, hopeless))
        )

    def begin(self, generation: int, iteration: int, *, undisturbed: bool = False) -> None:
        self.supervisor.generation, self.supervisor.interrupted = generation, False
        self.comparison.begin(iteration, undisturbed=undisturbed)

    def take(self, number: int) -> None:
        assert self.comparison.due == number
        self.comparison.take(number)


Make = Callable[..., list[Rank]]


@pytest.fixture
def make() -> Iterator[Make]:
    servers: list[StoreServer] = []
    ranks: list[Rank] = []

    def start(num: int = 2, every: int = 0) -> list[Rank]:
        servers.append(StoreServer("127.0.0.1"))
        ranks.extend(Rank(rank, list(range(num)), servers[-1], every) for rank in range(num))
        return ranks

    yield start
    for rank in ranks:
        rank.supervisor.interrupted = True
        rank.groups.store.close()
    for server in servers:
        server.close()


def settle(ranks: list[Rank]) -> None:
    for rank in ranks:
        assert rank.comparison.is_over(10.0)


def test_equal_replicas_say_nothing(make: Make) -> None:
    ranks = make(3)
    for rank in ranks:
        rank.begin(1, 0, undisturbed=True)
    for number in (1, 2, 4, 8):
        for rank in ranks:
            rank.take(number)
    settle(ranks)
    assert all(rank.told == [] and rank.comparison.due == 16 for rank in ranks)


def test_what_nobody_knows_to_have_been_alike_is_no_alarm(make: Make) -> None:
    """Nobody has seen an undisturbed run: a learning rate alone may differ by design. Parameters may not."""
    one, other = ranks = make(2)
    for rank in ranks:
        rank.begin(2, 20)
    other.optimizer.param_groups[0]["lr"] = 0.5
    for rank in ranks:
        rank.take(21)
    settle(ranks)
    assert one.told == [] and other.told == []
    with torch.no_grad():
        other.model.bias += 1.0
    for rank in ranks:
        rank.take(22)
    settle(ranks)
    ((why, hopeless),) = one.told
    assert "lr of optimizer" in why and "parameter model.bias" in why and not hopeless and other.told == []
    assert "after iteration 21 they were equal" in why


def test_replicas_that_do_not_compute_alike_train_on_and_are_told_once(make: Make) -> None:
    one, other = ranks = make(2, every=4)
    one.tracked.computes, other.tracked.computes = "AVX2", "AVX512"
    for rank in ranks:
        rank.begin(2, 20)
    with torch.no_grad():
        other.model.bias += 1e-7
    for number in (21, 22, 24):
        for rank in ranks:
            rank.take(number)
    settle(ranks)
    (said,) = one.notes
    assert "What differs after iteration 21: parameter model.bias" in said and "rank 1 with AVX512" in said
    assert one.told == other.told == [] and other.notes == [] and not one.comparison.has_failed
    assert one.comparison.why_not_kept(24) == "", "a checkpoint is kept"
    assert one.tracked.rounded and other.tracked.rounded
    # What no machine does is wrong on them, too; nobody has seen them equal since.
    other.optimizer.param_groups[0]["lr"] = 0.5
    for rank in ranks:
        rank.take(28)
    settle(ranks)
    ((why, hopeless),) = one.told
    assert "lr of optimizer" in why and "they were equal" not in why and not hopeless


def test_what_was_alike_before_the_failure_must_be_alike_after_it(make: Make) -> None:
    one, other = ranks = make(2)
    for rank in ranks:
        rank.begin(1, 0, undisturbed=True)
        rank.take(1)
    settle(ranks)
    for rank in ranks:
        rank.begin(2, 20)
    other.optimizer.param_groups[0]["lr"] = 0.5
    for rank in ranks:
        rank.take(21)
    settle(ranks)
    ((why, hopeless),) = one.told
    assert "lr of optimizer is 0.1 on rank 0, 0.5 on rank 1" in why and not hopeless and other.told == []


def test_ranks_that_never_were_replicas_are_told_at_the_start(make: Make) -> None:
    one, other = ranks = make(2)
    with torch.no_grad():
        other.model.bias += 1.0
    for rank in ranks:
        rank.begin(1, 0, undisturbed=True)
        rank.take(1)
    settle(ranks)
    ((why, hopeless),) = one.told
    assert "Nothing has failed" in why and "parameter model.bias" in why and hopeless


class Reader:
    """A loader of a script's own, which each rank ends a file of at another time."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("when", ["first iterations", "later", "after a failure"])
def test_tracked_loaders_that_were_alike_when_the_loop_began_and_no_longer_are(make: Make, when: str) -> None:
    one, other = ranks = make(2)
    one.optimizer.param_groups[0]["lr"] = 0.5  # by design
    for rank in ranks:
        rank.reader = Reader(0)
        rank.tracked.state.others["loader"] = rank.reader
        rank.begin(1, 0, undisturbed=True)
        for number in (1, 2) if when == "first iterations" else (1, 2, 4, 8):
            rank.reader.position = number
            rank.take(number)
    settle(ranks)
    assert one.told == [] and one.notes == []
    other.reader.position = 0  # it has begun with its next file
    for rank in ranks:
        if when == "after a failure":
            rank.begin(2, 20)
        rank.take({"first iterations": 4, "later": 16, "after a failure": 21}[when])
    settle(ranks)
    said = one.notes if when == "later" else [why for why, _ in one.told]
    assert len(said) == 1 and "the state of job.track(loader=...) of rank 1 is not that of rank 0" in said[0]
    assert "must stay the same on all ranks" in said[0] and "lr of" not in said[0]
    assert ("at the next loss all start again" in said[0]) == (when == "later")
    assert [hopeless for _, hopeless in one.told] == ([] if when == "later" else [when == "first iterations"])
    assert [rank.tracked.differed_after for rank in ranks] == [16 * (when == "later")] * 2 and other.told == []


@pytest.mark.parametrize("is_told", [False, True])
def test_objects_that_are_each_ranks_own_are_told_once_and_known_then(make: Make, is_told: bool) -> None:
    """A mean of the losses: all ranks begin with 0. If they do not begin alike, that was told when the loop began."""
    one, other = ranks = make(2)
    for rank in ranks:
        rank.tracked.apart_is_told = is_told
        rank.reader = rank.tracked.state.others["losses"] = Reader(0)
        rank.begin(1, 0, undisturbed=True)
    other.reader.position = 1
    for rank in ranks:
        rank.take(1)
        rank.take(2)
    settle(ranks)
    assert [rank.tracked.apart for rank in ranks] == [{"losses"}] * 2
    assert ["that of a replica: losses" in note for note in one.notes] == [True] * (not is_told)
    for rank in ranks:
        rank.begin(2, 20)
        rank.take(21)
    settle(ranks)
    assert len(one.notes) == (not is_told) and other.notes == one.told == other.told == []


@pytest.mark.parametrize("lr", [0.1, 0.5])
def test_an_object_that_was_alike_before_the_failure_is_told(make: Make, lr: float) -> None:
    """And goes on by itself, but not with what must be alike."""
    one, other = ranks = make(2, every=1)
    for rank in ranks:
        rank.reader = rank.tracked.state.others["ema"] = Reader(0)
        rank.begin(1, 0, undisturbed=True)
        rank.take(1)
    settle(ranks)
    other.reader.position, other.optimizer.param_groups[0]["lr"] = 1, lr
    for rank in ranks:
        rank.begin(2, 20)
        rank.take(21)
    settle(ranks)
    said = one.notes if lr == 0.1 else [why for why, _ in one.told]
    assert len(said) == 1 and "the state of ema of rank 1 is not that of rank 0" in said[0]
    assert (one.comparison.why_not_kept(21) == "") == (lr == 0.1)


def test_a_failure_in_between_ends_it_and_the_next_generation_starts_over(make: Make) -> None:
    one, other = ranks = make(2)
    with torch.no_grad():
        other.model.bias += 1.0
    for rank in ranks:
        rank.begin(2, 20)
    one.take(21)  # the other one is lost before it has told
    one.supervisor.interrupted = True
    settle([one])
    assert one.told == []
    with torch.no_grad():
        other.model.bias.copy_(one.model.bias)
    for rank in ranks:
        rank.begin(3, 20)
        rank.take(21)
    settle(ranks)
    assert one.told == [] and other.told == []


def test_a_state_that_differs_is_not_kept(make: Make) -> None:
    """The checkpoint with which all would start again is taken from one rank of a replica set."""
    one, other = ranks = make(2, every=5)
    for rank in ranks:
        rank.begin(2, 20)
        for number in (21, 22, 24):
            rank.take(number)
    assert one.comparison.why_not_kept(24) == ""
    with torch.no_grad():
        other.model.bias += 1.0
    answers: list[str] = []
    one.take(25)
    asking = threading.Thread(target=lambda: answers.append(one.comparison.why_not_kept(25)))
    asking.start()
    time.sleep(0.3)
    assert not answers  # it is not known yet
    other.take(25)
    asking.join(10.0)
    assert answers == ["the replicas differ"]


def test_a_buffer_that_becomes_each_ranks_own_is_told_once_and_kept(make: Make) -> None:
    one, other = ranks = make(2, every=1)
    for rank in ranks:
        rank.begin(1, 0, undisturbed=True)
        rank.take(1)
    settle(ranks)
    other.model.get_buffer("count").fill_(3.0)
    for rank in ranks:
        rank.begin(2, 20)
        for number in (21, 22):
            rank.take(number)
    settle(ranks)
    (note,) = one.notes
    assert "buffer model.count is 0.0 on rank 0, 3.0 on rank 1" in note and other.notes == []
    assert one.told == [] and one.comparison.why_not_kept(22) == "" and other.comparison.why_not_kept(21) == ""
    with torch.no_grad():
        other.model.bias += 1.0
    for rank in ranks:
        rank.take(23)
    settle(ranks)
    ((why, _),) = one.told
    assert "parameter model.bias" in why and one.comparison.has_failed


def test_an_error_is_told_and_the_next_comparison_is_made(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the state is not kept; nobody waits for it."""
    ranks = make(2, every=1)
    for rank in ranks:
        rank.begin(2, 20)

    def fail(self: object) -> str:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("swift_recovery.state.deviation.Fingerprint.digest", fail)
        for rank in ranks:
            rank.take(21)
        settle(ranks)
    for rank in ranks:
        assert rank.notes == [
            "the replicas could not be compared after iteration 21: MemoryError('no room'). Training goes on."
        ]
        assert rank.comparison.why_not_kept(21) == "the replicas could not be compared"
        rank.take(22)
    settle(ranks)
    assert all(rank.comparison.why_not_kept(22) == "" and not rank.comparison.has_failed for rank in ranks)


def test_who_is_not_told_by_the_others_does_not_wait_for_ever(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_agent.worker.replicas.comparison.PATIENCE_S", 0.5)
    one, _ = ranks = make(2, every=1)
    for rank in ranks:
        rank.begin(2, 20)
    one.take(21)
    assert "could not be compared" in one.comparison.why_not_kept(21)
    settle([one])
    assert one.comparison.why_not_kept(21) == "the replicas could not be compared"


def test_who_made_the_first_iteration_in_the_recovery_is_compared_after_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had owed the update. Its script had gone on with its own work after that iteration; and each fingerprint is of
    other parameters."""
    monkeypatch.setattr("swift_agent.worker.replicas.fingerprints.MAX_BYTES", 1)
    payer, other = ranks = make(2)
    for rank in ranks:
        rank.begin(1, 0, undisturbed=True)
        rank.take(1)
    settle(ranks)
    payer.supervisor.generation = 2
    payer.comparison.take_ahead()
    payer.optimizer.param_groups[0]["lr"] = 0.05
    for rank in ranks:
        rank.begin(2, 20)
    assert payer.comparison.is_ahead and not other.comparison.is_ahead
    payer.take(21)
    other.take(21)
    other.optimizer.param_groups[0]["lr"] = 0.05
    assert not payer.comparison.is_ahead
    for rank in ranks:
        rank.take(22)
    settle(ranks)
    for rank in ranks:
        assert rank.told == [] and [list(task.print.parts["parameter"]) for task in rank.comparison._tasks] in (
            [["model.weight"], ["model.bias"]], [["model.bias"]]
        )  # fmt: skip
        assert rank.comparison.why_not_kept(22) == "" and rank.comparison._equal_after == 22
    # Another failure came before it was compared.
    payer.supervisor.generation = 3
    payer.comparison.take_ahead()
    payer.begin(4, 20)
    assert not payer.comparison.is_ahead


@pytest.mark.parametrize("order", ["used first", "compared first", "cleared"])
def test_gradients_that_each_rank_accumulates_by_itself_are_told(make: Make, order: str) -> None:
    """However late they come; a restart would not help. Who clears them is left alone."""
    one, other = ranks = make(2)
    for rank, carried in zip(ranks, (5, 6), strict=True):
        rank.begin(1, 0, undisturbed=True)
        for number in (1, 2, 4, 8, 16, 32):
            rank.take(number)
        rank.tracked.state.carried = carried
        assert rank.comparison.is_due_for_gradients(40)
        if order == "used first":
            rank.comparison.gradients_are_used(40)
        rank.comparison.take(40)
        assert not rank.comparison.is_due_for_gradients(41) and rank.comparison.is_due_for_gradients(80)
    settle(ranks)
    if order == "compared first":
        assert one.told == [] and not one.comparison.has_failed
        for rank in ranks:
            rank.comparison.gradients_are_used(40)
    if order == "cleared":
        assert one.told == [] and not one.comparison.has_failed and one.comparison.why_not_kept(40) == ""
        return
    ((why, hopeless),) = one.told
    assert "after iteration 40: gradients left without a step of rank 1 is not that of rank 0" in why
    assert "ended with gradients, but without a step" in why and hopeless and other.told == []
    assert one.comparison.has_failed and not other.comparison.has_failed


def test_what_begins_to_differ_in_an_undisturbed_run(make: Make) -> None:
    """A learning rate of each rank's own is by design, and is known when something fails; parameters are told once."""
    one, other = ranks = make(2)
    for rank in ranks:
        rank.begin(1, 0, undisturbed=True)
        for number in (1, 2, 4, 8):
            rank.take(number)
    other.optimizer.param_groups[0]["lr"] = 0.5  # from the ninth iteration on
    for rank in ranks:
        rank.take(16)
    settle(ranks)
    for rank in ranks:
        rank.begin(2, 20)
        rank.take(21)
    settle(ranks)
    assert one.told == [] and one.notes == []
    with torch.no_grad():
        other.model.bias += 1.0
    for rank in ranks:
        rank.begin(3, 0, undisturbed=True)  # as if it were the first generation
        for number in (1, 2, 4, 8, 16, 32):
            rank.comparison._base, rank.comparison.due = 0, number
            if number > 8:
                rank.comparison.take(number)
    settle(ranks)
    (said,) = one.notes
    assert "replicas differ after iteration 16: parameter model.bias" in said and "Training goes on" in said
    assert one.told == [] and not one.comparison.has_failed and one.comparison.why_not_kept(40) == ""
    assert [rank.tracked.differed_after for rank in ranks] == [16, 16]


def test_replicas_are_compared_later_if_there_is_no_thread(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ranks = make(2)
    with torch.no_grad():
        other.model.bias += 1.0
    for rank in ranks:
        rank.begin(2, 20)

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        for rank in ranks:
            rank.take(21)
    for rank in ranks:
        rank.comparison.is_over(0.0)  # as both ask at their end
    settle(ranks)
    assert "parameter model.bias" in one.told[0][0] and other.told == []


def test_who_never_says_what_he_holds_is_told_and_waited_for_no_longer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = ranks = make(2)
    monkeypatch.setattr(comparison, "PATIENCE_S", 0.2)
    monkeypatch.setattr(comparison, "_SLICE", timedelta(seconds=0.1))
    for rank in ranks:
        rank.begin(2, 20)
    one.take(21)
    settle(ranks[:1])
    (note,) = one.notes
    assert "could not be compared after iteration 21" in note and "rank 1 has said nothing for 0.2 s" in note
