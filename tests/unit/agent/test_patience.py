"""How long workers wait for the word that a peer failed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from swift_agent.agent.patience import PROBE_AFTER_S, Patience
from swift_agent.wire import messages as wire
from swift_agent.wire.channel import WorkerChannel
from swift_agent.worker.line import agent_line
from swift_agent.worker.line.agent_line import Supervisor


class Agent:
    """Counts what a `Patience` does."""

    def __init__(self) -> None:
        self.num_probes = 0
        self.told: list[tuple[int, ...]] = []
        self.patience = Patience(self.probe, self.told.append)

    def probe(self) -> None:
        self.num_probes += 1


def test_a_recovery_that_takes_its_usual_time_costs_nothing() -> None:
    agent = Agent()
    agent.patience.tick(0.0)
    agent.patience.suspected(0, 10.0)
    agent.patience.tick(10.0 + PROBE_AFTER_S - 0.1)
    agent.patience.settled(0)
    agent.patience.tick(60.0)
    assert agent.num_probes == 0 and agent.told == []


def test_workers_wait_until_the_store_has_taken_a_write() -> None:
    agent = Agent()
    agent.patience.suspected(1, 10.0)
    agent.patience.suspected(0, 11.0)
    for now_s in (15.0, 60.0, 100.0):
        agent.patience.tick(now_s)
    assert agent.told == [(1,), (0, 1), (0, 1)] and agent.num_probes == 1
    agent.patience.proved()
    # That write was on its way before rank 0 had waited for long: it gets a proof of its own.
    agent.patience.tick(101.0)
    assert agent.told[3:] == [(0,)] and agent.num_probes == 2
    agent.patience.proved()
    agent.patience.tick(200.0)
    assert len(agent.told) == 4 and agent.num_probes == 2


def test_a_write_that_came_to_nothing_is_tried_again() -> None:
    agent = Agent()
    agent.patience.suspected(0, 0.0)
    agent.patience.tick(6.0)
    agent.patience.failed()
    agent.patience.tick(6.5)
    assert agent.num_probes == 2 and agent.told == [(0,), (0,)]


def test_a_proof_says_nothing_about_a_later_failure() -> None:
    agent = Agent()
    agent.patience.suspected(0, 0.0)
    agent.patience.tick(6.0)
    agent.patience.suspected(0, 7.0)  # it has recovered meanwhile, and is cut again
    agent.patience.proved()
    agent.patience.tick(20.0)
    assert agent.told == [(0,), (0,)] and agent.num_probes == 2


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Supervisor, WorkerChannel]]:
    """A worker's supervisor that has a second of patience, and its agent's end."""
    monkeypatch.setattr(agent_line, "CONFIRM_TIMEOUT_S", 1.0)
    monkeypatch.setattr(agent_line, "CONFIRM_SLICE_S", 0.1)
    ours, theirs = socket.socketpair()
    worker, agent = Supervisor(WorkerChannel(ours), 0), WorkerChannel(theirs)
    worker.start(wire.Hello(0, 1), dict, lambda why, generation: None)
    worker._entered = 1
    yield worker, agent
    worker.close()
    agent.close()


def ask(worker: Supervisor) -> tuple[threading.Thread, list[bool]]:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(worker.confirm(RuntimeError("cut"))))
    thread.start()
    return thread, answers


def test_an_error_that_nobody_confirms_is_the_workers_own(line: tuple[Supervisor, WorkerChannel]) -> None:
    thread, answers = ask(line[0])
    thread.join(10.0)
    assert answers == [False]


def test_who_cannot_be_connected_asks_for_another_try_but_not_for_ever(
    line: tuple[Supervisor, WorkerChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_line, "AGAIN_AFTER_S", 0.1)
    worker, agent = line
    assert agent.receive()["op"] == "hello"
    for generation in range(1, agent_line.MOST_AGAIN + 1):
        worker._entered, worker.interrupted = generation, False
        answers: list[bool] = []
        thread = threading.Thread(target=lambda found=answers: found.append(worker.reconnect(OSError("reset"))))
        thread.start()
        assert agent.receive()["op"] == "suspect"
        assert agent.receive() == {"op": "again", "generation": generation, "why": "reset"}
        agent.send({"op": "stop", "generation": generation, "why": "rank 0 cannot be connected: reset"})
        assert agent.receive()["op"] == "report"
        thread.join(10.0)
        assert answers == [True]
    worker._entered, worker.interrupted = generation + 1, False
    assert not worker.reconnect(OSError("reset"))  # it is this process


def test_a_pause_counts_in_its_generation_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_line, "CONFIRM_TIMEOUT_S", 0.2)
    monkeypatch.setattr(agent_line, "CONFIRM_SLICE_S", 0.1)
    monkeypatch.setattr(agent_line, "AGAIN_AFTER_S", 0.1)
    ours, theirs = socket.socketpair()
    worker, agent = Supervisor(WorkerChannel(ours), 0), WorkerChannel(theirs)  # its threads are not started
    try:
        worker._entered = 1
        worker._suspension._looked_s = time.monotonic() - 10.0
        assert worker._suspension.was_a_moment_ago()
        worker._suspension._looked_s = time.monotonic()
        assert worker._suspension.was_a_moment_ago()
        worker._entered = 2
        assert not worker._suspension.was_a_moment_ago()  # its groups are others
        for number in range(agent_line.MOST_AGAIN + 1):
            worker._suspension._looked_s = time.monotonic() - 10.0
            assert not worker.confirm(RuntimeError("timed out"))
            assert agent.receive()["op"] == "suspect"
            worker.send(wire.Holds())
            told = [agent.receive()["op"]]
            if told != ["holds"]:
                told.append(agent.receive()["op"])
            assert told == (["again", "holds"] if number < agent_line.MOST_AGAIN else ["holds"])
    finally:
        ours.close()
        theirs.close()


def test_the_time_of_a_worker_starts_over_as_long_as_its_agent_cannot_know(
    line: tuple[Supervisor, WorkerChannel],
) -> None:
    worker, agent = line
    thread, answers = ask(worker)
    for _ in range(20):  # twice its patience
        agent.send({"op": "wait"})
        thread.join(0.1)
    assert thread.is_alive() and answers == []
    agent.send({"op": "stop", "generation": 1, "why": "a peer failed"})
    thread.join(10.0)
    assert answers == [True]
    # Its thread is done with the stop when it has reported; closed before that it would take its agent for dead.
    assert [agent.receive()["op"] for _ in range(3)] == ["hello", "suspect", "report"]
