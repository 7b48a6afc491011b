"""What differs between replicas is named, and what differs by design is no alarm."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from swift_agent.worker.replicas.fingerprints import Fingerprints
from swift_recovery.state.deviation import (
    NUM_FIRST,
    Fingerprint,
    all_differences,
    are_of_each_rank,
    because_of_machines,
    compare,
    describe,
    forbids_going_on,
    next_due,
    objects_apart,
    sentence,
    summarised,
)
from swift_recovery.state.training_state import TrainingState


def trained(lr: float = 0.1, bump: float = 0.0) -> TrainingState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = lr
    with torch.no_grad():
        model[2].bias += bump
        model[1].running_mean += bump
    return TrainingState({"model": model}, {"optimizer": optimizer})


def prints(*states: TrainingState, apart: frozenset[str] | None = frozenset()) -> dict[int, Fingerprint]:
    found = {}
    for rank, state in enumerate(states):
        one = Fingerprints(state).take()
        found[rank] = Fingerprint(one.parts, one.shown, apart, 2 if rank == len(states) - 1 else 1)
    return found


def test_equal_states_have_equal_fingerprints() -> None:
    told = prints(trained(), trained())
    assert told[0].digest() == told[1].digest() and compare(told, undisturbed=False)[0] == []
    assert Fingerprint.from_json(told[0].to_json()) == told[0]


def test_what_differs_is_named_with_its_ranks_and_small_values() -> None:
    told = prints(trained(), trained(), trained(lr=0.05, bump=1.0))
    assert len({one.digest() for one in told.values()}) == 2
    wrong, _ = compare(told, undisturbed=False)
    text = describe(wrong)
    assert "lr of optimizer is 0.1 on ranks 0, 1, 0.05 on rank 2" in text
    assert "parameter model.2.bias is" in text and "on rank 2" in text
    assert "buffer model.1.running_mean of rank 2 is not that of ranks 0, 1" in text
    assert "weight" not in text
    said = sentence(told, wrong, iteration=9, equal_after=8, undisturbed=False, generation=2)
    assert "Rank 2 started over in generation 2" in said and "after iteration 8 they were equal" in said
    assert "job.iteration_number" in said


def test_buffers_that_differed_before_anything_failed_are_no_alarm() -> None:
    """BatchNorm's statistics are each rank's own where nobody broadcasts them."""
    one, other = trained(), trained()
    other.models["model"][1].running_mean += 1.0
    wrong, apart = compare(prints(one, other, apart=None), undisturbed=True)
    assert wrong == [] and apart == {"model.1.running_mean"}
    assert compare(prints(one, other, apart=apart), undisturbed=False)[0] == []
    assert compare(prints(one, other, apart=None), undisturbed=False)[0] == []  # nobody has seen that time
    # Alike before, and not any more.
    assert [each.name for each in compare(prints(one, other), undisturbed=False)[0]] == ["model.1.running_mean"]


def test_buffers_that_begin_to_differ_later_are_told_and_no_more() -> None:
    """A BatchNorm that was frozen in the first iterations; a counter of each rank's own."""
    one, other = trained(), trained()
    other.models["model"][1].running_mean += 1.0
    told = prints(one, other)
    wrong, _ = compare(told, undisturbed=False)
    assert not forbids_going_on(wrong)
    said = sentence(told, wrong, iteration=21, equal_after=None, undisturbed=False, generation=2)
    assert "buffer model.1.running_mean of rank 1 is not that of rank 0" in said and "training goes on" in said
    assert forbids_going_on(compare(prints(one, trained(bump=1.0)), undisturbed=False)[0])
    assert forbids_going_on(compare(prints(one, trained(lr=0.2)), undisturbed=False)[0])


