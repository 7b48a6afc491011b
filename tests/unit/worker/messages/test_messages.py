"""Messages are counted, logged and served again; on torch's fake backend, with channels between two made up ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import queue
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from swift_agent import native
from swift_agent.errors import UsageError
from swift_agent.torch_private import messages as torch_messages
from swift_agent.torch_private import works as torch_works
from swift_agent.wire.environment import WorkerEnvironment
from swift_agent.worker.messages import log_settings, messages
from swift_agent.worker.messages.cpp_messages import ways_past
from swift_agent.worker.messages.interception import Interception
from swift_agent.worker.messages.messages import Messages
from swift_logging_store.errors import LogError
from swift_logging_store.format.record import Channel
from swift_logging_store.format.segment import END_BYTES, Segment
from swift_logging_store.log import transfer
from swift_logging_store.log.log import SentLog
from swift_logging_store.log.reader import LogReader
from swift_recovery.errors import CannotReplay

SENT = torch.arange(6, dtype=torch.float32).reshape(2, 3)


class Pipe:
    """A link within this process."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.beginning: list[Any] = []
        self.is_used = False

    def send_bytes(self, data: bytes) -> None:
        self.pieces.put(data)

    def recv_bytes(self) -> bytes:
        return self.pieces.get(timeout=5.0)

    def send(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    recv = send


def give(sender: Messages, destination: int, before: int, link: Pipe) -> None:
    link.beginning = sender.beginnings.to_json()
    gift = sender.gift(destination, before, [destination])
    link.is_used = gift is not None
    if gift is not None:
        gift(link, lambda: None)


def take(replacement: Messages, source: int, link: Pipe) -> None:
    replacement.beginnings.hear(link.beginning)
    replacement.take({source: lambda check: contextlib.nullcontext(link)} if link.is_used else {})
    replacement.wait_taken()


@pytest.fixture
def notes() -> list[str]:
    return []


class Environment:
    """What ranks are told that are made from now on."""

    told = WorkerEnvironment()


@pytest.fixture
def environment() -> Environment:
    return Environment()


@pytest.fixture
def make(
    tmp_path: Path, notes: list[str], environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], Messages]]:
    """The messages of one rank of three, for which this process stands from then on."""
    names = ("send", "recv", "recv_anysource", *torch_messages.ALIKE)
    operations = {name: getattr(dist.ProcessGroup, name) for name in names}

    def one(rank: int, log_group: Collection[int] = (), *, is_strict: bool = True) -> Messages:
        for name, original in operations.items():
            monkeypatch.setattr(dist.ProcessGroup, name, original)
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
        directory = tmp_path / f"node{rank}"
        directory.mkdir(exist_ok=True)
        made = Messages(
            rank, directory, notes.append, log_group=lambda: frozenset(log_group), told=environment.told,
            is_strict=is_strict,
        )  # fmt: skip
        made.beginnings.origins = [[0, 0]] * 3
        return made

    yield one
    dist.destroy_process_group()


@contextlib.contextmanager
def repeated(replacement: Messages, iteration: int) -> Iterator[None]:
    replacement.begin(iteration, generation=2)
    yield
    replacement.end()


def send(value: float, to: int = 2, tag: int = 0) -> None:
    dist.isend(SENT + value, to, tag=tag).wait()


def receive(source: int = 1, tag: int = 0) -> torch.Tensor:
    tensor = torch.zeros_like(SENT)
    dist.irecv(tensor, source, tag=tag).wait()
    return tensor


def test_a_replacement_gets_what_its_predecessor_was_sent(make: Callable[[int], Messages]) -> None:
    link = Pipe()
    sender = make(1)
    send(100)  # of no iteration: not logged
    for iteration in range(4):
        sender.begin(iteration, generation=1)
        send(iteration)
        send(10 + iteration, tag=7)
        send(20 + iteration, to=0)
        sender.end()
    give(sender, 2, 3, link)
    replacement = make(2)
    take(replacement, 1, link)
    replacement.begin_replay([2])
    for iteration in range(3):
        with repeated(replacement, iteration):
            assert torch.equal(receive(tag=7), SENT + 10 + iteration)
            assert torch.equal(receive(), SENT + iteration)
            send(30 + iteration, to=1)
    replacement.end_replay(stays=False)
    replacement.begin(3, generation=2)
    assert torch.equal(receive(), torch.zeros_like(SENT))  # from the group again, and the fake one brings nothing
    replacement.end()
    # What it has sent meanwhile is in its own log.
    give(replacement, 1, 3, link)
    again = make(1)
    take(again, 2, link)
    again.begin_replay([1])
    with repeated(again, 0):
        assert torch.equal(receive(2), SENT + 30)


def test_large_logs_go_in_pieces(make: Callable[[int], Messages], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 300)
    link = Pipe()
    sender = make(1)
    sender.begin(0, 1)
    for value in range(20):
        send(value)
    sender.end()
    give(sender, 2, 1, link)
    assert link.pieces.qsize() > 5
    replacement = make(2)
    take(replacement, 1, link)
    replacement.begin_replay([2])
    with repeated(replacement, 0):
        assert all(torch.equal(receive(), SENT + value) for value in range(20))


