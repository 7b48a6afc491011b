"""A job whose nodes have different numbers of workers: ranks follow each other slot by slot, and a place is taken by a
node of the same size only."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.faults.conftest import assert_recovered
from tests.support.job import Agents


def test_a_worker_and_then_its_node_are_lost(
    make_agents: Callable[..., Agents], undisturbed: Callable[..., str]
) -> None:
    faults = [
        {"at": "backward", "iteration": 3, "rank": 2, "scope": "worker"},
        {"at": "backward", "iteration": 7, "rank": 1, "scope": "node"},
    ]
    three = ("--nproc-per-node", "3")
    agents = make_agents(
        num_workers=1, options=("--spares", "2"), orders={"faults": faults},
        node_options={"b": (*three, "--node-rank", "1"), "c": three},
    )  # fmt: skip
    agents.start("a")
    agents.start("b")
    deadline_s = time.monotonic() + 60.0
    while "starts ranks" not in (agents.directory / "agent.b.log").read_text():
        assert time.monotonic() < deadline_s, agents.outcome(0.0).text()
        time.sleep(0.05)
    agents.start("d")  # of one worker: it is there first, and does not fit
    agents.start("c")
    outcome = agents.wait()
    assert "c takes slot 1" in outcome.text() and "d takes slot" not in outcome.text()
    assert_recovered(outcome, undisturbed(), {1, 2, 3}, num_faults=2)
