"""Where workers meet: torch's store of each generation, at a port of its own or at the one that was asked for."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from swift_agent.agent.store_hosting import GenerationStores, PortTaken
from swift_rendezvous.node.job_key import JobKey
from swift_rendezvous.roster.records import StoreRecord

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
