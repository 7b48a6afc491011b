"""Checkpoint intervals: the formulas, and that they are what a search finds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_recovery.strategy.intervals import daly_s, wasted, young_s


@given(st.floats(0.1, 100.0), st.floats(1e4, 1e7), st.floats(0.1, 10.0))
def test_no_interval_wastes_less_than_youngs(checkpoint_s: float, mtbf_s: float, factor: float) -> None:
    best_s = young_s(checkpoint_s, mtbf_s)
    assert wasted(best_s, checkpoint_s, mtbf_s) <= wasted(best_s * factor, checkpoint_s, mtbf_s) * (1 + 1e-12)


def test_just_in_time_checkpointings_frequency() -> None:
    """c* = sqrt(N f / 2 o): 1,024 GPUs that fail once in 200 days each, and a checkpoint of 5 s."""
    num_gpus, per_s, overhead_s = 1024, 1 / (200 * 86400), 5.0
    often = math.sqrt(num_gpus * per_s / (2 * overhead_s))
    assert 1 / young_s(overhead_s, 1 / (num_gpus * per_s)) == pytest.approx(often)


def test_dalys_is_youngs_where_failures_are_rare_and_less_than_the_time_between_them_where_they_are_not() -> None:
    assert daly_s(1.0, 1e8) == pytest.approx(young_s(1.0, 1e8), rel=1e-4)
    assert daly_s(10.0, 5.0) == 5.0
    assert daly_s(9.0, 5.0) < young_s(9.0, 5.0)


@pytest.mark.parametrize(("checkpoint_s", "mtbf_s"), [(0.0, 1.0), (1.0, 0.0)])
def test_what_takes_no_time_has_no_interval(checkpoint_s: float, mtbf_s: float) -> None:
    with pytest.raises(ValueError, match="a checkpoint takes time"):
        young_s(checkpoint_s, mtbf_s)
