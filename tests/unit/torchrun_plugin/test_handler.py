"""What torch's rendezvous gets from etcd: one state by compare-and-swap, a c10d store, errors that torch knows."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
)

from swift_agent.torch_private import rendezvous as torch_rendezvous
from swift_agent.torchrun_plugin.backend import SwiftEtcdBackend, make_handler, run_prefix
from swift_agent.torchrun_plugin.handler import BACKEND, PluginOptions, create_handler, get_handler
from swift_agent.torchrun_plugin.state import to_json, to_torch
from swift_agent.torchrun_plugin.store import EtcdRunStore, LeasedStore
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import KeyValueStore, TransactionResult
from tests.support.etcd_cluster import EtcdCluster
from tests.support.memory_store import MemoryStore
from tests.support.ports import free_ports

SHORT = timedelta(milliseconds=100)
_numbers = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), heartbeat_ms=20, election_ms=200) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "etcd"])
def kv_store(request: pytest.FixtureRequest, server: EtcdCluster) -> Iterator[Any]:
    with MemoryStore() if request.param == "memory" else EtcdStore(EtcdConfig(server.endpoints)) as store:
        yield store


@pytest.fixture
def leased(kv_store: KeyValueStore) -> Iterator[LeasedStore]:
    made = LeasedStore(kv_store, 60)
    yield made
    made.close()


@pytest.fixture
def run_id() -> str:
    return f"run{next(_numbers)}"


@pytest.fixture
def store(leased: LeasedStore, run_id: str) -> EtcdRunStore:
    return run_store(leased, run_id)


def run_store(leased: LeasedStore, run_id: str) -> EtcdRunStore:
    prefix = run_prefix(run_id)
    return EtcdRunStore(leased, prefix + "store/", prefix + "written/", timedelta(seconds=10))


def parameters(run_id: str = "job", endpoint: str = "host", nodes: tuple[int, int] = (1, 1), **conf: Any) -> Any:
    return RendezvousParameters(BACKEND, endpoint, run_id, *nodes, local_addr="127.0.0.1", **conf)


def state(address: str) -> bytes:
    """One that torch could have made, of one node that waits."""
    made = torch_rendezvous.new_rendezvous_state()
    made.wait_list.add(torch_rendezvous.rendezvous_node(address, 1, 2))
    return pickle.dumps(made)


def test_the_state_survives_the_store() -> None:
    begun = datetime(2026, 11, 21, 12, 0, 0, 123456, tzinfo=UTC)
    nodes = [torch_rendezvous.rendezvous_node(f"host{index % 2}", 100 - index, index) for index in range(4)]
    made = torch_rendezvous.new_rendezvous_state()
    empty = vars(torch_rendezvous.new_rendezvous_state())
    assert vars(pickle.loads(to_torch(to_json(pickle.dumps(made))))) == empty
    made.round, made.complete, made.closed, made.deadline = 3, True, True, begun
    made.participants = {nodes[1]: 0, nodes[0]: 1}
    made.wait_list, made.redundancy_list = {nodes[2]}, {nodes[3], nodes[2]}
    made.last_heartbeats = {node: begun + timedelta(seconds=index) for index, node in enumerate(nodes)}
    stored = to_json(pickle.dumps(made))
    assert b"host1" in stored and json.loads(stored)["v"] == 1
    again = pickle.loads(to_torch(stored))
    assert type(again) is type(made) and vars(again) == vars(made)
    assert to_json(to_torch(stored)) == stored


def test_a_state_with_other_fields_is_not_cut_short() -> None:
    made = torch_rendezvous.new_rendezvous_state()
    made.epoch = 1
    with pytest.raises(ValueError, match="other fields than swift-agent knows: epoch"):
        to_json(pickle.dumps(made))


# -- the state -----------------------------------------------------------------------------------------------------


def test_state_is_written_by_compare_and_swap(leased: LeasedStore, run_id: str) -> None:
    one, other = SwiftEtcdBackend(leased, run_id), SwiftEtcdBackend(leased, run_id)
    assert one.name == BACKEND and one.get_state() is None
    first = one.set_state(state("first"))
    assert first is not None and first[0] == state("first") and first[2]
    assert other.get_state() == first[:2]
    assert other.set_state(state("second")) == (*first[:2], False), "there is one already"
    second = other.set_state(state("second"), first[1])
    assert second is not None and second[2] and second[1] > first[1]
    assert one.set_state(state("third"), first[1]) == (state("second"), second[1], False), "the token is old"
    assert one.set_state(state("third"), "no token") == (state("second"), second[1], False)
    assert one.get_state() == second[:2]


def test_a_token_of_a_state_that_is_gone_writes_nothing(leased: LeasedStore, run_id: str) -> None:
    backend = SwiftEtcdBackend(leased, run_id)
    first = backend.set_state(state("first"))
    assert first is not None
    leased.store.delete_prefix(run_prefix(run_id))
    assert backend.set_state(state("second"), first[1]) is None and backend.get_state() is None


def test_one_of_many_wins(leased: LeasedStore, run_id: str) -> None:
    backend = SwiftEtcdBackend(leased, run_id)
    begun = backend.set_state(state("begin"))
    assert begun is not None
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(backend.set_state(state(str(n)), begun[1])))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(answers) == 8 and [answer[2] for answer in answers].count(True) == 1
    assert len({answer[:2] for answer in answers}) == 1, "all see the same state and token"


def test_a_new_state_begins_with_an_empty_store(leased: LeasedStore, store: EtcdRunStore, run_id: str) -> None:
    store.set("MASTER_ADDR", "of a round 0 long ago")
    SwiftEtcdBackend(leased, run_id).set_state(state("new"))
    assert store.num_keys() == 0


class LosesAnswers:
    """A store whose first transaction is applied twice, the second time after its answer was lost."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self.armed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def transaction(self, compare: Any, success: Any, failure: Any = ()) -> TransactionResult:
        if not self.armed:
            return self._store.transaction(compare, success, failure)
        self.armed = False
        self._store.transaction(compare, success, failure)
        again = self._store.transaction(compare, success, failure)
        return TransactionResult(again.succeeded, again.revision, again.responses, retried=True)


