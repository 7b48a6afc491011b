"""Standby servers that are forks of one warmed process: to import torch costs a server 2.5 s of a processor.

Each runs `standby_server.main` from its first line on, as a child of the process that asked for it (a subreaper), with
its environment. Tests that are about the start of a server do not use this.

    test --Unix socket: a server's environment, and its end of the control channel--> warm process --fork--> server
         <--its pid---------------------------------------------------------------

Run as `python -m tests.support.standby_forks FD`; ends when the socket is closed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from swift_agent.agent.processes import standby_server


class ServerFork:
    """What `standby` uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> None:
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() >= deadline_s:
                    raise subprocess.TimeoutExpired("standby server", timeout_s or 0.0)
                time.sleep(0.001)


class StandbyForks:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.standby_forks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=Path(__file__).parents[2],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
            )  # fmt: skip

    def start(self, control: socket.socket) -> ServerFork:
        """As `standby.start_process`."""
        order = json.dumps({"environment": dict(os.environ), "agent": os.getpid()}).encode()
        socket.send_fds(self._socket, [len(order).to_bytes(4, "big")], [control.fileno()])
        self._socket.sendall(order)
        return ServerFork(int.from_bytes(self._socket.recv(4, socket.MSG_WAITALL), "big"))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def _serve(orders: socket.socket) -> None:
    while True:
        head, descriptors, _, _ = socket.recv_fds(orders, 4, 1)
        if not head:
            return
        order = json.loads(orders.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        said, says = os.pipe()
        middle = os.fork()
        if not middle:
            middle = os.getpid()
            if server := os.fork():
                os.write(says, server.to_bytes(4, "big"))
                os._exit(0)
            for descriptor in (said, says):
                os.close(descriptor)
            orders.close()
            while os.getppid() == middle:  # until it has ended: the subreaper is the parent then
                os.sched_yield()
            _be_server(descriptors[0], **order)
        os.waitpid(middle, 0)
        orders.sendall(os.read(said, 4))
        for descriptor in (said, says, descriptors[0]):
            os.close(descriptor)


def _be_server(control: int, environment: dict[str, str], agent: int) -> None:
    """What `standby.start_process` starts; never returns."""
    os.environ.clear()
    os.environ.update(environment)
    first = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path = [*first, *(part for part in sys.path if part not in first)]
    sys.argv = ["standby_server", str(control), str(agent)]
    standby_server.main()
    os._exit(0)


if __name__ == "__main__":
    standby_server.import_all(standby_server.PRELOAD)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not live in a fork"
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
