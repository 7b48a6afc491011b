"""What ranks compute with: told by all to all, compared with each other and with what came before."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from swift_agent.wire import messages as wire
from swift_agent.wire.environment import WorkerEnvironment
from swift_agent.worker.replicas import kernels

AVX2, AVX512, ARM = "torch 2.13, 1 threads, AVX2, EPYC", "torch 2.13, 1 threads, AVX512, Xeon", "torch 2.13, 4 threads"


class Store:
    """Of one process, for threads. *cut*: the generation is over."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self.asked: list[str] = []
        self.cut = False

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            self.asked += keys
            if not self._changed.wait_for(lambda: self._values.keys() >= set(keys), timeout.total_seconds()):
                raise dist.DistStoreError("wait timeout")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._values[key].encode() for key in keys]

    def add(self, key: str, amount: int) -> int:
        if self.cut:
            raise dist.DistStoreError("the store was cut")
        with self._changed:
            self._values[key] = str(int(self._values.get(key, "0")) + amount)
            return int(self._values[key])


def said_by(texts: list[str], store: Store) -> list[wire.Kernels | None]:
    """What each of these ranks has found out, all at once."""
    checksums = [kernels.checksum(text) for text in texts]
    found: dict[int, wire.Kernels | None] = {}

    def find(rank: int) -> None:
        found[rank] = kernels.told_by_all(store, rank, texts[rank], checksums)  # type: ignore[arg-type]

    threads = [threading.Thread(target=find, args=(rank,)) for rank in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [found[rank] for rank in range(len(texts))]


def test_ranks_that_compute_alike_ask_the_store_for_nothing() -> None:
    store = Store()
    assert said_by([AVX2] * 4, store) == [wire.Kernels((AVX2,), (0, 0, 0, 0))] * 4
    assert not store.asked and not store._values
    assert kernels.difference_of_ranks(wire.Kernels((AVX2,), (0, 0, 0, 0))) == ""


def test_all_ranks_know_of_all_kinds() -> None:
    said = said_by([AVX2, AVX512, AVX512, AVX2, ARM], Store())
    assert said == [wire.Kernels((AVX2, AVX512, ARM), (0, 1, 1, 0, 2))] * 5


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (wire.Kernels((AVX2, AVX512), (0, 1, 1, 0)), "ranks 0, 3 with AVX2, EPYC; ranks 1, 2 with AVX512, Xeon. "),
        (wire.Kernels((AVX2, AVX512, ARM), (0, 1, 2)),
         "rank 0 with 1 threads, AVX2, EPYC; rank 1 with 1 threads, AVX512, Xeon; rank 2 with 4 threads. "),
    ],
)  # fmt: skip
def test_what_differs_is_named_with_its_ranks_and_nothing_else(said: wire.Kernels, named: str) -> None:
    told = kernels.difference_of_ranks(said)
    assert told.startswith(f"not all ranks compute alike: {named}") and "torch" not in told
    assert told.endswith("machines of one kind (see Reproducibility)")


def test_a_rank_that_says_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost, or stands still: then it is not known what all compute with."""
    monkeypatch.setattr(kernels, "PATIENCE", timedelta(seconds=0.1))
    checksums = [kernels.checksum(text) for text in (AVX2, AVX512)]
    assert kernels.told_by_all(Store(), 0, AVX2, checksums) is None  # type: ignore[arg-type]


def test_a_replacement_tells_of_its_machine_though_others_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows what its predecessor had."""
    monkeypatch.setattr(kernels, "PATIENCE", timedelta(seconds=0.1))
    new = Rank(1, AVX2, before=AVX512)
    new.kernels.compare(Store(), [kernels.checksum(AVX512), new.kernels.checksum])  # type: ignore[arg-type]
    assert len(new.notes) == 1 and not new.sent


class Rank:
    def __init__(self, rank: int, mine: str, before: str = "", node: int = 0, number: int = 0) -> None:
        self.notes: list[str] = []
        self.sent: list[wire.Kernels] = []
        told = WorkerEnvironment(rank=rank, number=number, node=node, computed=before)
        supervisor: Any = SimpleNamespace(note=self.notes.append, send=self.sent.append)
        self.kernels = kernels.Kernels(told, mine, supervisor)


def enter(ranks: list[Rank], store: Store) -> None:
    """A generation, all of them."""
    checksums = [rank.kernels.checksum for rank in ranks]
    threads = [threading.Thread(target=rank.kernels.compare, args=(store, checksums)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)


def test_rank_0_tells_the_first_time_and_one_worker_of_each_node_its_agent() -> None:
    ranks = [Rank(0, AVX2), Rank(1, AVX512, number=1), Rank(2, AVX2, node=1)]
    for _ in range(2):
        enter(ranks, Store())
    (said,) = ranks[0].notes
    assert said.startswith("not all ranks compute alike: ranks 0, 2 with AVX2, EPYC; rank 1 with AVX512, Xeon. A rank ")
    assert not ranks[1].notes and not ranks[2].notes
    known = wire.Kernels((AVX2, AVX512), (0, 1, 0))
    assert [rank.sent for rank in ranks] == [[known] * 2, [], [known] * 2]


def test_a_replacement_tells_what_its_predecessor_had_and_it_has_not() -> None:
    """Rank 0, which was there before, has told already, or says nothing now: one line for one fact."""
    there = Rank(0, AVX512)
    enter([there, Rank(1, AVX512, node=1)], Store())
    new = Rank(1, AVX2, before=AVX512, node=1)
    for _ in range(2):
        enter([there, new], Store())
    (said,) = new.notes
    assert "computes with AVX2, EPYC, that on which this rank began with AVX512, Xeon: the result may be" in said
    assert there.notes == []
    same = Rank(1, AVX512, before=AVX512, node=1)
    enter([there, same], Store())
    assert same.notes == there.notes == []


def test_one_of_those_that_come_to_a_node_tells_of_it() -> None:
    ranks = [Rank(0, AVX512, AVX512)]
    ranks += [Rank(1 + number, AVX2, AVX512, node, number) for number, node in enumerate((1, 1, 2))]
    enter(ranks, Store())
    assert [len(rank.notes) for rank in ranks] in ([0, 1, 0, 1], [0, 0, 1, 1])
    # What is said twice is better than what is not said.
    store = Store()
    store.cut = True
    ranks = [Rank(0, AVX512, AVX512), *(Rank(1 + number, AVX2, AVX512, 1, number) for number in range(2))]
    enter(ranks, store)
    assert [len(rank.notes) for rank in ranks] == [0, 1, 1]


def test_ranks_that_have_not_heard_of_each_other_at_the_start_do_when_they_recover() -> None:
    """The first time was cut: nobody knows what the lost one computed with."""
    ranks = [Rank(0, AVX512), Rank(1, AVX2, node=1)]
    enter(ranks, Store())
    assert len(ranks[0].notes) == 1 and not ranks[1].notes


def test_what_is_missing_is_named() -> None:
    told = kernels.difference_to_predecessor("torch 2.13", "torch 2.13, MKL_CBWR=AVX2")
    assert "computes with no MKL_CBWR, that on which this rank began with MKL_CBWR=AVX2" in told


def test_what_a_replacement_finds_to_be_otherwise_may_come_from_its_machine() -> None:
    assert Rank(1, AVX2, before=AVX512).kernels.may_be_why.startswith(". This machine computes otherwise than that of ")
    assert Rank(1, AVX2, before=AVX2).kernels.may_be_why == Rank(1, AVX2).kernels.may_be_why == ""
