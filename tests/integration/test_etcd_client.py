"""The etcd client against real servers that are killed, frozen, restarted and locked."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig, parse_endpoints
from swift_rendezvous.store.kv import (
    AuthenticationFailed,
    Compacted,
    Compare,
    Event,
    LeaseLost,
    PermissionDenied,
    Put,
    StoreUnavailable,
    Watch,
)
from tests.support.etcd_cluster import EtcdCluster, make_tls, wait_for
from tests.support.ports import free_ports


class Reader:
    """Reads a watch in a thread and keeps what came, with the time of its arrival."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.events: list[Event] = []
        self.arrived_s: list[float] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for response in self.watch:
                for event in response.events:
                    self.arrived_s.append(time.monotonic())
                    self.events.append(event)
        except RendezvousError as error:
            self.error = error

    def wait_for_revision(self, revision: int, timeout_s: float = 15.0) -> None:
        wait_for(lambda: self.error or (self.events and self.events[-1].kv.mod_revision >= revision), timeout_s,
                 f"revision {revision} to arrive")
        assert self.error is None, self.error

    def stop(self) -> None:
        self.watch.cancel()
        self._thread.join(5)
        assert not self._thread.is_alive()


def history(store: EtcdStore, prefix: str, start: int, end: int) -> list[Event]:
    """What the store itself says happened, read again from the beginning."""
    reader = Reader(store.watch_prefix(prefix, start))
    reader.wait_for_revision(end)
    reader.stop()
    return reader.events


def connect(cluster: EtcdCluster, first: int | None = None, **options: Any) -> EtcdStore:
    """A client of all members; *first* is the one that it uses at first."""
    store = EtcdStore(EtcdConfig(cluster.endpoints, **options))
    if first is not None:
        store._transport._current = first
    return store


def put_once(store: EtcdStore, *names: str) -> int:
    """The revision in which they came to be. A write whose answer is lost is sent again: unguarded, it would make two
    events of each."""
    guards = [Compare.absent(name) for name in names]
    return store.transaction(guards, [Put(name, b"") for name in names]).revision


def tell(member: int) -> str:
    return f"member {member} was not the one in use"


# -- a server that goes away --------------------------------------------------------------------------------------


def test_a_watch_outlives_restarts_of_its_server(one: EtcdCluster) -> None:
    with connect(one) as store:
        start = put_once(store, "/job/start")
        reader = Reader(store.watch_prefix("/job/", start))
        last = start
        for restart in range(3):
            for number in range(20):
                # Several events in one revision: none may be cut off from the others.
                last = put_once(store, *(f"/job/{restart}/{number}/{part}" for part in range(3)))
            one.kill(0)  # often before the last events were delivered
            with pytest.raises(StoreUnavailable):
                store.get("/job/start", timeout_s=0.2)
            one.start(0)
        last = put_once(store, "/job/end")
        reader.wait_for_revision(last)
        reader.stop()
        assert reader.events == history(store, "/job/", start, last)
        assert len(reader.events) == 2 + 3 * 20 * 3


def test_a_watch_that_is_catching_up_resumes_where_it_was(one: EtcdCluster) -> None:
    # The server sends 1000 revisions at a time; the header of the first batch names the newest revision already.
    with connect(one) as store:
        start = store.put("/job/start", b"")
        for number in range(2500):
            last = store.put(f"/job/{number % 100}", b"")
        watch = store.watch_prefix("/job/", start)
        timer = threading.Timer(20, watch.cancel)  # a lost event would be waited for without end
        timer.start()
        events = list(next(watch).events)
        assert events[-1].kv.mod_revision < last, "the server sent everything at once: nothing is tested"
        watch.restart("test")
        while events[-1].kv.mod_revision < last:
            events += next(watch).events
        timer.cancel()
        assert [event.kv.mod_revision for event in events] == list(range(start, last + 1))
        watch.cancel()


