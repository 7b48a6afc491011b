"""Training with failures: by hand, against closed forms, and against Table 5 of SWIFT."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swift_recovery.strategy import intervals
from swift_recovery.strategy.profile import Machine, Profile, parse
from swift_recovery.strategy.simulation import Scheme, schemes, total_as_in_the_paper_s, total_s, wasted

HOUR_S = 3600.0
# Tables 4 and 5: iterations, iterations between two checkpoints, hours without failures; hours with global checkpoints,
# and with SWIFT; and how much faster SWIFT repeats what is lost (1 - the speed-up that section 7 measured).
TABLE_5 = {
    "Wide-ResNet-50": (450_360, 5004, 479.4, 557.4, 480.7, 0.0),
    "ViT-128/32": (93_600, 312, 85.6, 86.4, 86.0, 1 - 0.573),
    "BERT-128": (500_000, 5000, 461.1, 524.2, 476.1, 1 - 0.763),
}


class Failures:
    """These times, one after the other, the same in all runs."""

    def __init__(self, *times_s: float) -> None:
        self._times_s = [*times_s, 1e12]

    def __call__(self, num_runs: int) -> np.ndarray:
        return np.full(num_runs, self._times_s.pop(0))


def exponential(mtbf_s: float, seed: int = 0):  # type: ignore[no-untyped-def]
    generator = np.random.default_rng(seed)
    return lambda num: generator.exponential(mtbf_s, num)


def test_without_failures_only_its_cost_is_paid() -> None:
    assert total_s(Scheme("any", 0.1, 50.0, 10.0), 100.0, 2, Failures()).tolist() == pytest.approx([110.0, 110.0])


def test_one_failure_by_hand() -> None:
    """At 25 of 100: 5 since the last checkpoint are lost, which takes twice as long to repeat."""
    scheme = Scheme("checkpoints", 0.0, 7.0, 10.0, repeats=2.0)
    assert total_s(scheme, 100.0, 1, Failures(25.0)).tolist() == pytest.approx([100 + 7 + 10])


def test_a_failure_in_a_recovery_begins_it_again() -> None:
    scheme = Scheme("slow", 0.0, 20.0)
    # At 30, then 5 into the recovery of 20, which begins again.
    assert total_s(scheme, 100.0, 1, Failures(30.0, 5.0)).tolist() == pytest.approx([100 + 5 + 20])


def test_failures_that_leave_no_time() -> None:
    with pytest.raises(ValueError, match="no end after 100000 failures"):
        total_s(Scheme("slow", 0.0, 20.0), 100.0, 1, lambda num: np.full(num, 10.0))


@pytest.mark.parametrize("mtbf_s", [2e4, 1e5])
def test_rare_failures_cost_what_the_closed_form_says(mtbf_s: float) -> None:
    """Of Young's model, to first order: checkpoints, and for each failure a restart and half an interval."""
    interval_s, checkpoint_s, restart_s, training_s = 600.0, 5.0, 30.0, 2e6
    scheme = Scheme("checkpoints", checkpoint_s / interval_s, restart_s, interval_s)
    found = wasted({"it": total_s(scheme, training_s, 400, exponential(mtbf_s))}, training_s)["it"]
    assert found == pytest.approx(intervals.wasted(interval_s, checkpoint_s, mtbf_s, restart_s), rel=0.05)


@pytest.mark.parametrize("name", TABLE_5)
def test_table_5_of_swift(name: str) -> None:
    """Within one per cent. What the paper does not say (the time of checkpoints and restarts) is left out."""
    num_iterations, every, hours, with_checkpoints, with_swift, repeats = TABLE_5[name]
    training_s, mtbf_s = hours * HOUR_S, 17 * HOUR_S
    interval_s = every * training_s / num_iterations
    positions = np.random.default_rng(0).random((2000, 40))
    for scheme, expected in (
        (Scheme("global", 0.0, 0.0, interval_s), with_checkpoints),
        (Scheme("SWIFT", 0.0, 0.0, interval_s, repeats), with_swift),
    ):
        found = float(total_as_in_the_paper_s(scheme, training_s, mtbf_s, positions).mean()) / HOUR_S
        assert found == pytest.approx(expected, rel=0.01), scheme


