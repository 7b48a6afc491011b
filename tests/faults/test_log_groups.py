"""Log groups: nodes between which no messages are logged go back to the newest checkpoint together, the others stay.

Each test asserts that its faults fired, which processes began again and which did not, and that the state of every
stage and the losses of every micro-batch are bit for bit those of an undisturbed run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from swift_agent.wire.injected import Fault
from swift_recovery.strategy.profile import parse
from tests.support.injected import apart
from tests.support.job import Agents, Outcome
from tests.support.pipelines import SCRIPT, References, assert_equal, assert_same, at, kill_at_random
from tests.tiers import in_soak

Start = Callable[..., Outcome]
ON_4 = "0-1,2-3"
ON_6 = "0,1-2,3-5"


@pytest.fixture
def run(make_agents: Callable[..., Agents]) -> Start:
    def train(
        faults: Sequence[dict[str, Any] | Fault], groups: str = ON_4, num_nodes: int = 4,
        schedule: str = "Schedule1F1B", options: tuple[str, ...] = (), **orders: Any,
    ) -> Outcome:  # fmt: skip
        of_script, injected = apart(faults)
        nodes = "abcdefghijkl"[: num_nodes + sum(fault.kind == "kill-node" for fault in injected)]
        return make_agents(
            num_nodes=num_nodes, num_workers=1, max_restarts=20, script=SCRIPT,
            orders={"faults": of_script, "schedule": schedule, **orders},
            options=(*(("--log-groups", groups) if groups else ()), "--spares", str(len(nodes) - num_nodes), *options),
        ).run(nodes, injected)  # fmt: skip

    return train


@pytest.mark.parametrize("place", ["forward", "backward", "before_step", "agreed", "between"])
def test_a_worker_takes_its_group_back(place: str, run: Start, undisturbed_pipelines: References) -> None:
    outcome = run([at(place, 5, 1)])
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {0, 1})
    assert "slots [0] of the same log group begin again with them" in outcome.text()


def test_a_node_takes_its_group_back(run: Start, undisturbed_pipelines: References) -> None:
    outcome = run([at("forward", 5, 2, "node")])
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {2, 3})
    assert sorted(outcome.exit_codes.values()) == [-9, 0, 0, 0, 0], outcome.text()


def test_one_group_after_the_other(run: Start, undisturbed_pipelines: References) -> None:
    faults = [at("backward", iteration, rank) for iteration, rank in ((2, 3), (5, 0), (8, 2))]
    assert_same(run(faults), undisturbed_pipelines("Schedule1F1B"), {0, 1, 2, 3})


@pytest.mark.parametrize(("rank", "lost"), [(0, {0}), (1, {1, 2}), (4, {3, 4, 5})])
def test_groups_of_one_two_and_three(
    rank: int, lost: set[int], run: Start, undisturbed_pipelines: References
) -> None:
    faults = [at("backward", 5, rank)]
    assert_same(run(faults, groups=ON_6, num_nodes=6), undisturbed_pipelines("Schedule1F1B", 6), lost)


def test_two_groups_at_once(run: Start, undisturbed_pipelines: References) -> None:
    """Each from its own neighbour's logs, and what one of them needs from the other they send each other once more."""
    faults = [
        {"at": "before_step", "iteration": 6, "rank": 1, "scope": "wait"},
        {"at": "before_step", "iteration": 6, "rank": 4, "scope": "go", "on": 0},
        {"at": "before_step", "iteration": 6, "rank": 4, "scope": "worker"},
        {"at": "before_step", "iteration": 6, "rank": 1, "scope": "worker"},
    ]
    assert_same(run(faults, groups=ON_6, num_nodes=6), undisturbed_pipelines("Schedule1F1B", 6), {1, 2, 3, 4, 5})


@pytest.mark.parametrize("rank", [1, 0, 3])
@pytest.mark.parametrize("place", ["rebuild", "transfer", "verify"])
def test_another_loss_in_the_recovery(
    place: str, rank: int, run: Start, undisturbed_pipelines: References
) -> None:
    """Of what was lost, of one that went back with it, and of another group."""
    faults = [
        {"at": "forward", "iteration": 6, "rank": 1, "scope": "worker"},
        {"at": place, "rank": rank, "scope": "worker", "after": 0},
    ]
    outcome = run(faults, groups=ON_4)
    lost = {0, 1, 2, 3} if rank == 3 else {0, 1}
    if "all workers restart" in outcome.text():
        assert rank == 3, outcome.text()  # then nobody holds a state any more
        assert_equal(outcome, undisturbed_pipelines("Schedule1F1B"))
    else:
        assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), lost)
    assert outcome.fired == {0, 1}, outcome.text()