def test_the_leader_of_three_is_killed(three: EtcdCluster) -> None:
    leader = three.leader()
    with connect(three, first=leader) as store:
        start = store.put("/job/start", b"")
        assert store._transport.current == leader, tell(leader)
        reader = Reader(store.watch_prefix("/job/", start))
        reader.wait_for_revision(start)
        three.kill(leader)
        killed_s = time.monotonic()
        last = store.put("/job/next", b"1")
        put_s = time.monotonic() - killed_s
        reader.wait_for_revision(last)
        noticed_s = reader.arrived_s[-1] - killed_s
        assert put_s < 3.0 and noticed_s < 4.0
        result = store.transaction([Compare.absent("/job/once")], [Put("/job/once", b"")])
        assert result.succeeded or result.retried
        last = result.revision
        reader.wait_for_revision(last)
        reader.stop()
        assert reader.events == history(store, "/job/", start, last)


def test_a_follower_that_holds_the_watch_is_killed(three: EtcdCluster) -> None:
    follower = (three.leader() + 1) % 3
    with connect(three, first=follower) as watcher, connect(three, first=three.leader()) as writer:
        start = writer.put("/job/start", b"")
        reader = Reader(watcher.watch_prefix("/job/", start))
        reader.wait_for_revision(start)
        for number in range(30):
            last = writer.put("/job/k", b"%d" % number)
            if number == 15:
                three.kill(follower)
        written_s = time.monotonic()
        reader.wait_for_revision(last)
        assert reader.arrived_s[-1] - written_s < 2.0
        reader.stop()
        assert [event.kv.value for event in reader.events[1:]] == [b"%d" % number for number in range(30)]


# -- a server that holds its connections but does not answer ------------------------------------------------------


def test_a_frozen_single_server_is_unavailable_within_the_deadline(one: EtcdCluster) -> None:
    with connect(one) as store:
        store.put("/job/k", b"1")
        reader = Reader(store.watch_prefix("/job/"))
        one.freeze(0)
        asked_s = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            store.put("/job/k", b"2", timeout_s=1.5)
        assert 1.4 < time.monotonic() - asked_s < 2.0
        assert one.endpoints[0] in str(caught.value) and "no answer" in str(caught.value)
        one.thaw(0)
        last = store.put("/job/k", b"3")
        reader.wait_for_revision(last)
        # The put that timed out was sent and may well have been applied, before or after the next one.
        assert reader.events[-1].kv.mod_revision >= last
        reader.stop()


def test_a_frozen_member_of_three_is_left(three: EtcdCluster) -> None:
    leader = three.leader()
    frozen = (leader + 1) % 3
    with connect(three, first=frozen) as store, connect(three, first=leader) as writer:
        start = store.put("/job/start", b"")
        assert store._transport.current == frozen, tell(frozen)
        reader = Reader(store.watch_prefix("/job/", start))
        reader.wait_for_revision(start)
        time.sleep(2.0)  # a connection in use has gRPC's own ping under way, which would find out too: not this one
        three.freeze(frozen)
        frozen_s = time.monotonic()
        # Written through another client, so that only the watchdog can find out.
        last = writer.put("/job/k", b"1")
        reader.wait_for_revision(last)
        assert reader.arrived_s[-1] - frozen_s < 3.5
        asked_s = time.monotonic()
        last = store.put("/job/k", b"2")
        assert time.monotonic() - asked_s < 2.0
        reader.wait_for_revision(last)
        reader.stop()
        assert [event.kv.value for event in reader.events] == [b"", b"1", b"2"]


def test_a_put_fails_over_from_a_frozen_member(three: EtcdCluster) -> None:
    frozen = (three.leader() + 1) % 3
    with connect(three, first=frozen) as store:
        store.put("/job/k", b"1")
        three.freeze(frozen)
        asked_s = time.monotonic()
        result = store.transaction([Compare.version("/job/k", "==", 1)], [Put("/job/k", b"2")])
        assert 0.9 < time.monotonic() - asked_s < 3.0
        assert result.retried
        assert store._transport.current != frozen


def test_cancel_ends_a_watch_whose_server_is_frozen(one: EtcdCluster) -> None:
    with connect(one) as store:
        start = store.put("/job/k", b"1")
        reader = Reader(store.watch_prefix("/job/", start))
        reader.wait_for_revision(start)
        one.freeze(0)
        asked_s = time.monotonic()
        reader.stop()
        assert time.monotonic() - asked_s < 0.5
        one.thaw(0)


