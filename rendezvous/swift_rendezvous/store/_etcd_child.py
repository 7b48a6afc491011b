"""An etcd that is a child of this process: made to die with its owner, asked whether it answers, and how it ended.

Must never take another server for the one that is meant, nor end a process that is not its own.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store.server_ends import how_it_ended
from swift_rendezvous.threads import only_logged, start, thread

_SHELL = "/bin/sh"
# For systems whose setpriv cannot set a parent-death signal: when our end of the pipe on stdin closes, `cat` ends.
_PIPE_GUARD = """
exec 3<&0 </dev/null
"$@" 3<&- & server=$!
(cat <&3 >/dev/null; kill -KILL $server) 2>/dev/null & guard=$!
exec 3<&-
wait $server; status=$?
kill $guard 2>/dev/null
exit $status
"""


class Child:
    """A running server, made to die with its owner."""

    def __init__(self, command: list[str], directory: Path, log_path: Path) -> None:
        started: queue.SimpleQueue[subprocess.Popen[bytes] | Exception] = queue.SimpleQueue()
        self._code: int | None = None
        # A parent-death signal is sent at the end of the *thread* that started the child. This one waits for the child.
        self._reaper = thread("private-etcd", self._run, only_logged, command, directory, log_path, started)
        start(self._reaper)
        process = started.get()
        if isinstance(process, Exception):
            raise RendezvousError(f"{command[0]} cannot be started: {process}")
        self.process = process

    @property
    def is_alive(self) -> bool:
        # Not `poll`: the other thread waits for the child, and both would want its exit status.
        return self._reaper.is_alive()

    @property
    def _in_shell(self) -> bool:
        return bool(self.process.args[0] == _SHELL)  # type: ignore[index]  # always a list here

    def join(self) -> None:
        self._reaper.join()

    def how_it_ended(self) -> str:
        return how_it_ended(self._code, self._in_shell)

    def kill(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self._in_shell:
            self._reaper.join(timeout=5)  # the guard kills the server and the shell waits for it; nothing else can
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self._reaper.join()

    def _run(self, command: list[str], directory: Path, log_path: Path, started: queue.SimpleQueue[Any]) -> None:
        try:
            with open(log_path, "ab") as output:
                process = subprocess.Popen(
                    guarded(command),
                    cwd=directory,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env=clean_env(),
                )
        except Exception as error:  # the starter of this thread waits for an answer
            started.put(error)
            return
        started.put(process)
        # The agent waits for all of its children, and may be first; then nobody knows how it ended.
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert end is not None
            self._code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            # Of a shell that was killed the server is left. Not reaped yet, its group can be no other's.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def guarded(command: list[str]) -> list[str]:
    """*command*, made to die with its parent; its stdin must be a pipe of which only the parent holds the other end."""
    setpriv = shutil.which("setpriv")
    if setpriv is not None:
        usage = subprocess.run([setpriv, "--help"], capture_output=True, text=True, timeout=10)
        if "--pdeathsig" in usage.stdout:
            return [setpriv, "--pdeathsig", "KILL", "--", *command]
    return [_SHELL, "-c", _PIPE_GUARD, "private-etcd", *command]


def clean_env() -> dict[str, str]:
    """etcd reads every flag from ETCD_* as well; those of the user's shell are meant for another server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over the Unix socket at *path*."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def is_healthy(endpoint: str, name: str, deadline_s: float) -> bool:
    """Whether the server called *name* answers there: another one may have taken the port before ours."""
    timeout_s = max(0.01, min(1.0, deadline_s - time.monotonic()))
    host, _, where = endpoint.partition(":")
    connection: http.client.HTTPConnection
    if host == "unix":
        connection = _SocketConnection(where, timeout_s)
    else:
        connection = http.client.HTTPConnection(host, int(where), timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        if b"true" not in connection.getresponse().read():
            return False
        connection.request("POST", "/v3/cluster/member/list", b"{}")
        return name.encode() in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
