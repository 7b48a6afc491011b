"""Just-In-Time Checkpointing's analysis: by hand, its optimum by search, and against simulated trainings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_recovery.strategy import intervals
from swift_recovery.strategy.just_in_time import (
    Fleet,
    best_frequency,
    by_the_script,
    checkpoints,
    least_periodic,
    of_each_gpu,
    pays_from,
    periodic,
    recoveries,
    transparent,
)  # fmt: skip
from swift_recovery.strategy.simulation import Scheme, total_s

# 1,000 GPUs, of which one fails every 10,000 s.
FLEET = Fleet(1000, 1e-7, checkpoint_s=5.0, restart_s=60.0, minibatch_s=10.0)
fleets = st.builds(
    Fleet, st.integers(1, 10**5), st.floats(1e-9, 1e-6), st.floats(0.1, 600.0), st.floats(0.0, 600.0),
    st.floats(0.01, 60.0), st.floats(0.0, 0.01),
)  # fmt: skip


def test_by_hand() -> None:
    """With a checkpoint every 500 s."""
    assert checkpoints(FLEET, 1 / 500) == pytest.approx(1000 * 5 / 500)
    # One failure in 10,000 s costs each of 1,000 GPUs 60 s and half of 500.
    assert recoveries(FLEET, 1 / 500) == pytest.approx(1000 * (60 + 250) / 10_000)
    assert periodic(FLEET, 1 / 500) == pytest.approx(10 + 31)
    assert best_frequency(FLEET) == pytest.approx(math.sqrt(1000 * 1e-7 / (2 * 5)))
    watched = replace(FLEET, interception=0.001)
    assert transparent(watched) == pytest.approx(1000 * (0.001 + 5 / 10_000))
    # The checkpoint of one GPU, and a restart and half a minibatch of all.
    assert by_the_script(watched) == pytest.approx(5 / 10_000 + 1000 * (0.001 + 65 / 10_000))


@given(fleets, st.floats(0.1, 10.0))
def test_no_other_frequency_wastes_less(fleet: Fleet, factor: float) -> None:
    best = periodic(fleet, best_frequency(fleet))
    assert least_periodic(fleet) == pytest.approx(best)
    assert best <= periodic(fleet, best_frequency(fleet) * factor) * (1 + 1e-12)


@given(fleets, st.floats(1.0, 1e5))
def test_of_each_gpu_it_is_youngs_model(fleet: Fleet, interval_s: float) -> None:
    mtbf_s = 1 / fleet.job_failures_per_s
    young = intervals.wasted(interval_s, fleet.checkpoint_s, mtbf_s, fleet.restart_s)
    assert of_each_gpu(fleet, periodic(fleet, 1 / interval_s)) == pytest.approx(young)
    assert 1 / best_frequency(fleet) == pytest.approx(intervals.young_s(fleet.checkpoint_s, mtbf_s))


WAYS: dict[str, tuple[Callable[[Fleet], float], Callable[[Fleet], Scheme]]] = {
    "periodic": (
        least_periodic,
        lambda it: Scheme("", it.checkpoint_s * best_frequency(it), it.restart_s, 1 / best_frequency(it)),
    ),
    # The checkpoint of one GPU of N: what all wait for, in the mean.
    "by the script": (
        by_the_script, lambda it: Scheme("", 0.0, it.restart_s + it.minibatch_s / 2 + it.checkpoint_s / it.num_gpus),
    ),
    "transparent": (transparent, lambda it: Scheme("", it.interception, it.minibatch_s / 2)),
}  # fmt: skip


@pytest.mark.parametrize("num_gpus", [100, 1000, 4000])
@pytest.mark.parametrize("way", WAYS)
def test_simulated_trainings_waste_as_much(way: str, num_gpus: int) -> None:
    """Within four standard errors of the mean, and what the formula leaves out: failures in what is wasted already."""
    fleet = replace(FLEET, num_gpus=num_gpus)
    of, scheme = WAYS[way]
    expected, mtbf_s = of_each_gpu(fleet, of(fleet)), 1 / fleet.job_failures_per_s
    generator, training_s = np.random.default_rng(7), 300 * mtbf_s
    totals_s = total_s(scheme(fleet), training_s, 400, lambda num: generator.exponential(mtbf_s, num))
    lost = 1 - training_s / totals_s
    error = 4 * lost.std() / math.sqrt(len(lost)) + expected**2
    assert abs(lost.mean() - expected) < error < 0.2 * expected


def test_with_more_gpus_each_wastes_more() -> None:
    ten_times = replace(FLEET, num_gpus=10_000)
    for of in (least_periodic, by_the_script, transparent):
        assert of_each_gpu(ten_times, of(ten_times)) > of_each_gpu(FLEET, of(FLEET))


def test_watching_pays_from_some_number_of_gpus() -> None:
    """sqrt(2 N f o) + N f r > o_jit + N f m / 2."""
    number = pays_from(FLEET, 0.01)
    for num_gpus, does in ((number - 1, False), (number, True)):
        fleet = replace(FLEET, num_gpus=num_gpus, interception=0.01)
        assert (transparent(fleet) < least_periodic(fleet)) == does
    assert 1 < number < 1000 and pays_from(FLEET, 0.0) == 1
    with pytest.raises(ValueError, match="they never pay"):
        pays_from(Fleet(1, 1e-15, 1e-3, 0.0, 60.0), 0.9)


@pytest.mark.parametrize("wrong", [
    {"num_gpus": 0}, {"failures_per_s": 0.0}, {"checkpoint_s": 0.0}, {"restart_s": -1.0}, {"minibatch_s": -1.0},
    {"interception": 1.0}, {"interception": -0.1},
])  # fmt: skip
def test_fleets_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"there are GPUs|take no negative time"):
        replace(FLEET, **wrong)  # type: ignore[arg-type]
