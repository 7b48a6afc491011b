"""The store of a generation: a c10d store like torch's, that can be cut and asks for a token."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from swift_agent.wire import store_server
from swift_agent.wire.store_client import StoreClient
from swift_agent.wire.store_frames import _pack
from swift_agent.wire.store_server import StoreServer
from tests.support.limits import without_descriptors

SHORT = timedelta(milliseconds=50)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer("127.0.0.1", token=b"secret")
    yield made
    made.close()


@pytest.fixture
def connect(server: StoreServer) -> Callable[[], StoreClient]:
    return lambda: StoreClient("127.0.0.1", server.port, b"secret", timedelta(seconds=10))


@pytest.mark.parametrize("make", ["ours", "torch"])
def test_it_answers_like_torchs_store(make: str, connect: Callable[[], StoreClient]) -> None:
    store = connect() if make == "ours" else dist.HashStore()
    store.set("key", "value")
    assert store.get("key") == b"value" and store.check(["key"]) and not store.check(["key", "other"])
    assert store.add("counter", 2) == 2 and store.add("counter", -3) == -1
    assert store.compare_set("new", "", "first") == b"first"
    assert store.compare_set("new", "wrong", "second") == b"first"
    assert store.compare_set("new", "first", "second") == b"second"
    store.append("key", "s")
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["b", "a", "key"]) == [b"2", b"1", b"values"]
    assert store.num_keys() == 5 and store.delete_key("a") and not store.delete_key("a")
    store.wait(["b"], SHORT)
    with pytest.raises(RuntimeError):
        store.wait(["b", "never"], SHORT)
    assert store.get("b") == b"2", "the connection is usable after a timeout"


def test_a_waiting_client_is_woken(connect: Callable[[], StoreClient]) -> None:
    got: list[bytes] = []
    waiting = connect()
    thread = threading.Thread(target=lambda: got.append(waiting.get("late")))
    thread.start()
    connect().set("late", b"\0\xff")
    thread.join(5)
    assert got == [b"\0\xff"]


def test_a_cut_frees_whoever_waits(connect: Callable[[], StoreClient]) -> None:
    client = connect()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            dist.PrefixStore("through C++", client).get("never")
        except dist.DistStoreError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)  # not needed for the result: lets it really wait
    client.cut()
    client.cut()
    thread.join(5)
    assert len(errors) == 1
    clone = connect().clone()
    clone.set("others", "live on")
    with pytest.raises(dist.DistStoreError):
        client.set("key", "value")


def test_a_closed_server_frees_its_clients(server: StoreServer, connect: Callable[[], StoreClient]) -> None:
    client = connect()
    closer = threading.Timer(0.05, server.close)
    closer.start()
    with pytest.raises(dist.DistStoreError):
        client.get("never")
    closer.join()
    with pytest.raises(dist.DistStoreError, match="cannot be reached"):
        connect()


@pytest.mark.parametrize("answer_parts", [[b"ok", b"p" * 32], [b"ok"], [], None])
def test_a_store_that_does_not_know_the_token_is_not_used(answer_parts: list[bytes] | None) -> None:
    """One that says yes to everybody, with a proof of its own or none, or that is no store at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(_pack([b"n" * 16]))
                connection.recv(4096)
                connection.sendall(struct.pack(">II", 8, 99) * 2 if answer_parts is None else _pack(answer_parts))
                connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        words = "does not know this client's token" if answer_parts else "store at"
        with pytest.raises(dist.DistStoreError, match=words):
            StoreClient("127.0.0.1", listener.getsockname()[1], b"secret", timedelta(seconds=5))
        thread.join(5)


def test_it_leaves_no_connection_open_whenever_it_closes() -> None:
    """Not that of a client that comes as it closes, nor of one that does not take its answer: an open one warns of
    itself when it is collected, and that is an error here."""
    clients: list[threading.Thread] = []

    def come(port: int) -> None:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except OSError:
                return  # it listens no more; the last attempt takes the kernel a second

    for _ in range(15):
        server = StoreServer("127.0.0.1", token=b"secret")
        full = StoreClient("127.0.0.1", server.port, b"secret", timedelta(seconds=10))
        full.set("key", "v" * 10_000_000)
        full._socket.sendall(_pack([b"get", b"1000", b"key"]))
        clients += [threading.Thread(target=come, args=(server.port,)) for _ in range(4)]
        for client in clients[-4:]:
            client.start()
        time.sleep(0.01)
        server.close()
        full.close()
    for client in clients:
        client.join()
    gc.collect()


