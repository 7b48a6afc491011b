"""The standby server: a process with torch and its lazy imports loaded, from which replacement workers are forked.

Importing torch, and what the first `DDP()` and the first optimizer import lazily, takes one to two seconds; a fork
takes milliseconds. The server keeps a few forked processes waiting (standbys), so that a replacement runs user code
as soon as its assignment arrives. A standby is forked twice: its parent is then the agent (a subreaper), which can
wait for it.

What agent, server and standbys say to each other is in `orders`.

The server must stay single-threaded and must never initialise CUDA or run a torch kernel: neither survives a fork.
Run as `python -P -u -m swift_agent.agent.processes.standby_server FD AGENT_PID`: -P, because `-m` would put the current
directory first among the places of modules, where a script has its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from swift_agent.agent.processes import orders
from swift_agent.agent.processes.import_trial import (
    STARTS_THREADS,
    TIMEOUT_S,
    Findings,
    Trial,
    has_more_threads,
    import_one,
    num_threads,
)
from swift_agent.agent.processes.linux import die_with_parent
from swift_agent.wire.channel import ChannelClosed, WorkerChannel
from swift_agent.wire.vocabulary import written

# Everything that is imported before user code and, lazily, by the first process group, DDP(), optimizer and loader.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.algorithms.join",
    "torch.distributed.device_mesh",
    "torch.distributed.optim",
    "torch.nn.parallel.distributed",
    "torch.optim.lr_scheduler",
    "torch.testing._internal.distributed.fake_pg",
    "torch.utils.data",
    "numpy",
    "swift_agent.worker.job.init",
    "swift_agent.agent.processes.forked_main",
)


@dataclass
class Standby:
    pid: int
    channel: WorkerChannel


def import_all(modules: Sequence[str]) -> dict[str, str]:
    """Import *modules*; returns those that failed, with the reason."""
    return {name: why for name in modules if (why := import_one(name))}


class Nursery:
    def __init__(self, control: WorkerChannel, agent_pid: int) -> None:
        self._control = control
        self._agent_pid = agent_pid
        self._standbys: list[Standby] = []
        self._wanted = 0
        self._trial: Trial | None = None
        self._found = Findings()
        self._is_spoiled = False  # has got threads: a fork of it would be missing something

    def run(self) -> None:
        """Serve until the agent closes the control channel."""
        failed = import_all(PRELOAD)
        self._freeze()
        try:
            self._say(orders.Ready(failed))
            self._serve()
        finally:
            if self._trial is not None:
                self._trial.end()

    def _serve(self) -> None:
        while True:
            self._refill()
            heard: list[WorkerChannel | Trial] = [self._control, *(standby.channel for standby in self._standbys)]
            if self._trial is not None:
                heard.append(self._trial)
            ready, _, _ = select.select(heard, [], [], self._trial.left_s if self._trial is not None else None)
            # Standbys never speak: what can be read is their end.
            self._standbys = [standby for standby in self._standbys if standby.channel not in ready]
            if self._control in ready:
                try:
                    messages = self._control.receive_ready()
                except ChannelClosed:
                    return
                for message in messages:
                    self._handle(orders.TO_SERVER.read(message))
            trial = self._trial
            if trial is None:
                continue
            if trial in ready:
                if trial.hear():
                    self._use(*trial.findings())
            elif not trial.left_s:
                trial.end()
                self._use(*trial.findings(f"its import takes longer than {TIMEOUT_S:g} s"))

    def _say(self, message: orders.FromServer) -> None:
        self._control.send(written(message))

    def _handle(self, message: orders.ToServer) -> None:
        match message:
            case orders.Standbys(count):
                self._wanted = count
            case orders.Preload(modules):
                if self._trial is not None:
                    self._trial.end()
                    self._trial = None
                self._found = Findings()
                self._try(modules)
            case orders.Start(ticket, assignment):
                self._start(ticket, assignment)
            case _:
                assert_never(message)

    def _try(self, modules: Sequence[str]) -> None:
        untried = [name for name in modules if name not in sys.modules]
        if untried:
            self._trial = Trial(untried, self._let_go)
        else:
            self._tell()

    def _use(self, found: Findings, rest: Sequence[str]) -> None:
        """A trial has ended: import what can be imported, and try the *rest*."""
        self._trial = None
        self._found.failed |= found.failed
        self._found.unfit |= found.unfit
        for name in found.good:
            before = num_threads()
            if why := import_one(name):
                self._found.failed[name] = why
            if has_more_threads(before):
                # Not as in the trial. There is no way back: the agent ends this process.
                self._found.unfit[name], self._is_spoiled, rest = STARTS_THREADS, True, ()
                break
        if found.good and not self._is_spoiled:
            self._freeze()
            # Standbys that were forked before do not have the modules.
            for standby in self._standbys:
                standby.channel.close()
            self._standbys.clear()
        self._try(rest)

    def _tell(self) -> None:
        """All has been tried."""
        self._say(orders.Preloaded(self._found.failed, self._found.unfit, self._is_spoiled))

    def _start(self, ticket: int, assignment: orders.Assignment) -> None:
        while not self._is_spoiled:
            standby = self._standbys.pop(0) if self._standbys else self._fork()
            # The agent must know the process before it can say hello.
            self._say(orders.Started(ticket, standby.pid))
            try:
                standby.channel.send(written(assignment))
            except ChannelClosed:
                continue  # it was killed while it waited: the next one gets the ticket
            standby.channel.sock.close()
            return

    def _refill(self) -> None:
        while len(self._standbys) < self._wanted and not self._is_spoiled:
            self._standbys.append(self._fork())

    def _let_go(self) -> None:
        """In a fork: close what is the server's."""
        self._control.sock.close()
        for standby in self._standbys:
            standby.channel.sock.close()
        if self._trial is not None:
            os.close(self._trial.fileno())

    @staticmethod
    def _freeze() -> None:
        # Keeps the collector from touching, and so copying, the pages that forks share: for as long as they live, since
        # what was imported stays.
        gc.collect()
        gc.freeze()

    def _fork(self) -> Standby:
        ours, theirs = socket.socketpair()
        read_fd, write_fd = os.pipe()
        first = os.fork()
        if first == 0:
            middle_pid = os.getpid()
            second = os.fork()
            if second:
                os.write(write_fd, str(second).encode())
                os._exit(0)
            for fd in (read_fd, write_fd):
                os.close(fd)
            ours.close()
            self._let_go()
            _live(theirs, self._agent_pid, middle_pid)
            os._exit(0)
        theirs.close()
        os.close(write_fd)
        os.waitpid(first, 0)
        pid = int(os.read(read_fd, 32))
        os.close(read_fd)
        return Standby(pid, WorkerChannel(ours))


