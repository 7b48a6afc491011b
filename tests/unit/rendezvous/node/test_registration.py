"""Entering and leaving a job, with other nodes doing the same between any two of its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swift_rendezvous.codec import decode, encode
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.node import registration
from swift_rendezvous.node.registration import JobConflict, JobOver, PlaceLost, enter_job, leave_job, reclaim_place
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import JobRecord, NodeRecord, ResultRecord
from swift_rendezvous.store.kv import Compare, LeaseLost, Op, Put, StoreUnavailable, TransactionResult
from tests.support.memory_store import MemoryStore
from tests.support.records import failure, generation, node, owner

KEYS = Keys("job")
JOB = JobRecord(2, 2, "command", 0)


@pytest.fixture
def nobody_returns_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody comes back in these tests; to wait for less tells as much."""
    monkeypatch.setattr(registration, "RETURN_TIMEOUT_S", 0.2)


def stored_job(store: MemoryStore) -> JobRecord | None:
    found = store.get(KEYS.job)
    return decode(JobRecord, found.value) if found else None


def registered(store: MemoryStore) -> list[NodeRecord]:
    return [decode(NodeRecord, kv.value) for kv in store.get_prefix(KEYS.nodes)[0]]


class Interrupted:
    """Forwards to a store, and calls *between* before the call number *at*."""

    def __init__(self, store: MemoryStore, at: int, between: Callable[[], None]) -> None:
        self._store, self._at, self._between = store, at, between
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.num_calls == self._at:
                self._between()
            self.num_calls += 1
            return method(*args, **kwargs)

        return call


def test_a_new_node_gives_those_who_were_away_their_time_from_the_first_answer_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """etcd was away for as long as a lease lives, and a node starts just before it is back."""
    store = MemoryStore()
    lease = enter_job(store, KEYS, JOB, node("n0"), 5).lease
    store.put(KEYS.generation, encode(generation(slots=("n0", "n1"))))
    lease.revoke()
    clock_s = [100.0]

    def passes(seconds: float) -> None:
        clock_s[0] += seconds
        if clock_s[0] >= 105.0:
            store.put(KEYS.node("n0"), encode(node("n0")))

    monkeypatch.setattr(registration, "time", SimpleNamespace(monotonic=lambda: clock_s[0], sleep=passes))
    late = Interrupted(store, 0, lambda: passes(4.0))  # longer than a node has to come back
    enter_job(late, KEYS, JOB, node("n2"), 5)  # type: ignore[arg-type]
    assert store.get(KEYS.generation) is not None and [one.node_id for one in registered(store)] == ["n0", "n2"]


def test_the_first_node_creates_the_job_and_the_others_join_it() -> None:
    store = MemoryStore()
    lease = enter_job(store, KEYS, JOB, node("n0"), 5).lease
    enter_job(store, KEYS, JOB, node("n1"), 5)
    assert stored_job(store) == JOB and registered(store) == [node("n0"), node("n1")]
    record = store.get(KEYS.node("n0"))
    assert record is not None and record.lease_id == lease.id
    lease.revoke()
    assert registered(store) == [node("n1")]


def test_another_command_is_refused_and_says_what_differs() -> None:
    store = MemoryStore()
    enter_job(store, KEYS, JOB, node("n0"), 5)
    for change, word in (({"num_nodes": 3}, "--nnodes 2, here 3"), ({"max_nodes": 4}, "--nnodes 2, here 2:4"),
                         ({"max_restarts": 1}, "--max-restarts"), ({"fingerprint": "x"}, "other options")):
        with pytest.raises(JobConflict, match=word):
            enter_job(store, KEYS, replace(JOB, **change), node("n1"), 5)
    assert stored_job(store) == JOB and registered(store) == [node("n0")]
    store.advance(10.0)  # refused nodes leave no lease behind that would not run out


@pytest.mark.parametrize(
    ("job", "mine", "words"),
    [("p", "q", "another job secret"), ("p", "", "start it with --job-secret-file"), ("", "q", "without a job secret")],
)
def test_another_secret_is_refused_whatever_else_differs(job: str, mine: str, words: str) -> None:
    store = MemoryStore()
    there = replace(JOB, secret_proof=job)
    enter_job(store, KEYS, there, node("n0"), 5)
    for change in ({}, {"num_nodes": 3}):
        with pytest.raises(JobConflict, match=words) as refused:
            enter_job(store, KEYS, replace(JOB, secret_proof=mine, **change), node("n1"), 5)
        assert "not disturbed" in str(refused.value)
    assert stored_job(store) == there and registered(store) == [node("n0")]


