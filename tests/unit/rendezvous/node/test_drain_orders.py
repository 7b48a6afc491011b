"""Orders of people and of a scheduler beside each other, and what changes between a look at the job and the write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swift_rendezvous.codec import decode, encode
from swift_rendezvous.node import drain_orders
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import DrainRecord, ResultRecord
from swift_rendezvous.roster.view import View, view_of_entries
from tests.support.memory_store import MemoryStore
from tests.support.records import generation, node, owner

KEYS = Keys("job")
PERSON = DrainRecord("n0", "n0.1", "a person", 1.0)
SIGNAL = DrainRecord("n0", "n0.1", "it got SIGTERM", 1.0, "SIGTERM", 20.0)
SLURM = DrainRecord("n0", "n0.1", "drained in Slurm", 2.0, ordered_by="slurm")


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    store.put(KEYS.generation, encode(generation()))
    for name in ("n0", "n1"):
        store.put(KEYS.node(name), encode(node(name)))
    return store


def seen(store: MemoryStore) -> View:
    return view_of_entries(KEYS, store.get_prefix(KEYS.prefix)[0])


def stored(store: MemoryStore) -> DrainRecord | None:
    found = store.get(KEYS.drain("n0"))
    return decode(DrainRecord, found.value) if found else None


@pytest.mark.parametrize("drain", [PERSON, SLURM])
def test_an_order_is_written_once_and_taken_back(drain: DrainRecord, store: MemoryStore) -> None:
    assert drain_orders.order(store, KEYS, seen(store), drain) and stored(store) == drain
    assert not drain_orders.order(store, KEYS, seen(store), replace(drain, why="again")) and stored(store) == drain
    assert drain_orders.take_back(store, KEYS, seen(store), "n0") and stored(store) is None


@pytest.mark.parametrize("drain", [PERSON, SLURM])
@pytest.mark.parametrize("what", ["the node came back", "the node has gone", "the job has ended"])
def test_the_job_has_changed_before_an_order(what: str, drain: DrainRecord, store: MemoryStore) -> None:
    before = seen(store)
    if what == "the job has ended":
        store.put(KEYS.result, encode(ResultRecord("succeeded", "")))
    else:
        store.delete(KEYS.node("n0"))
    if what == "the node came back":
        store.put(KEYS.node("n0"), encode(node("n0", 2)))
    assert not drain_orders.order(store, KEYS, before, drain) and stored(store) is None


@pytest.mark.parametrize("first", [PERSON, SIGNAL])
def test_an_order_of_slurm_takes_the_place_of_none(first: DrainRecord, store: MemoryStore) -> None:
    """Else it would be taken back with Slurm's state. Also where the other one came a moment ago."""
    before = seen(store)
    store.put(KEYS.drain("n0"), encode(first))
    for view in (before, seen(store)):
        assert not drain_orders.order(store, KEYS, view, SLURM) and stored(store) == first


def test_an_order_of_a_person_takes_the_place_of_slurms(store: MemoryStore) -> None:
    drain_orders.order(store, KEYS, seen(store), SLURM)
    assert drain_orders.order(store, KEYS, seen(store), PERSON) and stored(store) == PERSON


def test_the_job_has_changed_before_an_order_is_taken_back(store: MemoryStore) -> None:
    drain_orders.order(store, KEYS, seen(store), SLURM)
    before = seen(store)
    drain_orders.order(store, KEYS, before, PERSON)
    assert not drain_orders.take_back(store, KEYS, before, "n0") and stored(store) == PERSON
    before = seen(store)
    moved = generation(2, "replace", ("n2", "n1"), lost={0: (0, 1)}, handover={0: owner("n0")})
    store.put(KEYS.generation, encode(moved))
    for view in (before, seen(store)):
        assert not drain_orders.take_back(store, KEYS, view, "n0") and stored(store) == PERSON
