"""Checkpoints in a bucket of a real S3 server: they come and go; wrong secret, no bucket, frozen. Jobs with one:
tests/faults/test_checkpoints.py."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from swift_logging_store.log.archive import CLOCK, Archive, directory_name
from swift_logging_store.stores import s3
from swift_logging_store.stores.contract import Store
from swift_logging_store.stores.open import open_store
from swift_recovery.checkpoint.directory import Checkpoint, CheckpointDirectory, Part
from swift_recovery.checkpoint.writer import CheckpointError, Checkpoints, Settings
from swift_recovery.errors import StateError
from swift_recovery.state.checksum import checksum
from swift_recovery.state.training_state import TrainingState
from swift_recovery.transfer import state_file
from tests.support.pages import command, put_in
from tests.support.s3_server import BUCKET, S3Server
from tests.support.stores import (
    check_copies_outlive_a_frozen_server,
    check_files_come_and_go,
    check_generations_are_kept_apart,
    first_part,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as made:
        yield made


@pytest.fixture(autouse=True)
def environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


def make(seed: int, width: int = 1500) -> TrainingState:
    torch.manual_seed(seed)
    return TrainingState({"m": nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3))})


def commit(store: Store, iteration: int, state: TrainingState) -> Part:
    directory = CheckpointDirectory(store)
    path = directory.new_part(iteration, 0)
    with store.writing(path) as stream:
        part = Part(path.rpartition("/")[2], (0,), state_file.write(stream, state, {"at": iteration}))
    directory.commit(Checkpoint(iteration, 1, (part,)))
    return part


def load(store: Store, name: str, path: str, state: TrainingState) -> object:
    with store.reading(path) as stream:
        return state_file.read(stream, name, state)


def test_files_come_and_go() -> None:
    store = open_store(f"s3://{BUCKET}/some/files")
    assert str(store) == f"s3://{BUCKET}/some/files"
    check_files_come_and_go(store)


def test_logs_are_removed_by_hand(server: S3Server) -> None:
    if shutil.which("aws") is None:
        pytest.skip("needs the client of AWS")
    store = open_store(f"s3://{BUCKET}/by-hand")
    names = {job: directory_name(job, 1, f"{CLOCK}1764000000", 2, "0b58ffa5") for job in ("gpt", "bert")}
    for name in names.values():
        store.put(f"{name}/segment", b"messages")
    line = put_in(command("docs/message-logs.md", "aws s3 rm"), {"BUCKET": BUCKET, "PREFIX": "by-hand"})
    environment = {**os.environ, **server.environment, "AWS_DEFAULT_REGION": "us-east-1"}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (store.names(names["gpt"]), store.names(names["bert"])) == ([], ["segment"])


def test_generations_are_kept_apart() -> None:
    check_generations_are_kept_apart(open_store(f"s3://{BUCKET}/apart"))


def test_checkpoints_come_back_and_old_ones_go() -> None:
    store = open_store(f"s3://{BUCKET}/run-1")
    directory, states = CheckpointDirectory(store), {number: make(number) for number in (10, 20, 30)}
    parts = {number: commit(store, number, state) for number, state in states.items()}
    assert directory.committed() == [10, 20, 30] and directory.newest(before=30) == 20
    assert directory.remove(keep=2, newest=30) == [10] and directory.committed() == [20, 30]
    found, path = make(0), first_part(directory, 30)
    assert parts[30].written.num_bytes > 9_000_000  # several parts of an upload
    assert load(store, "part", path, found) == {"at": 30}
    assert checksum(found.replicated_tensors()) == checksum(states[30].replicated_tensors())
    with store.reading(path) as stream:
        whole = bytearray(stream.read())
    whole[5_000_000] ^= 1
    store.put(path, bytes(whole))
    with pytest.raises(StateError, match="part is damaged"):
        load(store, "part", path, found)


def test_a_wrong_secret_and_a_bucket_that_is_not_there_are_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(url: str) -> int:
        return Checkpoints(Settings(CheckpointDirectory(open_store(url)), 10), 0, 1, [0], print).find()

    assert find(f"s3://{BUCKET}/nothing/yet") == 0
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-of-tests")
    with pytest.raises(CheckpointError, match=r"s3://checkpoints/run-2 cannot be read \(.*bucket that all") as e:
        find(f"s3://{BUCKET}/run-2")
    assert "another-secret" not in str(e.value)


def test_a_frozen_server_ends_in_an_error(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("REQUEST_TIMEOUT_S", 1.0), ("CONNECT_TIMEOUT_S", 1.0), ("MAX_ATTEMPTS", 1)):
        monkeypatch.setattr(s3, name, value)
    store = open_store(f"s3://{BUCKET}/run-3")
    commit(store, 10, make(1))
    server.freeze()
    try:
        with pytest.raises(OSError, match=r"(?i)timeout|timed out|time-out"):
            commit(store, 20, make(2))
    finally:
        server.thaw()
    assert CheckpointDirectory(store).committed() == [10]  # what was broken off counts for nothing
    commit(store, 20, make(2))
    assert CheckpointDirectory(store).committed() == [10, 20]


def test_copies_of_logs_outlive_a_frozen_server(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/logs"
    check_copies_outlive_a_frozen_server(url, server.freeze, server.thaw, tmp_path, monkeypatch)
    assert open_store(url).names() == []


def test_copies_of_logs_with_a_wrong_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on without them, and is told why."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-of-tests")
    notes: list[str] = []
    archive = Archive(f"s3://{BUCKET}/logs", directory_name("job", 0, "e1", 1, "00000002"), notes.append)
    (tmp_path / "a.seg").write_bytes(b"x")
    archive.add(tmp_path / "a.seg")
    with archive._changed:
        assert archive._changed.wait_for(lambda: archive._fails, 60.0)
    archive.close()
    assert "stay on this node: " in notes[0] and "another-secret" not in "".join(notes) and len(notes) == 2
