"""Checkpoints in a real HDFS: they come and go; a data node is lost, the name node frozen, restarted, or not there.

A job with one: tests/faults/test_checkpoints.py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest
import torch
from torch import nn

from swift_logging_store.log.archive import CLOCK, Archive, directory_name
from swift_logging_store.stores import hdfs
from swift_logging_store.stores import helper as helper_process
from swift_logging_store.stores.contract import Store
from swift_logging_store.stores.open import open_store
from swift_recovery.checkpoint.directory import Checkpoint, CheckpointDirectory, Part
from swift_recovery.checkpoint.writer import CheckpointError, Checkpoints, Settings
from swift_recovery.state.checksum import checksum
from swift_recovery.state.training_state import TrainingState
from swift_recovery.transfer import state_file
from tests.support.hdfs_cluster import HdfsCluster, why_not
from tests.support.pages import command, words
from tests.support.ports import free_ports
from tests.support.relay import Relay
from tests.support.stores import (
    check_copies_outlive_a_frozen_server,
    check_files_come_and_go,
    check_generations_are_kept_apart,
    first_part,
)
from tests.tiers import in_soak

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    with HdfsCluster(tmp_path_factory.mktemp("hdfs")) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()  # a failed test's traceback holds its store
    assert not helpers()


def helpers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if "swift_logging_store.stores.hdfs_helper" in process.cmdline() else []
    return found


def make(seed: int, width: int = 1500) -> TrainingState:
    torch.manual_seed(seed)
    return TrainingState({"m": nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3))})


def commit(store: Store, iteration: int, state: TrainingState) -> Part:
    directory = CheckpointDirectory(store)
    path = directory.new_part(iteration, 0)
    written = store.write(path, lambda stream: state_file.write(stream, state, {"at": iteration}))
    part = Part(path.rpartition("/")[2], (0,), written)
    directory.commit(Checkpoint(iteration, 1, (part,)))
    return part


def test_files_come_and_go(cluster: HdfsCluster) -> None:
    store = open_store(f"{cluster.url}/some/files")
    assert str(store) == f"{cluster.url}/some/files"
    check_files_come_and_go(store)


def test_logs_are_removed_by_hand(cluster: HdfsCluster) -> None:
    store = open_store(f"{cluster.url}/logs")
    names = {job: directory_name(job, 1, f"{CLOCK}1764000000", 2, "0b58ffa5") for job in ("gpt", "bert")}
    for name in names.values():
        store.put(f"{name}/segment", b"messages")
    program, subcommand, *arguments = words(command("docs/message-logs.md", "hdfs dfs"))
    assert (program, subcommand) == ("hdfs", "dfs") and names["gpt"] in cluster.dfs(*arguments)
    assert store.names("") == [names["bert"]]
    store.remove_directory(names["bert"])


def test_what_is_broken_off_leaves_nothing(cluster: HdfsCluster) -> None:
    store = open_store(f"{cluster.url}/broken")
    store.put("a/b", b"before")
    with pytest.raises(ZeroDivisionError), store.writing("a/b") as stream:
        stream.write(b"%d" % (1 // 0))
    assert store.names("a") == ["b"] and store.size("a/b") == 6


def test_generations_are_kept_apart(cluster: HdfsCluster) -> None:
    check_generations_are_kept_apart(open_store(f"{cluster.url}/apart"))


def test_checkpoints_come_back_and_old_ones_go(cluster: HdfsCluster) -> None:
    store = open_store(f"{cluster.url}/run-1")
    directory, states = CheckpointDirectory(store), {number: make(number) for number in (10, 20, 30)}
    parts = {number: commit(store, number, state) for number, state in states.items()}
    assert directory.committed() == [10, 20, 30] and directory.newest(before=30) == 20
    assert directory.remove(keep=2, newest=30) == [10] and directory.committed() == [20, 30]
    found, path = make(0), first_part(directory, 30)
    assert parts[30].written.num_bytes > 2 * hdfs.PIECE_BYTES
    with store.reading(path) as stream:
        assert state_file.read(stream, "part", found) == {"at": 30}
    assert checksum(found.replicated_tensors()) == checksum(states[30].replicated_tensors())


def test_a_frozen_name_node_ends_in_an_error(cluster: HdfsCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"{cluster.url}/frozen")
    commit(store, 10, make(1))
    cluster.freeze("nn")
    try:
        with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="no answer from HDFS within 2 s"):
            patch.setattr(helper_process, "ANSWER_TIMEOUT_S", 2.0)
            commit(store, 20, make(2))
    finally:
        cluster.thaw("nn")
    assert CheckpointDirectory(store).committed() == [10]  # what was broken off counts for nothing
    commit(store, 20, make(2))
    assert CheckpointDirectory(store).committed() == [10, 20]


def test_copies_of_logs_outlive_a_frozen_name_node(
    cluster: HdfsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{cluster.url}/logs"
    freeze, thaw = (partial(action, "nn") for action in (cluster.freeze, cluster.thaw))
    check_copies_outlive_a_frozen_server(url, freeze, thaw, tmp_path, monkeypatch)
    assert open_store(url).names() == []


def test_a_helper_that_is_gone_is_replaced_and_signals_do_not_end_it(cluster: HdfsCluster) -> None:
    """The agent sends SIGTERM to all processes of a worker, which may still want to end its checkpoint."""
    store = open_store(f"{cluster.url}/signals")
    with store.writing("a") as stream:
        (helper,) = helpers()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(helper.pid, number)
        stream.write(b"whole")
    assert store.size("a") == 5
    helper.kill()
    psutil.wait_procs([helper], timeout=10.0)
    assert store.size("a") == 5


def test_nobody_there_is_said_before_anything_starts(cluster: HdfsCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(url: str) -> int:
        return Checkpoints(Settings(CheckpointDirectory(open_store(url)), 10), 0, 1, [0], print).find()

    assert find(f"{cluster.url}/nothing/yet") == 0
    (port,) = free_ports(1)
    monkeypatch.setattr(helper_process, "ANSWER_TIMEOUT_S", 2.0)  # the library goes on trying
    with pytest.raises(CheckpointError, match=rf"hdfs://127.0.0.1:{port}/run cannot be read \(.*bucket that all"):
        find(f"hdfs://127.0.0.1:{port}/run")


def test_who_may_not_write_is_told_so(
    cluster: HdfsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the copies of a log, which training does not wait for."""
    open_store(f"{cluster.url}/mine").put("run/a", b"x")
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody-else")
    store = open_store(f"{cluster.url}/mine")
    assert store.names("run") == ["a"]
    with pytest.raises(OSError, match=r"Permission denied: user=somebody-else, access=WRITE"):
        store.put("run/b", b"y")
    notes: list[str] = []
    archive = Archive(f"{cluster.url}/mine", directory_name("job", 0, "e1", 1, "00000001"), notes.append)
    path = tmp_path / "rank0.1.00000000.seg"
    path.write_bytes(b"x")
    archive.add(path)
    with archive._changed:
        assert archive._changed.wait_for(lambda: archive._fails, 60.0)
    archive.close()
    assert "cannot be copied to" in notes[0] and "Permission denied" in notes[0] and archive.stored == frozenset()


