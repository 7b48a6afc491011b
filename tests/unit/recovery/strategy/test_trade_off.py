"""Space against time: the curves of SWIFT's figure 11, for the example and for pipelines of any shape."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from swift_recovery.strategy.choose import chain_of, log_recovery_s, ways
from swift_recovery.strategy.grouping import alone
from swift_recovery.strategy.profile import Machine, Profile, parse
from swift_recovery.strategy.trade_off import MAX_BUDGETS, curve

VIT = parse((Path(__file__).parents[4] / "examples" / "profiles" / "vit.json").read_text())


def some_pipeline(seed: int) -> Profile:
    choose = random.Random(seed)
    num = choose.randint(3, 10)
    machines = tuple(Machine(choose.uniform(0.2, 5.0)) for _ in range(num))
    sizes = tuple(choose.uniform(1e8, 3e9) for _ in range(num - 1))
    return replace(VIT, machines=machines, boundary_bytes=sizes, network_bytes_per_s=choose.choice([1e8, 1e9, 1e11]))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("helpers", [False, True])
def test_the_greedy_groups_are_never_better_than_the_best(seed: int, helpers: bool) -> None:
    job = some_pipeline(seed)
    best = curve(job, "optimum", helpers)
    for greedy in curve(job, "greedy", helpers):
        within = [one.recovery_s for one in best if one.log_bytes <= greedy.log_bytes * (1 + 1e-9)]
        # Budgets are steps: the best of a step may log a little more than the greedy ones of the same step.
        if within:
            step = chain_of(job).log_bytes(alone(chain_of(job))) / (len(job.machines) - 1)
            near = [one.recovery_s for one in best if one.log_bytes <= greedy.log_bytes + step]
            assert min(near) <= greedy.recovery_s * (1 + 1e-9)


def test_with_less_room_the_best_recovery_takes_longer() -> None:
    for helpers in (False, True):
        points = curve(VIT, "optimum", helpers)
        assert len(points) > 3 and len(points[-1].groups) == 2
        for more, less in itertools.pairwise(points):
            assert less.log_bytes < more.log_bytes and less.recovery_s > more.recovery_s


def test_the_greedy_curve_begins_where_everything_is_logged() -> None:
    first = curve(VIT, "greedy", False)[0]
    chain = chain_of(VIT)
    assert first.groups == alone(chain) and first.log_bytes == chain.log_bytes(alone(chain))
    assert first.recovery_s == ways(VIT)[1].recovery_s == log_recovery_s(VIT, alone(chain))


def test_to_log_everything_may_be_slower_where_logs_come_over_the_network() -> None:
    """The last machines of the example compute less than their messages take to come."""
    everything, best = curve(VIT, "greedy", False)[0], curve(VIT, "optimum", False)[0]
    assert best.recovery_s < everything.recovery_s and best.log_bytes < everything.log_bytes
    fast = replace(VIT, network_bytes_per_s=1e12)
    assert curve(fast, "optimum", False)[0].groups == alone(chain_of(fast))


def test_no_curve_without_a_pipeline_and_no_endless_one() -> None:
    assert curve(replace(VIT, boundary_bytes=()), "greedy", False) == ()
    two = replace(VIT, machines=VIT.machines[:2], boundary_bytes=(1e9,))
    assert [one.groups for one in curve(two, "optimum", False)] == [(range(1), range(1, 2))]
    long = replace(VIT, machines=VIT.machines * 8, boundary_bytes=(1e9,) * 127)
    assert len(curve(long, "greedy", True)) <= MAX_BUDGETS
