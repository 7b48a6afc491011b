"""Logs are handed on in threads, over real sockets; who takes one can use what has come."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_logging_store.errors import LogError
from swift_logging_store.format.record import Channel
from swift_logging_store.log import transfer
from swift_logging_store.log.log import SentLog
from swift_logging_store.log.predecessor import SentBefore
from swift_recovery.errors import CannotReplay, CutReplay, LostLog
from swift_recovery.replay import serving
from swift_recovery.replay.serving import LogServer
from swift_recovery.replay.source import Repetition
from swift_recovery.transfer.socket_link import SocketLink

TO_2 = Channel("pp", 1, 2)
TO_0 = Channel("pp", 1, 0)


def nothing() -> None:
    """A check that has no objection."""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SentLog]:
    """Ten iterations of two messages to each of two ranks, in segments of one iteration."""
    made = SentLog(1, tmp_path / "node1", 1 << 30, "", print)
    for iteration in range(10):
        send(made, iteration, iteration)
    yield made
    made._writer.close()


def send(log: SentLog, iteration: int, value: float) -> None:
    for number in (2 * iteration, 2 * iteration + 1):
        for channel in (TO_2, TO_0):
            log.append(channel, number, torch.full((5,), float(value)), iteration=iteration, generation=1)
    log._writer.roll()


@pytest.fixture
def repetition(tmp_path: Path) -> Iterator[Repetition]:
    (tmp_path / "node2").mkdir()
    made = Repetition(tmp_path / "node2" / "taken", SentBefore(tmp_path / "node2", 2), print)
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[LogServer]:
    made = LogServer(print)
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("swift-log-to")]


def gift(log: SentLog, before: int = 10, ends: int = 20) -> Callable[..., None]:
    return partial(transfer.send, log, log.segments(), before, {TO_2: ends})


def serve(server: LogServer, give: Callable[..., None]) -> Any:
    """How to connect to that."""
    return partial(serving.log_of, server.serve(2, "127.0.0.1", give), 1, lambda: False)


def filled(repetition: Repetition, number: int) -> float:
    tensor = torch.zeros(5)
    repetition.fill(tensor, TO_2, number, number // 2)
    assert bool((tensor == tensor[0]).all())
    return tensor[0].item()


def test_what_has_come_is_used_before_the_rest_is_there(
    log: SentLog, repetition: Repetition, server: LogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1)
    half, used = threading.Event(), threading.Event()

    def give(link: SocketLink, check: Callable[[], None]) -> None:
        pieces = iter(range(100))

        class Slow:
            def send_bytes(self, data: bytes) -> None:
                if next(pieces) == 8:
                    half.set()
                    assert used.wait(10.0)
                link.send_bytes(data)

        gift(log)(Slow(), check)

    repetition.take({1: serve(server, give)})
    repetition.begin([2], nothing)
    assert [filled(repetition, number) for number in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert half.wait(10.0) and not repetition._source.has(TO_2, 8)  # type: ignore[union-attr]
    threading.Timer(0.2, used.set).start()
    before_s = repetition.waited_s
    assert filled(repetition, 8) == 4 and repetition.waited_s > before_s
    assert [filled(repetition, number) for number in range(9, 20)] == [number // 2 for number in range(9, 20)]
    repetition.end_whole()
    assert repetition.ends({TO_2: 18}) == {TO_2: 20}


def test_of_an_iteration_that_was_run_again_the_last_time_counts(
    log: SentLog, repetition: Repetition, server: LogServer
) -> None:
    """Again and again, from the oldest segment to the newest; and no more than was asked for."""
    for iteration in (7, 8, 5, 6):
        send(log, iteration, 100 + iteration)
    send(log, 6, 206)  # those after it are not counted on any more
    repetition.take({1: serve(server, gift(log, before=7, ends=13))})
    repetition.begin([2], nothing)
    repetition.end_whole()
    assert [filled(repetition, number) for number in range(13)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 105, 105, 206]
    assert repetition.ends({}) == {TO_2: 13}


def test_who_is_lost_before_all_has_come(
    log: SentLog, repetition: Repetition, server: LogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is of no use without the rest, so nothing goes on with it."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1)

    def give(link: SocketLink, check: Callable[[], None]) -> None:
        pieces = iter(range(100))

        class Dying:
            def send_bytes(self, data: bytes) -> None:
                if next(pieces) == 6:
                    link._socket.close()
                link.send_bytes(data)

        gift(log)(Dying(), check)

    repetition.take({1: serve(server, give)})
    repetition.begin([2], nothing)
    for thread in repetition._threads:
        thread.join(10.0)
    assert repetition.is_lost and repetition._source.has(TO_2, 5)  # type: ignore[union-attr]
    fill, begin = partial(filled, repetition), partial(repetition.begin, [2], nothing)
    for use in (partial(fill, 0), partial(fill, 6), repetition.end_whole, partial(repetition.wait, nothing), begin):
        with pytest.raises(LostLog, match="the log of rank 1 did not come to its end"):
            use()


def test_a_log_that_cannot_be_read_is_told_of(log: SentLog, repetition: Repetition, server: LogServer) -> None:
    give = gift(log)
    next(iter(sorted(log._directory.glob("*.seg")))).unlink()
    repetition.take({1: serve(server, give)})
    with pytest.raises(CannotReplay, match=r"rank 1 cannot read what it has sent: .* cannot be read: No such file"):
        repetition.wait(nothing)


def test_what_nobody_has_sent_is_not_waited_for(log: SentLog, repetition: Repetition, server: LogServer) -> None:
    repetition.take({1: serve(server, gift(log))})
    repetition.begin([2], nothing)
    with pytest.raises(CannotReplay, match=r"message 20 of .* is in nobody's log"):
        filled(repetition, 20)


def test_a_wait_that_is_cut(repetition: Repetition, server: LogServer) -> None:
    """And nobody is left who waits for the link."""
    is_cut = threading.Event()

    def check() -> None:
        if is_cut.is_set():
            raise ZeroDivisionError

    def give(link: SocketLink, check: Callable[[], None]) -> None:
        link.recv_bytes()  # which does not come

    repetition.take({1: serve(server, give)})
    repetition.begin([2, 3], check)
    threading.Timer(0.2, is_cut.set).start()
    with pytest.raises(ZeroDivisionError):
        filled(repetition, 0)
    repetition.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "swift-log-from-1"]


def test_nobody_comes_for_a_log(log: SentLog, server: LogServer) -> None:
    """It is let go when training goes on."""
    server.serve(2, "127.0.0.1", gift(log))
    began_s = time.monotonic()
    server.close()
    assert time.monotonic() - began_s < 5.0


def test_another_replacement_does_not_cut_what_one_is_given(
    log: SentLog, repetition: Repetition, server: LogServer
) -> None:
    """Rank 2 still takes a log when the next failure comes, for which rank 0 is given one; and rank 2 is lost again."""
    goes_on = threading.Event()

    def slow(link: SocketLink, check: Callable[[], None]) -> None:
        while not goes_on.wait(0.01):
            check()
        gift(log)(link, check)

    repetition.take({1: serve(server, slow)})
    server.serve(0, "127.0.0.1", gift(log))
    server.close([0, 7])
    goes_on.set()
    repetition.wait(nothing)
    goes_on.clear()
    repetition.take({1: serve(server, slow)})
    serve(server, slow)
    with pytest.raises(LostLog):
        repetition.wait(nothing)


def test_who_takes_a_log_hears_that_its_giver_lives(
    log: SentLog, repetition: Repetition, server: LogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in a store takes longer than anybody who is lost is waited for."""
    monkeypatch.setattr(serving, "SILENT_S", 0.5)
    monkeypatch.setattr(transfer, "ALIVE_S", 0.1)
    pieces = transfer._pieces

    def slow(*args: Any) -> Iterator[bytes]:
        time.sleep(1.5)
        yield from pieces(*args)

    monkeypatch.setattr(transfer, "_pieces", slow)
    where = server.serve(2, "127.0.0.1", gift(log))
    repetition.take({1: partial(serving.log_of, where, 1, lambda: True)})
    repetition.wait(nothing)
    assert repetition.ends({}) == {TO_2: 20}


