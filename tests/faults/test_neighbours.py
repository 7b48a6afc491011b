"""What strangers, and neighbours that misbehave, do to a job: it goes on, or says in a line why not."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from tests.faults.conftest import assert_recovered
from tests.support.hostile_scanner import Ports
from tests.support.job import SCRIPT, SOURCE_ROOTS, Agents

KILL_RANK_3 = {"at": "backward", "iteration": 4, "rank": 3, "scope": "process"}


@pytest.fixture
def scanner() -> Iterator[set[int]]:
    """Connects once to each port that a process of this test begins to listen at, as long as it runs, and says nothing.
    What it has connected to."""
    stop, seen = threading.Event(), set[int]()
    thread = threading.Thread(target=_scan, args=(stop, seen))
    thread.start()
    yield seen
    stop.set()
    thread.join()


def _scan(stop: threading.Event, seen: set[int]) -> None:
    ports, held = Ports(os.getpid()), []
    before = set(ports.now().values())
    while not stop.wait(0.002):
        for where, inode in ports.now().items():
            if inode in before | seen:
                continue
            seen.add(inode)
            held.append(socket.socket())
            held[-1].setblocking(False)
            held[-1].connect_ex(where)
    for one in held:
        one.close()


def test_a_port_scan_during_a_recovery_does_no_harm(
    make_agents: Callable[..., Agents], undisturbed: Callable[..., str], scanner: set[int]
) -> None:
    outcome = make_agents(orders={"faults": [KILL_RANK_3]}, environment={"GLOO_SOCKET_IFNAME": "lo"}).run()
    assert_recovered(outcome, undisturbed(), {3})
    # Two agents, the stores of two generations, and the groups of four processes, of which one was replaced.
    assert len(scanner) > 10, scanner
    assert "cannot find" not in outcome.text() and "asks for another try" not in outcome.text()


def once(directory: Path, rank: int, setup: str) -> Path:
    """A script that trains after *setup*, in which `is_time()` is true once, on *rank* after the fault."""
    script = directory / "train.py"
    script.write_text(
        "import os, runpy\n"
        "from pathlib import Path\n"
        "def is_time():\n"
        "    marker, fired = (Path(__file__).with_name(name) for name in ('refused', 'fired.0'))\n"
        f"    if os.environ['RANK'] != '{rank}' or not fired.exists() or marker.exists():\n"
        "        return False\n"
        "    marker.touch()\n"
        "    return True\n"
        f"{setup}"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    return script


def test_groups_that_cannot_be_connected_once_are_connected_in_the_next_generation(
    make_agents: Callable[..., Agents], undisturbed: Callable[..., str], tmp_path: Path
) -> None:
    """No peer has failed, and no process is replaced."""
    script = once(tmp_path, 0, """
from swift_agent.worker.groups import gloo_sockets
find = gloo_sockets.connections
def connections(*args):
    if is_time():
        raise ConnectionError('this is the first try')
    return find(*args)
gloo_sockets.connections = connections
""")
    outcome = make_agents(orders={"faults": [KILL_RANK_3]}, script=script).run()
    assert (tmp_path / "refused").exists()
    assert_recovered(outcome, undisturbed(), {3})
    text = outcome.text()
    assert "rank 0 asks for another try: this is the first try; all others go on" in text, text
    assert "@job.resilient" not in text and "restart" not in text.replace("restarts", ""), text


def test_a_state_that_is_altered_on_its_way_is_sent_again(
    make_agents: Callable[..., Agents], undisturbed: Callable[..., str], tmp_path: Path
) -> None:
    """A bit of the learning rate, which no comparison of parameters would find in time."""
    script = once(tmp_path, 3, """
from swift_recovery.transfer import replica
receive = replica.GroupLink.recv_bytes
def recv_bytes(self):
    data = receive(self)
    if len(data) > 100 and is_time():
        at = data.index(b'["lr",') + 9
        data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]
    return data
replica.GroupLink.recv_bytes = recv_bytes
""")
    outcome = make_agents(orders={"faults": [KILL_RANK_3]}, script=script).run()
    assert (tmp_path / "refused").exists()
    assert_recovered(outcome, undisturbed(), {3})
    assert "rank 3 asks for another try: the description of a state was altered on its way" in outcome.text()


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"timed out: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def store_at(endpoint: str) -> Iterator[EtcdStore]:
    config = EtcdConfig.from_environment({}, endpoints=endpoint)
    assert config is not None
    with EtcdStore(config) as store:
        yield store


@pytest.mark.parametrize("secret", ["", "a secret of the job, long enough"])
def test_a_name_that_anybody_writes_into_etcd_is_not_imported(
    make_agents: Callable[..., Agents], undisturbed: Callable[..., str], etcd: str, tmp_path: Path, secret: str
) -> None:
    modules, marker = tmp_path / "modules", tmp_path / "imported"
    modules.mkdir()
    (modules / "looks_harmless.py").write_text(f"open({str(marker)!r}, 'a').write('run ')\n")
    environment = {"PYTHONPATH": os.pathsep.join([*SOURCE_ROOTS, str(modules)])}
    if secret:
        environment["SWIFT_JOB_SECRET"] = secret
    agents = make_agents(orders={"faults": [KILL_RANK_3], "pause_s": 1.0}, environment=environment)
    for node in ("a", "b"):
        agents.start(node)
    wait_until(lambda: (tmp_path / "calls.0").exists(), "training begins")
    with store_at(etcd) as store:
        # An agent of the job says what its workers have imported, once the first iteration is done.
        wait_until(lambda: len((tmp_path / "calls.0").read_text().split()) > 2, "two iterations")
        signed = store.get(f"/swift/{agents.job_id}/preload")
        assert (signed is not None) == bool(secret)
        for value in (b"looks_harmless", b"looks_harmless," + (signed.value if signed else b"")):
            store.put(f"/swift/{agents.job_id}/preload", value)
            time.sleep(1.5)  # to import it took less
    (tmp_path / "hurry").touch()
    outcome = agents.wait()
    assert_recovered(outcome, undisturbed(), {3})
    assert not marker.exists(), marker.read_text()
