"""Pipelines whose stages have replicas, all on one node: a lost worker gets the state of a replica, and a lost node
repeats its iterations from what the others had sent it.

Each test asserts that its faults fired, that survivors kept their processes, and that the state of every rank and the
losses of every micro-batch are bit for bit those of an undisturbed run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_agent.wire.injected import Fault
from tests.support.agent_forks import ForkServer
from tests.support.injected import apart
from tests.support.job import ROOT, Agents, Outcome
from tests.support.pipelines import at, begun, node_of, started
from tests.tiers import in_soak

SCRIPT = ROOT / "tests" / "support" / "replicated_stages_train.py"
ITERATIONS = 12
PLACES = ["forward", "backward", "before_step", "agree", "agreed", "after_step", "between"]
Start = Callable[..., Outcome]
Undisturbed = Callable[..., Outcome]


@pytest.fixture
def run(make_agents: Callable[..., Agents]) -> Start:
    def train(
        faults: Sequence[dict[str, Any] | Fault], nodes: str = "abc", width: int = 2, spares: int = 0, **orders: Any
    ) -> Outcome:
        num_nodes = len(nodes) - spares
        of_script, injected = apart(faults)
        return make_agents(
            num_nodes=num_nodes, num_workers=width, max_restarts=20, script=SCRIPT,
            orders={"faults": of_script, "width": width, **orders},
            options=("--spares", str(spares)) if spares else (),
        ).run(nodes, injected)  # fmt: skip

    return train


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, etcd: str, forks: ForkServer) -> Undisturbed:
    known: dict[str, Outcome] = {}

    def train(num_nodes: int = 3, width: int = 2, **orders: Any) -> Outcome:
        key = f"{num_nodes} {width} {orders}"
        if key not in known:
            agents = Agents(
                tmp_path_factory.mktemp("stages"), etcd, num_nodes=num_nodes, num_workers=width, script=SCRIPT,
                job_id=f"stages-{len(known)}", orders={"width": width, **orders}, forks=forks,
            )  # fmt: skip
            known[key] = agents.run("abcdef"[:num_nodes])
            assert len(known[key].results) == num_nodes * width, known[key].text()
        return known[key]

    return train


def losses(directory: Path, rank: int) -> dict[int, str]:
    """By iteration; one that was repeated gave the same again."""
    found: dict[int, str] = {}
    for line in (directory / f"losses.{rank}").read_text().splitlines():
        number, *values = line.split()
        if values:  # none for one that others had finished
            assert found.setdefault(int(number), line) == line, f"rank {rank}"
    return found


def assert_same(outcome: Outcome, expected: Outcome, lost: set[int]) -> None:
    text = outcome.text()
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == lost, text
    assert "all workers restart" not in text, text
    assert_equal(outcome, expected)


def assert_equal(outcome: Outcome, expected: Outcome) -> None:
    text = outcome.text()
    assert outcome.results.keys() == expected.results.keys(), text
    for rank, result in outcome.results.items():
        assert result["hash"] == expected.results[rank]["hash"], f"rank {rank}\n{text}"
        found = losses(outcome.directory, rank)
        assert found.items() <= losses(expected.directory, rank).items(), f"rank {rank}\n{text}"


@pytest.mark.parametrize("place", PLACES)
def test_nodes(place: str, run: Start, undisturbed: Undisturbed) -> None:
    """All replicas of a stage: of the last one, and then of the first; since the begin of training."""
    faults = [at(place, 3, 5, "node"), at(place, 8, 0, "node")]
    outcome = run(faults, nodes="abcde", spares=2)
    assert_same(outcome, undisturbed(), {0, 1, 4, 5})
    assert "have no replica and repeat iterations 0 to" in outcome.text()


@pytest.mark.parametrize(
    "place", ["backward", "agreed", "after_step", *in_soak("forward", "before_step", "agree", "between")]
)
def test_workers(place: str, run: Start, undisturbed: Undisturbed) -> None:
    """In the place of each comes one with the state of its replica, which nobody repeats anything for."""
    faults = [at(place, iteration, rank) for iteration, rank in ((0, 1), (3, 3), (5, 4), (8, 2))]
    outcome = run(faults)
    assert_same(outcome, undisturbed(), {1, 2, 3, 4})
    assert "repeat iterations" not in outcome.text()


@pytest.mark.parametrize("width", [2, 3])
def test_since_a_checkpoint(width: int, run: Start, undisturbed: Undisturbed) -> None:
    """One rank of each node writes it, and all count their messages from there. Three replicas add gradients in an
    order that depends on DDP's buckets: these have to be those of the iterations that are repeated."""
    faults = [at("backward", 7, width, "node")]
    num_nodes = 6 // width
    outcome = run(faults, nodes="abcd"[: num_nodes + 1], spares=1, width=width, checkpoint=3, patient=True)
    assert_same(outcome, undisturbed(num_nodes, width), set(range(width, 2 * width)))
    assert "load the checkpoint of iteration 6, and repeat iterations 6 to 6 from the logs" in outcome.text()


