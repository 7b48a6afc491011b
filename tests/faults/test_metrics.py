"""What an agent tells over HTTP through a failure: figures of the job, on all nodes alike, and probes."""

from __future__ import annotations

import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.faults.test_drain import ITERATIONS, free, owner, wait_until
from tests.integration.test_observability import RULES, expressions
from tests.support.job import Agents
from tests.support.pipelines import SCRIPT as PIPELINE
from tests.support.pipelines import References, assert_same
from tests.support.ports import free_ports
from tests.support.prometheus_server import PrometheusServer, why_not

Series = dict[tuple[str, ...], float]


def url_of(agents: Agents, node: str) -> str:
    log = agents.directory / f"agent.{node}.log"
    return re.findall(r"metrics and probes are served at (http://\S+)", log.read_text() if log.exists() else "")[-1]


def ask(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metrics_of(url: str) -> Series:
    """By name and labels, but for those that each node has: (name, label, label)."""
    code, text = ask(f"{url}/metrics")
    assert code == 200
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name not in ("job_id", "node_id"))):
        sample.value for family in parse(text) for sample in family.samples
    }  # fmt: skip


def end(agents: Agents, *nodes: str) -> None:
    """As a person does it."""
    for node in nodes:
        agents.running[node].send_signal(signal.SIGINT)
    assert [agents.running[node].wait(60) for node in nodes] == [3] * len(nodes)


@pytest.fixture
def start(make_agents: Callable[..., Agents]) -> Callable[..., Agents]:
    def begin(nodes: str, *options: str) -> Agents:
        agents = make_agents(
            orders={"iterations": ITERATIONS, "pace_s": 0.2}, max_restarts=None,
            options=("--spares", "1", "--metrics-port", "0", *options),
        )  # fmt: skip
        for node in nodes:
            agents.start(node)
        wait_until(agents, lambda: all((agents.directory / f"calls.{rank}").exists() for rank in range(4)))
        return agents

    return begin


def test_a_node_is_lost(start: Callable[..., Agents], undisturbed: Callable[..., str]) -> None:
    agents = start("abc")
    urls = {node: url_of(agents, node) for node in "abc"}
    for url in urls.values():
        wait_until(agents, lambda url=url: ask(f"{url}/readyz") == (200, "ok\n"))
        assert ask(f"{url}/healthz") == (200, "ok\n")
        assert ask(f"{url}/else")[0] == 404
    # All of them tell the same of the job, once rank 0's node has told how fast it is.
    for url in urls.values():
        wait_until(agents, lambda url=url: metrics_of(url).get(("swift_iterations_per_second",), 0.0) > 0.0)
    before = {node: metrics_of(url) for node, url in urls.items()}
    for seen in before.values():
        assert (seen["swift_nodes", "active"], seen["swift_nodes", "spare"]) == (2, 1), seen
        assert (seen["swift_generation",], seen["swift_world_size",], seen["swift_stalled",]) == (1, 4, 0)
        assert seen["swift_ready",] == 1 and 0 < seen["swift_lease_remaining_seconds",] <= 6
        assert seen["swift_etcd_request_seconds_count", "Txn"] > 0 and seen["process_resident_memory_bytes",] > 0
        assert not any(seen[key] for key in seen if key[0] in ("swift_failures_total", "swift_recoveries_total"))
        assert seen["swift_spares_wanted",] == 1
        assert seen["swift_goodput_ratio",] == 1.0
    active = [node for node, seen in before.items() if seen.get(("swift_workers", "running")) == 2]
    (spare,) = set("abc") - set(active)
    wait_until(agents, lambda: metrics_of(urls[active[0]])["swift_standbys",] == 1)
    agents.kill_node(active[1])
    wait_until(agents, lambda: "recovered: generation 2" in agents.outcome(0.0).text())
    for node in (active[0], spare):
        wait_until(agents, lambda node=node: metrics_of(urls[node])["swift_recoveries_total", "node", "replica"] > 0)
        seen = metrics_of(urls[node])
        assert seen["swift_recoveries_total", "node", "replica"] == seen["swift_failures_total", "node"] == 1, seen
        assert seen["swift_recovery_seconds_count", "total"] == seen["swift_recovery_seconds_count", "transfer"] == 1
        assert (seen["swift_nodes", "active"], seen["swift_nodes", "spare"], seen["swift_nodes", "vacant"]) == (2, 0, 0)
        # The same recovery, as this node has seen it.
        took_s, stalled_s = seen["swift_recovery_seconds_sum", "total"], seen["swift_stalled_seconds_total",]
        assert took_s > 0 and abs(took_s - stalled_s) < 1.0
        assert seen["swift_stalled",] == seen["swift_lost_iterations_total",] == 0
        assert seen["swift_goodput_ratio",] < 1.0
        wait_until(agents, lambda node=node: ask(f"{urls[node]}/readyz") == (200, "ok\n"))
    assert free(agents).hashes == {undisturbed(iterations=ITERATIONS)}


