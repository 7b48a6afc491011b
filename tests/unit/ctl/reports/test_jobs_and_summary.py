"""What `swiftctl status` makes of the keys of a job."""

from __future__ import annotations

from typing import Any

from swift_agent.ctl.reports.jobs import jobs_in, summarize
from swift_rendezvous.codec import encode
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import (
    CoordinatorRecord,
    EventRecord,
    FailureRecord,
    GenerationRecord,
    JobRecord,
    KernelsRecord,
    NodeRecord,
    Owner,
    ResultRecord,
    ResumedRecord,
)
from swift_rendezvous.store.kv import KeyValue
from tests.support.memory_store import MemoryStore

KEYS = Keys("gpt")


def node(name: str) -> NodeRecord:
    return NodeRecord(name, f"{name}.1", f"host-{name}", 4000, 2)


def generation(number: int, mode: Any, *names: str) -> GenerationRecord:
    owners = tuple(Owner(name, f"{name}.1", f"host-{name}") for name in names)
    return GenerationRecord(number, mode, owners, 2, 0, f"because of {number}")


def summary(records: dict[str, Any]) -> dict[str, Any]:
    store = MemoryStore()
    for key, record in records.items():
        store.put(key, encode(record))
    return summarize("gpt", store.get_prefix(KEYS.prefix)[0])


ALIVE = {KEYS.node(name): node(name) for name in ("a", "b", "c")}
STARTED = {**ALIVE, KEYS.job: JobRecord(2, 2, "f", 1), KEYS.generation: generation(1, "start", "b", "a")}


def test_before_the_first_generation() -> None:
    found = summary({KEYS.node("a"): node("a"), KEYS.job: JobRecord(2, 2, "f", 1)})
    assert (found["state"], found["generation"], found["num_nodes"], found["world_size"]) == ("starting", 0, 2, None)
    assert found["nodes"] == [{"node": "a", "host": "host-a", "slot": None, "num_workers": 2}]


def test_training_with_a_spare() -> None:
    found = summary({**STARTED, KEYS.coordinator: CoordinatorRecord("b", "b.1")})
    assert (found["state"], found["generation"], found["world_size"], found["coordinator"]) == ("training", 1, 4, "b")
    assert {entry["node"]: entry["slot"] for entry in found["nodes"]} == {"a": 1, "b": 0, "c": None}
    assert found["missing_slots"] == [] and found["why"] == "because of 1"


def test_a_lost_node_is_missing() -> None:
    records = {key: value for key, value in STARTED.items() if key != KEYS.node("a")}
    records[KEYS.failure(1, 1)] = FailureRecord("node", 1, "a.1", (), "its lease ran out", "b")
    found = summary(records)
    assert found["state"] == "recovering"
    assert found["missing_slots"] == [{"slot": 1, "last_owner": "a", "host": "host-a"}]
    assert found["failures"][0]["evidence"] == "its lease ran out"


def test_a_replacement_recovers_until_all_slots_have_resumed() -> None:
    records = {**STARTED, KEYS.generation: generation(2, "replace", "b", "c")}
    assert summary(records)["state"] == "recovering"
    records[KEYS.resumed(2, 0)] = ResumedRecord(0, 7, {})
    assert summary(records)["state"] == "recovering"
    records[KEYS.resumed(2, 1)] = ResumedRecord(1, 7, {})
    assert summary(records)["state"] == "training"


def test_the_end_and_the_history() -> None:
    records = {
        KEYS.generation: generation(1, "start", "a"),
        KEYS.result: ResultRecord("stopped", "3 nodes alive, 4 needed"),
        KEYS.event(2): EventRecord(2, "replaced", "a was lost", 12.0),
        KEYS.event(1): EventRecord(1, "started", "2 nodes", 10.0),
    }
    found = summary(records)
    assert (found["state"], found["why"], found["missing_slots"]) == ("stopped", "3 nodes alive, 4 needed", [])
    assert [event["what"] for event in found["events"]] == ["started", "replaced"]


def test_a_record_that_cannot_be_read_is_shown_beside_the_others() -> None:
    records = {KEYS.generation: generation(1, "start", "a"), KEYS.event(1): EventRecord(1, "started", "2 nodes", 10.0)}
    entries = [KeyValue(key, encode(record), 5, 5, 1) for key, record in records.items()]
    garbage = {KEYS.drain("x"): b"garbage", KEYS.preload: b"\xff", KEYS.event(2): b"{}", KEYS.node("z"): b"[" * 100_000}
    found = summarize("gpt", [*entries, *(KeyValue(key, value, 6, 6, 1) for key, value in garbage.items())])
    assert found["generation"] == 1 and [event["what"] for event in found["events"]] == ["started"]
    named = {entry["record"]: entry["why"] for entry in found["damaged"]}
    assert set(named) == {"drain/x", "preload", "events/00000002", "nodes/z"}
    assert all(why.startswith("cannot be read") for why in named.values())
    assert summarize("gpt", [KeyValue(KEYS.job, b'{"v": 999}', 1, 1, 1)])["state"] == "unreadable"


def test_machines_of_several_kinds_are_told() -> None:
    assert summary(STARTED)["machines"] is None
    records = {**STARTED, KEYS.kernels: KernelsRecord(("torch 2, AVX2\n", "torch 2, AVX512"), (0, 0, 1, 1))}
    assert summary(records)["machines"] == "ranks 0, 1 with AVX2; ranks 2, 3 with AVX512"
    records[KEYS.kernels] = KernelsRecord(("torch 2",), (0, 0, 0, 0))
    assert summary(records)["machines"] is None
    # Of another size, or damaged: nothing is known.
    records[KEYS.kernels] = KernelsRecord(("torch 2", "torch 3"), (0, 1, 1))
    assert summary(records)["machines"] is None


def test_jobs() -> None:
    keys = ["/swift/b/job", "/swift/a/nodes/x", "/swift/a/job", "/elsewhere/c"]
    assert jobs_in([KeyValue(key) for key in keys]) == ["a", "b"]
