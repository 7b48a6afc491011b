"""What a rank is given is kept on other nodes, over real connections: whoever takes its place there finds it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from swift_agent.wire.given import NUM_SLOTS, PAGE_BYTES, Given, GivenPage
from swift_agent.wire.store_client import StoreClient
from swift_agent.wire.store_server import StoreServer
from swift_agent.worker.rejoin import witness
from swift_agent.worker.rejoin.witness import Witnesses, witnesses_of

TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def _all_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training begins without a witness that is late. Here, on a machine of any speed, none is."""
    monkeypatch.setattr(witness, "FIRST_WAIT_S", TIMEOUT_S)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([2], [[], []]),
        ([1, 1], [[1], [0]]),
        ([2, 2], [[2], [3], [0], [1]]),
        ([2, 1], [[2], [2], [0, 1]]),
        ([1, 2], [[1, 2], [0], [0]]),
        ([2, 2, 2], [[2, 4], [3, 5], [0, 4], [1, 5], [0, 2], [1, 3]]),
        ([1, 1, 1, 1], [[1, 2], [2, 3], [0, 3], [0, 1]]),
        ([1, 2, 1], [[1, 3], [0, 3], [0, 3], [0, 1]]),
        ([2, 1, 2], [[2, 3], [2, 4], [0, 3], [0, 2], [1, 2]]),
        ([1, 4, 1, 4], [[1, 5], [5, 6], [5, 7], [5, 8], [5, 9], [0, 6], [0, 1], [0, 2], [0, 3], [0, 4]]),
    ],
)
def test_witnesses_are_on_other_nodes(nodes: list[int], expected: list[list[int]]) -> None:
    found, node_of = [], [node for node, num_local in enumerate(nodes) for _ in range(num_local)]
    for node, num_local in enumerate(nodes):
        for local_rank in range(num_local):
            of = witnesses_of(node, local_rank, nodes)
            on = {node_of[one] for one in of}
            assert node not in on and len(on) == min(len(nodes) - 1, 2)
            found.append(of)
    assert found == expected


@contextlib.contextmanager
def generation() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", token=b"secret")
    try:
        yield server
    finally:
        server.close()


class Rank:
    """One process: its page in *directory*, and what it keeps of the other one."""

    def __init__(self, rank: int, directory: Path, *, is_replacement: bool = False, has_page: bool = True) -> None:
        directory.mkdir(exist_ok=True)
        path = directory / f"given.{rank}"
        self.page = GivenPage(path, is_replacement=is_replacement) if has_page else None
        self.given = Given(self.page)
        self.notes: list[str] = []
        self.is_replacement = is_replacement
        self.witnesses = Witnesses(self.page, rank, [1 - rank], 2, self.notes.append)

    def enter(self, server: StoreServer) -> StoreClient:
        store = StoreClient("127.0.0.1", server.port, b"secret", timedelta(seconds=TIMEOUT_S))
        self.witnesses.enter(store, asks=self.is_replacement)
        return store

    def iterate(self, iteration: int, value: Any) -> bool:
        self.given.begin(iteration)
        is_same = self.given.add(value) and self.given.call()
        self.witnesses.show()
        return is_same


