"""Agents that are forks of one warmed process, and so are their standby servers.

Importing torch costs an agent 1.3 s of a processor, and its standby server 2.5 s; a fault test starts up to six of each
on two cores. A fork is a process like any other: `swift-run` runs in it from its first line on, with the arguments,
environment, directory and output that it was given. Only its imports were made before. Tests that are about the start
of a process do not use this (`Agents.start_method` "spawn"), nor does a second standby server of the same agent.

    pytest --Unix socket: a line of JSON per agent, with the files of its output--> server --fork--> agent
           <--a line with its pid, and one with its exit code------------------

Run as `python -m tests.support.agent_forks FD [MODULE ...]`, with what else is to be imported before; ends when the
socket is closed, without touching what it has forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swift_agent.agent.processes import forked_main, standby, standby_server
from swift_agent.agent.processes.linux import die_with_parent
from tests.support.network import enter
from tests.support.standby_forks import ServerFork

IMPORTED = ("swift_agent.run", "swift_agent.agent.main", *standby_server.PRELOAD)


class Fork:
    """What the tests use of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid

    @property
    def returncode(self) -> int | None:
        return self._server.exit_codes.get(self.pid)

    def poll(self) -> int | None:
        self._server.hear(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end_s is not None and time.monotonic() >= end_s:
                raise subprocess.TimeoutExpired(f"agent {self.pid}", timeout or 0.0)
            self._server.hear(60.0 if end_s is None else max(0.0, end_s - time.monotonic()))
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its end is not told yet
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The server, as pytest sees it. *modules*: what its agents have imported besides, and so have their workers."""

    def __init__(self, *modules: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.agent_forks", str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
        )  # fmt: skip
        theirs.close()
        self._heard = b""
        self._pids: list[int] = []
        self.exit_codes: dict[int, int] = {}

    def start(
        self,
        program: list[str],
        environment: dict[str, str],
        directory: Path,
        output: int,
        errors: int | None = None,
        namespace: str = "",
    ) -> Fork:
        """Run *program* (``-m MODULE ARGS`` or ``FILE ARGS``, as after `python`); returns when it has a pid. *errors*:
        the file of its standard error, if that is not the one of its output. *namespace*: that of the network in which
        it runs, if that is another one."""
        order = {
            "program": program, "environment": environment, "directory": str(directory), "namespace": namespace,
        }  # fmt: skip
        line = json.dumps(order).encode()
        head = len(line).to_bytes(4, "big")
        socket.send_fds(self._socket, [head], [output, output if errors is None else errors])
        self._socket.sendall(line)
        while not self._pids:
            self.hear(60.0)
        return Fork(self, self._pids.pop())

    def run(
        self, program: list[str], environment: dict[str, str], directory: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """To its end, as `subprocess.run` with a text of each stream."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            fork = self.start(program, environment, directory, output.fileno(), errors.fileno())
            try:
                code = fork.wait(timeout_s)
            except subprocess.TimeoutExpired:
                fork.kill()
                raise
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return subprocess.CompletedProcess(program, code, *texts)

    def hear(self, timeout_s: float) -> None:
        """Take in what the server tells, waiting up to *timeout_s* for it."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return
        data = self._socket.recv(65536)
        if not data:
            raise AssertionError("the server of the agents has ended")
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            told: dict[str, int] = json.loads(line)
            if "code" in told:
                self.exit_codes[told["pid"]] = told["code"]
            else:
                self.exit_codes.pop(told["pid"], None)  # of an earlier process with this number
                self._pids.append(told["pid"])

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork an agent for each order; returns its order in the fork, None at the end in the server."""
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            wake.recv(4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    _tell(control, pid=ended[0], code=os.waitstatus_to_exitcode(ended[1]))
        if control not in ready:
            continue
        head, descriptors, _, _ = socket.recv_fds(control, 4, 2)
        if not head:
            return None
        order: dict[str, Any] = json.loads(control.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (control, wake, woken):
                end.close()
            for number, descriptor in zip((1, 2), descriptors, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return order
        for descriptor in descriptors:
            os.close(descriptor)
        _tell(control, pid=pid)


def _tell(control: socket.socket, **told: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # pytest has ended: so do we, at the next order
        control.sendall(json.dumps(told).encode() + b"\n")


def become(order: dict[str, Any]) -> None:
    """In the fork: run what was ordered, as a new interpreter would."""
    if order["namespace"]:
        enter(order["namespace"])
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    tempfile.tempdir = None
    warnings.simplefilter("ignore")
    FirstServer.prepare()
    first, *arguments = order["program"]
    if first == "-m":
        module, *arguments = arguments
        sys.argv = [module, *arguments]
        if module == "torch.distributed.run":  # torch's launcher, beside ours
            importlib.import_module(module).main()
        else:
            importlib.import_module(module).cli()
    else:
        sys.argv = [first, *arguments]
        runpy.run_path(first, run_name="__main__")


def leave_with(run: Callable[[dict[str, Any]], None], order: dict[str, Any]) -> None:
    """End this process as `run(order)` ends, without taking the interpreter apart: that would copy the same pages."""
    code = 0
    try:
        run(order)
    except SystemExit as stop:
        code = forked_main._exit_code(stop)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(forked_main._finish(code))


class FirstServer(ServerFork):
    """A child of the agent that becomes its first standby server."""

    def __init__(self, pid: int, handover: socket.socket) -> None:
        super().__init__(pid)
        self._handover = handover

    @classmethod
    def prepare(cls) -> None:
        """Make it now, while this process has one thread."""
        ours, theirs = socket.socketpair()
        agent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(agent_pid)
            ours.close()
            _be_server(theirs, agent_pid)
        theirs.close()
        spawn, unused = standby.start_process, [cls(pid, ours)]

        def start_process(control: socket.socket) -> Any:
            return unused.pop()._begin(control) if unused else spawn(control)

        standby.start_process = start_process

    def _begin(self, control: socket.socket) -> ServerFork:
        socket.send_fds(self._handover, [b"!"], [control.fileno()])
        self._handover.close()
        return self


def _be_server(handover: socket.socket, agent_pid: int) -> None:
    """What `standby.start_process` starts; never returns."""
    _, descriptors, _, _ = socket.recv_fds(handover, 1, 1)
    if not descriptors:
        os._exit(0)
    handover.close()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(fd, "wb", 0, closefd=False), write_through=True) for fd in (1, 2)
    )
    sys.path = sys.path[1:]  # where the module given with -m is
    sys.argv = ["nursery", str(descriptors[0]), str(agent_pid)]
    standby_server.main()
    os._exit(0)


if __name__ == "__main__":
    for name in (*IMPORTED, *sys.argv[2:]):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not live in a fork"
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every page of what was imported
    if (meant := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        leave_with(become, meant)
