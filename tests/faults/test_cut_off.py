"""Machines that are cut off from the network: a namespace each, and no FIN when the cable goes."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import assert_recovered
from tests.support.etcd_cluster import EtcdCluster, wait_for
from tests.support.job import Agents, Outcome
from tests.support.network import Network
from tests.tiers import in_soak

NODES = ("a", "b", "c")
ITERATIONS = 100


@pytest.fixture
def hosts(make_network: Callable[[int], Network]) -> Network:
    return make_network(len(NODES))


def train(make_agents: Callable[..., Agents], hosts: Network, etcd: EtcdCluster, *options: str) -> Agents:
    """A job of two nodes and a spare, each in a namespace of its own; returns when it trains."""
    agents = make_agents(
        endpoint=etcd.endpoints[0],
        orders={"iterations": ITERATIONS, "pause_s": 0.15, "faults": []},
        options=("--spares", "1", *options),
        environment={"GLOO_SOCKET_IFNAME": "eth0"},
        hosts=dict(zip(NODES, hosts.hosts, strict=True)),
    )
    for node in NODES:
        agents.start(node)
        # Slots go by the order in which nodes come; the last one is the spare.
        wait_for(lambda node=node: "joined job" in log(agents, node), 30.0, f"node {node}")
    wait_for(lambda: iteration(agents, 2) >= 8 and iteration(agents, 0) >= 8, 60.0, "training")
    return agents


def finish_when_back(agents: Agents, nodes: tuple[str, ...]) -> Outcome:
    """As soon as one of them is a spare."""
    wait_for(lambda: any("comes back as a spare" in log(agents, node) for node in nodes), 30.0, "it to come back")
    agents.hurry()
    return agents.wait(120.0)


def log(agents: Agents, node: str) -> str:
    path = agents.directory / f"agent.{node}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def iteration(agents: Agents, rank: int) -> int:
    path = agents.directory / f"times.{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(lines[-1].split()[0]) if lines else -1


@pytest.mark.timeout(180)
@pytest.mark.parametrize("healed", ["soon", *in_soak("late")])
def test_a_node_whose_cable_is_cut_is_replaced_and_comes_back_as_a_spare(
    healed: str, hosts: Network, tmp_path: Path, make_agents: Callable[..., Agents], undisturbed: Callable[..., str]
) -> None:
    expected = undisturbed(iterations=ITERATIONS)
    with EtcdCluster(tmp_path, host=hosts.address) as etcd:
        agents = train(make_agents, hosts, etcd)
        hosts.hosts[1].cut()
        wait_for(lambda: "recovered" in log(agents, "a") + log(agents, "c"), 30.0, "the recovery")
        if healed == "late":
            # etcd does not answer: its workers stand still, by themselves.
            paused = "paused before another node can get their places"
            wait_for(lambda: paused in log(agents, "b"), 30.0, "its own conclusion")
            assert iteration(agents, 0) < ITERATIONS - 1
        hosts.hosts[1].heal()
        outcome = finish_when_back(agents, ("b",))
    text = outcome.text()
    # What the cut workers left is not a result: their place is the spare's.
    assert_recovered(outcome, expected, {2, 3}, num_faults=0)
    assert outcome.exit_codes["a"] == 0 and outcome.exit_codes["c"] == 0, text
    assert "comes back as a spare" in outcome.output["b"], text
    assert outcome.exit_codes["b"] == 0, text
    assert re.search(r"lost node b \(slot 1\): .*silent for", text), text


@pytest.mark.timeout(180)
def test_a_node_that_hears_its_peers_but_not_etcd_is_paused_and_replaced(
    hosts: Network, tmp_path: Path, make_agents: Callable[..., Agents], undisturbed: Callable[..., str]
) -> None:
    """Its lease runs out, and that is a loss; nobody trains twice, because its workers have stood still before that."""
    expected = undisturbed(iterations=ITERATIONS)
    with EtcdCluster(tmp_path, host=hosts.address) as etcd:
        agents = train(make_agents, hosts, etcd)
        hosts.hosts[1].deafen(hosts.address, from_inside=True)
        cut_s = time.monotonic()
        wait_for(lambda: "recovered" in log(agents, "a") + log(agents, "c"), 40.0, "the recovery")
        assert time.monotonic() - cut_s > 3.0  # it is the lease that ran out: its peers heard it all the time
        assert "paused before another node can get their places" in log(agents, "b")
        hosts.hosts[1].undeafen(hosts.address, from_inside=True)
        outcome = finish_when_back(agents, ("b",))
    assert_recovered(outcome, expected, {2, 3}, num_faults=0)
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()


@pytest.mark.timeout(180)
def test_two_nodes_that_lose_each_other_cost_the_job_one_of_them(
    hosts: Network, tmp_path: Path, make_agents: Callable[..., Agents], undisturbed: Callable[..., str]
) -> None:
    """What they send to each other vanishes, so each takes the other for lost; etcd and the spare hear both."""
    expected = undisturbed(iterations=ITERATIONS)
    with EtcdCluster(tmp_path, host=hosts.address) as etcd:
        agents = train(make_agents, hosts, etcd)
        pair = hosts.hosts[:2]
        for host, other in zip(pair, reversed(pair), strict=True):
            host.deafen(other.address, from_inside=True)
        wait_for(lambda: "recovered" in "".join(log(agents, node) for node in NODES), 30.0, "the recovery")
        for host, other in zip(pair, reversed(pair), strict=True):
            host.undeafen(other.address, from_inside=True)
        outcome = finish_when_back(agents, ("a", "b"))
    lost = {rank for rank, pids in outcome.pids.items() if len(pids) > 1}
    assert lost in ({0, 1}, {2, 3}), outcome.text()
    assert_recovered(outcome, expected, lost, num_faults=0)
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()


@pytest.mark.timeout(180)
def test_what_a_node_saw_while_it_was_cut_off_is_not_told_afterwards(
    hosts: Network, tmp_path: Path, make_agents: Callable[..., Agents], undisturbed: Callable[..., str]
) -> None:
    """Two nodes lose each other for a moment in which etcd takes no writes: what one was about to say of the other is
    not true any more when etcd is back, though the request is on its way. The one that hears nobody says nothing."""
    expected = undisturbed(iterations=ITERATIONS)
    with EtcdCluster(tmp_path, 3, host=hosts.address) as etcd:
        # The leases live for longer than all of it: members that do not answer prove nothing, and nodes are paused.
        agents = train(make_agents, hosts, etcd, "--lease-ttl", "20")
        for member in (1, 2):
            etcd.freeze(member)
        hosts.hosts[1].cut()
        wait_for(lambda: "lost node" in log(agents, "a"), 15.0, "a to miss b")
        missed_s = time.monotonic()
        wait_for(lambda: time.monotonic() > missed_s + 1.0, 5.0, "b to have had its time")
        assert "lost node" not in log(agents, "b"), log(agents, "b")
        hosts.hosts[1].heal()
        healed_s = time.monotonic()
        began = iteration(agents, 0)
        wait_for(lambda: iteration(agents, 0) >= began + 3 and time.monotonic() > healed_s + 1.0, 15.0, "training")
        for member in (1, 2):
            etcd.thaw(member)
        outcome = agents.wait(120.0)
    assert_recovered(outcome, expected, set(), num_faults=0)
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()


def test_a_node_that_begins_without_a_way_to_etcd_waits_for_one(
    hosts: Network, tmp_path: Path, make_agents: Callable[..., Agents]
) -> None:
    """Its network comes up a little later, or is away for a moment. Who tells it to end meanwhile is obeyed."""
    waits = "on the way to etcd"
    with EtcdCluster(tmp_path, host=hosts.address) as etcd:
        agents = make_agents(
            endpoint=etcd.endpoints[0], orders={"iterations": 3, "faults": []},
            environment={"GLOO_SOCKET_IFNAME": "eth0"},
            hosts=dict(zip(NODES, hosts.hosts, strict=True)),
        )  # fmt: skip
        late, given_up = hosts.hosts[1], hosts.hosts[2]
        for host in (late, given_up):
            host.deafen(hosts.address, from_inside=True)
        for node in NODES:
            agents.start(node)
        wait_for(lambda: waits in log(agents, "b") and waits in log(agents, "c"), 30.0, "two that have no way")
        agents.running["c"].send_signal(signal.SIGTERM)
        wait_for(lambda: agents.running["c"].poll() is not None, 10.0, "the end of c")
        late.undeafen(hosts.address, from_inside=True)
        outcome = agents.wait()
    assert outcome.exit_codes["a"] == outcome.exit_codes["b"] == 0, outcome.text()
    assert "trying for 30 s" in outcome.output["b"] and "joined job" in outcome.output["b"], outcome.text()
    assert outcome.exit_codes["c"] == 75 and "joined job" not in outcome.output["c"], outcome.text()
