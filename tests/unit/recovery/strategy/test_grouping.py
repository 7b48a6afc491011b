"""Groups of machines: the tables of the paper, the optimum, and what the greedy algorithm misses of it."""

from __future__ import annotations

import itertools
import math
import random
import runpy
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_recovery.strategy.grouping import Chain, Groups, alone, greedy, optimal
from tests.support.job import ROOT

# What the paper prints, and what its authors measured.
TABLES = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
VIT: Chain = TABLES["VIT"]
TABLE_7: dict[float, str] = TABLES["TABLE_7"]
text: Callable[[Groups], str] = TABLES["text"]
# It has 7-8 9-10 there, which cannot come before its own 6-7 8-9 at 9e11.
IMPOSSIBLE = 1e12


def some_chain(seed: int, num_machines: int | None = None, helpers: bool = False) -> Chain:
    choose = random.Random(seed)
    num_machines = num_machines or choose.randint(2, 12)
    return Chain(
        [choose.uniform(0.2, 5.0) for _ in range(num_machines)],
        [choose.choice([1e9, choose.uniform(1e8, 3e9)]) for _ in range(num_machines - 1)],
        bytes_per_s=choose.choice([1e8, 1.25e9, 1e10]), iterations=choose.choice([1, 50]), helpers=helpers,
    )  # fmt: skip


def all_groups(chain: Chain) -> list[Groups]:
    """Every way to cut the chain."""
    boundaries, found = range(1, chain.num_machines), []
    for count in range(chain.num_machines):
        for cuts in itertools.combinations(boundaries, count):
            ends = [0, *cuts, chain.num_machines]
            found.append(tuple(itertools.starmap(range, itertools.pairwise(ends))))
    return found


@pytest.mark.parametrize("limit", [limit for limit in TABLE_7 if limit != IMPOSSIBLE])
def test_table_7_of_the_paper(limit: float) -> None:
    assert len(TABLE_7) == 13 and text(greedy(VIT, limit, "authors")) == TABLE_7[limit]


def test_the_row_of_table_7_that_no_merging_gives() -> None:
    assert text(greedy(VIT, IMPOSSIBLE, "authors")) == "0 1 2 3 4 5 6 7 8-9 10-12 13-15" != TABLE_7[IMPOSSIBLE]


@pytest.mark.parametrize("seed", range(40))
def test_nothing_that_fits_is_better_than_the_optimum(seed: int) -> None:
    chain = some_chain(seed, helpers=bool(seed % 2))
    budget = random.Random(seed).uniform(0.0, 1.1) * chain.log_bytes(alone(chain))
    found = optimal(chain, budget)
    fitting = [groups for groups in all_groups(chain) if chain.log_bytes(groups) <= budget]
    assert found in fitting
    assert chain.expected_repeat_s(found) == pytest.approx(min(map(chain.expected_repeat_s, fitting)), rel=1e-12)


@given(st.integers(0, 10**6), st.floats(0.0, 1.2), st.sampled_from(["paper", "authors"]), st.booleans())
def test_groups_fit_and_have_each_machine_once(seed: int, part: float, weighting: str, helpers: bool) -> None:
    chain = some_chain(seed, helpers=helpers)
    budget = part * chain.log_bytes(alone(chain))
    for groups in (greedy(chain, budget, weighting), optimal(chain, budget)):  # type: ignore[arg-type]
        assert [machine for group in groups for machine in group] == list(range(chain.num_machines))
        assert chain.log_bytes(groups) <= budget * (1 + 1e-12)


def test_the_greedy_algorithm_beside_the_optimum() -> None:
    """Of 1,000 chains: it is never better. The figures are those of the room's README."""
    gaps = []
    for seed in range(1000):
        chain = some_chain(seed)
        budget = random.Random(seed).uniform(0.1, 0.9) * chain.log_bytes(alone(chain))
        best = chain.expected_repeat_s(optimal(chain, budget))
        gaps.append(chain.expected_repeat_s(greedy(chain, budget)) / best - 1)
    assert min(gaps) > -1e-9
    found = sum(gap < 1e-9 for gap in gaps), f"{statistics.mean(gaps):.1%}", f"{max(gaps):.0%}"
    assert found == (607, "5.8%", "103%")


def test_a_budget_of_nothing_logs_nothing() -> None:
    assert optimal(VIT, 0.0) == greedy(VIT, 0.0) == (range(16),)


def test_a_boundary_that_costs_nothing_to_log_is_logged() -> None:
    chain = Chain([1.0, 1.0, 1.0], [0.0, 5.0], bytes_per_s=1.0)
    assert optimal(chain, 0.0) == (range(1), range(1, 3))


def test_with_helpers_the_time_is_shared() -> None:
    chain = Chain([4.0] * 4, [0.0] * 3, bytes_per_s=1.0, helpers=True)
    assert [chain.repeat_s(range(size)) for size in (1, 2, 3, 4)] == [1.0, 4.0, 12.0, 16.0]


def test_64_machines_take_no_time() -> None:
    chain = some_chain(5, 64)
    groups = optimal(chain, 0.5 * chain.log_bytes(alone(chain)))
    assert chain.expected_repeat_s(groups) <= chain.expected_repeat_s(
        greedy(chain, 0.5 * chain.log_bytes(alone(chain)))
    )


@pytest.mark.parametrize(("values", "wrong"), [
    (([1.0, 2.0], [1.0, 1.0], 1.0), "2 machines have 1 boundaries, not 2"),
    (([1.0, 2.0], [1.0], 0.0), "the network must carry more than nothing"),
])  # fmt: skip
def test_chains_that_cannot_be(values: tuple[list[float], list[float], float], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Chain(*values)


def test_groups_between_which_nothing_passes_are_merged_last() -> None:
    """It would save nothing, and what one of them loses would take the other back."""
    chain = Chain([1.0] * 8, [1e9, 0, 1e9, 0, 1e9, 0, 1e9], 1e12)
    assert greedy(chain, 3e9) == (range(2), *(range(at, at + 1) for at in range(2, 8)))
    assert greedy(chain, 0.0) == tuple(range(at, at + 2) for at in range(0, 8, 2))


def test_groups_that_log_more_than_is_allowed_to_each_are_merged() -> None:
    chain = Chain([1.0] * 6, [1e9] * 5, 1e12)
    found = greedy(chain, math.inf, fits=lambda group: len(group) > 1 or group[0] != 2)
    assert [len(group) for group in found].count(2) == 1 and all(group != range(2, 3) for group in found)
    assert greedy(chain, math.inf, fits=lambda group: False) == (range(6),)
    assert greedy(chain, math.inf) == alone(chain)


@pytest.mark.parametrize("seed", range(20))
def test_without_a_limit_the_fastest_groups_of_all_are_found(seed: int) -> None:
    """By a shorter way, which keeps one pair for each machine."""
    chain = some_chain(seed, num_machines=8, helpers=True)
    found = optimal(chain, chain.log_bytes(alone(chain)) * 2)
    assert chain.expected_repeat_s(found) == pytest.approx(min(map(chain.expected_repeat_s, all_groups(chain))))
