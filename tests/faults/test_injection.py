"""`swiftctl inject` and `swiftctl campaign`: faults at the moment that was ordered; the job recovers from them, and its
result is bit for bit that of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner

from swift_agent.ctl.injection.inject import new_id, order
from swift_agent.ctl.main import cli
from swift_agent.wire.injected import Fault, checked
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from tests.faults.conftest import assert_recovered
from tests.faults.test_drain import ITERATIONS, PIPELINE, free, owner, wait_until
from tests.faults.test_drain import ctl as swiftctl
from tests.support.etcd_cluster import EtcdCluster
from tests.support.injected import Injected, killed
from tests.support.job import ROOT, SOURCE_ROOTS, Agents
from tests.support.network import Network
from tests.tiers import in_soak

Start = Callable[..., Agents]
RECOVERED = "recovered: generation {}"


@pytest.fixture
def start(make_agents: Start) -> Start:
    def begin(nodes: str, *options: str, **orders: Any) -> Agents:
        agents = make_agents(
            orders={"iterations": ITERATIONS, "pace_s": 0.3, **orders}, max_restarts=None,
            options=("--spares", str(len(nodes) - 2), "--allow-injection", *options),
        )  # fmt: skip
        for node in nodes:
            agents.start(node)
        wait_until(agents, lambda: all((agents.directory / f"calls.{rank}").exists() for rank in range(4)))
        return agents

    return begin


def ctl(agents: Agents, command: str, *words: str, code: int = 0) -> str:
    found, text = swiftctl(agents, command, *words)
    assert found == code, text
    return text


def inject(agents: Agents, *words: str, code: int = 0) -> dict[str, Any]:
    done = ctl(agents, "inject", *words, "--json", code=code)
    found: dict[str, Any] = json.loads(done)
    return found


def config_of(agents: Agents) -> EtcdConfig:
    config = EtcdConfig.from_environment({}, endpoints=agents.endpoint)
    assert config is not None
    return config


MOMENTS = ["forward", "backward", "after-step", *in_soak("begin", "step")]


@pytest.mark.parametrize("phase", MOMENTS)
def test_a_worker_is_killed_at_a_moment(phase: str, start: Start, undisturbed: Callable[..., str]) -> None:
    agents = start("ab")
    done = inject(agents, "kill-worker", "--rank", "1", "--at", f"iteration=next,phase={phase},part=0.5")
    assert done["state"] == "done" and done["node"] == owner(agents, 0), done
    wait_until(agents, lambda: RECOVERED.format(2) in agents.outcome(0.0).text())
    assert_recovered(free(agents), undisturbed(iterations=ITERATIONS), lost={1}, num_faults=0)
    # Neither orders nor answers outlive the job.
    with EtcdStore(config_of(agents)) as store:
        assert store.get_prefix(Keys(agents.job_id).prefix)[0] == []


def test_at_the_iteration_that_was_named(start: Start, undisturbed: Callable[..., str]) -> None:
    agents = start("ab")
    calls = agents.directory / "calls.3"
    number = len(calls.read_text().splitlines()) + 3
    inject(agents, "kill-worker", "--rank", "3", "--at", f"iteration={number},phase=backward")
    wait_until(agents, lambda: RECOVERED.format(2) in agents.outcome(0.0).text())
    # The one that was killed had begun it, and its replacement begins it again.
    assert [int(line.split()[0]) for line in calls.read_text().splitlines()].count(number) == 2
    assert_recovered(free(agents), undisturbed(iterations=ITERATIONS), lost={3}, num_faults=0)


def test_a_node_is_killed_and_a_spare_takes_its_place(start: Start, undisturbed: Callable[..., str]) -> None:
    agents = start("abc")
    lost = owner(agents, 1)
    done = inject(agents, "kill-node", "--rank", "2", "--at", "phase=backward,part=0.3")
    assert done["node"] == lost and "the node of rank 2" in done["what"]
    assert agents.running[lost].wait(60) == -9
    wait_until(agents, lambda: RECOVERED.format(2) in agents.outcome(0.0).text())
    outcome = free(agents)
    assert outcome.hashes == {undisturbed(iterations=ITERATIONS)}, outcome.text()


def test_a_node_that_stands_still_for_a_moment_loses_nothing(start: Start, undisturbed: Callable[..., str]) -> None:
    agents = start("ab")
    inject(agents, "freeze", "--node", "a", "--for", "1")
    outcome = free(agents)
    assert outcome.hashes == {undisturbed(iterations=ITERATIONS)}, outcome.text()
    assert all(len(pids) == 1 for pids in outcome.pids.values()), outcome.pids


def test_orders_stand_though_processes_are_replaced(
    make_agents: Start, undisturbed: Callable[..., str]
) -> None:
    """What comes strikes whoever is there then: the node with the one that has come to it, and the next of a rank."""
    agents = make_agents(orders={"held": True}, options=("--allow-injection",))
    for node in "ab":
        agents.start(node)
    freeze = checked(Fault(new_id(), "freeze", 0, iteration=6, phase="forward", for_s=1.5))
    ordered = Injected(agents, [killed(1, 3, "forward"), freeze, killed(3, 9, "backward")])
    node = owner(agents, 0)

    def processes(rank: int) -> list[int]:
        return [int(pid) for pid in (agents.directory / f"pids.{rank}").read_text().split()]

    def is_stopped(pid: int) -> bool:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED

    wait_until(agents, lambda: is_stopped(agents.running[node].pid))
    wait_until(agents, lambda: is_stopped(processes(0)[-1]) and is_stopped(processes(1)[-1]))
    assert len(processes(1)) == 2
    os.kill(processes(3)[-1], signal.SIGKILL)
    outcome = agents.wait()
    ordered.assert_struck(outcome)
    assert_recovered(outcome, undisturbed(), {1, 3}, num_faults=0)
    assert [len(outcome.pids[rank]) for rank in range(4)] == [1, 2, 1, 3], outcome.text()


def test_what_is_not_possible_is_said_and_does_no_harm(start: Start, undisturbed: Callable[..., str]) -> None:
    agents = start("ab")
    assert "there is no network between them" in inject(agents, "cut-network", "--node", "a", code=1)["what"]
    # The worker had stopped itself at that moment: it goes on.
    refused = inject(agents, "corrupt-log", "--rank", "0", "--at", "phase=forward", code=1)
    assert refused["state"] == "refused" and "has logged no messages" in refused["what"]
    past = inject(agents, "kill-worker", "--rank", "1", "--at", "iteration=0", code=1)
    assert "has begun a later iteration than 0 already" in past["what"]
    # Taken back in time: nothing strikes later.
    late = inject(agents, "kill-worker", "--rank", "1", "--at", "iteration=70", "--timeout", "0.5", code=1)
    assert late["state"] == "unanswered"
    # It keeps the next order for that rank from nothing, as one does that still stands.
    again = inject(agents, "kill-worker", "--rank", "1", "--at", "iteration=0", code=1)
    assert "has begun a later iteration than 0 already" in again["what"]
    stands = killed(1, 70, "forward")
    with EtcdStore(config_of(agents)) as store:
        answers: list[dict[str, Any]] = []
        waiting = threading.Thread(target=lambda: answers.append(order(store, Keys(agents.job_id), stands, 3.0)))
        waiting.start()
        wait_until(agents, lambda: agents.outcome(0.0).text().count(f"{stands.target}, {stands.moment}"))
        second = inject(agents, "kill-worker", "--rank", "1", "--at", "phase=forward", code=1)
        assert "rank 1 is to come to the moment of another fault first" in second["what"]
        waiting.join()
    assert [one["state"] for one in answers] == ["unanswered"]
    assert "no rank 9; there are 0 to 3" in ctl(agents, "inject", "kill-worker", "--rank", "9", code=1)
    assert "no node x; there are a, b" in ctl(agents, "inject", "freeze", "--node", "x", code=1)
    outcome = free(agents)
    assert outcome.hashes == {undisturbed(iterations=ITERATIONS)}, outcome.text()
    assert all(len(pids) == 1 for pids in outcome.pids.values()), outcome.pids


def test_nobody_takes_orders_unless_that_is_allowed(make_agents: Start) -> None:
    agents = make_agents(orders={"iterations": ITERATIONS, "pace_s": 0.3}, max_restarts=None)
    for node in "ab":
        agents.start(node)
    wait_until(agents, lambda: all((agents.directory / f"calls.{rank}").exists() for rank in range(4)))
    wanted = {("--rank", "0"): "no node takes faults: start them", ("--node", "b"): "node b takes no faults: start it"}
    for target, words in wanted.items():
        said = ctl(agents, "inject", "kill-node", *target, code=1)
        assert words in said and "with swift-run --allow-injection" in said
    outcome = free(agents)
    assert all(len(pids) == 1 for pids in outcome.pids.values()) and len(outcome.hashes) == 1


def test_mistakes_are_told_at_once(start: Start) -> None:
    agents = start("ab")
    said = ctl(agents, "inject", "kill-worker", "--node", "a", "--for", "-1", code=2)
    assert "of which rank? type --rank R" in said and "--for -1: must be above 0 s" in said
    said = ctl(agents, "inject", "kill-worker", "--rank", "0", "--at", "phase=sideways", code=2)
    assert "type for example --at iteration=120,phase=backward,part=0.5" in said
    free(agents)


@pytest.mark.parametrize("seed", [7, *in_soak(8, 9)])
def test_a_campaign(seed: int, start: Start, undisturbed: Callable[..., str], tmp_path: Path) -> None:
    """Six faults of a seed; the job has recovered from each, nothing is lost, and the report says so."""
    agents = start("abcd", pace_s=0.1)
    report = tmp_path / "report.json"
    said = ctl(
        agents, "campaign", "--seed", str(seed), "--faults", "6", "--pause", "0.5", "--for", "0.5",
        "--report", str(report),
    )  # fmt: skip
    found = json.loads(report.read_text())
    assert [one["number"] for one in found["incidents"]] == [1, 2, 3, 4, 5, 6]
    assert {one["state"] for one in found["incidents"]} <= {"recovered", "unnoticed"}, found
    recovered = [one for one in found["incidents"] if one["state"] == "recovered"]
    assert recovered and all(one["recovered_s"] > 0 and one["phases_s"] for one in recovered)
    assert "RECOVERED" in said and f"{recovered[0]['number']}: {recovered[0]['kind']}" in said
    assert free(agents).hashes == {undisturbed(iterations=ITERATIONS)}


@pytest.fixture
def hosts(make_network: Callable[[int], Network]) -> Network:
    return make_network(3)


def test_the_network_of_a_node_is_cut_and_comes_back(
    hosts: Network, tmp_path: Path, make_agents: Start, undisturbed: Callable[..., str]
) -> None:
    """Each node on a network of its own: the spare takes the place, and the node comes back as a spare."""
    with EtcdCluster(tmp_path, host=hosts.address) as etcd:
        agents = make_agents(
            endpoint=etcd.endpoints[0], orders={"iterations": 100, "pause_s": 0.15}, max_restarts=None,
            options=("--spares", "1", "--allow-injection"), environment={"GLOO_SOCKET_IFNAME": "eth0"},
            hosts=dict(zip("abc", hosts.hosts, strict=True)),
        )  # fmt: skip
        for node in "abc":
            agents.start(node)
        wait_until(agents, lambda: all((agents.directory / f"calls.{rank}").exists() for rank in range(4)))
        slow = inject(agents, "slow-link", "--rank", "0", "--for", "0.5", "--rate", "50mbit")
        assert slow["state"] == "done"
        cut = owner(agents, 1)
        inject(agents, "cut-network", "--rank", "2", "--at", "phase=forward", "--for", "3")
        wait_until(agents, lambda: RECOVERED.format(2) in agents.outcome(0.0).text())
        log = agents.directory / f"agent.{cut}.log"
        wait_until(agents, lambda: "comes back as a spare" in log.read_text())
        agents.hurry()
        outcome = agents.wait(120.0)
        assert outcome.hashes == {undisturbed(iterations=100)}, outcome.text()


def test_a_damaged_log_is_found_out(make_agents: Start, tmp_path: Path) -> None:
    """A stage of a pipeline is lost whose neighbour's log was damaged: nothing wrong is repeated."""
    (tmp_path / "undisturbed").mkdir()
    expected = make_agents(
        tmp_path / "undisturbed", num_nodes=4, num_workers=1, script=PIPELINE, orders={"iterations": 40}
    ).run("abcd")
    agents = make_agents(
        num_nodes=4, num_workers=1, script=PIPELINE, max_restarts=None,
        orders={"iterations": 40, "pace_s": 0.3, "checkpoint": 10, "patient": True}, options=("--allow-injection",),
    )  # fmt: skip
    for node in "abcd":
        agents.start(node)
    wait_until(agents, lambda: (agents.directory / "losses.3").exists())
    wait_until(agents, lambda: len((agents.directory / "losses.3").read_text().splitlines()) > 13)
    inject(agents, "corrupt-log", "--rank", "1", "--at", "phase=begin")
    inject(agents, "kill-worker", "--rank", "2", "--at", "phase=backward")
    wait_until(agents, lambda: "cannot read what it has sent" in agents.outcome(0.0).text())
    outcome = free(agents)
    for rank, result in expected.results.items():
        assert outcome.results[rank]["hash"] == result["hash"], outcome.text()