def test_a_lost_answer_is_no_lost_write(kv_store: KeyValueStore, run_id: str) -> None:
    losing: Any = LosesAnswers(kv_store)
    leased = LeasedStore(losing, 60)
    backend, store = SwiftEtcdBackend(leased, run_id), run_store(leased, run_id)
    losing.armed = True
    answer = backend.set_state(state("mine"))
    assert answer is not None and answer[2] and answer == (*backend.get_state(), True)  # type: ignore[misc]
    for change in (lambda: store.add("counter", 1), lambda: store.append("text", "x")):
        change()
        losing.armed = True
        change()
        assert not losing.armed
    assert store.get("counter") == b"2" and store.get("text") == b"xx", "each is applied once"
    losing.armed = True
    assert store.compare_set("text", "xx", "new") == b"new"


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch evil",)


CORRUPT = {
    "garbage": b"garbage",
    "empty": b"",
    "code": pickle.dumps(Evil()),
    "no object": b"[]",
    "another version": to_json(state("host")).replace(b'"v": 1', b'"v": 2'),
    "a field less": to_json(state("host")).replace(b'"closed": false, ', b""),
    "a time that is none": to_json(state("host")).replace(b'"deadline": null', b'"deadline": "soon"'),
    "a node that is none": to_json(state("host")).replace(b'["host", 1, 2]', b'["host", 1]'),
    "a number that is none": to_json(state("host")).replace(b'["host", 1, 2]', b'["host", 1, "x"]'),
}


