"""The contract of the store, run against memory and a real etcd, so that tests in virtual time can be trusted."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import (
    Compacted,
    Compare,
    Delete,
    DeletePrefix,
    Event,
    Get,
    GetPrefix,
    KeyValue,
    KeyValueStore,
    LeaseLost,
    Op,
    Put,
    Watch,
    prefix_end,
)
from tests.support.etcd_cluster import EtcdCluster, wait_for
from tests.support.memory_store import MemoryStore

_numbers = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    # Short elections allow leases of one second.
    directory: Path = tmp_path_factory.mktemp("etcd")
    with EtcdCluster(directory, heartbeat_ms=20, election_ms=200) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "etcd"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "memory":
        memory = MemoryStore()
        memory.put("unrelated", b"")  # so that no test depends on the first revision
        yield memory
        memory.close()
        return
    cluster: EtcdCluster = request.getfixturevalue("server")
    etcd = EtcdStore(EtcdConfig(cluster.endpoints))
    yield etcd
    etcd.close()


@pytest.fixture
def root() -> str:
    """A prefix of its own for each test."""
    return f"/test{next(_numbers)}/"


def let_time_pass(store: Any, seconds: float) -> None:
    """For a lease to expire: virtual time in memory; a real etcd is awaited by the caller."""
    if isinstance(store, MemoryStore):
        store.advance(seconds)


def take(watch: Watch, num_events: int) -> list[Event]:
    """The next events; a watch that stays silent is cancelled, which ends the test with too few."""
    timer = threading.Timer(10, watch.cancel)
    timer.start()
    events: list[Event] = []
    try:
        while len(events) < num_events:
            response = next(watch, None)
            if response is None:
                break
            assert response.events and response.revision == response.events[-1].kv.mod_revision
            events.extend(response.events)
    finally:
        timer.cancel()
    return events


def test_a_key_is_written_read_and_deleted(store: KeyValueStore, root: str) -> None:
    key = root + "schlüssel"
    assert store.get(key) is None
    first = store.put(key, b"\x00\xff")
    assert store.get(key) == KeyValue(key, b"\x00\xff", first, first, 1, 0)
    second = store.put(key, b"")
    assert second == first + 1
    assert store.get(key) == KeyValue(key, b"", first, second, 2, 0)
    assert store.delete(key) is True
    assert store.delete(key) is False
    assert store.get(key) is None
    fourth = store.put(key, b"again")
    assert fourth == second + 2, "the deletion of nothing must not make a revision"
    assert store.get(key) == KeyValue(key, b"again", fourth, fourth, 1, 0)


def test_a_prefix_is_listed_in_order_and_deleted(store: KeyValueStore, root: str) -> None:
    for name in ("b", "a/1", "a/10", "a/2", "a0", "a", "a/\uffff", "a/\U0001f600"):
        last = store.put(root + name, name.encode())
    found, revision = store.get_prefix(root + "a/")
    assert [kv.key.removeprefix(root) for kv in found] == ["a/1", "a/10", "a/2", "a/\uffff", "a/\U0001f600"]
    assert revision == last
    assert store.delete_prefix(root + "a/") == 5
    assert store.delete_prefix(root + "a/") == 0
    found, revision = store.get_prefix(root)
    assert [kv.key.removeprefix(root) for kv in found] == ["a", "a0", "b"]
    assert revision == last + 1
    everything = [kv.key for kv in store.get_prefix("")[0]]
    assert everything == sorted(everything) and root + "a" in everything


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (lambda key, _: Compare.exists(key), True),
        (lambda key, _: Compare.absent(key), False),
        (lambda key, _: Compare.exists(key + "-missing"), False),
        (lambda key, _: Compare.absent(key + "-missing"), True),
        (lambda key, kv: Compare.mod_revision(key, "==", kv.mod_revision), True),
        (lambda key, kv: Compare.mod_revision(key, "<", kv.mod_revision), False),
        (lambda key, kv: Compare.mod_revision(key, ">", kv.mod_revision - 1), True),
        (lambda key, kv: Compare.create_revision(key, "!=", kv.create_revision), False),
        (lambda key, kv: Compare.create_revision(key, "==", kv.mod_revision), False),
        (lambda key, _: Compare.version(key, "==", 2), True),
        (lambda key, _: Compare.version(key, ">", 2), False),
        (lambda key, _: Compare.version(key + "-missing", "==", 0), True),
        (lambda key, _: Compare.value(key, "==", b"m"), True),
        (lambda key, _: Compare.value(key, "<", b"n"), True),
        (lambda key, _: Compare.value(key, ">", b"ma"), False),
        (lambda key, _: Compare.value(key, "!=", b"x"), True),
        (lambda key, _: Compare.value(key + "-missing", "!=", b"x"), False),
        (lambda key, _: Compare.value(key + "-missing", "==", b""), False),
        (lambda key, _: Compare.lease(key, "==", 0), True),
        (lambda key, _: Compare.lease(key, ">", 0), False),
    ],
)
def test_a_condition_decides_which_branch_runs(
    store: KeyValueStore, root: str, condition: Callable[[str, KeyValue], Compare], expected: bool
) -> None:
    key = root + "k"
    store.put(key, b"l")
    store.put(key, b"m")
    current = store.get(key)
    assert current is not None
    result = store.transaction([Compare.exists(key), condition(key, current)], [Put(root + "yes", b"")],
                               [Put(root + "no", b"")])
    assert result.succeeded is expected and result.retried is False
    assert (store.get(root + "yes") is not None) is expected
    assert (store.get(root + "no") is not None) is not expected


def test_a_transaction_is_one_revision_and_answers_each_operation(store: KeyValueStore, root: str) -> None:
    before = store.put(root + "a", b"1")
    result = store.transaction(
        [],
        [Put(root + "b", b"2"), Get(root + "b"), GetPrefix(root), Get(root + "none"), Delete(root + "a"),
         DeletePrefix(root + "z"), GetPrefix(root + "a")],
    )
    a, b = KeyValue(root + "a", b"1", before, before, 1), KeyValue(root + "b", b"2", before + 1, before + 1, 1)
    assert result.succeeded and result.revision == before + 1
    assert result.responses == (None, b, (a, b), None, 1, 0, ())
    only_read = store.transaction([Compare.exists(root + "none")], [], [Get(root + "b")])
    assert (only_read.succeeded, only_read.revision, only_read.responses) == (False, before + 1, (b,))


@pytest.mark.parametrize(
    "ops",
    [
        lambda root: [Put(root + "a", b""), Put(root + "a", b"")],
        lambda root: [Put(root + "a", b""), Delete(root + "a")],
        lambda root: [DeletePrefix(root), Put(root + "a", b"")],
        lambda root: [Put("", b"")],
        lambda root: [Put(f"{root}{number}", b"") for number in range(129)],
    ],
    ids=["twice", "put+delete", "delete-prefix+put", "no-key", "too-many"],
)
def test_an_impossible_transaction_is_refused_and_changes_nothing(
    store: KeyValueStore, root: str, ops: Callable[[str], list[Op]]
) -> None:
    revision = store.put(root + "z", b"")
    with pytest.raises(RendezvousError):
        store.transaction([], ops(root))
    assert [kv.key for kv in store.get_prefix(root)[0]] == [root + "z"]
    assert store.put(root + "z", b"") == revision + 1


def test_a_watch_sees_what_happens_from_its_start(store: KeyValueStore, root: str) -> None:
    store.put(root + "old", b"")
    with store.watch_prefix(root) as watch:
        first = store.put(root + "a", b"1")
        store.put("/elsewhere" + root, b"")
        result = store.transaction([], [Put(root + "c", b"3"), Delete(root + "a"), Put(root + "b", b"2")])
        store.delete(root + "none")
        last = store.put(root + "d", b"4")
        events = take(watch, 5)
    second = result.revision
    assert events == [
        Event("put", KeyValue(root + "a", b"1", first, first, 1)),
        Event("put", KeyValue(root + "c", b"3", second, second, 1)),
        Event("delete", KeyValue(root + "a", mod_revision=second)),
        Event("put", KeyValue(root + "b", b"2", second, second, 1)),
        Event("put", KeyValue(root + "d", b"4", last, last, 1)),
    ]


def test_a_watch_starts_in_the_past_or_in_the_future(store: KeyValueStore, root: str) -> None:
    revisions = [store.put(root + "k", b"%d" % number) for number in range(5)]
    with store.watch_prefix(root, revisions[2]) as watch:
        assert [event.kv.value for event in take(watch, 3)] == [b"2", b"3", b"4"]
    with store.watch_prefix(root, revisions[4] + 2) as watch:
        store.put(root + "k", b"too early")
        store.put(root + "k", b"in time")
        assert [event.kv.value for event in take(watch, 1)] == [b"in time"]


def test_a_watch_of_a_part_of_a_prefix(store: KeyValueStore, root: str) -> None:
    with store.watch_prefix(root, before=root + "m") as watch:
        store.transaction([], [Put(root + "m", b""), Put(root + "a", b""), Put(root + "n", b"")])
        store.put(root + "z", b"")
        store.put(root + "lz", b"")
        assert [event.kv.key for event in take(watch, 2)] == [root + "a", root + "lz"]


def test_a_watch_of_one_key_sees_no_other(store: Any, root: str) -> None:
    with store.watch(root + "k") as watch:
        store.put(root + "k2", b"")
        store.put(root + "k", b"1")
        store.put(root + "l", b"")
        store.delete(root + "k")
        assert [(event.kind, event.kv.key) for event in take(watch, 2)] == [("put", root + "k"), ("delete", root + "k")]


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_blocked_watch_ends_at_once(store: KeyValueStore, root: str, how: str) -> None:
    watch = store.watch_prefix(root)
    ended_s: list[float] = []
    seen: list[Any] = []
    first = threading.Event()

    def read() -> None:
        for response in watch:
            seen.append(response)
            first.set()
        ended_s.append(time.monotonic())

    thread = threading.Thread(target=read)
    thread.start()
    store.put(root + "k", b"")
    assert first.wait(10)  # it is established, and will block from now on
    asked_s = time.monotonic()
    (watch.cancel if how == "cancel" else store.close)()
    thread.join(10)
    assert not thread.is_alive() and len(seen) == 1
    # 50 ms is the promise; the rest is for a machine that is busy with other tests.
    assert ended_s[0] - asked_s < 0.5
    assert list(watch) == []
    if how == "close":
        with pytest.raises(RendezvousError):
            store.get(root)


def test_the_keys_of_a_lease_go_with_it(store: KeyValueStore, root: str) -> None:
    lease = store.grant_lease(30)
    assert lease.ttl_s == 30 and 28 <= lease.remaining_ttl_s() <= 30
    store.put(root + "kept", b"", lease.id)
    store.put(root + "b", b"", lease.id)
    store.put(root + "a", b"", lease.id)
    last = store.put(root + "kept", b"without a lease")
    found = store.get(root + "a")
    assert found is not None and found.lease_id == lease.id
    assert store.transaction([Compare.lease(root + "a", "==", lease.id)], []).succeeded
    with store.watch_prefix(root, last + 1) as watch:
        lease.revoke()
        assert take(watch, 2) == [Event("delete", KeyValue(root + name, mod_revision=last + 1)) for name in "ab"]
    assert [kv.key for kv in store.get_prefix(root)[0]] == [root + "kept"]
    lease.revoke()
    assert lease.remaining_ttl_s() == 0.0
    with pytest.raises(LeaseLost):
        lease.refresh()
    with pytest.raises(LeaseLost):
        store.put(root + "a", b"", lease.id)
    with pytest.raises(LeaseLost):
        store.transaction([], [Put(root + "a", b"", lease.id)])
    assert store.get(root + "a") is None


def test_a_lease_expires_unless_it_is_kept_alive(store: KeyValueStore, root: str) -> None:
    kept, dropped = store.grant_lease(1), store.grant_lease(1)
    lost: list[str] = []
    keeper = kept.keep_alive(lost.append)
    store.put(root + "kept", b"", kept.id)
    with store.watch_prefix(root) as watch:
        store.put(root + "dropped", b"", dropped.id)
        let_time_pass(store, 3)
        assert [event.kind for event in take(watch, 2)] == ["put", "delete"]
        assert [kv.key for kv in store.get_prefix(root)[0]] == [root + "kept"]
        assert kept.refresh() == 1 and not lost and keeper.overdue_s() == 0.0
        keeper.stop()
        let_time_pass(store, 3)
        assert [(event.kind, event.kv.key) for event in take(watch, 1)] == [("delete", root + "kept")]
    assert not lost, "who has stopped keeping it alive is not told"


def test_who_keeps_a_lease_alive_is_told_once_that_it_is_lost(store: KeyValueStore, root: str) -> None:
    lease = store.grant_lease(1)
    lost: list[str] = []
    lease.keep_alive(lost.append)
    lease.revoke()
    wait_for(lambda: lost, 10, "the loss to be told")
    let_time_pass(store, 3)
    assert len(lost) == 1 and "revoked" in lost[0]


def test_a_watch_below_a_compaction_fails_and_one_above_goes_on(store: Any, root: str) -> None:
    revisions = [store.put(root + "k", b"%d" % number) for number in range(4)]
    store.compact(revisions[2])
    with store.watch_prefix(root, revisions[1]) as watch:
        with pytest.raises(Compacted) as caught:
            next(watch)
        assert caught.value.compact_revision == revisions[2]
        assert list(watch) == []
    with store.watch_prefix(root, revisions[2]) as watch:
        assert [event.kv.value for event in take(watch, 2)] == [b"2", b"3"]
    with pytest.raises(Compacted):
        store.compact(revisions[2])
    with pytest.raises(RendezvousError):
        store.compact(revisions[3] + 1000)


def test_virtual_time_expires_leases_in_order_and_tells_the_time() -> None:
    store = MemoryStore(now_s=100.0)
    with store.watch_prefix("") as watch:
        for ttl_s in (5, 2, 9):
            store.put(f"k{ttl_s}", b"", store.grant_lease(ttl_s).id)
        take(watch, 3)
        store.advance(1.5)
        assert store.get("k2") is not None
        store.advance(5)
        assert store.now_s == 106.5
        assert [event.kv.key for event in take(watch, 2)] == ["k2", "k5"]
        assert store.get("k9") is not None


def test_the_end_of_a_prefix() -> None:
    assert prefix_end(b"a/") == b"a0"
    assert prefix_end(b"a\xff\xff") == b"b"
    assert prefix_end(b"\xff") == b"\0"
    assert prefix_end(b"") == b"\0"


# -- random programs: memory must answer as etcd does -------------------------------------------------------------

_names = st.sampled_from(["a", "b", "a/1", "a/2", "c"])
_values = st.sampled_from([b"", b"x", b"y"])
_ops = st.one_of(
    st.builds(Put, _names, _values),
    st.builds(Delete, _names),
    st.builds(DeletePrefix, st.sampled_from(["a", "a/", "c"])),
    st.builds(Get, _names),
    st.builds(GetPrefix, st.sampled_from(["", "a", "b"])),
)
_operators = st.sampled_from(["==", "!=", "<", ">"])
_conditions = st.one_of(
    st.builds(Compare.version, _names, _operators, st.integers(0, 3)),
    st.builds(Compare.value, _names, _operators, _values),
    st.builds(Compare.absent, _names),
    # Relative to the revision at which the program starts.
    st.builds(Compare.mod_revision, _names, _operators, st.integers(1, 6)),
    st.builds(Compare.create_revision, _names, _operators, st.integers(1, 6)),
)
_transactions = st.tuples(
    st.lists(_conditions, max_size=2), st.lists(_ops, max_size=4), st.lists(_ops, max_size=3)
)


def _run(store: Any, root: str, program: list[Any]) -> list[Any]:
    """What a store answers to a program, with revisions counted from its start and keys without the root."""
    base = store.put(root + "start", b"")

    def place(item: Any) -> Any:
        if isinstance(item, Compare):
            operand = item.operand
            if item.target in ("mod", "create") and isinstance(operand, int) and operand != 0:
                operand += base
            return Compare(item.target, root + item.key, item.operator, operand)
        fields = {name: getattr(item, name) for name in item.__dataclass_fields__}
        name = "prefix" if "prefix" in fields else "key"
        return type(item)(**{**fields, name: root + fields[name]})

    def strip(kv: KeyValue) -> KeyValue:
        # 0 stays 0: the fields of a deletion.
        return KeyValue(kv.key.removeprefix(root), kv.value, kv.create_revision and kv.create_revision - base,
                        kv.mod_revision - base, kv.version, kv.lease_id)

    def normal(response: Any) -> Any:
        if isinstance(response, KeyValue):
            return strip(response)
        return tuple(strip(kv) for kv in response) if isinstance(response, tuple) else response

    answers: list[Any] = []
    for compare, success, failure in program:
        try:
            result = store.transaction(*([place(item) for item in items] for items in (compare, success, failure)))
        except RendezvousError:
            answers.append("refused")
            continue
        answers.append((result.succeeded, result.revision - base, tuple(map(normal, result.responses))))
    end = store.put(root + "end", b"")
    history: list[Event] = []
    with store.watch_prefix(root, base) as watch:
        while not history or history[-1].kv.mod_revision < end:
            taken = take(watch, 1)
            assert taken, "the watch ended early"
            history += taken
    answers.append([(event.kind, strip(event.kv)) for event in history])
    store.delete_prefix(root)
    return answers


@settings(max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=st.lists(_transactions, max_size=6))
def test_memory_answers_any_program_as_etcd_does(server: EtcdCluster, program: list[Any]) -> None:
    root = f"/random{next(_numbers)}/"
    with EtcdStore(EtcdConfig(server.endpoints)) as etcd, MemoryStore() as memory:
        assert _run(memory, root, program) == _run(etcd, root, program)
