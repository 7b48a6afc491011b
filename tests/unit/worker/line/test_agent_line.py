"""A worker's line to its agent: what becomes of a worker that can hear no more."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from swift_agent.wire.channel import WorkerChannel

_WORKER = """
import socket, sys, time
from swift_agent.wire.channel import WorkerChannel
from swift_agent.wire.messages import Hello
from swift_agent.worker.line.agent_line import Supervisor
channel = WorkerChannel(socket.socket(fileno=int(sys.argv[1])))
Supervisor(channel, 3).start(Hello(3, 1), dict, lambda why, generation: None)
time.sleep(60)
"""


@pytest.mark.parametrize("message", [
    {"op": "go", "generation": 1, "plan": {"kind": "copy", "iteration": "many"}, "world_size": 1, "store": {}},
    {"op": "stop", "generation": "second", "why": ""},
    {"op": "boundary"},
    {"op": "dance"},
])  # fmt: skip
def test_a_worker_that_cannot_follow_its_agent_says_so_and_ends(message: dict[str, Any]) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with theirs:
        command = [sys.executable, "-c", _WORKER, str(theirs.fileno())]
        worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    agent = WorkerChannel(ours)
    try:
        assert agent.receive()["op"] == "hello"
        agent.send(message)
        told = agent.receive()
        assert told["op"] == "note" and told["rank"] == 3
        assert f"{message['op']!r} of its agent cannot be followed" in told["text"]
        _, errors = worker.communicate(timeout=30)
        assert worker.returncode == -signal.SIGKILL and "Traceback" in errors and "ends: " in errors
    finally:
        worker.kill()
        worker.communicate()
        agent.close()


_REFUSED = """
import socket, sys
from swift_agent.wire.channel import WorkerChannel
from swift_agent.wire.messages import Hello
from swift_agent.worker.line.agent_line import Supervisor
line = Supervisor(WorkerChannel(socket.socket(fileno=int(sys.argv[1]))), 3)
line.start(Hello(3, 1), dict, lambda why, generation: None)
line.wait_go()
"""


def test_a_process_that_does_not_count_is_told_what_to_type_instead() -> None:
    """One of several that a worker has started; the line ends right after that word."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with theirs:
        command = [sys.executable, "-c", _REFUSED, str(theirs.fileno())]
        worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    agent = WorkerChannel(ours)
    try:
        assert agent.receive()["op"] == "hello"
        agent.post({"op": "refused", "why": "another process has that channel"})
        agent.close()
        _, errors = worker.communicate(timeout=30)
        assert worker.returncode == 1, errors
        assert "UsageError" in errors and "does not count as rank 3: another process has that channel" in errors
        assert "leave multiprocessing.spawn" in errors and "--nproc-per-node" in errors
        assert "its agent is gone" not in errors
    finally:
        worker.kill()
        worker.communicate()
        agent.close()


_BLIND = """
import socket, sys, time
from swift_agent.wire.channel import WorkerChannel
from swift_agent.wire.messages import Hello
from swift_agent.worker.line.agent_line import Supervisor
class Standing:
    def left_s(self):
        raise ValueError("mmap closed or invalid")
channel = WorkerChannel(socket.socket(fileno=int(sys.argv[1])))
Supervisor(channel, 3, Standing()).start(Hello(3, 1), dict, lambda *args: None)
time.sleep(60)
"""


def test_a_worker_whose_clock_thread_has_ended_says_so_and_ends() -> None:
    """Else nothing would stop it when its place is given away."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with theirs:
        worker = subprocess.Popen(
            [sys.executable, "-c", _BLIND, str(theirs.fileno())], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
    agent = WorkerChannel(ours)
    try:
        assert agent.receive()["op"] == "hello"
        assert "its thread swift-time has ended by ValueError: mmap closed or invalid" in agent.receive()["text"]
        worker.communicate(timeout=30)
        assert worker.returncode == -signal.SIGKILL
    finally:
        worker.kill()
        worker.communicate()
        agent.close()