def test_nobody_listens() -> None:
    ports = free_ports(2)
    with EtcdStore(EtcdConfig(tuple(f"127.0.0.1:{port}" for port in ports))) as store:
        asked_s = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            store.put("/k", b"", timeout_s=0.5)
        assert time.monotonic() - asked_s < 1.0
        message = str(caught.value)
        assert all(f"127.0.0.1:{port}  " in message for port in ports) and "refused" in message


def test_close_ends_a_call_that_waits(one: EtcdCluster) -> None:
    store = connect(one)
    store.put("/k", b"")
    one.freeze(0)
    threading.Timer(0.2, store.close).start()
    asked_s = time.monotonic()
    with pytest.raises(RendezvousError, match="closed"):
        store.put("/k", b"", timeout_s=20)
    assert time.monotonic() - asked_s < 2.0


# -- leases ---------------------------------------------------------------------------------------------------------


def test_a_lease_is_kept_alive_over_a_change_of_leader(three: EtcdCluster) -> None:
    leader = three.leader()
    with connect(three, first=leader) as store:
        lost: list[str] = []
        lease = store.grant_lease(2)
        keeper = lease.keep_alive(lost.append)
        store.put("/job/me", b"", lease.id)
        three.kill(leader)
        # Longer than the lease lives, new leader included, without anybody refreshing it.
        reader = Reader(store.watch_prefix("/job/"))
        time.sleep(6.0)
        assert not lost and not reader.events and keeper.overdue_s() == 0.0
        assert store.get("/job/me") is not None
        lease.revoke()
        wait_for(lambda: lost, 5, "the loss to be told")
        wait_for(lambda: reader.events, 5, "the deletion")
        reader.stop()
        with pytest.raises(LeaseLost):
            lease.refresh()


def test_an_unreachable_store_is_no_lost_lease(one: EtcdCluster) -> None:
    with connect(one) as store:
        lost: list[str] = []
        lease = store.grant_lease(2)
        keeper = lease.keep_alive(lost.append)
        store.put("/job/me", b"", lease.id)
        one.freeze(0)
        wait_for(lambda: keeper.overdue_s() > 0.5, 10, "the lease to be overdue")
        assert not lost
        one.thaw(0)
        # Which comes first, the refresh or the expiry, is the server's to say; both must be told truly.
        wait_for(lambda: lost or keeper.overdue_s() == 0.0, 10, "a word from the server")
        assert (store.get("/job/me") is None) == bool(lost)


# -- login and encryption -------------------------------------------------------------------------------------------


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path, args=["--auth-token", "simple", "--auth-token-ttl", "3"]) as cluster:
        cluster.enable_login("agent", "s3cret-word", "/job/")
        yield cluster