def test_the_records_of_a_job_that_nobody_runs_are_removed() -> None:
    store = MemoryStore()
    store.put(KEYS.job, encode(replace(JOB, fingerprint="older")))
    store.put(KEYS.generation, encode(generation(3)))
    store.put(KEYS.result, encode(ResultRecord("failed", "w")))
    store.put(KEYS.failure(3, 0), b"{}")
    store.put("/swift/job-2/job", b"of another job")
    enter_job(store, KEYS, JOB, node("n0"), 5)
    assert {kv.key for kv in store.get_prefix("/")[0]} == {KEYS.job, KEYS.node("n0"), "/swift/job-2/job"}
    assert stored_job(store) == JOB


def test_leftovers_of_the_same_command_are_removed_too(nobody_returns_soon: None) -> None:
    store = MemoryStore()
    store.put(KEYS.job, encode(JOB))
    store.put(KEYS.generation, encode(generation(3)))
    enter_job(store, KEYS, JOB, node("n0"), 5)
    assert store.get(KEYS.generation) is None


def test_a_name_is_given_once() -> None:
    store = MemoryStore()
    enter_job(store, KEYS, JOB, node("n0"), 1)
    with pytest.raises(JobConflict, match="--node-id"):
        enter_job(store, KEYS, JOB, node("n0", 2), 1)
    assert registered(store) == [node("n0")]


def test_an_answer_that_was_lost_is_no_other_node() -> None:
    """A slow server: the client has sent the registration again, and finds the record that it wrote itself."""

    class SentTwice(MemoryStore):
        def transaction(self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = (), **_: Any
                        ) -> TransactionResult:
            super().transaction(compare, success, failure)
            return replace(super().transaction(compare, success, failure), retried=True)

    store = SentTwice()
    entry = enter_job(store, KEYS, JOB, node("n0"), 5)
    found = store.get(KEYS.node("n0"))
    assert found is not None and found.lease_id == entry.lease.id and store.now_s == 0.0


def test_a_dead_predecessor_of_the_same_name_is_waited_for() -> None:
    store = MemoryStore()
    enter_job(store, KEYS, JOB, node("n1"), 60)
    predecessor = enter_job(store, KEYS, JOB, node("n0"), 2).lease
    ended = threading.Event()

    def time_passes() -> None:
        for step in range(40):  # five times as fast as the clock
            if ended.wait(0.05):
                return
            store.advance(0.25)
            if step == 5:
                predecessor.refresh()  # so that it outlives the new node's lease, were that not refreshed

    clock = threading.Thread(target=time_passes)
    clock.start()
    enter_job(store, KEYS, JOB, node("n0", 2), 2)
    ended.set()
    clock.join()
    assert node("n0", 2) in registered(store) and node("n0") not in registered(store)


def test_the_last_to_leave_removes_the_job() -> None:
    store = MemoryStore()
    leases = [enter_job(store, KEYS, JOB, node(f"n{i}"), 5).lease for i in range(2)]
    store.put(KEYS.generation, encode(generation(1)))
    store.put(KEYS.result, encode(ResultRecord("succeeded", "w")))
    leave_job(store, KEYS, node("n0"), leases[0])
    assert stored_job(store) == JOB and store.get(KEYS.generation) is not None
    leave_job(store, KEYS, node("n1"), leases[1])
    assert store.get_prefix("/")[0] == []


def test_leaving_never_raises() -> None:
    class Away(MemoryStore):
        away = False

        def transaction(self, compare: Sequence[Compare], success: Sequence[Op],
                        failure: Sequence[Op] = ()) -> TransactionResult:
            if self.away:
                raise StoreUnavailable("no endpoint answered")
            return super().transaction(compare, success, failure)

    store = Away()
    lease = enter_job(store, KEYS, JOB, node("n0"), 5).lease
    store.away = True
    leave_job(store, KEYS, node("n0"), lease)


def test_a_store_that_fails_midway_leaves_no_lease() -> None:
    store = MemoryStore()
    leases = []
    original = store.grant_lease

    def grant(ttl_s: int) -> Any:
        leases.append(original(ttl_s))
        store.revoke(leases[-1])  # the worst moment
        return leases[-1]

    store.grant_lease = grant  # type: ignore[method-assign]
    with pytest.raises(LeaseLost):
        enter_job(store, KEYS, JOB, node("n0"), 5)
    assert registered(store) == [] and leases[0].remaining_ttl_s() == 0.0