def test_servers_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data node: what it had is read from the others. Then the name node, which is started again."""
    data = bytes(range(256)) * (1 << 14)
    with HdfsCluster(tmp_path / "hdfs") as cluster:
        store = open_store(f"{cluster.url}/lost")
        store.put("a", data)
        cluster.kill("dn0")
        with store.reading("a") as stream:
            assert stream.read() == data
        cluster.kill("nn")
        with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="no answer from HDFS within 2 s"):
            patch.setattr(helper_process, "ANSWER_TIMEOUT_S", 2.0)
            store.put("b", data)
        cluster.start("nn")
        cluster.wait_for(2)
        # The same store's connections are made again.
        assert store.names() == ["a"] and store.size("a") == len(data)


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_connection_to_the_name_node_that_is_lost_is_made_again(lost: str, cluster: HdfsCluster) -> None:
    """Whatever is asked in it: it may have been done or not."""
    with Relay(cluster.port) as relay:
        store = open_store(f"hdfs://127.0.0.1:{relay.port}/{lost}")
        store.put("a", b"first")

        def read() -> bytes:
            with store.reading("a") as stream:
                return stream.read()

        size, remove = partial(store.size, "a"), partial(store.remove, "a")
        asked = [(store.names, ["a"]), (size, len(b"first")), (read, b"first"), (remove, None)]
        for number, (ask, expected) in enumerate(asked):
            relay.lose(lost)
            assert ask() == expected and relay.num_lost == number + 1
        assert store.names() == []
        num_lost = relay.num_lost
        for number in range(20):  # of the calls that writing a file takes
            relay.lose(lost, number)
            store.put("b", data := bytes([number]) * 100_000)
            is_over = relay.num_lost < num_lost + number + 1
            relay.lose("")
            assert store.names() == ["b"] and store.size("b") == len(data)
            with store.reading("b") as stream:
                assert stream.read() == data
            if is_over:
                break
        assert is_over and number >= 5


@pytest.mark.parametrize("how", ["kill", *in_soak("freeze")])
def test_files_are_written_while_a_data_node_is_dead(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or, in `make soak`, frozen. One that is written when it dies; then, before the name node has missed it,
    and after that, checkpoints and copies of logs. What was written to one node is copied to the other one."""
    monkeypatch.setattr(helper_process, "ANSWER_TIMEOUT_S", 5.0)  # of a frozen node, each time
    with HdfsCluster(tmp_path / "hdfs") as cluster:
        store, notes, paths = open_store(f"{cluster.url}/lost"), list[str](), []
        archive = Archive(f"{cluster.url}/logs", directory_name("job", 0, "e1", 1, "00000001"), notes.append)
        for number in range(6):
            paths.append(tmp_path / f"rank0.1.{number:08d}.seg")
            paths[-1].write_bytes(os.urandom(5_000_000))
        struck: list[object] = []

        def content(stream: BinaryIO) -> None:
            for number in range(3):
                if number == 1 and not struck:
                    struck.append(getattr(cluster, how)("dn0"))
                stream.write(bytes([number]) * hdfs.PIECE_BYTES)

        store.write("midway/file", content)
        assert store.names("midway") == ["file"]
        with store.reading("midway/file") as stream:
            assert stream.read() == b"".join(bytes([number]) * hdfs.PIECE_BYTES for number in range(3))
        states = {number: make(number) for number in (10, 20, 30)}
        for number, state in states.items():
            archive.add(paths[number // 10 - 1])
            commit(store, number, state)
        cluster.wait_for(2)
        for number in (40, 50):
            archive.add(paths[number // 10 - 1])
            states[number] = make(number)
            commit(store, number, states[number])
        assert archive.wait(240.0) and len(archive.stored) == 5
        directory = CheckpointDirectory(store)
        assert directory.committed() == list(states)
        parts = {number: first_part(directory, number) for number in states}
        for where in parts.values():
            assert sorted(store.names(where.rpartition("/")[0])) == sorted([where.rpartition("/")[2], "committed.json"])
        if how == "kill":  # a node that copies to a frozen one waits for that for minutes
            segments = [f"/logs/{archive._directory}/{name}" for name in archive.stored]
            for path in [*(f"/lost/{where}" for where in parts.values()), *segments]:
                cluster.wait_for_copies(path, 2)
            cluster.kill("dn1")
        with archive.fetching(lambda: None) as fetch:
            for segment in paths[:5]:
                fetch(segment.name, tmp_path / "back")
                assert (tmp_path / "back").read_bytes() == segment.read_bytes()
        for number, where in parts.items():
            found = make(0)
            with store.reading(where) as stream:
                assert state_file.read(stream, "part", found) == {"at": number}
            assert checksum(found.replicated_tensors()) == checksum(states[number].replicated_tensors())
        archive.close()


def test_a_write_that_meets_a_dead_data_node_is_tried_again(cluster: HdfsCluster) -> None:
    """And what the first try had not sent yet does not come to the second one's file."""
    store, tries = open_store(f"{cluster.url}/again"), []

    def content(stream: BinaryIO) -> None:
        tries.append(stream)
        stream.write(b"x" * hdfs.PIECE_BYTES + b"y")
        if len(tries) < hdfs.MAX_ATTEMPTS:
            raise ConnectionError("Connection refused")

    store.write("a", content)
    assert len(tries) == hdfs.MAX_ATTEMPTS
    tries.clear()
    gc.collect()
    with store.reading("a") as stream:
        assert stream.read() == b"x" * hdfs.PIECE_BYTES + b"y"
    assert store.names() == ["a"]
    with pytest.raises(ConnectionError), store.writing("b") as stream:
        raise ConnectionError("Connection refused")
