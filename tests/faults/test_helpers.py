"""Parallel recovery: helpers repeat what a lost stage had done, together with its replacement (SWIFT, section 5.2).

Each test asserts that its faults fired, that helpers were started and have ended, and that the state of every stage and
the losses of every micro-batch are bit for bit those of an undisturbed run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.job import Agents, Outcome
from tests.support.pipelines import SCRIPT, References, assert_same

Start = Callable[..., Outcome]


@pytest.fixture
def run(make_agents: Callable[..., Agents]) -> Start:
    def train(faults: list[dict[str, Any]], helpers: int = 1, spares: int = 1) -> Outcome:
        return make_agents(
            num_nodes=4, num_workers=1, max_restarts=20, script=SCRIPT,
            orders={"faults": faults, "schedule": "Schedule1F1B"},
            options=("--strategy", "log+parallel", "--helpers", str(helpers), "--spares", str(spares)),
        ).run("abcdefg"[: 4 + spares])  # fmt: skip

    return train


def started(outcome: Outcome) -> list[tuple[int, int]]:
    """Share and rank of each helper, in the order of their processes."""
    found = re.findall(r"process \d+ is helper (\d+) of rank (\d+)", outcome.text())
    return [(int(share), int(rank)) for share, rank in found]


def done(outcome: Outcome) -> int:
    """How many have ended by themselves."""
    return len(re.findall(r"helper \d+ of rank \d+ \(pid \d+\) has done its share", outcome.text()))


def test_a_spare_helps(run: Start, undisturbed_pipelines: References) -> None:
    outcome = run([{"at": "backward", "iteration": 5, "rank": 1, "scope": "worker"}])
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {1})
    assert re.search(r"; 1 helper repeats rank 1 with it, on [a-e]\b", outcome.text()), outcome.text()
    assert started(outcome) == [(1, 1)]
    assert done(outcome) == 1


def test_spares_and_survivors_help(run: Start, undisturbed_pipelines: References) -> None:
    outcome = run([{"at": "forward", "iteration": 6, "rank": 2, "scope": "worker"}], helpers=3, spares=2)
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {2})
    assert re.search(r"; 3 helpers repeat rank 2 with it, on \w, \w, \w\b", outcome.text()), outcome.text()
    assert sorted(started(outcome)) == [(1, 2), (2, 2), (3, 2)]
    assert done(outcome) == 3