@pytest.mark.parametrize("value", CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_state_is_refused_and_runs_nothing(
    value: bytes, leased: LeasedStore, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    leased.store.put(run_prefix(run_id) + "state", value)
    with pytest.raises(RendezvousStateError, match="corrupt"):
        SwiftEtcdBackend(leased, run_id).get_state()
    with pytest.raises(RendezvousStateError, match="corrupt"):
        SwiftEtcdBackend(leased, run_id).set_state(state("new"))
    assert not (tmp_path / "evil").exists()


def test_no_run_is_a_folder_of_another() -> None:
    assert run_prefix("job-7.a_b") == "/swift-rdzv/job-7.a_b/"
    assert not run_prefix("a/store").startswith(run_prefix("a"))


# -- the store -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["ours", "under a prefix", "torch"])
def test_the_store_answers_like_torchs(make: str, leased: LeasedStore, run_id: str) -> None:
    ours = run_store(leased, run_id)  # named: C++ does not keep it alive
    store: Any = {"ours": ours, "under a prefix": dist.PrefixStore("round", ours), "torch": dist.HashStore()}[make]
    store.set("key", "value")
    assert store.get("key") == b"value" and store.check(["key"]) and not store.check(["key", "other"])
    assert store.add("counter", 2) == 2 and store.add("counter", -3) == -1 and store.add("counter", 0) == -1
    assert store.get("counter") == b"-1"
    assert store.compare_set("new", "wrong", "first") == b"wrong" and not store.check(["new"])
    assert store.compare_set("new", "", "first") == b"first"
    assert store.compare_set("new", "wrong", "second") == b"first"
    assert store.compare_set("new", "first", "second") == b"second"
    store.append("key", "s")
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.multi_get(["b", "a", "key"]) == [b"2", b"1", b"values"]
    assert store.num_keys() == 5 and store.delete_key("a") and not store.delete_key("a")
    assert store.has_extended_api()
    store.wait(["b"], SHORT)
    with pytest.raises(RuntimeError):
        store.wait(["b", "never"], SHORT)
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    with pytest.raises(RuntimeError):
        store.get("never")
    assert store.get("b") == b"2"


def test_binary_values_and_many_keys(store: EtcdRunStore) -> None:
    value = bytes(range(256)) * 10
    store.set("binary", value)
    assert store.get("binary") == value
    keys = [f"key{number}" for number in range(250)]  # more than one transaction may hold
    store.multi_set(keys, [key.encode() + b"\0\xff" for key in keys])
    assert store.multi_get(keys) == [key.encode() + b"\0\xff" for key in keys]
    assert store.num_keys() == 251 and "key249" in store.list_keys()


def test_a_wait_ends_with_its_time_or_its_key(leased: LeasedStore, store: EtcdRunStore, run_id: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"nobody has set round/never within 0\.1 s"):
        dist.PrefixStore("round", store).wait(["never"], SHORT)
    assert 0.09 < time.monotonic() - began_s < 5
    got: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: got.append(store.multi_get(["late", "later"])))
    thread.start()
    other = run_store(leased, run_id)
    time.sleep(0.1)
    other.set("later", b"2")
    other.set("late", b"1")
    thread.join(5)
    assert got == [[b"1", b"2"]]


def test_every_add_counts_once(leased: LeasedStore, store: EtcdRunStore, run_id: str) -> None:
    stores = [store, run_store(leased, run_id)]  # two nodes
    seen: list[int] = []

    def count(mine: EtcdRunStore) -> None:
        for _ in range(10):
            seen.append(mine.add("counter", 1))

    threads = [threading.Thread(target=count, args=(stores[number % 2],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(seen) == list(range(1, 41)) and store.get("counter") == b"40"


# -- leases --------------------------------------------------------------------------------------------------------


class SharedMemory(MemoryStore):
    """Stays open when one of its clients closes it."""

    def close(self) -> None:
        pass


def test_all_keys_go_with_the_lease() -> None:
    kv_store = SharedMemory()
    handler = make_handler(kv_store, parameters(), 60)
    info = handler.next_rendezvous()
    info.store.add("counter", 1)
    keys = kv_store.get_prefix("")[0]
    assert keys and all(kv.lease_id for kv in keys) and all(kv.key.startswith(run_prefix("job")) for kv in keys)
    kv_store.advance(1000)
    assert len(kv_store.get_prefix("")[0]) == len(keys), "kept alive"
    assert handler.shutdown() and handler.shutdown()
    assert kv_store.get_prefix("")[0], "the others can see that it is closed"
    kv_store.advance(61)
    assert kv_store.get_prefix("")[0] == []


def test_a_lost_lease_is_replaced(run_id: str) -> None:
    kv_store = MemoryStore()
    leased = LeasedStore(kv_store, 60)
    store = run_store(leased, run_id)
    store.set("before", "1")
    for number in range(3):
        kept = kv_store.get_prefix("")[0][0].lease_id
        kv_store.revoke(kv_store._leases[kept])
        store.set("after", str(number))
        assert store.list_keys() == ["after"]


def test_a_lease_that_is_lost_unnoticed_is_replaced(kv_store: KeyValueStore, run_id: str) -> None:
    leased = LeasedStore(kv_store, 60)
    store = run_store(leased, run_id)
    assert store.add("counter", 1) == 1
    leased._lease_id = 12345  # the store has never heard of it
    assert store.add("counter", 1) == 2


# -- torch's handler -----------------------------------------------------------------------------------------------


def test_two_nodes_meet_and_one_closes(server: EtcdCluster, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handlers = [
        create_handler(parameters(run_id, server.endpoints[0], (2, 2), join_timeout=20, lease_ttl=30))
        for _ in range(2)
    ]
    infos: list[Any] = []

    def meet(handler: RendezvousHandler) -> None:
        infos.append(handler.next_rendezvous())

    threads = [threading.Thread(target=meet, args=(handler,)) for handler in handlers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(info.rank for info in infos) == [0, 1] and {info.world_size for info in infos} == {2}
    assert len({info.bootstrap_store_info.master_port for info in infos}) == 1
    infos[0].store.set("key", b"\0")
    assert infos[1].store.get("key") == b"\0"
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
    assert all(handler.get_backend() == BACKEND and handler.get_run_id() == run_id for handler in handlers)
    assert handlers[0].shutdown()
    with pytest.raises(RendezvousClosedError):
        handlers[1].next_rendezvous()
    assert handlers[1].is_closed() and handlers[1].shutdown()
    with pytest.raises(RendezvousConnectionError, match=r"shut down|closed"):
        infos[0].store.set("key", "value")


def test_etcd_that_does_not_answer_is_one_clear_error() -> None:
    (port,) = free_ports(1)
    handler = create_handler(parameters(endpoint=f"127.0.0.1:{port}", read_timeout=1))
    with pytest.raises(RendezvousConnectionError, match=f"127.0.0.1:{port}"):
        handler.next_rendezvous()
    assert not handler.shutdown()


def test_a_role_on_the_prefix_of_the_run_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EtcdCluster(tmp_path, heartbeat_ms=20, election_ms=200) as cluster:
        cluster.enable_login("trainer", "secret", run_prefix("job"))
        monkeypatch.setenv("SWIFT_ETCD_USER", "trainer")
        monkeypatch.setenv("SWIFT_ETCD_PASSWORD", "secret")
        handler = create_handler(parameters(endpoint=cluster.endpoints[0], keep_alive_interval=1, lease_ttl=2))
        store = handler.next_rendezvous().store
        store.set("key", "value")
        time.sleep(4)  # two leases
        assert store.get("key") == b"value" and store.num_keys() >= 1 and handler.shutdown()
        with pytest.raises(RendezvousConnectionError, match="permission"):
            create_handler(parameters("other", cluster.endpoints[0])).next_rendezvous()
        monkeypatch.setenv("SWIFT_ETCD_PASSWORD", "wrong")
        with pytest.raises(RendezvousConnectionError, match="wrong user or password"):
            create_handler(parameters(endpoint=cluster.endpoints[0])).next_rendezvous()


# -- options -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_etcd_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SWIFT_ETCD_") and name != "SWIFT_ETCD_BINARY"]:
        monkeypatch.delenv(name)
    # Set and removed, so that what `create_handler` leaves there is taken away again.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = PluginOptions.from_parameters(parameters(endpoint="one,two:1"))
    assert options == PluginOptions(EtcdConfig(("one:2379", "two:1"), timeout_s=60.0), 60)
    password = tmp_path / "password"
    password.write_text("secret\n")
    password.chmod(0o600)
    options = PluginOptions.from_parameters(
        parameters(endpoint="one,two", protocol="HTTPS", user="me", password_file=str(password), ca_cert=str(password),
                   ssl_cert=str(password), ssl_cert_key=str(password), read_timeout="7", lease_ttl="15")
    )
    etcd = options.etcd
    assert etcd.tls and etcd.user == "me" and etcd.password == "secret" and etcd.endpoints == ("one:2379", "two:2379")
    assert etcd.ca_cert == etcd.cert == etcd.key == str(password)
    assert etcd.timeout_s == 7 and options.lease_ttl_s == 15 and "secret" not in repr(options)
    assert PluginOptions.from_parameters(parameters(keep_alive_interval=40)).lease_ttl_s == 120
    monkeypatch.setenv("SWIFT_ETCD_ENDPOINTS", "https://there")
    assert PluginOptions.from_parameters(parameters(endpoint="")).etcd.tls


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"endpoint": ""}, "needs --rdzv-endpoint"),
        ({"endpoint": "a:b"}, "port 'b'"),
        ({"password": "secret"}, "does not belong on the command line"),
        ({"user": "me"}, "has no password"),
        ({"protocol": "ftp"}, "not http or https"),
        ({"protocol": "https", "endpoint": "http://a"}, "contradicts"),
        ({"lease_ttl": "9"}, "at least twice keep_alive_interval=5"),
        ({"read_timeout": "0"}, "not a positive number"),
        ({"ca_cert": "/no/such/file"}, "cannot be read"),
    ],
)
def test_a_wrong_option_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        create_handler(parameters(**wrong))
    assert "secret" not in str(caught.value)


def test_what_the_entry_point_names() -> None:
    assert get_handler() is create_handler

