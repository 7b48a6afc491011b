"""`swiftctl status JOB --watch` on a terminal: a real etcd, and in the last test a real job whose worker is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_rendezvous.codec import encode
from swift_rendezvous.node.registration import enter_job
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import EventRecord, JobRecord, RateRecord, ResultRecord
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.private_etcd import PrivateEtcd
from tests.support import records
from tests.support.etcd_cluster import etcd_binary, wait_for
from tests.support.job import SOURCE_ROOTS, Agents
from tests.support.terminal import ENDS_CLEAN, Terminal, plain

KEYS = Keys("gpt")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with PrivateEtcd(etcd_binary()) as server:
        yield server.endpoint


@pytest.fixture
def store(endpoint: str) -> Iterator[EtcdStore]:
    with EtcdStore(EtcdConfig((endpoint,))) as opened:
        yield opened
        opened.delete_prefix("/swift/")


def watch(
    endpoint: str, job: str = "gpt", columns: int = 120, rows: int = 30, encoding: str = "utf-8"
) -> Terminal:
    environment = {**os.environ, "SWIFT_ETCD_ENDPOINTS": endpoint, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS)}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "swift_agent.ctl", "status", job, "--watch"]
    return Terminal(command, environment, columns, rows, encoding)


def begin(store: EtcdStore) -> None:
    """A job of two nodes and a spare that trains, by its records."""
    for name in ("n0", "n1", "n2"):
        enter_job(store, KEYS, JobRecord(2, 2, "command", 1), records.node(name), 60)
    store.put(KEYS.event(1), encode(EventRecord(1, "generation (start)", "2 nodes are here", 1000.0)))
    store.put(KEYS.generation, encode(records.generation()))
    store.put(KEYS.pace(1), encode(RateRecord(40, 2.0, 1, 1020.0, {i: 1000.0 + i / 2 for i in range(41)})))


def assert_clean(written: str) -> None:
    for sequence in ENDS_CLEAN:
        assert sequence in written
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is hidden"
    assert written.rindex("\x1b[?1049l") > written.rindex("\x1b[?1049h"), "the usual screen is not back"


def test_it_follows_the_job_and_ends_with_it(endpoint: str, store: EtcdStore) -> None:
    begin(store)
    with watch(endpoint) as terminal:
        terminal.wait_for(lambda frame: "LAST EVENTS" in frame and "trains" in frame, "the first picture")
        assert "\u2588" in terminal.frame() and "job gpt  training" in terminal.frame()
        store.put(KEYS.failure(1, 1), encode(records.failure("node", 1)))
        terminal.wait_for(lambda frame: "phase agree" in frame and "evidence node 1" in frame, "the loss")
        # Time goes on though nothing is heard.
        terminal.wait_for(lambda frame: "recovery for 1." in frame, "a second of it")
        store.put(KEYS.result, encode(ResultRecord("failed", "no more")))
        assert terminal.finish() == 0
    assert_clean(terminal.written)
    left = plain(terminal.written[terminal.written.rindex("\x1b[?1049l") :])
    assert "job gpt: failed" in left and "no more" in left, "the end stays to be read"


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "SIGHUP"])
def test_it_leaves_the_terminal_as_it_was(endpoint: str, store: EtcdStore, how: str) -> None:
    begin(store)
    with watch(endpoint) as terminal:
        terminal.wait_for(lambda frame: "LAST EVENTS" in frame, "the first picture")
        if how == "Ctrl-C":
            terminal.type(b"\x03")
        else:
            terminal.process.send_signal(getattr(signal, how))
        code = terminal.finish()
    assert code == (0 if how == "Ctrl-C" else 128 + getattr(signal, how))
    assert_clean(terminal.written)
    assert "Traceback" not in terminal.written


def test_it_fits_the_terminal_also_when_that_changes(endpoint: str, store: EtcdStore) -> None:
    begin(store)
    store.put(KEYS.event(2), encode(EventRecord(2, "generation (replace)", "w" * 300, 1000.0)))
    with watch(endpoint, columns=110, rows=24) as terminal:
        terminal.wait_for(lambda frame: "LAST EVENTS" in frame, "the first picture")
        assert fits(terminal.frame(), 110, 24)
        terminal.resize(44, 12)
        terminal.wait_for(lambda frame: "job gpt" in frame and fits(frame, 44, 12), "a smaller picture")
        terminal.resize(150, 40)
        terminal.wait_for(lambda frame: max(map(len, frame.splitlines())) > 110, "a larger picture")
        terminal.type(b"\x03")
        assert terminal.finish() == 0


def test_a_terminal_that_has_ascii_only(endpoint: str, store: EtcdStore) -> None:
    begin(store)
    store.put(KEYS.event(2), encode(EventRecord(2, "generation (replace)", "\u00fc" * 300, 1000.0)))
    with watch(endpoint, encoding="ascii") as terminal:
        terminal.wait_for(lambda frame: "LAST EVENTS" in frame and "#" in frame, "the first picture")
        terminal.type(b"\x03")
        assert terminal.finish() == 0 and "Error" not in terminal.written


def fits(frame: str, columns: int, rows: int) -> bool:
    lines = frame.splitlines()
    return len(lines) <= rows and all(len(line) <= columns for line in lines)


def test_a_worker_of_a_real_job_is_killed(endpoint: str, tmp_path: Path) -> None:
    """Every picture that the screen had is looked through: a recovery takes less than a second."""
    orders = {
        "faults": [{"at": "forward", "iteration": 60, "rank": 1, "scope": "worker"}], "iterations": 4000,
        "pause_s": 0.1,
    }  # fmt: skip
    agents = Agents(tmp_path, endpoint, num_workers=1, job_id="real", orders=orders)
    try:
        for node in ("a", "b"):
            agents.start(node)
        with EtcdStore(EtcdConfig((endpoint,))) as store:
            wait_for(lambda: store.get(Keys("real").generation), 60, "the first generation")
            with watch(endpoint, "real") as terminal:
                terminal.wait_for(lambda frame: "generation 1 (start)" in frame, "the begin")
                terminal.wait_for(lambda frame: "recovered:" in frame, "the recovery", 80.0)
                terminal.wait_for(lambda frame: "per second" in frame and "\u2588" in frame, "its speed", 30.0)
                frame = terminal.frame()
                assert "generation 2 (replace)" in frame and "killed by signal 9" in frame, frame
                assert frame.count("trains") == 2, frame
                pictures = plain(terminal.written)
                # Not all of them: etcd may tell of several changes at once.
                assert any(f"phase {name}, for" in pictures for name in ("agree", "plan", "transfer"))
                terminal.type(b"\x03")
                assert terminal.finish() == 0
        assert_clean(terminal.written)
    finally:
        agents.kill_all()
