"""Which jobs are left over, what removes them, and how a watched job is followed. (`summarize` is in test_ctl.)"""

from __future__ import annotations

import json
from typing import Any

import pytest

from swift_agent.ctl.reports import jobs
from swift_rendezvous.codec import encode
from swift_rendezvous.node.registration import enter_job, leave_job
from swift_rendezvous.roster import keys as keys_module
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import EventRecord, GenerationRecord, JobRecord, Owner, ResultRecord
from swift_rendezvous.store.kv import Event, KeyValue, WatchResponse
from tests.support import records
from tests.support.memory_store import MemoryStore

JOB = JobRecord(2, 2, "command", 1)


def store_with(**names: bool) -> MemoryStore:
    """Jobs by name; true: a node is in it. The node went without cleaning up otherwise, as when it is killed."""
    store = MemoryStore()
    for name, alive in names.items():
        entry = enter_job(store, Keys(name), JOB, records.node("n0"), 5)
        store.put(Keys(name).event(1), encode(EventRecord(1, "generation (start)", "all there", 12.0)))
        if not alive:
            entry.lease.revoke()
    return store


def remove(store: MemoryStore, leftover: jobs.Leftover) -> bool:
    return store.transaction(*jobs.removal(leftover)).succeeded


def listing(store: MemoryStore) -> list[KeyValue]:
    return store.get_prefix(keys_module.ROOT)[0]


def test_only_jobs_without_a_node_are_left_over() -> None:
    store = store_with(dead=False, living=True)
    store.put(f"{keys_module.ROOT}{jobs.PROBE_ID}/x", b"1")
    found = jobs.leftovers(listing(store))
    assert [(one.job_id, one.state, one.num_records, one.last_event_s) for one in found] == [
        ("dead", "abandoned", 2, 12.0)
    ]
    assert remove(store, found[0])
    assert jobs.jobs_in(listing(store)) == ["living"]


def test_a_node_that_enters_meanwhile_saves_its_job() -> None:
    store = store_with(gpt=False)
    found = jobs.leftovers(listing(store))[0]
    entry = enter_job(store, Keys("gpt"), JOB, records.node("n1"), 5)
    assert not remove(store, found) and store.get(Keys("gpt").node("n1")) is not None
    # Another job has this id now; the listing of the former must not remove what is left of it, either.
    leave_job(store, Keys("gpt"), records.node("n1"), entry.lease)
    enter_job(store, Keys("gpt"), JOB, records.node("n2"), 5).lease.revoke()
    assert not remove(store, found)


def test_records_without_a_job_are_left_over_until_a_job_comes() -> None:
    store = MemoryStore()
    store.put(Keys("gpt").event(3), encode(EventRecord(3, "recovered", "late", 1.0)))
    found = jobs.leftovers(listing(store))[0]
    assert found.job_revision == 0
    enter_job(store, Keys("gpt"), JOB, records.node("n0"), 5)
    assert not remove(store, found)


def test_a_job_of_another_version_is_listed_and_can_be_removed() -> None:
    store = store_with(gpt=True)
    store.put(Keys("old").job, b'{"v": 999}')
    assert [(job["job"], job["state"]) for job in jobs.summarize_all(listing(store))] == [
        ("gpt", "starting"), ("old", "unreadable"),
    ]
    found = jobs.leftovers(listing(store))
    assert [one.state for one in found] == ["unreadable"] and remove(store, found[0])


def test_a_watched_job_is_followed_to_its_end() -> None:
    keys = Keys("gpt")
    put = KeyValue(keys.job, encode(JOB), 1, 1, 1)
    entries = jobs.follow({}, WatchResponse(1, (Event("put", put),)))
    assert entries == {keys.job: put} and not jobs.has_ended("gpt", entries)
    result = KeyValue(keys.result, encode(ResultRecord("stopped", "enough")), 2, 2, 1)
    assert jobs.has_ended("gpt", jobs.follow(entries, WatchResponse(2, (Event("put", result),))))
    gone = jobs.follow(entries, WatchResponse(2, (Event("delete", KeyValue(keys.job, mod_revision=2)),)))
    assert gone == {} and jobs.has_ended("gpt", gone)


@pytest.mark.parametrize(
    ("events", "iteration"),
    [
        ({}, None),
        ({2: 7}, 7),
        ({2: 7, 3: 9}, 9),
        ({1: 40, 2: None}, None),  # before the restart of all workers: another count
    ],
)
def test_iteration(events: dict[int, int | None], iteration: int | None) -> None:
    keys, store = Keys("gpt"), MemoryStore()
    owners = (Owner("n0", "n0.1", "host"),)
    store.put(keys.generation, encode(GenerationRecord(3, "replace", owners, 2, 0, "why", epoch=2)))
    for number, value in events.items():
        details: dict[str, Any] = {} if value is None else {"iteration": value}
        store.put(keys.event(number), encode(EventRecord(number, "recovered", "why", 1.0, details)))
    store.put(keys.node("n0"), encode(records.node("n0")))
    found = jobs.summarize("gpt", listing(store))
    assert found["iteration"] == iteration
    assert "secret" not in json.dumps(found)
