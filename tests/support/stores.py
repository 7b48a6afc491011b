"""What every store of files does, wherever it keeps them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from swift_logging_store.log import archive as archives
from swift_logging_store.log.archive import Archive, directory_name
from swift_logging_store.stores.contract import Store
from swift_recovery.checkpoint.directory import Checkpoint, CheckpointDirectory, Part
from swift_recovery.checkpoint.timelines import Entry, Superseded, Timeline
from swift_recovery.transfer.state_file import Written


def check_files_come_and_go(store: Store) -> None:
    """*store* is empty, and is so again afterwards."""
    assert store.names() == [] and not store.exists("a/b") and store.size("a/b") == -1
    with store.writing("a/b") as stream:
        stream.write(b"first")
        assert not store.exists("a/b")  # not before it is complete
    store.put("a/c", b"second")
    store.put("a/c", b"third")
    assert store.names() == ["a"] and sorted(store.names("a")) == ["b", "c"]
    assert store.exists("a/b") and not store.exists("a") and store.size("a/b") == 5
    with store.reading("a/c") as stream:
        assert stream.read() == b"third"
    with pytest.raises(FileNotFoundError), store.reading("a/d"):
        pass
    store.remove("a/c")
    store.remove("a/c")
    assert store.names("a") == ["b"]
    store.remove_directory("a")
    store.remove_directory("a")
    assert store.names() == []


def check_copies_outlive_a_frozen_server(
    url: str, freeze: Callable[[], None], thaw: Callable[[], None], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of a log are copied when it is back, come back as they were, and go."""
    contents = {f"rank0.1.{number:08d}.seg": os.urandom(5_000_000) for number in range(3)}
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    first, *others = contents
    notes: list[str] = []
    archive = Archive(url, directory_name("job", 0, "e1", 1, "00000001"), notes.append)
    archive.add(directory / first)
    assert archive.wait(60.0) and archive.stored == {first} and notes == []
    freeze()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(archives, "ANSWER_TIMEOUT_S", 0.5)
            for name in others:
                archive.add(directory / name)
            with archive._changed:
                assert archive._changed.wait_for(lambda: archive._fails, 60.0)
        assert archive.stored == {first} and len(notes) == 1 and f"cannot be copied to {url} for now" in notes[0]
    finally:
        thaw()
    assert archive.wait(60.0) and archive.stored == contents.keys()
    with archive.fetching(lambda: None) as fetch:
        for name, content in contents.items():
            fetch(name, directory / "back")
            assert (directory / "back").read_bytes() == content
    archive.close()
    assert notes[1:] == [f"logs of messages are copied to {url} again"]


def first_part(directory: CheckpointDirectory, iteration: int) -> str:
    """The path in its store of rank 0's part of that checkpoint."""
    found = directory.load(iteration)
    return directory.path_of(found, found.part_of(0))


def check_generations_are_kept_apart(store: Store) -> None:
    """Checkpoints in *store*, which is empty: what a generation that was given up does, and when it does it."""
    directory = CheckpointDirectory(store)
    first, second, other = Timeline("e7", 1), Timeline("e7", 2), Timeline("e3", 1)  # the last one under another etcd

    def take(iteration: int, by: Timeline) -> Checkpoint:
        path = directory.new_part(iteration, 0, by)
        store.put(path, b"state")
        made = Checkpoint(iteration, 1, (Part(path.rpartition("/")[2], (0,), Written(5, iteration)),), by)
        directory.check_parts(made)
        return made

    def commit_unseen(iteration: int, by: Timeline) -> None:
        """It was stopped between the look and the commit."""
        store.put(f"{Entry(iteration, by).name}/committed.json", json.dumps(take(iteration, by).to_json()).encode())

    directory.claim(first, 0)
    directory.commit(take(10, first))
    late = take(20, first)
    directory.claim(second, 10)
    with pytest.raises(Superseded):
        directory.commit(late)
    directory.commit(take(20, second))
    directory.commit(take(30, second))
    # What it does without looking first is of no use, and does no harm.
    commit_unseen(40, first)
    assert directory.committed() == [10, 20, 30] and directory.load(20).timeline == second
    with pytest.raises(Superseded):
        directory.remove(1, 40, first)
    directory.claim(other, 30)
    with pytest.raises(Superseded):
        directory.commit(take(40, second))
    directory.commit(take(50, other))
    assert directory.committed() == [10, 20, 30, 50]
    assert directory.remove(1, 50, other) == [10, 20, 30, 40]
    assert directory.committed() == [50] and directory.newest() == 50
    # What comes late is as dead as ever, and a run that was given up stays so, also where nothing of it is left.
    for iteration in (5, 11, 15, 45):
        commit_unseen(iteration, first)
        assert directory.committed() == [50] and directory.newest(50) == 0
    with pytest.raises(Superseded):
        directory.claim(Timeline("e7", 3), 45)
    directory.commit(take(60, other))
    assert directory.remove(1, 60, other) == [5, 11, 15, 45, 50]
    assert sorted(store.names()) == [
        "iteration-000000000060.e3-1", "timeline-00000001.e7-2.000000000010.json",
        "timeline-00000002.e3-1.000000000030.json", "timeline-low.e3-1.000000000050.json",
    ]  # fmt: skip
    for iteration in (15, 45):
        commit_unseen(iteration, first)
        assert directory.committed() == [60]
