"""Nodes that are cut off from etcd, but not from each other: no rank has two owners that train, and what the later ones
have committed stays.

The way to etcd is a relay that falls silent: whoever is behind it is told nothing, and hears its peers as ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from swift_logging_store.stores.local import LocalStore
from swift_recovery.checkpoint.directory import CheckpointDirectory
from tests.faults.conftest import assert_recovered
from tests.support.etcd_cluster import wait_for
from tests.support.job import Agents
from tests.support.relay import Relay

pytestmark = pytest.mark.timeout(180)

TTL_S = 3
ORDERS = {"iterations": 4000, "pause_s": 0.1, "checkpoint": 5}


@pytest.fixture
def relay(etcd: str) -> Iterator[Relay]:
    with Relay(int(etcd.rpartition(":")[2])) as made:
        yield made


class Split:
    """A job of *num_nodes* nodes with a worker each, some of which reach etcd through the relay only."""

    def __init__(
        self, make_agents: Callable[..., Agents], etcd: str, relay: Relay, num_nodes: int, *options: str
    ) -> None:
        options = ("--lease-ttl", str(TTL_S), *options)
        self.agents = make_agents(num_nodes=num_nodes, num_workers=1, orders=dict(ORDERS), options=options)
        self.relay, self._etcd, self.ranks = relay, etcd, range(num_nodes)
        self.directory = CheckpointDirectory(LocalStore(self.agents.directory / "checkpoints"))

    def start(self, node: str, endpoint: str) -> None:
        self.agents.endpoint = endpoint
        self.agents.start(node)
        wait_for(lambda: "joined job" in self.log(node), 40.0, f"node {node}")

    def start_behind(self, node: str) -> None:
        self.start(node, self.relay.address)

    def start_beside(self, node: str) -> None:
        self.start(node, self._etcd)

    def log(self, node: str) -> str:
        return (self.agents.directory / f"agent.{node}.log").read_text(errors="replace")

    def times(self, rank: int) -> list[tuple[int, float, int]]:
        """Of what each process has done: iteration, time, pid."""
        path = self.agents.directory / f"times.{rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line.split() for line in lines if line.endswith("\n")]
        return [(int(iteration), float(at), int(pid)) for iteration, at, pid in whole]

    def pids(self) -> list[int]:
        """The processes that have done the newest iteration of each rank."""
        return [self.times(rank)[-1][2] for rank in self.ranks]

    def trains(self, num_iterations: int, but_for: list[int] = []) -> None:  # noqa: B006
        """All ranks make so many iterations from now on, by processes other than *but_for*."""
        began_s = time.time()

        def done(rank: int) -> bool:
            made = [pid for _, at, pid in self.times(rank) if at > began_s and pid not in but_for]
            return len(made) >= num_iterations

        logs = lambda: "".join(f"\n--- {node}\n{self.log(node)}" for node in self.agents.running)  # noqa: E731
        try:
            wait_for(lambda: all(map(done, self.ranks)), 60.0, f"{num_iterations} iterations")
        except AssertionError as error:
            raise AssertionError(f"{error}{logs()}") from None

    def nobody_trains_beside(self, old: list[int]) -> None:
        """No rank: what *old* have done last was before anybody else began."""
        for rank in self.ranks:
            times = self.times(rank)
            last_s = max(at for _, at, pid in times if pid in old)
            first_s = min(at for _, at, pid in times if pid not in old)
            assert last_s < first_s, f"rank {rank}: {last_s - first_s:.1f} s side by side\n{self.log('a')}"


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_two_nodes_that_hear_each_other_and_no_etcd(
    make_agents: Callable[..., Agents], etcd: str, relay: Relay
) -> None:
    job = Split(make_agents, etcd, relay, 2, "--spares", "2")
    for node in "ab":
        job.start_behind(node)
    for node in "cd":
        job.start_beside(node)
    job.trains(12)
    old = job.pids()
    relay.cut()
    job.trains(12, but_for=old)
    job.nobody_trains_beside(old)
    assert all(map(is_stopped, old)), "the old ones are not ended before etcd has said so"
    for node in "ab":
        assert "The workers of this node are paused before another node can get their places" in job.log(node)
    newest = job.directory.newest()
    assert job.directory.load(newest).timeline.generation > 1
    relay.heal()
    for node in "ab":
        wait_for(lambda node=node: "comes back as a spare" in job.log(node), 30.0, f"{node} to be a spare")
    job.trains(7)
    assert not any(map(psutil.pid_exists, old)) and job.directory.newest() > newest
    job.nobody_trains_beside(old)


def test_a_single_node_and_its_successor(make_agents: Callable[..., Agents], etcd: str, relay: Relay) -> None:
    """Nobody is there who could be silent. As long as it has no successor it goes on when etcd is back."""
    job = Split(make_agents, etcd, relay, 1)
    job.start_behind("a")
    job.trains(12)
    old = job.pids()
    relay.cut()
    cut_s = time.monotonic()
    wait_for(lambda: is_stopped(old[0]), TTL_S + 1.0, "its worker to stand still")
    assert time.monotonic() - cut_s < TTL_S
    time.sleep(max(0.0, TTL_S + 2.0 - (time.monotonic() - cut_s)))  # its lease has ended
    relay.heal()
    job.trains(12)
    assert job.pids() == old
    relay.cut()
    job.start_beside("b")
    job.trains(12, but_for=old)
    job.nobody_trains_beside(old)
    assert "paused before another node can get their places" in job.log("a") and is_stopped(old[0])
    assert "all ranks begin with the checkpoint of iteration" in job.log("b")


def test_who_trains_regardless_takes_nothing_away(
    make_agents: Callable[..., Agents], etcd: str, relay: Relay
) -> None:
    """--on-etcd-loss train: both train. What the successor has committed stays, and it is what counts."""
    job = Split(make_agents, etcd, relay, 1, "--on-etcd-loss", "train")
    job.start_behind("a")
    assert "--on-etcd-loss train: this node trains on while it cannot reach etcd" in job.log("a")
    job.trains(12)
    old = job.pids()
    relay.cut()
    job.start_beside("b")
    seen: list[int] = []

    def committed_by_the_new() -> int:
        found = []
        for n in job.directory.committed():
            with contextlib.suppress(FileNotFoundError):  # one of those that its writer has just removed
                timeline = job.directory.load(n).timeline
                found += [n] if timeline.run != first.run or timeline.generation > first.generation else []
        if found and found[-1] not in seen:
            assert not seen or found[-1] > seen[-1]
            seen.append(found[-1])
        # Its own rule is to keep two.
        assert set(seen[-2:]) <= set(found), f"{seen} were committed, {found} are there"
        return len(seen)

    first = job.directory.load(job.directory.newest()).timeline
    wait_for(lambda: committed_by_the_new() >= 5, 90.0, f"checkpoints of the successor\n{job.log('b')}")
    assert not is_stopped(old[0]) and job.times(0)[-1][1] > 0
    assert any(pid == old[0] for _, at, pid in job.times(0) if at > time.time() - 2.0), "the old one trains on"
    assert "another generation has taken over" in job.log("a")
    assert "another generation has taken over" not in job.log("b")


def test_a_single_node_whose_agent_is_frozen(make_agents: Callable[..., Agents], etcd: str, relay: Relay) -> None:
    """It cannot pause its workers: they stand still by their own clock. A short while costs nothing else."""
    job = Split(make_agents, etcd, relay, 1)
    job.start_beside("a")
    job.trains(12)
    old, agent = job.pids(), job.agents.running["a"].pid
    os.kill(agent, signal.SIGSTOP)
    wait_for(lambda: is_stopped(old[0]), TTL_S, "its worker to stand still")
    os.kill(agent, signal.SIGCONT)
    job.trains(12)
    assert job.pids() == old
    os.kill(agent, signal.SIGSTOP)
    try:
        job.start_beside("b")
        job.trains(12, but_for=old)
        job.nobody_trains_beside(old)
    finally:
        os.kill(agent, signal.SIGCONT)
    wait_for(lambda: not psutil.pid_exists(old[0]), 10.0, "the old worker to be gone")
    job.nobody_trains_beside(old)


def test_a_pause_that_is_longer_than_the_timeout_of_the_groups_is_no_failure(
    make_agents: Callable[..., Agents], relay: Relay, undisturbed: Callable[..., str]
) -> None:
    """When they go on, collectives have run over it: nobody has failed, and all try once more."""
    timeout_s = 8.0
    waits = {"at": "backward", "iteration": 6, "rank": 0, "scope": "wait"}
    options = ("--lease-ttl", str(TTL_S))
    agents = make_agents(orders={"faults": [waits], "timeout_s": timeout_s}, endpoint=relay.address, options=options)
    log = lambda node: (agents.directory / f"agent.{node}.log").read_text(errors="replace")  # noqa: E731
    for node in "ab":
        agents.start(node)
    wait_for((agents.directory / "fired.0").exists, 60.0, "three ranks to wait for the first")
    relay.cut()
    began_s = time.monotonic()
    pids = [int((agents.directory / f"pids.{rank}").read_text()) for rank in range(4)]
    wait_for(lambda: all(map(is_stopped, pids)), timeout_s - 1.0, "all to be paused, before the timeout")
    wait_for(lambda: time.monotonic() > began_s + timeout_s + 1.0, 20.0, "the timeout to be over")
    relay.heal()
    wait_for(lambda: not any(map(is_stopped, pids)), 20.0, "all to go on")
    (agents.directory / "go.0").touch()
    outcome = agents.wait()
    assert_recovered(outcome, undisturbed(), set())
    assert set(outcome.exit_codes.values()) == {0}
    assert "Timed out waiting 8000ms" in outcome.text() and "(it had been paused); all others go on" in outcome.text()
    for node in "ab":
        assert "paused before another node can get their places" in log(node)