def test_two_nodes_at_once(run: Start, undisturbed: Undisturbed) -> None:
    """Of neighbouring stages: they repeat their iterations together."""
    faults = [
        {"at": "backward", "iteration": 7, "rank": 2, "scope": "node"},
        {"at": "transfer", "iteration": 7, "rank": 4, "scope": "node"},
    ]
    outcome = run(faults, nodes="abcde", spares=2, checkpoint=3, patient=True)
    assert_same(outcome, undisturbed(), {2, 3, 4, 5})


def test_a_worker_and_then_its_neighbour(run: Start, undisturbed: Undisturbed) -> None:
    """What the predecessor of rank 2 had sent is lost, until the next checkpoint."""
    faults = [
        at("backward", 4, 2), at("backward", 7, 5, "node"), at("forward", 9, 3), at("forward", 10, 0, "node")
    ]  # fmt: skip
    outcome = run(faults, nodes="abcde", spares=2, checkpoint=3, patient=True)
    text = outcome.text()
    assert_equal(outcome, undisturbed())
    assert "repeat iterations 6 to 6 from the logs of the others" in text
    # Rank 3 has been replaced since the checkpoint of iteration 9, and what it had sent to ranks 0 and 1 is lost.
    assert "all workers restart" in text and "all ranks begin with the checkpoint of iteration 9" in text, text


@pytest.mark.parametrize("again", [False, True], ids=["once", "cut again"])
def test_after_all_have_begun_with_a_checkpoint(again: bool, run: Start, undisturbed: Undisturbed) -> None:
    """Stages then tell each other shapes by running their modules, which must not reduce gradients of DDP; also in a
    process that comes later. All count on from there, those too whose state is in another one's part."""
    faults = [
        {"at": "forward", "iteration": 4, "rank": 3, "scope": "worker"},
        {"at": "forward", "iteration": 5, "rank": 1, "scope": "node"},
        {"at": "backward", "iteration": 8, "rank": 3, "scope": "node"},
    ]
    if again:  # all are in iteration 3 once more, and rank 2 comes to it
        faults.insert(2, {"at": "backward", "iteration": 3, "rank": 2, "scope": "worker", "after": 1})
    outcome = run(faults, nodes="abcde", spares=2, checkpoint=3, patient=True)
    assert_equal(outcome, undisturbed())
    assert "all ranks begin with the checkpoint of iteration 3" in outcome.text()
    assert "load the checkpoint of iteration 6, and repeat iterations 6 to 7 from the logs" in outcome.text()


def test_sums_and_clipping_by_the_script(run: Start, undisturbed: Undisturbed) -> None:
    """All-reduces that Python calls: those of a stage are made once more, those of all stages come from logs."""
    faults = [
        {"at": "clipped", "iteration": 3, "rank": 2, "scope": "node"},
        {"at": "backward", "iteration": 6, "rank": 1, "scope": "worker"},
        {"at": "forward", "iteration": 8, "rank": 4, "scope": "worker"},
    ]
    outcome = run(faults, nodes="abcd", spares=1, by_hand=True, clips=True)
    assert_same(outcome, undisturbed(by_hand=True, clips=True), {1, 2, 3, 4})


def test_some_stages_have_replicas_on_other_nodes(run: Start, undisturbed: Undisturbed) -> None:
    """Their ranks log, too, as they are told to: for the first stage, which is lost with its node."""
    faults = [
        {"at": "backward", "iteration": 4, "rank": 0, "scope": "node"},
        {"at": "forward", "iteration": 7, "rank": 2, "scope": "node"},
        {"at": "backward", "iteration": 10, "rank": 1, "scope": "node"},
    ]
    outcome = run(faults, nodes="abcdef", spares=3, mixed=True, checkpoint=3, patient=True)
    assert_same(outcome, undisturbed(mixed=True), {0, 1, 2, 3})
    text = outcome.text()
    assert "ranks [0, 1] have no replica and load the checkpoint of iteration 3, and repeat iterations 3 to 3" in text
    assert "ranks [2, 3] are new and get the state of iteration 7 from ranks [4, 5]" in text
    assert "ranks [0, 1] have no replica and load the checkpoint of iteration 9, and repeat iterations 9 to 9" in text


