"""The agent's end of its workers' sockets: what a worker that is stopped, or is none, does to it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from swift_agent.agent.lifecycle import events as msg
from swift_agent.agent.loop import Agent
from swift_agent.agent.patience import Patience
from swift_agent.agent.processes.crew import Crew
from swift_agent.agent.worker_channels import WorkerChannels
from swift_agent.wire import messages as wire
from swift_agent.wire.channel import MAX_MESSAGE_BYTES, ChannelClosed, WorkerChannel, connect
from swift_agent.wire.environment import helper_number
from swift_agent.wire.standing import Standings
from swift_agent.wire.vocabulary import written
from swift_agent.worker.line import agent_line, suspension
from swift_agent.worker.line.agent_line import Supervisor
from tests.support.limits import without_descriptors

ROOT = Path(__file__).resolve().parents[3]


class Line:
    """The sockets of an agent whose local ranks 0 and 1 are processes of this test."""

    def __init__(self, directory: Path, pids: dict[int, int]) -> None:
        self.selector = selectors.DefaultSelector()
        self.events: list[msg.Event] = []
        self.kernels: list[wire.Kernels] = []
        self.processes: dict[int, Any] = {
            rank: SimpleNamespace(pid=pid, generation=1, exit_code=None) for rank, pid in pids.items()
        }
        patience = Patience(lambda: None, lambda ranks: None)
        self.channels = WorkerChannels(
            str(directory), self.selector, self.processes, patience, self.events.append, lambda rank, names: None,
            self.kernels.append, lambda generation: "" if generation == 1 else f"generation {generation} is over",
        )  # fmt: skip

    def turn(self, timeout_s: float = 0.1) -> None:
        for key, _ in self.selector.select(timeout_s):
            key.data()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline_s
            self.turn()

    def hello(self, rank: int) -> WorkerChannel:
        worker = connect(self.channels.path)
        worker.send({"op": "hello", "local_rank": rank, "generation": 1})
        known = len(self.events)
        self.until(lambda: len(self.events) > known)
        assert isinstance(self.events[-1], msg.HelloReceived) and self.events[-1].local_rank == rank
        return worker


def go(num_bytes: int) -> wire.Go:
    return wire.Go(1, {"kind": "x" * num_bytes}, 2, wire.Store("h", 1, 2, "t"))


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    made = Line(tmp_path, {0: os.getpid(), 1: os.getpid()})
    yield made
    made.channels.close()
    made.selector.close()


def test_a_worker_that_does_not_read_keeps_neither_the_agent_nor_others_waiting(line: Line) -> None:
    stopped, well = line.hello(0), line.hello(1)
    large = go(300_000)
    for number in range(1000):
        line.channels.send((0, 1), wire.Stop(number, ""))
        assert well.receive()["generation"] == number
    line.channels.send((0,), large)
    line.channels.send((0,), wire.Wait(), may_skip=True)  # it comes again
    line.channels.send((0,), wire.Release())
    line.turn()
    # It goes on: all that counts is there, in its order.
    came: list[dict[str, Any]] = []
    while not came or came[-1]["op"] != "release":
        came += stopped.receive_ready()
        line.turn(0.0)
    assert [message["op"] for message in came] == ["stop"] * 1000 + ["go", "release"]
    assert came[1000] == written(large)
    line.channels.tick(time.monotonic() + 100, 10.0, paused=False)
    assert not any(isinstance(event, msg.WorkerDeaf) for event in line.events)
    stopped.close()
    well.close()


def test_a_worker_that_takes_nothing_for_long_is_told_of_unless_it_is_paused(line: Line) -> None:
    worker = line.hello(0)
    line.channels.send((0,), go(1_000_000))
    now_s = time.monotonic()
    line.channels.tick(now_s + 9, 10.0, paused=False)
    line.channels.tick(now_s + 500, 10.0, paused=True)
    line.channels.tick(now_s + 509, 10.0, paused=False)
    assert not any(isinstance(event, msg.WorkerDeaf) for event in line.events)
    for _ in range(2):
        line.channels.tick(now_s + 511, 10.0, paused=False)
    assert [event for event in line.events if isinstance(event, msg.WorkerDeaf)] == [
        msg.WorkerDeaf(0, os.getpid(), 10.0)
    ]
    worker.close()


def test_what_is_kept_for_a_worker_is_bounded(line: Line) -> None:
    worker = line.hello(0)
    for _ in range(4):
        line.channels.send((0,), go(MAX_MESSAGE_BYTES * 3 // 4))
    with pytest.raises(ChannelClosed):
        while True:
            line.turn(0.0)
            worker.receive_ready()
            time.sleep(0.0)
    worker.close()


@pytest.mark.parametrize("seen_first", ["its channel", "its process", "what cannot be sent", "what cannot be kept"])
def test_the_last_words_of_a_worker_are_heard(line: Line, seen_first: str, caplog: pytest.LogCaptureFixture) -> None:
    """It says why it ends, and has ended before its agent looks."""
    caplog.set_level(logging.INFO)
    worker = line.hello(0)
    if seen_first == "what cannot be kept":
        line.channels.send((0,), go(1_000_000))
    worker.send(written(wire.Holds()))
    worker.send(written(wire.Note(0, "x" * 100_000)))  # more than one read, less than a socket holds
    worker.sock.sendall(b"\0\0\0\x09cut")
    worker.sock.close()
    if seen_first == "what cannot be sent":
        line.channels.send((0,), wire.Stop(1, "a peer is lost"))
        line.channels.send((0,), wire.Wait(), may_skip=True)
    if seen_first == "its process":
        line.channels.hear_out(0)
    else:
        line.until(lambda: len(line.selector.get_map()) == 1)  # only the listener is left
    assert line.events[1:] == [msg.WorkerHolds(0, os.getpid())]
    assert [len(said) for said in caplog.messages] == [len("rank 0: ") + 100_000]
    line.channels.hear_out(0)  # nothing is left


def test_a_child_that_holds_the_channel_of_a_worker_keeps_nobody(line: Line) -> None:
    worker = line.hello(0)
    child = WorkerChannel(worker.sock.dup())
    worker.send(written(wire.Holds()))
    worker.sock.close()
    line.channels.hear_out(0)
    assert line.events[1:] == [msg.WorkerHolds(0, os.getpid())] and not child.is_open()
    child.close()


def test_a_worker_asks_whether_its_place_is_still_its_own(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """From two threads at once; and an agent that does not answer has said no."""
    worker = Supervisor(connect(line.channels.path), 0)
    worker.start(wire.Hello(0, 1), dict, lambda why, generation: None)
    line.until(lambda: bool(line.events))
    answers: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda number=number: answers.update({number: worker.ask_place(number)}))
        for number in (1, 2)
    ]
    for thread in threads:
        thread.start()
    line.until(lambda: len(answers) == 2)
    assert answers == {1: "", 2: "generation 2 is over"}
    monkeypatch.setattr(agent_line, "ASK_PLACE_S", 0.2)
    assert "has not said within 0.2 s" in worker.ask_place(1)
    worker.close()


def test_what_a_helper_says_of_itself_is_no_news_of_a_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    number = helper_number(2, 1)
    line = Line(tmp_path, {0: os.getpid(), number: os.getpid()})
    helper = connect(line.channels.path)
    helper.send(written(wire.Hello(number, 1)))
    line.until(lambda: bool(line.events))
    for said in (
        wire.Report(1, {}), wire.Holds(), wire.Resumed(1, 5, {}), wire.Finished(1, {}), wire.Kept(5, 0),
        wire.Suspect("reset"), wire.Again(1, "apart"), wire.Modules(("numpy",)), wire.At(5), wire.Note(3, "repeats"),
        wire.AskPlace(7, 1), wire.Kernels(("AVX2",), (0,)), wire.Unfit("no log"),
    ):  # fmt: skip
        helper.send(written(said))
    line.until(lambda: len(line.events) == 2)
    assert line.events == [msg.HelperWaits(number, os.getpid()), msg.HelperUnfit(number, os.getpid(), "no log")]
    assert caplog.messages == ["rank 3: repeats"] and not line.kernels
    assert helper.receive() == written(wire.Place(7, "a helper has no place in the job"))
    line.channels.send((number,), go(1))
    assert helper.receive() == written(go(1))
    helper.close()
    line.channels.close()
    line.selector.close()


_HELLO = """
import sys, time
from swift_agent.wire import messages as wire
from swift_agent.wire.channel import connect
channel = connect(sys.argv[1])
channel.send({"op": "hello", "local_rank": 0, "generation": 1})
channel.receive()
"""


@pytest.mark.parametrize("how", ["itself", "child", "orphan", "stranger"])
def test_a_channel_belongs_to_the_process_that_was_started_for_it(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A shell may stay between, as a parent or gone; a process that the agent has not started is refused."""
    line = Line(tmp_path, {0: os.getpid()})
    program = [sys.executable, "-c", _HELLO, line.channels.path]
    shells = {"child": '"$@"; exit', "orphan": '"$@" & exit'}
    command = ["/bin/sh", "-c", shells[how], "sh", *program] if how in shells else program
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    line.processes[0].pid = other.pid if how == "stranger" else process.pid
    try:
        if how == "stranger":
            line.until(lambda: "refused" in caplog.text)
            assert f"refused process {process.pid} as local rank 0 (process {other.pid})" in caplog.text
            assert line.events == []
            process.wait(10)
            return
        line.until(lambda: bool(line.events))
        assert line.events == [msg.HelloReceived(0, process.pid)]
        # A second one, though it is another child of it, does not take it; the first is not disturbed.
        line.processes[0].pid = os.getpid()
        second = connect(line.channels.path)
        second.send({"op": "hello", "local_rank": 0, "generation": 1})
        line.until(lambda: "another process has that channel" in caplog.text)
        assert second.receive() == {"op": "refused", "why": "another process has that channel"}
        with pytest.raises(ChannelClosed):
            second.receive()
        second.close()
        line.channels.send((0,), wire.Release())
        line.until(lambda: not line.channels._channels)
        third = line.hello(0)  # the first is gone
        third.close()
    finally:
        process.kill()
        other.kill()
        process.wait()
        other.wait()
        line.channels.close()
        line.selector.close()


