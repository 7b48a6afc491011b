"""Which members of a real etcd are proven to be in no quorum; and what `tenure` counts on, of real lessors."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from swift_rendezvous.store import tenure
from swift_rendezvous.store._etcd_members import MembersWatch, reach, worst
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from tests.support.etcd_cluster import EtcdCluster, make_tls, wait_for
from tests.support.relay import Relay

TTL_S = 4


class Watching:
    """What is told of the members, folded as by a node that has renewed its lease when this began, and never again."""

    def __init__(self, store: EtcdStore) -> None:
        self._lock = threading.Lock()
        self.tenure = tenure.fold(tenure.Tenure(), tenure.Renewed(time.monotonic(), TTL_S))
        self.in_doubt = False
        self.watch: MembersWatch = store.watch_members(self._tell, lambda: self.in_doubt)
        wait_for(lambda: self.tenure.names, 10.0, "the members")
        wait_for(lambda: all(":" in name for name in self.tenure.names.values()), 10.0, "their addresses")
        self.renewed()

    def renewed(self) -> None:
        self._tell(tenure.Renewed(time.monotonic(), TTL_S))

    def _tell(self, event: tenure.Event) -> None:
        with self._lock:
            self.tenure = tenure.fold(self.tenure, event)

    @property
    def sights(self) -> list[str]:
        return sorted(self.tenure.sights.values())

    def sees(self, *sights: str) -> None:
        self.in_doubt = True
        wait_for(lambda: self.sights == sorted(sights), 8.0, f"{sights}")

    @property
    def holds(self) -> bool:
        return tenure.holds(self.tenure, now_s=time.monotonic())


@pytest.fixture
def watch() -> Iterator[Callable[[tuple[str, ...]], Watching]]:
    open_: list[tuple[EtcdStore, Watching]] = []

    def make(endpoints: tuple[str, ...]) -> Watching:
        store = EtcdStore(EtcdConfig(endpoints))
        watching = Watching(store)
        open_.append((store, watching))
        return watching

    yield make
    for store, watching in open_:
        watching.watch.stop()
        store.close()


def keep(watching: Watching, expected: bool) -> None:
    """For longer than the lease, and half as long again."""
    end_s = time.monotonic() + 1.5 * TTL_S
    while time.monotonic() < end_s:
        if expected:
            assert watching.holds, watching.tenure
        time.sleep(0.02)
    assert watching.holds is expected, watching.tenure


def test_a_single_server_that_is_gone_gives_nothing_to_anybody(
    tmp_path: Path, watch: Callable[[tuple[str, ...]], Watching]
) -> None:
    with EtcdCluster(tmp_path) as etcd:
        watching = watch(etcd.endpoints)
        watching.sees("led")
        watching.renewed()
        etcd.kill(0)
        watching.sees("refused")
        keep(watching, True)


def test_a_server_that_is_frozen_proves_nothing(
    tmp_path: Path, watch: Callable[[tuple[str, ...]], Watching]
) -> None:
    with EtcdCluster(tmp_path) as etcd:
        watching = watch(etcd.endpoints)
        etcd.freeze(0)
        watching.sees("silent")
        keep(watching, False)


def test_a_lost_quorum_is_proven_and_a_lost_member_is_not(
    tmp_path: Path, watch: Callable[[tuple[str, ...]], Watching]
) -> None:
    """The agent knows one member only, and hears of the others."""
    with EtcdCluster(tmp_path, 3) as etcd:
        last = (etcd.leader() + 1) % 3
        watching = watch((etcd.endpoints[last],))
        etcd.kill((last + 1) % 3)
        watching.sees("led", "led", "refused")
        watching.renewed()
        etcd.kill((last + 2) % 3)
        watching.sees("leaderless", "refused", "refused")
        # The last one needs its time to notice; while the lease lives it is not too late for a proof.
        wait_for(lambda: watching.tenure.until_s > watching.tenure.sent_s + TTL_S, 2.0, "a proof")
        keep(watching, True)
        for index in ((last + 1) % 3, (last + 2) % 3):
            etcd.start(index)
        watching.sees("led", "led", "led")
        wait_for(lambda: not watching.holds, 1.5 * TTL_S, "the end of what was proven")


@contextmanager
def relay(to_port: int) -> Iterator[tuple[Relay, str]]:
    with Relay(to_port) as made:
        yield made, f"127.0.0.1:{made.port}"


def test_a_proxy_that_is_gone_is_no_server_that_is_gone(
    tmp_path: Path, watch: Callable[[tuple[str, ...]], Watching]
) -> None:
    with EtcdCluster(tmp_path) as etcd:
        with relay(int(etcd.endpoints[0].rpartition(":")[2])) as (_, address):
            watching = watch((address,))
        assert reach(address, 1.0) == "refused"
        watching.sees("led")
        keep(watching, False)


def test_with_tls_and_a_user_who_may_do_little(tmp_path: Path) -> None:
    tls = make_tls(tmp_path)
    with EtcdCluster(tmp_path, tls=tls) as etcd:
        etcd.enable_login("agent", "s3cret-word", "/job/")
        files = {"ca_cert": tls.ca, "cert": tls.client_cert, "key": tls.client_key}
        config = EtcdConfig(etcd.endpoints, user="agent", password="s3cret-word", **files)
        with EtcdStore(config) as store:
            watching = Watching(store)
            try:
                watching.sees("led")
                watching.renewed()
                etcd.kill(0)
                watching.sees("refused")
                keep(watching, True)
            finally:
                watching.watch.stop()


def test_who_is_reached() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert reach(address, 1.0) == "connected"
    assert reach(address, 1.0) == "refused"
    assert reach("no such host.invalid:1", 1.0) == "" and reach("host without a port", 1.0) == ""


def test_one_silent_address_of_a_member_is_enough_for_doubt() -> None:
    assert worst(["refused", "silent"]) == "silent" and worst(["refused", "refused"]) == "refused"
    assert worst(["refused", "led"]) == "led" and worst(["silent", "leaderless"]) == "leaderless"
    assert worst([]) == "silent"


@pytest.mark.parametrize("num_members", [1, 3])
def test_who_leads_later_gives_a_lease_its_full_time_again(num_members: int, tmp_path: Path) -> None:
    """Also where etcd makes checkpoints of leases: of such short ones it makes none."""
    checkpoints = "--experimental-enable-lease-checkpoint"
    with EtcdCluster(tmp_path, num_members, args=[checkpoints]) as etcd, EtcdStore(EtcdConfig(etcd.endpoints)) as store:
        lease = store.grant_lease(6)
        wait_for(lambda: lease.remaining_ttl_s() <= 2, 10.0, "its time to pass")
        leader = etcd.leader()
        etcd.kill(leader)
        if num_members == 1:
            etcd.start(leader)
        assert etcd.leader() != leader or num_members == 1
        assert wait_for(lease.remaining_ttl_s, 10.0, "an answer") >= 5
