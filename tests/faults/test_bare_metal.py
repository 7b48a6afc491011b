"""docs/etcd-cluster.md and docs/bare-metal.md on three machines with a real systemd each: their commands are run in
their order.

A job of two nodes and a spare, each node by the unit, with an etcd of three members by the other one. Parameters and
optimizer state at the end are bit for bit those of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swift_rendezvous.codec import encode
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import RateRecord
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from tests.support.etcd_cluster import EtcdCluster, etcd_binary
from tests.support.job import ROOT, Agents
from tests.support.machines import Machine, Machines, why_not
from tests.support.pages import blocks, command, put_in

CLUSTER = "docs/etcd-cluster.md"
NODES = "docs/bare-metal.md"
# At its pace longer than any test takes; `Job.end` has it make the rest at once.
ITERATIONS = 400
TRAIN = "/run/source/tests/support/fault_train.py"
NAMES = ("etcd1", "etcd2", "etcd3")

machines = pytest.mark.skipif(bool(why_not()), reason=why_not())


AUTHORITY, MEMBER, ROLES = blocks(CLUSTER, "Three members with TLS")
(USER,) = blocks(CLUSTER, "A user for each job")
# The machines have this working tree in the place of what is installed.
NODE, STATUS = blocks(NODES, "Nodes, under systemd", but="python3 -m venv")
BACKUP, RESTORE = blocks(CLUSTER, "Backup")
REPLACE, COMPACT = blocks(CLUSTER, "Other work")
LOGIN = "".join(line + "\n" for line in ROLES.splitlines() if line.startswith("export"))


class Site:
    """The three machines; the first is the one with the authority. *shared* is /run/shared on all."""

    def __init__(self, machines: list[Machine], shared: Path) -> None:
        self.machines, self.shared = machines, shared
        self.first = machines[0]

    def on(self, machine: Machine, text: str, **options: Any) -> str:
        return machine.run(f"cd /run/shared\n{text}", **options)

    def etcdctl(self, text: str, **options: Any) -> str:
        return self.on(self.first, f"{LOGIN}{text}", **options)

    def wait(self, what: Callable[[], Any], told: str, timeout_s: float = 60.0) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while not (found := what()):
            journals = "\n".join(f"--- {one.name}\n{one.journal('swift-*')[-4000:]}" for one in self.machines)
            assert time.monotonic() < deadline_s, f"still not: {told}\n{journals}"
            time.sleep(0.1)
        return found

    def set_up_member(self, machine: Machine, **variables: str) -> None:
        machine.run(f"cp -r /run/shared/pki/{machine.name} /etc/swift-etcd")
        for name, value in variables.items():
            machine.run(f"sed -i 's/^{name}=.*/{name}={value}/' /etc/swift-etcd/member.env")
        self.on(machine, MEMBER)

    def healthy(self, number: int = 3) -> None:
        self.wait(
            lambda: self.etcdctl("etcdctl endpoint health 2>&1", check=False).count("is healthy") == number,
            f"{number} members are healthy",
        )


def new_site(shared: Path) -> Iterator[Site]:
    """Three machines with the cluster of the page, and a user for the job gpt."""
    shared.chmod(0o777)
    shutil.copytree(ROOT / "deploy", shared / "deploy")
    with Machines(NAMES, shared, Path(etcd_binary()).parent) as machines:
        site = Site(machines, shared)
        site.on(site.first, AUTHORITY)
        for machine in machines:
            site.set_up_member(machine)
        site.wait(
            lambda: all(one.show("swift-etcd", "ActiveState") == {"ActiveState": "active"} for one in machines),
            "all members are ready",
        )
        site.on(site.first, ROLES)
        site.healthy()
        site.etcdctl(USER)
        yield site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from new_site(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def own_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Of a test that starts servers again: what runs at its end has to be gone with it."""
    yield from new_site(tmp_path_factory.mktemp("own"))


