"""Parallel recovery: helpers repeat what a lost stage had done, together with its replacement (SWIFT, section 5.2).

Each test asserts that its faults fired, that helpers were started and have ended, and that the state of every stage and
the losses of every micro-batch are bit for bit those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.support.etcd_cluster import wait_for
from tests.support.job import Agents, Outcome
from tests.support.pipelines import SCRIPT, References, assert_equal, assert_same, begun
from tests.support.pipelines import started as started_process
from tests.tiers import in_soak

Start = Callable[..., Outcome]
SHARED = "processes repeat iterations together"


@pytest.fixture
def run(make_agents: Callable[..., Agents]) -> Start:
    def train(
        faults: list[dict[str, Any]], helpers: int = 1, spares: int = 1, schedule: str = "Schedule1F1B",
        options: tuple[str, ...] = (), **orders: Any,
    ) -> Outcome:  # fmt: skip
        lost_nodes = sum(fault["scope"] == "node" for fault in faults)
        return make_agents(
            num_nodes=4, num_workers=1, max_restarts=20, script=SCRIPT,
            orders={"faults": faults, "schedule": schedule, **orders},
            options=(
                "--strategy", "log+parallel", "--helpers", str(helpers), "--spares", str(spares + lost_nodes), *options,
            ),
        ).run("abcdefghi"[: 4 + spares + lost_nodes])  # fmt: skip

    return train


def started(outcome: Outcome) -> list[tuple[int, int]]:
    """Share and rank of each helper, in the order of their processes."""
    found = re.findall(r"process \d+ is helper (\d+) of rank (\d+)", outcome.text())
    return [(int(share), int(rank)) for share, rank in found]


def done(outcome: Outcome) -> int:
    """How many have ended by themselves."""
    return len(re.findall(r"helper \d+ of rank \d+ \(pid \d+\) has done its share", outcome.text()))


def assert_shared(outcome: Outcome, size: int, times: int = 1) -> None:
    assert outcome.text().count(f"{size} {SHARED}") == times, outcome.text()
    assert "its steps are not shared" not in outcome.text()


def of_helpers(outcome: Outcome, rank: int) -> dict[int, list[int]]:
    """The iterations that each helper of *rank* has begun, by its process."""
    path = outcome.directory / f"helper.calls.{rank}"
    found: dict[int, list[int]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        number, pid = map(int, line.split())
        found.setdefault(pid, []).append(number)
    return found


@pytest.mark.parametrize("place", ["forward", "agreed", "between"])
def test_a_spare_helps(place: str, run: Start, undisturbed_pipelines: References) -> None:
    outcome = run([{"at": place, "iteration": 5, "rank": 1, "scope": "worker"}])
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {1})
    assert re.search(r"; 1 helper repeats rank 1 with it, on [a-e]\b", outcome.text()), outcome.text()
    assert_shared(outcome, 2)
    assert started(outcome) == [(1, 1)]
    assert done(outcome) == 1
    assert next(iter(of_helpers(outcome, 1).values()))[:5] == [0, 1, 2, 3, 4]


def test_spares_and_survivors_help(run: Start, undisturbed_pipelines: References) -> None:
    outcome = run([{"at": "forward", "iteration": 6, "rank": 2, "scope": "worker"}], helpers=3, spares=2)
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {2})
    assert re.search(r"; 3 helpers repeat rank 2 with it, on \w, \w, \w\b", outcome.text()), outcome.text()
    assert_shared(outcome, 4)
    assert sorted(started(outcome)) == [(1, 2), (2, 2), (3, 2)]
    assert done(outcome) == 3


@pytest.mark.parametrize("rank", [0, 3])
def test_the_ends_of_a_pipeline(rank: int, run: Start, undisturbed_pipelines: References) -> None:
    """The first stage takes batches, the last one makes losses: those of all helpers are the script's."""
    outcome = run([{"at": "backward", "iteration": 7, "rank": rank, "scope": "worker"}], helpers=2, spares=2)
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {rank})
    assert_shared(outcome, 3)
    assert done(outcome) == 2


def test_a_lost_node(run: Start, undisturbed_pipelines: References) -> None:
    """One spare takes its place, the other one helps."""
    outcome = run([{"at": "backward", "iteration": 6, "rank": 1, "scope": "node"}])
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {1})
    assert_shared(outcome, 2)
    assert done(outcome) == 1


@pytest.mark.parametrize(
    "schedule", ["ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"]
)
def test_schedules(schedule: str, run: Start, undisturbed_pipelines: References) -> None:
    faults = [
        {"at": "backward", "iteration": iteration, "rank": rank, "scope": "worker"}
        for iteration, rank in ((5, 0), (9, 2))
    ]
    outcome = run(faults, schedule=schedule)
    assert_same(outcome, undisturbed_pipelines(schedule), {0, 2})
    assert_shared(outcome, 2, times=2)


