"""Trouble with etcd under a real job: training goes on, a failure that happens meanwhile is recovered, nothing is lost.
Where a node cannot tell an etcd that is away from being cut off, its workers stand still until etcd answers.

In every test the same job of two nodes and a spare trains; the trouble is made and seen to be there, iterations are
counted while it lasts, then a worker (or a node) is killed, and the trouble ends. Survivors keep their processes, ranks
keep their places, and the final state is bit for bit that of a run without any of it.

`make soak` varies who is lost in each; by default there is one of each kind, in two thirds of the time.
SWIFT_TEST_QUORUM_LOST_S: for how long the quorum is lost (default 15 s; the leases live 4 s).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import StoreUnavailable
from tests.support.etcd_cluster import EtcdCluster, etcd_binary, wait_for, works_once
from tests.support.etcd_job import NODES, EtcdJob, ballast
from tests.support.job import Agents
from tests.tiers import in_soak

TTL_S = 4
QUORUM_LOST_S = float(os.environ.get("SWIFT_TEST_QUORUM_LOST_S", "15"))
ITERATIONS = 160
PAUSE_S = 0.15

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, etcd: str) -> Callable[[int], str]:
    """The hash of the final state after so many iterations without any trouble."""
    known: dict[int, str] = {}

    def run(iterations: int) -> str:
        if iterations not in known:
            agents = Agents(tmp_path_factory.mktemp("calm"), etcd, num_workers=1, job_id=f"calm-{iterations}",
                            orders={"iterations": iterations})  # fmt: skip
            for node in NODES[:2]:
                agents.start(node)
            outcome = agents.wait(200.0)
            assert set(outcome.exit_codes.values()) == {0} and len(outcome.hashes) == 1, outcome.text()
            known[iterations] = outcome.hashes.pop()
        return known[iterations]

    return run


@pytest.fixture
def start_job(tmp_path: Path, make_agents: Callable[..., Agents]) -> Callable[..., EtcdJob]:
    def start(endpoints: str, ttl_s: int = TTL_S, iterations: int = ITERATIONS) -> EtcdJob:
        directory = tmp_path / "job"
        directory.mkdir()
        orders = {"iterations": iterations, "pause_s": PAUSE_S}
        options = ("--spares", "1", "--lease-ttl", str(ttl_s))
        return EtcdJob(make_agents(directory, endpoint=endpoints, num_workers=1, orders=orders, options=options))

    return start


def connect(cluster: EtcdCluster, **options: Any) -> EtcdStore:
    return EtcdStore(EtcdConfig(cluster.endpoints, **options))


def is_away(cluster: EtcdCluster) -> None:
    """No member takes a write."""
    with connect(cluster) as store, pytest.raises(StoreUnavailable):
        store.put("/trouble", b"", timeout_s=0.5)


def keep(seconds: float, since_s: float) -> None:
    """The trouble lasts: what ends it is *seconds* after its beginning."""
    time.sleep(max(0.0, seconds - (time.monotonic() - since_s)))


# ---- etcd goes away and comes back ----


def test_a_single_etcd_is_restarted(
    one: EtcdCluster, start_job: Callable[..., EtcdJob], expected: Callable[[int], str]
) -> None:
    job = start_job(one.endpoints[0])
    one.kill(0)
    is_away(one)
    job.goes_on()
    job.kill_worker(1)
    one.start(0)
    job.recovers()
    job.goes_on()
    job.finish(expected(ITERATIONS), {1})


@pytest.mark.parametrize("lost", ["node", *in_soak("worker")])
def test_the_quorum_is_lost(
    lost: str, three: EtcdCluster, start_job: Callable[..., EtcdJob], expected: Callable[[int], str]
) -> None:
    iterations = ITERATIONS + 4 * int(QUORUM_LOST_S / PAUSE_S / 4)
    job = start_job(",".join(three.endpoints), iterations=iterations)
    gone = {three.leader(), (three.leader() + 1) % 3}
    began_s = time.monotonic()
    for index in gone:
        three.kill(index)
    is_away(three)
    job.goes_on(int(TTL_S / PAUSE_S) + 4)  # all leases are overdue by then
    job.kill_worker(1) if lost == "worker" else job.kill_node(1)
    keep(QUORUM_LOST_S, began_s)
    is_away(three)
    for index in gone:
        three.start(index, wait=False)
    job.recovers()
    job.goes_on()
    job.finish(expected(iterations), {1}, dead=job.owners[1] if lost == "node" else "")


@pytest.mark.parametrize("trouble", ["killed", "frozen"])
def test_the_last_node_keeps_the_state_while_nobody_answers(
    trouble: str, one: EtcdCluster, tmp_path: Path, make_agents: Callable[..., Agents], expected: Callable[[int], str]
) -> None:
    """Its workers are not ended. Where etcd only does not answer they stand still: they may be another node's."""
    directory = tmp_path / "job"
    directory.mkdir()
    orders = {"iterations": ITERATIONS, "pause_s": PAUSE_S}
    options = ("--lease-ttl", str(TTL_S))
    agents = make_agents(directory, endpoint=one.endpoints[0], num_workers=1, orders=orders, options=options)
    job = EtcdJob(agents, NODES[:2])
    if trouble == "killed":
        one.kill(0)
        job.goes_on(int(TTL_S / PAUSE_S) + 4)  # all leases are overdue by then
        job.kill_node(1)
        time.sleep(TTL_S)
        assert psutil.Process(job.pids[0][0]).status() != psutil.STATUS_STOPPED and "are paused" not in job.logs()
        one.start(0)
    else:
        began_s = time.monotonic()
        one.freeze(0)
        job.stands_still()
        assert time.monotonic() - began_s < TTL_S
        job.kill_node(1)
        keep(TTL_S + 2.0, began_s)
        one.thaw(0)
        job.wait_log("not paused any more", (job.owners[0],))
    job.spare = NODES[2]
    agents.start(job.spare)
    job.recovers()
    job.goes_on()
    job.finish(expected(ITERATIONS), {1}, dead=job.owners[1])