def test_a_repeated_iteration_counts_its_messages_again(make: Callable[[int], Messages]) -> None:
    link = Pipe()
    sender = make(1)
    for iteration, values in enumerate(([1, 2], [3, 4])):
        sender.begin(iteration, 1)
        send(values[0] + 0.5)  # not the same, on a device whose sums have no order: what counts is what was sent last
        sender.rewind()
        sender.begin(iteration, 2)
        for value in values:
            send(value)
        sender.end()
    give(sender, 2, 2, link)
    replacement = make(2)
    take(replacement, 1, link)
    replacement.begin_replay([2])
    for iteration, values in enumerate(([1, 2], [3, 4])):
        with repeated(replacement, iteration):
            assert [torch.equal(receive(), SENT + value) for value in values] == [True, True]


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_has_come_while_it_peeked_is_known_by_its_memory(make: Callable[[int], Messages], is_kept: bool) -> None:
    """A stage of torch 2.15 makes memory for each message, which may begin where that of the first pass did."""
    link = Pipe()
    sender = make(1)
    sender.begin(0, 1)
    for value in range(3):
        send(value)
    sender.end()
    give(sender, 2, 1, link)
    replacement = make(2)
    take(replacement, 1, link)
    replacement.begin_replay([2])
    first = [torch.full_like(SENT, -1) for _ in range(3)]
    unread = {first[0].data_ptr()}
    with repeated(replacement, 0):
        with replacement.shared.peeking(unread):
            for memory in first:
                dist.irecv(memory, 1).wait()
        assert [one[0, 0].item() for one in first] == [-1, 1, 2]
        second = first
        if not is_kept:
            second = [one.view_as(one) for one in first]  # the same place and version, and another tensor
            for memory in second:
                memory.numpy().fill(-1)
        for memory in second:
            dist.irecv(memory, 1).wait()
        assert all(torch.equal(memory, SENT + value) for value, memory in enumerate(second))


def test_who_repeats_too_is_heard_and_told(make: Callable[[int], Messages], monkeypatch: pytest.MonkeyPatch) -> None:
    replacement = make(2)
    served: list[str] = []
    finished = torch_works.finished_work
    monkeypatch.setattr(torch_works, "finished_work", lambda: served.append("") or finished())
    replacement.take({})
    replacement.begin_replay([0, 2])
    with repeated(replacement, 0):
        send(1, to=0)
        receive(0)
        assert not served  # by the group
        send(1, to=1)
        assert served
        with pytest.raises(CannotReplay):
            receive(1)


def test_what_is_sent_again_is_compared(make: Callable[[int], Messages], tmp_path: Path, notes: list[str]) -> None:
    former = make(1)
    for iteration, values in enumerate(([1, 2], [3, 4])):
        one_iteration(former, iteration, *values)
    former.log._writer.flush()  # and is killed

    def again() -> Messages:
        made = make(1)
        made.begin_replay([1])
        return made

    replacement = again()
    with repeated(replacement, 0):
        send(1)
        send(2)
    with repeated(replacement, 1):
        send(3)
        with pytest.raises(CannotReplay, match=r"message 3 of .* is not what was sent before"):
            send(4.5)
    replacement.log._writer.flush()
    # One that is lost while it repeats leaves the longer log of its predecessor.
    another = again()
    with repeated(another, 0):
        with pytest.raises(CannotReplay, match="message 0 of"):
            dist.isend((SENT + 1).double(), 2).wait()
        another._counts.sent.clear()
        send(1)
        send(2)
    with repeated(another, 1):
        send(3)
        send(4)
        send(5)  # that log does not have it
    another.end_replay(stays=False)
    assert len(list((tmp_path / "node1").glob("messages-*"))) == 3
    one_iteration(another, 2, 6)
    assert len(list((tmp_path / "node1").glob("messages-*"))) == 1
    assert not notes


def test_what_was_sent_before_a_restart_of_all_is_not_compared(
    make: Callable[[int], Messages], tmp_path: Path, environment: Environment
) -> None:
    one_iteration(make(1), 0, 1)
    environment.told = dataclasses.replace(environment.told, restart_count=1)
    replacement = make(1)
    assert len(list((tmp_path / "node1").glob("messages-*"))) == 1
    replacement.begin_replay([1])
    with repeated(replacement, 0):
        send(2)


def test_a_message_of_another_iteration_is_not_taken(make: Callable[[int], Messages]) -> None:
    """The numbers are off: something was sent that the repetition leaves out, or that was not counted."""
    link = Pipe()
    sender = make(1)
    sender.begin(3, 1)
    send(1)
    sender.end()
    give(sender, 2, 4, link)
    replacement = make(2)
    take(replacement, 1, link)
    replacement.begin_replay([2])
    with repeated(replacement, 2), pytest.raises(CannotReplay, match="sent in iteration 3, and is waited for in 2"):
        receive()


