"""While a state travels nobody waits for it in an operation of the groups, which has a timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from swift_agent.errors import PeerFailure
from swift_agent.worker.line.fence import Fence
from swift_agent.worker.rejoin import rejoin, waits
from swift_agent.worker.rejoin.rejoin import Rejoin
from swift_recovery.planning.half_done_updates import Patch
from swift_recovery.planning.plan import Plan

NUM_RANKS = 3


@pytest.fixture
def store() -> Iterator[dist.HashStore]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    yield dist.HashStore()
    dist.destroy_process_group()


class Rank:
    """Of a generation: its part of a recovery, with a state that is sent to nobody."""

    def __init__(self, rank: int, store: dist.HashStore, happened: list[tuple[str, int]]) -> None:
        self.notes: list[str] = []
        self.fence = Fence()
        self.place: Any = SimpleNamespace(rank=rank, carried=0, gradients_differ=False, status="empty", owed=None)
        self.place.put_back_arrived = lambda: None
        self.place.offer = dict
        self.place.here = SimpleNamespace(iteration=0)
        self.place.dry_iterations = 0
        self.place.take_over = lambda offer, iteration: happened.append(("has it", rank))
        supervisor = SimpleNamespace(check=self.fence.check, note=self.notes.append, interrupted=False)

        def gather(values: list[int]) -> list[list[int]]:
            happened.append(("compares", rank))
            return [values] * NUM_RANKS

        tracked = SimpleNamespace(
            checksum=lambda: 1, replicas=range(NUM_RANKS), state=None, messages=None,
            updates=SimpleNamespace(mixed=False),
        )  # fmt: skip
        made = (self.place, supervisor, SimpleNamespace(store=store, all_gather_ints=gather), tracked)
        self.rejoin = Rejoin(*cast(Any, made), torch.device("cpu"), lambda: None)


def enter(rank: Rank, plan: Plan) -> threading.Thread:
    def run() -> None:
        go: Any = SimpleNamespace(plan=plan, kept="")
        rank.rejoin._exchange_state(go)
        rank.rejoin._compare(plan)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_ranks_that_neither_send_nor_receive_wait_in_the_store(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[tuple[str, int]] = []
    is_sent = threading.Event()
    monkeypatch.setattr(rejoin, "send_state", lambda state, offer, links: is_sent.wait(20))
    monkeypatch.setattr(rejoin, "receive_state", lambda state, link, staged: is_sent.wait(20))
    monkeypatch.setattr(Rejoin, "_link", lambda self, peer: peer)
    ranks = [Rank(number, store, happened) for number in range(NUM_RANKS)]
    threads = [enter(rank, Plan("copy", "", sources={1: 0})) for rank in ranks]
    threads[2].join(0.3)
    assert not happened
    is_sent.set()
    for thread in threads:
        thread.join(20)
    assert happened[0] == ("has it", 1) and sorted(happened[1:]) == [("compares", rank) for rank in range(NUM_RANKS)]


def test_who_gets_a_state_from_a_rank_that_loads_it_waits_in_the_store(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[tuple[str, int]] = []
    is_loaded = threading.Event()
    monkeypatch.setattr(rejoin.node_file, "load", lambda *what: is_loaded.wait(20))
    monkeypatch.setattr(rejoin, "send_state", lambda state, offer, links: None)
    monkeypatch.setattr(rejoin, "receive_state", lambda state, peer, staged: happened.append(("receives", peer)))
    monkeypatch.setattr(Rejoin, "_link", lambda self, peer: peer)
    ranks = [Rank(number, store, happened) for number in range(NUM_RANKS)]
    threads = [enter(rank, Plan("copy", "", loads=(0,), sources={1: 0, 2: 0})) for rank in ranks]
    threads[1].join(0.3)
    assert not happened
    is_loaded.set()
    for thread in threads:
        thread.join(20)
    assert happened[0] == ("has it", 0) and happened.count(("receives", 0)) == 2


def test_nobody_waits_where_nothing_is_sent(store: dist.HashStore) -> None:
    happened: list[tuple[str, int]] = []
    Rank(2, store, happened).rejoin._compare(Plan("copy", ""))
    assert happened == [("compares", 2)] and store.num_keys() == 0


def test_a_receiver_that_dies_is_not_waited_for(store: dist.HashStore) -> None:
    """Its agent reports it, and the next generation has another store."""
    happened: list[tuple[str, int]] = []
    rank = Rank(2, store, happened)
    threading.Timer(0.2, setattr, (rank.fence, "interrupted", True)).start()
    with pytest.raises(PeerFailure):
        rank.rejoin._compare(Plan("copy", "", sources={1: 0}))
    assert not happened


def test_one_rank_says_for_whom_all_others_wait(store: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "TELL_S", 0.0)
    ranks = [Rank(number, store, []) for number in (0, 2)]
    store.set("received/2", "")
    for rank in ranks:
        threading.Timer(0.1, setattr, (rank.fence, "interrupted", True)).start()
        with pytest.raises(PeerFailure):
            rank.rejoin._waits.wait_for("received", (1, 2), "have not got their state yet")
    assert set(ranks[0].notes) == {"others wait for ranks that have not got their state yet: 1"} and not ranks[1].notes


def test_a_short_wait_costs_a_recovery_milliseconds(store: dist.HashStore) -> None:
    happened: list[tuple[str, int]] = []
    store.set("received/1", "")
    rank = Rank(2, store, happened)
    began_s = time.monotonic()
    for _ in range(20):
        rank.rejoin._compare(Plan("copy", "", sources={1: 0}))
    assert (time.monotonic() - began_s) / 20 < 5e-3


def test_receivers_are_all_to_whom_something_comes() -> None:
    patches = (Patch((0,), 4, (5, 6)),)
    plan = Plan("copy", "", sources={1: 0}, handovers=(2,), loads=(3,), patches=patches)
    assert plan.brought == {2, 3} and plan.receivers == {1, 2, 3, 5, 6}