@pytest.mark.parametrize("at", range(10))
def test_two_new_nodes_with_different_commands_never_end_in_one_job(at: int) -> None:
    store, other = MemoryStore(), replace(JOB, fingerprint="other")
    refused: list[str] = []

    def enter(via: Any, name: str, job: JobRecord) -> None:
        try:
            enter_job(via, KEYS, job, replace(node(name), fingerprint=job.fingerprint), 5)
        except JobConflict:
            refused.append(name)

    first = Interrupted(store, at, lambda: enter(store, "b", other))
    enter(first, "a", JOB)
    if first.num_calls <= at:
        enter(store, "b", other)
    job = stored_job(store)
    assert job is not None and len(refused) == 1
    assert [n.fingerprint for n in registered(store)] == [job.fingerprint]


@pytest.mark.parametrize("at", range(10))
def test_two_new_nodes_with_the_same_command_both_get_in(at: int) -> None:
    store = MemoryStore()
    first = Interrupted(store, at, lambda: void(enter_job(store, KEYS, JOB, node("b"), 5)))
    enter_job(first, KEYS, JOB, node("a"), 5)
    if first.num_calls <= at:
        enter_job(store, KEYS, JOB, node("b"), 5)
    assert stored_job(store) == JOB and registered(store) == [node("a"), node("b")]


@pytest.mark.parametrize("at", range(8))
def test_a_new_node_while_the_last_node_leaves_has_a_job(at: int, nobody_returns_soon: None) -> None:
    store = MemoryStore()
    lease = enter_job(store, KEYS, JOB, node("a"), 5).lease
    store.put(KEYS.generation, encode(generation(1, slots=("a", "z"))))
    leaving = Interrupted(store, at, lambda: void(enter_job(store, KEYS, JOB, node("b"), 5)))
    leave_job(leaving, KEYS, node("a"), lease)
    if leaving.num_calls <= at:
        enter_job(store, KEYS, JOB, node("b"), 5)
    assert stored_job(store) == JOB and registered(store) == [node("b")]


@pytest.mark.parametrize("at", range(8))
def test_the_last_node_leaves_while_a_new_node_enters(at: int) -> None:
    store = MemoryStore()
    lease = enter_job(store, KEYS, JOB, node("a"), 5).lease
    entering = Interrupted(store, at, lambda: leave_job(store, KEYS, node("a"), lease))
    enter_job(entering, KEYS, JOB, node("b"), 5)
    if entering.num_calls <= at:
        leave_job(store, KEYS, node("a"), lease)
    assert stored_job(store) == JOB and registered(store) == [node("b")]


def test_a_job_that_is_ending_is_waited_for() -> None:
    store = MemoryStore()
    lease = enter_job(store, KEYS, replace(JOB, fingerprint="older"), node("a"), 5).lease
    store.put(KEYS.result, encode(ResultRecord("succeeded", "w")))
    leaves = threading.Timer(0.25, leave_job, [store, KEYS, node("a"), lease])
    leaves.start()
    enter_job(store, KEYS, JOB, node("b"), 5)
    leaves.join()
    assert stored_job(store) == JOB and registered(store) == [node("b")] and store.get(KEYS.result) is None


@pytest.mark.parametrize("ended", ["gone", "another", "result"])
def test_who_comes_back_to_a_job_that_has_ended_starts_nothing(ended: str) -> None:
    store = MemoryStore()
    entry = enter_job(store, KEYS, JOB, node("a"), 5)
    again = enter_job(store, KEYS, JOB, node("b"), 5)
    assert entry.job == again.job  # one job, whoever asks
    if ended == "result":
        store.put(KEYS.result, encode(ResultRecord("succeeded", "w")))
    else:
        leave_job(store, KEYS, node("a"), entry.lease)
        leave_job(store, KEYS, node("b"), again.lease)
    if ended == "another":
        enter_job(store, KEYS, JOB, node("c"), 5)
    before = store.get_prefix("/")[0]
    with pytest.raises(JobOver):
        enter_job(store, KEYS, JOB, node("a", 2), 5, known_job=entry.job)
    assert store.get_prefix("/")[0] == before