def test_set_up_that_gives_something_else(make: Callable[[int], Messages]) -> None:
    """A script without a seed, or one that has loaded what the job has written since."""
    link = Pipe()
    sender = make(1)
    assert sender.is_complete
    sender.beginnings.origins = [[1, 2], [3, 4], [5, 6]]
    give(sender, 2, 0, link)
    replacement = make(2)
    replacement.beginnings.origins = []
    assert not replacement.is_complete
    take(replacement, 1, link)
    assert replacement.beginnings.origins == sender.beginnings.origins and replacement.is_complete
    for origin, what in (([5, 6], ""), ([0, 6], "another state"), ([5, 0], "another seed")):
        replacement.beginnings.origin = origin
        if what:
            with pytest.raises(CannotReplay, match=what):
                replacement.beginnings.check(2, has_checkpoint=False)
        else:
            replacement.beginnings.check(2, has_checkpoint=False)
    # A checkpoint takes the place of the state, and not that of the seed.
    replacement.beginnings.origin = [0, 6]
    replacement.beginnings.check(2, has_checkpoint=True)
    replacement.beginnings.origin = [5, 0]
    with pytest.raises(CannotReplay, match="another seed"):
        replacement.beginnings.check(2, has_checkpoint=True)


def test_a_message_that_nobody_has_or_that_does_not_fit(make: Callable[[int], Messages]) -> None:
    link = Pipe()
    sender = make(1)
    sender.begin(0, 1)
    send(1)
    sender.end()
    give(sender, 2, 1, link)
    replacement = make(2)
    take(replacement, 1, link)
    replacement.begin_replay([2])
    with repeated(replacement, 0):
        with pytest.raises(CannotReplay, match=r"float32 \[2, 3\], and what waits for it torch.int64 \[6\]"):
            dist.irecv(torch.zeros(6, dtype=torch.int64), 1)
        with pytest.raises(CannotReplay, match=r"message 1 of .* is in nobody's log"):
            receive()


def test_a_receive_from_any_source_is_refused_in_an_iteration(make: Callable[[int], Messages]) -> None:
    receiver = make(2)
    receiver.begin(0, 1)
    with pytest.raises(UsageError, match="from any source"):
        dist.irecv(torch.zeros(2))