class Mean:
    """Of each rank's losses, or of the weights; the script has tracked it."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


def test_objects_of_the_script_that_begin_to_differ_are_told_and_no_more() -> None:
    one, other = trained(), trained()
    one.others["ema"], other.others["ema"] = Mean(1.0), Mean(2.0)
    wrong, apart = compare(prints(one, other, apart=None), undisturbed=True)
    assert wrong == [] and apart == objects_apart(prints(one, other)) == {"ema"}
    assert compare(prints(one, other, apart=apart), undisturbed=False)[0] == []
    told = prints(one, other)
    wrong, _ = compare(told, undisturbed=False)
    said = sentence(told, wrong, iteration=21, equal_after=16, undisturbed=False, generation=2)
    assert "the state of ema of rank 1 is not that of rank 0 (after iteration 16 they were equal)" in said
    assert "Training goes on" in said and not forbids_going_on(wrong)
    other.others["ema"] = Mean(1.0)
    assert prints(one)[0].digest() == prints(other)[0].digest() and objects_apart(prints(one, other)) == frozenset()
    # At the end of a run nobody has anything of them.
    assert Fingerprints(one).take(whole=True).parts["object"] == {}


def test_parameters_must_be_equal_from_the_start() -> None:
    told = prints(trained(), trained(bump=1.0), apart=None)
    wrong, _ = compare(told, undisturbed=True)
    said = sentence(told, wrong, iteration=1, equal_after=None, undisturbed=True, generation=1)
    assert "Nothing has failed" in said and "job.track(replicas=[job.rank])" in said
    assert "make a copy of it (an average of the weights) after that" in said  # made before it, each rank has its own


def test_state_that_one_rank_alone_keeps_is_no_other_model() -> None:
    one, other = trained(), trained()
    (optimizer,) = other.optimizers.values()
    optimizer.state.pop(other.parameters()[0])
    told = prints(one, other, apart=None)
    wrong, _ = compare(told, undisturbed=True)
    said = sentence(told, wrong, iteration=1, equal_after=None, undisturbed=True, generation=1)
    assert forbids_going_on(wrong) and "keeps some of its state on one rank only" in said


def test_a_learning_rate_alone_is_enough() -> None:
    """It reaches the next update."""
    wrong, _ = compare(prints(trained(), trained(lr=0.2)), undisturbed=False)
    assert [one.name for one in wrong] == ["lr of optimizer"]


def test_what_is_too_much_for_one_comparison_comes_in_the_next(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("swift_agent.worker.replicas.fingerprints.MAX_BYTES", 1)
    taken = Fingerprints(trained())
    names = [set(taken.take().parts["parameter"]) for _ in range(7)]
    assert all(len(one) == 1 for one in names) and len(set().union(*names)) == 6 and names[0] == names[6]
    assert len(taken.take(whole=True).parts["parameter"]) == 6


@given(base=st.integers(0, 10**6), every=st.integers(0, 50), steps=st.integers(1, 40))
def test_comparisons_come_after_one_two_four_iterations_and_before_checkpoints(
    base: int, every: int, steps: int
) -> None:
    number, seen = base, []
    for _ in range(steps):
        due = next_due(base, number, undisturbed=False, every=every)
        assert due is not None and due > number
        number = due
        seen.append(due)
    powers = [base + 2**k for k in itertools.takewhile(lambda k: base + 2**k <= number, itertools.count())]
    multiples = [m for m in range(base + 1, number + 1) if every and m % every == 0] if number - base < 10**5 else []
    assert set(powers) | set(multiples) <= set(seen)


def test_an_undisturbed_run_pays_for_a_few_comparisons() -> None:
    number, seen = 0, []
    while number < 1000:
        number = next_due(0, number, undisturbed=True, every=10)
        seen.append(number)
    assert seen == [2**power for power in range(11)] and NUM_FIRST in seen


def test_replicas_that_begin_to_differ_in_an_undisturbed_run_are_told_and_go_on() -> None:
    told = prints(trained(), trained(bump=1.0))
    wrong, _ = compare(told, undisturbed=True)
    said = sentence(told, wrong, iteration=64, equal_after=32, undisturbed=True, generation=1, late=True)
    assert "after iteration 32 they were equal). Nothing has failed" in said and "Training goes on" in said


def on_machines(states: list[TrainingState], computes: list[str]) -> dict[int, Fingerprint]:
    told = prints(*states)
    return {rank: replace(told[rank], computes=computes[rank]) for rank in told}


def test_replicas_that_do_not_compute_alike_and_differ_are_told_that() -> None:
    """No script makes them equal."""
    told = on_machines([trained(), trained(), trained(bump=1.0)], ["1 threads, AVX2"] * 2 + ["1 threads, SVE"])
    assert Fingerprint.from_json(told[2].to_json()) == told[2]
    wrong, _ = compare(told, undisturbed=True)
    for late in (False, True):
        text = sentence(told, wrong, iteration=2, equal_after=1, undisturbed=True, generation=1, late=late)
        assert text.startswith("replicas do not compute alike, and have rounded otherwise: ranks 0, 1 with AVX2; ")
        assert "What differs after iteration 2 (after iteration 1 they were equal): parameter model" in text
        assert ": ranks 0, 1 with AVX2; rank 2 with SVE. Training goes on, each rank with its own values; " in text
        assert "all start again" not in text and "machines of one kind (see Reproducibility). What " in text
    alone = {rank: replace(one, computes="AVX2", rounded=rank == 0) for rank, one in told.items()}
    assert "have rounded otherwise: the machines of another kind are gone. " in because_of_machines(alone, wrong)


@pytest.mark.parametrize(
    ("states", "computes"),
    [
        ([{}, {}, {"bump": 1.0}], ["AVX2"] * 3),  # all alike
        ([{}, {}, {"bump": 1.0, "lr": 0.05}], ["AVX2", "AVX2", "SVE"]),  # nobody rounds a learning rate
    ],
)  # fmt: skip
def test_no_machine_is_blamed_for_what_a_script_does(states: list[dict[str, float]], computes: list[str]) -> None:
    told = on_machines([trained(**one) for one in states], computes)
    wrong, _ = compare(told, undisturbed=False)
    assert wrong and because_of_machines(told, wrong) == "" and because_of_machines(told, []) == ""


def test_gradients_of_each_rank_are_no_other_model() -> None:
    """Statistics of each rank's own beside them are by design."""
    one, other = trained(), trained()
    one.carried, other.carried = 1, 2
    with torch.no_grad():
        other.models["model"][1].running_mean += 1.0  # type: ignore[index,operator]
    told = prints(one, other, apart=None)
    wrong, by_design = compare(told, undisturbed=True)
    assert [one.kind for one in wrong] == ["gradient"] and are_of_each_rank(wrong)
    assert by_design == {"model.1.running_mean"}
    wrong, _ = compare(prints(one, other), undisturbed=False)
    assert are_of_each_rank(wrong) and len(wrong) == 2
    said = sentence(told, wrong, iteration=3, equal_after=None, undisturbed=True, generation=1)
    assert "gradients left without a step of rank 1 is not that of rank 0" in said and "its own" in said
    assert not are_of_each_rank(compare(prints(one, trained(bump=1.0)), undisturbed=True)[0])


def test_a_summary_stands_for_all_parts() -> None:
    one = Fingerprints(trained()).take()
    short = summarised(one, 8)
    assert len(short) <= 8 and short != summarised(Fingerprints(trained(bump=1.0)).take(), 8)
    assert summarised(one, 1000)["lr of optimizer"] == "0.1"


@given(values=st.lists(st.sampled_from("ab"), min_size=2, max_size=5))
def test_whoever_is_not_alike_is_among_the_ranks(values: list[str]) -> None:
    told = {rank: Fingerprint({"parameter": {"w": value}}) for rank, value in enumerate(values)}
    found = all_differences(told)
    assert bool(found) == (len(set(values)) > 1)
    if found:
        assert sorted(rank for _, ranks in found[0].held_by for rank in ranks) == list(range(len(values)))
