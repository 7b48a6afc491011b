"""Where workers meet: torch's store of each generation, at a port of its own or at the one that was asked for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from swift_agent.agent.store_hosting import STORE_TIMEOUT_S, CannotHost, GenerationStores, PortTaken
from swift_rendezvous.node.job_key import JobKey
from swift_rendezvous.roster.records import StoreRecord
from tests.support.job import SOURCE_ROOTS
from tests.support.limits import without_descriptors

KEY = JobKey.of_one_node()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def client(record: StoreRecord) -> TCPStore:
    return TCPStore(record.host, record.port, is_master=False, timeout=timedelta(seconds=10))


@pytest.fixture
def port() -> Iterator[int]:
    yield free_port()


def test_a_later_generation_has_the_port_and_none_of_the_keys(port: int) -> None:
    stores = GenerationStores("127.0.0.1", KEY, master_addr="localhost", master_port=port)
    for generation in (1, 2, 3):
        record = stores.open(generation)
        assert (record.host, record.port) == ("localhost", port)
        assert stores.open(generation) == record
        store = client(record)
        assert not store.check(["k"])
        store.set("k", str(generation))
        stores.close_before(generation)
    stores.close()


def test_a_port_that_is_taken(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """Ends a job that has not begun, and no other."""
    stores = GenerationStores("127.0.0.1", KEY, master_port=port)
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(PortTaken, match=f"--master-port {port}: nothing can listen at 127.0.0.1:{port}"):
            stores.open(1)
        record = stores.open(2)
        assert record.port not in (port, 0) and "workers meet at another port" in caplog.text
    stores.close()


def test_another_machines_address_is_not_taken() -> None:
    stores = GenerationStores("127.0.0.1", KEY, master_addr="192.0.2.1")
    assert stores.open(1).host == "127.0.0.1"
    stores.close()


FEW_DESCRIPTORS = """
import os, resource, signal

from swift_agent.agent.store_hosting import GenerationStores
from swift_rendezvous.node.job_key import JobKey

stores = GenerationStores("127.0.0.1", JobKey.of_one_node())
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for number in range(40):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + number, hard))
        try:
            stores.open(1)
        except (OSError, RuntimeError):
            os._exit(3)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end=" ")
"""


def test_an_agent_that_is_short_of_descriptors_lives() -> None:
    """torch's store ends the process, or waits for minutes, where it gets some of those that it needs."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS)}
    done = subprocess.run([sys.executable, "-c", FEW_DESCRIPTORS], capture_output=True, text=True, env=environment)
    codes = done.stdout.split()
    assert len(codes) == 40 and set(codes) == {"0", "3"}, (codes, done.stderr[-2000:])
    assert codes[0] == "3" and codes[-1] == "0"


def test_a_host_without_descriptors_tries_on_and_then_leaves_the_stores_to_another() -> None:
    stores = GenerationStores("127.0.0.1", KEY)
    try:
        with without_descriptors():
            assert stores.host(1, 100.0) is None and stores.is_due(1)
            assert stores.host(1, 101.0) is None
        assert stores.host(1, 102.0) is not None and not stores.is_due(1)
        with without_descriptors():
            assert stores.host(2, 200.0) is None
            with pytest.raises(CannotHost, match="the stores of generation 2 cannot be started"):
                stores.host(2, 200.0 + STORE_TIMEOUT_S + 1.0)
    finally:
        stores.close()


def test_stores_that_cannot_be_opened_for_long_are_hosted_by_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """All wait for them."""

    def full(generation: int) -> StoreRecord:
        raise RuntimeError("can't start new thread")

    stores = GenerationStores("127.0.0.1", KEY)
    monkeypatch.setattr(stores, "open", full)
    for second in range(21):
        assert stores.host(3, 100.0 + second) is None and stores.is_due(3)
    with pytest.raises(CannotHost, match="the stores of generation 3 cannot be started: can't start new thread"):
        stores.host(3, 120.1)
    assert not stores.is_due(3)
    assert stores.host(3, 130.0) is None
    assert stores.host(4, 150.1) is None  # another generation has its own time
