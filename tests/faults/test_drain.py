"""`swiftctl drain` on real jobs: the slot moves between two iterations, and nobody notices in the result.

Each test asserts that every rank was in every iteration exactly once, in whichever process, that the others kept their
processes, and that parameters, buffers and optimizer state at the end are bit for bit those of an undisturbed run.
Training is slow until the test lets it go, so that no drain comes too late for it, however loaded the machine is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from swift_agent.ctl.main import cli
from tests.support.job import ROOT, Agents, Outcome

ITERATIONS = 120


def ctl(agents: Agents, *arguments: str) -> tuple[int, str]:
    assert agents.endpoint is not None
    done = CliRunner().invoke(cli, [arguments[0], "--rdzv-endpoint", agents.endpoint, agents.job_id, *arguments[1:]])
    return done.exit_code, done.output


def status(agents: Agents) -> dict[str, Any]:
    code, text = ctl(agents, "status", "--json")
    return json.loads(text) if code == 0 else {"nodes": [], "drains": [], "generation": 0}


def owner(agents: Agents, slot: int) -> str:
    return next(node["node"] for node in status(agents)["nodes"] if node["slot"] == slot)


def free(agents: Agents) -> Outcome:
    """The test is over: train on to the end at full speed."""
    (agents.directory / "free").touch()
    return agents.wait()


def wait_until(agents: Agents, what: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + 90.0
    while not what():
        assert time.monotonic() < deadline_s, agents.outcome(0.0).text()
        time.sleep(0.02)


def assert_unnoticed(outcome: Outcome, expected: str, num_processes: dict[int, int]) -> None:
    """*num_processes*: of ranks that had more or less than one."""
    text = outcome.text()
    for rank in range(4):
        lines = (outcome.directory / f"calls.{rank}").read_text().splitlines()
        assert [int(line.split()[0]) for line in lines] == list(range(ITERATIONS)), f"rank {rank}: {lines}\n{text}"
        assert len({line.split()[1] for line in lines}) <= num_processes.get(rank, 1), text
    assert {rank: len(pids) for rank, pids in outcome.pids.items()} == {r: num_processes.get(r, 1) for r in range(4)}
    assert outcome.hashes == {expected}, text
    assert "equal checksums" in text, text


PIPELINE = ROOT / "tests" / "support" / "pipeline_train.py"


@pytest.mark.parametrize("every", [None, 4], ids=["no checkpoints", "checkpoints"])
def test_a_stage_of_a_pipeline_moves(every: int | None, make_agents: Callable[..., Agents], tmp_path: Path) -> None:
    """Its successor is new to the schedule: what the one before had heard in its first step comes with the state. With
    checkpoints a neighbour may be lost later.
    """
    (tmp_path / "undisturbed").mkdir()
    expected = make_agents(
        tmp_path / "undisturbed", num_nodes=4, num_workers=1, script=PIPELINE, orders={"iterations": 40}
    ).run("abcd")
    fault = {"at": "forward", "iteration": 30, "rank": 1, "scope": "worker"}
    orders = {"iterations": 40, "pace_s": 0.2}
    if every:
        orders |= {"checkpoint": every, "patient": True, "faults": [fault]}
    agents = make_agents(num_nodes=4, num_workers=1, script=PIPELINE, orders=orders, options=("--spares", "1"))
    for node in "abcde":
        agents.start(node)
    wait_until(agents, lambda: (agents.directory / "losses.3").exists())
    wait_until(agents, lambda: len((agents.directory / "losses.3").read_text().splitlines()) > 6)
    leaving = owner(agents, 2)
    code, text = ctl(agents, "drain", leaving)
    assert code == 0, text
    outcome = free(agents)
    assert "all workers restart" not in outcome.text()
    num_processes = {0: 1, 1: 2 if every else 1, 2: 2, 3: 1}
    assert {rank: len(pids) for rank, pids in outcome.pids.items()} == num_processes, outcome.text()
    assert not every or "load the checkpoint of iteration 28, and repeat iterations 28 to 29" in outcome.text()
    for rank, result in expected.results.items():
        assert outcome.results[rank]["hash"] == result["hash"], outcome.text()


@pytest.fixture
def start(make_agents: Callable[..., Agents]) -> Callable[..., Agents]:
    """Starts nodes and waits until all train."""

    def begin(*nodes: str, **orders: Any) -> Agents:
        agents = make_agents(orders={"iterations": ITERATIONS, "pace_s": 0.4, **orders}, options=("--spares", "1"))
        for node in nodes:
            agents.start(node)
        wait_until(agents, lambda: all((agents.directory / f"calls.{rank}").exists() for rank in range(4)))
        return agents

    return begin


def test_one_node_after_the_other(start: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    """Slot 0 has rank 0 and the c10d store; one of the two is the coordinator. The first comes back as a spare."""
    agents = start("a", "b", "c")
    first, second = owner(agents, 0), owner(agents, 1)
    code, text = ctl(agents, "drain", first)
    assert code == 0 and f"node {first} has left" in text, text + agents.outcome(0.0).text()
    assert agents.running[first].wait(30) == 0
    words = (agents.directory / f"agent.{first}.log").read_text()
    assert words.count(f"node {first} was drained") == 1, words
    third = owner(agents, 0)
    assert third not in (first, second) and owner(agents, 1) == second
    agents.start(first)
    code, text = ctl(agents, "drain", second, "--json")
    found = json.loads(text)
    assert (code, found["state"], found["slot"], found["new_owner"]) == (0, "drained", 1, first), text
    assert status(agents)["drains"] == []
    wait_until(agents, lambda: status(agents)["rate"])
    found = status(agents)
    assert found["rate"]["iterations_per_s"] > 0 and found["iteration"] >= found["rate"]["iteration"] > 0, found
    assert "per second" in ctl(agents, "status")[1]
    outcome = free(agents)
    assert outcome.exit_codes == {"a": 0, "b": 0, "c": 0}, outcome.text()
    assert_unnoticed(outcome, undisturbed(iterations=ITERATIONS), {0: 2, 1: 2, 2: 2, 3: 2})


def test_no_spare_cancel_and_wrong_names(start: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    agents = start("a", "b")
    node = owner(agents, 1)
    code, text = ctl(agents, "drain", "nobody")
    assert code == 1 and "has no node 'nobody'; its nodes are: a, b" in text
    missing = CliRunner().invoke(cli, ["drain", "--rdzv-endpoint", str(agents.endpoint), "no-such-job", "a"])
    assert missing.exit_code == 1 and "no job 'no-such-job'" in missing.output
    code, text = ctl(agents, "drain", node, "--cancel")
    assert code == 1 and "is not being drained" in text
    code, text = ctl(agents, "drain", node, "--timeout", "0.5")
    assert code == 1 and "slot 1 waits for a spare node" in text and "the order stands" in text
    assert [drain["node"] for drain in status(agents)["drains"]] == [node]
    assert f"drain of {node}" in ctl(agents, "status")[1]
    code, text = ctl(agents, "drain", node, "--cancel")
    assert code == 0 and status(agents)["drains"] == [] and status(agents)["generation"] == 1, text
    code, text = ctl(agents, "drain", node, "--no-wait")
    assert code == 0 and "waits for a spare" in text
    agents.start("c")
    code, text = ctl(agents, "drain", node)  # ordered already: only waits
    assert code == 0 and "c has slot 1" in text, text
    outcome = free(agents)
    assert outcome.exit_codes == {"a": 0, "b": 0, "c": 0}, outcome.text()
    assert_unnoticed(outcome, undisturbed(iterations=ITERATIONS), {2: 2, 3: 2})


def test_the_only_copy_of_a_state_moves(start: Callable[..., Agents]) -> None:
    """Without replicas, and without a collective that would keep the ranks in step."""
    plain = start("a", "b", model="alone")
    expected = {rank: result["hash"] for rank, result in free(plain).results.items()}
    assert len(set(expected.values())) == 4
    for path in plain.directory.iterdir():
        path.unlink()
    agents = start("a", "b", "c", model="alone")
    code, text = ctl(agents, "drain", owner(agents, 1))
    assert code == 0, text + agents.outcome(0.0).text()
    outcome = free(agents)
    assert outcome.exit_codes == {"a": 0, "b": 0, "c": 0}, outcome.text()
    assert {rank: result["hash"] for rank, result in outcome.results.items()} == expected, outcome.text()
    for rank in range(4):
        lines = (outcome.directory / f"calls.{rank}").read_text().splitlines()
        assert [int(line.split()[0]) for line in lines] == list(range(ITERATIONS)), outcome.text()
    assert {rank: len(pids) for rank, pids in outcome.pids.items()} == {0: 1, 1: 1, 2: 2, 3: 2}


def test_the_drained_node_is_lost_in_the_handover(
    start: Callable[..., Agents], undisturbed: Callable[..., str]
) -> None:
    """The replacement of rank 0 waits before it takes the state; then replicas have it."""
    agents = start("a", "b", "c", faults=[{"at": "transfer", "rank": 0, "scope": "wait"}])
    node = owner(agents, 0)
    assert ctl(agents, "drain", node, "--no-wait")[0] == 0
    # Any rank comes to the transfer; rank 0 is the replacement.
    wait_until(agents, lambda: (agents.directory / "fired.0").exists())
    code, text = ctl(agents, "drain", node, "--cancel")
    assert code == 1 and "too late" in text
    agents.kill_node(node)
    agents.running[node].wait()
    wait_until(agents, lambda: status(agents)["generation"] == 3)
    (agents.directory / "go.0").touch()
    outcome = free(agents)
    assert outcome.exit_codes == {**dict.fromkeys("abc", 0), node: -9}, outcome.text()
    assert "which was drained and handed slot 0 over, is lost" in outcome.text(), outcome.text()
    assert_unnoticed(outcome, undisturbed(iterations=ITERATIONS), {0: 2, 1: 2})


def test_the_spare_is_lost_in_the_handover(start: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    """The slot goes back to the drained node, whose workers go on; with another spare the drain is done after all."""
    agents = start("a", "b", "c", faults=[{"at": "transfer", "rank": 0, "scope": "node"}])
    node = owner(agents, 0)
    (spare,) = {"a", "b", "c"} - {node, owner(agents, 1)}
    code, text = ctl(agents, "drain", node, "--no-wait")
    assert code == 0, text
    wait_until(agents, lambda: agents.running[spare].poll() is not None)
    wait_until(agents, lambda: owner(agents, 0) == node and "waits for a spare" in str(status(agents)["drains"]))
    agents.start("d")
    code, text = ctl(agents, "drain", node)
    assert code == 0 and "d has slot 0" in text, text
    outcome = free(agents)
    assert outcome.exit_codes == {**dict.fromkeys("abcd", 0), spare: -9}, outcome.text()
    assert_unnoticed(outcome, undisturbed(iterations=ITERATIONS), {0: 3, 1: 3})
