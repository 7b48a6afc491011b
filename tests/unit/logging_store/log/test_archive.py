"""Segments are copied to a store while it is there, later if it is away, and come back. Stores with servers:
tests/integration/test_s3.py, test_hdfs.py."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from swift_logging_store.errors import LogError
from swift_logging_store.log import archive as archives
from swift_logging_store.log.archive import Archive, ahead, directory_name, predecessors
from swift_logging_store.stores import helper as helpers
from swift_logging_store.stores.helper import Helper

SOON_S = 60.0
DIRECTORY = directory_name("job", 1, "e5", 1, "00000001")


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Archive]]:
    monkeypatch.setattr(archives, "PAUSES_S", (0.05, 0.1))
    made: list[Archive] = []

    def one(generation: int = 1, job_id: str = "job", rank: int = 1, run: str = "e5") -> Archive:
        directory = directory_name(job_id, rank, run, generation, f"{generation:08x}")
        made.append(Archive(str(tmp_path / "store"), directory, notes.append))
        return made[-1]

    yield one
    for archive in made:
        archive.close()


def segment(tmp_path: Path, number: int) -> Path:
    path = tmp_path / f"rank1.1.{number:08d}.seg"
    path.write_bytes(bytes([number]) * 3_000_000)
    return path


def in_store(tmp_path: Path) -> set[str]:
    root = tmp_path / "store"
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def until(archive: Archive, condition: Callable[[], object]) -> bool:
    deadline_s = time.monotonic() + SOON_S
    with archive._changed:
        # Nobody is told of the begin of a task.
        while not condition() and time.monotonic() < deadline_s:
            archive._changed.wait(0.05)
        return bool(condition())


def test_segments_go_and_come_back(make: Callable[..., Archive], tmp_path: Path, notes: list[str]) -> None:
    archive = make()
    paths = [segment(tmp_path, number) for number in range(3)]
    for path in paths:
        archive.add(path)
    assert archive.wait(SOON_S) and archive.stored == {path.name for path in paths}
    assert archive.copied.num_bytes == sum(path.stat().st_size for path in paths) and archive.copied.seconds > 0
    archive.remove([paths[1].name, "never put"])
    assert archive.stored == {paths[0].name, paths[2].name}
    assert archive.wait(SOON_S) and in_store(tmp_path) == {f"{DIRECTORY}/{paths[n].name}" for n in (0, 2)}
    back = tmp_path / "back"
    checked: list[str] = []
    with archive.fetching(lambda: checked.append("")) as fetch:
        for path in (paths[2], paths[0]):
            fetch(path.name, back)
            assert back.read_bytes() == path.read_bytes()
        with pytest.raises(LogError, match=f"{paths[1].name} of the log is neither on this node nor in {tmp_path}"):
            fetch(paths[1].name, back)
        (tmp_path / "store" / DIRECTORY / paths[0].name).unlink()
        with pytest.raises(LogError, match=f"{paths[0].name} of the log cannot be brought from {tmp_path}/store"):
            fetch(paths[0].name, back)
    assert checked
    moved = archive.fetched
    assert (archive.copied.num, moved.num, moved.num_bytes) == (3, 2, 2 * 3_000_000) and moved.seconds > 0
    assert archive.num_failures > 0  # tries for what was removed by somebody else
    archive.close()
    archive.close()
    assert not list((tmp_path / "store").iterdir()) and notes == []


def test_a_recovery_that_is_cut_waits_for_no_segment(make: Callable[..., Archive], tmp_path: Path) -> None:
    archive = make()
    archive.add(segment(tmp_path, 0))
    assert archive.wait(SOON_S)
    started: list[Helper] = []

    def check() -> None:
        if started:
            raise ZeroDivisionError

    def stopped() -> Helper:
        started.append(Helper("a store", "swift_logging_store.log.archive_helper", str(tmp_path / "store")))
        os.kill(started[0]._process.pid, signal.SIGSTOP)
        return started[0]

    archive._new_helper = stopped  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError), archive.fetching(check) as fetch:
        fetch(segment(tmp_path, 0).name, tmp_path / "back")
    assert started[0]._process.poll() == -signal.SIGKILL
    del archive._new_helper


def test_a_segment_is_asked_for_again(
    make: Callable[..., Archive], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make()
    archive.add(segment(tmp_path, 0))
    assert archive.wait(SOON_S)
    asked: list[str] = []
    original = Helper.ask

    def ask(self: Helper, op: str, *args: object, **arguments: object) -> object:
        asked.append(op)
        if len(asked) < 3:
            raise ConnectionError("reset")
        return original(self, op, *args, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Helper, "ask", ask)
    with archive.fetching(lambda: None) as fetch:
        fetch(segment(tmp_path, 0).name, tmp_path / "back")
    assert asked == ["get"] * 3 and (tmp_path / "back").read_bytes() == segment(tmp_path, 0).read_bytes()


def test_no_process_can_be_made(
    make: Callable[..., Archive], tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def popen(*args: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    archive = make()
    archive.add(segment(tmp_path, 0))
    assert archive.wait(SOON_S)
    with monkeypatch.context() as patch:
        patch.setattr(helpers.subprocess, "Popen", popen)
        assert archive._helper is not None
        archive._helper.interrupt()
        archive.add(segment(tmp_path, 1))
        assert until(archive, lambda: notes)
        with archive.fetching(lambda: None) as fetch, pytest.raises(LogError, match="temporarily unavailable"):
            fetch(segment(tmp_path, 0).name, tmp_path / "back")
    assert archive.wait(SOON_S) and len(archive.stored) == 2 and len(notes) == 2


def test_who_may_have_been_given_up_removes_nothing_of_others(
    make: Callable[..., Archive], tmp_path: Path, notes: list[str]
) -> None:
    """By its name this one came later: its etcd counts further than that of its successor."""
    successor = make(1, run="e4")
    successor.add(segment(tmp_path, 1))
    assert successor.wait(SOON_S)
    directory = directory_name("job", 1, "e900", 3, "00000003")
    old = Archive(str(tmp_path / "store"), directory, notes.append, lambda: False)
    old.remove_predecessors()
    assert old.wait(SOON_S)
    old.close()
    assert {path.name for path in (tmp_path / "store").iterdir()} == {successor._directory}


def test_what_predecessors_have_left_goes(make: Callable[..., Archive], tmp_path: Path) -> None:
    """At the end too; nothing else, whatever its name."""
    kept = [tmp_path / "store" / name / "file" for name in ("job.rank1", "job.rank1.models", "job.rank1.swiftlog-x")]
    for path in kept:
        path.parent.mkdir(parents=True)
        path.touch()
    others = [
        make(2, rank=11), make(3, job_id="other"), make(4, job_id="job.rank1.x"), make(9), make(1, run="e6"),
        make(1, run="t4"),
    ]  # fmt: skip
    for archive in (make(5), make(6), make(8, run="e4"), *others):
        archive.add(segment(tmp_path, 1))
        assert archive.wait(SOON_S)
    here = make(7)
    here.add(segment(tmp_path, 2))
    here.remove_predecessors()
    assert here.wait(SOON_S)
    names = {path.parent.name for path in kept} | {archive._directory for archive in others}
    assert {path.name for path in (tmp_path / "store").iterdir()} == names | {here._directory}
    again = make(6)
    again.add(segment(tmp_path, 1))
    assert again.wait(SOON_S)
    here.close()
    assert {path.name for path in (tmp_path / "store").iterdir()} == names


def test_names_of_directories() -> None:
    assert directory_name("a.b_c", 3, "e17", 2, "0123abcd") == "a.b_c.rank3.swiftlog-e17-2-0123abcd"
    others = {directory_name(job, 3, "e17", 2, "0123abcd").partition(".rank3.")[0] for job in ("lr=1", "lr-1", "lr 1")}
    assert len(others) == 3 and all(re.fullmatch("lr-1(-[0-9a-f]{8})?", other) for other in others)
    for run, suffix in (("", "0123abcd"), ("17", "0123abcd"), ("e", "0123abcd"), ("e17", "xyz")):
        with pytest.raises(ValueError, match="is no name for the log of a process"):
            directory_name("job", 3, run, 2, suffix)


def test_who_came_before() -> None:
    def name(run: str, generation: int, suffix: str = "00000000") -> str:
        return directory_name("job", 1, run, generation, suffix)

    mine = name("e10", 3)
    before = [name("e10", 2), name("e9", 7), name("e2", 30)]
    others = [mine, name("e10", 3, "00000001"), name("e10", 4), name("e11", 1), name("t9", 1), "job.rank1.swiftlog-e9"]
    assert predecessors(mine, [*others, *before]) == before
    assert not any(mine in predecessors(other, [mine]) for other in before)


def test_what_a_run_left_before_the_clock_was_set_back_stays_and_is_told_of(
    make: Callable[..., Archive], tmp_path: Path, notes: list[str]
) -> None:
    left, here = make(1, run="t2000"), make(2, run="t1000")
    left.add(segment(tmp_path, 1))
    assert left.wait(SOON_S)
    here.add(segment(tmp_path, 2))
    here.remove_predecessors()
    here.remove_predecessors()
    assert here.wait(SOON_S)
    assert {path.name for path in (tmp_path / "store").iterdir()} == {left._directory, here._directory}
    (note,) = notes
    assert "before the clock of this node was set back" in note and left._directory in note
    names = [left._directory, here._directory]
    assert ahead(here._directory, names) == [left._directory] and ahead(left._directory, names) == []
    assert ahead(directory_name("job", 1, "e10", 3, "00000000"), [directory_name("job", 1, "e11", 3, "00000000")]) == []


PREDECESSOR = """
import sys
from pathlib import Path
from swift_logging_store.log.archive import Archive