def _live(sock: socket.socket, agent_pid: int, parent_pid: int) -> None:
    """A forked process: wait for an assignment, then be that worker.

    Until then it is in the group of the server, by which the agent, whose child it is, finds it when it has ended.
    """
    while os.getppid() == parent_pid:  # the middle process has not ended yet
        os.sched_yield()
    die_with_parent(agent_pid)  # exits if the agent has died meanwhile and another subreaper took this process
    channel = WorkerChannel(sock)
    try:
        assignment = orders.TO_STANDBY.read(channel.receive())
    except ChannelClosed:
        os._exit(1)  # never for the end of a script
    os.setsid()
    channel.sock.close()
    become_worker(assignment)


def become_worker(assignment: orders.Assignment) -> None:
    """Take over environment, output and arguments of the assignment and run the script as `__main__`; never returns."""
    from swift_agent.agent.processes import forked_main

    os.environ.clear()
    os.environ.update(assignment.env)
    if assignment.cpus:
        os.sched_setaffinity(0, assignment.cpus)  # before it has other threads
    for fd, path in ((1, assignment.stdout), (2, assignment.stderr)):
        if path:
            try:
                target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o644)
            except OSError as error:  # it went a moment ago; the agent's own output is no reason to end
                os.write(2, f"no output is written to {path}: {error}\n".encode())
                continue
            os.dup2(target, fd)
            os.close(target)
    os.chdir(assignment.cwd)
    forked_main.run(assignment.kind, assignment.target, list(assignment.args))


def main() -> None:
    fd, agent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(agent_pid)
    # Ctrl-C at a terminal reaches the whole foreground group; the agent decides which process stops.
    os.setsid()
    with contextlib.suppress(ChannelClosed):  # the agent has ended
        Nursery(WorkerChannel(socket.socket(fileno=fd)), agent_pid).run()
    os._exit(0)  # at once: the agent waits for it, and what is imported here may take its time to end


if __name__ == "__main__":
    main()
