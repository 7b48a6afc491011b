"""The processes of one node: starts them cold (as torchrun) or as forks of the standby server, signals and reaps them.

Every process leads a session of its own, so that it is stopped together with what it started (data loader processes).
Deaths are seen through pidfds, which the agent's loop polls. This module must never decide who is started or stopped.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.elastic.utils import macros  # type: ignore[attr-defined]

from swift_agent.agent.processes.import_trial import is_below
from swift_agent.agent.processes.late_starts import NotStarted
from swift_agent.agent.processes.linux import Guard, reap, signal_group, signal_living
from swift_agent.agent.processes.orphans import Orphans
from swift_agent.agent.processes.standby import StandbyServer
from swift_agent.launch.config import AgentConfig
from swift_agent.torch_private import launcher as torch_launcher
from swift_agent.wire.channel import ChannelClosed, Message
from swift_agent.wire.environment import ENV_STARTED, Placement, log_prefix, worker_env
from swift_agent.wire.root_cause import place_of
from swift_agent.wire.standing import Standings
from swift_rendezvous.roster.records import WorkerExit

log = logging.getLogger(__name__)

# A standby server that dies again and again is left alone.
MAX_SERVER_DEATHS = 5
# SIGKILL works at once, unless the process hangs in the kernel (a driver).
KILL_TIMEOUT_S = 10.0
# In place of the exit code of a worker that could not be started, as a shell says it; its process id is 0.
NOT_STARTED = 127
# Of which there may be enough again in a moment: descriptors, processes, memory, room.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT}
# Of a worker's error message, from its begin and from its end.
MESSAGE_CHARS = 8000
# How torchrun runs a script with --run-path: inside a fresh interpreter, without the script's directory on sys.path.
_RUN_PATH = "import sys; from swift_agent.agent.processes.forked_main import run_path; run_path(sys.argv[1:])"


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


class Workers:
    """*processes*: the newest process of each local rank, ended or not."""

    def __init__(self, config: AgentConfig, host: str, standings: Standings, all_are_ours: bool = False) -> None:
        """*all_are_ours*: see `orphans`."""
        self._config = config
        self._host = host
        self._orphans = Orphans(all_are_ours)
        self._standings = standings
        self._dest: LogsDest | None = None
        self._dest_attempt = -1
        self._tails: list[TailLog] = []
        self._filtered: list[IO[str]] = []
        self._guard = Guard()
        self.processes: dict[int, WorkerProcess] = {}
        self.server: StandbyServer | None = None
        self._server_deaths = 0
        self._not_ahead: set[str] = set()  # modules that the standby server must not import

    # ---- start ----

    def start(
        self, place: Placement, local_ranks: tuple[int, ...], warm: bool
    ) -> list[WorkerProcess | NotStarted]:
        """Start processes for *local_ranks* and return those that run at once, and those that cannot be started: no
        process is left, no descriptor, no room for a log.

        Warm ones, and all of them with `--start-method forkserver`, are forks: they follow through `on_server_message`,
        as soon as the standby server is ready. They are started cold if the entry point cannot be run from a fork.
        """
        asked_warm, warm = warm, (warm and self.can_fork) or self.forks_all
        envs = {rank: worker_env(place, rank, os.environ) for rank in range(place.num_workers)}
        started: list[WorkerProcess | NotStarted] = []
        try:
            self._open_logs(place, envs)
            no_logs: Exception | None = None
        except (OSError, RuntimeError) as error:  # the latter: there is no thread for them
            no_logs = error
        for local_rank in local_ranks:
            old = self.processes.pop(local_rank, None)
            if old is not None:
                self.forget(old)
            self._standings.clear(local_rank)
            if no_logs is None:
                self._check_logs(local_rank, envs[local_rank])
            if no_logs is not None:
                started.append(self._not_started(place, local_rank, no_logs, asked_warm))
            elif not (warm and self._order_warm(place, local_rank, envs[local_rank])):
                started.append(self._try_cold(place, local_rank, envs[local_rank], asked_warm))
        return started

    def _try_cold(
        self, place: Placement, local_rank: int, env: dict[str, str], warm: bool
    ) -> WorkerProcess | NotStarted:
        try:
            return self._start_cold(place, local_rank, env)
        except (OSError, subprocess.SubprocessError) as error:
            return self._not_started(place, local_rank, error, warm)

    def _not_started(self, place: Placement, local_rank: int, error: Exception, warm: bool) -> NotStarted:
        why, now_s = f"it cannot be started: {error}", int(time.time())
        end = WorkerExit(
            place.rank(local_rank), local_rank, 0, NOT_STARTED, self._host, why, now_s, generation=place.generation
        )
        may_pass = isinstance(error, RuntimeError) or (isinstance(error, OSError) and error.errno in _SHORTAGES)
        return NotStarted(place, warm, end, may_pass)

    @property
    def forks_all(self) -> bool:
        """Also the first workers are forks of the standby server, and not only those that replace another."""
        return self._config.launch.start_method == "forkserver" and self.can_fork

    @property
    def can_fork(self) -> bool:
        """A fork runs a script or module in this very interpreter, and is bound to no NUMA node."""
        config = self._config
        is_python = config.entry_kind in ("script", "module") and "PYTHON_EXEC" not in os.environ
        return is_python and config.launch.numa_options is None

    def _start_cold(self, place: Placement, local_rank: int, env: dict[str, str]) -> WorkerProcess:
        dest = self._logs()
        config = self._config
        args = [str(arg) for arg in macros.substitute(list(config.entry_args), str(local_rank))]
        if callable(config.entrypoint):
            command = [sys.executable, "-u", "-c", _RUN_PATH, *args]
        else:
            command = [config.entrypoint, *args]
        command = _bind_to_numa_node(command, local_rank, config.launch.numa_options)
        # The kernel ends the worker if the agent dies in a way that leaves it no time.
        command = self._guard.wrap(command)
        stdout, stderr = _open(dest.stdouts.get(local_rank)), _open(dest.stderrs.get(local_rank))
        try:
            popen = subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, start_new_session=True)
        finally:
            for stream in (stdout, stderr):
                if stream is not None:
                    stream.close()
        try:
            return self._process(place, local_rank, popen.pid, env, popen)
        except OSError:  # nobody would hear of its end
            signal_living(popen.pid, signal.SIGKILL)
            popen.wait()
            raise

    def _order_warm(self, place: Placement, local_rank: int, env: dict[str, str]) -> bool:
        """False if there is no standby server to order from."""
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
        if server is None:
            return False
        try:
            server.order(place, local_rank, env, assignment)
        except ChannelClosed:
            return False  # its death is about to be seen
        return True

    def _process(
        self, place: Placement, local_rank: int, pid: int, env: Mapping[str, str], popen: subprocess.Popen[bytes] | None
    ) -> WorkerProcess:
        error_file = env.get("TORCHELASTIC_ERROR_FILE", "")
        pidfd = os.pidfd_open(pid)
        self._orphans.expect(pid)
        process = WorkerProcess(local_rank, place.rank(local_rank), place.generation, pid, pidfd, error_file, popen)
        self.processes[local_rank] = process
        return process

    # ---- the standby server ----

    def start_server(self) -> StandbyServer | None:
        """Start the standby server if it does not run; it is ready a second or two later. None if it cannot be."""
        if self.server is None and self._server_deaths < MAX_SERVER_DEATHS:
            try:
                self.server = StandbyServer()
            except OSError as error:
                log.warning("the standby server cannot be started (%s)", error)
                self._server_deaths += 1
                return None
            self._orphans.expect(self.server.pid)
        return self.server

    def prepare(self, num_standbys: int, modules: Sequence[str]) -> None:
        """Have standbys ready that have imported *modules*, as far as these can be imported ahead."""
        server = self.start_server()
        if server is None:
            return
        wanted = self._fit(modules)
        with contextlib.suppress(ChannelClosed):  # its death is about to be seen
            if wanted != server.preloaded:
                server.preload(wanted)
            if num_standbys != server.num_wanted:
                server.want(num_standbys)

    def on_server_message(self, server: StandbyServer, message: Message) -> WorkerProcess | NotStarted | None:
        """Handle what the standby server says; returns a worker that it has started, or one that cannot be watched."""
        match message.get("op"):
            case "ready":
                _warn_of(message["failed"])
            case "preloaded":
                self._on_preloaded(server, message)
        if message.get("op") != "started":
            return None
        ticket, pid = int(message["ticket"]), int(message["pid"])
        order = server.answered(ticket)
        if order is None or order.local_rank in self.processes:
            # Overtaken, or the first standby for it died: its rank has a process or a verdict already.
            signal_living(pid, signal.SIGKILL)
            return None
        try:
            return self._process(order.place, order.local_rank, pid, order.env, None)
        except ProcessLookupError:
            server.reopen(ticket, order)
            return None
        except OSError as error:
            signal_living(pid, signal.SIGKILL)
            return self._not_started(order.place, order.local_rank, error, warm=True)

    def _on_preloaded(self, server: StandbyServer, message: Message) -> None:
        _warn_of({**message["failed"], **message["unfit"]})
        self._not_ahead.update(message["unfit"])
        server.preloaded = self._fit(server.preloaded)
        if message["spoiled"]:
            self._server_deaths -= 1  # this one is on purpose
            server.kill()

    def _fit(self, modules: Sequence[str]) -> tuple[str, ...]:
        """Those that may be imported by the standby server."""
        return tuple(name for name in modules if not is_below(name, tuple(self._not_ahead)))

    def reap_orphans(self) -> None:
        """Not while a worker may exist whose process id is not known yet: its end must not be taken for an orphan's."""
        if self.server is None or not self.server.open_orders():
            known = {process.pid for process in self.processes.values() if process.exit_code is None}
            self._orphans.reap(known if self.server is None else {*known, self.server.pid})

    def on_server_death(self) -> list[WorkerProcess | NotStarted]:
        """The standby server is gone: start cold what it still owed."""
        assert self.server is not None
        server, self.server = self.server, None
        owed = [order for order in server.open_orders() if order.local_rank not in self.processes]
        server.close()
        self._server_deaths += 1
        if self._server_deaths == MAX_SERVER_DEATHS:
            log.warning("the standby server has died %d times; replacements start cold now", MAX_SERVER_DEATHS)
        return [self._try_cold(order.place, order.local_rank, dict(order.env), warm=True) for order in owed]

    def check_server(self, now_s: float) -> None:
        """A server that does not answer is ended; what it owes is started cold."""
        if self.server is not None and self.server.is_overdue(now_s):
            log.warning("the standby server does not answer: an import may hang; it is ended")
            self.server.kill()

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
        error_file = process.error_file if os.path.isfile(process.error_file) else ""
        stood = self._standings.of(process.local_rank)
        return WorkerExit(
            process.rank, process.local_rank, process.pid, code, self._host, message, timestamp_s, error_file,
            place=place_of(message), generation=process.generation, iteration=stood.iteration, begun=stood.begun,
            num_iterations=stood.num_iterations, excused=stood.excused,
        )  # fmt: skip

    def signal(self, local_rank: int, signum: int) -> None:
        process = self.processes.get(local_rank)
        if process is not None:
            self.signal_process(process, signum)

    def signal_process(self, process: WorkerProcess, signum: int) -> None:
        if process.exit_code is None:
            signal_living(process.pid, signum)

    def vouch(self, until_s: float) -> None:
        """Tell the workers until when their places are their own: they stand still by themselves then."""
        self._standings.vouch(until_s)

    def wake_standing(self) -> None:
        """Continue those that do."""
        for process in self.processes.values():
            if self._standings.stands(process.local_rank):
                self.signal_process(process, signal.SIGCONT)

    def forget(self, process: WorkerProcess) -> None:
        if process.pidfd >= 0:
            os.close(process.pidfd)
            process.pidfd = -1

    def end_all(self, grace_s: float, in_hurry: Callable[[], bool] = lambda: False) -> None:
        """End all workers: SIGTERM; after *grace_s*, or once *in_hurry*, SIGKILL. May be repeated; afterwards no
        process is known. The standby server and the logs stay.
        """
        if self.server is not None:
            self.server.forget_orders()
        living = [p for p in self.processes.values() if p.exit_code is None]
        if grace_s > 0:
            for process in living:
                self.signal_process(process, signal.SIGTERM)
            self._wait_ends(living, grace_s, in_hurry)
        for process in living:
            self.signal_process(process, signal.SIGKILL)
        self._wait_ends(living, KILL_TIMEOUT_S, lambda: False)
        for process in self.processes.values():
            if process.exit_code is None:
                log.error("local rank %d (pid %d) does not end, even by SIGKILL", process.local_rank, process.pid)
            self.forget(process)
        self.processes.clear()

    def close(self) -> None:
        """Kill what is left, the standby server too, and close the logs. May be repeated."""
        self.end_all(0.0)
        if self.server is not None:
            self.server.close()
            self.server = None
        self._orphans.end(KILL_TIMEOUT_S)
        self.close_logs()

    def _wait_ends(self, processes: Sequence[WorkerProcess], timeout_s: float, in_hurry: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            for process in processes:
                self.collect(process)
            left = [process for process in processes if process.exit_code is None]
            left_s = deadline_s - time.monotonic()
            if not left or left_s <= 0 or in_hurry():
                return
            poller = select.poll()
            for process in left:
                poller.register(process.pidfd, select.POLLIN)
            poller.poll(min(left_s, 0.2) * 1000)

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
            self._dest_attempt = place.restart_count
            try:
                self._dest = specs.reify(envs)
                for path in {*self._dest.stdouts.values(), *self._dest.stderrs.values()} - {"", os.devnull}:
                    open(path, "a").close()
                self._start_tails(place)
            except OSError as error:
                # No reason to end what trains: a disk may be full, or a shared directory away.
                log.warning(
                    "no logs of workers can be written (%s): they go on without files; their output is that of this "
                    "agent, and tracebacks of workers that fail are not kept", error,
                )  # fmt: skip
                self.close_logs()
                self._dest = _no_files(place.num_workers)
        if not self._tails:
            self._start_tails(place)
        for local_rank, path in self._logs().error_files.items():
            # reify sets it for the ranks of its first call only; a stale file must not explain a later death.
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = "" if path == os.devnull else path
            process = self.processes.get(local_rank)
            if path != os.devnull and os.path.exists(path) and (process is None or process.exit_code is not None):
                try:
                    os.replace(path, path + ".previous")
                except OSError:
                    envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = ""

    def _check_logs(self, local_rank: int, env: dict[str, str]) -> None:
        """The directory may have gone since the files of the others were made: a rank then goes on without."""
        dest = self._logs()
        try:
            for path in (dest.stdouts.get(local_rank), dest.stderrs.get(local_rank)):
                if path:
                    open(path, "a").close()
        except OSError as error:
            log.warning(
                "no logs of local rank %d can be written any more (%s): its output is that of this agent, and its "
                "traceback is not kept if it fails", local_rank, error,
            )  # fmt: skip
            # reify's may be shared with the tails.
            self._dest = replace(
                dest, stdouts={**dest.stdouts, local_rank: ""}, stderrs={**dest.stderrs, local_rank: ""},
                error_files={**dest.error_files, local_rank: os.devnull},
            )  # fmt: skip
            env["TORCHELASTIC_ERROR_FILE"] = ""

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
            if needles and target:
                stream = open(target, "w", errors="replace", buffering=1)  # noqa: SIM115 - closed in close_logs
                self._filtered.append(stream)
                self._tails.append(TailLog(place.role, files, stream, prefixes, log_line_filter=_contains_any(needles)))
        try:
            for tail in self._tails:
                tail.start()
        except RuntimeError:  # all of them are started again
            self.close_logs()
            raise

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


def _no_files(num_workers: int) -> LogsDest:
    """Output is not redirected, and nothing else is written."""
    inherited, nowhere = dict.fromkeys(range(num_workers), ""), dict.fromkeys(range(num_workers), os.devnull)
    return LogsDest(stdouts=inherited, stderrs=dict(inherited), error_files=nowhere)


def _warn_of(not_imported: Mapping[str, str]) -> None:
    for name, why in not_imported.items():
        log.warning("%s is not imported ahead: %s", name, why)


def _bind_to_numa_node(command: list[str], local_rank: int, options: Any) -> list[str]:
    if options is None:
        return command
    return torch_launcher.bind_command_to_numa_node(command, local_rank, options)


def recorded_in(error_file: str) -> dict[str, Any]:
    """What a worker has left there, as torch has it; what torch has for none otherwise."""
    try:
        with open(error_file) as stream:
            found = json.load(stream)
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, dict) else {"message": "<NONE>"}


def _root_cause(error_file: str) -> tuple[str, int]:
    """Message with traceback, and time, that the worker left in its error file (torch's format); empty if it left
    none.
    """
    try:
        with open(error_file) as stream:
            data = json.load(stream)
        message = data["message"]
        if isinstance(message, str):
            return _shortened(message), int(time.time())
        extra = message.get("extraInfo", {})
        text = extra.get("py_callstack") or message.get("message", "")
        return _shortened(str(text)), int(extra.get("timestamp", time.time()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", int(time.time())


def _shortened(text: str) -> str:
    """The message becomes part of a record, and etcd takes 1.5 MiB for all workers of a node."""
    if len(text) <= 2 * MESSAGE_CHARS:
        return text
    return f"{text[:MESSAGE_CHARS]}\n[{len(text) - 2 * MESSAGE_CHARS} characters left out]\n{text[-MESSAGE_CHARS:]}"
