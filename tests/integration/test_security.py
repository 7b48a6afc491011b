"""What docs/security.md promises, with real servers, jobs and processes: who gets in, what listens where, and that no
secret is where others look.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from swift_agent.agent.store_hosting import GenerationStores
from swift_rendezvous.codec import decode
from swift_rendezvous.node.job_key import JobKey
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import JobRecord, StoreRecord
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.private_etcd import PrivateEtcd
from tests.support.etcd_cluster import EtcdCluster, Tls, etcd_binary, make_tls, wait_for
from tests.support.job import SOURCE_ROOTS, Agents
from tests.support.pages import blocks, command, put_in

SECRET = "Wo4IHXVn6bSDJbTqL0kq8p0s"
PASSWORD = "kV7-password-of-etcd"
ROOT_PASSWORD = "qZ3-password-of-root"


def write_private(path: Path, text: str) -> str:
    path.write_text(text + "\n")
    path.chmod(0o600)
    return str(path)


@dataclass
class Locked:
    """An etcd with TLS, client certificates and users, set up by the lines of the documentation."""

    cluster: EtcdCluster
    tls: Tls
    password_file: str

    @property
    def endpoint(self) -> str:
        return f"https://{self.cluster.endpoints[0]}"

    def flags(self) -> tuple[str, ...]:
        tls = self.tls
        return ("--etcd-user", "swift-gpt", "--etcd-password-file", self.password_file, "--etcd-cacert", tls.ca,
                "--etcd-cert", tls.client_cert, "--etcd-key", tls.client_key)  # fmt: skip

    def variables(self) -> dict[str, str]:
        tls = self.tls
        return {"SWIFT_ETCD_USER": "swift-gpt", "SWIFT_ETCD_PASSWORD": PASSWORD, "SWIFT_ETCD_CACERT": tls.ca,
                "SWIFT_ETCD_CERT": tls.client_cert, "SWIFT_ETCD_KEY": tls.client_key}  # fmt: skip

    def as_root(self) -> EtcdStore:
        tls = self.tls
        return EtcdStore(EtcdConfig(self.cluster.endpoints, "root", ROOT_PASSWORD, tls.ca, tls.client_cert,
                                    tls.client_key))  # fmt: skip


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    directory = tmp_path_factory.mktemp("locked")
    tls = make_tls(directory)
    write_private(directory / "root-password", ROOT_PASSWORD)
    password_file = write_private(directory / "etcd-password", PASSWORD)
    with EtcdCluster(directory, tls=tls) as cluster:
        environment = {
            **os.environ, "PATH": f"{Path(etcd_binary()).parent}:{os.environ['PATH']}", "ETCDCTL_API": "3",
            "ETCDCTL_ENDPOINTS": f"https://{cluster.endpoints[0]}", "ETCDCTL_CACERT": tls.ca,
            "ETCDCTL_CERT": tls.client_cert, "ETCDCTL_KEY": tls.client_key,
        }  # fmt: skip
        for block in blocks("docs/etcd-login.md", "", but="swift-run"):
            done = subprocess.run(["bash", "-euc", block], env=environment, cwd=directory, capture_output=True,
                                  text=True, timeout=60)  # fmt: skip
            assert done.returncode == 0, done
        yield Locked(cluster, tls, password_file)


@pytest.fixture
def make_agents(tmp_path: Path) -> Iterator[Callable[..., Agents]]:
    made: list[Agents] = []

    def make(**options: object) -> Agents:
        made.append(Agents(tmp_path, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for job in made:
        job.kill_all()


@pytest.fixture(scope="module")
def etcd() -> Iterator[str]:
    with PrivateEtcd() as server:
        yield server.endpoint


class Looker:
    """What others can see of the processes of a job: *argv* of all, *environ* of all but the agents, and the addresses
    at which agents listen, by node.
    """

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self.argv: dict[int, bytes] = {}
        self.environ: dict[int, bytes] = {}
        self.listening: dict[str, set[tuple[str, int]]] = {}

    def look(self) -> bool:
        """False when all agents have ended."""
        running = {node: process for node, process in self._agents.running.items() if process.poll() is None}
        for node, agent in running.items():
            try:
                family = psutil.Process(agent.pid).children(recursive=True)
                for connection in psutil.Process(agent.pid).net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        self.listening.setdefault(node, set()).add(tuple(connection.laddr))
            except psutil.NoSuchProcess:
                continue
            for pid in (agent.pid, *(process.pid for process in family)):
                try:
                    self.argv[pid] = self.argv.get(pid, b"") + Path(f"/proc/{pid}/cmdline").read_bytes()
                    if pid != agent.pid:
                        seen = Path(f"/proc/{pid}/environ").read_bytes()
                        # Between fork and exec a process still looks like its agent.
                        if Path(f"/proc/{pid}/cmdline").read_bytes() != Path(f"/proc/{agent.pid}/cmdline").read_bytes():
                            self.environ[pid] = seen
                except OSError:
                    continue  # it has ended
        return bool(running)


def history(locked: Locked, job_id: str) -> list[tuple[str, bytes]]:
    """Every key and value that was ever under the job's prefix."""
    end = Keys(job_id).prefix + "end-of-test"
    found = []
    with locked.as_root() as store:
        store.put(end, b"")
        with store.watch_prefix(Keys(job_id).prefix, 1) as watch:
            while not found or found[-1][0] != end:
                found += [(event.kv.key, event.kv.value) for event in next(watch).events]
    return found