def enter(server: StoreServer, *ranks: Rank) -> list[StoreClient]:
    """All at the same time, as each may wait for the others."""
    stores: list[StoreClient] = []
    threads = [threading.Thread(target=lambda one=one: stores.append(one.enter(server))) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(stores) == len(ranks)
    for one in ranks:
        one.witnesses.begin()
    return stores


def close(*ranks: Rank) -> None:
    for one in ranks:
        one.witnesses.end()


def test_who_takes_the_place_of_a_lost_node_compares_with_what_that_was_given(tmp_path: Path) -> None:
    first, second = Rank(0, tmp_path / "a"), Rank(1, tmp_path / "b")
    with generation() as server:
        stores = enter(server, first, second)
        for iteration in range(20):
            assert first.iterate(iteration, iteration)
            second.iterate(iteration, iteration)
        first.given.begin(20)
        first.given.add("its last")
        first.witnesses.show()
    close(first)  # its node is lost: nobody has its directory
    for iteration in (20, 19):
        again = Rank(0, tmp_path / f"c{iteration}", is_replacement=True)
        with generation() as server:
            stores += enter(server, again, second)
            assert again.iterate(iteration, "its last" if iteration == 20 else 19)
            close(again)
        wrong = Rank(0, tmp_path / f"d{iteration}", is_replacement=True)
        with generation() as server:
            stores += enter(server, wrong, second)
            assert not wrong.iterate(iteration, "something else")
            close(wrong)
    close(second)
    assert not first.notes + second.notes
    assert all(store is not None for store in stores)


def test_a_witness_that_is_new_has_the_whole_page_at_once(tmp_path: Path) -> None:
    first, second = Rank(0, tmp_path / "a"), Rank(1, tmp_path / "b")
    for iteration in range(3):
        first.iterate(iteration, iteration)
    with generation() as server:
        enter(server, first, second)
    close(first, second)
    again = Rank(0, tmp_path / "c", is_replacement=True)
    with generation() as server:
        enter(server, again, second)
        assert not again.iterate(2, "something else")
    close(again, second)


def test_a_witness_that_does_not_look_holds_up_nobody_and_has_the_newest_in_the_end(tmp_path: Path) -> None:
    first, second = Rank(0, tmp_path / "a"), Rank(1, tmp_path / "b")
    num = 60_000  # more than sockets hold
    with generation() as server:
        enter(server, first, second)
        begin_s = time.monotonic()
        for iteration in range(num):
            first.iterate(iteration, iteration)
        assert time.monotonic() - begin_s < TIMEOUT_S
        deadline_s = time.monotonic() + TIMEOUT_S
        while not _has(second, num - 1) and time.monotonic() < deadline_s:
            for _ in range(8):
                second.witnesses.show()
            first.witnesses.show()
    close(first, second)
    assert _has(second, num - 1)


def _has(one: Rank, iteration: int) -> bool:
    page = one.witnesses._copies.get(0)
    at = iteration % NUM_SLOTS * 56
    return page is not None and int.from_bytes(page[at : at + 8], "little") == iteration + 1


def test_a_witness_that_is_gone_and_strangers_do_no_harm(tmp_path: Path) -> None:
    first, second = Rank(0, tmp_path / "a"), Rank(1, tmp_path / "b")
    with generation() as server:
        store = enter(server, first, second)[0]
        address, port, ticket = json.loads(store.get("witness/1/where"))
        strangers = [socket.create_connection((address, port), TIMEOUT_S) for _ in range(3)]
        strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        hello = len(ticket).to_bytes(8, "big") + ticket.encode()
        strangers[2].sendall(hello + (7).to_bytes(8, "big") + bytes(112))  # who knows the ticket, and no rank
        for iteration in range(20):
            first.iterate(iteration, iteration)
            second.iterate(iteration, iteration)
        close(second)
        for iteration in range(20, 30):
            assert first.iterate(iteration, iteration)
        for one in strangers:
            one.close()
    close(first)
    assert set(second.witnesses._copies) == {0} and not first.notes


def test_a_rank_without_a_page_keeps_nothing_and_nobody_waits_for_it(tmp_path: Path) -> None:
    first, stage = Rank(0, tmp_path / "a"), Rank(1, tmp_path / "b", has_page=False)
    with generation() as server:
        enter(server, first, stage)
        assert first.iterate(0, 0)
    close(first, stage)
    again = Rank(0, tmp_path / "c", is_replacement=True)
    with generation() as server:
        enter(server, again, stage)
        assert again.iterate(0, "something else"), "nobody knows"
    close(again, stage)
    assert not first.notes + stage.notes


def test_training_goes_on_where_no_thread_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Rank(0, tmp_path / "a")

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with generation() as server, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        store = first.enter(server)
        begin_s = time.monotonic()
        first.witnesses.begin()
        assert time.monotonic() - begin_s < 0.1, "nobody waits for a connection that will not come"
        assert first.iterate(0, 0)
        address, port, _ = json.loads(store.get("witness/0/where"))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), TIMEOUT_S)
    assert len(first.notes) == 1 and "no thread is left): if this node is lost" in first.notes[0]


def test_a_copy_that_is_damaged_says_nothing(tmp_path: Path) -> None:
    first = Rank(0, tmp_path / "a")
    assert first.page is not None
    first.iterate(5, 5)
    page = bytearray(first.page.whole())
    again = Rank(0, tmp_path / "b", is_replacement=True)
    assert again.page is not None
    page[5 * 56 + 41] ^= 1
    for copy in (b"", bytes(page), b"\xff" * PAGE_BYTES, bytes(page[:100])):
        again.page.learn(copy)
    assert again.iterate(5, "something else")
