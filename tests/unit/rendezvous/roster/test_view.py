"""The fold of a job's keys into a view: by watch or by listing, with old generations left out."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swift_agent.agent.lifecycle import events, machine, state
from swift_rendezvous.codec import encode
from swift_rendezvous.roster.decision import Rules
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.losses import losses
from swift_rendezvous.roster.membership import decide
from swift_rendezvous.roster.records import (
    CoordinatorRecord,
    ExitedRecord,
    JobRecord,
    KernelsRecord,
    PlanRecord,
    ProgressRecord,
    ResultRecord,
    ResumedRecord,
    TakenRecord,
)
from swift_rendezvous.roster.view import Change, View, apply, apply_all, view_of_entries
from swift_rendezvous.store.kv import Delete, DeletePrefix, Op, Put
from tests.support.memory_store import MemoryStore
from tests.support.records import failure, generation, node
from tests.support.records import view as view_of_two

KEYS = Keys("job")


class History:
    """A store whose changes are also folded one by one, as a watcher does."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.watch = self.store.watch_prefix("/")
        self.watched = View()

    def write(self, *ops: Op) -> View:
        before = self.store.get_prefix("/")[1]
        if self.store.transaction([], ops).revision > before:
            for event in next(self.watch).events:
                value = event.kv.value if event.kind == "put" else None
                change = Change(event.kv.key, value, event.kv.mod_revision, event.kv.create_revision)
                self.watched = apply(self.watched, KEYS, change)
        return self.watched

    def listed(self, rng: random.Random) -> View:
        entries, _ = self.store.get_prefix("/")
        changes = [Change(kv.key, kv.value, kv.mod_revision, kv.create_revision) for kv in entries]
        if rng.random() < 0.5:
            changes = sorted(changes, key=lambda c: c.key)  # as etcd lists
        return apply_all(View(), KEYS, changes)


def _put_generation(number: int, mode: str = "replace") -> Put:
    return Put(KEYS.generation, encode(generation(number, mode)))  # type: ignore[arg-type]


def test_a_new_generation_leaves_the_records_of_the_old_one_behind() -> None:
    history = History()
    history.write(_put_generation(1, "start"), Put(KEYS.plan(1), encode(PlanRecord(1, {}, "begin"))))
    history.write(Put(KEYS.failure(1, 0), encode(failure("workers", 0, (1,)))), Put(KEYS.release(1), b"1"))
    history.write(Put(KEYS.exited(1, 1), encode(ExitedRecord(1, "n1.1"))))
    assert history.watched.failures and history.watched.exited and history.watched.released and history.watched.plan
    view = history.write(_put_generation(2))
    assert view.number == 2
    assert not (view.failures or view.exited or view.released or view.plan or view.store or view.progress)
    late = history.write(Put(KEYS.failure(1, 1), encode(failure("node", 1))))
    assert not late.failures
    # The sweep of generation 1 must not take away what belongs to 2.
    history.write(Put(KEYS.progress(2, 0), encode(ProgressRecord(0, "n0.1", ()))))
    swept = history.write(DeletePrefix(KEYS.prefix + "~progress/1/"), Delete(KEYS.plan(1)), Delete(KEYS.release(1)))
    assert set(swept.progress) == {0}


def test_a_listing_gives_the_view_that_the_watch_gave() -> None:
    rng = random.Random(7)
    for _ in range(60):
        history, number = History(), 0
        history.write(Put("/swift/job-2/job", b"not ours"), Put(KEYS.job, encode(JobRecord(2, 2, "c"))))
        for _ in range(rng.randrange(3, 25)):
            slot, name = rng.randrange(3), f"n{rng.randrange(3)}"
            op: Op
            match rng.randrange(9):
                case 0:
                    number += 1
                    history.write(_put_generation(number), DeletePrefix(f"{KEYS.prefix}failure/{number - 1}/"),
                                  DeletePrefix(f"{KEYS.prefix}exited/{number - 1}/"),
                                  DeletePrefix(f"{KEYS.prefix}~progress/{number - 1}/"),
                                  Put(KEYS.plan(number), encode(PlanRecord(number, {}, "w"))))
                    continue
                case 1:
                    op = Put(KEYS.node(name), encode(node(name, rng.randrange(3))))
                case 2:
                    op = Delete(KEYS.node(name))
                case 3:
                    op = Put(KEYS.coordinator, encode(CoordinatorRecord(name, f"{name}.1")))
                case 4:
                    op = Delete(KEYS.coordinator)
                case 5:
                    op = Put(KEYS.progress(number, slot), encode(ProgressRecord(slot, "x", ({"rank": slot},))))
                case 6:
                    op = Put(KEYS.exited(number, slot), encode(ExitedRecord(slot, "x")))
                case 7:
                    op = Put(KEYS.preload, b"a,b")
                case _ if number == 0:
                    continue  # fenced: nothing is written for a generation that has not come
                case _:
                    op = Put(KEYS.failure(max(number - 1, 1), slot), encode(failure("node", slot)))
            history.write(op)
        listed = history.listed(rng)
        watched = history.watched
        assert {k: v for k, v in vars(listed).items() if k != "revision"} == {
            k: v for k, v in vars(watched).items() if k != "revision"}
        assert listed.revision <= watched.revision


