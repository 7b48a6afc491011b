"""A signal to one node (an eviction, a drained machine): it goes, and the job goes on.

With a spare no iteration is cut, run twice or left out; without one the node is lost when its time is over, and a node
that comes later takes its place. Parameters, buffers and optimizer state at the end are bit for bit those of an
undisturbed run.
"""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from tests.faults.test_drain import ITERATIONS, PIPELINE, assert_unnoticed, ctl, free, owner, status, wait_until
from tests.support.job import Agents, Outcome
from tests.support.pipelines import References
from tests.tiers import in_soak

PREEMPTED, STOPPED = 75, 3
Start = Callable[..., Agents]


@pytest.fixture
def start(make_agents: Start) -> Start:
    """Starts nodes and waits until all train; *options* of all."""

    def begin(nodes: str, *options: str, script: Path | None = None, **orders: Any) -> Agents:
        scripts = {} if script is None else {"script": script}
        agents = make_agents(
            orders={"iterations": ITERATIONS, "pace_s": 0.4, **orders}, max_restarts=None, options=options, **scripts
        )
        for node in nodes:
            agents.start(node)
        wait_until(agents, lambda: all((agents.directory / f"calls.{rank}").exists() for rank in range(4)))
        return agents

    return begin


def end_of(agents: Agents, node: str) -> tuple[int | None, str]:
    code = agents.running[node].wait(60)
    return code, (agents.directory / f"agent.{node}.log").read_text()


@pytest.mark.parametrize("name", ["SIGTERM", *in_soak("SIGUSR1", "SIGUSR2")])
@pytest.mark.parametrize("slot", [0, *in_soak(1)])
def test_a_spare_takes_its_place(slot: int, name: str, start: Start, undisturbed: Callable[..., str]) -> None:
    number = signal.Signals[name]
    agents = start("abc", "--spares", "1")
    going = owner(agents, slot)
    agents.running[going].send_signal(number)
    agents.running[going].send_signal(number)  # some launchers signal a process and its group
    code, words = end_of(agents, going)
    assert code == PREEMPTED, words
    assert f"node {going} got {number.name}: a spare takes its place" in words
    taker = owner(agents, slot)
    assert f"node {going} was drained: {taker} has slot {slot}" in words and "Traceback" not in words
    outcome = free(agents)
    assert [code for node, code in outcome.exit_codes.items() if node != going] == [0, 0], outcome.text()
    assert_unnoticed(outcome, undisturbed(iterations=ITERATIONS), {2 * slot: 2, 2 * slot + 1: 2})


def test_a_spare_that_comes_in_time_takes_its_place(start: Start, undisturbed: Callable[..., str]) -> None:
    """Until then it trains on."""
    agents = start("ab", "--spares", "1", "--preempt-grace", "60")
    agents.running["a"].send_signal(signal.SIGTERM)
    wait_until(agents, lambda: [drain["node"] for drain in status(agents)["drains"]] == ["a"])
    trained = (agents.directory / "calls.0").read_text().count("\n")
    wait_until(agents, lambda: (agents.directory / "calls.0").read_text().count("\n") > trained + 2)
    agents.start("c")
    assert end_of(agents, "a")[0] == PREEMPTED
    slot = next(node["slot"] for node in status(agents)["nodes"] if node["node"] == "c")
    assert_unnoticed(free(agents), undisturbed(iterations=ITERATIONS), {2 * slot: 2, 2 * slot + 1: 2})


@pytest.mark.parametrize("slot", [0, *in_soak(1)])
def test_without_a_spare_it_leaves_and_the_job_waits_for_another(
    slot: int, start: Start, undisturbed: Callable[..., str]
) -> None:
    agents = start("ab", "--preempt-grace", "1")
    going = owner(agents, slot)
    agents.running[going].send_signal(signal.SIGTERM)
    code, words = end_of(agents, going)
    assert code == PREEMPTED and "no node took its slot within 1 s (--preempt-grace): it leaves the job" in words
    wait_until(agents, lambda: "wait for a node" in agents.outcome(0.0).text())
    assert status(agents)["state"] == "recovering", status(agents)
    agents.start("c")
    outcome = free(agents)
    assert outcome.hashes == {undisturbed(iterations=ITERATIONS)}, outcome.text()
    assert sorted(outcome.exit_codes.values()) == [0, 0, PREEMPTED]
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == {2 * slot, 2 * slot + 1}


