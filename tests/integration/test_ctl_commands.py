"""`swiftctl`'s other commands against a real etcd: history, explain, stop, gc, doctor, status --watch.

The last test runs them on a real job whose worker is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from swift_agent.agent.lifecycle.planning import plan_generation
from swift_agent.ctl import steer
from swift_agent.ctl.main import cli
from swift_rendezvous.codec import decode, encode
from swift_rendezvous.node.registration import Entry, enter_job, leave_job
from swift_rendezvous.roster.decision import PublishGeneration, Rules
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.membership import decide
from swift_rendezvous.roster.records import EventRecord, JobRecord, ProgressRecord, ResultRecord
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.kv import KeyValueStore
from swift_rendezvous.store.private_etcd import PrivateEtcd
from tests.support import records
from tests.support.etcd_cluster import EtcdCluster, etcd_binary, wait_for
from tests.support.job import SOURCE_ROOTS, Agents

JOB = JobRecord(2, 2, "command", 1)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with PrivateEtcd(etcd_binary()) as server:
        yield server.endpoint


@pytest.fixture
def store(endpoint: str) -> Iterator[EtcdStore]:
    from swift_rendezvous.store.etcd_config import EtcdConfig

    with EtcdStore(EtcdConfig((endpoint,))) as opened:
        yield opened
        opened.delete_prefix("/swift/")


def swiftctl(endpoint: str | None, *args: str) -> Result:
    variables: dict[str, str | None] = {"SWIFT_ETCD_ENDPOINTS": endpoint, "COLUMNS": "150"}
    result = CliRunner().invoke(cli, list(args), env=variables)
    assert "Traceback" not in result.output and "secret" not in result.output
    return result


def enter(store: KeyValueStore, job: str, *names: str) -> dict[str, Entry]:
    return {name: enter_job(store, Keys(job), JOB, records.node(name), 60) for name in names}


def recover(store: KeyValueStore, job: str) -> None:
    """The records of a job that has replaced n1 by n2, as its coordinator and its agents write them."""
    keys = Keys(job)
    before = records.view(names=("n0", "n1", "n2"), failures={1: records.failure("node", 1)})
    command = decide(before, Rules(), now_s=0.0, waiting_since_s=None).commands[0]
    assert isinstance(command, PublishGeneration)
    generation = command.generation
    reports = tuple({"rank": rank, "status": "holding", "iteration": 7, "replicas": "0-3"} for rank in (0, 1))
    plan = plan_generation(generation, View(progress={0: ProgressRecord(0, "n0.1", reports)}))
    details = {"phases_s": {"agree": 0.003, "plan": 0.002, "total": 0.0951}, "iteration": 7, "plan": plan.content}
    store.put(keys.event(1), encode(EventRecord(1, "generation (start)", "2 nodes are here: n0, n1", 1000.0)))
    store.put(keys.generation, encode(generation))
    store.put(keys.plan(2), encode(plan))
    store.put(keys.event(2), encode(EventRecord(2, "recovered", f"{generation.why}; {plan.why}", 1001.5, details)))


def test_history_and_explain(endpoint: str, store: EtcdStore) -> None:
    enter(store, "gpt", "n0", "n2")
    recover(store, "gpt")
    found = json.loads(swiftctl(endpoint, "history", "gpt", "--json").stdout)
    assert [one["generation"] for one in found["events"]] == [1, 2]
    assert [one["what"] for one in found["events"]] == ["generation (start)", "recovered"]
    assert found["events"][1]["phases_ms"] == {"agree": 3.0, "plan": 2.0, "total": 95.1}
    shown = swiftctl(endpoint, "history", "gpt").stdout
    assert "AGREE" in shown and "95.1" in shown and "goes on at iteration 7" in shown
    said = swiftctl(endpoint, "explain", "gpt").stdout
    assert "n2 takes slot 1" in said and "Rank 1 sends its state to rank 3." in said and "evidence node 1" in said
    past = json.loads(swiftctl(endpoint, "explain", "gpt", "1", "--json").stdout)
    assert past["plan"] is None and "2 nodes are here" in past["sentences"][0]
    status = json.loads(swiftctl(endpoint, "status", "gpt", "--json").stdout)
    assert (status["iteration"], status["mode"], status["num_spares"]) == (7, "replace", 0)


def test_what_is_piped_is_not_cut(endpoint: str, store: EtcdStore) -> None:
    name = "a-job-with-a-long-name-" * 5
    enter(store, name, "n0")
    without = {"SWIFT_ETCD_ENDPOINTS": endpoint, "COLUMNS": None}
    heading, *jobs = CliRunner().invoke(cli, ["status"], env=without).stdout.splitlines()
    assert heading.split()[:3] == ["JOB", "STATE", "GENERATION"] and any(line.startswith(name) for line in jobs)


def test_what_is_not_there(endpoint: str, store: EtcdStore) -> None:
    enter(store, "gpt", "n0")
    unmeasured = swiftctl(endpoint, "explain", "gpt", "--strategy")
    assert unmeasured.exit_code == 1 and "has not been measured yet" in unmeasured.output
    for args in (("history", "no"), ("explain", "no"), ("stop", "no"), ("status", "no"), ("status", "no", "--watch")):
        result = swiftctl(endpoint, *args)
        assert result.exit_code == 1 and "no job 'no'" in result.stderr
    result = swiftctl(endpoint, "explain", "gpt")
    assert result.exit_code == 1 and "no generation yet" in result.stderr
    recover(store, "gpt")
    result = swiftctl(endpoint, "explain", "gpt", "9")
    assert result.exit_code == 1 and result.stderr.endswith("kept: 1, 2\n")
    for args in (
        ("explain", "gpt", "0"), ("stop",), ("gc", "gpt"), ("stop", "gpt", "--timeout", "-1"),
        ("campaign", "gpt", "--report", "no/such/report.json"),
    ):  # fmt: skip
        assert swiftctl(endpoint, *args).exit_code == 2
    assert swiftctl(None, "gc").exit_code == 2
    store.put(Keys("gpt").event(3), b'{"v": 999}')
    result = swiftctl(endpoint, "history", "gpt")
    assert result.exit_code == 0 and "another version" in result.stderr and "generation 2" in result.stdout


def test_timeline(endpoint: str, store: EtcdStore, tmp_path: Path) -> None:
    enter(store, "gpt", "n0", "n2")
    recover(store, "gpt")
    said = swiftctl(endpoint, "timeline", "gpt", "--gpu-hour-cost", "3600").stdout
    assert "job gpt: recovering, generation 2, 4 ranks" in said and "phases: agree 3 ms" in said and "in money" in said
    page = tmp_path / "page.html"
    result = swiftctl(endpoint, "timeline", "gpt", "--html", str(page))
    assert result.exit_code == 0 and f"is in {page}" in result.stdout and "Job gpt" in page.read_text()
    for args, code, why in (
        (("timeline",), 2, "name a JOB"), (("timeline", "no"), 1, "no job 'no'"),
        (("timeline", "gpt", "--html", str(tmp_path / "no" / "page.html")), 1, "cannot be written"),
        (("timeline", "--journal", str(tmp_path)), 1, "there is no journal here"),
        (("timeline", "--journal", str(page)), 1, "this is no journal"),
    ):  # fmt: skip
        result = swiftctl(endpoint, *args)
        assert result.exit_code == code and why in result.stderr, result.output
    assert swiftctl(None, "timeline", "gpt").exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]  # nothing half written is left


def test_stop_waits_until_the_nodes_have_left(endpoint: str, store: EtcdStore) -> None:
    entries, keys = enter(store, "gpt", "n0", "n1"), Keys("gpt")
    seen = []

    def agents() -> None:
        seen.append(decode(ResultRecord, wait_for(lambda: store.get(keys.result), 10, "the result").value))
        for name, entry in entries.items():
            leave_job(store, keys, records.node(name), entry.lease)

    thread = threading.Thread(target=agents)
    thread.start()
    result = swiftctl(endpoint, "stop", "gpt", "--why", "maintenance", "--json")
    thread.join()
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == {"job": "gpt", "state": "stopped", "why": "maintenance", "stopped_by_us": True, "nodes_left": []}
    assert seen == [ResultRecord("stopped", "maintenance", cause="operator")] and store.get(keys.job) is None


def test_stop_leaves_nothing_of_a_job_whose_last_node_dies_on_the_way(endpoint: str, store: EtcdStore) -> None:
    """The last node removes the records after it has left: nobody does when it is killed between the two."""
    entries, keys = enter(store, "gpt", "n0", "n1"), Keys("gpt")

    def agents() -> None:
        wait_for(lambda: store.get(keys.result), 10, "the result")
        for entry in entries.values():
            entry.lease.revoke()

    thread = threading.Thread(target=agents)
    thread.start()
    result = swiftctl(endpoint, "stop", "gpt")
    thread.join()
    assert result.exit_code == 0 and "all nodes have left" in result.stdout, result.output
    assert store.get_prefix(keys.prefix)[0] == []


def test_stop_is_bounded_and_keeps_a_result(endpoint: str, store: EtcdStore) -> None:
    enter(store, "gpt", "n0", "n1")
    result = swiftctl(endpoint, "stop", "gpt", "--timeout", "0.1")
    assert result.exit_code == 1 and "still there: n0, n1" in result.stderr and "swiftctl stop" in result.stdout
    first = store.get(Keys("gpt").result)
    result = swiftctl(endpoint, "stop", "gpt", "--timeout", "0", "--why", "again")
    assert result.exit_code == 0 and "it had a result already" in result.stdout
    assert store.get(Keys("gpt").result) == first


def test_a_job_that_nobody_runs_is_collected_not_stopped(endpoint: str, store: EtcdStore) -> None:
    enter(store, "living", "n0")
    enter(store, "dead", "n0")["n0"].lease.revoke()
    recover(store, "dead")
    result = swiftctl(endpoint, "stop", "dead")
    assert result.exit_code == 1 and "swiftctl gc" in result.stderr and store.get(Keys("dead").result) is None
    shown = swiftctl(endpoint, "gc")
    assert shown.exit_code == 0 and "dead" in shown.stdout and "living" not in shown.stdout and "--yes" in shown.stdout
    assert store.get(Keys("dead").job) is not None
    found = json.loads(swiftctl(endpoint, "gc", "--yes", "--grace", "0", "--json").stdout)
    assert [(one["job"], one["removed"], one["num_records"]) for one in found] == [("dead", True, 5)]
    assert store.get_prefix(Keys("dead").prefix)[0] == []
    assert store.get(Keys("living").node("n0")) is not None
    assert "nothing to remove" in swiftctl(endpoint, "gc", "--yes").stdout


def test_a_node_that_comes_back_in_the_grace_saves_its_job(
    endpoint: str, store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(store, "gpt", "n0")["n0"].lease.revoke()
    waited: list[float] = []

    def meanwhile(seconds: float) -> None:
        waited.append(seconds)
        enter(store, "gpt", "n1")

    monkeypatch.setattr(steer, "time", SimpleNamespace(sleep=meanwhile))
    result = swiftctl(endpoint, "gc", "--yes", "--grace", "1.5", "--json")
    assert waited == [1.5]
    assert [(one["removed"], one["outcome"]) for one in json.loads(result.stdout)] == [(False, "kept: a node has come")]
    assert store.get(Keys("gpt").job) is not None


def watch(endpoint: str, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "swift_agent.ctl", "status", *args, "--watch", "--json"]
    environment = {**os.environ, "SWIFT_ETCD_ENDPOINTS": endpoint, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_watch_follows_a_job_to_its_end(endpoint: str, store: EtcdStore) -> None:
    enter(store, "gpt", "n0")
    with watch(endpoint, "gpt") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["state"] == "starting"
        recover(store, "gpt")
        states: list[Any] = []
        while not states or states[-1][:2] != (2, 2):
            job = json.loads(process.stdout.readline())
            states.append((job["generation"], len(job["events"]), job["state"]))
        store.put(Keys("gpt").result, encode(ResultRecord("succeeded", "all done")))
        last = json.loads(process.stdout.read().splitlines()[-1])
        assert (last["state"], last["why"]) == ("succeeded", "all done")
        assert process.wait(10) == 0


def test_watch_of_all_jobs_ends_with_ctrl_c(endpoint: str, store: EtcdStore) -> None:
    with watch(endpoint) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline()) == []
        enter(store, "gpt", "n0")
        assert [job["job"] for job in json.loads(process.stdout.readline())] == ["gpt"]
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0 and process.stderr.read() == ""


def test_watch_for_people(endpoint: str, store: EtcdStore) -> None:
    enter(store, "gpt", "n0")
    store.put(Keys("gpt").result, encode(ResultRecord("stopped", "[red]enough")))
    result = swiftctl(endpoint, "status", "gpt", "--watch")
    assert result.exit_code == 0 and "job gpt: stopped" in result.stdout and "[red]enough" in result.stdout


def test_doctor(endpoint: str, store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWIFT_NATIVE", raising=False)
    result = swiftctl(endpoint, "doctor", "--json")
    found = json.loads(result.stdout)
    verdicts = {one["name"]: one["verdict"] for one in found["findings"]}
    for name in ("etcd", "etcd latency", "etcd version", "etcd lease", "clock", "loopback", "pidfd", "torch", "gloo"):
        assert verdicts[name] == "ok", found
    assert verdicts["local address"] == "warn"  # this etcd is on loopback
    assert result.exit_code == (1 if "fail" in verdicts.values() else 0)
    assert store.get_prefix("/swift/")[0] == []
    shown = swiftctl(endpoint, "doctor", "--local-addr", "192.0.2.77")
    assert shown.exit_code == 1 and "192.0.2.77 cannot be used" in shown.stdout and "REMEDY" in shown.stdout


def test_doctor_of_what_is_not_there(endpoint: str, free_port: Any) -> None:
    away = f"127.0.0.1:{free_port()}"
    found = json.loads(swiftctl(f"{endpoint},{away}", "doctor", "--json").stdout)["findings"]
    assert found[0]["verdict"] == "warn" and away in found[0]["found"] and "refused" in found[0]["found"]
    result = swiftctl(away, "doctor", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["findings"][0]["verdict"] == "fail"
    found = json.loads(swiftctl(None, "doctor", "--json").stdout)["findings"]
    assert found[0]["name"] == "etcd" and found[0]["verdict"] in ("warn", "fail")


def test_a_user_that_may_only_touch_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EtcdCluster(tmp_path) as cluster:
        cluster.enable_login("alice", "a-password", "/swift/gpt/")
        monkeypatch.setenv("SWIFT_ETCD_USER", "alice")
        monkeypatch.setenv("SWIFT_ETCD_PASSWORD", "a-password")
        shown = swiftctl(cluster.endpoints[0], "doctor")
        assert "may not write outside of its jobs" in shown.stdout and "a-password" not in shown.output
        refused = swiftctl(cluster.endpoints[0], "gc")
        assert refused.exit_code == 1 and "permission" in refused.stderr
        monkeypatch.setenv("SWIFT_ETCD_PASSWORD", "wrong-password")
        shown = swiftctl(cluster.endpoints[0], "doctor", "--json")
        assert shown.exit_code == 1 and "wrong user or password" in shown.stdout
        assert "wrong-password" not in shown.output


def test_on_a_real_job(endpoint: str, store: EtcdStore, tmp_path: Path) -> None:
    """Two agents with one worker each; rank 1 is killed and replaced in place, then the job is stopped."""
    orders = {
        "faults": [{"at": "forward", "iteration": 3, "rank": 1, "scope": "worker"}], "iterations": 4000, "pause_s": 0.1,
    }  # fmt: skip
    agents = Agents(tmp_path, endpoint, num_workers=1, job_id="real", orders=orders)
    try:
        for node in ("a", "b"):
            agents.start(node)

        def has_recovered() -> Any:
            entries, _ = store.get_prefix(f"{Keys('real').prefix}events/")
            return [kv for kv in entries if decode(EventRecord, kv.value).what == "recovered"]

        wait_for(has_recovered, 80, "the recovery")
        status = json.loads(swiftctl(endpoint, "status", "real", "--json").stdout)
        assert status["state"] == "training" and not status["missing_slots"], status
        event = json.loads(swiftctl(endpoint, "history", "real", "--json").stdout)["events"][-1]
        # The plan names the last complete iteration; training goes on with the next one.
        assert (event["plan"]["iteration"], event["iteration"]) == (3, 4), event
        assert status["iteration"] >= 4, status
        assert event["phases_ms"]["total"] > 0
        said = swiftctl(endpoint, "explain", "real").stdout
        assert "killed by signal 9" in said and "iteration 3" in said
        assert "Rank 0 sends its state to rank 1." in said or "Rank 1 sends its state to rank 0." in said
        wait_for(lambda: store.get(Keys("real").profile), 30, "what the job was measured to cost")
        strategy = swiftctl(endpoint, "explain", "real", "--strategy").stdout
        assert strategy.startswith("measured: ") and " for a lost worker, " in strategy
        known = json.loads(swiftctl(endpoint, "explain", "real", "--strategy", "--json").stdout)
        assert known["way"] == "replica" and len(known["profile"]["machines"]) == 2
        wait_for(lambda: store.get(Keys("real").pace(2)), 30, "how fast it trains")
        page = tmp_path / "page.html"
        told = json.loads(swiftctl(endpoint, "timeline", "real", "--html", str(page), "--json").stdout)
        assert [one["losses"][0]["ranks"] for one in told["incidents"]] == [[1]], told
        assert told["iteration"] >= 4 and told["usual_per_s"] > 0 and "Job real" in page.read_text()
        stopped = swiftctl(endpoint, "stop", "real", "--why", "the test is over")
        assert stopped.exit_code == 0 and "all nodes have left" in stopped.stdout, stopped.output
        assert swiftctl(endpoint, "status", "real").exit_code == 1
        outcome = agents.wait(30)
        assert set(outcome.exit_codes.values()) == {3}, outcome.text()
        assert "the test is over" in outcome.output["a"], outcome.text()
    finally:
        agents.kill_all()