def test_who_comes_back_finds_its_job() -> None:
    store = MemoryStore()
    entry = enter_job(store, KEYS, JOB, node("a"), 5)
    enter_job(store, KEYS, JOB, node("b"), 5)
    store.put(KEYS.generation, encode(generation(3)))
    entry.lease.revoke()
    assert enter_job(store, KEYS, JOB, node("a", 2), 5, known_job=entry.job).job == entry.job
    assert node("a", 2) in registered(store) and store.get(KEYS.generation) is not None


# ---- a lease that was lost ----


def begun(store: MemoryStore) -> tuple[int, NodeRecord]:
    """Generation 3 of n0 and n1; the lease of n0 is over. Its job, and n0."""
    entry = enter_job(store, KEYS, JOB, node("n0"), 5)
    enter_job(store, KEYS, JOB, node("n1"), 5)
    store.put(KEYS.generation, encode(generation(3)))
    entry.lease.revoke()
    return entry.job, node("n0")


def test_a_node_gets_another_lease_in_its_place() -> None:
    store = MemoryStore()
    job, me = begun(store)
    assert me not in registered(store)
    lease = reclaim_place(store, KEYS, me, job, 5)
    assert me in registered(store)
    again = reclaim_place(store, KEYS, me, job, 5)  # the first answer was lost
    lease.revoke()
    assert me in registered(store)
    again.revoke()
    assert me not in registered(store)


def give_away(store: MemoryStore) -> None:
    store.put(KEYS.generation, encode(generation(4, "replace", slots=("n2", "n1"))))


def accuse(store: MemoryStore) -> None:
    store.put(KEYS.failure(3, 0), encode(failure("node", 0)))


def come_first(store: MemoryStore) -> None:
    store.put(KEYS.node("n0"), encode(node("n0", 2)))


def end(store: MemoryStore) -> None:
    store.put(KEYS.result, encode(ResultRecord("stopped", "w")))


def begin_another(store: MemoryStore) -> None:
    store.delete_prefix(KEYS.prefix)
    store.put(KEYS.job, encode(JOB))
    store.put(KEYS.generation, encode(generation(3)))


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("event", [give_away, accuse, come_first, end, begin_another])
def test_nobody_comes_back_into_a_place_that_is_not_its_own_any_more(
    event: Callable[[MemoryStore], None], at: int
) -> None:
    """What takes the place away happens before any of its calls; after the last one it is back, and was in time."""
    store = MemoryStore()
    job, me = begun(store)
    way = Interrupted(store, at, lambda: event(store))
    try:
        reclaim_place(way, KEYS, me, job, 5)
    except (PlaceLost, JobOver):
        assert me not in registered(store)
        assert len(store._leases) == 1  # that of n1
    else:
        assert way.num_calls <= at


def test_a_failure_of_its_workers_does_not_cost_a_node_its_place() -> None:
    store = MemoryStore()
    job, me = begun(store)
    store.put(KEYS.failure(3, 0), encode(failure("workers", 0, (1,))))
    reclaim_place(store, KEYS, me, job, 5)
    assert me in registered(store) and store.get(KEYS.failure(3, 0)) is not None


def test_a_drained_node_gets_another_lease_while_it_hands_its_slot_over() -> None:
    store = MemoryStore()
    job, me = begun(store)
    store.put(KEYS.generation, encode(generation(4, "replace", ("n2", "n1"), handover={0: owner("n0")})))
    store.put(KEYS.failure(4, 0), encode(failure("node", 0, name="n2")))  # of the new owner
    reclaim_place(store, KEYS, me, job, 5)
    assert me in registered(store)
    with pytest.raises(PlaceLost):
        reclaim_place(store, KEYS, node("n0", 2), job, 5)


def test_a_node_without_a_slot_has_no_place_to_come_back_to() -> None:
    store = MemoryStore()
    job, _ = begun(store)
    with pytest.raises(PlaceLost):
        reclaim_place(store, KEYS, node("n9"), job, 5)


def test_a_new_node_gives_the_nodes_of_a_running_job_time_to_come_back() -> None:
    """Etcd was away for so long that all leases are over: no node is there, but the job trains."""
    store = MemoryStore()
    job, me = begun(store)
    store.delete(KEYS.node("n1"))
    returns = threading.Timer(0.5, reclaim_place, [store, KEYS, me, job, 5])
    returns.start()
    assert enter_job(store, KEYS, JOB, node("n2"), 5).job == job
    returns.join()
    assert store.get(KEYS.generation) is not None and registered(store) == [node("n0"), node("n2")]


