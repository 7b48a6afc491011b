"""The connection between an old worker and its successor, over real sockets and a real store."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from swift_agent.errors import PeerFailure
from swift_agent.wire.store_client import StoreClient
from swift_agent.wire.store_server import StoreServer
from swift_agent.worker.rejoin import handover
from swift_logging_store.errors import LinkLost
from swift_recovery.state.training_state import TrainingState
from swift_recovery.transfer import socket_link
from swift_recovery.transfer.replica import receive_state, send_state
from tests.support.limits import without_descriptors

TOKEN = b"secret"


def nothing() -> None:
    """A check that has no objection."""


@pytest.fixture
def stores() -> Iterator[list[StoreClient]]:
    server = StoreServer("127.0.0.1", token=TOKEN)
    clients = [StoreClient("127.0.0.1", server.port, TOKEN) for _ in range(3)]
    yield clients
    for client in clients:
        client.close()
    server.close()


def state_of(seed: int) -> tuple[nn.Module, TrainingState]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(700, 900), nn.BatchNorm1d(900), nn.Linear(900, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    if seed == 0:
        model(torch.randn(4, 700)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, TrainingState({"model": model}, {"optimizer": optimizer}, {})


def offer(store: StoreClient, into: list[Any], check: Any = nothing) -> threading.Thread:
    def run() -> None:
        try:
            with handover.offered(store, 3, [None], check) as link:
                into.append(send_state(state_of(0)[1], {"here": 7}, [link]))
        except LinkLost as error:
            into.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_state_goes_from_the_old_worker_to_the_new(stores: list[StoreClient]) -> None:
    sent: list[Any] = []
    thread = offer(stores[0], sent)
    model, state = state_of(1)
    with handover.from_predecessor(stores[1], 3, nothing) as link:
        extra = receive_state(state, link, staged=False)
    thread.join(10.0)
    assert extra == {"here": 7} and sent[0] > 2_000_000
    expected = state_of(0)[0].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert json.loads(PrefixStore("layouts", stores[2]).get("3")) == [None]


def test_who_does_not_have_the_ticket_gets_nothing(stores: list[StoreClient]) -> None:
    sent: list[Any] = []
    thread = offer(stores[0], sent)
    address, port, _ = json.loads(PrefixStore("handover", stores[1]).get("3"))
    with socket.create_connection((address, port)) as stranger:
        socket_link.SocketLink(stranger, nothing).send_bytes(b"guess")
        stranger.settimeout(10.0)
        assert stranger.recv(1) == b""
    with handover.from_predecessor(stores[1], 3, nothing) as link:
        receive_state(state_of(1)[1], link, staged=False)
    thread.join(10.0)
    assert sent[0] > 2_000_000


@pytest.mark.parametrize("said", [b"", b"\0" * 7, b"GET / HTTP/1.0\r\n\r\n"])
def test_strangers_hold_up_nobody(stores: list[StoreClient], said: bytes) -> None:
    """More of them than are let in at the same time; some were there first, others come while it is sent."""
    sent: list[Any] = []
    thread = offer(stores[0], sent)
    address, port, _ = json.loads(PrefixStore("handover", stores[1]).get("3"))
    strangers = [socket.create_connection((address, port)) for _ in range(150)]
    try:
        for stranger in strangers:
            with contextlib.suppress(OSError):  # it was sent away
                stranger.sendall(said)
        began_s = time.monotonic()
        with handover.from_predecessor(stores[1], 3, nothing) as link:
            extra = receive_state(state_of(1)[1], link, staged=False)
        thread.join(10.0)
        assert extra == {"here": 7} and sent[0] > 2_000_000
        assert time.monotonic() - began_s < socket_link.HELLO_TIMEOUT_S / 2
    finally:
        for stranger in strangers:
            stranger.close()


def test_who_waits_is_freed_by_its_check(stores: list[StoreClient]) -> None:
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise PeerFailure("stopped")

    sent: list[Any] = []
    waits_for_successor = offer(stores[0], sent, check)
    with handover.from_predecessor(stores[1], 3, nothing):
        pass  # it has come, and gone again
    waits_for_successor.join(10.0)
    assert isinstance(sent[0], LinkLost) and "gone" in str(sent[0])
    stopped.set()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_connection(silent.getsockname()) as ours,
        pytest.raises(PeerFailure, match="stopped"),
    ):
        socket_link.SocketLink(ours, check).recv_bytes()


def test_a_moment_without_descriptors_ends_no_handover() -> None:
    accepted: list[bool] = []
    checked = threading.Event()
    listener = socket_link.Listener("127.0.0.1")

    def accept() -> None:
        with listener.accepted(checked.set):
            accepted.append(True)

    address, port, ticket = json.loads(listener.where)
    thread = threading.Thread(target=accept)
    thread.start()
    assert checked.wait(5.0)
    with socket.socket() as successor:
        with without_descriptors():
            successor.connect((address, port))
            for _ in range(3):
                checked.clear()
                assert checked.wait(5.0)
        assert thread.is_alive()
        socket_link.SocketLink(successor, nothing).send_bytes(ticket.encode())
        thread.join(5.0)
    listener.close()
    assert accepted == [True]