def test_tokens_that_expired_or_died_with_their_server_are_renewed(
    locked: EtcdCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with connect(locked, user="agent", password="s3cret-word") as store:
        start = store.put("/job/a", b"1")
        first = store._transport._token
        reader = Reader(store.watch_prefix("/job/", start))
        reader.wait_for_revision(start)
        # The watchdog's probes keep a token in use alive: this is what an expired one looks like to the server.
        store._transport._token = "aaaaaaaaaaaaaaaa.1"
        store.put("/job/b", b"2")
        assert store._transport._token not in (first, "aaaaaaaaaaaaaaaa.1")
        locked.kill(0)
        locked.start(0)
        last = store.put("/job/c", b"3")
        reader.wait_for_revision(last)
        reader.stop()
        assert [event.kv.value for event in reader.events] == [b"1", b"2", b"3"]
        assert "s3cret-word" not in repr(store.config) and "s3cret-word" not in caplog.text
        for token in (first, store._transport._token):
            assert token and token not in caplog.text


def test_an_idle_clients_token_expires(locked: EtcdCluster) -> None:
    with connect(locked, user="agent", password="s3cret-word") as store:
        store.put("/job/a", b"1")
        first = store._transport._token
        time.sleep(5.0)
        store.put("/job/a", b"2")
        assert store._transport._token != first, "the token had not expired: nothing was tested"


@pytest.mark.parametrize(("user", "password"), [("agent", "wrong-word"), ("nobody", "s3cret-word"), (None, None)])
def test_a_wrong_login_fails_at_once(locked: EtcdCluster, user: str | None, password: str | None) -> None:
    with connect(locked, user=user, password=password) as store:
        for attempt in (
            lambda: store.put("/job/a", b""),
            lambda: store.watch_prefix("/job/"),
            lambda: next(store.watch_prefix("/job/", 1)),
        ):
            asked_s = time.monotonic()
            with pytest.raises((AuthenticationFailed, PermissionDenied)) as caught:
                attempt()
            assert time.monotonic() - asked_s < 2.0
            assert "word" not in str(caught.value).replace("password", "")
            # Without a user a watch is merely denied by the server; every other case is a failed login.
            assert isinstance(caught.value, AuthenticationFailed) or user is None


def test_foreign_keys_are_denied(locked: EtcdCluster) -> None:
    with connect(locked, user="agent", password="s3cret-word") as store:
        for attempt in (
            lambda: store.put("/other/a", b""),
            lambda: store.get_prefix("/"),
            lambda: store.watch_prefix("/other/"),
            lambda: next(store.watch_prefix("/other/", 1)),
        ):
            asked_s = time.monotonic()
            with pytest.raises(PermissionDenied):
                attempt()
            assert time.monotonic() - asked_s < 2.0


def test_a_user_on_a_server_without_login_is_no_obstacle(one: EtcdCluster) -> None:
    with connect(one, user="agent", password="s3cret-word") as store:
        reader = Reader(store.watch_prefix("/job/"))
        reader.wait_for_revision(store.put("/job/a", b""))
        reader.stop()


def test_tls_with_client_certificates_and_login(tmp_path: Path) -> None:
    tls = make_tls(tmp_path)
    files = {"ca_cert": tls.ca, "cert": tls.client_cert, "key": tls.client_key}
    with EtcdCluster(tmp_path, tls=tls) as cluster:
        cluster.enable_login("agent", "s3cret-word", "/job/")
        with connect(cluster, user="agent", password="s3cret-word", **files) as store:
            start = store.put("/job/a", b"1")
            reader = Reader(store.watch_prefix("/job/", start))
            cluster.kill(0)
            cluster.start(0)
            reader.wait_for_revision(store.put("/job/a", b"2"))
            reader.stop()
            assert [event.kv.value for event in reader.events] == [b"1", b"2"]
            with pytest.raises(PermissionDenied):
                store.put("/other", b"")
        # Without a certificate, and without encryption: refused, and said so.
        for config in (EtcdConfig(cluster.endpoints, ca_cert=tls.ca), EtcdConfig(cluster.endpoints)):
            with EtcdStore(config) as store, pytest.raises(StoreUnavailable):
                store.get("/job/a", timeout_s=0.5)


# -- compaction -----------------------------------------------------------------------------------------------------


def test_a_watch_whose_history_is_gone_says_so(one: EtcdCluster) -> None:
    with connect(one) as store:
        start = store.put("/job/k", b"0")
        watch = store.watch_prefix("/job/", start)
        assert next(watch).revision == start
        one.kill(0)
        one.start(0)
        with connect(one) as other:
            for number in range(5):
                last = other.put("/job/k", b"%d" % number)
            other.compact(last)
        # It was away meanwhile (nobody read it) and cannot be given what it missed.
        with pytest.raises(Compacted) as caught:
            for response in watch:
                assert response.revision <= last
        assert caught.value.compact_revision == last


# -- the process around it ------------------------------------------------------------------------------------------


def test_importing_starts_no_thread() -> None:
    code = (
        "import threading, swift_rendezvous.store.etcd as e\n"
        "store = e.EtcdStore(e.EtcdConfig(('a:1',)))\n"
        "print(threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "1", done.stderr


def test_children_and_client_do_not_disturb_each_other(one: EtcdCluster) -> None:
    # Of gloo's and c10d's stores, in tests before this one.
    of_others = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)}
    with connect(one) as store:
        reader = Reader(store.watch_prefix("/job/"))
        store.put("/job/a", b"")
        # Standard output is a pipe; a socket could only be one of gRPC's.
        code = (
            "import os; d = '/proc/self/fd/'\n"
            "for f in os.listdir(d): os.path.lexists(d + f) and print(os.readlink(d + f))"
        )
        for _ in range(3):
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                                  stdin=subprocess.DEVNULL, close_fds=False)
            assert "/dev/null" in done.stdout, done.stderr
            inherited = {line for line in done.stdout.splitlines() if line.startswith("socket:")}
            assert inherited <= of_others, f"a child has inherited a connection: {done.stdout}"
        reader.wait_for_revision(store.put("/job/b", b""))
        reader.stop()


