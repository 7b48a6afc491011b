"""The crew of a node: its worker processes and their standbys, from an order of the core to the end of the process.

    start --> runs, or cannot be started --> tried again for a while --> its end is an event
    end   --> SIGTERM, SIGKILL when its time is over                 --> its end is an event

Everything that happens to a process becomes an event of the `machine`. This module must never decide who is started or
ended, and never talks to a worker: that is `worker_channels`.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from swift_agent.agent.lifecycle import events as msg
from swift_agent.agent.lifecycle.state import AgentState, describe_exit, how_it_ended
from swift_agent.agent.processes.kernel_evidence import KernelLog, MemoryKills, free_memory, resident_bytes
from swift_agent.agent.processes.late_starts import LateStarts, NotStarted, no_room
from swift_agent.agent.processes.output import recorded_in
from swift_agent.agent.processes.standby import StandbyServer
from swift_agent.agent.processes.workers import WorkerProcess, Workers
from swift_agent.agent.torch_events import AgentEvents, Ended
from swift_agent.launch.config import AgentConfig
from swift_agent.wire.channel import ChannelClosed
from swift_agent.wire.environment import Placement, share_of
from swift_rendezvous.roster.records import ResultRecord, StoreRecord, WorkerExit
from swift_rendezvous.roster.view import View

log = logging.getLogger(__name__)

# After SIGTERM; torchrun's default.
DEFAULT_GRACE_S = 30.0


class Crew:
    """Registers its processes with *selector*, whose keys' data are called when they are ready.

    *state*: the agent's, as of now. *on_event* takes events; before it hears of the end of a process, *on_end* gets the
    local rank.
    """

    def __init__(
        self, config: AgentConfig, workers: Workers, selector: selectors.BaseSelector, event_log: AgentEvents,
        state: Callable[[], AgentState], on_event: Callable[[msg.Event], None], on_end: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._config, self._workers, self._selector, self._event_log = config, workers, selector, event_log
        self._state, self._on_event, self._on_end = state, on_event, on_end
        self._late_starts, self._memory_kills, self._kernel_log = LateStarts(), MemoryKills(), KernelLog()
        self._insist: list[tuple[float, WorkerProcess]] = []
        """Processes that were asked to end, and when each is killed; that is put off while it cannot hear."""
        self._modules: tuple[str, ...] | None = None  # that a worker of this node has imported

    @property
    def processes(self) -> Mapping[int, WorkerProcess]:
        """The newest process of each local rank, ended or not; the same object always."""
        return self._workers.processes

    @property
    def num_standbys(self) -> int | None:
        """How many warm processes wait; None where there can be none."""
        server = self._workers.server
        if not self._workers.can_fork:
            return None
        return server.num_wanted if server is not None and server.is_ready else 0

    @property
    def grace_s(self) -> float:
        """The time that a worker has to end after SIGTERM."""
        grace_s = self._config.launch.shutdown_timeout
        return DEFAULT_GRACE_S if grace_s is None else float(grace_s)

    # ---- orders ----

    def start(self, place: Placement, local_ranks: tuple[int, ...], warm: bool) -> None:
        workers = self._workers
        log.info(
            "generation %d: slot %d starts ranks %s (%s)",
            place.generation,
            place.slot,
            [place.rank(local_rank) for local_rank in local_ranks],
            "standby" if warm and workers.can_fork else "forks" if workers.forks_all else "new processes",
        )
        self._event_log.meets(place)
        self._start(place, local_ranks, warm)

    def end(self, local_rank: int, graceful: bool) -> None:
        process = self._workers.processes.get(local_rank)
        if process is None:
            return
        self._event_log.waits()
        if not graceful or self.grace_s == 0:
            self._workers.signal_process(process, signal.SIGKILL)
            return
        self._workers.signal_process(process, signal.SIGTERM)
        self._insist.append((time.monotonic() + self.grace_s, process))

    def start_helper(self, place: Placement, number: int) -> None:
        """*place*: that of the rank that is helped. A worker of this node must not be killed for it."""
        workers = self._workers
        running = [one for at, one in workers.processes.items() if not share_of(at) and one.exit_code is None]
        others = [one for at, one in self._state().helpers.items() if at != number and not one.gone]
        if why := no_room(free_memory(), *([resident_bytes(one.pid) for one in some] for some in (running, others))):
            return self._leave_out(number, place.rank(number), why)
        log.info(
            "generation %d: helper %d of rank %d starts (%s)",
            place.generation,
            share_of(number),
            place.rank(number),
            "standby" if workers.can_fork else "new process",
        )
        with self._watching_server():
            started = workers.start_helper(place, number)
        self._take(started)

    def kill_helper(self, number: int) -> None:
        """At once; one that is not there yet, when it comes."""
        self._workers.signal(number, signal.SIGKILL)

    def signal(self, signum: int) -> None:
        """To all of them."""
        for process in self._workers.processes.values():
            self._workers.signal_process(process, signum)

    def vouch(self, until_s: float) -> None:
        """Tell the workers until when their places are their own: they stand still by themselves then."""
        self._workers.vouch(until_s)

    def wake_standing(self) -> None:
        """Continue those that do."""
        self._workers.wake_standing()

    # ---- time ----

    def tick(self, now_s: float) -> None:
        self._memory_kills.look(now_s)
        self._workers.check_server(now_s)
        self._workers.reap_orphans()
        self._start_late()
        self._insist_on_ends(now_s)

    def put_off(self, for_s: float) -> None:
        """Nobody has looked at the clock for so long."""
        self._insist = [(due_s + for_s, process) for due_s, process in self._insist]

    def _start_late(self) -> None:
        again, ends = self._late_starts.take_due(self._state().workers)
        for end in ends:
            self._on_event(msg.WorkerExited(end))
        for one in again:
            self._start(one.place, (one.end.local_rank,), one.warm)

    def _insist_on_ends(self, now_s: float) -> None:
        if self._state().paused:  # nothing comes to who is stopped, but SIGKILL
            self._insist = [(max(due_s, now_s + self.grace_s), process) for due_s, process in self._insist]
        for due_s, process in self._insist:
            if now_s >= due_s:
                self._workers.signal_process(process, signal.SIGKILL)
        self._insist = [one for one in self._insist if now_s < one[0] and one[1].exit_code is None]

    # ---- all of them ----

    def abandon(self) -> None:
        """End all at once, without an event: their places are another node's."""
        for process in self._workers.processes.values():
            if process.exit_code is None:
                self._selector.unregister(process.pidfd)
        self._workers.end_all(0.0)
        self._late_starts.clear()

    def kill(self) -> None:
        self._workers.end_all(0.0)

    def dismiss(self, result: ResultRecord, grace_s: float, in_hurry: Callable[[], bool]) -> None:
        """The job has ended with *result*: end all, and record how each of them did."""
        processes = [one for number, one in self._workers.processes.items() if not share_of(number)]
        for number in self._workers.processes:
            if share_of(number):
                self.kill_helper(number)
        failed = {(exit_.host, exit_.pid) for exit_ in result.exits}
        self._workers.end_all(grace_s, in_hurry)
        self._event_log.ended(
            result.state == "succeeded",
            [
                Ended(one.local_rank, one.pid, one.exit_code, recorded_in(one.error_file))
                if (self._workers.host, one.pid) in failed
                else Ended(one.local_rank, one.pid, one.exit_code, None)
                for one in processes
            ],
        )

    def close(self) -> None:
        """Kill what is left, the standby server too."""
        self._kernel_log.close()
        self._workers.close()

    # ---- standbys ----

    def warm_up(self) -> None:
        """Have the standby server import torch while the job forms, if the first workers are forks of it."""
        if self._workers.forks_all:
            with self._watching_server():
                self._workers.prepare(0, self._config.preload)

    def has_imported(self, modules: tuple[str, ...]) -> None:
        """What the script has imported is imported ahead by this node's standbys."""
        self._modules = modules
        self.prepare_standbys()

    def prepare_standbys(self) -> None:
        """A spare warms up at once; an active node when its workers train, so that it does not slow their start.

        What is imported ahead comes from the command line, from this node's own workers, and from the node of rank 0 if
        that signs it with the job's secret. Other names in etcd are not imported: that would run them.
        """
        state = self._state()
        generation = state.view.generation
        if generation is None or not self._workers.can_fork:
            return
        spare = generation.slot_of(state.incarnation) is None
        if not spare and self._modules is None:
            return
        told = self._config.key.modules_of(state.view.preload)
        modules = tuple(dict.fromkeys((*self._config.preload, *told, *(self._modules or ()))))
        with self._watching_server():
            self._workers.prepare(self._config.nproc if spare else self._config.num_standbys, modules)

    @contextlib.contextmanager
    def _watching_server(self) -> Iterator[None]:
        """A standby server that is started inside is listened to."""
        before = self._workers.server
        yield
        server = self._workers.server
        if server is not None and server is not before:
            self._selector.register(server, selectors.EVENT_READ, lambda: self._on_server(server))

    # ---- what happens to them ----

    def _start(self, place: Placement, local_ranks: tuple[int, ...], warm: bool) -> None:
        with self._watching_server():
            started = self._workers.start(place, local_ranks, warm)
        self._take(started)

    def _take(self, started: Iterable[WorkerProcess | NotStarted]) -> None:
        """Workers that run, and those that could not be started, which is tried again or is their end."""
        for one in started:
            if isinstance(one, WorkerProcess):
                self._watch(one)
                continue
            if share_of(one.end.local_rank):
                self._leave_out(one.end.local_rank, one.end.rank, one.end.message)
                continue
            is_new = not self._late_starts.is_tried_again(one)
            end = self._late_starts.failed(one, time.monotonic())
            if end is not None:
                log.warning("%s", describe_exit(end))
                self._on_event(msg.WorkerExited(end))
            elif is_new:
                log.warning("%s; trying on", describe_exit(one.end))

    def _leave_out(self, number: int, rank: int, why: str) -> None:
        """A helper that is not started."""
        log.warning("helper %d of rank %d: %s; the others go on without it", share_of(number), rank, why)
        self._on_event(msg.HelperExited(number, 0))

    def _watch(self, process: WorkerProcess) -> None:
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda: self._on_exit(process))
        if share_of(process.local_rank):
            return self._watch_helper(process)
        log.info("rank %d is process %d", process.rank, process.pid)
        self._event_log.started(process.local_rank, process.pid)
        self._on_event(msg.WorkerStarted(process.local_rank, process.generation, process.pid))
        state = self._state()
        worker = state.workers.get(process.local_rank)
        if worker is None or worker.generation != process.generation or worker.killed:
            self._workers.signal_process(process, signal.SIGKILL)  # ordered, then not wanted any more
        elif state.paused:
            self._workers.signal_process(process, signal.SIGSTOP)

    def _watch_helper(self, process: WorkerProcess) -> None:
        number = process.local_rank
        log.info("process %d is helper %d of rank %d", process.pid, share_of(number), process.rank)
        self._on_event(msg.HelperStarted(number, process.generation, process.pid))
        helper = self._state().helpers.get(number)
        if helper is None or helper.generation != process.generation or helper.killed:
            self.kill_helper(number)  # ordered, then not wanted any more

    def _on_exit(self, process: WorkerProcess) -> None:
        end = self._workers.collect(process)
        if end is None:
            return
        self._selector.unregister(process.pidfd)
        self._on_end(process.local_rank)
        if share_of(process.local_rank):
            return self._on_helpers_exit(process, end)
        worker = self._state().workers.get(process.local_rank)
        if end.exit_code != 0 and not end.message and worker is not None and not worker.killed:
            end = self._workers.output.explained(end, process.error_file, self._kernel_says(end))
        if end.exit_code != 0:
            self._event_log.waits()
            log.info("%s", describe_exit(end))
        self._on_event(msg.WorkerExited(end))

    def _kernel_says(self, end: WorkerExit) -> str:
        """Of that end, just now."""
        now_s = time.monotonic()
        killed = self._memory_kills.evidence(now_s) if end.exit_code == -signal.SIGKILL else ""
        return "; ".join(clause for clause in (killed, self._kernel_log.evidence(now_s)) if clause)

    def _on_helpers_exit(self, process: WorkerProcess, end: WorkerExit) -> None:
        number = process.local_rank
        helper = self._state().helpers.get(number)
        if end.exit_code == 0:
            log.info("helper %d of rank %d (pid %d) has done its share", share_of(number), end.rank, end.pid)
        elif helper is not None and not helper.killed:
            log.info(
                "helper %d of rank %d (pid %d) %s; the others go on without it",
                share_of(number),
                end.rank,
                end.pid,
                how_it_ended(end) + (f" ({end.place})" if end.place else ""),
            )
        self._workers.forget(process)
        self._workers.processes.pop(number, None)
        self._on_event(msg.HelperExited(number, process.pid))

    def _on_server(self, server: StandbyServer) -> None:
        try:
            messages = server.receive()
        except ChannelClosed:
            self._selector.unregister(server)
            self._take(self._workers.on_server_death())
            self.prepare_standbys()
            return
        for message in messages:
            started = self._workers.on_server_message(server, message)
            if started is not None:
                self._take([started])