@pytest.mark.parametrize("num_steps", range(5))
def test_it_closes_even_as_an_answer_comes(num_steps: int, connect: Callable[[], StoreClient]) -> None:
    """The end and the value that a client waits for, within few steps of the server's loop."""
    server = StoreServer("127.0.0.1", token=b"secret")
    client = StoreClient("127.0.0.1", server.port, b"secret", timedelta(seconds=10))

    def wait() -> None:
        with pytest.raises(dist.DistStoreError):
            client.wait(["late", "never"])

    ended = threading.Thread(target=wait)
    ended.start()
    while not server._waiting:
        time.sleep(0.001)

    def step(left: int) -> None:
        if left == num_steps:
            server._put(b"late", b"value")
        if left:
            server._loop.call_soon(step, left - 1)
        else:
            server._stop.set()

    server._loop.call_soon_threadsafe(step, num_steps)
    server._thread.join(5)
    assert not server._thread.is_alive()
    ended.join(5)
    assert not ended.is_alive()


def test_the_token_is_never_sent(server: StoreServer) -> None:
    """What passes over the wire when a client introduces itself is of no use to who listens, nor again."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def relay() -> None:
            client, _ = listener.accept()
            with client, socket.create_connection(("127.0.0.1", server.port)) as upstream:
                for source, target in ((upstream, client), (client, upstream), (upstream, client)):
                    said.append(source.recv(4096))
                    target.sendall(said[-1])
                client.recv(1)

        thread = threading.Thread(target=relay)
        thread.start()
        client = StoreClient("127.0.0.1", listener.getsockname()[1], b"secret", timedelta(seconds=5))
        client.close()
        thread.join(5)
    assert len(said) == 3 and not any(b"secret" in data for data in said)
    with socket.create_connection(("127.0.0.1", server.port)) as again:
        again.settimeout(5)
        again.recv(4096)
        again.sendall(said[1])
        assert b"refused" in again.recv(4096)


def test_clients_that_vanish_while_they_wait_leave_nothing(
    server: StoreServer, connect: Callable[[], StoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "_LOOK_S", 0.2)

    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    stays = connect()
    answers: list[bytes] = []
    waits = threading.Thread(target=lambda: answers.append(stays.get("late")))
    waits.start()
    before = num_descriptors()
    for _ in range(50):
        client = connect()
        client._socket.sendall(_pack([b"get", b"3600000", b"never", b"late"]))
        client.close()
    deadline_s = time.monotonic() + 10
    while num_descriptors() > before or set(server._waiting) != {b"late"}:
        assert time.monotonic() < deadline_s, (num_descriptors(), before, server._waiting)
        time.sleep(0.05)
    connect().set("late", "value")
    waits.join(10)
    assert answers == [b"value"] and not server._waiting


def test_a_wrong_token_is_refused(server: StoreServer) -> None:
    for token in (b"", b"secreT", b"secret "):
        with pytest.raises(dist.DistStoreError, match="token"):
            StoreClient("127.0.0.1", server.port, token, timedelta(seconds=5))


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 1 << 31), struct.pack(">III", 8, 100, 0), b"\0" * 64]
)
def test_garbage_ends_only_its_own_connection(
    garbage: bytes, server: StoreServer, connect: Callable[[], StoreClient]
) -> None:
    client = connect()
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(garbage)
        stranger.settimeout(5)
        assert b"ok" not in stranger.recv(100)
    client.set("key", "value")
    assert client.get("key") == b"value"


def test_gloo_connects_over_it(connect: Callable[[], StoreClient]) -> None:
    """Two groups in one process, so that both the blocking wait and the answer pass through it."""
    results: dict[int, float] = {}

    def member(rank: int) -> None:
        store = connect()
        group = dist.ProcessGroupGloo(  # type: ignore[attr-defined]
            dist.PrefixStore("group", store), rank, 2, timedelta(seconds=10)
        )
        tensor = torch.tensor([float(rank + 1)])
        group.allreduce([tensor]).wait()
        results[rank] = tensor.item()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {0: 3.0, 1: 3.0}


def test_strangers_do_not_use_up_all_descriptors(
    server: StoreServer, connect: Callable[[], StoreClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of them has to go, whoever has proved itself stays."""
    monkeypatch.setattr(server, "_max_strangers", 5)
    known = connect()
    strangers = [socket.create_connection(("127.0.0.1", server.port), timeout=5.0) for _ in range(12)]
    try:
        nonces = [stranger.recv(24) for stranger in strangers]
        assert all(nonces[-5:])
        for stranger in strangers[:7]:
            assert stranger.recv(1) == b"", "it is sent away"
        known.set("key", "value")
        assert connect().get("key") == b"value"
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_store_goes_on_after_a_moment_without_descriptors(
    server: StoreServer, connect: Callable[[], StoreClient], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as late:
        late.settimeout(10.0)
        with without_descriptors():
            late.connect(("127.0.0.1", server.port))
            deadline_s = time.monotonic() + 5.0
            while "the store of a generation" not in caplog.text:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
        assert late.recv(24), "it is served after all"
    assert caplog.text.count("the store of a generation") == 1, "said once, however many wait"
    connect().set("key", "value")
