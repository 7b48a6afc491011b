"""An update that is cut in the middle: what each way loses, in time and in what is learnt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_recovery.strategy.half_updates import Cut, Outcome, outcomes

CUT = Cut(num_replicas=8, batch=256, updated=0.25, iteration_s=0.5, replace_s=2.0, restart_s=30.0, interval_s=600.0)


def test_by_hand() -> None:
    assert outcomes(CUT) == (
        Outcome("checkpoint", 330.0),
        Outcome("exact", 2.5),
        Outcome("immediate-rollback", 2.5, twice=0.25),
        # One replica's 32 samples, for three quarters of the parameters.
        Outcome("lossy-forward", 2.0, unlearnt=24.0),
    )
    assert [one.is_exact for one in outcomes(CUT)] == [True, True, False, False]


@given(st.floats(0.0, 1.0), st.integers(2, 1000))
def test_what_is_updated_costs_a_rollback_and_what_is_not_costs_lossy_forward(updated: float, replicas: int) -> None:
    _, exact, rollback, lossy = outcomes(replace(CUT, updated=updated, num_replicas=replicas))
    assert exact.is_exact and lossy.seconds <= rollback.seconds == exact.seconds
    assert rollback.twice == updated and 0 <= lossy.unlearnt <= CUT.batch / replicas


def test_where_nothing_or_all_was_updated_one_of_the_two_is_exact() -> None:
    """As `swift-run --recovery` has it (docs/overlap.md)."""
    assert outcomes(replace(CUT, updated=0.0))[2].is_exact and outcomes(replace(CUT, updated=1.0))[3].is_exact


@pytest.mark.parametrize("wrong", [
    {"num_replicas": 1}, {"batch": 0}, {"updated": 1.1}, {"updated": -0.1}, {"replace_s": -1.0}, {"interval_s": -1.0},
])  # fmt: skip
def test_cuts_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"at least 2 replicas|times are no less than 0"):
        replace(CUT, **wrong)  # type: ignore[arg-type]