def test_updates_in_the_backward_log_nothing(run: Start, undisturbed: Undisturbed) -> None:
    faults = [{"at": "backward", "iteration": 7, "rank": 2, "scope": "node"}]
    outcome = run(faults, nodes="abcd", spares=1, overlap=True, checkpoint=3, patient=True)
    assert "no survivor holds a replica of their state" in outcome.text()
    assert_equal(outcome, undisturbed(overlap=True))


@pytest.mark.parametrize("late", ["from any", "after"])
def test_what_cannot_be_logged_does_not_end_the_job(late: str, run: Start, undisturbed: Undisturbed) -> None:
    """Which needs no logs as long as nodes live: it is said. A stage without replicas would be refused."""
    faults = [
        {"at": "backward", "iteration": 4, "rank": 2, "scope": "worker"},
        {"at": "backward", "iteration": 6, "rank": 0, "scope": "worker"},
        {"at": "backward", "iteration": 8, "rank": 5, "scope": "node"},
    ]
    outcome = run(faults, nodes="abcd", spares=1, late=late, checkpoint=3, patient=True)
    text = outcome.text()
    why = "a message is sent in an iteration after its update"
    assert f"messages are logged no more: {why}. If a rank without a replica is lost all workers start again." in text
    assert ("messages are logged no more: a receive from any source inside an iteration" in text) == (
        late == "from any"
    )
    assert "get the state of iteration 6 from ranks [1]" in text and "all workers restart" in text
    assert_equal(outcome, undisturbed())


def test_an_evaluation_between_iterations_is_told(run: Start, undisturbed: Undisturbed) -> None:
    """Its messages are in no log: who repeats iterations must not wait for them for ever."""
    faults = [{"at": "backward", "iteration": 8, "rank": 2, "scope": "node"}]
    outcome = run(faults, nodes="abcd", spares=1, evaluates="between", checkpoint=3, patient=True)
    text = outcome.text()
    assert "iterations cannot be repeated from logs: a message outside of iterations is in no log" in text, text
    assert "all ranks begin with the checkpoint of iteration 6" in text
    assert_equal(outcome, undisturbed(evaluates="between"))


def test_a_worker_is_lost_where_some_are_through_an_evaluation(run: Start, undisturbed: Undisturbed) -> None:
    """One column is in the section that the other has finished, and runs it dry: all change back to training."""
    faults = [
        {"at": "evaluate", "iteration": 9, "rank": 5, "scope": "wait"},
        {"at": "forward", "iteration": 10, "rank": 0, "scope": "worker"},
        {"at": "init", "rank": 0, "scope": "go", "on": 0, "after": 1},
    ]
    outcome = run(faults, evaluates="resilient", checkpoint=3, patient=True)
    assert_same(outcome, undisturbed(evaluates="resilient"), {0})


def test_statistics_that_replicas_have_each_for_itself_are_told(run: Start) -> None:
    text = run([], norm=True, iterations=3).text()
    said = (
        "in a pipeline DDP does not make 1.running_mean, 1.running_var equal on ranks [2, 3]: a replacement gets those"
    )
    assert text.count("in a pipeline DDP does not make") == 1 and said in text, text


@pytest.mark.parametrize("seed", [0, *in_soak(*range(1, 10))])
def test_random_moments(seed: int, make_agents: Callable[..., Agents], undisturbed: Undisturbed) -> None:
    """Six kills of workers and nodes, in whose place others come; in `make soak` sixty. Where the last replica of a
    stage is lost before a checkpoint has come since its neighbour's log was lost, all begin with that again."""
    choose = random.Random(seed)
    agents = make_agents(
        num_nodes=3, num_workers=2, max_restarts=60, script=SCRIPT, options=("--spares", "1"),
        orders={"width": 2, "checkpoint": 3, "pace_s": 1.0},
    )  # fmt: skip
    for node in "abcd":
        agents.start(node)
    wait_until(lambda: min(begun(agents.directory, 6)) >= 0)
    for number in range(6):
        time.sleep(choose.choice([0.0, choose.uniform(0.0, 0.3), choose.uniform(0.3, 1.2)]))
        worker = None
        while worker is None:
            assert not list(agents.directory.glob("result.*")), agents.outcome(0).text()
            worker = started(agents.directory, choose.randrange(6))
        if choose.random() < 0.5:
            agents.kill_node(node_of(agents, worker))
            agents.start(f"{number}")
        else:
            worker.kill()
        psutil.wait_procs([worker], timeout=10.0)
    (agents.directory / "free").touch()
    outcome = agents.wait()
    assert_equal(outcome, undisturbed())
    print(outcome.text())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come"
        time.sleep(0.01)