# ---- an etcd of the job's own ----


class OwnEtcd:
    """`swift-run --standalone` with two workers, which train."""

    def __init__(self, agents: Agents) -> None:
        self.agents = agents
        agents.start("a")
        wait_for(lambda: min(self._iterations()) >= 3, 100.0, "training")
        self.workers = [int(pid) for pid in re.findall(r"rank \d+ is process (\d+)", self.log())]

    def _iterations(self) -> list[int]:
        files = [self.agents.directory / f"times.{rank}" for rank in (0, 1)]
        return [len(one.read_text().splitlines()) if one.exists() else 0 for one in files]

    def log(self) -> str:
        return (self.agents.directory / "agent.a.log").read_text()

    def kill_etcd(self) -> None:
        family = psutil.Process(self.agents.running["a"].pid).children(recursive=True)
        (server,) = (one for one in family if one.name().startswith("etcd"))
        server.kill()

    def goes_on(self, num_iterations: int = 8) -> None:
        begun = min(self._iterations())
        wait_for(lambda: min(self._iterations()) >= begun + num_iterations, 60.0, f"iterations\n{self.log()}")


@pytest.fixture
def own_etcd(tmp_path: Path, make_agents: Callable[..., Agents]) -> Callable[..., OwnEtcd]:
    def start(**environment: str) -> OwnEtcd:
        directory = tmp_path / "job"
        directory.mkdir()
        orders = {"iterations": ITERATIONS, "pause_s": PAUSE_S}
        return OwnEtcd(make_agents(directory, endpoint=None, num_nodes=1, orders=orders, environment=environment))

    return start


def test_the_etcd_of_a_job_on_one_machine_is_killed(
    own_etcd: Callable[..., OwnEtcd], expected: Callable[[int], str]
) -> None:
    job = own_etcd()
    job.kill_etcd()
    wait_for(lambda: "the private etcd of this job answers again" in job.log(), 30.0, f"etcd\n{job.log()}")
    job.goes_on()
    os.kill(job.workers[1], signal.SIGKILL)
    job.kill_etcd()
    wait_for(lambda: "recovered: generation 2" in job.log(), 60.0, f"the recovery\n{job.log()}")
    job.goes_on()
    job.agents.hurry()
    outcome = job.agents.wait(100.0)
    text = outcome.text()
    assert outcome.exit_codes == {"a": 0} and outcome.hashes == {expected(ITERATIONS)}, text
    assert {rank: len(pids) for rank, pids in outcome.pids.items()} == {0: 1, 1: 2}, text
    killed = "the private etcd of this job was killed by signal 9 (SIGKILL): it is started again, with its data"
    assert text.count(killed) == text.count("the private etcd of this job answers again") == 2, text
    assert "could not be closed" not in text and "Traceback" not in text, text