def test_a_training_with_too_many_failures_is_not_said_to_have_no_end() -> None:
    """85,000 h with a failure each half an hour, of which a recovery takes a minute."""
    scheme = Scheme("any", 0.0, 60.0)
    with pytest.raises(ValueError, match=r"any: no end after 100000 failures, with 5[67]\.\d% of the training done"):
        total_s(scheme, 85_000 * HOUR_S, 1, lambda num: np.full(num, 0.5 * HOUR_S))


def test_positions_for_fewer_failures_than_there_are() -> None:
    with pytest.raises(ValueError, match="5 failures need as many positions"):
        total_as_in_the_paper_s(Scheme("any"), 100.0, 20.0, np.zeros((3, 4)))


def vit() -> Profile:
    return parse((Path(__file__).parents[4] / "examples" / "profiles" / "vit.json").read_text())


def test_the_schemes_of_a_job() -> None:
    names = [scheme.name for scheme in schemes(vit())]
    assert names == [
        "global checkpoints", "global checkpoints, as often as pays", "CheckFreq-like snapshots",
        "Elastic-Horovod-like snapshots", "SWIFT, logs", "SWIFT, logs and parallel recovery",
        "swift-agent, logs", "swift-agent, logs and helpers",
    ]  # fmt: skip
    replicated = replace(vit(), machines=(Machine(1.0, 1e9, True),) * 4, boundary_bytes=())
    assert [scheme.name for scheme in schemes(replicated)][4:] == [
        "just-in-time checkpoints, by the script", "just-in-time checkpoints, transparent", "SWIFT, replicas",
        "swift-agent, replicas",
    ]  # fmt: skip


def test_this_product_as_measured() -> None:
    """It replaces a machine sooner than the profile of the paper has it, and adds gradients over the network."""
    single = replace(vit(), gpus_per_machine=1)
    found = {scheme.name: scheme for scheme in schemes(single)}
    logs, helped = found["swift-agent, logs"], found["swift-agent, logs and helpers"]
    assert logs.recovery_s < found["SWIFT, logs"].recovery_s and logs.repeats == found["SWIFT, logs"].repeats
    assert found["SWIFT, logs and parallel recovery"].repeats < helped.repeats < logs.repeats
    heavy = replace(single, machines=tuple(replace(one, gradient_bytes=1e12) for one in vit().machines))
    found = {scheme.name: scheme for scheme in schemes(heavy)}
    assert found["swift-agent, logs and helpers"].repeats == found["swift-agent, logs"].repeats
    # It has helpers for one lost worker, not for a machine of eight.
    found = {scheme.name: scheme for scheme in schemes(vit())}
    assert found["swift-agent, logs and helpers"].repeats == found["swift-agent, logs"].repeats


def test_checkpoints_that_come_as_often_as_they_pay_waste_least() -> None:
    profile = vit()
    for scale in (1, 16):
        found = [one for one in schemes(profile, scale=scale) if one.name.startswith("global")]
        totals = {
            one.name: total_s(one, 480 * HOUR_S, 500, exponential(profile.mtbf_s / scale)) for one in found
        }
        lost = wasted(totals, 480 * HOUR_S)
        assert lost["global checkpoints, as often as pays"] < lost["global checkpoints"]


def test_what_a_scheme_costs_on_average_is_what_a_plan_predicts() -> None:
    """One failure at a random place of many checkpoints."""
    from swift_recovery.strategy.choose import ways

    profile = vit()
    predicted = {way.name: way.recovery_s for way in ways(profile)}
    places = np.random.default_rng(1).random(20_000) * 1e6
    for scheme in schemes(profile):
        name = {"global checkpoints": "checkpoint", "SWIFT, logs": "log"}.get(scheme.name)
        if name is not None:
            mean_s = scheme.recovery_s + scheme.lost(places).mean()
            assert mean_s == pytest.approx(predicted[name], rel=0.02), scheme.name


def test_10000_runs_of_480_hours_take_no_time() -> None:
    """(No clock here: this is one array operation for each failure.)"""
    totals = total_s(schemes(vit())[0], 480 * HOUR_S, 10_000, exponential(17 * HOUR_S))
    assert totals.shape == (10_000,) and json.dumps(float(totals.mean()))