def test_all_nodes_are_told_to_go(start: Start) -> None:
    """As scancel does it, or a job that is preempted: it ends at once, and whoever may start it again can tell."""
    agents = start("abc", "--spares", "1", "--preempt-grace", "600")
    began_s = time.monotonic()
    for agent in agents.running.values():
        agent.send_signal(signal.SIGTERM)
    outcome = agents.wait(60)
    assert set(outcome.exit_codes.values()) == {PREEMPTED}, outcome.text()
    assert time.monotonic() - began_s < 40
    assert "no node is left to train" in outcome.text() and "Traceback" not in outcome.text()


@pytest.mark.parametrize("late_s", [0.0, *in_soak(0.3)])
@pytest.mark.parametrize("nodes", ["ab", *in_soak("abc")])
def test_all_are_told_to_go_and_nothing_is_lost(
    late_s: float, nodes: str, start: Start, undisturbed: Callable[..., str]
) -> None:
    """With a last checkpoint, also where a spare was about to take a place: no iteration is run twice."""
    agents = start(nodes, "--spares", str(len(nodes) - 2), checkpoint=1000)
    wait_until(agents, lambda: (agents.directory / "calls.0").read_text().count("\n") > 5)
    for agent in agents.running.values():
        agent.send_signal(signal.SIGTERM)
        time.sleep(late_s)
    outcome = agents.wait(60)
    assert set(outcome.exit_codes.values()) == {PREEMPTED}, outcome.text()
    told = re.search(r"all that was trained is in the checkpoint of iteration (\d+)", outcome.text())
    assert told, outcome.text()
    for node in nodes:
        agents.start(node)
    outcome = free(agents)
    assert f"all ranks begin with the checkpoint of iteration {told[1]}" in outcome.text()
    num_processes = {rank: len(pids) for rank, pids in outcome.pids.items()}
    assert_unnoticed(outcome, undisturbed(iterations=ITERATIONS), num_processes)


def test_a_run_that_is_complete_is_not_stopped(start: Start, undisturbed: Callable[..., str]) -> None:
    """All are told to go in its last iteration."""
    waits = [{"at": "forward", "iteration": ITERATIONS - 1, "rank": rank, "scope": "wait"} for rank in range(4)]
    agents = start("ab", checkpoint=1000, faults=waits)
    (agents.directory / "free").touch()
    wait_until(agents, lambda: len(list(agents.directory.glob("fired.*"))) == 4)
    for agent in agents.running.values():
        agent.send_signal(signal.SIGTERM)
    wait_until(agents, lambda: "the last checkpoint comes before" in agents.outcome(0.0).text())
    for index in range(4):
        (agents.directory / f"go.{index}").touch()
    outcome = agents.wait(60)
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()
    assert outcome.hashes == {undisturbed(iterations=ITERATIONS)}


BETWEEN_POINTS = """
import json, os, time
import torch
import swift_agent as swift

directory, rank = json.loads(os.environ["FAULT_ORDERS"])["dir"], int(os.environ["RANK"])
job = swift.init("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.checkpoint(f"{directory}/checkpoints", every=1000)
job.track(model=model, optimizer=optimizer)

@job.iteration
def train():
    print(job.iteration_number, file=calls)
    time.sleep(0.05)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

with open(f"{directory}/calls.{rank}", "a", buffering=1) as calls:
    for _ in job.iterations(20):
        open(f"{directory}/here.{rank}", "a").close()
        while not os.path.exists(f"{directory}/go"):
            time.sleep(0.02)
        for _ in range(int(os.environ["EACH"])):
            train()
"""


def told_to_go(agents: Agents) -> Outcome:
    for agent in agents.running.values():
        agent.send_signal(signal.SIGTERM)
    wait_until(agents, lambda: "the last checkpoint comes before" in agents.outcome(0.0).text())
    (agents.directory / "go").touch()
    outcome = agents.wait(60)
    assert set(outcome.exit_codes.values()) == {PREEMPTED}, outcome.text()
    return outcome


@pytest.fixture
def between_points(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Agents]:
    """A job that makes so many iterations with each batch, and waits for the file `go` before the first."""
    script = tmp_path / "between_points_train.py"
    script.write_text(BETWEEN_POINTS)

    def begin(each: int) -> Agents:
        monkeypatch.setenv("EACH", str(each))
        agents = start("ab", script=script)
        wait_until(agents, lambda: len(list(agents.directory.glob("here.*"))) == 4)
        return agents

    return begin