def test_the_guards_of_a_view_are_the_revisions_in_the_store() -> None:
    history = History()
    history.write(Put("/elsewhere", b""))
    history.write(_put_generation(1), Put(KEYS.coordinator, encode(CoordinatorRecord("n0", "n0.1"))))
    history.write(Put(KEYS.node("n0"), encode(node("n0"))))
    view = history.write(Put(KEYS.node("n0"), encode(node("n0", 2))))
    stored = {kv.key: kv for kv in history.store.get_prefix(KEYS.prefix)[0]}
    assert view.generation_revision == stored[KEYS.generation].mod_revision
    assert view.coordinator_revision == stored[KEYS.coordinator].mod_revision
    assert view.joined["n0"] == stored[KEYS.node("n0")].create_revision
    assert view.revision == stored[KEYS.node("n0")].mod_revision
    gone = history.write(Delete(KEYS.coordinator))
    assert gone.coordinator is None and gone.coordinator_revision == 0
    assert gone.revision > view.revision


def test_a_deleted_generation_takes_only_its_own_records_along() -> None:
    history = History()
    history.write(_put_generation(3), Put(KEYS.coordinator, encode(CoordinatorRecord("n0", "n0.1"))),
                  Put(KEYS.tracked, b"1"), Put(KEYS.plan(3), encode(PlanRecord(3, {}, "w"))))
    view = history.write(Delete(KEYS.generation))
    assert view.generation is None and view.number == 0 and view.plan is None and view.generation_revision == 0
    # Whoever elects itself compares with the stored coordinator: forgetting it here would make that fail for ever.
    assert view.coordinator is not None and view.coordinator_revision > 0 and view.tracked


def test_result_and_preload() -> None:
    history = History()
    assert history.write(Put(KEYS.result, encode(ResultRecord("stopped", "w")))).result == ResultRecord("stopped", "w")
    assert history.write(Put(KEYS.preload, b"a,b")).preload == ("a", "b")
    assert history.write(Delete(KEYS.preload)).preload == ()


def test_what_the_first_processes_computed_with_is_known_by_rank() -> None:
    history = History()
    assert history.write(_put_generation(1)).computed_by(range(2)) == ()
    size = generation(1).world_size
    assert size == 4
    known = history.write(Put(KEYS.kernels, encode(KernelsRecord(("an\nA\0", "B" * 5000), (1, 0, 1, 7)))))
    assert known.computed_by(range(2)) == ("B" * 1000, "anA"), "each becomes a variable of a process"
    assert known.computed_by(range(3, 4)) == ("",), "somebody has written it"
    other = history.write(Put(KEYS.kernels, encode(KernelsRecord(("A",), (0,) * (size + 1)))))
    assert other.computed_by(range(2)) == (), "of a job of another size"


def test_a_recovery_that_was_told_is_known() -> None:
    history = History()
    event = Put(KEYS.event(3), b"{}")
    assert history.write(event).recovered == 0
    assert history.write(Put(KEYS.recovery(3), b"{}")).recovered == 3
    assert history.write(Put(KEYS.recovery(2), b"{}")).recovered == 3
    assert history.write(Delete(KEYS.recovery(3))).recovered == 3


@pytest.mark.parametrize(
    "key", ["nodes", "nodes/a/b", "failure/1", "failure/1/x", "failure/x/0", "plan/", "other/1", ""])
def test_strange_keys_change_nothing(key: str) -> None:
    view = apply(View(), KEYS, Change(KEYS.generation, encode(generation(1)), 5, 5))
    assert apply(view, KEYS, Change(KEYS.prefix + key, b"{}", 5, 5)) == view


GARBAGE = {
    "no text": b"\xff\xfe", "no JSON": b"garbage", "nothing": b"", "another version": b'{"v":2}', "no object": b"3",
    "too deep": b"[" * 100_000, "no fields": b'{"v":1,"a":{}}', "an unhashable version": b'{"v":[1]}',
}  # fmt: skip
NAMES = ["job", "generation", "coordinator", "preload", "end", "rate", "nodes/n0", "drain/n0", "store/1", "plan/1",
         "pause/1", "failure/1/0", "~progress/1/0", "~resumed/1/0", "~finished/1/0", "exited/1/0", "~position/1/0",
         "~parked/1/0", "~handover/1/0", "taken/1/0"]  # fmt: skip