@pytest.mark.parametrize(
    ("error", "why"),
    [(OSError(errno.EIO, os.strerror(errno.EIO)), "Input/output error"), (MemoryError(), "MemoryError")],
)
def test_whatever_prevents_it_is_told_of(
    error: Exception, why: str, log: SentLog, repetition: Repetition, server: LogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a replacement would have itself replaced, again and again."""

    def failing(*args: Any) -> Iterator[bytes]:
        raise error
        yield b""

    monkeypatch.setattr(transfer, "_pieces", failing)
    repetition.take({1: serve(server, gift(log))})
    with pytest.raises(CannotReplay, match=f"rank 1 cannot read what it has sent: .*{why}"):
        repetition.wait(nothing)


def test_what_was_waited_for_before_is_not_counted(
    log: SentLog, repetition: Repetition, server: LogServer
) -> None:
    """It is a part of another phase of the recovery."""
    repetition.take({1: serve(server, gift(log))})
    repetition.wait(nothing)
    assert repetition.waited_s > 0.0
    repetition.begin([2], nothing)
    assert repetition.waited_s == 0.0


def test_nothing_is_evicted_while_it_is_read(log: SentLog) -> None:
    log._writer.flush()
    log._archive = SimpleNamespace(stored=[path.name for path in log._directory.glob("*.seg")])  # type: ignore[assignment]
    log._archive.fetching = lambda check: contextlib.nullcontext()  # type: ignore[union-attr, method-assign]
    log._bytes_left = log._bytes // 4
    for path, _ in (reading := log.read(log.segments(), nothing, all_of_them=True)):
        log.end_iteration()
        assert len(list(log._directory.glob("*.seg"))) >= 10 and path
        break
    reading.close()
    log.end_iteration()
    assert len(list(log._directory.glob("*.seg"))) < 10
    log._archive = None


def test_a_store_that_is_slow_does_not_keep_who_is_not_wanted_any_more(log: SentLog, server: LogServer) -> None:
    """The thread is in the middle of a request when the log is let go."""
    asks = threading.Event()

    class Slow:
        @contextlib.contextmanager
        def fetching(self, check: Callable[[], object]) -> Iterator[Callable[[str, Path], None]]:
            def fetch(name: str, path: Path) -> None:
                asks.set()
                while True:
                    check()
                    time.sleep(0.01)

            yield fetch

    give = gift(log)
    for path in log._directory.glob("*.seg"):
        path.unlink()
    log._archive = Slow()  # type: ignore[assignment]
    try:
        with serve(server, give)(nothing):
            assert asks.wait(10.0)
            began_s = time.monotonic()
            server.close()
        assert time.monotonic() - began_s < 5.0
    finally:
        log._archive = None


def test_a_full_disk_of_who_takes_a_log(
    log: SentLog, repetition: Repetition, server: LogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process on this node would not help."""

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    repetition.take({1: serve(server, gift(log))})
    with pytest.raises(CannotReplay, match=r"logs of other ranks cannot be kept in .*: No space left on device"):
        repetition.wait(nothing)


def test_what_is_taken_again_has_nothing_of_the_first_try(
    log: SentLog, repetition: Repetition, server: LogServer
) -> None:
    """Its thread may still be in a call that takes long."""
    waits, goes_on = threading.Event(), threading.Event()

    class Late:
        def recv_bytes(self) -> bytes:
            waits.set()
            goes_on.wait(10.0)
            raise ZeroDivisionError

    repetition.take({1: lambda check: contextlib.nullcontext(Late())})  # type: ignore[dict-item, arg-type, return-value]
    assert waits.wait(10.0)
    (late,) = repetition._threads
    repetition.close()
    assert late.is_alive()
    repetition.take({1: serve(server, gift(log))})
    goes_on.set()
    late.join(10.0)
    repetition.wait(nothing)
    repetition.begin([2], nothing)
    assert filled(repetition, 19) == 9


def test_somebody_else_who_comes_gets_nothing(log: SentLog, server: LogServer, repetition: Repetition) -> None:
    connect = serve(server, gift(log))
    where = connect.args[0].replace('", "', "").rpartition('"')[0][:-8] + '00000000"]'
    assert where != connect.args[0]
    with serving.log_of(where, 1, lambda: False, nothing) as link, pytest.raises(Exception, match="is gone"):
        link.recv_bytes()
    repetition.take({1: connect})
    repetition.wait(nothing)


def test_who_is_silent_after_a_failure_is_given_up(
    log: SentLog, server: LogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SILENT_S", 0.3)
    has_failed = threading.Event()
    where = server.serve(2, "127.0.0.1", lambda link, check: link.recv_bytes())  # type: ignore[arg-type, return-value]
    with serving.log_of(where, 1, has_failed.is_set, nothing) as link:
        threading.Timer(0.5, has_failed.set).start()
        began_s = time.monotonic()
        with pytest.raises(Exception, match=r"rank 1 has sent nothing for 0.3 s"):
            link.recv_bytes()
        assert time.monotonic() - began_s >= 0.5


def test_a_log_that_is_given_up_is_not_offered(log: SentLog) -> None:
    log.give_up("no room")
    with pytest.raises(LogError, match="messages are logged no more: no room"):
        gift(log)


def test_without_threads_for_all_logs_the_process_is_replaced(
    log: SentLog, repetition: Repetition, server: LogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and nobody takes the RuntimeError for that of a connection."""
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == "swift-log-from-3":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)
    connect = serve(server, gift(log))
    with pytest.raises(CutReplay, match="the log of rank 3 cannot be taken"):
        repetition.take({1: connect, 3: connect})
    repetition.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("swift-log-from")]