archive = Archive(sys.argv[1], sys.argv[2], print)
archive.add(Path(sys.argv[3]))
assert archive.wait(60.0)
print("copied", flush=True)
sys.stdin.readline()
archive.remove_predecessors()
print("asked", flush=True)
assert archive.wait(60.0)
print("removed", flush=True)
sys.stdin.readline()
archive.close()
"""


@pytest.mark.parametrize("who", ["process", "helper"])
def test_a_frozen_process_leaves_its_successor_alone(make: Callable[..., Archive], tmp_path: Path, who: str) -> None:
    """It is stopped when it is about to have its predecessors removed, or with the request at its helper, and goes on
    when its successor is there."""
    before = make(0)
    before.add(segment(tmp_path, 0))
    assert before.wait(SOON_S)
    frozen = subprocess.Popen(
        [sys.executable, "-c", PREDECESSOR, str(tmp_path / "store"), DIRECTORY, str(segment(tmp_path, 1))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    assert frozen.stdin is not None and frozen.stdout is not None
    try:
        assert frozen.stdout.readline() == "copied\n"
        (helper,) = psutil.Process(frozen.pid).children()
        stopped = frozen.pid if who == "process" else helper.pid
        os.kill(stopped, signal.SIGSTOP)
        frozen.stdin.write("go\n")
        if who == "helper":
            assert frozen.stdout.readline() == "asked\n"
        successor, later = make(2), make(1, run="e6")
        for archive in (successor, later):
            archive.add(segment(tmp_path, 2))
            assert archive.wait(SOON_S)
        os.kill(stopped, signal.SIGCONT)
        assert frozen.stdout.readline() == ("removed\n" if who == "helper" else "asked\n")
        if who == "process":
            assert frozen.stdout.readline() == "removed\n"
        there = {DIRECTORY, successor._directory, later._directory}
        assert {path.name for path in (tmp_path / "store").iterdir()} == there
        successor.remove_predecessors()
        assert successor.wait(SOON_S)
        assert {path.name for path in (tmp_path / "store").iterdir()} == there - {DIRECTORY}
        frozen.stdin.write("end\n")
        assert frozen.wait(SOON_S) == 0
        assert {path.name for path in (tmp_path / "store").iterdir()} == there - {DIRECTORY}
    finally:
        frozen.kill()
        frozen.wait()
        frozen.stdin.close()
        frozen.stdout.close()


def test_a_store_that_is_away(make: Callable[..., Archive], tmp_path: Path, notes: list[str]) -> None:
    """Nobody waits for it; what is not needed any more when it is back is not copied."""
    (tmp_path / "store").touch()
    archive = make()
    paths = [segment(tmp_path, number) for number in range(4)]
    for path in paths:
        archive.add(path)
    assert until(archive, lambda: notes) and archive.stored == set()
    assert len(notes) == 1 and "cannot be copied" in notes[0] and "Not a directory" in notes[0]
    archive.remove([paths[1].name])
    paths[2].unlink()
    (tmp_path / "store").unlink()
    assert archive.wait(SOON_S) and archive.stored == {paths[0].name, paths[3].name}
    assert len(notes) == 2 and notes[1] == f"logs of messages are copied to {tmp_path}/store again"
    archive.remove_all()
    assert archive.wait(SOON_S) and in_store(tmp_path) == set()


def test_a_store_that_says_that_it_is_not_there_is_away(
    make: Callable[..., Archive], tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make()
    original = Helper.ask

    def ask(self: Helper, op: str, *args: object, **arguments: object) -> object:
        if op == "put" and not notes:
            raise FileNotFoundError("no such volume")
        return original(self, op, *args, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Helper, "ask", ask)
    archive.add(segment(tmp_path, 0))
    assert archive.wait(SOON_S) and len(archive.stored) == 1
    assert "no such volume" in notes[0] and "again" in notes[1]


def test_what_is_under_way_when_it_is_given_up_goes_too(make: Callable[..., Archive], tmp_path: Path) -> None:
    archive = make()
    archive.add(segment(tmp_path, 0))
    assert archive.wait(SOON_S)
    assert archive._helper is not None
    os.kill(archive._helper._process.pid, signal.SIGSTOP)
    archive.add(segment(tmp_path, 1))
    assert until(archive, lambda: archive._current is not None)
    archive.remove_all()
    os.kill(archive._helper._process.pid, signal.SIGCONT)
    assert archive.wait(SOON_S) and archive.stored == set() and in_store(tmp_path) == set()


def test_what_cannot_be_removed_is_told_once(
    make: Callable[..., Archive], tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And keeps nothing from being copied."""
    archive = make()
    original = Helper.ask

    def ask(self: Helper, op: str, *args: object, **arguments: object) -> object:
        if op == "remove":
            raise PermissionError("denied")
        return original(self, op, *args, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Helper, "ask", ask)
    for number in range(3):
        archive.add(segment(tmp_path, number))
        assert archive.wait(SOON_S) and segment(tmp_path, number).name in archive.stored
        archive.remove(archive.stored)
    assert archive.wait(SOON_S) and len(notes) == 1 and "may stay in" in notes[0] and "denied" in notes[0]