@pytest.mark.parametrize("value", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_read_is_noted_and_hides_nothing_else(name: str, value: bytes) -> None:
    history = History()
    history.write(Put(KEYS.job, encode(JobRecord(2, 2, "c"))), Put(KEYS.node("n1"), encode(node("n1"))))
    history.write(_put_generation(1, "start"), Put(KEYS.event(1), b"{}"))
    history.write(Put(KEYS.coordinator, encode(CoordinatorRecord("n1", "n1.1"))))
    history.write(Put(KEYS.failure(1, 1), encode(failure("node", 1))), Put(KEYS.node("n0"), encode(node("n0"))))
    before = history.watched
    if (name == "preload" and value != GARBAGE["no text"]) or (name == "pause/1" and value == GARBAGE["no fields"]):
        return  # that can be read
    view = history.write(Put(KEYS.prefix + name, value))
    (stored,) = [kv for kv in history.store.get_prefix(KEYS.prefix)[0] if kv.key == KEYS.prefix + name]
    assert set(view.damaged) == {name} and view.damaged[name].revision == stored.mod_revision
    assert view.damaged[name].why.startswith("cannot be read (") and len(view.damaged[name].why) < 300
    assert view.job == before.job and view.generation == before.generation  # nothing goes on without these
    assert 1 in view.failures and "n1" in view.nodes and ("n0" in view.nodes) == (name != "nodes/n0")
    assert view.generation_revision == (stored.mod_revision if name == "generation" else before.generation_revision)
    assert view.coordinator_revision == (stored.mod_revision if name == "coordinator" else before.coordinator_revision)
    # Who lists knows as much as who watched, if it knew the job before; a new node lacks what cannot be read.
    entries, _ = history.store.get_prefix("/")
    assert view_of_entries(KEYS, entries, before) == view
    new = view_of_entries(KEYS, entries)
    assert set(new.damaged) == {name} and "n1" in new.nodes and (new.generation is None) == (name == "generation")
    # It is mended by whoever writes it again.
    readable = history.write(Delete(KEYS.prefix + name) if name not in ("job", "generation") else
                             Put(KEYS.prefix + name, encode(before.job if name == "job" else before.generation)))
    assert not readable.damaged and set(readable.failures) >= {1}


@pytest.mark.parametrize("key", ["store/\u00b2", "plan/" + "9" * 5000, "failure/1/\u0663", "events/" + "9" * 5000])
def test_keys_with_strange_numbers_change_nothing(key: str) -> None:
    view = apply(View(), KEYS, Change(KEYS.generation, encode(generation(1)), 5, 5))
    assert apply(view, KEYS, Change(KEYS.prefix + key, b"{}", 5, 5)) == view


@pytest.mark.parametrize("name", ["failure", "~progress", "~resumed", "exited", "taken"])
def test_a_record_of_a_slot_that_there_is_not_ends_nobody(name: str) -> None:
    """It can be read; who decides, and each agent, looks up whose slot that is."""
    records = {
        "failure": failure("node", 7, name="n1"), "~progress": ProgressRecord(7, "n1.1", ()),
        "~resumed": ResumedRecord(7, 5, {}), "exited": ExitedRecord(7, "n1.1"), "taken": TakenRecord(7, "n1.1"),
    }  # fmt: skip
    before = view_of_two(names=("n0", "n1", "n2"))
    view = apply(before, KEYS, Change(f"{KEYS.prefix}{name}/1/7", encode(records[name]), 50, 50))
    assert view.damaged[f"{name}/1/7"].why == "cannot be read (generation 1 has no slot 7)"
    assert replace(view, damaged={}, revision=0) == replace(before, revision=0)
    # Nor where the generation is written again with fewer slots.
    last = apply(before, KEYS, Change(KEYS.failure(1, 1), encode(failure("node", 1)), 50, 50))
    fewer = apply(last, KEYS, Change(KEYS.generation, encode(generation(1, slots=("n0",))), 51, 51))
    for seen in (view, fewer):
        assert not losses(seen).nodes
        decide(seen, Rules(), now_s=9.0, waiting_since_s=None)
        machine.on_event(state.AgentState("n0", "n0.1", 3, 5.0), events.ViewChanged(seen), now_s=9.0)


def test_a_generation_that_somebody_removed_is_remembered_until_the_job_goes() -> None:
    history = History()
    history.write(Put(KEYS.job, encode(JobRecord(2, 2, "c"))))
    history.write(_put_generation(3), Put(KEYS.plan(3), encode(PlanRecord(3, {}, "w"))))
    before = history.watched
    view = history.write(Delete(KEYS.generation))
    assert view.number == 3 and view.plan is not None and view.generation_revision == 0
    assert view.damaged["generation"].revision == 0
    assert replace(view_of_entries(KEYS, history.store.get_prefix("/")[0], before), revision=view.revision) == view
    restored = history.write(_put_generation(3))
    assert restored.plan is not None and not restored.damaged and restored.generation_revision > view.revision
    # Written again it is newer than its records; who lists then must not lose those.
    assert view_of_entries(KEYS, history.store.get_prefix("/")[0]) == restored
    # In whatever order: a job that ends takes both away.
    for ops in ([Delete(KEYS.job), Delete(KEYS.generation)], [DeletePrefix(KEYS.prefix)]):
        gone = history.write(*ops)
        assert gone.generation is None and not gone.damaged and gone.job is None
        history.write(Put(KEYS.job, encode(JobRecord(2, 2, "c"))), _put_generation(3))