def test_a_job_over_tls_with_a_role_of_its_own_leaks_no_secret(
    locked: Locked, make_agents: Callable[..., Agents], tmp_path: Path
) -> None:
    """A worker is lost and replaced; afterwards every place where others look is searched."""
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    secret_file = write_private(secrets / "secret", SECRET)
    logs = ("--log-dir", str(tmp_path / "logs"), "--tee", "3", "--journal", str(tmp_path / "journal"))
    agents = make_agents(
        endpoint=locked.endpoint, job_id="gpt", num_workers=1,
        start_method="spawn",  # of a fork the system shows the environment of what it was forked from
        options=(*locked.flags(), *logs, "--job-secret-file", secret_file, "--local-addr", "127.0.0.2"),
        orders={"faults": [{"at": "forward", "iteration": 5, "rank": 1, "scope": "worker"}], "pause_s": 0.05},
    )  # fmt: skip
    agents.start("a")
    # The other node has everything from the environment.
    agents.options = (*logs, "--local-addr", "127.0.0.3")
    agents.environment = {**locked.variables(), "SWIFT_JOB_SECRET": SECRET}
    agents.start("b")
    looker = Looker(agents)
    deadline_s = time.monotonic() + 90
    while looker.look() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    outcome = agents.wait(1.0)
    assert set(outcome.exit_codes.values()) == {0}, outcome.text()
    assert outcome.fired == {0} and len(outcome.hashes) == 1 and len(outcome.pids[1]) == 2, outcome.text()
    assert "recovered" in outcome.text() and "no job secret" not in outcome.text()

    # Heartbeats on both nodes, and two stores per generation on one of them.
    assert {node: {ip for ip, _ in places} for node, places in looker.listening.items()} == {
        "a": {"127.0.0.2"}, "b": {"127.0.0.3"}
    }  # fmt: skip
    assert sum(len(places) for places in looker.listening.values()) >= 6

    records = history(locked, "gpt")
    job = JobKey.of_secret(SECRET.encode(), "gpt")
    stores = [(int(key.rpartition("/")[2]), decode(StoreRecord, value)) for key, value in records
              if "/store/" in key and value]  # fmt: skip
    assert len(stores) >= 2 and all(record.nonce for _, record in stores)
    assert {decode(JobRecord, value).secret_proof for key, value in records if key == Keys("gpt").job and value} == {
        job.proof
    }
    private_key = Path(locked.tls.client_key).read_text().splitlines()[1]
    needles = [SECRET, PASSWORD, private_key, job.heartbeat.hex()]
    needles += [job.store_token(number, record.nonce) for number, record in stores]
    haystack = {f"argv of {pid}": text for pid, text in looker.argv.items()}
    haystack |= {f"environ of {pid}": text for pid, text in looker.environ.items()}
    haystack |= {f"record {key}": value for key, value in records}
    haystack |= {str(path): path.read_bytes() for path in tmp_path.rglob("*")
                 if path.is_file() and path.parent != secrets}  # fmt: skip
    # The search finds what is there: three workers, their environment and their output.
    assert {pid for pids in outcome.pids.values() for pid in pids} <= looker.argv.keys()
    assert sum(b"\0RANK=" in b"\0" + text for text in looker.environ.values()) >= 2
    assert any(b"etcd-password" in text for text in looker.argv.values())
    assert any(name.endswith("agent.a.log") for name in haystack)
    journals = [text for name, text in haystack.items() if name.startswith(str(tmp_path / "journal"))]
    assert len(journals) == 2 and all(stores[0][1].nonce.encode() in text for text in journals)
    leaks = [(needle[:6], where) for needle in needles for where, text in haystack.items() if needle.encode() in text]
    assert leaks == []


