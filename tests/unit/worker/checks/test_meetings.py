"""Ranks meet before a collective between iterations, or it is told that they never will. Real stores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from swift_agent.wire.store_client import StoreClient
from swift_agent.wire.store_server import StoreServer
from swift_agent.worker.checks.meetings import Meetings


@pytest.fixture
def server() -> Iterator[StoreServer]:
    one = StoreServer("127.0.0.1", token=b"secret")
    try:
        yield one
    finally:
        one.close()


class Rank:
    def __init__(self, server: StoreServer, rank: int, iteration: int) -> None:
        self.place: Any = SimpleNamespace(rank=rank, here=SimpleNamespace(iteration=iteration), inside="")
        nobody: Any = None
        self.meetings = Meetings(self.place, nobody, nobody)
        self.store = StoreClient("127.0.0.1", server.port, b"secret")
        self.said: list[str] = []
        self.thread: threading.Thread | None = None

    def comes(self, generation: int = 2, what: str = "all_reduce", *, waits: bool = True) -> None:
        def run() -> None:
            try:
                where = f"main, train.py:{self.place.rank}"
                self.said.append(self.meetings.come(self.store, generation, what, where, waits=waits))
            except dist.DistStoreError:
                self.said.append("cut")

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def waits(self) -> bool:
        assert self.thread is not None
        self.thread.join(0.2)
        return self.thread.is_alive()

    def ends(self) -> str:
        assert self.thread is not None
        self.thread.join(10)
        return self.said.pop()

    def looks(self, generation: int = 2) -> str:
        other = self.store.clone()
        try:
            return self.meetings.passed(other, generation, "train, train.py:9")
        finally:
            other.close()


@pytest.fixture
def ranks(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    both = [Rank(server, 0, 20), Rank(server, 1, 20)]
    yield both
    for one in both:
        one.store.close()


def test_all_come_to_the_same_again_and_again(ranks: list[Rank]) -> None:
    for iteration in (20, 20, 25):
        for rank in ranks:
            rank.place.here.iteration = iteration
        ranks[0].comes()
        assert ranks[0].waits()
        ranks[1].comes()
        assert [rank.ends() for rank in ranks] == ["", ""]
        for rank in ranks:
            rank.place.inside = "iteration"
            assert rank.looks() == ""
            rank.place.inside = ""


@pytest.mark.parametrize("later", [(21, "all_reduce"), (20, "all_gather")], ids=["iteration", "operation"])
def test_two_that_differ_are_told_at_once(later: tuple[int, str], ranks: list[Rank]) -> None:
    ranks[0].comes()
    assert ranks[0].waits()
    ranks[1].place.here.iteration = later[0]
    ranks[1].comes(what=later[1])
    said = ranks[1].ends()
    assert "rank 0 is in all_reduce (main, train.py:0) after 20 iterations" in said, said
    assert f"rank 1 in {later[1]} (main, train.py:1) after {later[0]}" in said, said
    ranks[0].store.cut()
    assert ranks[0].ends() == "cut"


def test_who_has_left_it_out_is_told_and_who_is_yet_to_come_is_not(ranks: list[Rank]) -> None:
    ranks[0].comes()
    assert ranks[0].waits()
    ranks[1].place.inside, ranks[1].place.here.iteration = "iteration", 19
    assert ranks[1].looks() == ""  # the twentieth: what rank 0 waits in comes after it
    ranks[1].place.here.iteration = 20
    said = ranks[1].looks()
    assert "rank 0 is in all_reduce (main, train.py:0) after 20 iterations" in said, said
    assert "rank 1 has left that out, and is in iteration 20 (train, train.py:9)" in said, said
    ranks[1].place.inside = ""  # about to come
    assert ranks[1].looks() == ""
    ranks[0].store.cut()
    assert ranks[0].ends() == "cut"


def test_one_that_not_all_wait_in_is_told_and_holds_up_nobody(ranks: list[Rank]) -> None:
    ranks[0].comes(what="broadcast", waits=False)
    assert ranks[0].ends() == ""
    ranks[1].comes(what="broadcast", waits=False)
    assert ranks[1].ends() == ""
    ranks[0].comes(what="broadcast", waits=False)
    assert ranks[0].ends() == ""
    ranks[1].comes()
    assert "rank 0 is in broadcast (main, train.py:0) after 20 iterations, rank 1 in all_reduce" in ranks[1].ends()


def test_who_has_met_the_others_while_it_was_looked_has_left_out_nothing(ranks: list[Rank]) -> None:
    """It goes on into the next iteration between two questions of the thread that looks."""
    ranks[0].comes()
    assert ranks[0].waits()
    place, ask = ranks[1].place, ranks[1].store

    class Slow:
        """Of the thread that looks: when it has its answer, the script has gone on."""

        def check(self, keys: list[str]) -> bool:
            return ask.check(keys)

        def get(self, key: str) -> bytes:
            answer = ask.get(key)
            ranks[1].comes()
            assert ranks[1].ends() == ""
            place.inside = "iteration"
            return answer

    slow: Any = Slow()
    assert ranks[1].meetings.passed(slow, 2, "train, train.py:9") == ""
    assert place.inside == "iteration" and ranks[0].ends() == ""


def test_what_is_only_said_is_told_too_if_it_differs(ranks: list[Rank]) -> None:
    for number in range(1, 12):
        for rank in ranks:
            rank.comes()
        assert [rank.ends() for rank in ranks] == ["", ""], number
    ranks[1].place.here.iteration = 21
    ranks[0].comes()
    assert ranks[0].ends() == ""  # the twelfth
    ranks[1].comes()
    assert "rank 1 in all_reduce (main, train.py:1) after 21" in ranks[1].ends()


def test_each_generation_counts_again(ranks: list[Rank], server: StoreServer) -> None:
    for rank in ranks:
        rank.comes()
    assert [rank.ends() for rank in ranks] == ["", ""]
    other = StoreServer("127.0.0.1", token=b"secret")
    try:
        for rank in ranks:
            rank.store.close()
            rank.store = StoreClient("127.0.0.1", other.port, b"secret")
            rank.comes(generation=3)
        assert [rank.ends() for rank in ranks] == ["", ""]
    finally:
        other.close()


def test_most_of_a_long_run_is_free(ranks: list[Rank]) -> None:
    """All meet at the first eight and then at 16, 32, 64; nobody waits for anybody at the others."""
    for number in range(1, 65):
        ranks[0].comes()
        if number <= 8 or number in (16, 32, 64):
            assert number not in (1, 8, 16, 64) or ranks[0].waits()
            ranks[1].comes()
            assert ranks[1].ends() == ""
            assert ranks[0].ends() == ""
        else:
            assert ranks[0].ends() == ""
            ranks[1].comes()
            assert ranks[1].ends() == ""
