"""Pipelines whose logs are copied to a store: nodes lose theirs, servers fail, disks are full, workers die."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from swift_logging_store.stores.open import open_store
from tests.support.hdfs_cluster import HdfsCluster, why_not
from tests.support.job import Agents, Outcome
from tests.support.pipelines import (
    SCRIPT,
    References,
    assert_equal,
    assert_only_the_killed_ended,
    assert_same,
    begun,
    kill_at_random,
)
from tests.support.s3_server import BUCKET, S3Server
from tests.tiers import in_soak, long


@dataclass
class LogStore:
    """*environment*: what a job needs to use it."""

    url: str
    server: S3Server | HdfsCluster
    environment: dict[str, str] = field(default_factory=dict)

    def assert_nothing_is_left(self, outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in self.environment.items():
            assert "SECRET" not in name or value not in outcome.text()
            monkeypatch.setenv(name, value)
        assert open_store(self.url).names() == [], outcome.text()


@pytest.fixture
def log_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LogStore]:
    kind, *rest = request.param.split()
    if kind == "s3":
        with S3Server(tmp_path / "s3") as server:
            yield LogStore(f"s3://{BUCKET}/logs", server, server.environment)
    else:
        if why_not():
            pytest.skip(why_not())
        with HdfsCluster(tmp_path / "hdfs", num_data_nodes=int(rest[0]) if rest else 1) as cluster:
            yield LogStore(f"{cluster.url}/logs", cluster)


@pytest.fixture
def undisturbed(undisturbed_pipelines: References) -> References:
    return undisturbed_pipelines


@pytest.mark.parametrize("log_store", ["s3", "hdfs"], indirect=True)
def test_logs_that_are_in_a_store_only(
    log_store: LogStore, make_agents: Callable[..., Agents], undisturbed: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes lose theirs before the failures; nothing is left of them at the end."""
    faults = [
        {"at": "backward", "iteration": 4, "rank": 2, "scope": "node"},
        {"at": "backward", "iteration": 8, "rank": 0, "scope": "worker"},
    ]
    outcome = make_agents(
        num_nodes=4, num_workers=1, script=SCRIPT, environment=log_store.environment,
        orders={"faults": faults, "schedule": "Schedule1F1B", "loses_logs": [3, 7]},
        options=("--log-store", log_store.url, "--spares", "1"),
    ).run("abcde")  # fmt: skip
    assert_same(outcome, undisturbed("Schedule1F1B"), {0, 2})
    text = outcome.text()
    # Two neighbours have something for rank 2, one for rank 0.
    assert outcome.fired == {0, 1} and text.count(f"the rest comes from {log_store.url}/job-") == 3, text
    log_store.assert_nothing_is_left(outcome, monkeypatch)