@pytest.mark.timeout(240)
def test_a_stage_is_lost_whose_iterations_are_given_numbers_only(etcd: str, tmp_path: Path) -> None:
    """What its module is called with first is looked at then; but not what stages call it with to tell each other
    shapes, which a replacement does in whichever iteration it begins."""
    weights = []
    for name, is_struck in (("undisturbed", False), ("struck", True)):
        out = tmp_path / name
        out.mkdir()
        job = f"numbers-{name}-{os.getpid()}"
        with (out / "log").open("w") as log:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "swift_agent.run", "--rdzv-endpoint", etcd, "--rdzv-id", job,
                    "--nproc-per-node", "4", "--allow-injection", str(ROOT / "examples" / "pipeline.py"),
                    "--checkpoints", str(out / "checkpoints"), "--replicas", "2", "--iterations", "200",
                    "--out", str(out),
                ],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS), "PYTHONUNBUFFERED": "1"},
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            if is_struck:
                deadline_s = time.monotonic() + 60
                while "iteration 20/200" not in (out / "log").read_text():
                    assert time.monotonic() < deadline_s, (out / "log").read_text()
                    time.sleep(0.05)
                words = ["inject", "--rdzv-endpoint", etcd, job, "kill-worker", "--rank", "3"]
                done = CliRunner().invoke(cli, [*words, "--at", "phase=backward,part=0.5"])
                assert done.exit_code == 0, done.output
            assert process.wait(90) == 0, (out / "log").read_text()
        finally:
            process.kill()
            process.wait()
        weights.append([torch.load(out / f"weights.{rank}.pt") for rank in range(4)])
    said = (tmp_path / "struck" / "log").read_text()
    assert RECOVERED.format(2) in said and "all workers restart" not in said, said
    for before, after in zip(*weights, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