def test_a_request_without_an_answer_costs_the_helper(
    make: Callable[..., Archive], tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it has left of the file goes."""
    archive = make()
    archive.add(segment(tmp_path, 0))
    assert archive.wait(SOON_S)
    first = archive._helper
    assert first is not None
    part = tmp_path / "store" / DIRECTORY / f"{segment(tmp_path, 1).name}.01234567.part"
    part.touch()
    with monkeypatch.context() as patch:
        patch.setattr(archives, "ANSWER_TIMEOUT_S", 0.1)
        os.kill(first._process.pid, signal.SIGSTOP)
        archive.add(segment(tmp_path, 1))
        assert until(archive, lambda: notes)
    assert archive.wait(SOON_S) and len(archive.stored) == 2
    assert first._process.poll() == -signal.SIGKILL and "no answer" in notes[0] and not part.exists()


def test_the_end_waits_for_no_request(make: Callable[..., Archive], tmp_path: Path, notes: list[str]) -> None:
    archive = make()
    archive.add(segment(tmp_path, 0))
    assert archive.wait(SOON_S)
    helper = archive._helper
    assert helper is not None
    os.kill(helper._process.pid, signal.SIGSTOP)
    archive.add(segment(tmp_path, 1))
    assert until(archive, lambda: archive._current is not None)
    archive.close()
    assert notes == [] and not list((tmp_path / "store").iterdir())
    assert not archive._thread.is_alive() and helper._process.poll() == -signal.SIGKILL


def test_the_end_without_a_store(make: Callable[..., Archive], tmp_path: Path, notes: list[str]) -> None:
    (tmp_path / "store").touch()
    archive = make()
    archive.add(segment(tmp_path, 0))
    assert until(archive, lambda: notes)
    archive.close()
    assert "may be left" in notes[-1] and len(notes) == 2


def test_the_end_when_nothing_is_wanted_any_more_of_what_could_not_be_copied(
    make: Callable[..., Archive], tmp_path: Path, notes: list[str]
) -> None:
    """The store may be back, with what was copied before."""
    archive = make()
    archive.add(segment(tmp_path, 0))
    assert archive.wait(SOON_S)
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").touch()
    archive.add(segment(tmp_path, 1))
    assert until(archive, lambda: notes)
    archive.remove_all()
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")
    archive.close()
    assert len(notes) == 1 and in_store(tmp_path) == set()


def test_a_script_beside_which_is_a_module_of_the_library_s_name(
    make: Callable[..., Archive], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('not this one')")
    monkeypatch.syspath_prepend(str(tmp_path))
    archive = make()
    archive.add(segment(tmp_path, 0))
    assert archive.wait(SOON_S) and len(archive.stored) == 1


def test_what_a_library_prints_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loud_helper.py").write_text(
        "import os\nfrom swift_logging_store.stores.helper import serve\n"
        "def answer(request, data):\n"
        "    print('from Python', flush=True); os.write(1, b'from C\\n')\n"
        "    return {'value': 5}, b''\n"
        "serve(lambda: answer, lambda error: '')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Helper("a library", "loud_helper") as helper:
        assert [helper.ask("anything") for _ in range(3)] == [5, 5, 5]
    assert capfd.readouterr().err.count("from C") == 3


def test_what_is_no_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_helper.py").write_text(
        "import struct, sys\n"
        "sys.stdout.buffer.write(struct.pack('>IQ', 2, 0) + b'{{'); sys.stdout.flush(); sys.stdin.read()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Helper("a library", "odd_helper") as helper, pytest.raises(OSError, match="gave no proper answer"):
        helper.ask("anything")


def test_an_interrupted_helper_gives_an_error(tmp_path: Path) -> None:
    helper = Helper("a store", "swift_logging_store.log.archive_helper", str(tmp_path))
    assert helper.ask("names", path="") == []
    os.kill(helper._process.pid, signal.SIGSTOP)
    timer = threading.Timer(0.1, helper.interrupt)
    timer.start()
    with pytest.raises(OSError, match="has ended, exit code -9"):
        helper.ask("names", path="")
    timer.join()
    helper.kill()
    with pytest.raises(OSError, match="was ended"):
        helper.ask("names", path="")