def test_from_a_checkpoint(run: Start, undisturbed_pipelines: References) -> None:
    faults = [{"at": "forward", "iteration": 10, "rank": 1, "scope": "worker"}]
    outcome = run(faults, checkpoint=4, patient=True)
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {1})
    assert_shared(outcome, 2)
    assert list(of_helpers(outcome, 1).values()) == [[8, 9]]


@pytest.mark.parametrize(
    "place", ["init", "joins", "joined", "rehearses", "rehearsed", "meets", "exchanges", "adds", "exchanged"]
)
def test_a_helper_dies(place: str, run: Start, undisturbed_pipelines: References) -> None:
    """The other one goes on with its share."""
    faults = [
        {"at": "forward", "iteration": 8, "rank": 1, "scope": "worker"},
        {"at": place, "rank": 1, "share": 1, "scope": "worker"},
    ]
    outcome = run(faults, helpers=2, spares=2)
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {1})
    assert outcome.fired == {0, 1}, outcome.text()
    assert done(outcome) == 1


@pytest.mark.parametrize("place", ["gathers", "gathered", "rehearsed", "exchanges", "adds", "exchanged"])
def test_the_replacement_dies(place: str, run: Start, undisturbed_pipelines: References) -> None:
    """Another one begins, with other helpers."""
    faults = [
        {"at": "forward", "iteration": 8, "rank": 1, "scope": "worker"},
        {"at": place, "rank": 1, "scope": "worker"},
    ]
    outcome = run(faults, helpers=2, spares=2)
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {1})
    assert outcome.fired == {0, 1} and len(outcome.pids[1]) == 3, outcome.text()


def test_another_stage_dies_meanwhile(run: Start, undisturbed_pipelines: References) -> None:
    """The replacement goes on alone: its helpers are of a generation that is over."""
    faults = [
        {"at": "forward", "iteration": 8, "rank": 1, "scope": "worker"},
        {"at": "awaits", "rank": 3, "after": 0, "scope": "wait"},
        {"at": "exchanged", "rank": 1, "scope": "go", "on": 1},
        {"at": "awaits again", "rank": 3, "after": 2, "scope": "worker"},
    ]
    outcome = run(faults, helpers=1, spares=2)
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {1, 3})
    assert outcome.fired == {0, 1, 2, 3}, outcome.text()


def test_auto_takes_those_that_are_allowed(
    make_agents: Callable[..., Agents], undisturbed_pipelines: References
) -> None:  # fmt: skip
    """Once the job has measured that they pay."""
    agents = make_agents(
        num_nodes=4, num_workers=1, max_restarts=20, script=SCRIPT, options=("--helpers", "2", "--spares", "1"),
        orders={"schedule": "Schedule1F1B", "iterations": 70, "pace_s": 0.2, "checkpoint": 15, "patient": True},
    )  # fmt: skip
    for node in "abcde":
        agents.start(node)

    def said(words: str) -> Callable[[], bool]:
        return lambda: re.search(words, agents.outcome(0).text()) is not None

    wait_for(said(r"  log\+parallel: .*: taken\n"), 60.0, "what the job takes")
    process = started_process(agents.directory, 1)
    assert process is not None
    process.kill()
    wait_for(said(SHARED), 60.0, "helpers that repeat iterations")
    (agents.directory / "free").touch()
    outcome = agents.wait()
    assert_equal(outcome, undisturbed_pipelines("Schedule1F1B", iterations=70), 70)
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == {1}
    assert re.search(r"; [12] helpers? repeats? rank 1 with it, on \w", outcome.text()), outcome.text()
    assert "by log+parallel: " in outcome.text()


def test_ctrl_c_while_helpers_repeat(make_agents: Callable[..., Agents]) -> None:
    """Of one agent: the job ends, and so do helpers on a spare and beside a survivor."""
    faults = [
        {"at": "forward", "iteration": 8, "rank": 1, "scope": "worker"},
        {"at": "exchanges", "rank": 1, "scope": "wait"},  # the replacement stands still, and its helpers wait
    ]
    agents = make_agents(
        num_nodes=4, num_workers=1, max_restarts=20, script=SCRIPT,
        orders={"faults": faults, "schedule": "Schedule1F1B"},
        options=("--strategy", "log+parallel", "--helpers", "2", "--spares", "1"),
    )  # fmt: skip
    for node in "abcde":
        agents.start(node)
    found: dict[int, psutil.Process] = {}

    def both() -> bool:
        path = agents.directory / "helper.pids.1"
        for pid in map(int, path.read_text().split() if path.exists() else []):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.setdefault(pid, psutil.Process(pid))
        return len(found) == 2 and SHARED in agents.outcome(0).text()

    wait_for(both, 60.0, "two helpers that repeat iterations")
    agents.running["a"].send_signal(signal.SIGINT)
    outcome = agents.wait(45)
    assert set(outcome.exit_codes.values()) == {3} and "SIGINT" in outcome.text(), outcome.text()
    _, alive = psutil.wait_procs(list(found.values()), timeout=10.0)
    assert not alive, outcome.text()