class Job:
    """The job of one test, by the unit, on the machines that it is started on."""

    def __init__(self, site: Site, **orders: Any) -> None:
        self.site, self.unit = site, "swift-run@gpt"
        self.directory = site.shared / f"job-{time.monotonic_ns()}"
        self.directory.mkdir()
        self.directory.chmod(0o777)
        self._orders = {"dir": f"/run/shared/{self.directory.name}", "iterations": ITERATIONS, "pace_s": 0.4, **orders}

    def set_up(self, machine: Machine, script: str = TRAIN, **variables: str) -> None:
        """What is done by hand on a machine; the environment file is edited, then the lines of the page are run."""
        copy = "rm -rf /etc/swift && mkdir /etc/swift && cp -r pki/swift-gpt /etc/swift/gpt"
        self.site.on(machine, f"{copy} && cp deploy/systemd/swift-run.env /etc/swift/gpt.env")
        edited = {
            "PET_NPROC_PER_NODE": "2", "SWIFT_RUN_ARGS": script, "PET_START_METHOD": "forkserver",
            "FAULT_ORDERS": json.dumps(self._orders), **variables,
        }  # fmt: skip
        for name, value in edited.items():
            # The last one of a name counts.
            machine.run(f"cat >>/etc/swift/gpt.env <<'END'\n{name}='{value}'\nEND")
        self.site.on(machine, NODE)

    def state(self, machine: Machine) -> dict[str, str]:
        return machine.show(self.unit, "ActiveState", "SubState", "Result", "ExecMainStatus", "NRestarts", "MainPID")

    def status(self) -> dict[str, Any]:
        text = self.site.on(self.site.first, STATUS.replace("status gpt", "status --json gpt"), check=False)
        return json.loads(text) if text.startswith("{") else {"nodes": [], "state": ""}

    def slots(self) -> dict[str, int | None]:
        return {node["node"]: node["slot"] for node in self.status()["nodes"]}

    def holder(self, slot: int) -> str:
        """The name of the node that has it, once the status can be read: it may not be while all that runs here waits
        for a processor."""

        def found() -> str:
            return next((name for name, held in self.slots().items() if held == slot), "")

        return str(self.site.wait(found, f"a node has slot {slot}"))

    def calls(self, rank: int) -> list[int]:
        path = self.directory / f"calls.{rank}"
        return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_training(self) -> None:
        seen = [len(self.calls(rank)) for rank in range(4)]
        self.site.wait(lambda: all(len(self.calls(rank)) > seen[rank] + 3 for rank in range(4)), "all ranks train")

    def end(self) -> None:
        """Train on at full speed, to the end of all nodes."""
        (self.directory / "free").touch()
        self.site.wait(lambda: all(self.state(one)["ActiveState"] != "active" for one in self.site.machines), "its end")

    def is_back(self, machine: Machine) -> bool:
        """systemd has started it again, once, and it is a spare."""
        return self.state(machine)["NRestarts"] == "1" and self.slots().get(machine.name, -1) is None

    def left(self, machine: Machine) -> dict[str, Any]:
        """What the unit has told of its end."""
        found: dict[str, Any] = json.loads(machine.run("cat /var/lib/swift/gpt/result.json"))
        return found

    def hashes(self) -> set[str]:
        return {json.loads(path.read_text())["hash"] for path in self.directory.glob("result.*.json")}


@pytest.fixture
def job(site: Site) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(**orders: Any) -> Job:
        made.append(Job(site, **orders))
        return made[-1]

    yield make
    for one in made:
        end = f"systemctl kill -s KILL {one.unit}; systemctl stop {one.unit}; systemctl reset-failed"
        for machine in site.machines:
            machine.run(end, check=False)


@machines
def test_systemd_finds_nothing_wrong_with_the_units(site: Site) -> None:
    for path in sorted((ROOT / "deploy").rglob("*.service")) + sorted((ROOT / "deploy").rglob("*.timer")):
        site.first.run(f"cp -n {path.relative_to(ROOT)} /etc/systemd/system/")
        site.first.run("install deploy/etcd/backup.sh /usr/local/sbin/swift-etcd-backup")
        said = site.first.run(f"systemd-analyze verify --man=no /etc/systemd/system/{path.name} 2>&1")
        assert not [line for line in said.splitlines() if path.name in line], said


