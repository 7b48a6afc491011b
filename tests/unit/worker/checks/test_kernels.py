"""What ranks compute with: told by all to all, compared with each other and with what came before."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from swift_agent.wire import messages as wire
from swift_agent.wire.environment import ENV_COMPUTED, ENV_LOCAL_RANK
from swift_agent.worker.checks import kernels

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

    def get(self, key: str) -> bytes:
        with self._changed:
            self.asked.append(key)
            assert self._changed.wait_for(lambda: key in self._values, 10)
            return self._values[key].encode()

    def add(self, key: str, amount: int) -> int:
        if self.cut:
            raise dist.DistStoreError("the store was cut")
        with self._changed:
            self._values[key] = str(int(self._values.get(key, "0")) + amount)
            return int(self._values[key])


def said_by(texts: list[str], store: Store) -> list[wire.Kernels]:
    """What each of these ranks has found out, all at once."""
    checksums = [kernels.checksum(text) for text in texts]
    found: dict[int, wire.Kernels] = {}

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


def test_one_of_those_that_come_to_a_node_tells_of_it() -> None:
    store = Store()
    on = [{ENV_COMPUTED: AVX512, "GROUP_RANK": node} for node in ("1", "1", "2")]
    told = [kernels.tell_difference(store, AVX2, environment) for environment in on]  # type: ignore[arg-type]
    assert "computes with AVX2, EPYC, that on which this rank began with AVX512, Xeon: " in told[0]
    assert told == [told[0], "", told[0]]
    # What is said twice is better than what is not said.
    store.cut = True
    assert kernels.tell_difference(store, AVX2, on[0]) == told[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [{}, {ENV_COMPUTED: ""}, {ENV_COMPUTED: AVX2}])
def test_nothing_is_told_of_what_is_the_same_or_not_known(before: dict[str, str]) -> None:
    store = Store()
    environment = {**before, "GROUP_RANK": "1"}
    assert kernels.tell_difference(store, AVX2, environment) == ""  # type: ignore[arg-type]
    assert not store._values


def test_a_text_without_parts_of_its_own_is_told_whole() -> None:
    told = kernels.difference_to_predecessor("torch 2.13", "torch 2.13, MKL_CBWR=AVX2")
    assert "computes with torch 2.13, that on which this rank began with MKL_CBWR=AVX2" in told


def test_one_worker_of_each_node_speaks_for_all() -> None:
    assert [kernels.says_for_its_node({ENV_LOCAL_RANK: str(local)}) for local in range(3)] == [True, False, False]
