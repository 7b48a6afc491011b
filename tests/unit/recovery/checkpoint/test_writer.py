"""The ranks of a job take checkpoints together: all of them, or none. Real stores and files, a thread for each rank."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from swift_agent.errors import UsageError
from swift_agent.wire.store_client import StoreClient
from swift_agent.wire.store_server import StoreServer
from swift_agent.worker.job.job import Job
from swift_agent.worker.loop.checkpointing import Checkpointing
from swift_agent.worker.tracked.loop_state import Place
from swift_logging_store.stores.local import LocalStore
from swift_recovery.checkpoint import writer
from swift_recovery.checkpoint.directory import CheckpointDirectory
from swift_recovery.checkpoint.writer import CheckpointError, Checkpoints, Cost, Settings
from swift_recovery.errors import StateError
from swift_recovery.state.training_state import TrainingState


def state(value: float) -> TrainingState:
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.fill_(value)
    return TrainingState({"m": model})


class Group:
    """Three ranks, of which the first two are replicas."""

    def __init__(self, path: Path, servers: Callable[[], StoreServer]) -> None:
        self.notes: list[str] = []
        self.directory = CheckpointDirectory(LocalStore(path))
        settings = Settings(self.directory, every=10, keep=2)
        sets = [[0, 1], [0, 1], [2]]
        self.ranks = [Checkpoints(settings, rank, 3, members, self.notes.append) for rank, members in enumerate(sets)]
        self._servers = servers
        self.begin_generation()

    def begin_generation(self) -> None:
        self.server = self._servers()

    def take(self, iteration: int, *ranks: int, counts: object = None) -> None:
        for rank in ranks or range(3):
            self.ranks[rank].take(
                iteration, state(iteration + rank // 2), lambda rank=rank: {"rank": rank}, self.server_client,
                counts=counts if rank == 1 else None,
            )  # fmt: skip

    def server_client(self) -> StoreClient:
        return StoreClient("127.0.0.1", self.server.port, b"", timedelta(seconds=10))

    def wait(self, *ranks: int) -> None:
        for rank in ranks or range(3):
            assert self.ranks[rank].wait(10.0)

    @property
    def newest(self) -> list[int]:
        return [rank.newest for rank in self.ranks]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    servers: list[StoreServer] = []

    def start() -> StoreServer:
        servers.append(StoreServer("127.0.0.1"))
        return servers[-1]

    yield Group(tmp_path / "checkpoints", start)
    for server in servers:
        server.close()


def test_each_set_writes_one_part_and_each_rank_loads_its_own(group: Group) -> None:
    for iteration in (10, 20, 30):
        group.take(iteration)
        group.wait()
    assert group.newest == [30, 30, 30] and group.directory.committed() == [20, 30]
    assert sum("checkpoint of iteration" in note for note in group.notes) == 3
    assert group.notes[-1] == "checkpoints of iterations 10 are removed"
    # Of the first two; rank 1 has no part.
    costs = [checkpoints.costs for checkpoints in group.ranks]
    assert [len(each) for each in costs] == [2, 2, 2] and costs[1] == [Cost(0, 0.0, 0.0)] * 2
    assert all(min(cost.num_bytes, cost.written_s, cost.still_s) > 0 for cost in costs[0] + costs[2])
    for rank, value in ((0, 30.0), (1, 30.0), (2, 31.0)):
        found = state(0)
        assert group.ranks[rank].load(30, found) == {"rank": 2 * (rank // 2)}
        assert all(bool((parameter == value).all()) for parameter in found.parameters()[:1])
    assert not group.server._values.keys() - {b"checkpoint/%d/counts" % number for number in (10, 20, 30)}


def test_a_rank_whose_part_another_one_writes_has_its_counts_in_it(group: Group) -> None:
    group.take(10, counts={"sent": [["0", 1, 2, 0, 7]]})
    group.wait()
    group.take(20)
    group.wait()
    for rank in range(3):
        group.ranks[rank].load(10, state(0))
        assert group.ranks[rank].counts == ({"sent": [["0", 1, 2, 0, 7]]} if rank == 1 else None)
        group.ranks[rank].load(20, state(0))
        assert group.ranks[rank].counts is None


def test_it_is_due_where_nobody_can_have_taken_it(group: Group) -> None:
    """And at the first point from there on: a point need not come at each iteration."""
    one = group.ranks[2]
    assert one.due == 10
    one.recovered(9)
    assert one.due == 10
    one.recovered(20)
    assert one.due == 30
    one.recovered(7)
    assert one.due == 30
    group.take(34)
    group.wait()
    assert group.newest == [34, 34, 34] and one.due == 40


def test_it_does_not_count_before_all_have_told(group: Group) -> None:
    group.take(10, 0, 1)
    assert not group.ranks[0].wait(0.3) and group.newest == [0, 0, 0] and group.directory.committed() == []
    group.take(10, 2)
    group.wait()
    assert group.newest == [10, 10, 10]


def test_the_end_of_a_generation_ends_it_and_the_next_one_is_not_disturbed(group: Group) -> None:
    group.take(10, 0, 1)
    for rank in group.ranks[:2]:
        rank.recovered(12)
    group.wait()
    assert group.newest == [0, 0, 0]
    group.begin_generation()
    group.take(20)
    group.wait()
    assert group.newest == [20, 20, 20] and group.directory.committed() == [20]


def test_one_that_fails_counts_for_nobody(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LocalStore.writing

    def full(store: LocalStore, path: str) -> Any:
        if "rank-2" in path:
            raise OSError(28, "No space left on device")
        return original(store, path)

    with monkeypatch.context() as context:
        context.setattr(LocalStore, "writing", full)
        group.take(10)
        group.wait()
    assert group.newest == [0, 0, 0] and group.directory.committed() == []
    assert not any(checkpoints.costs for checkpoints in group.ranks)
    (note,) = group.notes
    assert "no checkpoint of iteration 10: " in note and "No space left" in note and "Training goes on" in note
    group.take(20)
    group.wait()
    assert group.newest == [20, 20, 20]


def test_one_that_could_not_be_loaded_is_not_taken_for_the_newest(group: Group, tmp_path: Path) -> None:
    """All have begun with one before it. Its logs are needed still."""
    for iteration in (10, 20):
        group.take(iteration)
        group.wait()
    for rank in group.ranks:
        rank.load(10, state(0))
    (tmp_path / "checkpoints" / "iteration-000000000030").touch()  # in the way
    group.take(30)
    group.wait()
    assert "no checkpoint of iteration 30" in group.notes[-1] and group.newest == [10, 10, 10]
    assert group.ranks[0].is_there(20) and not group.ranks[0].is_there(30) and not group.ranks[0].is_there(0)


def test_training_does_not_wait_for_one_that_takes_long(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ones are left out meanwhile, on all ranks, and said to be."""
    original, goes_on = LocalStore.writing, threading.Event()

    def slow(store: LocalStore, path: str) -> Any:
        if "rank-2" in path:
            assert goes_on.wait(10.0)
        return original(store, path)

    monkeypatch.setattr(LocalStore, "writing", slow)
    group.take(10)
    group.take(20)
    assert not group.notes
    goes_on.set()
    group.wait()
    (note,) = [note for note in group.notes if "no checkpoint of iteration 20" in note and "Training" in note][:1]
    assert "that of iteration 10 is still being written" in note
    assert group.newest == [10, 10, 10]
    group.take(30)
    group.wait()
    assert group.newest == [30, 30, 30] and group.directory.committed() == [10, 30]


