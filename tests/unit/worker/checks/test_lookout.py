"""A rank says where it stands once it stands still, and nothing while it moves or is in a recovery."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.autograd.graph
import torch.distributed as dist
import torch.distributed.checkpoint.filesystem
import torch.distributed.distributed_c10d

import swift_agent.worker.loop.outside
from swift_agent.wire.store_client import StoreClient
from swift_agent.wire.store_server import StoreServer
from swift_agent.worker.checks import lookout
from swift_agent.worker.checks.lookout import STILL_S, Lookout
from swift_agent.worker.checks.meetings import Meetings
from swift_agent.worker.tracked.position import Position


class Rank:
    def __init__(self, rank: int, server: StoreServer) -> None:
        self.place: Any = SimpleNamespace(rank=rank, here=Position(3), inside="", replays=False, target=None)
        self.notes: list[str] = []
        self.supervisor: Any = SimpleNamespace(
            generation=1, interrupted=False, pausing=False, note=self.notes.append
        )  # fmt: skip
        groups: Any = SimpleNamespace(store=StoreClient("127.0.0.1", server.port))
        self.store, self.ended = groups.store, list[str]()
        self.lookout = Lookout(self.place, self.supervisor, groups, self.ended.append)

    @property
    def said(self) -> dict[str, Any]:
        key = f"standing/{self.place.rank}"
        return json.loads(self.store.get(key) or "{}") if self.store.check([key]) else {}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    monkeypatch.setattr(lookout.dist, "get_world_size", lambda: 2)
    server = StoreServer("127.0.0.1")
    made = [Rank(rank, server) for rank in range(2)]
    yield made
    for one in made:
        one.store.close()
    server.close()


def look(ranks: list[Rank], at_s: float) -> None:
    for one in reversed(ranks):
        one.lookout._look(at_s)


def test_who_moves_says_nothing(ranks: list[Rank]) -> None:
    for step in range(8):
        ranks[0].place.here.iteration = step
        look(ranks[:1], step * STILL_S)
    assert not ranks[0].said
    look(ranks[:1], 7.5 * STILL_S)
    assert not ranks[0].said
    look(ranks[:1], 8.5 * STILL_S)
    assert ranks[0].said["iterations"] == 7 and ranks[0].said["doing"] == "works"  # it is in no collective
    ranks[0].place.here.iteration = 8
    look(ranks[:1], 9 * STILL_S)
    assert not ranks[0].said


@pytest.mark.parametrize("how", ["recovery", "stopped", "replays"])
def test_a_wait_in_a_recovery_is_none_of_the_scripts(how: str, ranks: list[Rank]) -> None:
    """A large state takes its time, and ranks that take part in it stand in different places."""
    for one in ranks:
        if how == "recovery":
            one.lookout.is_aside = True
        elif how == "stopped":
            one.supervisor.interrupted = True
        else:
            one.place.replays = True
    ranks[0].lookout.at_end = True
    for step in range(6):
        look(ranks, step * STILL_S)
    assert not any(one.said or one.ended for one in ranks)


def test_who_waits_for_a_rank_that_has_ended_is_ended(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    ended, waiting = ranks
    ended.lookout.at_end = True
    waiting.place.inside = "iteration"
    for step in range(8):
        look(ranks, step * STILL_S)
    assert not ended.ended and ended.said["inside"] == "end"  # the other one works
    monkeypatch.setattr(waiting.lookout, "_doing", lambda: (True, "train, train.py:3"))
    for step in range(8, 12):
        look(ranks, step * STILL_S)
    assert ended.lookout._is_over.is_set()
    assert ended.ended[:1] == [
        "nobody can go on: rank 0 has come to the end of the run after 3 iterations; rank 1 waits for others in "
        "iteration 3 (train, train.py:3)"
    ]


@pytest.mark.parametrize(
    ("module", "inside", "expected"),
    [
        (torch.distributed.distributed_c10d, "", True),
        (torch.distributed.distributed_c10d, "section", True),
        (swift_agent.worker.loop.outside, "section", True),  # a barrier, which is a section of its own
        (torch.distributed.checkpoint.filesystem, "", False),  # a save by one rank, whose disk is slow
        (torch.distributed.checkpoint.filesystem, "section", False),
        (torch.autograd.graph, "", False),  # one rank evaluates alone, on a GPU
        (torch.autograd.graph, "iteration", True),  # DDP reduces there
    ],
)
def test_who_is_alone_in_torch_works(module: ModuleType, inside: str, expected: bool, ranks: list[Rank]) -> None:
    """It uses no processor time, as who waits for others does not."""
    gate = threading.Lock()
    code = compile("with gate: pass", str(module.__file__), "exec")
    with gate:
        script = threading.Thread(target=exec, args=(code, {"gate": gate}))
        script.start()
        one = ranks[0]
        assert script.ident is not None
        one.lookout._script, one.place.inside = script.ident, inside
        deadline_s = time.monotonic() + 10.0
        while sys._current_frames()[one.lookout._script].f_code is not code:
            assert time.monotonic() < deadline_s
        assert one.lookout._doing()[0] is expected
    script.join()


def test_who_waits_for_others_before_a_collective_waits(ranks: list[Rank]) -> None:
    """By the store: whoever goes into a section instead would be waited for without a word."""
    one = ranks[0]
    meetings = Meetings(one.place, one.supervisor, SimpleNamespace(store=one.store))  # type: ignore[arg-type]
    one.place.is_before_epoch = False

    def meet() -> None:
        with contextlib.suppress(dist.DistStoreError):
            meetings.meet(lambda: "all_reduce", lambda: "main, train.py:3", waits=True)

    script = threading.Thread(target=meet)
    script.start()
    assert script.ident is not None
    one.lookout._script = script.ident
    deadline_s = time.monotonic() + 10.0
    while not one.lookout._doing()[0]:
        assert script.is_alive() and time.monotonic() < deadline_s
    one.store.cut()
    script.join()


def test_a_lookout_that_ends_says_so(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or cannot begin: training goes on without it."""
    one, other = ranks
    monkeypatch.setattr(lookout, "PERIOD_S", 0.01)
    one.lookout._look = lambda now_s: 1 / 0  # type: ignore[method-assign]
    one.lookout.start()
    deadline_s = time.monotonic() + 10
    while not one.notes:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert "nobody looks any more" in one.notes[0] and "swift-lookout has ended by ZeroDivisionError" in one.notes[0]

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    other.lookout.start()
    assert "nobody looks any more" in other.notes[0]
