"""A worker's line to its agent: what becomes of a worker that can hear no more."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from swift_agent.channel import Channel

_WORKER = """
import socket, sys, time
from swift_agent.channel import Channel
from swift_agent.supervisor import Supervisor
Supervisor(Channel(socket.socket(fileno=int(sys.argv[1]))), 3).start({}, dict, lambda why, generation: None)
time.sleep(60)
"""


@pytest.mark.parametrize("message", [
    {"op": "go", "generation": 1, "plan": {"kind": "copy", "iteration": "many"}, "world_size": 1, "store": {}},
    {"op": "stop", "generation": "second", "why": ""},
    {"op": "boundary"},
])  # fmt: skip
def test_a_worker_that_cannot_follow_its_agent_says_so_and_ends(message: dict[str, Any]) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with theirs:
        command = [sys.executable, "-c", _WORKER, str(theirs.fileno())]
        worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    agent = Channel(ours)
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
