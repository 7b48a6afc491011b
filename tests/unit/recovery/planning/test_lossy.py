"""The inexact ways out of a half-done update: every mixture of three survivors and three parameters, on symbols."""

from __future__ import annotations

import itertools
import json

import pytest

from swift_recovery.planning.plan import Plan, Way
from swift_recovery.planning.planner import make_plan
from swift_recovery.planning.reports import RankReport

NUM_PARAMETERS = 3
SUBSETS = [c for n in range(NUM_PARAMETERS + 1) for c in itertools.combinations(range(NUM_PARAMETERS), n)]
MIXTURES = [members for size in (1, 2, 3) for members in itertools.product(SUBSETS, repeat=size)]


def survivors(mixture: tuple[tuple[int, ...], ...], world_size: int) -> list[RankReport]:
    """Cut in update number 7. Who has updated everything has finished the iteration."""
    everyone, all_of_it = tuple(range(world_size)), tuple(range(NUM_PARAMETERS))
    return [
        RankReport(rank, "holding", 8, 0, everyone) if have == all_of_it
        else RankReport(rank, "holding", 7, 0, everyone, have, NUM_PARAMETERS if have else 0)
        for rank, have in enumerate(mixture)
    ]  # fmt: skip


def carry_out(plan: Plan, reports: list[RankReport], world_size: int) -> dict[int, tuple[str, ...]]:
    """By rank, the version of each parameter when the iteration of the plan begins."""
    held: dict[int, list[str]] = {rank: ["none"] * NUM_PARAMETERS for rank in range(world_size)}
    for report in reports:
        new = range(NUM_PARAMETERS) if report.iteration == 8 else report.updated
        held[report.rank] = ["new" if number in new else "old" for number in range(NUM_PARAMETERS)]
    for patch in plan.patches:
        for target, number in itertools.product(patch.targets, patch.parameters):
            held[target][number] = held[patch.source][number]
    return {rank: tuple(held[plan.sources.get(rank, rank)]) for rank in held}


@pytest.mark.parametrize("way", ["immediate-rollback", "lossy-forward"])
def test_every_mixture_ends_in_one_state_on_all_ranks(way: Way) -> None:
    for mixture in MIXTURES:
        leave(mixture, way)


def leave(mixture: tuple[tuple[int, ...], ...], way: Way) -> None:
    world_size = len(mixture) + 1
    reports = survivors(mixture, world_size)
    plan = make_plan(reports, world_size, way=way)
    assert plan.kind == "copy" and not plan.undone, mixture
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    states = set(carry_out(plan, reports, world_size).values())
    assert len(states) == 1, (mixture, plan)
    (state,) = states
    made = set(itertools.chain(*mixture))
    if made == set(range(NUM_PARAMETERS)):
        assert plan.iteration == 8 and state == ("new",) * NUM_PARAMETERS, "together they have it all"
        assert not plan.deviation.keeps and not plan.deviation.resumed and not plan.deviation.silent
        return
    assert plan.iteration == 7
    if way == "immediate-rollback":
        least = min(len(have) for have in mixture)
        assert state.count("new") == least, "the survivor that has done least of it is taken as it is"
        assert bool(plan.deviation.keeps) == bool(least) and not plan.deviation.silent
        return
    assert {number for number, version in enumerate(state) if version == "new"} == made
    resumed = dict.fromkeys(range(world_size), tuple(sorted(made))) if made else {}
    assert plan.deviation.resumed == resumed
    assert plan.deviation.silent == ((world_size - 1,) if made else ()), "without a half-done update all is exact"


def test_nothing_deviates_unless_it_is_asked_for() -> None:
    for mixture in MIXTURES:
        deviation = make_plan(survivors(mixture, 4), 4).deviation
        assert not deviation.keeps and not deviation.resumed and not deviation.silent
