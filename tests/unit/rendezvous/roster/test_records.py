"""Keys and records: what is written is read back; what was not written by us is refused by name, never half read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_rendezvous import codec
from swift_rendezvous.roster import keys as keys_module
from swift_rendezvous.roster import records as k
from tests.support.records import failure, generation, node, owner

RECORDS: list[Any] = [
    node("n0"),
    k.JobRecord(4, 8, "command", 3),
    owner("n0"),
    k.WorkerExit(3, 1, 77, -9, "h", "Traceback ü", 12),
    generation(3, "replace", epoch=2, lost={1: (0, 1)}, num_restarts=2, handover={1: owner("n2")}),
    failure("workers", 1, (0, 1)),
    k.ProgressRecord(1, "n1.1", ({"rank": 2, "status": "holding", "replicas": [0, 2]}, {"nested": {"a": [None]}})),
    k.PlanRecord(2, {"kind": "copy", "sources": {"2": 0}}, "why", restart=True),
    k.ResumedRecord(0, 18, {"regroup": 0.25, "verify": 1.0}),
    k.FinishedRecord(0, "n0.1", {0: {"iteration": 5, "checksum": "ff"}, 11: {}}),
    k.ExitedRecord(1, "n1.1"),
    k.ResultRecord("failed", "why", (k.WorkerExit(0, 0, 1, 1, "h"),), "advice"),
    k.WorkerExit(3, 1, 77, 1, "h", "m", 12, "e", "ValueError at a.py:3", 4, 20, True, 7, True),
    k.Setback(4, "killed", "ValueError at a.py:3", 20, 7, True, True),
    k.Trouble(3, (k.Setback(4, "killed"),), "a restart", 12, 2),
    k.DrainRecord("n0", "n0.1", "maintenance", 1.5),
    k.PauseRecord(7),
    k.PauseRecord(),
    k.PositionRecord(1, "n1.1", 7),
    k.ParkedRecord(1, "n1.1"),
    k.TakenRecord(1, "n1.1"),
    k.RateRecord(12, 3.5, 2, 1.5),
    k.RateRecord(12, None, 2, 1.5, {10: 1.25, 11: 1.375}),
    k.MeasuredRecord(1, "n1.1", ({"rank": 2, "iteration_s": 0.5, "sent_bytes": {"1": 4}},)),
    k.ProfileRecord({"machines": [{"computation_s": 1.5}]}, ("measured: ü", "  log: taken"), "log", ((0, 1), (2,))),
    k.JobRecord(4, 8, "command", 3, log_groups=((0, 1), (2, 3)), log_budget="20%", strategy="log"),
    k.ProfileRecord({}, (), "log+parallel", helpers=((1, 3), ())),
    k.JobRecord(4, 8, "command", 3, strategy="log+parallel", helpers=k.AS_MANY_AS_PAY),
    k.Helper(3, 1, "n2", "n2.1"),
    dataclasses.replace(generation(3, "replace", lost={1: (1,)}), helpers=(k.Helper(3, 1, "n2", "n2.1"),) * 2),
    k.KernelsRecord(("torch 2.13.0, AVX2", "torch 2.13.0, AVX512"), (0, 1)),
    k.CoordinatorRecord("n0", "n0.1"),
    k.EventRecord(2, "recovered", "why", 1.5, {"any": ["thing"]}),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_read_back_as_it_was_written(record: Any) -> None:
    assert codec.decode(type(record), codec.encode(record)) == record


def test_every_record_class_is_covered() -> None:
    written = {type(record) for record in RECORDS}
    classes = {c for c in vars(k).values() if dataclasses.is_dataclass(c) and isinstance(c, type)}
    assert {c.__name__ for c in classes - written} == {"StoreRecord", "OfSlot"}


def test_store_record_is_read_back() -> None:
    values = {f.name: 7 if f.type == "int" else "x" for f in dataclasses.fields(k.StoreRecord)}
    record = k.StoreRecord(**values)  # type: ignore[arg-type]
    assert codec.decode(k.StoreRecord, codec.encode(record)) == record


def _altered(record: Any, **changes: Any) -> bytes:
    return json.dumps({**json.loads(codec.encode(record)), **changes}).encode()


@pytest.mark.parametrize(
    ("cls", "value", "names"),
    [
        (k.JobRecord, b"\xff\x00", "JobRecord"),
        (k.JobRecord, b"[1]", "JobRecord"),
        (k.JobRecord, b'{"v": 2}', "version"),
        (k.JobRecord, b'{"v": 1, "num_nodes": 1}', "num_workers"),
        (k.JobRecord, _altered(RECORDS[1], num_nodes="4"), "JobRecord.num_nodes"),
        (k.JobRecord, _altered(RECORDS[1], num_nodes=True), "JobRecord.num_nodes"),
        (k.JobRecord, _altered(RECORDS[1], num_nodes=None), "JobRecord.num_nodes"),
        (k.GenerationRecord, _altered(RECORDS[4], mode="grow"), "GenerationRecord.mode"),
        (k.GenerationRecord, _altered(RECORDS[4], slots={"a": 1}), "GenerationRecord.slots"),
        (k.GenerationRecord, _altered(RECORDS[4], slots=[1]), "GenerationRecord.slots"),
        (k.GenerationRecord, _altered(RECORDS[4], lost={"one": [0]}), "GenerationRecord.lost"),
        (k.GenerationRecord, _altered(RECORDS[4], lost=[0]), "GenerationRecord.lost"),
        (k.ResumedRecord, _altered(RECORDS[8], phases_s={"regroup": True}), "ResumedRecord.phases_s"),
        (k.ResumedRecord, _altered(RECORDS[8], phases_s={"regroup": 10**400}), "ResumedRecord.phases_s.*401 digits"),
    ],
)
def test_what_was_not_written_by_us_is_refused_by_name(cls: type[Any], value: bytes, names: str) -> None:
    with pytest.raises(codec.RecordError, match=names):
        codec.decode(cls, value)


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150)
@given(st.sampled_from(RECORDS), st.data())
def test_a_damaged_record_is_refused_or_read_whole(record: Any, data: st.DataObject) -> None:
    fields = [f.name for f in dataclasses.fields(record)]
    value = _altered(record, **{data.draw(st.sampled_from(fields)): data.draw(_json)})
    try:
        found = codec.decode(type(record), value)
    except codec.RecordError:
        return
    assert codec.decode(type(record), codec.encode(found)) == found


def test_a_field_of_a_later_version_is_ignored() -> None:
    assert codec.decode(k.JobRecord, _altered(RECORDS[1], colour="red")) == RECORDS[1]


def test_records_of_an_earlier_version_name_no_helpers() -> None:
    for record in (RECORDS[1], RECORDS[4], k.ProfileRecord({}, (), "log")):
        written = json.loads(codec.encode(record))
        assert not written.pop("helpers")
        assert codec.decode(type(record), json.dumps(written).encode()) == record


def test_keys_of_a_job_do_not_reach_into_another() -> None:
    mine, other = keys_module.Keys("gpt"), keys_module.Keys("gpt-2")
    assert not other.node("a").startswith(mine.prefix)
    assert not mine.failure(11, 0).startswith(mine.failure(1, 0).rpartition("/")[0] + "/")
    names = [mine.job, mine.generation, mine.coordinator, mine.tracked, mine.preload, mine.kernels, mine.result,
             mine.node("a"),
             mine.failure(1, 0), mine.progress(1, 0), mine.store(1), mine.plan(1), mine.resumed(1, 0),
             mine.finished(1, 0), mine.release(1), mine.exited(1, 0), mine.event(1), mine.recovery(1)]
    assert len(set(names)) == len(names) and all(name.startswith(mine.prefix) for name in names)


def test_events_sort_as_numbers() -> None:
    keys = keys_module.Keys("j")
    in_order = [key for n in (9, 10, 100) for key in (keys.event(n), keys.recovery(n))]
    assert sorted(reversed(in_order)) == in_order
    # `event` as a prefix means both entries of its generation, and no other's.
    assert [key for key in in_order if key.startswith(keys.event(10))] == [keys.event(10), keys.recovery(10)]


def test_slots_and_world_size() -> None:
    record = generation(slots=("a", "b", "c"))
    assert record.world_size == 6
    assert [record.slot_of(f"{name}.1") for name in "abc"] == [0, 1, 2]
    assert record.slot_of("a.2") is None