def test_the_etcd_of_a_job_on_one_machine_does_not_come_back(
    own_etcd: Callable[..., OwnEtcd], tmp_path: Path
) -> None:
    """The job ends, with its workers, and says why once."""
    result = tmp_path / "result.json"
    job = own_etcd(SWIFT_ETCD_BINARY=works_once(tmp_path, etcd_binary()), PET_RESULT=str(result))
    job.kill_etcd()
    outcome = job.agents.wait(60.0)
    text = outcome.text()
    assert outcome.exit_codes == {"a": 69} and outcome.results == {}, text
    why = "the private etcd of this job has ended 4 times within 10 minutes; the last time it ended with exit code 3"
    assert json.loads(result.read_text())["cause"] == "infrastructure" and why in result.read_text()
    assert text.count(f"{why}: the job ends here") == 1 and "no room on this disk" in text, text
    assert "Traceback" not in text and not (set(job.workers) & set(psutil.pids())), text


# ---- a majority lives ----


def test_the_leader_is_killed(
    three: EtcdCluster, start_job: Callable[..., EtcdJob], expected: Callable[[int], str]
) -> None:
    job = start_job(",".join(three.endpoints))
    leader = three.leader()
    three.kill(leader)
    job.kill_worker(0)
    job.recovers()
    assert three.leader() != leader
    job.goes_on()
    job.finish(expected(ITERATIONS), {0})


@pytest.mark.parametrize("member", ["leader", *in_soak("follower")])
def test_a_member_is_frozen_and_thawed(
    member: str, three: EtcdCluster, start_job: Callable[..., EtcdJob], expected: Callable[[int], str]
) -> None:
    job = start_job(",".join(three.endpoints))
    frozen = three.leader() if member == "leader" else (three.leader() + 1) % 3
    three.freeze(frozen)
    with EtcdStore(EtcdConfig((three.endpoints[frozen],))) as store, pytest.raises(StoreUnavailable):
        store.get("/trouble", timeout_s=0.5)
    job.goes_on(int(TTL_S / PAUSE_S) + 4)
    job.kill_worker(1)
    job.recovers()
    three.thaw(frozen)
    job.goes_on(int(TTL_S / PAUSE_S) + 4)
    job.finish(expected(ITERATIONS), {1})


# ---- leases ----


@pytest.mark.parametrize("lost", ["nothing", "worker", *in_soak("node")])
def test_all_leases_run_out_while_etcd_is_out_of_reach(
    lost: str, three: EtcdCluster, start_job: Callable[..., EtcdJob], expected: Callable[[int], str]
) -> None:
    """The agents know one member only, and that one is away for longer than a lease lives. The others have a quorum,
    and could give their places away: the workers stand still before that. All come back in place."""
    job = start_job(three.endpoints[0])
    three.kill(0)
    job.stands_still()
    with connect(three) as store:
        wait_for(lambda: not store.get_prefix(job.keys.nodes)[0], 60.0, "the leases to run out")
    if lost != "nothing":
        job.kill_worker(1) if lost == "worker" else job.kill_node(1)
    three.start(0)
    here = [node for node in NODES if lost != "node" or node != job.owners[1]]
    with connect(three) as store:
        wait_for(lambda: len(store.get_prefix(job.keys.nodes)[0]) == len(here), 60.0, f"nodes\n{job.logs()}")
    if lost == "nothing":
        assert job.generation().number == 1, job.logs()
        job.goes_on()
        job.kill_worker(1)  # and what fails later is recovered as ever
    job.recovers()
    job.goes_on()
    job.finish(expected(ITERATIONS), {1}, dead=job.owners[1] if lost == "node" else "")