def test_the_last_checkpoint_waits_for_the_next_batch(between_points: Callable[[int], Agents]) -> None:
    agents = between_points(10)
    (agents.directory / "go").touch()
    wait_until(agents, lambda: (agents.directory / "calls.0").read_text().count("\n") > 12)
    outcome = told_to_go(agents)
    made = [(agents.directory / f"calls.{rank}").read_text().count("\n") for rank in range(4)]
    assert len(set(made)) == 1 and made[0] % 10 == 0, made
    assert f"all that was trained is in the checkpoint of iteration {made[0]}" in outcome.text()


def test_told_before_ddp_has_its_buckets(between_points: Callable[[int], Agents]) -> None:
    """No checkpoint can be taken after the first iteration; all take it after the next one."""
    text = told_to_go(between_points(1)).text()
    assert "the last checkpoint comes before iteration 1," in text and "no checkpoint of iteration 1: " in text
    assert "all that was trained is in the checkpoint of iteration 2" in text


def test_somebody_else_ends_the_job(start: Start) -> None:
    """The exit code says why it ended, on a node that was told to go, too."""
    agents = start("ab", "--preempt-grace", "600")
    agents.running["a"].send_signal(signal.SIGTERM)
    wait_until(agents, lambda: status(agents)["drains"])
    assert ctl(agents, "drain", "a", "--cancel")[0] == 1  # it goes in any case
    assert ctl(agents, "stop")[0] == 0
    outcome = agents.wait(60)
    assert set(outcome.exit_codes.values()) == {STOPPED}, outcome.text()


def test_stages_of_a_pipeline_are_told_to_go(make_agents: Start, undisturbed_pipelines: References) -> None:
    orders = {"iterations": 40, "pace_s": 0.2, "checkpoint": 1000}
    agents = make_agents(num_nodes=4, num_workers=1, script=PIPELINE, orders=orders)
    for node in "abcd":
        agents.start(node)
    wait_until(agents, lambda: (agents.directory / "losses.3").exists())
    wait_until(agents, lambda: len((agents.directory / "losses.3").read_text().splitlines()) > 6)
    for agent in agents.running.values():
        agent.send_signal(signal.SIGUSR1)
    outcome = agents.wait(60)
    assert set(outcome.exit_codes.values()) == {PREEMPTED}, outcome.text()
    told = re.search(r"all that was trained is in the checkpoint of iteration (\d+)", outcome.text())
    assert told, outcome.text()
    for node in "abcd":
        agents.start(node)
    outcome = free(agents)
    assert f"all ranks begin with the checkpoint of iteration {told[1]}" in outcome.text()
    for rank, result in undisturbed_pipelines("Schedule1F1B", iterations=40).results.items():
        assert outcome.results[rank]["hash"] == result["hash"], outcome.text()


def test_another_signal_ends_the_job(start: Start) -> None:
    agents = start("ab", "--preempt-grace", "600")
    agents.running["a"].send_signal(signal.SIGTERM)
    wait_until(agents, lambda: status(agents)["drains"])
    agents.running["a"].send_signal(signal.SIGINT)
    outcome = agents.wait(60)
    assert set(outcome.exit_codes.values()) == {STOPPED}, outcome.text()
    assert "node a got SIGINT: the job ends here" in outcome.output["a"]


def test_ctrl_c_on_a_spare_ends_that_one_only(start: Start, undisturbed: Callable[..., str]) -> None:
    agents = start("ab", "--spares", "1")
    agents.start("c")
    wait_until(agents, lambda: "c" in [one["node"] for one in status(agents)["nodes"]])
    agents.running["c"].send_signal(signal.SIGINT)
    code, words = end_of(agents, "c")
    assert code == STOPPED and "node c got SIGINT: this spare leaves, and the job goes on" in words, words
    assert "the job ends here" not in words and "Traceback" not in words
    outcome = free(agents)
    assert outcome.exit_codes == {"a": 0, "b": 0, "c": STOPPED}, outcome.text()
    assert_unnoticed(outcome, undisturbed(iterations=ITERATIONS), {})


