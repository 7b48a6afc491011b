"""Every record of an agent is fenced: it takes effect in its generation, from a node that is known, or not at all."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import replace

import pytest

from swift_agent.agent import transactions
from swift_agent.agent.lifecycle import commands
from swift_rendezvous.codec import decode, encode
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import (
    CoordinatorRecord,
    EventRecord,
    FinishedRecord,
    KernelsRecord,
    RateRecord,
    ResultRecord,
    ResumedRecord,
    StoreRecord,
)
from swift_rendezvous.roster.view import View, view_of_entries
from swift_rendezvous.store.kv import Put
from tests.support.memory_store import MemoryStore
from tests.support.records import failure, generation, node, view

KEYS = Keys("job")
ME = node("n0")
WRITES: dict[str, commands.Command] = {
    KEYS.tracked: commands.WriteTracked(),
    KEYS.failure(1, 1): commands.WriteFailure(1, failure("workers", 1, (0,))),
    KEYS.progress(1, 0): commands.WriteProgress(1, 0, ({"rank": 0},)),
    KEYS.resumed(1, 0): commands.WriteResumed(1, 0, 7, {"transfer": 0.5}),
    KEYS.measured(1, 0): commands.WriteMeasured(1, 0, ({"rank": 0, "iteration_s": 0.5},)),
    KEYS.finished(1, 0): commands.WriteFinished(1, FinishedRecord(0, "n0.1", {})),
    KEYS.exited(1, 0): commands.WriteExited(1, 0),
    KEYS.position(1, 0): commands.WritePosition(1, 0, 7),
    KEYS.taken(1, 0): commands.WriteTaken(1, 0),
    KEYS.parked(1, 0): commands.WriteParked(1, 0),
    KEYS.handover(1, 0): commands.WriteHandover(1, 0, ({"rank": 0},)),
}


def stored() -> tuple[MemoryStore, View]:
    """A store with a job of two nodes and the spare n2, and the view of it."""
    store = MemoryStore()
    names = ("n0", "n1", "n2")
    joined = {name: store.transaction([], [Put(KEYS.node(name), encode(node(name)))]).revision for name in names}
    number = store.transaction([], [Put(KEYS.generation, encode(generation()))]).revision
    return store, view(names=names, joined=joined, generation_revision=number)


def written(store: MemoryStore, transaction: transactions.Transaction | None) -> bool:
    assert transaction is not None
    return store.transaction(transaction.guards, transaction.ops).succeeded


@pytest.mark.parametrize("key", WRITES)
def test_a_record_is_written_in_its_generation_only(key: str) -> None:
    store, seen = stored()
    transaction = transactions.transaction_of(WRITES[key], KEYS, seen, ME)
    assert written(store, transaction) and store.get(key) is not None
    store.transaction([], [Put(KEYS.generation, encode(generation(2, "replace")))])
    assert not written(store, transaction)


@pytest.mark.parametrize("key", WRITES)
def test_a_node_that_was_given_up_writes_nothing(key: str) -> None:
    store, seen = stored()
    store.delete(KEYS.node("n0"))
    assert not written(store, transactions.transaction_of(WRITES[key], KEYS, seen, ME)) and store.get(key) is None


def test_a_spare_that_came_back_is_not_forgotten() -> None:
    store, seen = stored()
    forget = transactions.transaction_of(commands.ForgetSpare("n2", "n2.1"), KEYS, seen, ME)
    assert forget is not None and forget.lost_peer == "n2.1"
    store.delete(KEYS.node("n2"))
    store.put(KEYS.node("n2"), encode(node("n2", 2)))
    assert not written(store, forget) and store.get(KEYS.node("n2")) is not None


def test_a_coordinator_that_is_lost_before_the_first_generation_is_none_any_more() -> None:
    store, _ = stored()
    store.delete(KEYS.generation)
    store.put(KEYS.coordinator, encode(CoordinatorRecord("n2", "n2.1")))
    seen = view_of_entries(KEYS, store.get_prefix(KEYS.prefix)[0])
    forget = transactions.transaction_of(commands.ForgetSpare("n2", "n2.1"), KEYS, seen, ME)
    store.put(KEYS.coordinator, encode(CoordinatorRecord("n0", "n0.1")))
    assert not written(store, forget) and store.get(KEYS.node("n2")) is not None  # its successor stays
    seen = replace(seen, coordinator_revision=store.get(KEYS.coordinator).mod_revision)  # type: ignore[union-attr]
    assert written(store, transactions.transaction_of(commands.ForgetSpare("n2", "n2.1"), KEYS, seen, ME))
    assert store.get(KEYS.node("n2")) is None and store.get(KEYS.coordinator) is None


def test_only_the_loss_of_a_node_may_be_untrue_later() -> None:
    _, seen = stored()
    lost = {kind: transactions.transaction_of(commands.WriteFailure(1, failure(kind, 1)), KEYS, seen, ME)
            for kind in ("node", "workers", "restart")}  # fmt: skip
    assert {kind: one and one.lost_peer for kind, one in lost.items()} == {
        "node": "n1.1", "workers": None, "restart": None
    }  # fmt: skip


def test_the_first_end_of_a_job_stands() -> None:
    store, _ = stored()
    assert written(store, transactions.stop(KEYS, ME, ResultRecord("stopped", "first")))
    assert not written(store, transactions.stop(KEYS, node("n1"), ResultRecord("stopped", "second")))
    store.delete(KEYS.result)
    assert not written(
        store, transactions.stop(KEYS, node("n0", 2), ResultRecord("stopped", "of a node that is not here"))
    )


def test_what_the_first_workers_computed_with_stands() -> None:
    store, seen = stored()
    first, second = (KernelsRecord((text,), (0, 0)) for text in ("AVX2", "AVX512"))
    assert written(store, transactions.kernels(KEYS, seen, ME, first))
    assert not written(store, transactions.kernels(KEYS, seen, ME, second))
    assert written(store, transactions.kernels(KEYS, replace(seen, kernels=first), ME, second)), "of another size"
    assert not written(store, transactions.kernels(KEYS, replace(seen, kernels=first), ME, first)), "somebody else did"


def test_a_recovery_is_told_beside_the_begin_of_its_generation() -> None:
    store, seen = stored()
    store.put(KEYS.event(1), b"begin")
    seen = replace(seen, resumed={0: ResumedRecord(0, 7, {}), 1: ResumedRecord(1, 7, {})})
    assert written(store, transactions.recovered(KEYS, seen, ME, {"total": 0.25}, at_s=12.0))
    entry = store.get(KEYS.recovery(1))
    assert entry is not None
    assert [kv.value for kv in store.get_prefix(KEYS.prefix + "events/")[0]] == [b"begin", entry.value]
    event = decode(EventRecord, entry.value)
    assert (event.what, event.time_s, event.details["iteration"]) == ("recovered", 12.0, 7)


@pytest.mark.parametrize("make", [
    lambda seen: transactions.hosted_store(KEYS, seen, ME, 1, StoreRecord("h", 1)),
    lambda seen: transactions.preload(KEYS, seen, ME, ["numpy"]),
    lambda seen: transactions.kernels(KEYS, seen, ME, KernelsRecord(("AVX2",), (0, 0))),
    lambda seen: transactions.rate(KEYS, seen, ME, RateRecord(7, 2.5, 1, 12.0), {6: 11.5}, 0),
    lambda seen: transactions.notice(KEYS, seen, ME, "SIGTERM", 20.0, 12.0),
])  # fmt: skip
def test_what_is_no_command_is_fenced_as_well(make: Callable[[View], transactions.Transaction]) -> None:
    store, seen = stored()
    store.transaction([], [Put(KEYS.generation, encode(generation(2, "replace")))])
    assert not written(store, make(seen))


def test_every_command_that_writes_is_here() -> None:
    names = {type(command).__name__ for command in WRITES.values()} | {"ForgetSpare"}
    kinds = {kind.__name__ for kind in typing.get_args(commands.Command)}
    assert names == {name for name in kinds if name.startswith("Write")} | {"ForgetSpare"}