def test_probes_say_why_not(start: Callable[..., Agents]) -> None:
    """A node that leaves, or waits for others, is alive and not ready."""
    agents = start("ab", "--preempt-grace", "60")
    url = url_of(agents, "a")
    wait_until(agents, lambda: ask(f"{url}/readyz")[0] == 200)
    agents.running["a"].send_signal(signal.SIGTERM)
    wait_until(agents, lambda: ask(f"{url}/readyz") == (503, "it leaves: it got SIGTERM\n"))
    assert ask(f"{url}/healthz") == (200, "ok\n")
    agents.start("c")
    assert agents.running["a"].wait(60) == 75
    wait_until(agents, lambda: ask(f"{url_of(agents, 'c')}/readyz")[0] == 200)
    end(agents, "b", "c")


def test_nodes_that_wait_are_not_ready(make_agents: Callable[..., Agents]) -> None:
    agents = make_agents(options=("--metrics-port", "0"))
    agents.start("a")
    wait_until(agents, lambda: "joined job" in agents.outcome(0.0).text())
    assert ask(f"{url_of(agents, 'a')}/readyz") == (503, "it waits for other nodes: 1 are there\n")
    assert ask(f"{url_of(agents, 'a')}/healthz") == (200, "ok\n")
    end(agents, "a")


def test_an_address_of_another_machine(make_agents: Callable[..., Agents]) -> None:
    agents = make_agents(options=("--metrics-port", "0", "--metrics-addr", "192.0.2.77"))
    agents.start("a")
    assert agents.running["a"].wait(60) == 69
    said = (agents.directory / "agent.a.log").read_text()
    assert "nothing can listen at 192.0.2.77" in said and "an address of this machine for --metrics-addr" in said


def test_a_port_that_is_taken(make_agents: Callable[..., Agents], tmp_path: Path) -> None:
    (port,) = free_ports(1)
    agents = make_agents(options=("--metrics-port", str(port)))
    agents.start("a")
    wait_until(agents, lambda: "metrics and probes" in agents.outcome(0.0).text())
    agents.start("b")
    assert agents.running["b"].wait(60) == 69
    said = (agents.directory / "agent.b.log").read_text()
    assert f"--metrics-port {port}: nothing can listen at 127.0.0.1" in said and "a port of its own" in said
    end(agents, "a")