def test_ctrl_c_while_it_hands_over_waits_for_that(start: Start, undisturbed: Callable[..., str]) -> None:
    """Its successor is frozen until then: the state is nowhere else that is known to be safe."""
    agents = start("ab", "--spares", "1", "--lease-ttl", "60")
    agents.start("c")
    wait_until(agents, lambda: "c" in [one["node"] for one in status(agents)["nodes"]])
    going = owner(agents, 0)
    agents.running["c"].send_signal(signal.SIGSTOP)
    assert ctl(agents, "drain", going, "--timeout", "0.5")[0] == 1
    config = EtcdConfig.from_environment({}, endpoints=agents.endpoint)
    assert config is not None
    with EtcdStore(config) as store:  # it knows that its slot is another's, and has said what its workers hold
        wait_until(agents, lambda: store.get(Keys(agents.job_id).handover(2, 0)))
    agents.running[going].send_signal(signal.SIGINT)
    said = f"node {going} got SIGINT: it leaves as soon as its successor has its state, and the job goes on"
    wait_until(agents, lambda: said in (agents.directory / f"agent.{going}.log").read_text())
    agents.running["c"].send_signal(signal.SIGCONT)
    code, words = end_of(agents, going)
    assert code == 0 and f"node {going} was drained: c has slot 0 and its state" in words, words
    outcome = free(agents)
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()
    assert_unnoticed(outcome, undisturbed(iterations=ITERATIONS), {0: 2, 1: 2})


PLAIN = """
import json, os, time
import torch
import torch.distributed as dist

orders = json.loads(os.environ["FAULT_ORDERS"])
directory, rank = orders["dir"], int(os.environ["RANK"])
dist.init_process_group("gloo")
open(f"{directory}/calls.{rank}", "a").close()
with open(f"{directory}/pids.{rank}", "a") as file:
    print(os.getpid(), file=file)
while not os.path.exists(f"{directory}/free"):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
dist.destroy_process_group()
"""


def test_a_script_that_knows_nothing_of_it_starts_again(start: Start, tmp_path: Path) -> None:
    """Its node leaves at once where another one can take its place."""
    script = tmp_path / "plain_train.py"
    script.write_text(PLAIN)
    agents = start("abc", "--spares", "1", "--preempt-grace", "600", script=script)
    going = owner(agents, 1)
    agents.running[going].send_signal(signal.SIGTERM)
    code, words = end_of(agents, going)
    assert code == PREEMPTED and f"node {going} got SIGTERM: it leaves the job" in words, words
    wait_until(agents, lambda: all(len(pids) > 1 for pids in agents.outcome(0.0).pids.values()))
    outcome = free(agents)
    assert sorted(outcome.exit_codes.values()) == [0, 0, PREEMPTED], outcome.text()


@pytest.mark.parametrize("seed", [0, *in_soak(1, 2)])
def test_one_eviction_after_the_other_with_spares(seed: int, start: Start, undisturbed: Callable[..., str]) -> None:
    """Of twenty random nodes with a place; each comes back as a spare."""
    chance, moved = random.Random(seed), {rank: 1 for rank in range(4)}
    agents = start("abc", "--spares", "1", pace_s=0.1)
    for _ in range(20):
        slot = chance.randrange(2)
        going = owner(agents, slot)
        agents.running[going].send_signal(signal.SIGTERM)
        assert end_of(agents, going)[0] == PREEMPTED, agents.outcome(0.0).text()
        agents.start(going)
        for rank in (2 * slot, 2 * slot + 1):
            moved[rank] += 1
        wait_until(agents, lambda going=going: status(agents)["num_spares"] == 1)
    assert_unnoticed(free(agents), undisturbed(iterations=ITERATIONS), moved)


@pytest.mark.parametrize("seed", [0, *in_soak(1, 2)])
def test_one_eviction_after_the_other_without_spares(seed: int, start: Start, undisturbed: Callable[..., str]) -> None:
    """Of twenty random nodes; each is replaced by another one, once it has left."""
    chance = random.Random(seed)
    agents = start("ab", "--preempt-grace", "0", pace_s=0.1)
    for _ in range(20):
        slot = chance.randrange(2)
        going = owner(agents, slot)
        agents.running[going].send_signal(signal.SIGTERM)
        assert end_of(agents, going)[0] == PREEMPTED, agents.outcome(0.0).text()
        agents.start(going)
        wait_until(agents, lambda slot=slot, going=going: owner_or_none(agents, slot) == going)
        wait_until(agents, lambda: status(agents)["state"] == "training")
    outcome = free(agents)
    assert outcome.hashes == {undisturbed(iterations=ITERATIONS)}, outcome.text()
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()


def owner_or_none(agents: Agents, slot: int) -> str | None:
    return next((node["node"] for node in status(agents)["nodes"] if node["slot"] == slot), None)
