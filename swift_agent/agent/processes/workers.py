"""The processes of one node: starts them cold (as torchrun) or as forks of the standby server, signals and reaps them.

Every process leads a session of its own, so that it is stopped together with what it started (data loader processes).
Deaths are seen through pidfds, which the agent's loop polls. This module must never decide what is started or stopped.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, assert_never

from torch.distributed.elastic.utils import macros  # type: ignore[attr-defined]

from swift_agent.agent.processes import orders
from swift_agent.agent.processes.import_trial import is_below
from swift_agent.agent.processes.late_starts import NotStarted
from swift_agent.agent.processes.linux import Guard, reap, signal_group, signal_living
from swift_agent.agent.processes.orphans import Orphans
from swift_agent.agent.processes.output import Output, root_cause
from swift_agent.agent.processes.standby import StandbyServer
from swift_agent.launch.config import AgentConfig
from swift_agent.torch_private import launcher as torch_launcher
from swift_agent.wire.channel import ChannelClosed
from swift_agent.wire.environment import ENV_STARTED, Placement, helped_by, worker_env
from swift_agent.wire.log_counters import LogCounters
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

    def __init__(
        self, config: AgentConfig, host: str, standings: Standings, log_counters: LogCounters,
        all_are_ours: bool = False,
    ) -> None:  # fmt: skip
        """*all_are_ours*: see `orphans`."""
        self._config = config
        self.host = host
        self._orphans = Orphans(all_are_ours)
        self._standings, self._log_counters = standings, log_counters
        self.output = Output(config, standings.directory)
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
            self.output.open(place, envs, {rank for rank, one in self.processes.items() if one.exit_code is None})
            self.output.link(place, local_ranks)
            no_logs: Exception | None = None
        except (OSError, RuntimeError) as error:  # the latter: there is no thread for them
            no_logs = error
        for local_rank in local_ranks:
            old = self.processes.pop(local_rank, None)
            if old is not None:
                self.forget(old)
            self._standings.clear(local_rank)
            self._log_counters.retire(local_rank)
            if no_logs is None:
                self.output.check(local_rank, envs[local_rank])
            if no_logs is not None:
                started.append(self._not_started(place, local_rank, no_logs, asked_warm))
            elif not (warm and self._order_warm(place, local_rank, envs[local_rank])):
                started.append(self._try_cold(place, local_rank, envs[local_rank], asked_warm))
        return started

    def start_helper(self, place: Placement, number: int) -> list[WorkerProcess | NotStarted]:
        """As `start`, one helper for a rank of *place*, which is another node's. It is warm if it can be."""
        env = worker_env(place, number, os.environ)
        old = self.processes.pop(number, None)
        if old is not None:
            self.forget(old)
        self.output.open_helper(place, number, env)
        if self.can_fork and self._order_warm(place, number, env):
            return []
        return [self._try_cold(place, number, env, warm=True)]

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
            place.rank(local_rank), local_rank, 0, NOT_STARTED, self.host, why, now_s, generation=place.generation
        )
        may_pass = isinstance(error, RuntimeError) or (isinstance(error, OSError) and error.errno in _SHORTAGES)
        return NotStarted(place, warm, end, may_pass)

    @property
    def forks_all(self) -> bool:
        """Also the first workers are forks of the standby server, and not only those that replace another."""
        return self._config.launch.start_method == "forkserver" and self.can_fork

    @property
    def can_fork(self) -> bool:
        """A fork runs a script or module in this very interpreter."""
        return self._config.entry_kind in ("script", "module") and "PYTHON_EXEC" not in os.environ

    def _start_cold(self, place: Placement, local_rank: int, env: dict[str, str]) -> WorkerProcess:
        config = self._config
        args = [str(arg) for arg in macros.substitute(list(config.entry_args), str(helped_by(local_rank)))]
        if callable(config.entrypoint):
            command = [sys.executable, "-u", "-c", _RUN_PATH, *args]
        else:
            command = [config.entrypoint, *args]
        command = torch_launcher.bind_command_to_numa_node(command, helped_by(local_rank), config.launch.numa_options)
        # The kernel ends the worker if the agent dies in a way that leaves it no time.
        command = self._guard.wrap(command)
        stdout, stderr = _open(self.output.stdout(local_rank)), _open(self.output.stderr(local_rank))
        try:
            popen = subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, start_new_session=True)
        finally:
            for stream in (stdout, stderr):
                if stream is not None:
                    stream.close()
        try:
            return self._process(place, local_rank, popen.pid, env, popen)
        except OSError:  # its end would not be heard of
            signal_living(popen.pid, signal.SIGKILL)
            popen.wait()
            raise

    def _order_warm(self, place: Placement, local_rank: int, env: dict[str, str]) -> bool:
        """False if there is no standby server to order from."""
        config = self._config
        args = [str(arg) for arg in macros.substitute(list(config.training_script_args), str(helped_by(local_rank)))]
        target = config.training_script
        assignment = orders.Assignment(
            env={**env, ENV_STARTED: repr(time.time())},
            stdout=self.output.stdout(local_rank),
            stderr=self.output.stderr(local_rank),
            cwd=os.getcwd(),
            kind=config.entry_kind,
            target=target if config.entry_kind == "module" else os.path.abspath(target),
            args=tuple(args),
            cpus=torch_launcher.numa_cpus(helped_by(local_rank), config.launch.numa_options),
        )
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

    def on_server_message(self, server: StandbyServer, message: orders.FromServer) -> WorkerProcess | NotStarted | None:
        """Handle what the standby server says; returns a worker that it has started, or one that cannot be watched."""
        match message:
            case orders.Ready(failed):
                _warn_of(failed)
            case orders.Preloaded():
                self._on_preloaded(server, message)
            case orders.Started(ticket, pid):
                return self._on_started(server, ticket, pid)
            case _:
                assert_never(message)
        return None

    def _on_started(self, server: StandbyServer, ticket: int, pid: int) -> WorkerProcess | NotStarted | None:
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

    def _on_preloaded(self, server: StandbyServer, found: orders.Preloaded) -> None:
        _warn_of({**found.failed, **found.unfit})
        self._not_ahead.update(found.unfit)
        server.preloaded = self._fit(server.preloaded)
        if found.spoiled:
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
        message, timestamp_s = root_cause(process.error_file)
        error_file = process.error_file if os.path.isfile(process.error_file) else ""
        stood = self._standings.of(process.local_rank)
        return WorkerExit(
            process.rank, process.local_rank, process.pid, code, self.host, message, timestamp_s, error_file,
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
        self.output.end()

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


def _open(path: str | None) -> IO[bytes] | None:
    return open(path, "ab") if path else None


def _warn_of(not_imported: Mapping[str, str]) -> None:
    for name, why in not_imported.items():
        log.warning("%s is not imported ahead: %s", name, why)