RANDOM = [
    ("s3", "ScheduleInterleavedZeroBubble", 5), ("hdfs", "Schedule1F1B", 5),
    *(long(store, schedule, 30) for store in ("s3", "hdfs")
      for schedule in ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")),
]  # fmt: skip


@pytest.mark.parametrize(("log_store", "schedule", "num_kills"), RANDOM, indirect=["log_store"])
def test_random_moments_with_logs_in_a_store_only(
    log_store: LogStore, schedule: str, num_kills: int, make_agents: Callable[..., Agents], undisturbed: References,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The nodes lose theirs after each iteration. Five kills; in `make soak` thirty, with each schedule."""
    iterations = 60 if num_kills > 5 else 15
    agents = make_agents(
        num_nodes=4, num_workers=1, max_restarts=2 * num_kills, script=SCRIPT, environment=log_store.environment,
        orders={"schedule": schedule, "iterations": iterations, "pace_s": 0.2, "loses_logs": [*range(iterations)]},
        options=("--log-store", log_store.url),
    )  # fmt: skip
    for node in "abcd":
        agents.start(node)
    killed = kill_at_random(agents, num_kills, random.Random(7), begin=3)  # by then nodes have lost some
    outcome = agents.wait()
    assert_only_the_killed_ended(outcome, killed)
    assert f"the rest comes from {log_store.url}/job-" in outcome.text()
    assert_equal(outcome, undisturbed(schedule, iterations=iterations), iterations)
    log_store.assert_nothing_is_left(outcome, monkeypatch)


@pytest.mark.parametrize("log_store", ["s3"], indirect=True)
def test_a_frozen_store_is_not_waited_for(
    log_store: LogStore, make_agents: Callable[..., Agents], undisturbed: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in training nor in the recovery of a stage, as long as the nodes have their logs."""
    faults = [{"at": "backward", "iteration": 6, "rank": 2, "scope": "worker"}]
    agents = make_agents(
        num_nodes=4, num_workers=1, script=SCRIPT, environment=log_store.environment,
        orders={"faults": faults, "schedule": "Schedule1F1B", "pace_s": 0.2},
        options=("--log-store", log_store.url),
    )  # fmt: skip
    for node in "abcd":
        agents.start(node)
    wait_until_begun(agents, 4)
    assert isinstance(log_store.server, S3Server)
    log_store.server.freeze()
    try:
        began_s = time.monotonic()
        wait_until_begun(agents, 10)
        waited_s = time.monotonic() - began_s
    finally:
        log_store.server.thaw()
    (agents.directory / "free").touch()
    outcome = agents.wait()
    assert waited_s < 20.0, f"{waited_s:.1f} s, and a request to the store may take 20\n{outcome.text()}"
    assert outcome.fired == {0}
    assert_same(outcome, undisturbed("Schedule1F1B"), {2})
    log_store.assert_nothing_is_left(outcome, monkeypatch)


@pytest.mark.parametrize("log_store", ["s3"], indirect=True)
def test_a_store_that_is_away_for_too_long(
    log_store: LogStore, make_agents: Callable[..., Agents], undisturbed: References
) -> None:
    """The room on the nodes is used up then, and the next checkpoint makes the logs of use again."""
    iterations = 24
    faults = [{"at": "backward", "iteration": 18, "rank": 2, "scope": "worker"}]
    agents = make_agents(
        num_nodes=4, num_workers=1, script=SCRIPT, environment=log_store.environment,
        orders={"faults": faults, "schedule": "Schedule1F1B", "iterations": iterations, "pace_s": 0.2,
                "checkpoint": 16, "patient": True},
        options=("--log-store", log_store.url, "--message-log-limit", f"{ROOM / 1e9:f}"),
    )  # fmt: skip
    for node in "abcd":
        agents.start(node)
    wait_until_begun(agents, 2)
    log_store.server.__exit__()
    (agents.directory / "free").touch()
    outcome = agents.wait()
    text = outcome.text()
    assert outcome.fired == {0}, text
    assert_equal(outcome, undisturbed("Schedule1F1B", iterations=iterations), iterations)
    for line in (
        f"logs of messages may be left in {log_store.url}/job-",
        "messages are logged no more: what --message-log-limit leaves this rank is used up",
        "messages are logged again; with the checkpoint of iteration 16 they are of use again",
        "load the checkpoint of iteration 16, and repeat iterations 16 to 17",
    ):
        assert line in text, text
    assert "all workers restart" not in text


@pytest.mark.parametrize("log_store", ["hdfs 2"], indirect=True)
def test_a_data_node_is_lost_while_a_job_runs(
    log_store: LogStore, make_agents: Callable[..., Agents], undisturbed: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints and logs go to the other one, and are all that there is when a stage is lost."""
    faults = [{"at": "backward", "iteration": 8, "rank": 2, "scope": "worker"}]
    agents = make_agents(
        num_nodes=4, num_workers=1, script=SCRIPT,
        orders={"faults": faults, "schedule": "Schedule1F1B", "pace_s": 0.2, "loses_logs": [7], "checkpoint": 5,
                "patient": True, "store": log_store.url.replace("logs", "checkpoints")},
        options=("--log-store", log_store.url),
    )  # fmt: skip
    for node in "abcd":
        agents.start(node)
    wait_until_begun(agents, 2)
    assert isinstance(log_store.server, HdfsCluster)
    log_store.server.kill("dn0")
    (agents.directory / "free").touch()
    outcome = agents.wait()
    text = outcome.text()
    assert outcome.fired == {0}, text
    assert_same(outcome, undisturbed("Schedule1F1B"), {2})
    assert "load the checkpoint of iteration 5" in text and f"the rest comes from {log_store.url}/job-" in text, text
    log_store.assert_nothing_is_left(outcome, monkeypatch)


# Of a stage between two others, for some ten of its iterations.
ROOM = 150_000
# Of the thread that makes copies, and of the log itself; by rank. Segments go when a checkpoint covers them.
PLACES = {
    "the store": [
        (1, "before put"), (1, "after remove predecessors"), (2, "after put"), (1, "before remove"),
        (2, "after remove"),
    ],
    "the node": [(1, "before drop"), (2, "in drop"), (1, "after drop")],
}  # fmt: skip


@pytest.mark.parametrize(
    "log_store", ["s3", *in_soak("hdfs")], indirect=True
)
@pytest.mark.parametrize("where", PLACES)
def test_a_loss_at_each_step_of_the_retention(
    where: str, log_store: LogStore, make_agents: Callable[..., Agents], undisturbed: References,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """And now and then a neighbour is lost after that, which needs what is left of the logs. In `make soak` in HDFS,
    too."""
    faults: list[dict[str, Any]] = []
    for rank, place in PLACES[where]:
        faults.append({"at": f"log: {place}", "rank": rank, "scope": "worker", "after": len(faults) - 1})
        if place != "before put":  # its successor removes what it has left, and is lost then
            faults.append({"at": "between", "rank": 3 * (rank - 1), "scope": "worker", "after": len(faults) - 1})
    del faults[0]["after"]
    iterations = 24
    outcome = make_agents(
        num_nodes=4, num_workers=1, max_restarts=40, script=SCRIPT, environment=log_store.environment,
        orders={"faults": faults, "schedule": "Schedule1F1B", "iterations": iterations, "checkpoint": 2,
                "patient": True, "loses_logs": [*range(iterations)]},
        options=("--log-store", log_store.url),
    ).run("abcd")  # fmt: skip
    assert "all workers restart" not in outcome.text()
    assert_equal(outcome, undisturbed("Schedule1F1B", iterations=iterations), iterations)
    log_store.assert_nothing_is_left(outcome, monkeypatch)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own, of 200 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no filesystem can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_disk_that_is_full(full_disk: Path, make_agents: Callable[..., Agents], undisturbed: References) -> None:
    """Training goes on; who is lost from then on is not repeated with half a log."""
    faults = [{"at": "forward", "iteration": 10, "rank": 2, "scope": "worker"}]
    outcome = make_agents(
        num_nodes=4, num_workers=1, script=SCRIPT, orders={"faults": faults, "schedule": "Schedule1F1B"},
        options=("--message-log", str(full_disk), "--message-log-limit", "1"),
    ).run("abcd")  # fmt: skip
    text = outcome.text()
    assert "messages are logged no more: " in text and "No space left on device" in text, text
    assert "all workers restart" in text
    assert_equal(outcome, undisturbed("Schedule1F1B"))


def wait_until_begun(agents: Agents, iteration: int) -> None:
    """By all."""
    deadline_s = time.monotonic() + 60.0
    while min(begun(agents.directory)) < iteration:
        assert time.monotonic() < deadline_s, agents.outcome(0).text()
        time.sleep(0.02)