@machines
def test_who_has_no_certificate_or_another_job_is_not_let_in(site: Site) -> None:
    bare = "etcdctl --dial-timeout=2s --command-timeout=2s --endpoints=https://etcd1:2379 --cacert=pki/ca.crt"
    text = "get --prefix /swift/ 2>&1"
    refused = site.on(site.first, f"{bare} {text} || echo rc $?", check=False)
    assert "rc 1" in refused and "permission denied" not in refused, "not even a login is asked for"
    mine = f"{bare} --cert=pki/swift-gpt/client.crt --key=pki/swift-gpt/client.key"
    assert "permission denied" in site.on(site.first, f"{mine} {text}", check=False)
    assert "permission denied" in site.on(site.first, f"{mine} put /swift/gpt2/job x 2>&1", check=False)
    own = f"{mine} get --prefix /swift/gpt/ && {mine} put /swift/gpt/x y && {mine} del /swift/gpt/x"
    assert site.on(site.first, own)
    # Keys are for their owners.
    keys = "pki/ca.key pki/etcd1/member.key pki/swift-gpt/client.key pki/swift-gpt/job-secret"
    modes = site.on(site.first, f"stat -c %a {keys}")
    assert modes.split() == ["600"] * 4
    assert site.first.run("stat -c '%a %U %G' /etc/swift-etcd/member.key").split() == ["640", "root", "etcd"]
    users = site.etcdctl("deploy/etcd/job.sh add gpt2 && deploy/etcd/job.sh remove gpt2 && etcdctl user list")
    assert users.split()[-2:] == ["root", "swift-gpt"]


@machines
@pytest.mark.timeout(300)
def test_nodes_leave_die_and_come_back(site: Site, job: Callable[..., Job], undisturbed: Callable[..., str]) -> None:
    """What follows what, of the page; no iteration is run twice where a node was told to go."""
    gpt = job()
    for machine in site.machines:
        gpt.set_up(machine)
    by_name = {machine.name: machine for machine in site.machines}
    gpt.wait_for_training()
    slots = gpt.slots()
    assert set(slots) == set(NAMES) and sorted(map(str, slots.values())) == ["0", "1", "None"]
    assert re.search(r"\betcd1\b", site.on(site.first, STATUS))
    # What the unit says of the process is so.
    one = by_name[next(name for name, slot in slots.items() if slot == 0)]
    limits = Path(f"/proc/{gpt_main(one, gpt)}/limits").read_text()
    assert re.search(r"Max core file size +0 +0", limits)
    assert one.run(f"stat -c %U /proc/{gpt.state(one)['MainPID']}").strip() == "swift"
    words = [json.loads(f'"{name}"') for name in one.show(gpt.unit, "OOMPolicy", "KillMode").values()]
    assert sorted(words) == ["continue", "mixed"]

    # Told to go: no iteration is cut; not started again.
    one.run(command(NODES, "systemctl stop"))
    stopped_s = time.monotonic()
    assert gpt.state(one)["ActiveState"] == "inactive" and gpt.left(one)["exit_code"] == 75
    assert gpt.slots().keys() == set(NAMES) - {one.name}
    gpt.wait_for_training()
    for rank in range(4):
        assert gpt.calls(rank) == list(range(len(gpt.calls(rank)))), (rank, gpt.calls(rank))
    site.wait(lambda: time.monotonic() > stopped_s + 6, "the time of RestartSec")
    assert gpt.state(one)["ActiveState"] == "inactive" and one.name not in gpt.slots(), "it was started again"
    # Started by a person: a spare.
    one.run(f"systemctl start {gpt.unit}")
    site.wait(lambda: gpt.slots().get(one.name, -1) is None, "it is a spare")
    # By a signal to the process alone: 75 starts it again.
    two = by_name[gpt.holder(1)]
    two.run(command(NODES, "systemctl kill"))
    site.wait(lambda: gpt.is_back(two), "it is back as a spare")
    for rank in range(4):
        assert gpt.calls(rank) == list(range(len(gpt.calls(rank)))), (rank, gpt.calls(rank))
    # It dies, and all that it has started.
    three = by_name[gpt.holder(0)]
    os.kill(gpt_main(three, gpt), 9)
    site.wait(lambda: gpt.is_back(three), "it is back as a spare")
    gpt.end()
    assert gpt.hashes() == {undisturbed(iterations=ITERATIONS)}
    for machine in site.machines:
        assert gpt.state(machine)["ActiveState"] == "inactive" and gpt.left(machine)["cause"] == "succeeded"


