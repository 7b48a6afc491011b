"""The ends of a job: Ctrl-C, SIGTERM, an agent that dies, a node that comes back. Nothing of ours may remain."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from tests.support.job import Agents


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"timed out: {what}"
        time.sleep(0.02)


def training(agents: Agents, iteration: int = 2) -> Callable[[], bool]:
    def reached() -> bool:
        files = list(agents.directory.glob("times.*"))
        return len(files) == 4 and all(len(f.read_text().splitlines()) > iteration for f in files)

    return reached


def keys_left(endpoint: str, job_id: str) -> list[str]:
    config = EtcdConfig.from_environment({}, endpoints=endpoint)
    assert config is not None
    with EtcdStore(config) as store:
        return [entry.key for entry in store.get_prefix(f"/swift/{job_id}/")[0]]


@pytest.mark.parametrize("to_all", [False, True], ids=["SIGINT", "SIGTERM to all"])
def test_signal_ends_the_whole_job(
    to_all: bool, make_agents: Callable[..., Agents], etcd: str, tmp_path: Path
) -> None:
    signum, code = (signal.SIGTERM, 75) if to_all else (signal.SIGINT, 3)
    agents = make_agents(
        start_method="spawn", orders={"iterations": 400, "pause_s": 0.05}, environment={"TMPDIR": str(tmp_path)}
    )
    for node in ("a", "b", "c"):
        agents.start(node)
    wait_until(training(agents), "training begins", 60)
    family = {p.pid for agent in agents.running.values() for p in psutil.Process(agent.pid).children(recursive=True)}
    assert len(family) >= 4
    active = next(n for n in agents.running if "starts ranks" in (agents.directory / f"agent.{n}.log").read_text())
    for agent in [agents.running[active], *(agents.running.values() if to_all else ())]:
        agent.send_signal(signum)
    outcome = agents.wait(45)
    assert set(outcome.exit_codes.values()) == {code}, outcome.text()
    assert signum.name in outcome.text()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in family), "all processes end", 10)
    assert keys_left(etcd, agents.job_id) == []
    left = [p.name for p in tmp_path.iterdir() if p.name.startswith(("swift-agent", "torchelastic"))]
    assert left == [], left


def test_workers_die_with_their_agent(make_agents: Callable[..., Agents]) -> None:
    agents = make_agents(start_method="spawn", orders={"iterations": 400, "pause_s": 0.05})
    for node in ("a", "b"):
        agents.start(node)
    wait_until(training(agents), "training begins", 60)
    family = psutil.Process(agents.running["b"].pid).children(recursive=True)
    agents.running["b"].kill()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    agents.running["a"].send_signal(signal.SIGINT)
    agents.wait(45)


def test_frozen_node_is_fenced(make_agents: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    """A node is frozen until a spare has its slot; when it wakes up it can do no harm, ends its workers and becomes
    a spare.
    """
    iterations = 200
    expected = undisturbed(iterations=iterations)
    agents = make_agents(
        orders={"iterations": iterations, "pause_s": 0.05},
        options=("--lease-ttl", "2", "--spares", "1"),
    )
    for node in ("a", "b"):
        agents.start(node)
    wait_until(training(agents), "training begins", 60)
    agents.start("c")
    wait_until(lambda: "joined" in (agents.directory / "agent.c.log").read_text(), "the spare joins", 30)
    frozen = [
        psutil.Process(agents.running["b"].pid),
        *psutil.Process(agents.running["b"].pid).children(recursive=True),
    ]
    for process in frozen:
        process.suspend()
    wait_until(
        lambda: "recovered" in "".join(p.read_text() for p in agents.directory.glob("agent.*.log")), "recovery", 45
    )
    for process in frozen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    wait_until(lambda: "comes back as a spare" in (agents.directory / "agent.b.log").read_text(), "b rejoins", 20)
    agents.hurry()
    outcome = agents.wait(100)
    assert outcome.hashes == {expected}, outcome.text()
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()


def test_no_replacement_in_time(make_agents: Callable[..., Agents], etcd: str) -> None:
    """Nobody takes the slot of a lost node: the job ends with an error that says what was waited for."""
    faults = [{"at": "forward", "iteration": 3, "rank": 2, "scope": "node"}]
    agents = make_agents(orders={"faults": faults}, options=("--replacement-timeout", "2"))
    for node in ("a", "b"):
        agents.start(node)
    outcome = agents.wait(60)
    assert outcome.fired == {0}
    assert sorted(outcome.exit_codes.values()) == [-9, 69], outcome.text()
    assert "--replacement-timeout" in outcome.text() and "Traceback" not in outcome.text()
    assert keys_left(etcd, agents.job_id) == []


def test_late_node_takes_the_slot(make_agents: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    """Without a spare the survivors wait, with their state in memory, until a node is started with the same command."""
    faults = [{"at": "forward", "iteration": 3, "rank": 2, "scope": "node"}]
    agents = make_agents(orders={"faults": faults})
    for node in ("a", "b"):
        agents.start(node)
    wait_until(
        lambda: "wait for a node" in "".join(p.read_text() for p in agents.directory.glob("agent.*.log")), "loss", 60
    )
    agents.start("late")
    outcome = agents.wait(90)
    assert outcome.hashes == {undisturbed()}, outcome.text()
    assert {rank for rank, pids in outcome.pids.items() if len(pids) > 1} == {2, 3}


def test_restarts_used_up(make_agents: Callable[..., Agents]) -> None:
    """A worker that fails more often than --max-restarts ends the job with torchrun's report of the root cause."""
    faults = [{"at": "forward", "iteration": i, "rank": 1, "scope": "worker"} for i in (2, 4)]
    agents = make_agents(orders={"faults": faults}, max_restarts=1)
    for node in ("a", "b"):
        agents.start(node)
    outcome = agents.wait(60)
    assert outcome.fired == {0, 1}
    assert set(outcome.exit_codes.values()) == {1}, outcome.text()
    assert ("ChildFailedError" in outcome.text() and "SIGKILL" in outcome.text()) or "Signal 9" in outcome.text()
    assert os.path.exists(agents.directory)


def test_restarts_that_are_long_ago_do_not_count(
    make_agents: Callable[..., Agents], undisturbed: Callable[..., str]
) -> None:
    faults = [{"at": "forward", "iteration": i, "rank": 1, "scope": "worker"} for i in (2, 4)]
    agents = make_agents(orders={"faults": faults}, max_restarts=1, options=("--max-restarts-window", "0.001"))
    for node in ("a", "b"):
        agents.start(node)
    outcome = agents.wait(60)
    assert outcome.fired == {0, 1} and set(outcome.exit_codes.values()) == {0}, outcome.text()
    assert outcome.hashes == {undisturbed()}
    assert "--max-restarts 1, within 0.001 s: so many times" in outcome.text()