def test_leases_are_revoked_by_hand(
    three: EtcdCluster, start_job: Callable[..., EtcdJob], expected: Callable[[int], str]
) -> None:
    job = start_job(",".join(three.endpoints))
    for node in (job.owners[0], job.spare):
        before = job.get(job.keys.node(node))
        assert before is not None and before.lease_id
        three.ctl("lease", "revoke", f"{before.lease_id:x}")
        back = wait_for(lambda node=node: job.get(job.keys.node(node)), 60.0, f"{node} to come back\n{job.logs()}")
        assert back.create_revision > before.create_revision
        # With a slot it comes back as the one that it was; a spare is a new one.
        assert (back.value == before.value) == (node != job.spare)
    job.goes_on()
    assert job.generation().number == 1, job.logs()
    job.kill_worker(0)
    job.recovers()
    job.goes_on()
    job.finish(expected(ITERATIONS), {0})


# ---- the key space ----


def test_the_history_is_compacted_under_the_watches(
    three: EtcdCluster, start_job: Callable[..., EtcdJob], expected: Callable[[int], str]
) -> None:
    """The agents know one member only. While it is away the others write on and compact, so no watch can resume."""
    job = start_job(three.endpoints[0], ttl_s=20)
    with connect(three) as store:
        # Under watches that are up to date it is no trouble at all.
        store.compact(store.put("/trouble", b""))
        three.ctl("defrag")
        job.goes_on()
        three.kill(0)
        job.kill_worker(1)
        for _ in range(3):
            revision = store.put("/trouble", b"")
        store.compact(revision)
    for index in (1, 2):
        three.ctl("defrag", index=index)
    three.start(0)
    job.wait_log("the history of the store was compacted")
    job.recovers()
    job.goes_on()
    job.finish(expected(ITERATIONS), {1})


# ---- space ----


def fill(store: EtcdStore, refused: type[RendezvousError]) -> str:
    """Write until etcd does not take it any more; says why."""
    for number in itertools.count():
        assert number < 200, "etcd takes everything"
        try:
            store.put(f"/ballast/{number}", os.urandom(1_000_000), timeout_s=2.0)
        except refused as error:
            return str(error)
    raise AssertionError


def test_etcd_has_used_up_its_quota(
    tmp_path: Path, start_job: Callable[..., EtcdJob], expected: Callable[[int], str]
) -> None:
    """The alarm NOSPACE: etcd reads, watches and keeps leases, but writes nothing until it is disarmed."""
    with EtcdCluster(tmp_path, args=["--quota-backend-bytes", str(16 << 20)]) as etcd:
        job = start_job(etcd.endpoints[0])
        with connect(etcd) as store:
            assert "space exceeded" in fill(store, RendezvousError)
            assert "NOSPACE" in etcd.ctl("alarm", "list")
            job.goes_on(int(TTL_S / PAUSE_S) + 4)
            job.kill_worker(1)
            job.wait_log("space exceeded", (job.owners[1],))
            store.compact(store.get_prefix("/ballast/")[1])
            etcd.ctl("del", "--prefix", "/ballast/")
            store.compact(store.get_prefix("/ballast/")[1])
        etcd.ctl("defrag")
        etcd.ctl("alarm", "disarm")
        job.recovers()
        job.goes_on()
        job.finish(expected(ITERATIONS), {1})


@contextlib.contextmanager
def small_disk(directory: Path, megabytes: int) -> Iterator[None]:
    """A file system of that size, there until the end."""
    directory.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)],
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        pytest.skip(f"cannot mount a file system: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_the_disk_of_etcd_is_full(
    tmp_path: Path, start_job: Callable[..., EtcdJob], expected: Callable[[int], str]
) -> None:
    """etcd ends when it cannot write; it is started again, as a service manager does, when there is space again."""
    disk = tmp_path / "disk"
    with small_disk(disk, 160), EtcdCluster(disk) as etcd:
        job = start_job(etcd.endpoints[0])
        path = ballast(disk)
        with connect(etcd) as store:
            fill(store, StoreUnavailable)
        etcd.wait_dead(0)
        assert "no space left on device" in etcd.log(0)
        job.goes_on()
        job.kill_worker(1)
        path.unlink()
        etcd.start(0)
        job.recovers()
        job.goes_on()
        job.finish(expected(ITERATIONS), {1})