def gpt_main(machine: Machine, job: Job) -> int:
    """The main process, as this machine numbers it."""
    inner = job.state(machine)["MainPID"]
    for pid in machine.pids(job.unit):
        numbers = re.search(r"NSpid:\s+(.*)", Path(f"/proc/{pid}/status").read_text())
        if numbers and numbers[1].split()[-1] == inner:
            return pid
    raise AssertionError(f"no process {inner} on {machine.name}")


RAISES = "raise ValueError('no such column')"


@machines
@pytest.mark.parametrize(
    ("code", "variables", "again"),
    [
        (1, {}, False),
        (2, {"PET_SPARES": "-1"}, False),
        (3, {}, False),
        (69, {"PET_LOCAL_ADDR": "192.0.2.77"}, True),
    ],
    ids=["script", "usage", "stopped", "infrastructure"],
)
def test_what_is_started_again(
    code: int, variables: dict[str, str], again: bool, site: Site, job: Callable[..., Job]
) -> None:
    gpt = job()
    script = site.shared / f"script-{code}.py"
    script.write_text("import time; time.sleep(600)" if code == 3 else RAISES)
    script.chmod(0o644)
    gpt.set_up(site.first, f"/run/shared/{script.name}", **{"PET_NNODES": "1", "PET_SPARES": "0", **variables})
    if code == 3:
        site.wait(lambda: gpt.status()["nodes"], "it runs")
        site.on(site.first, STATUS.replace("status gpt", "stop gpt"))
    if again:
        site.wait(lambda: int(gpt.state(site.first)["NRestarts"]) >= 1, "it is started again")
    else:
        site.wait(lambda: gpt.state(site.first)["ActiveState"] == "failed", "it has failed")
        assert gpt.state(site.first)["NRestarts"] == "0"
    assert gpt.left(site.first)["exit_code"] == code


@machines
@pytest.mark.timeout(300)
def test_work_on_etcd_while_a_job_trains(own_site: Site, undisturbed: Callable[..., str]) -> None:
    site = own_site
    gpt = Job(site)
    for machine in site.machines[:2]:
        gpt.set_up(machine, PET_SPARES="0")
    gpt.wait_for_training()
    pids = {path.name: path.read_text() for path in gpt.directory.glob("pids.*")}

    table = site.etcdctl(COMPACT)
    assert table.count("| https://etcd") == 3 and "Finished defragmenting" in table

    serial = "(openssl s_client -connect etcd2:2379 </dev/null 2>/dev/null || true) | openssl x509 -noout -serial"
    before = site.on(site.first, serial)
    site.on(site.first, put_in(command(CLUSTER, "deploy/etcd/certificates.sh member"), {"etcd1": "etcd2"}))
    site.machines[1].run("cat /run/shared/pki/etcd2/member.crt >/etc/swift-etcd/member.crt"
                         " && cat /run/shared/pki/etcd2/member.key >/etc/swift-etcd/member.key")  # fmt: skip
    assert site.on(site.first, serial) not in ("", before)

    third = site.machines[2]
    third.power_off()
    site.healthy(2)
    site.etcdctl(REPLACE)
    third.boot()
    site.set_up_member(third, ETCD_INITIAL_CLUSTER_STATE="existing")
    site.healthy()
    gpt.wait_for_training()
    gpt.end()
    assert gpt.hashes() == {undisturbed(iterations=ITERATIONS)}
    assert pids == {path.name: path.read_text() for path in gpt.directory.glob("pids.*")}, "a worker was replaced"