def test_a_connection_that_breaks_is_made_again(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait until this rank has told."""
    monkeypatch.setattr(writer, "_RETRY_S", 0.05)
    original, failing = group.server_client, [2, 0, 0]

    def client() -> StoreClient:
        if failing:
            failing.pop()
            raise dist.DistStoreError("timed out")
        return original()

    monkeypatch.setattr(group, "server_client", client)
    group.take(10)
    group.wait()
    assert not failing and group.newest == [10, 10, 10]


def test_a_connection_that_breaks_after_the_decision_is_made_again(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the ranks have told is not there any more then, and they do not tell it again."""
    monkeypatch.setattr(writer, "_RETRY_S", 0.05)
    original, deleted = StoreClient.delete_key, list[str]()

    def delete_key(store: StoreClient, key: str) -> bool:
        found = original(store, key)
        deleted.append(key)
        if len(deleted) == 3:
            raise dist.DistStoreError("timed out")
        return found

    monkeypatch.setattr(StoreClient, "delete_key", delete_key)
    group.take(10)
    group.wait()
    assert len(deleted) == 6 and group.newest == [10, 10, 10]
    assert sum("checkpoint of iteration 10" in note for note in group.notes) == 1


def test_what_a_former_generation_had_queued_is_let_go(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(Checkpoints, "_agree", lambda *args: done.append("agree"))
    goes_on = threading.Event()
    original = Checkpoints._write

    def write(self: Checkpoints, task: Any) -> Any:
        assert goes_on.wait(10.0)
        return original(self, task)

    monkeypatch.setattr(Checkpoints, "_write", write)
    for iteration in (10, 20, 30):
        group.take(iteration, 2)
    group.ranks[2].recovered(31)
    goes_on.set()
    group.wait(2)
    assert not done


def test_what_cannot_be_loaded_is_said(group: Group, tmp_path: Path) -> None:
    group.take(10)
    group.wait()
    other = Checkpoints(Settings(group.directory, 10), 3, 4, [3], group.notes.append)
    with pytest.raises(StateError, match="is of 3 ranks, and this job has 4"):
        other.load(10, state(0))
    (tmp_path / "file").touch()
    nowhere, new = (
        Checkpoints(Settings(CheckpointDirectory(LocalStore(tmp_path / name)), 10), 0, 1, [0], group.notes.append)
        for name in ("file", "new")
    )
    with pytest.raises(CheckpointError, match="a directory or bucket that all nodes can read and write"):
        nowhere.find()
    assert new.find() == 0


def test_a_script_that_asks_for_what_cannot_be_hears_of_all_of_it(tmp_path: Path) -> None:
    place = cast(Any, SimpleNamespace(status="fresh"))
    job = cast(Any, Job(0, 0, 1, torch.device("cpu"), place, cast(Any, None), cast(Any, SimpleNamespace())))
    with pytest.raises(UsageError, match=r"every=0 is .*; keep=True is .*; ftp://name/: a directory"):
        job.checkpoint("ftp://name/", every=0, keep=True)
    job.checkpoint(tmp_path, every=5)
    job._fail()  # or it waits for the others when this process exits
    job._begun = True
    with pytest.raises(UsageError, match="before the training loop begins; it was called before"):
        job.checkpoint(tmp_path, every=5)
    alone = Job(0, 0, 1, torch.device("cpu"), place, cast(Any, None), None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alone.checkpoint(tmp_path, every=5)
    assert "without swift-run no checkpoints are written" in str(caught[0].message)


def test_rank_0_says_now_and_then_that_the_end_waits() -> None:
    done = SimpleNamespace(wait=lambda timeout_s: False)
    notes: list[str] = []
    for rank in (0, 1):
        waiting = Checkpointing(
            cast(Checkpoints, done), cast(Place, SimpleNamespace(rank=rank)), cast(Any, None), cast(Any, None),
            cast(Any, SimpleNamespace(note=notes.append)),
        )  # fmt: skip
        assert not any(waiting.is_over(0.5) for _ in range(100))  # 50 s
        assert len(notes) == 4  # after 5, 10, 20 and 40 s, and nobody else
    done.wait = lambda timeout_s: True
    assert waiting.is_over(0.5)


class Fenced:
    """Generation *generation* of one rank that takes checkpoints in *path*. *why*: what its agent says."""

    def __init__(self, path: Path, server: StoreServer, generation: int, run: str = "e7") -> None:
        self.notes: list[str] = []
        self.why, self.generation, self._server = "", generation, server
        self.directory = CheckpointDirectory(LocalStore(path))
        settings = Settings(self.directory, every=10, keep=1)
        self.checkpoints = Checkpoints(
            settings, 0, 1, [0], self.notes.append, run=run, why_not=lambda generation: self.why
        )

    def take(self, iteration: int) -> None:
        connect = lambda: StoreClient("127.0.0.1", self._server.port, b"", timedelta(seconds=10))  # noqa: E731
        self.checkpoints.take(iteration, state(iteration), lambda: {"at": iteration}, connect, self.generation)
        assert self.checkpoints.wait(10.0)


@pytest.fixture
def fenced(tmp_path: Path) -> Iterator[Callable[..., Fenced]]:
    with contextlib.ExitStack() as stack:

        def make(generation: int, **options: Any) -> Fenced:
            return Fenced(tmp_path, stack.enter_context(contextlib.closing(StoreServer("127.0.0.1"))), generation,
                          **options)  # fmt: skip

        yield make


def test_an_older_generation_commits_and_removes_nothing(fenced: Callable[..., Fenced]) -> None:
    """All its ranks live, cut off together; the next one is behind."""
    old, new = fenced(1), fenced(2)
    old.checkpoints.begins(0, 1)
    for iteration in (10, 20):
        old.take(iteration)
    assert old.directory.committed() == [20]
    new.checkpoints.begins(20, 2)
    new.take(30)
    for iteration in (40, 50):
        old.take(iteration)
    assert old.checkpoints.newest == 20, old.notes
    assert "no checkpoint of iteration 50: another generation has taken over" in old.notes[-1]
    assert new.directory.committed() == [30] and new.checkpoints.find() == 30
    new.take(40)
    assert new.checkpoints.newest == 40 and new.directory.committed() == [40]


def test_nothing_counts_of_a_node_that_may_have_been_given_up(fenced: Callable[..., Fenced]) -> None:
    one = fenced(1)
    one.checkpoints.begins(0, 1)
    one.take(10)
    one.why = "etcd has not answered for 4 s"
    one.take(20)
    assert one.directory.committed() == [10] and one.checkpoints.newest == 10
    assert "no checkpoint of iteration 20: etcd has not answered for 4 s. Training goes on" in one.notes[-1]
    one.why = ""
    one.take(30)
    assert one.directory.committed() == [30]


def test_a_directory_that_could_not_be_claimed_is_claimed_later(fenced: Callable[..., Fenced]) -> None:
    one = fenced(1)
    one.why = "not yet"
    one.checkpoints.begins(0, 1)
    one.take(10)
    one.why = ""
    one.take(20)
    assert one.directory.committed() == [20]
    other = fenced(3, run="e2")  # of another etcd
    other.checkpoints.begins(20, 3)
    other.take(30)
    one.take(40)
    assert one.checkpoints.newest == 20 and other.directory.committed() == [30]


def test_one_that_finds_no_thread_is_written_later(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        group.take(10)
    # Each at its end; the others have to have begun for one to see that it counts.
    for _ in range(2):
        for rank in group.ranks:
            rank.wait(0.01)
    group.wait()
    assert group.newest == [10] * 3


def test_one_counts_whatever_prevents_the_removal_of_old_ones(
    fenced: Callable[..., Fenced], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(store: LocalStore, path: str) -> None:
        raise ValueError("no such scheme")

    one = fenced(1)
    one.take(10)
    monkeypatch.setattr(LocalStore, "remove_directory", refuses)
    one.take(20)
    assert one.checkpoints.newest == 20 and one.directory.committed()[-1] == 20
    assert one.notes[-1] == "old checkpoints cannot be removed: no such scheme"
    assert not any(note.startswith("no checkpoint") for note in one.notes)


def test_nothing_runs_between_two(group: Group) -> None:
    for iteration in (10, 20):
        group.take(iteration)
        group.wait()
        for rank in group.ranks:
            while (running := rank._thread) is not None:
                running.join(10)
                assert not running.is_alive()
    assert group.newest == [20] * 3