def placement(
    config: AgentConfig, view: View, slot: int, *, socket_path: str, message_log: str, timers: str, run: str
) -> Placement:
    """Where the workers of *slot* are in the generation of *view*. *timers*: the pipe of `watchdog`, '' for none."""
    generation = view.generation
    assert generation is not None
    store = view.store or StoreRecord(generation.slots[generation.store_slot].host, 0)
    return Placement(
        slot=slot,
        num_slots=len(generation.slots), nodes=generation.uneven_nodes,
        num_workers=generation.workers_of(slot),
        first_rank=generation.first_rank(slot),
        world_size=generation.world_size,
        first_role_rank=generation.role_of(slot)[0],
        num_of_role=generation.role_of(slot)[1],
        role=config.role,  # who helps has the same
        run_id=config.job_id,
        master_addr=store.host,
        master_port=store.port,
        restart_count=generation.num_restarts,
        max_restarts=max(config.max_restarts, 0),
        sizes=f"{config.nnodes}:{config.max_nodes}" if config.max_nodes > config.nnodes else "",
        generation=generation.number,
        socket_path=socket_path,
        injects=config.allow_injection,
        computed=view.computed_by(generation.ranks_of(slot)),
        message_log=message_log,
        message_log_bytes=config.message_log_bytes,
        log_store=config.log_store or "",
        timers=timers,
        run=run,
        parallel_sum=config.parallel_sum if config.helpers else "",
        virtual_local_rank=bool(getattr(config.launch, "virtual_local_rank", False)),
    )  # fmt: skip