def test_they_begin_with_the_newest_checkpoint(run: Start, undisturbed_pipelines: References) -> None:
    """What is repeated from there are two iterations, by two stages together."""
    outcome = run([at("forward", 5, 1)], checkpoint=3, patient=True)
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {0, 1})
    assert "load the checkpoint of iteration 3" in outcome.text()


def test_logs_that_are_in_a_store_only(run: Start, undisturbed_pipelines: References, tmp_path: Path) -> None:
    """Those of the group that stays come back from there."""
    faults = [{"at": "forward", "iteration": 6, "rank": 1, "scope": "worker"}]
    outcome = run(faults, options=("--log-store", str(tmp_path / "store")), loses_logs=[5])
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {0, 1})
    assert "the rest comes from" in outcome.text()


@pytest.mark.parametrize("schedule", ["ByHand", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_schedules(schedule: str, run: Start, undisturbed_pipelines: References) -> None:
    faults = [
        {"at": "backward", "iteration": iteration, "rank": rank, "scope": "worker"}
        for iteration, rank in ((4, 0), (7, 3))
    ]
    assert_same(run(faults, schedule=schedule), undisturbed_pipelines(schedule), {0, 1, 2, 3})


def test_collectives_of_a_group_are_made_again_together(run: Start, undisturbed_pipelines: References) -> None:
    """The gradients are cut to a norm that all four stages share: what the lost had of it comes from the others."""
    faults = [{"at": "forward", "iteration": 5, "rank": 3, "scope": "worker"}]
    outcome = run(faults, clips=True)
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == {2, 3}, outcome.text()
    assert_equal(outcome, undisturbed_pipelines("Schedule1F1B", clips=True))


@pytest.mark.parametrize("seed", [0, *in_soak(1, 2)])
def test_random_moments(
    seed: int, make_agents: Callable[..., Agents], undisturbed_pipelines: References
) -> None:
    """Ten kills. If both groups are hit in one recovery nobody holds a state, and all begin with the checkpoint."""
    num_kills = 10
    agents = make_agents(
        num_nodes=4, num_workers=1, max_restarts=60, script=SCRIPT, options=("--log-groups", ON_4),
        orders={"schedule": "Schedule1F1B", "iterations": 30, "pace_s": 0.2, "checkpoint": 4, "patient": True},
    )  # fmt: skip
    for node in "abcd":
        agents.start(node)
    kill_at_random(agents, num_kills, random.Random(seed))
    assert_equal(agents.wait(), undisturbed_pipelines("Schedule1F1B", iterations=30), 30)


def test_groups_are_chosen_for_a_budget(run: Start, undisturbed_pipelines: References) -> None:
    """Once the job has measured itself, in its first nine iterations; it tells what it costs, and how it recovers."""
    faults = [{"at": "backward", "iteration": 20, "rank": 2, "scope": "worker"}]
    outcome = run(
        faults, groups="", options=("--log-budget", "40%", "--profile", "measured.json"), iterations=30, pace_s=0.1,
        checkpoint=5, patient=True,
    )  # fmt: skip
    text = outcome.text()
    assert_equal(outcome, undisturbed_pipelines("Schedule1F1B", iterations=30), 30)
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == {2, 3}, text
    assert "messages are logged between groups of nodes only, from the next iteration on: 0-1 2-3" in text
    assert "replica: not possible: no other node holds what node 0 does" in text
    assert re.search(r"  log: .* for a lost worker, .* for two; .*: taken\n", text) and "ms were predicted)" in text
    measured = parse((outcome.directory / "measured.json").read_text())
    assert len(measured.machines) == 4 and len(measured.boundary_bytes) == 3 and measured.checkpoint_every == 5


def test_a_failure_as_the_measuring_ends(run: Start, undisturbed_pipelines: References) -> None:
    """Some ranks are through with it, and that which is lost is not: all measure again."""
    faults = [{"at": "between", "iteration": 7, "rank": 2, "scope": "worker"}]
    outcome = run(
        faults, groups="", options=("--log-budget", "40%"), iterations=30, checkpoint=5, patient=True
    )
    text = outcome.text()
    assert_equal(outcome, undisturbed_pipelines("Schedule1F1B", iterations=30), 30)
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == {2}, text
    assert text.index("recovered: ") < text.index("measured: ") < text.index("from the next iteration on: 0-1 2-3")


def test_a_job_that_shall_not_log(run: Start, undisturbed_pipelines: References) -> None:
    faults = [{"at": "backward", "iteration": 5, "rank": 2, "scope": "worker"}]
    outcome = run(faults, groups="", options=("--strategy", "checkpoint"), checkpoint=3, patient=True)
    assert "all workers restart" in outcome.text()
    assert_equal(outcome, undisturbed_pipelines("Schedule1F1B"))