def test_a_worker_gets_in_after_a_moment_without_descriptors(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    """It waits in the kernel's queue; the agent goes on, and does not ask all the time."""
    worker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with without_descriptors():
        worker.connect(line.channels.path)
        line.turn()
        line.turn(0.0)
    assert caplog.text.count("cannot be accepted (Too many open files)") == 1
    line.channels.tick(0.0, 10.0, False)
    channel = WorkerChannel(worker)
    channel.send({"op": "hello", "local_rank": 0, "generation": 1})
    line.until(lambda: bool(line.events))
    assert isinstance(line.events[-1], msg.HelloReceived)
    channel.close()


STANDING = """
import os, sys, time
from swift_agent.wire import messages as wire
from swift_agent.wire.channel import connect
from swift_agent.wire.standing import MyStanding
from swift_agent.worker.line.agent_line import Supervisor
worker = Supervisor(connect(sys.argv[1]), 0, MyStanding(os.path.dirname(sys.argv[1]), 0))
if len(sys.argv) > 2:  # an update that is under way for so long when the stop comes, which may be at once
    worker._entered = 1
    worker.enter()
worker.start(wire.Hello(0, 1), dict, lambda why, generation: None)
if len(sys.argv) > 2:
    while not worker.interrupted:
        time.sleep(0.01)
    began_s = time.thread_time()
    while time.thread_time() - began_s < float(sys.argv[2]):
        sum(range(1000))
    worker.leave()
while True:
    time.sleep(0.05)
"""


@contextlib.contextmanager
def standing_worker(line: Line, *updates_s: str) -> Iterator[psutil.Popen]:
    path = os.pathsep.join([str(ROOT), *(str(ROOT / part) for part in ("rendezvous", "recovery", "logging_store"))])
    command = [sys.executable, "-c", STANDING, line.channels.path, *updates_s]
    process = psutil.Popen(command, env={**os.environ, "PYTHONPATH": path})
    try:
        line.processes[0].pid = process.pid
        line.until(lambda: bool(line.events))
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_worker_that_is_not_vouched_for_in_time_stands_still_until_it_is_woken(line: Line, tmp_path: Path) -> None:
    """Also if it is woken too early."""
    standings = Standings(str(tmp_path), 1)

    with standing_worker(line) as process:

        def stands() -> bool:
            return standings.stands(0) and process.status() == psutil.STATUS_STOPPED

        time.sleep(0.5)
        assert not standings.stands(0), "nothing was said yet"
        standings.vouch(time.monotonic() + 0.3)
        for _ in range(3):
            line.until(stands)
            changes = process.num_ctx_switches().voluntary
            process.send_signal(signal.SIGCONT)  # in vain
            line.until(lambda before=changes: process.num_ctx_switches().voluntary > before)
        line.until(stands)
        standings.vouch(time.monotonic() + 1000)
        process.send_signal(signal.SIGCONT)
        line.until(lambda: not standings.stands(0))
        time.sleep(0.5)
        assert not standings.stands(0) and process.status() != psutil.STATUS_STOPPED


def test_a_worker_in_a_long_update_is_not_put_to_sleep(line: Line, tmp_path: Path) -> None:
    """What it is told waits until the update has ended; until when it may go on does not."""
    standings = Standings(str(tmp_path), 1)
    vouched_s, update_s = 1.0, 1.5
    with standing_worker(line, str(update_s)) as process:
        line.channels.send((0,), wire.Stop(1, "a peer failed"))
        began_s = time.monotonic()
        while not any(isinstance(event, msg.ReportReceived) for event in line.events):
            standings.vouch(time.monotonic() + vouched_s)
            line.turn(0.2)
            assert not standings.stands(0) and process.status() != psutil.STATUS_STOPPED
            assert time.monotonic() - began_s < 30
        assert time.monotonic() - began_s >= update_s


def test_what_is_said_twice_a_second_leaves_nothing_for_a_worker_that_does_not_read(line: Line, tmp_path: Path) -> None:
    """It may be in a debugger, or in a library that holds the interpreter's lock, for hours."""
    standings, worker = Standings(str(tmp_path), 1), line.hello(0)
    agent: Any = SimpleNamespace(
        _end=None,
        _config=SimpleNamespace(on_etcd_loss="pause"),
        _presence=SimpleNamespace(acts_until_s=lambda: time.monotonic() + 2.123456),
        _channels=line.channels,
        _crew=SimpleNamespace(vouch=standings.vouch, wake_standing=lambda: None),
        _state=SimpleNamespace(paused=False),
    )
    for _ in range(1000):
        Agent._vouch(agent)
    line.channels.tick(time.monotonic() + 1000, 10.0, paused=False)
    assert not any(isinstance(event, msg.WorkerDeaf) for event in line.events)
    worker.close()


PAUSED = """
import sys, time
from swift_agent.wire import messages as wire
from swift_agent.wire.channel import connect
from swift_agent.worker.line import agent_line
agent_line.AGAIN_AFTER_S = 0.5
worker = agent_line.Supervisor(connect(sys.argv[1]), 0)
worker.start(wire.Hello(0, 1), dict, lambda why, generation: None)
worker._entered = 1
looked_s = time.monotonic()
worker.send(wire.Holds())
while time.monotonic() - looked_s < 3:
    looked_s = time.monotonic()
    time.sleep(0.05)
sys.exit(0 if worker.confirm(RuntimeError("Timed out waiting 3000ms")) else 1)
"""


def test_who_was_paused_for_longer_than_its_groups_wait_asks_for_another_try(line: Line) -> None:
    """No peer has failed, so no stop would come; all were paused, and none of them is at fault."""
    path = os.pathsep.join([str(ROOT), *(str(ROOT / part) for part in ("rendezvous", "recovery", "logging_store"))])
    command = [sys.executable, "-c", PAUSED, line.channels.path]
    process = psutil.Popen(command, env={**os.environ, "PYTHONPATH": path})
    try:
        line.processes[0].pid = process.pid
        line.until(lambda: len(line.events) == 2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(suspension.STOOD_S + 1.0)
        process.send_signal(signal.SIGCONT)
        deadline_s = time.monotonic() + 30
        while not any(isinstance(event, msg.WorkerApart) for event in line.events):
            assert time.monotonic() < deadline_s, (line.events, process.poll())
            line.turn()
        why = "Timed out waiting 3000ms (it had been paused)"
        assert line.events[2:] == [msg.WorkerApart(0, process.pid, 1, why)]
        line.channels.send((0,), wire.Stop(1, "rank 0 asks for another try"))
        line.until(lambda: process.poll() is not None)
        assert process.returncode == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_frozen_agent_takes_nobody_for_late(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadlines have run out in its sleep; what has come is heard first."""
    worker = line.hello(0)
    line.channels.send((0,), go(1_000_000))
    order: list[Any] = []
    agent: Any = object.__new__(Agent)
    agent._reactor = SimpleNamespace(wait=lambda timeout_s: [], handle=lambda ready: None)
    agent._channels, agent._state = line.channels, SimpleNamespace(paused=False)
    agent._last_tick_s, agent._listened_s = math.inf, time.monotonic() - 60.0
    crew: Any = object.__new__(Crew)
    crew._insist = [(time.monotonic() - 50.0, "worker")]
    agent._crew, agent._event, agent._meters = crew, order.append, SimpleNamespace(turned=lambda now_s: None)
    for channel in line.channels._channels.values():
        channel.stuck_since_s = time.monotonic() - 59.0
    agent._turn()
    (stood,) = order
    assert isinstance(stood, msg.StoodStill) and 59.0 < stood.for_s < 60.5
    line.channels.tick(time.monotonic(), 10.0, paused=False)
    assert not any(isinstance(event, msg.WorkerDeaf) for event in line.events)
    assert crew._insist[0][0] > time.monotonic()
    agent._turn()
    assert order == [stood]
    worker.close()