def test_other_ways_between_ranks_are_refused(make: Callable[[int], Messages], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the objects are tracked, and once more in the first iteration: it may have been set up since."""
    made = make(1)
    agree = made.agreeing(lambda: None)
    made.begin(0, 1)
    monkeypatch.setattr(torch_messages, "ways_past_c10d", lambda: ["torch.distributed.rpc", "symmetric memory"])
    with pytest.raises(UsageError, match=r"has set up torch\.distributed\.rpc and symmetric memory"):
        agree()
    assert "has set up torch.distributed.rpc and symmetric memory" in str(ways_past())


@pytest.mark.parametrize("how", ["any", "late", "past"])
def test_where_others_hold_the_same_a_broken_rule_ends_the_log_and_not_the_job(
    how: str, make: Callable[..., Messages], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on messages are torch's own, and nobody counts them."""
    rank = make(1, is_strict=False)
    agree = rank.agreeing(lambda: None)
    rank.begin(0, 1)
    send(1)
    if how == "any":
        with contextlib.suppress(NotImplementedError):  # by the backend, after that
            dist.irecv(torch.zeros(2))
    if how == "past":
        monkeypatch.setattr(torch_messages, "ways_past_c10d", lambda: ["torch.distributed.rpc"])
    agree()
    if how == "late":
        send(2)
    assert rank.shared.is_off and not rank.is_complete and len(notes) == 1
    assert notes[0].startswith("messages are logged no more: ") and "to start" not in notes[0]
    before = rank.counts()
    send(3)
    receive(2)
    rank.end()
    rank.begin_checkpoint(1)
    rank.checkpointed(1)
    rank.begin(1, 1)
    send(4)
    rank.end()
    assert rank.counts() == before and rank.told(2) is None and not rank.is_complete and len(notes) == 1


def test_a_log_that_cannot_be_written_any_more_is_given_up(
    make: Callable[[int], Messages], notes: list[str], tmp_path: Path
) -> None:
    sender = make(1)
    sender.begin(0, 1)
    send(1)
    assert not sender.log.incomplete
    with contextlib.suppress(NotImplementedError):  # by the backend, after that
        dist.isend(torch.zeros(2).to_sparse(), 2)
    assert "no plain memory" in sender.log.incomplete and len(notes) == 1 and "all workers start again" in notes[0]
    send(2)
    assert len(notes) == 1 and not list((tmp_path / "node1").glob("messages-*/sent"))


def test_a_log_that_cannot_be_begun_is_given_up_until_there_is_a_place_for_it(
    make: Callable[[int], Messages], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on."""

    def full(path: Path, *args: object, **options: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        log = SentLog(1, Path("nowhere"), 1 << 20, "", notes.append)
    assert "No space left" in log.incomplete and len(notes) == 1 and "all workers start again" in notes[0]
    with pytest.raises(LogError, match="logged no more"):
        log.segments()
    sender = make(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        sender.log.give_up("on purpose")
        assert not sender.log.begin_checkpoint(3) and "No space left" in sender.log.incomplete
    sender.begin(0, 1)
    send(1)
    sender.end()
    assert sender.log.begin_checkpoint(6) and not sender.log.incomplete


def test_what_a_log_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = WorkerEnvironment(num_local=4)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert log_settings.bytes_for_logs(told, tmp_path) == (usage.free // 2 // 4, "half of what was free on the disk")
    told = dataclasses.replace(told, message_log_bytes=70)
    assert log_settings.bytes_for_logs(told, tmp_path) == (70, "what --message-log-limit leaves this rank")


def test_a_log_takes_no_more_than_it_may(
    make: Callable[[int], Messages], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "bytes_for_logs", lambda told, directory: (2 * SENT.nbytes, "that much"))
    sender = make(1)
    sender.begin(0, 1)
    send(1)
    send(2)
    assert not notes
    send(3)
    assert sender.log.incomplete == "that much is used up"
    with pytest.raises(LogError, match="logged no more: that much is used up"):
        give(sender, 2, 1, Pipe())


def test_a_message_that_could_not_be_handed_on_is_told_of_now(
    make: Callable[[int], Messages], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when it is wanted."""
    monkeypatch.setattr(transfer, "MAX_MESSAGE_BYTES", SENT.nbytes)
    sender = make(1)
    sender.begin(0, 1)
    send(1)
    assert not notes
    dist.isend(torch.zeros(7), 2)
    assert "28 bytes" in sender.log.incomplete and len(notes) == 1


def test_without_the_compiled_library_nothing_is_logged(
    make: Callable[[int], Messages], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be of no use; that is said with the first message, and not when a rank is lost."""
    monkeypatch.setattr(native, "load", lambda: None)
    sender = make(1)
    sender.begin(0, 1)
    assert sender.is_complete and not notes
    send(1)
    send(2)
    sender.end()
    assert not sender.is_complete and not list(sender.log._directory.glob("*"))
    (note,) = notes
    assert "swiftctl native build" in note and "all workers start again." in note


def test_the_log_of_a_predecessor_on_the_same_node_goes(make: Callable[[int], Messages], tmp_path: Path) -> None:
    """As soon as it is known that nothing is to be repeated."""
    first = make(1)
    first.begin(0, 1)
    send(1)
    second = make(1)
    assert len(list((tmp_path / "node1").glob("messages-1-*/sent"))) == 2
    second.begin(0, 1)
    send(2)
    second.end()
    second.log._writer.flush()
    (only,) = (tmp_path / "node1").glob("messages-1-*/sent")
    with LogReader(only) as log:
        assert log.sequences(Channel(dist.group.WORLD.group_name, 1, 2)) == [0]  # type: ignore[union-attr]
        assert bytes(log.read(log.channels[0], 0)[1]) == (SENT + 2).numpy().tobytes()
    del first
    gc.collect()


def one_iteration(rank: Messages, number: int, *values: float) -> None:
    rank.begin(number, 1)
    for value in values:
        send(value)
    rank.end()


def test_what_was_sent_before_a_checkpoint_goes_when_that_counts(
    make: Callable[[int], Messages], tmp_path: Path
) -> None:
    sender, link = make(1), Pipe()
    for number in range(2):
        one_iteration(sender, number, number)
    sender.begin_checkpoint(2)
    for number in range(2, 4):
        one_iteration(sender, number, number)
    left = sender.log._bytes_left
    sender.log._writer.flush()
    sender.checkpointed(2)
    assert sender.is_complete and sender.log._bytes_left > left
    give(sender, 2, 4, link)
    replacement = make(2)
    counts = {"sent": [], "received": [[dist.group.WORLD.group_name, 1, 2, 0, 2]]}  # type: ignore[union-attr]
    replacement.restore(counts, 2)
    take(replacement, 1, link)
    replacement.begin_replay([2])
    for number in range(2, 4):
        with repeated(replacement, number):
            assert torch.equal(receive(), SENT + number)
    replacement.end_replay(stays=False)
    assert replacement.is_complete and not list((tmp_path / "node2").glob("messages-*/taken"))


def test_without_the_checkpoint_the_rest_is_of_no_use(make: Callable[[int], Messages]) -> None:
    sender, link = make(1), Pipe()
    one_iteration(sender, 0, 0)
    sender.begin_checkpoint(1)
    one_iteration(sender, 1, 1)
    sender.log._writer.flush()
    sender.checkpointed(1)
    give(sender, 2, 2, link)
    replacement = make(2)
    take(replacement, 1, link)
    replacement.begin_replay([2])
    with repeated(replacement, 0), pytest.raises(CannotReplay, match=r"message 0 of .* is in nobody's log"):
        receive()


def test_a_log_that_was_given_up_is_of_use_again_from_the_next_checkpoint_on(
    make: Callable[[int], Messages], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "bytes_for_logs", lambda told, directory: (2 * SENT.nbytes, "that much"))
    sender, link = make(1), Pipe()
    one_iteration(sender, 0, 0, 1, 2)
    assert not sender.is_complete
    sender.begin_checkpoint(1)
    one_iteration(sender, 1, 7)
    assert not sender.is_complete  # that checkpoint may never count
    sender.checkpointed(1)
    assert sender.is_complete and "logged again" in notes[-1]
    give(sender, 2, 2, link)
    replacement = make(2)
    replacement.restore({"sent": [], "received": [[dist.group.WORLD.group_name, 1, 2, 0, 3]]}, 1)  # type: ignore[union-attr]
    take(replacement, 1, link)
    replacement.begin_replay([2])
    with repeated(replacement, 1):
        assert torch.equal(receive(), SENT + 7)


def test_who_waits_for_the_disk_is_told_now_and_then(make: Callable[[int], Messages], notes: list[str]) -> None:
    sender = make(1)
    for waited_s in (0.9, 1.5, 2.9, 3.1):
        sender.log._writer.wait_s = waited_s
        sender.log.end_iteration()
    waits = [note.partition(" so far")[0] for note in notes]
    assert waits == ["training has waited 1.5 s", "training has waited 3.1 s"]


def test_what_a_log_has_done_counts_also_when_it_was_given_up(make: Callable[[int], Messages]) -> None:
    sender = make(1)

    def sends(iteration: int) -> None:
        sender.begin(iteration, 1)
        send(1)
        sender.end()
        sender.log.segments()  # they are on the disk

    sends(0)
    first = sender.log.figures
    sender.log._writer.wait_s = 0.5
    assert first.written_bytes > SENT.nbytes and not first.num_given_up
    sender.log.give_up("on purpose")
    assert sender.log.figures.num_given_up == 1
    assert sender.log.begin_checkpoint(1)
    again = sender.log.figures
    assert again.written_bytes >= first.written_bytes and again.waited_ns == 500_000_000 and not again.num_given_up
    sends(1)
    assert sender.log.figures.written_bytes > again.written_bytes


@pytest.fixture
def store(tmp_path: Path, environment: Environment, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where logs are copied to; the node has room for 10 messages."""
    monkeypatch.setattr(messages, "bytes_for_logs", lambda told, directory: (10 * SENT.nbytes, "that much"))
    environment.told = WorkerEnvironment(log_store=str(tmp_path / "store"), run_id="job", run="e5", generation=1)
    return tmp_path / "store"


def copied(rank: Messages) -> bool:
    """What was sent is on the disk, and what is closed of it in the store."""
    assert rank.log._archive is not None
    rank.log._writer.roll()
    deadline_s = time.monotonic() + 60.0
    while rank.log._writer._queue or not rank.log._archive.wait(0.05):
        assert time.monotonic() < deadline_s
    return True


def handed_on(sender: Messages, make: Callable[[int], Messages], before: int) -> Messages:
    """The replacement of rank 2, which begins to repeat its iterations."""
    link = Pipe()
    give(sender, 2, before, link)
    replacement = make(2)
    take(replacement, 1, link)
    replacement.begin_replay([2])
    return replacement


def test_what_is_in_the_store_needs_no_room(
    make: Callable[[int], Messages], store: Path, notes: list[str], tmp_path: Path
) -> None:
    sender = make(1)
    for number in range(40):
        one_iteration(sender, number, number)
        assert copied(sender)
    here = list((tmp_path / "node1").glob("messages-*/sent/*.seg"))
    assert sender.is_complete and 2 < len(here) <= 11
    replacement = handed_on(sender, make, 39)
    assert "the rest comes from" in notes[-1] and not list((tmp_path / "node1").glob("messages-*/brought/*"))
    for number in range(39):
        with repeated(replacement, number):
            assert torch.equal(receive(), SENT + number)
    sender.begin_checkpoint(41)
    sender.checkpointed(41)
    assert copied(sender) and not list(store.rglob("*.seg"))
    for rank in (sender, replacement):
        rank.close()
    assert not list(store.iterdir())


def test_closed_segments_that_were_lost_come_from_the_store(
    make: Callable[[int], Messages], store: Path, tmp_path: Path
) -> None:
    sender = make(1)
    for number in range(8):
        one_iteration(sender, number, number)
    assert copied(sender)
    for path in (tmp_path / "node1").glob("messages-*/sent/*.seg"):
        if path.name in sender.log._archive.stored:  # type: ignore[union-attr]
            path.unlink()
    give(sender, 0, 8, Pipe())
    replacement = handed_on(sender, make, 8)
    for number in range(8):
        with repeated(replacement, number):
            assert torch.equal(receive(), SENT + number)
    for rank in (sender, replacement):
        rank.close()


@pytest.mark.parametrize("damage", ["a message", "the index", "the end", "the head"])
def test_what_is_damaged_on_the_node_comes_from_the_store(
    damage: str, make: Callable[[int], Messages], store: Path, tmp_path: Path, notes: list[str]
) -> None:
    sender = make(1)
    for number in range(8):
        one_iteration(sender, number, number)
    assert copied(sender)
    stored = sender.log._archive.stored  # type: ignore[union-attr]
    damaged = [path for path in (tmp_path / "node1").glob("messages-*/sent/*.seg") if path.name in stored]
    for path in damaged:
        hurt(path, damage)
    told = len(notes)
    replacement = handed_on(sender, make, 8)
    for number in range(8):
        with repeated(replacement, number):
            assert torch.equal(receive(), SENT + number)
    channel = Channel(dist.group.WORLD.group_name, 1, 2)  # type: ignore[union-attr]
    sent = transfer.logged(sender.log, {channel: range(2, 5)}, lambda: None)
    assert [torch.equal(tensor, SENT + number) for number, (_, tensor) in enumerate(sent, 2)] == [True] * 3
    assert damaged and [f"it comes from {tmp_path}/store" in note for note in notes[told:]] == [True] * 2
    assert not list((tmp_path / "node1").glob("messages-*/brought/*"))
    for path in store.rglob("*.seg"):
        hurt(path, damage)
    with pytest.raises(LogError, match=r"/brought/.*/rank1"):
        give(sender, 2, 8, Pipe())
    for rank in (sender, replacement):
        rank.close()


def hurt(path: Path, what: str) -> None:
    """Change one bit of a segment, or cut its end."""
    data = bytearray(path.read_bytes())
    match what:
        case "a message":
            segment = Segment(bytes(data))
            data[data.find(bytes(segment.read(segment.entries[0])[1]))] ^= 1
        case "the index":
            data[-END_BYTES - 1] ^= 1
        case "the end":
            del data[-30:]
        case "the head":
            data[0] ^= 1
    path.write_bytes(data)


def test_of_an_iteration_that_was_run_again_the_last_time_counts_wherever_it_is(
    make: Callable[[int], Messages], store: Path
) -> None:
    """Also if both are in different segments, one of them in the store only."""
    sender = make(1)
    for number in range(6):
        sender.begin(number, 1)
        send(number + 0.5)
        send(number + 0.75)
        assert copied(sender)
        sender.rewind()
        if number == 4:  # cut once more, early
            sender.begin(number, 2)
            send(number + 0.25)
            assert copied(sender)
            sender.rewind()
        one_iteration(sender, number, number, 10 + number)
        assert copied(sender)
    replacement = handed_on(sender, make, 6)
    for number in range(6):
        with repeated(replacement, number):
            assert torch.equal(receive(), SENT + number) and torch.equal(receive(), SENT + 10 + number)
    for rank in (sender, replacement):
        rank.close()


@pytest.mark.parametrize("what", ["the directory", "the newest", "a part"])
def test_a_log_that_lacks_something_is_not_handed_on(
    what: str, make: Callable[[int], Messages], store: Path, tmp_path: Path
) -> None:
    """Or an older message could be taken for the one that counts."""
    sender = make(1)
    for number in range(3):
        one_iteration(sender, number, number)
        assert copied(sender)
    one_iteration(sender, 3, 3)
    sender.log._writer.flush()
    (directory,) = (tmp_path / "node1").glob("messages-*")
    first, *_, newest = sorted(directory.glob("sent/*.seg"))
    match what:
        case "the directory":
            shutil.rmtree(directory)
        case "the newest":
            newest.unlink()
        case "a part":  # which is not in the store
            os.truncate(first, first.stat().st_size - 30)
            del sender.log._archive._stored[first.name]  # type: ignore[union-attr]
    with pytest.raises(LogError):
        give(sender, 2, 4, Pipe())
    sender.close()


@pytest.mark.parametrize("what", ["the last byte", "all", "a bit", "the last message"])
def test_nor_one_whose_open_segment_is_damaged(what: str, make: Callable[[int], Messages], tmp_path: Path) -> None:
    """What is whole of it would pass for all there is: it has no end mark yet."""
    sender = make(1)
    one_iteration(sender, 0, 0, 1)
    sender.log._writer.flush()
    (segment,) = tmp_path.glob("node1/messages-*/sent/*.seg")
    num_bytes = segment.stat().st_size
    one_iteration(sender, 1, 2, 3)
    sender.log._writer.flush()
    match what:
        case "the last byte":
            os.truncate(segment, segment.stat().st_size - 1)
        case "all":
            os.truncate(segment, 0)
        case "a bit":
            data = bytearray(segment.read_bytes())
            data[len(data) // 2] ^= 1
            segment.write_bytes(data)
        case "the last message":
            os.truncate(segment, num_bytes)
    with pytest.raises(LogError, match="is whole up to byte"):
        give(sender, 2, 2, Pipe())


def test_a_store_that_is_away_when_it_is_needed(
    make: Callable[[int], Messages], store: Path, tmp_path: Path
) -> None:
    sender = make(1)
    for number in range(12):
        one_iteration(sender, number, number)
        assert copied(sender)
    store.rename(tmp_path / "moved")
    with pytest.raises(LogError, match=r"segment .* cannot be brought from"):
        give(sender, 2, 12, Pipe())
    (tmp_path / "moved").rename(store)
    (directory,) = (tmp_path / "node1").glob("messages-*")
    (directory / "brought").rmdir()
    (directory / "brought").touch()  # in the way
    with pytest.raises(LogError, match=r"cannot be brought to .*/brought/.*: .*Not a directory"):
        give(sender, 2, 12, Pipe())
    sender.close()


def test_without_the_store_there_is_room_on_the_node_only(
    make: Callable[[int], Messages], store: Path, notes: list[str]
) -> None:
    store.touch()  # no directory
    sender = make(1)
    for number in range(11):
        one_iteration(sender, number, number)
    assert sender.log.incomplete == "that much is used up" and not sender.is_complete
    store.unlink()
    assert sender.log._archive is not None and sender.log._archive.wait(60.0)
    sender.begin_checkpoint(11)
    one_iteration(sender, 11, 11)
    sender.checkpointed(11)
    assert sender.is_complete
    sender.close()


def test_what_predecessors_have_left_in_the_store_goes(
    make: Callable[[int], Messages], store: Path, environment: Environment
) -> None:
    """When the first iteration is over that is no repetition; a section is none."""
    former = make(1)
    one_iteration(former, 0, 0)
    assert copied(former) and len(list(store.iterdir())) == 1
    environment.told = dataclasses.replace(environment.told, generation=2)
    here = make(1)
    here.begin_replay([1])
    with repeated(here, 0):
        send(0)
    assert copied(here) and len(list(store.iterdir())) == 2
    here.end_replay(stays=False)
    here.end()
    assert copied(here) and len(list(store.iterdir())) == 2
    one_iteration(here, 1, 1)
    assert copied(here) and len(list(store.iterdir())) == 1
    for rank in (here, former):
        rank.close()


# ---- where ranks stand ----


def told(stands: str, *sent_or_has: tuple[int, int, int], has: Sequence[tuple[int, int, int]] = ()) -> dict[str, Any]:
    """By a rank: how many messages it had sent from one rank to another, and has."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    trees = ([[name, source, destination, 0, num] for source, destination, num in each] for each in (has, sent_or_has))
    return {"stands": stands, **dict(zip(("has", "sent"), trees, strict=True))}


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Destination and first element of what is sent again."""
    found: list[tuple[int, float]] = []
    original = Interception.send_again

    def send_again(self: Interception, channel: Channel, tensor: torch.Tensor) -> Any:
        found.append((channel.destination, tensor.flatten()[0].item()))
        return original(self, channel, tensor)

    monkeypatch.setattr(Interception, "send_again", send_again)
    return found


def test_a_sender_between_iterations_sends_again_to_who_waits_after_its_update(
    make: Callable[[int], Messages], again: list[tuple[int, float]]
) -> None:
    sender = make(1)
    one_iteration(sender, 0, 0, 1)
    with sender.aside():
        sender.rejoin({0: told("begin"), 2: told("end")}, (), 1, 2)
    assert again == [(2, 0.0), (2, 1.0)]


def test_a_replacement_that_was_cut_sends_again_to_who_waits_after_its_update(
    make: Callable[[int], Messages], again: list[tuple[int, float]]
) -> None:
    replacement = make(1)
    replacement.begin_replay([1])
    with replacement.aside():
        replacement.rejoin({0: told("begin"), 2: told("end")}, (1,), 1, 2)
    with repeated(replacement, 0):
        send(0)
        send(1)
    replacement.end_replay(stays=True)
    assert again == [(2, 0.0), (2, 1.0)]
    with replacement.aside():  # it did not come
        replacement.rejoin({0: told("begin"), 2: told("end")}, (), 1, 3)
    assert again == [(2, 0.0), (2, 1.0)] * 2


def test_what_is_not_logged_is_sent_again_while_it_may_be_on_its_way(
    make: Callable[..., Messages], again: list[tuple[int, float]]
) -> None:
    """In the iteration, after it, and in the next one until all have agreed to that one's update."""
    sender = make(1, log_group=(1, 2))
    sender.begin(0, 1)
    send(0)
    send(7, to=0)
    with sender.aside():
        sender.rejoin({0: told("middle"), 2: told("middle")}, (), 0, 2)
    assert sorted(again) == [(0, 7.0), (2, 0.0)]
    sender.end()
    with sender.aside():
        sender.rejoin({0: told("end", has=[(1, 0, 1)]), 2: told("end")}, (), 1, 3)
    sender.begin(1, 3)
    send(1)
    with sender.aside():
        sender.rejoin({0: told("end", has=[(1, 0, 1)]), 2: told("end")}, (), 1, 4)
    assert again[2:] == [(2, 0.0), (2, 0.0), (2, 1.0)]
    sender.agreeing(lambda: None)()
    with sender.aside():
        sender.rejoin({0: told("end", has=[(1, 0, 1)]), 2: told("middle", has=[(1, 2, 1)])}, (), 1, 5)
    assert again[5:] == [(2, 1.0)]
    with pytest.raises(LogError, match="1 messages that are to be sent again are not in the log"), sender.aside():
        sender.rejoin({0: told("end", has=[(1, 0, 1)]), 2: told("end")}, (), 1, 6)
    assert sender.gift(0, 1, [0]) is not None and sender.unlogged == {1, 2}


def test_what_was_logged_before_a_group_began_to_hold_is_sent_again_first(
    make: Callable[..., Messages], again: list[tuple[int, float]]
) -> None:
    group: set[int] = set()
    sender = make(1, log_group=group)
    one_iteration(sender, 0, 0, 1)
    group |= {1, 2}
    sender.begin(1, 1)
    send(2)
    with sender.aside():
        sender.rejoin({0: told("end"), 2: told("end", has=[(1, 2, 1)])}, (), 1, 2)
    assert again == [(2, 1.0), (2, 2.0)]


def test_what_was_sent_before_is_kept_until_all_have_agreed(
    make: Callable[..., Messages], again: list[tuple[int, float]]
) -> None:
    """A rank that has not come to this update may wait for it after its own."""
    sender = make(1, log_group=(1, 2))
    one_iteration(sender, 0, 0)
    sender.begin(1, 1)

    def cut() -> None:
        raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        sender.agreeing(cut)()
    with sender.aside():
        sender.rejoin({0: told("middle"), 2: told("end")}, (), 1, 2)
    assert again == [(2, 0.0)]


def test_of_an_iteration_that_is_run_again_nothing_is_kept(
    make: Callable[..., Messages], again: list[tuple[int, float]]
) -> None:
    sender = make(1, log_group=(1, 2))
    sender.begin(0, 1)
    send(0)
    send(1)
    sender.rewind()
    sender.begin(0, 2)
    send(5)
    with sender.aside():
        sender.rejoin({0: told("middle"), 2: told("middle")}, (), 0, 3)
    assert again == [(2, 5.0)]


def test_who_does_not_stay_has_nothing_of_logs_that_it_throws_away(make: Callable[[int], Messages]) -> None:
    link, sender = Pipe(), make(1)
    one_iteration(sender, 0, 0)
    sender.begin(1, 1)
    send(10)
    give(sender, 2, 2, link)
    replacement = make(2)
    take(replacement, 1, link)
    replacement.begin_replay([2])
    with repeated(replacement, 0):
        receive()
    replacement.end_replay(stays=True)
    assert replacement.told(1)["has"][0][-1] == 2
    replacement.start_over()
    assert replacement.told(1)["has"][0][-1] == 1


def test_a_message_that_nobody_has_received_is_noticed(make: Callable[[int], Messages]) -> None:
    receiver = make(2)
    receiver.begin(0, 1)
    receive()
    receiver.end()
    others = {0: told("begin"), 1: told("begin", (1, 2, 2))}
    with receiver.aside(), pytest.raises(CannotReplay, match="what is sent in an iteration must be received in it"):
        receiver.rejoin(others, (), 1, 2)
    receiver = make(2)
    receiver.begin(0, 1)
    receive()
    receiver.pass_over()  # it was to receive another one after its update
    receiver.begin(1, 1)  # and is stopped as the next iteration begins
    receiver.rewind()
    with receiver.aside():
        receiver.rejoin(others, (), 1, 2)


def test_of_a_batch_that_nccl_makes_at_once_only_the_batch_has_a_work(
    make: Callable[[int], Messages], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's operations return None there. They count, and a receive after them is waited for as any other."""
    waited: list[int] = []

    class Work(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            waited.append(1)
            return True

    in_batch = True
    rank = make(2)
    for name in ("send", "recv"):
        monkeypatch.setattr(dist.ProcessGroup, name, lambda *its: None if in_batch else Work())
    rank._its.install()
    rank.begin(0, generation=1)
    assert dist.isend(SENT, 1) is None and dist.irecv(torch.zeros_like(SENT), 1) is None
    in_batch = False
    assert dist.irecv(torch.zeros_like(SENT), 1).wait() and waited == [1]  # type: ignore[union-attr]
    assert dist.isend(SENT, 1).wait() and waited == [1, 1]  # type: ignore[union-attr]
    rank.end()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    assert rank.counts() == {"rank": 2, "sent": [[name, 2, 1, 0, 2]], "received": [[name, 1, 2, 0, 2]]}


def test_who_has_the_state_of_a_replica_counts_on_where_the_others_are(
    make: Callable[[int], Messages], notes: list[str]
) -> None:
    """Its own log is of no use until a checkpoint has come; what the replica counts is not its own."""
    replica = make(0)
    one_iteration(replica, 0, 0)
    new = make(1)
    new.take_over(replica.counts())
    assert not new.is_complete and "without the log of what was sent" in notes[-1]
    assert new.told(1) == {}
    new.begin_checkpoint(1)
    new.checkpointed(1)
    assert not new.is_complete, "nobody has told it yet how many messages there were"
    others = [told("begin", (0, 1, 2), has=[(1, 0, 3)]), told("begin", (2, 1, 1), has=[(1, 2, 4), (0, 2, 1)]), {}]
    told_by_it = new.count_by(others, 1)
    assert told_by_it == told("begin", (1, 0, 3), (1, 2, 4), has=[(0, 1, 2), (2, 1, 1)])
    assert new.count_by(others, 1) is None, "it counts by itself now"
    new.begin_checkpoint(1)
    new.checkpointed(1)
    assert new.is_complete
    same = make(1)
    same.take_over(new.counts())
    assert same.told(1) == {**told_by_it, "has": told_by_it["has"]}
    same.restore(replica.counts(), 1)  # an older checkpoint has these only
    assert same.told(1) == told_by_it
