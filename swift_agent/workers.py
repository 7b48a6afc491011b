"""The processes of one node: starts them cold (as torchrun) or warm (from the standby server), signals and reaps them.

Every process leads a session of its own, so that it is stopped together with what it started (data loader processes).
Deaths are seen through pidfds, which the agent's loop polls. This module must never decide who is started or stopped.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.elastic.utils import macros  # type: ignore[attr-defined]

from swift_agent import torch_private
from swift_agent.channel import Channel, Message
from swift_agent.config import AgentConfig
from swift_agent.process import reap, signal_group, signal_living
from swift_agent.worker_env import ENV_STARTED, Placement, log_prefix, worker_env
from swift_rendezvous.keys import WorkerExit

log = logging.getLogger(__name__)

# How torchrun runs a script with --run-path: inside a fresh interpreter, without the script's directory on sys.path.
_RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass
class WorkerProcess:
    local_rank: int
    rank: int
    generation: int
    pid: int
    pidfd: int
    error_file: str
    popen: subprocess.Popen[bytes] | None = None
    exit_code: int | None = None


@dataclass
class StandbyServer:
    process: subprocess.Popen[bytes]
    channel: Channel
    ready: bool = False


class Workers:
    """*processes*: the newest process of each local rank, ended or not."""

    def __init__(self, config: AgentConfig, host: str) -> None:
        self._config = config
        self._host = host
        self._dest: LogsDest | None = None
        self._dest_attempt = -1
        self._tails: list[TailLog] = []
        self._filtered: list[IO[str]] = []
        self._setpriv = shutil.which("setpriv")
        self.processes: dict[int, WorkerProcess] = {}
        self.server: StandbyServer | None = None
        self._ticket = 0
        self._orders: dict[int, tuple[Placement, int, dict[str, str]]] = {}
        self._open_tickets: set[int] = set()

    # ---- start ----

    def start(self, place: Placement, local_ranks: tuple[int, ...], warm: bool) -> list[WorkerProcess]:
        """Start processes for *local_ranks* and return those that run at once.

        Warm ones follow through `on_server_message`, as soon as the standby server is ready. They are started cold if
        the entry point cannot be run from a fork.
        """
        envs = {rank: worker_env(place, rank, os.environ) for rank in range(place.num_workers)}
        self._open_logs(place, envs)
        started = []
        for local_rank in local_ranks:
            old = self.processes.pop(local_rank, None)
            if old is not None:
                self.forget(old)
            if warm and self._can_fork():
                self._order_warm(place, local_rank, envs[local_rank])
            else:
                started.append(self._start_cold(place, local_rank, envs[local_rank]))
        return started

    def _can_fork(self) -> bool:
        return self._config.entry_kind in ("script", "module") and "PYTHON_EXEC" not in os.environ

    def _start_cold(self, place: Placement, local_rank: int, env: dict[str, str]) -> WorkerProcess:
        dest = self._logs()
        config = self._config
        args = [str(arg) for arg in macros.substitute(list(config.entry_args), str(local_rank))]
        if callable(config.entrypoint):
            command = [sys.executable, "-u", "-c", _RUN_PATH, *args]
        else:
            command = [config.entrypoint, *args]
        command = _bind_to_numa_node(command, local_rank, config.launch.numa_options)
        if self._setpriv:
            # The kernel ends the worker if the agent dies in a way that leaves it no time.
            command = [self._setpriv, "--pdeathsig", "KILL", "--", *command]
        stdout, stderr = _open(dest.stdouts.get(local_rank)), _open(dest.stderrs.get(local_rank))
        try:
            popen = subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, start_new_session=True)
        finally:
            for stream in (stdout, stderr):
                if stream is not None:
                    stream.close()
        return self._process(place, local_rank, popen.pid, env, popen)

    def _order_warm(self, place: Placement, local_rank: int, env: dict[str, str]) -> None:
        dest, config = self._logs(), self._config
        args = [str(arg) for arg in macros.substitute(list(config.training_script_args), str(local_rank))]
        target = config.training_script
        assignment = {
            "env": {**env, ENV_STARTED: repr(time.time())},
            "stdout": dest.stdouts.get(local_rank, ""),
            "stderr": dest.stderrs.get(local_rank, ""),
            "cwd": os.getcwd(),
            "kind": config.entry_kind,
            "target": target if config.entry_kind == "module" else os.path.abspath(target),
            "args": args,
        }
        server = self.start_server()
        self._ticket += 1
        self._orders[self._ticket] = (place, local_rank, env)
        self._open_tickets.add(self._ticket)
        server.channel.send({"op": "start", "ticket": self._ticket, "assignment": assignment})

    def _process(
        self, place: Placement, local_rank: int, pid: int, env: dict[str, str], popen: subprocess.Popen[bytes] | None
    ) -> WorkerProcess:
        error_file = env.get("TORCHELASTIC_ERROR_FILE", "")
        pidfd = os.pidfd_open(pid)
        process = WorkerProcess(local_rank, place.rank(local_rank), place.generation, pid, pidfd, error_file, popen)
        self.processes[local_rank] = process
        return process

    # ---- the standby server ----

    def start_server(self) -> StandbyServer:
        """Start the standby server if it does not run; it is ready a second or two later."""
        if self.server is not None and self.server.process.poll() is None:
            return self.server
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-u", "-m", "swift_agent.nursery", str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self.server = StandbyServer(process, Channel(ours))
        return self.server

    def want_standbys(self, count: int) -> None:
        self.start_server().channel.send({"op": "standbys", "count": count})

    def preload(self, modules: tuple[str, ...]) -> None:
        self.start_server().channel.send({"op": "preload", "modules": list(modules)})

    def on_server_message(self, message: Message) -> WorkerProcess | None:
        """Handle what the standby server says; returns a worker that it has started."""
        for line in message.get("refused", ()):
            log.warning("not preloaded: %s", line)
        if message.get("op") == "ready" and self.server is not None:
            self.server.ready = True
        if message.get("op") != "started":
            return None
        # The same ticket comes again if the first standby was found dead.
        self._open_tickets.discard(message["ticket"])
        place, local_rank, env = self._orders[message["ticket"]]
        pid = int(message["pid"])
        if local_rank in self.processes:
            # The order was overtaken, or the first standby for it died: its rank has a process or a verdict already.
            signal_living(pid, signal.SIGKILL)
            return None
        return self._process(place, local_rank, pid, env, None)

    def may_reap_strangers(self) -> bool:
        """False while a worker may exist whose process id is not known yet: its end must not be taken for an
        orphan's.
        """
        return not self._open_tickets

    def on_server_death(self) -> list[WorkerProcess]:
        """The standby server is gone: start cold what it still owed."""
        log.warning("the standby server died; replacements start cold until it is back")
        if self.server is not None:
            self.server.channel.close()
            self.server.process.wait()
            self.server = None
        owed = [order for order in self._orders.values() if order[1] not in self.processes]
        self._orders.clear()
        self._open_tickets.clear()
        return [self._start_cold(*order) for order in owed]

    # ---- end ----

    def collect(self, process: WorkerProcess) -> WorkerExit | None:
        """The end of *process* if it has ended. What it left running in its session is killed."""
        if process.exit_code is not None:
            return None
        code = reap(process.pid)
        if code is None:
            return None
        process.exit_code = code
        if process.popen is not None:
            process.popen.returncode = code
        signal_group(process.pid, signal.SIGKILL)
        message, timestamp_s = _root_cause(process.error_file)
        return WorkerExit(process.rank, process.local_rank, process.pid, code, self._host, message, timestamp_s)

    def signal(self, local_rank: int, signum: int) -> None:
        process = self.processes.get(local_rank)
        if process is not None and process.exit_code is None:
            signal_living(process.pid, signum)

    def forget(self, process: WorkerProcess) -> None:
        if process.pidfd >= 0:
            os.close(process.pidfd)
            process.pidfd = -1

    def stop_all(self, grace_s: float) -> None:
        """End all workers (SIGTERM, after *grace_s* SIGKILL), the standby server and the log tails."""
        living = [p for p in self.processes.values() if p.exit_code is None]
        for process in living:
            signal_living(process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        for process in living:
            _wait_end(process.pidfd, max(0.0, deadline_s - time.monotonic()))
            if self.collect(process) is None and process.exit_code is None:
                signal_living(process.pid, signal.SIGKILL)
                _wait_end(process.pidfd, 10.0)
                self.collect(process)
        for process in self.processes.values():
            self.forget(process)
        self.stop_server()
        self.close_logs()

    def stop_server(self) -> None:
        if self.server is not None:
            self.server.channel.close()
            try:
                self.server.process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                self.server.process.kill()
                self.server.process.wait()
            self.server = None

    # ---- logs ----

    def _logs(self) -> LogsDest:
        assert self._dest is not None
        return self._dest

    def _open_logs(self, place: Placement, envs: dict[int, dict[str, str]]) -> None:
        """Destinations are made once per attempt, as torchrun does; a replacement appends to the files of its rank."""
        config = self._config
        if self._dest is None or self._dest_attempt != place.restart_count:
            self.close_logs()
            specs = config.launch.logs_specs
            assert isinstance(specs, LogsSpecs)
            self._dest = specs.reify(envs)
            self._dest_attempt = place.restart_count
            for path in {*self._dest.stdouts.values(), *self._dest.stderrs.values()} - {"", os.devnull}:
                open(path, "a").close()
            self._start_tails(place)
        for local_rank, path in self._dest.error_files.items():
            # reify sets it for the ranks of its first call only; a stale file must not explain a later death.
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = "" if path == os.devnull else path
            process = self.processes.get(local_rank)
            if path != os.devnull and os.path.exists(path) and (process is None or process.exit_code is not None):
                os.replace(path, path + ".previous")

    def _start_tails(self, place: Placement) -> None:
        launch, dest = self._config.launch, self._logs()
        template = launch.log_line_prefix_template
        prefixes = None
        if template:
            prefixes = {r: log_prefix(template, place.role, place.rank(r), r) for r in range(place.num_workers)}
        self._tails = [
            TailLog(place.role, dest.tee_stdouts, sys.stdout, prefixes),
            TailLog(place.role, dest.tee_stderrs, sys.stderr, prefixes),
        ]
        for needles, target, files in (
            (getattr(launch, "duplicate_stdout_filters", None), getattr(dest, "filtered_stdout", ""), dest.tee_stdouts),
            (getattr(launch, "duplicate_stderr_filters", None), getattr(dest, "filtered_stderr", ""), dest.tee_stderrs),
        ):
            if needles:
                stream = open(target, "w", errors="replace", buffering=1)  # noqa: SIM115 - closed in close_logs
                self._filtered.append(stream)
                self._tails.append(TailLog(place.role, files, stream, prefixes, log_line_filter=_contains_any(needles)))
        for tail in self._tails:
            tail.start()

    def close_logs(self) -> None:
        for tail in self._tails:
            tail.stop()
        for stream in self._filtered:
            stream.close()
        self._tails, self._filtered = [], []


def _contains_any(needles: Sequence[str]) -> Callable[[str], bool]:
    return lambda line: any(needle in line for needle in needles)


def _open(path: str | None) -> IO[bytes] | None:
    return open(path, "ab") if path else None


def _wait_end(pidfd: int, timeout_s: float) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll(timeout_s * 1000)


def _bind_to_numa_node(command: list[str], local_rank: int, options: Any) -> list[str]:
    if options is None:
        return command
    return torch_private.bind_command_to_numa_node(command, local_rank, options)


def _root_cause(error_file: str) -> tuple[str, int]:
    """Message with traceback, and time, that the worker left in its error file (torch's format); empty if it left
    none.
    """
    try:
        with open(error_file) as stream:
            data = json.load(stream)
        message = data["message"]
        if isinstance(message, str):
            return message, int(time.time())
        extra = message.get("extraInfo", {})
        text = extra.get("py_callstack") or message.get("message", "")
        return str(text), int(extra.get("timestamp", time.time()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", int(time.time())