@machines
def test_a_backup_brings_users_and_roles_back(own_site: Site) -> None:
    site = own_site
    for machine in site.machines[:1]:
        machine.run("cp -r /run/shared/pki/root /etc/swift-etcd/root")
        site.on(machine, BACKUP)
    saved = site.first.run("ls /var/lib/swift-etcd-backup/*.db").split()
    assert len(saved) == 1 and site.first.run("systemctl is-active swift-etcd-backup.timer").strip() == "active"
    assert "ETCDCTL" not in site.first.journal("swift-etcd-backup")
    # KEEP of them stay.
    three = "KEEP=2; for one in 1 2 3; do sleep 1; swift-etcd-backup /tmp/kept; done"
    site.first.run(f"set -a; . /etc/swift-etcd/backup.env; {three}")
    assert site.first.run("ls /tmp/kept | wc -l; rm -r /tmp/kept").strip() == "2"

    site.etcdctl(command(CLUSTER, "deploy/etcd/job.sh remove"))
    assert "swift-gpt" not in site.etcdctl("etcdctl user list")
    for machine in site.machines:
        machine.run(command(CLUSTER, "systemctl stop swift-etcd"))
    site.first.run(f"cp {saved[0]} /run/shared/snapshot.db")
    for machine in site.machines:
        site.on(machine, RESTORE)
    site.healthy()
    assert "swift-gpt" in site.etcdctl("etcdctl user list")
    # And they are good for something.
    gpt = Job(site)
    script = site.shared / "ends.py"
    script.write_text("")
    gpt.set_up(site.first, "/run/shared/ends.py", PET_NNODES="1", PET_SPARES="0")
    site.wait(lambda: gpt.state(site.first)["ActiveState"] == "inactive", "it has ended")
    assert gpt.left(site.first)["exit_code"] == 0


@machines
def test_scripts_say_how_they_are_used(site: Site) -> None:
    for script, words in (("certificates.sh", "certificates.sh cluster DIR"), ("job.sh", "job.sh remove JOB"),
                          ("backup.sh", "backup.sh DIR"), ("restore.sh", "restore.sh SNAPSHOT")):  # fmt: skip
        said = site.on(site.first, f"deploy/etcd/{script} 2>&1 || echo rc $?")
        assert words in said and said.endswith("rc 2\n"), said
    assert "has an authority already" in site.on(site.first, "deploy/etcd/certificates.sh cluster pki a 2>&1 || true")


def test_size(one: EtcdCluster, make_agents: Callable[..., Agents]) -> None:
    """What the page says of writes, keys and bytes."""

    def status() -> tuple[int, int]:
        found = json.loads(one.ctl("endpoint", "status", "--write-out=json"))[0]["Status"]
        return found["header"]["revision"], found["dbSizeInUse"]

    def keys() -> list[str]:
        return one.ctl("get", "--prefix", "/swift/", "--keys-only").split()

    def wait(what: Callable[[], Any]) -> None:
        deadline_s = time.monotonic() + 90
        while not what():
            assert time.monotonic() < deadline_s, agents.outcome(0.0).text()
            time.sleep(0.1)

    orders = {"iterations": 400, "pace_s": 0.2}
    agents = make_agents(endpoint=one.endpoints[0], orders=orders, options=("--spares", "1"), max_restarts=None)
    began = status()[0]
    for node in "abc":
        agents.start(node)
    wait(lambda: all((agents.directory / f"calls.{rank}").exists() for rank in range(4)))
    assert 5 <= status()[0] - began <= 15
    wait(lambda: any(key.endswith("/profile") for key in keys()))  # what it costs is measured once, at first
    wait(lambda: any("/~measured/" in key for key in keys()))
    assert 8 <= len(keys()) <= 10 + 3 * 3
    before, began_s = status()[0], time.monotonic()
    wait(lambda: time.monotonic() - began_s > 15)
    assert 2 <= status()[0] - before <= 6
    before = status()[0]
    os.kill(int((agents.directory / "pids.1").read_text().split()[-1]), 9)
    wait(lambda: "recovered" in agents.outcome(0.0).text())
    assert 5 <= status()[0] - before <= 20
    (agents.directory / "free").touch()
    outcome = agents.wait()
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()
    assert keys() == []

    with EtcdStore(EtcdConfig(one.endpoints)) as store:
        before = status()[1]
        for number in range(720):
            store.put(Keys("gpt").rate, encode(RateRecord(100_000 + number, 3.456, 12, time.time())))
    wait(lambda: status()[1] - before > 90_000)
    assert status()[1] - before < 150_000