def test_a_node_logs_in_as_the_page_has_it(locked: Locked, script: Path, tmp_path: Path) -> None:
    line = put_in(command("docs/etcd-login.md", "swift-run --rdzv-endpoint"), {
        "--rdzv-endpoint": locked.endpoint, "--etcd-cacert": locked.tls.ca, "--etcd-cert": locked.tls.client_cert,
        "--etcd-key": locked.tls.client_key, "--etcd-password-file": locked.password_file, "train.py": str(script),
    })  # fmt: skip
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS),
    }  # fmt: skip
    done = subprocess.run(["bash", "-c", f"exec {line}"], env=environment, cwd=tmp_path, capture_output=True, text=True,
                          timeout=100)  # fmt: skip
    assert done.returncode == 0 and "trains" in done.stdout + done.stderr, done


@pytest.mark.parametrize("role", ["of another job", "that may only read"])
def test_too_small_a_role_is_one_clear_error(
    role: str, locked: Locked, make_agents: Callable[..., Agents], tmp_path: Path
) -> None:
    job_id = "bert"
    if role == "that may only read":
        job_id = "gpt"
        root = ("--user", f"root:{ROOT_PASSWORD}")
        for change in (("revoke-permission", "swift-gpt", "--prefix=true", "/swift/gpt/"),
                       ("grant-permission", "swift-gpt", "--prefix=true", "read", "/swift/gpt/")):  # fmt: skip
            locked.cluster.ctl(*root, "role", *change)
    agents = make_agents(endpoint=locked.endpoint, job_id=job_id, options=locked.flags())
    agents.start("a")
    outcome = agents.wait(30.0)
    text = outcome.output["a"]
    assert outcome.exit_codes == {"a": 69} and "Traceback" not in text and outcome.pids == {}
    assert text.count("Error:") == 1 and "'swift-gpt'" in text and PASSWORD not in text
    assert f"etcdctl role grant-permission ROLE --prefix=true readwrite /swift/{job_id}/" in text


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Trains nothing: who gets in is decided before."""
    path = tmp_path / "script.py"
    path.write_text("print('trains', flush=True)")
    return path


def wait_joined(agents: Agents, node: str) -> None:
    log = agents.directory / f"agent.{node}.log"
    wait_for(lambda: f"node {node} joined" in log.read_text(), 60, f"node {node} joins")


def turned_away(agents: Agents, node: str) -> str:
    """What a node said that did not get in; it is forgotten."""
    assert agents.running.pop(node).wait(60) == 69
    text = (agents.directory / f"agent.{node}.log").read_text()
    assert text.count("Error:") == 1 and "Traceback" not in text and "the job is not disturbed" in text, text
    assert "joined job" not in text and "trains" not in text and SECRET not in text and SECRET[::-1] not in text
    return text


def test_a_node_with_another_secret_does_not_get_in(
    etcd: str, make_agents: Callable[..., Agents], script: Path, tmp_path: Path
) -> None:
    agents = make_agents(endpoint=etcd, job_id="guarded", num_workers=1, script=script)
    agents.environment = {"SWIFT_JOB_SECRET": SECRET}
    agents.start("a")
    wait_joined(agents, "a")
    agents.environment = {"SWIFT_JOB_SECRET_FILE": write_private(tmp_path / "other", SECRET[::-1])}
    agents.start("b")
    agents.environment = {}
    agents.start("c")
    assert "another job secret" in turned_away(agents, "b")
    assert "this node has none: start it with --job-secret-file FILE" in turned_away(agents, "c")
    agents.options = ("--job-secret-file", write_private(tmp_path / "same", SECRET))
    agents.start("d")
    outcome = agents.wait(60)
    assert outcome.exit_codes == {"a": 0, "d": 0}, outcome.text()
    assert all("trains" in text for text in outcome.output.values())
    # Of the strangers, those who are in have seen nothing.
    assert "lost" not in outcome.text() and "generation 2" not in outcome.text()


def test_a_job_without_a_secret_says_so_and_takes_no_node_that_has_one(
    etcd: str, make_agents: Callable[..., Agents], script: Path
) -> None:
    agents = make_agents(endpoint=etcd, job_id="open", num_workers=1, script=script)
    agents.start("a")
    wait_joined(agents, "a")
    first_line = (agents.directory / "agent.a.log").read_text().splitlines()[0]
    assert "no job secret" in first_line and "docs/security.md" in first_line
    agents.environment = {"SWIFT_JOB_SECRET": SECRET}
    agents.start("b")
    assert "running without a job secret" in turned_away(agents, "b")
    agents.running["a"].send_signal(signal.SIGTERM)
    agents.wait(30)


def test_one_node_needs_no_set_up(make_agents: Callable[..., Agents], tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text("import swift_agent as swift\nswift.init()\nprint('trains')")
    agents = make_agents(endpoint=None, num_nodes=1, num_workers=1, script=script)
    agents.start("a")
    outcome = agents.wait(60)
    assert outcome.exit_codes == {"a": 0} and "trains" in outcome.text(), outcome.text()
    assert "no job secret" not in outcome.text()


# ---- what listens where ----


def refused(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5.0).close()
    except ConnectionRefusedError:
        return True
    return False


def test_the_stores_listen_at_the_jobs_address_only() -> None:
    """Theirs is torch's own, for scripts that call `init_process_group`, and the session's."""
    stores = GenerationStores("127.0.0.2", JobKey.of_one_node())
    try:
        record = stores.open(1)
        assert record.host == "127.0.0.2" and record.port != record.session_port
        for port in (record.port, record.session_port):
            assert not refused("127.0.0.2", port)
            # Of this process: another one may have that port at another address.
            sockets = psutil.Process().net_connections("tcp")
            assert {one.laddr.ip for one in sockets if one.laddr.port == port and one.status == psutil.CONN_LISTEN} == {
                "127.0.0.2"
            }
    finally:
        stores.close()


def test_stores_are_closed_when_nobody_is_in_their_generation_any_more() -> None:
    """That of the generation before stays until all workers have left it, whoever hosts the newest one."""
    stores = GenerationStores("127.0.0.2", JobKey.of_one_node())
    try:
        first, second = stores.open(1), stores.open(2)
        assert not refused(first.host, first.port) and not refused(first.host, first.session_port)
        stores.close_before(2)
        assert refused(first.host, first.port) and refused(first.host, first.session_port)
        assert not refused(second.host, second.port) and not refused(second.host, second.session_port)
        stores.close_before(7)
        assert refused(second.host, second.port) and refused(second.host, second.session_port)
    finally:
        stores.close()


def test_a_local_addr_that_is_not_of_this_machine(make_agents: Callable[..., Agents]) -> None:
    address = "192.0.2.77"
    agents = make_agents(endpoint=None, num_nodes=1, options=("--local-addr", address))
    agents.start("a")
    outcome = agents.wait(30)
    text = outcome.output["a"]
    assert outcome.exit_codes == {"a": 69} and f"--local-addr {address}" in text and "Traceback" not in text, text