def test_logs_of_messages_and_their_store(
    make_agents: Callable[..., Agents], undisturbed_pipelines: References, tmp_path: Path
) -> None:
    """What a node has counted stays when one of its workers is replaced."""
    agents = make_agents(
        num_nodes=4, num_workers=1, script=PIPELINE,
        orders={
            "faults": [{"at": "backward", "iteration": 8, "rank": 2, "scope": "worker"}], "schedule": "Schedule1F1B",
            "loses_logs": [7], "pace_s": 0.5,
        },
        options=("--log-store", str(tmp_path / "store"), "--metrics-port", "0"),
    )  # fmt: skip
    for node in "abcd":
        agents.start(node)

    def told(name: str, *labels: str) -> list[float]:
        return [metrics_of(url_of(agents, node)).get((name, *labels), 0.0) for node in "abcd"]

    wait_until(agents, lambda: agents.outcome(0.0).text().count("metrics and probes are served") == 4)
    wait_until(agents, lambda: all(told("swift_message_log_written_bytes_total")))
    before = told("swift_message_log_written_bytes_total")
    wait_until(agents, lambda: sum(told("swift_log_store_seconds_count", "get")) >= 2)
    assert all(was <= now for was, now in zip(before, told("swift_message_log_written_bytes_total"), strict=True))
    assert sum(told("swift_log_store_bytes_total", "get")) > 0 < sum(told("swift_log_store_bytes_total", "put"))
    assert sum(told("swift_log_store_seconds_sum", "get")) > 0 < sum(told("swift_log_store_seconds_sum", "put"))
    assert not any(told("swift_log_store_errors_total") + told("swift_message_logs_given_up"))
    assert_same(free(agents), undisturbed_pipelines("Schedule1F1B"), {2})


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_real_prometheus_sees_a_failure(
    start: Callable[..., Agents], undisturbed: Callable[..., str], tmp_path: Path
) -> None:
    """Through its API: what was counted, the alerts that follow, and every panel of the dashboard."""
    agents = start("abc")
    targets = [url_of(agents, node).removeprefix("http://") for node in "abc"]
    with PrometheusServer(tmp_path / "prometheus", targets, RULES / "alerts.yml") as prometheus:
        wait_until(agents, lambda: prometheus.value("sum(up)") == 3 and prometheus.value("sum(swift_ready)") == 3)
        wait_until(agents, lambda: prometheus.value("max(swift_iterations_per_second)") is not None)
        assert prometheus.value('max(swift_nodes{state="spare"})') == 1
        assert prometheus.value("sum(swift_recoveries_total)") == 0
        active = owner(agents, 1)
        agents.kill_node(active)
        wait_until(agents, lambda: prometheus.value("max(swift_recoveries_total)") == 1)
        assert prometheus.query("max by (kind, cause) (swift_recoveries_total > 0)") == {
            (("cause", "node"), ("kind", "replica")): 1.0
        }
        # What alerts and the dashboard ask for: the first failure counts.
        for name in ("swift_failures_total", "swift_recoveries_total"):
            assert prometheus.value(f'max(increase({name}{{{"kind" if "failures" in name else "cause"}="node"}}[5m]))')
        wait_until(agents, lambda: prometheus.value("sum(up)") == 2)
        took_s = prometheus.value('max(swift_recovery_seconds_sum{phase="total"})')
        stalled_s = prometheus.value("max(swift_stalled_seconds_total)")
        assert took_s is not None and stalled_s is not None and abs(took_s - stalled_s) < 1.0
        wait_until(agents, lambda: prometheus.value("max(swift_stalled)") == 0)
        # Pending: its 10 minutes are not over.
        wait_until(agents, lambda: prometheus.value('ALERTS{alertname="SwiftNoSpare"}') == 1)
        # Not for 2 minutes; it is pending until the rules are evaluated again.
        assert prometheus.value('ALERTS{alertname="SwiftJobStalled",alertstate="firing"}') is None
        wait_until(agents, lambda: prometheus.value('ALERTS{alertname="SwiftJobStalled"}') is None)

        def empty() -> list[str]:
            shown = {one: prometheus.query(one.replace("$job", ".*")) for one in expressions()["dashboard"]}
            return [one for one, found in shown.items() if not found and "changes(" not in one]

        # A series is stale, and a panel empty, until the next scrape where one has come to nothing.
        wait_until(agents, lambda: not empty())
        assert free(agents).hashes == {undisturbed(iterations=ITERATIONS)}
