"""Pipelines whose ranks are not alike: only some log messages; or receive between the steps of two optimizers."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.job import ROOT, Agents

SCRIPT = ROOT / "tests" / "support" / "uneven_train.py"


def test_a_replica_of_one_stage_is_lost_beside_a_stage_that_logs(make_agents: Callable[..., Agents]) -> None:
    faults = [{"at": "forward", "iteration": 4, "rank": 2, "scope": "worker"}]
    agents = make_agents(
        num_nodes=3, num_workers=1, max_restarts=5, script=SCRIPT, orders={"shape": "replicas", "faults": faults}
    )
    outcome = agents.run("abc")
    assert "all workers restart" not in outcome.text()
    assert [len(outcome.pids[rank]) for rank in range(3)] == [1, 1, 2], outcome.text()
    assert outcome.results[1]["hash"] == outcome.results[2]["hash"] != outcome.results[0]["hash"]


def test_a_receive_between_two_steps_is_cut(make_agents: Callable[..., Agents]) -> None:
    """The report of that rank waits for an update that is under way: it must not wait for the others meanwhile."""
    faults = [
        {"at": "after_step", "iteration": 5, "rank": 1, "scope": "wait"},
        {"at": "after_step", "iteration": 5, "rank": 1, "scope": "worker"},
        {"at": "report", "iteration": 5, "rank": 0, "scope": "go", "on": 0},
    ]
    agents = make_agents(
        num_nodes=4, num_workers=1, max_restarts=5, script=SCRIPT, orders={"shape": "stages", "faults": faults}
    )
    outcome = agents.run("abcd")
    assert len(outcome.results) == 4, outcome.text()
    assert "could not be stopped" not in outcome.text()