def test_watches_leave_no_thread_behind(one: EtcdCluster) -> None:
    before = threading.active_count()
    with connect(one) as store:
        for number in range(10):
            with store.watch_prefix("/job/") as watch:
                store.put("/job/k", b"%d" % number)
                next(watch)
    wait_for(lambda: threading.active_count() <= before, 5, f"threads to end: {threading.enumerate()}")


# -- configuration --------------------------------------------------------------------------------------------------


def test_endpoints_are_read() -> None:
    assert parse_endpoints("host:2379, host2,host:2379") == (("host:2379", "host2:2379"), None)
    assert parse_endpoints("http://10.0.0.1:1,http://b") == (("10.0.0.1:1", "b:2379"), False)
    assert parse_endpoints("https://[::1]:2380/,[fe80::1]") == (("[::1]:2380", "[fe80::1]:2379"), True)
    assert parse_endpoints("unix:/run/etcd:1,a,unix:///run/etcd:1") == (("unix:/run/etcd:1", "a:2379"), None)


def test_all_mistakes_of_a_list_are_told_together() -> None:
    text = "good:1,bad:port,:5,::1,ftp://a,http://a/path,a:70000,https://b,http://c,[::1]x,,user:hunter2@c,unix:etcd"
    with pytest.raises(ValueError) as caught:
        parse_endpoints(text)
    lines = str(caught.value).splitlines()
    assert len(lines) == 11 and "hunter2" not in "\n".join(lines)
    assert not any("good" in line for line in lines)


def test_the_environment_is_read(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("s3cret-word\n")
    secret.chmod(0o640)
    assert EtcdConfig.from_environment({}) is None
    config = EtcdConfig.from_environment(
        {"SWIFT_ETCD_ENDPOINTS": "a,b:1", "SWIFT_ETCD_USER": "agent", "SWIFT_ETCD_PASSWORD_FILE": str(secret)},
        timeout_s=2,
    )
    assert config == EtcdConfig(("a:2379", "b:1"), "agent", "s3cret-word", timeout_s=2)
    assert "s3cret" not in repr(config)
    argument = EtcdConfig.from_environment(
        {"SWIFT_ETCD_ENDPOINTS": "a", "SWIFT_ETCD_USER": "agent", "SWIFT_ETCD_PASSWORD": "other"},
        endpoints="https://c", user="me", password_file=str(secret), ca_cert=str(secret),
    )
    assert argument == EtcdConfig(("c:2379",), "me", "s3cret-word", ca_cert=str(secret), tls=True)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o601])
def test_a_password_that_others_may_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    secret = tmp_path / "password"
    secret.write_text("s3cret-word\n")
    secret.chmod(mode)
    environment = {"SWIFT_ETCD_ENDPOINTS": "a", "SWIFT_ETCD_USER": "me", "SWIFT_ETCD_PASSWORD_FILE": str(secret)}
    with pytest.raises(ValueError, match=r"others may read or change it .*chmod 600") as caught:
        EtcdConfig.from_environment(environment)
    assert "s3cret" not in str(caught.value) and "\n" not in str(caught.value)


def test_all_mistakes_of_the_environment_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        EtcdConfig.from_environment(
            {"SWIFT_ETCD_ENDPOINTS": "http://a:0", "SWIFT_ETCD_PASSWORD": "hunter2", "SWIFT_ETCD_CERT": "/no/such/file"}
        )
    message = str(caught.value)
    for part in ("port '0'", "SWIFT_ETCD_USER", "/no/such/file", "SWIFT_ETCD_KEY"):
        assert part in message
    assert "hunter2" not in message
    with pytest.raises(ValueError, match="no password"):
        EtcdConfig.from_environment({"SWIFT_ETCD_ENDPOINTS": "a", "SWIFT_ETCD_USER": "agent"})