def test_a_spare_that_leaves_alone_does_not_remove_a_running_job() -> None:
    store = MemoryStore()
    job, _ = begun(store)
    store.delete(KEYS.node("n1"))
    spare = enter_job(store, KEYS, JOB, node("n2"), 5, known_job=job).lease
    leave_job(store, KEYS, node("n2"), spare)
    assert stored_job(store) == JOB and store.get(KEYS.generation) is not None


@pytest.mark.parametrize("lease", [True, False], ids=["of another version", "of a person"])
def test_what_stands_in_the_place_of_a_node_and_cannot_be_read(lease: bool) -> None:
    """A node of another version keeps its name, garbage does not."""
    store = MemoryStore()
    enter_job(store, KEYS, JOB, node("n0"), 5)
    store.put(KEYS.node("n1"), b'{"v":2}', store.grant_lease(3600).id if lease else 0)
    if lease:
        with pytest.raises(JobConflict, match="already in job"):
            enter_job(store, KEYS, JOB, node("n1"), 1)
    else:
        enter_job(store, KEYS, JOB, node("n1"), 1)
        assert {record.node_id for record in registered(store)} == {"n0", "n1"}


def test_a_node_writes_its_record_over_what_somebody_put_there() -> None:
    store = MemoryStore()
    job, me = begun(store)
    store.put(KEYS.node(me.node_id), b"garbage")
    store.put(KEYS.failure(1, 0), b"garbage")
    reclaim_place(store, KEYS, me, job, 5)
    assert me in registered(store)


@pytest.mark.parametrize("value", [b"garbage", None], ids=["overwritten", "removed"])
def test_nobody_comes_back_while_the_generation_cannot_be_read(value: bytes | None) -> None:
    store = MemoryStore()
    job, me = begun(store)
    stored = store.get(KEYS.generation)
    assert stored is not None
    store.put(KEYS.event(1), b"{}")
    if value is None:
        store.delete(KEYS.generation)
    else:
        store.put(KEYS.generation, value)
    with pytest.raises(RendezvousError, match="record generation") as caught:
        reclaim_place(store, KEYS, me, job, 5)
    assert not isinstance(caught.value, (PlaceLost, JobOver))  # it is tried again
    store.put(KEYS.generation, stored.value)
    reclaim_place(store, KEYS, me, job, 5)


def test_a_job_whose_record_cannot_be_read_is_refused_in_one_sentence(nobody_returns_soon: None) -> None:
    store = MemoryStore()
    enter_job(store, KEYS, JOB, node("n0"), 5)
    store.put(KEYS.job, b"garbage")
    with pytest.raises(JobConflict, match=r"the record of job 'job' cannot be read \(JobRecord: not JSON"):
        enter_job(store, KEYS, JOB, node("n1"), 5)


def test_garbage_under_the_name_of_a_node_keeps_no_job_alive() -> None:
    store = MemoryStore()
    entry = enter_job(store, KEYS, JOB, node("n0"), 5)
    store.put(KEYS.node("x"), b"garbage")
    leave_job(store, KEYS, node("n0"), entry.lease)
    assert store.get(KEYS.job) is None


def void(_: object) -> None:
    """For lambdas whose value nobody wants."""


def test_the_guard_of_a_registration_is_needed() -> None:
    """What the guard protects from, done without it: a node in a job of another command."""
    store = MemoryStore()
    other = replace(JOB, fingerprint="other")

    class Unguarded(Interrupted):
        def __getattr__(self, name: str) -> Any:
            call = super().__getattr__(name)
            if name != "transaction":
                return call
            return lambda compare, ops: call([c for c in compare if len(ops) != 2 or c.key != KEYS.job],
                                             [op for op in ops if not (len(ops) == 2 and op.key == KEYS.job)])

    def between() -> None:
        enter_job(store, KEYS, other, replace(node("b"), fingerprint="other"), 5)

    mixed = []
    for at in range(6):
        store = MemoryStore()
        try:
            enter_job(Unguarded(store, at, between), KEYS, JOB, replace(node("a"), fingerprint="command"), 5)
        except RendezvousError:
            continue
        mixed.append(len({n.fingerprint for n in registered(store)}))
    assert 2 in mixed


def test_a_put_of_a_dead_lease_is_refused_by_the_store() -> None:
    # What the tests above rely on.
    with pytest.raises(LeaseLost):
        MemoryStore().transaction([], [Put("k", b"", lease_id=99)])