def test_what_cannot_be_shared_is_repeated_alone(run: Start, undisturbed_pipelines: References) -> None:
    outcome = run([{"at": "forward", "iteration": 6, "rank": 1, "scope": "worker"}], counts=True)
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {1})
    assert "its steps are not shared, it repeats them alone: its stages change Block.calls" in outcome.text()


def test_by_hand(run: Start, undisturbed_pipelines: References) -> None:
    """What is no schedule of torch's has no micro-batches that could be shared: the helper repeats all, too."""
    outcome = run([{"at": "forward", "iteration": 6, "rank": 1, "scope": "worker"}], schedule="ByHand")
    assert_same(outcome, undisturbed_pipelines("ByHand"), {1})


def test_evaluations_between_steps(run: Start, undisturbed_pipelines: References) -> None:
    """The schedule changes its mode, and stages tell each other again what they will send."""
    outcome = run([{"at": "forward", "iteration": 5, "rank": 1, "scope": "worker"}], evaluates=True)
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B", evaluates=True), {1})
    assert_shared(outcome, 2)
    assert done(outcome) == 1


def test_collectives_in_an_iteration(run: Start, undisturbed_pipelines: References) -> None:
    """Those outside of steps are in the logs; helpers take their results from there."""
    outcome = run([{"at": "forward", "iteration": 6, "rank": 1, "scope": "worker"}], clips=True)
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B", clips=True), {1})
    assert_shared(outcome, 2)


def test_unordered_sums_are_said_to_differ(run: Start, undisturbed_pipelines: References) -> None:
    faults = [{"at": "forward", "iteration": 6, "rank": 1, "scope": "worker"}]
    outcome = run(faults, options=("--parallel-sum", "unordered"))
    assert "the result is rounded otherwise" in outcome.text()
    assert "all workers restart" not in outcome.text()
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == {1}
    reference = undisturbed_pipelines("Schedule1F1B")
    assert outcome.results.keys() == reference.results.keys()
    assert outcome.results[1]["hash"] != reference.results[1]["hash"]


def test_log_groups(run: Start, undisturbed_pipelines: References) -> None:
    """A node alone gets helpers; a group of two repeats without any, and after that the other one gets some again."""
    faults = [
        {"at": "backward", "iteration": iteration, "rank": rank, "scope": "worker"}
        for iteration, rank in ((4, 2), (6, 0), (8, 3))
    ]
    outcome = run(faults, options=("--log-groups", "0-1"))
    assert_same(outcome, undisturbed_pipelines("Schedule1F1B"), {0, 1, 2, 3})
    assert sorted(rank for _, rank in started(outcome)) == [2, 3] and done(outcome) == 2
    assert "slots [1] of the same log group begin again with them" in outcome.text()


@pytest.mark.parametrize("groups", ["", "0-1"])
@pytest.mark.parametrize("seed", [0, *in_soak(1, 2)])
def test_random_moments(
    seed: int, groups: str, make_agents: Callable[..., Agents], undisturbed_pipelines: References
) -> None:
    """Workers and helpers, ten times, at times one in the recovery from another."""
    choose = random.Random(seed)
    agents = make_agents(
        num_nodes=4, num_workers=1, max_restarts=60, script=SCRIPT,
        options=(
            "--strategy", "log+parallel", "--helpers", "2", "--spares", "1",
            *(("--log-groups", groups) if groups else ()),
        ),
        orders={"schedule": "Schedule1F1B", "iterations": 70, "pace_s": 0.2, "checkpoint": 15, "patient": True},
    )  # fmt: skip
    for node in "abcde":
        agents.start(node)
    deadline_s = time.monotonic() + 90.0
    num_helpers = 0
    for number in range(10):
        before = max(begun(agents.directory))
        while min(begun(agents.directory)) <= before if number % 3 != 2 else False:
            assert time.monotonic() < deadline_s, agents.outcome(0).text()
            time.sleep(0.02)
        time.sleep(choose.uniform(0.0, 0.6))
        rank = choose.choice([2, 3]) if groups and number % 3 == 0 else choose.randrange(4)  # groups have no helpers
        process = started_process(agents.directory, rank)
        if process is not None:
            process.kill()
            psutil.wait_procs([process], timeout=10.0)
        if number % 3 == 0:
            helper = a_helper(agents, rank)
            if helper is not None:
                time.sleep(choose.uniform(0.0, 0.3))
                with contextlib.suppress(psutil.NoSuchProcess):  # it has done its share
                    helper.kill()
                    num_helpers += 1
    (agents.directory / "free").touch()
    outcome = agents.wait()
    assert_equal(outcome, undisturbed_pipelines("Schedule1F1B", iterations=70), 70)
    assert SHARED in outcome.text() and num_helpers


def a_helper(agents: Agents, rank: int) -> psutil.Process | None:
    """One that has begun to help *rank*, if one does so within some seconds."""
    path, deadline_s = agents.directory / f"helper.pids.{rank}", time.monotonic() + 5.0
    while time.monotonic() < deadline_s:
        for pid in path.read_text().split() if path.exists() else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                if process.status() != psutil.STATUS_ZOMBIE:
                    return process
        time.sleep(0.01)
    return None
