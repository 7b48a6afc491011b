"""The agent: one process per node, a single-threaded loop around the pure `machine`.

Everything that happens (a record changed, a worker spoke, a process died, a peer was lost, a signal came) becomes an
event; the commands that follow are carried out here. The loop never waits for the store: records are written by a
writer thread, read by a watcher thread, and the coordinator has a thread of its own.

    signals, pidfds, worker sockets, views --> lifecycle.on_event --> commands --> processes, messages, records

This module must never contain policy.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from swift_agent.agent import transactions, watchdog
from swift_agent.agent.lifecycle import commands, state, timeline
from swift_agent.agent.lifecycle import events as msg
from swift_agent.agent.lifecycle import machine as lc
from swift_agent.agent.lifecycle.isolation import ending_grace_s, rejoin_delay_s
from swift_agent.agent.lifecycle.rate import TELL_S
from swift_agent.agent.patience import Patience, probe
from swift_agent.agent.presence import RETURN_S, Listeners, Presence
from swift_agent.agent.processes.late_starts import LateStarts, NotStarted
from swift_agent.agent.processes.linux import expecting_children
from swift_agent.agent.processes.output import recorded_in
from swift_agent.agent.processes.standby import StandbyServer
from swift_agent.agent.processes.workers import WorkerProcess, Workers
from swift_agent.agent.record_writer import Write, Writer
from swift_agent.agent.store_hosting import GenerationStores, PortTaken
from swift_agent.agent.torch_events import AgentEvents, Ended
from swift_agent.agent.worker_channels import WorkerChannels
from swift_agent.errors import JobStopped
from swift_agent.launch import host
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.directories import Directories
from swift_agent.launch.outcome import limit_of, raise_outcome
from swift_agent.launch.signals import CaughtSignals
from swift_agent.wire import messages as wire
from swift_agent.wire.channel import ChannelClosed
from swift_agent.wire.environment import Placement, run_name
from swift_recovery.transfer import node_file
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.node.registration import JobOver
from swift_rendezvous.node.suspicion import Limits
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import RateRecord, ResultRecord, StoreRecord
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.kv import KeyValueStore

log = logging.getLogger(__name__)

TICK_S = 0.5
# Longer than any grace period.
ENDING_S = 1e6
LEAVE_TIMEOUT_S = 3.0
# For the watch to tell how a job ended whose records are gone.
RESULT_TIMEOUT_S = 2.0
# For stores that cannot be started: descriptors may be there again soon.
STORE_TIMEOUT_S = 20.0
# The loop has heard nobody for so much longer than it waits: this process was frozen, or busy.
STOOD_S = 1.0
# After SIGTERM; torchrun's default.
DEFAULT_GRACE_S = 30.0
SUCCESS_GRACE_S = 5.0


class Agent:
    _event_s = 0.0
    """When the last event was handled, monotonic."""

    def __init__(
        self, config: AgentConfig, address: str, store: KeyValueStore, directories: Directories,
        signals: CaughtSignals, all_children_are_ours: bool = False,
    ) -> None:  # fmt: skip
        """*address*: at which other nodes reach this one."""
        self._config, self._host, self._store = config, address, store
        self._keys = Keys(config.job_id)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._directory, self._message_log = directories.socket, directories.messages
        self._workers = Workers(config, self._host, directories.standings, all_children_are_ours)
        self._patience = Patience(self._probe_store, self._tell_to_wait)
        self._channels = WorkerChannels(
            self._directory, self._selector, self._workers, self._patience,
            lambda event: self._event(event), self._on_modules, self._why_not_ours,
        )  # fmt: skip
        self._late_starts = LateStarts()
        self._insist: list[tuple[float, WorkerProcess]] = []
        """Who was asked to end, and when it is killed; that is put off while it cannot hear."""
        self._listened_s = math.inf
        self._no_store: tuple[int, float] | None = None
        """The generation whose stores could not be started, and since when that is tried."""
        self._modules: tuple[str, ...] | None = None  # that a worker of this node has imported
        self._stores = GenerationStores(
            self._host, config.key, lambda why: self._post(lambda: self._fail(why)), config.master_addr,
            config.master_port,
        )  # fmt: skip
        self._timeline = timeline.Timeline()
        self._event_log = AgentEvents(config)
        self._watchdog: watchdog.Watchdog | None = None
        self._presence: Presence
        self._state = state.AgentState(config.node_id, "", config.max_restarts, config.stop_deadline_s)
        self._end: ResultRecord | None = None
        self._limit_told = False
        self._started_s = time.time()
        self._signals = signals
        self._last_reap_s = 0.0
        self._rejoin_delay_s = 0.0
        self._closed = False
        self._post_lock = threading.Lock()

    # ---- life ----

    def run(self) -> None:
        try:
            self._run()
        except Exception:
            if self._end is None:
                self._event_log.agent_ended(traceback.format_exc())
                raise
            log.warning("the job has ended; this agent could not close all that it had opened", exc_info=True)
        assert self._end is not None
        try:
            self._signals.raise_first()
            raise_outcome(self._end, self._config)
        except ChildFailedError:
            self._event_log.agent_ended()
            raise
        except Exception:
            self._event_log.agent_ended(traceback.format_exc())
            raise
        self._event_log.agent_ended()

    def _run(self) -> None:
        """Until the end of the job is known; then all of this agent is closed, as far as it can be."""
        config = self._config
        with contextlib.ExitStack() as stack:
            stack.enter_context(expecting_children())
            stack.callback(self._close)
            stack.enter_context(self._signals.listening(self._on_signal))
            self._selector.register(self._wake_fd, selectors.EVENT_READ, self._drain_inbox)
            self._writer = Writer(
                self._store,
                lambda why: self._post(lambda: self._stop(why)),
                lambda why: self._post(lambda: self._fail(why)),
            )
            stack.callback(self._writer.stop)
            if self._workers.forks_all:  # it imports torch while the job forms
                with self._watching_server():
                    self._workers.prepare(0, config.preload)
            self._watchdog = watchdog.start(os.environ, self._directory, config.job_id, self._event_log.timer)
            if self._watchdog is not None:
                stack.callback(self._watchdog.stop)
            self._enter(None)
            try:
                self._on_view(self._presence.first_view)
                while self._end is None:
                    self._turn()
            except BaseException:
                # A defect of this agent: its node must not look alive while nobody looks after its workers.
                self._workers.end_all(0.0)
                self._presence.abandon()
                raise
            self._leave()

    def _enter(self, known_job: int | None) -> None:
        """Become a node of the job. What it looks like is `first_view` of the presence."""
        config = self._config
        listeners = Listeners(
            view=lambda view: self._post(lambda: self._on_view(view)),
            peer_lost=self._on_peer_lost,
            lease_lost=lambda incarnation, why: self._post(lambda: self._on_lease_lost(incarnation, why)),
            reclaimed=lambda incarnation: self._post(lambda: self._on_reclaimed(incarnation)),
            place_lost=lambda incarnation, why: self._post(lambda: self._on_place_lost(incarnation, why)),
            failed=lambda incarnation, why: self._post(lambda: self._on_presence_failed(incarnation, why)),
            place_read=lambda incarnation, revision: self._post(lambda: self._on_place_read(incarnation, revision)),
        )
        self._presence = Presence(config, self._store, self._keys, self._host, listeners, known_job)
        self._entered_s = time.monotonic()
        self._state = state.AgentState(
            config.node_id,
            self._presence.me.incarnation,
            config.max_restarts,
            config.stop_deadline_s,
            restarts_used=self._state.restarts_used,
        )
        if self._presence.journal is not None:
            self._presence.journal.begin(self._state)
        log.info("node %s joined job %s (%s)", config.node_id, config.job_id, self._host)
        if known_job is None and config.on_etcd_loss == "train" and config.etcd is not None:
            log.warning(
                "--on-etcd-loss train: this node trains on while it cannot reach etcd; if another one has got its "
                "places meanwhile, both train the same ranks until etcd answers again"
            )
        if known_job is None and config.max_nodes + config.spares > 1:
            least_s, most_s = Limits(config.heartbeat_s).detection_s
            ttl_s = config.lease_ttl_s
            log.info(
                "noticed: a dead process at once, a dead machine or link in %.2g to %.2g s (--heartbeat %g), "
                "a frozen agent in %d to %d s (--lease-ttl %d)",
                *(least_s, most_s, config.heartbeat_s, ttl_s + RETURN_S, 2 * ttl_s + RETURN_S, ttl_s),
            )

    def _leave(self) -> None:
        """Stop everything local, then tell the others and remove what is ours from the store."""
        assert self._end is not None
        grace_s = float(SUCCESS_GRACE_S if self._end.state == "succeeded" else self._grace_s())
        is_told = self._state.view.result is not None
        if self._signals.first is not None:
            is_told = self._publish_stop(self._end) or is_told
        if self._config.on_etcd_loss == "pause":
            left_s = self._presence.acts_until_s() - time.monotonic()
            grace_s = ending_grace_s(grace_s, paused=self._state.paused, is_told=is_told, left_s=left_s)
        if grace_s > 0:
            # They have their time to end, in which nobody looks at the clock here.
            self._workers.vouch(time.monotonic() + ENDING_S)
            self._signal_workers(signal.SIGCONT)  # SIGTERM alone does not wake who is paused
        elif self._state.paused:
            log.warning("the paused workers of this node are killed: another node may have their places by now")
        processes = list(self._workers.processes.values())
        failed = {(exit_.host, exit_.pid) for exit_ in self._end.exits}
        self._workers.end_all(grace_s, in_hurry=lambda: self._signals.count > 1)
        self._event_log.ended(
            self._end.state == "succeeded",
            [
                Ended(one.local_rank, one.pid, one.exit_code, recorded_in(one.error_file))
                if (self._host, one.pid) in failed
                else Ended(one.local_rank, one.pid, one.exit_code, None)
                for one in processes
            ],
        )
        self._writer.flush(LEAVE_TIMEOUT_S)
        self._presence.leave()

    def _grace_s(self) -> float:
        grace_s = self._config.launch.shutdown_timeout
        return DEFAULT_GRACE_S if grace_s is None else float(grace_s)

    def _close(self) -> None:
        """Whatever happens in one of these, the others are done."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_wake_fd)
            stack.callback(self._selector.close)
            stack.callback(self._stores.close)
            stack.callback(self._workers.close)
            stack.callback(self._channels.close)

    def _close_wake_fd(self) -> None:
        with self._post_lock:
            self._closed = True
            os.close(self._wake_fd)

    def _turn(self) -> None:
        """Wait for something to happen and handle it."""
        ready = self._selector.select(TICK_S)
        before_s, self._listened_s = self._listened_s, time.monotonic()
        if self._listened_s - before_s > TICK_S + STOOD_S:
            self._on_standstill(self._listened_s - before_s - TICK_S)
        # The standby server first: it announces a process before that process can speak.
        for key, _ in sorted(ready, key=lambda item: not isinstance(item[0].fileobj, StandbyServer)):
            if self._is_registered(key):
                key.data()
        now_s = time.monotonic()
        if now_s - self._last_reap_s >= TICK_S:
            self._last_reap_s = now_s
            self._workers.check_server(now_s)
            self._patience.tick(now_s)
            self._channels.tick(now_s, self._state.stop_deadline_s, self._state.paused)
            self._workers.reap_orphans()
            if self._no_store is not None and self._no_store[0] == self._state.view.number:
                self._host_store(self._no_store[0])
            self._start_late()
            self._insist_on_ends(now_s)
            self._presence.tick()
            self._event(self._tick(now_s))
            self._vouch()
            self._event(msg.RateTick())

    def _on_standstill(self, for_s: float) -> None:
        """Before anything that has come meanwhile is handled: nobody is late for what was not heard."""
        self._channels.put_off(for_s)
        self._insist = [(due_s + for_s, process) for due_s, process in self._insist]
        self._event(msg.StoodStill(for_s))

    def _tick(self, now_s: float) -> msg.Tick:
        if self._config.on_etcd_loss == "train":
            return msg.Tick()
        if self._presence.holds(now_s):
            return msg.Tick(is_away=self._presence.is_away())
        return msg.Tick(holds=False, why=self._presence.why_not(now_s))

    def _vouch(self) -> None:
        """Tell the workers until when their places are their own: they stand still by themselves then, since nobody
        pauses them while this process is stopped. Those that do go on now, unless they are to be paused."""
        if self._end is not None or self._config.on_etcd_loss == "train":
            return
        until_s = self._presence.acts_until_s()
        if not math.isinf(until_s):
            self._workers.vouch(until_s)
        if not self._state.paused:
            self._workers.wake_standing()

    def _why_not_ours(self, generation: int) -> str:
        """Why what the workers of this node have made in *generation* must not count, '' if it may."""
        now = self._state.view.generation
        if now is None or now.number != generation:
            return f"generation {generation} is over"
        if now.slot_of(self._state.incarnation) is None:
            return "another node has the place of this one"
        tick = self._tick(time.monotonic())
        return "" if tick.holds and not self._state.paused else tick.why or "this node does not know its place yet"

    def _signal_workers(self, signum: int) -> None:
        for process in self._workers.processes.values():
            self._workers.signal_process(process, signum)

    def _probe_store(self) -> None:
        """Write something that changes nothing, to see whether the store takes it: see `patience`."""
        incarnation, job = self._state.incarnation, self._state.view.job
        assert job is not None
        guards, ops = probe(self._keys, job, self._presence.job, self._presence.me)

        def answered(held: bool) -> None:
            self._post(self._patience.proved if held else self._patience.failed)

        is_current = lambda: self._state.incarnation == incarnation  # noqa: E731
        self._writer.submit(Write("probe", guards, ops, is_current, lambda: answered(False), answered))

    def _is_registered(self, key: selectors.SelectorKey) -> bool:
        """Not if an earlier handler of this turn has closed it, and maybe given its number to something new."""
        try:
            return self._selector.get_key(key.fileobj).data is key.data
        except (KeyError, ValueError):
            return False

    # ---- what happens ----

    def _post(self, action: Callable[[], None]) -> None:
        """Have *action* run in the loop; from any thread."""
        self._inbox.put(action)
        with self._post_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def _drain_inbox(self) -> None:
        os.eventfd_read(self._wake_fd)
        while not self._inbox.empty():
            self._inbox.get()()

    def _on_view(self, view: View) -> None:
        if view.revision < self._state.view.revision:
            return  # posted by the watcher of an earlier incarnation
        self._presence.update(view)
        mistake = host.mistaken_address(self._presence.me, view.nodes.values())
        if mistake:
            self._stop(mistake)
        self._event(msg.ViewChanged(view))
        if self._end is not None:
            return
        self._tell_limit(view)
        self._prepare_standbys(view)
        self._stores.close_before(view.recovered)
        phases = self._timeline.observe(view, time.monotonic())
        if phases is not None and self._presence.coordinator.acting:
            self._tell_recovery(view, phases)

    def _on_peer_lost(self, incarnation: str, evidence: str, is_dead: bool) -> None:
        """In the thread that has seen it."""
        seen_s = time.monotonic()
        self._post(lambda: self._event(msg.PeerLost(incarnation, evidence, is_dead, time.monotonic() - seen_s)))

    def _on_lease_lost(self, incarnation: str, why: str) -> None:
        if incarnation == self._state.incarnation and self._end is None:
            log.warning("the lease of %s was lost (%s): asking for another one", self._config.node_id, why)
            self._reclaim()

    def _reclaim(self) -> None:
        self._presence.reclaim()

    def _on_reclaimed(self, incarnation: str) -> None:
        if incarnation == self._state.incarnation:
            log.info("node %s is back in its place; its workers were not disturbed", self._config.node_id)
            for peer in tuple(self._state.lost_peers):
                self._doubt(peer)  # seen while nothing could be written: look again whether it is true
            self._event(msg.PlaceReclaimed())

    def _on_place_lost(self, incarnation: str, why: str) -> None:
        if incarnation == self._state.incarnation and self._end is None:
            self._rejoin(f"the lease of {self._config.node_id} was lost: {why}")

    def _on_place_read(self, incarnation: str, revision: int) -> None:
        if incarnation == self._state.incarnation:
            self._event(msg.PlaceRead(revision))

    def _on_presence_failed(self, incarnation: str, why: str) -> None:
        if incarnation == self._state.incarnation:
            self._fail(why)

    def _fail(self, why: str) -> None:
        """A thread without which this agent is of no use has ended. The other nodes act at once."""
        if self._end is None:
            raise JobStopped(f"the agent of node {self._config.node_id} ends: {why}")

    def _on_exit(self, process: WorkerProcess) -> None:
        end = self._workers.collect(process)
        if end is None:
            return
        self._selector.unregister(process.pidfd)
        self._channels.drop(process.local_rank)
        self._patience.settled(process.local_rank)
        if end.exit_code != 0:
            self._event_log.waits()
            log.info("%s", state.describe_exit(end))
        self._event(msg.WorkerExited(end))

    def _on_server(self, server: StandbyServer) -> None:
        try:
            messages = server.receive()
        except ChannelClosed:
            self._selector.unregister(server)
            self._take(self._workers.on_server_death())
            self._prepare_standbys(self._state.view)
            return
        for message in messages:
            started = self._workers.on_server_message(server, message)
            if started is not None:
                self._take([started])

    def _take(self, started: Iterable[WorkerProcess | NotStarted]) -> None:
        """Workers that run, and those that could not be started, which is tried again or is their end."""
        for one in started:
            if isinstance(one, WorkerProcess):
                self._watch_process(one)
                continue
            is_new = not self._late_starts.is_tried_again(one)
            end = self._late_starts.failed(one, time.monotonic())
            if end is not None:
                log.warning("%s", state.describe_exit(end))
                self._event(msg.WorkerExited(end))
            elif is_new:
                log.warning("%s; trying on", state.describe_exit(one.end))

    def _insist_on_ends(self, now_s: float) -> None:
        if self._state.paused:  # nothing comes to who is stopped, but SIGKILL
            self._insist = [(max(due_s, now_s + self._grace_s()), process) for due_s, process in self._insist]
        for due_s, process in self._insist:
            if now_s >= due_s:
                self._workers.signal_process(process, signal.SIGKILL)
        self._insist = [one for one in self._insist if now_s < one[0] and one[1].exit_code is None]

    def _start_late(self) -> None:
        again, ends = self._late_starts.take_due(self._state.workers)
        for end in ends:
            self._event(msg.WorkerExited(end))
        for one in again:
            with self._watching_server():
                started = self._workers.start(one.place, (one.end.local_rank,), one.warm)
            self._take(started)

    def _watch_process(self, process: WorkerProcess) -> None:
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda: self._on_exit(process))
        log.info("rank %d is process %d", process.rank, process.pid)
        self._event_log.started(process.local_rank, process.pid)
        self._event(msg.WorkerStarted(process.local_rank, process.generation, process.pid))
        worker = self._state.workers.get(process.local_rank)
        if worker is None or worker.generation != process.generation or worker.killed:
            self._workers.signal_process(process, signal.SIGKILL)  # ordered, then not wanted any more
        elif self._state.paused:
            self._workers.signal_process(process, signal.SIGSTOP)

    # ---- what follows ----

    def _event(self, event: msg.Event) -> None:
        if self._end is not None:
            return
        self._event_s = now_s = time.monotonic()
        step = lc.on_event(self._state, event, now_s=now_s)
        self._state = step.state
        if self._presence.journal is not None:
            self._presence.journal.event(event, now_s, step.commands)
        for command in step.commands:
            self._execute(command)

    def _execute(self, command: commands.Command) -> None:
        transaction = transactions.transaction_of(command, self._keys, self._state.view, self._presence.me)
        match command:
            case commands.StartWorkers(local_ranks, _, warm):
                self._start(local_ranks, warm)
            case commands.KillWorkers(local_ranks, why, graceful):
                log.info("ending local ranks %s: %s", list(local_ranks), why)
                for local_rank in local_ranks:
                    self._end_worker(local_rank, graceful)
            case commands.SendStop(local_ranks, generation, why):
                self._send(local_ranks, wire.Stop(generation, why))
            case commands.SendGo(local_ranks, generation):
                self._send(local_ranks, self._go_message(generation))
            case commands.SendLeave(local_ranks, generation):
                self._send(local_ranks, replace(self._go_message(generation), leaves=True))
            case commands.SendKeep(local_ranks, generation):
                node_file.remove(self._directory, but=self._state.kept.iteration if self._state.kept else -1)
                self._send(local_ranks, replace(self._go_message(generation), keeps=True))
            case commands.DropKept():
                node_file.remove(self._directory)
            case commands.SendPause(local_ranks, generation):
                self._send(local_ranks, wire.Pause(generation))
            case commands.SendBoundary(local_ranks, generation, iteration):
                self._send(local_ranks, wire.Boundary(generation, iteration))
            case commands.AskIteration(local_ranks):
                self._send(local_ranks, wire.Where())
            case commands.TellRate(generation, iteration, per_s):
                rate = RateRecord(iteration, per_s, generation, time.time())
                late_s = time.monotonic() + TELL_S
                told = transactions.rate(self._keys, self._state.view, self._presence.me, rate, self._presence.lease_id)
                self._writer.submit(Write(told.what, told.guards, told.ops, lambda: time.monotonic() < late_s))
            case commands.SendRelease(local_ranks):
                self._send(local_ranks, wire.Release())
            case commands.HostStore(generation):
                self._host_store(generation)
            case commands.WriteFailure(generation, failure):
                lost = "" if failure.kind == "again" else f"lost {failure.kind}: "
                log.info("generation %d: %s%s", generation, lost, failure.evidence)
            case commands.ForgetSpare(node_id, incarnation):
                if incarnation in self._state.lost_peers:
                    log.info("spare node %s is lost: %s", node_id, self._state.lost_peers[incarnation].evidence)
            case commands.LookAgain(incarnation):
                self._presence.liveness.reconsider(incarnation)
            case commands.Reclaim():
                self._reclaim()
            case commands.PauseWorkers(why):
                log.warning(
                    "%s. The workers of this node are paused before another node can get their places. Nothing is "
                    "lost: they go on when etcd answers and the places are still theirs, else they are ended. Bring "
                    "etcd, or the way to it, back (or start with --on-etcd-loss train to go on regardless)", why,
                )  # fmt: skip
                self._signal_workers(signal.SIGSTOP)
            case commands.ReadPlace():
                self._presence.read_place()
            case commands.ResumeWorkers():
                log.info("nobody else has the places of this node: its workers are not paused any more")
                self._signal_workers(signal.SIGCONT)
            case commands.Rejoin(why):
                self._rejoin(why)
            case commands.LeaveJob(result):
                log.log(logging.INFO if result.state == "succeeded" else logging.WARNING, "%s", result.why)
                self._end = result
            case commands.EndJob():
                self._end = self._state.view.result
        if transaction is not None:
            self._write(transaction)

    def _write(self, transaction: transactions.Transaction) -> None:
        """Have it written; it is dropped once the generation is over.

        A node that was cut off has seen all others vanish. When it can write again that is not true any more, so what
        was seen too long ago is not written but looked at again.
        """
        number, incarnation = self._state.view.number, self._state.incarnation
        what, guards, ops, peer = transaction.what, transaction.guards, transaction.ops, transaction.lost_peer
        seen = None if peer is None else self._state.lost_peers.get(peer)
        if peer is not None and seen is None:
            return  # a command before this one took so long that it has aged, and is looked at again
        # On the clock of the writer's thread.
        seen_s = time.monotonic() - (0.0 if seen is None else self._event_s - seen.seen_s)

        def is_current() -> bool:
            return self._state.view.number == number and self._state.incarnation == incarnation

        def is_fresh() -> bool:
            return is_current() and time.monotonic() - seen_s < lc.EVIDENCE_S

        if peer is None:
            write = Write(what, guards, ops, is_current)
        else:
            doubt = lambda: self._post(lambda: self._doubt(peer))  # noqa: E731
            write = Write(what, guards, ops, is_fresh, dropped=doubt, read_first=self._keys.generation)
        self._writer.submit(write)

    def _doubt(self, incarnation: str) -> None:
        self._event(msg.PeerDoubted(incarnation))
        self._presence.liveness.reconsider(incarnation)

    def _start(self, local_ranks: tuple[int, ...], warm: bool) -> None:
        view, config = self._state.view, self._config
        generation = view.generation
        assert generation is not None
        slot = generation.slot_of(self._state.incarnation)
        assert slot is not None
        store = view.store or StoreRecord(generation.slots[generation.store_slot].host, 0)
        place = Placement(
            slot=slot,
            num_slots=len(generation.slots), nodes=generation.uneven_nodes,
            num_workers=generation.workers_of(slot),
            first_rank=generation.first_rank(slot),
            world_size=generation.world_size,
            first_role_rank=generation.role_of(slot)[0],
            num_of_role=generation.role_of(slot)[1],
            role=config.role,
            run_id=config.job_id,
            master_addr=store.host,
            master_port=store.port,
            restart_count=generation.num_restarts,
            max_restarts=max(config.max_restarts, 0),
            sizes=f"{config.nnodes}:{config.max_nodes}" if config.max_nodes > config.nnodes else "",
            generation=generation.number,
            socket_path=self._channels.path,
            message_log=self._message_log,
            message_log_bytes=config.message_log_bytes,
            log_store=config.log_store or "",
            timers=self._watchdog.path if self._watchdog is not None else "",
            run=run_name(self._presence.job, self._started_s if config.etcd is None else None),
            virtual_local_rank=bool(getattr(config.launch, "virtual_local_rank", False)),
        )
        ranks = [place.rank(local_rank) for local_rank in local_ranks]
        log.info(
            "generation %d: slot %d starts ranks %s (%s)",
            generation.number,
            slot,
            ranks,
            "standby" if warm and self._workers.can_fork else "forks" if self._workers.forks_all else "new processes",
        )
        self._event_log.meets(place)
        with self._watching_server():
            started = self._workers.start(place, local_ranks, warm)
        self._take(started)

    def _end_worker(self, local_rank: int, graceful: bool) -> None:
        process = self._workers.processes.get(local_rank)
        if process is None:
            return
        self._event_log.waits()
        grace_s = self._grace_s()
        if not graceful or grace_s == 0:
            self._workers.signal_process(process, signal.SIGKILL)
            return
        self._workers.signal_process(process, signal.SIGTERM)
        self._insist.append((time.monotonic() + grace_s, process))

    def _send(self, local_ranks: tuple[int, ...], message: wire.ToWorker) -> None:
        self._channels.send(local_ranks, message)

    def _tell_to_wait(self, local_ranks: tuple[int, ...]) -> None:
        self._channels.send(local_ranks, wire.Wait(), may_skip=True)

    def _go_message(self, number: int) -> wire.Go:
        view = self._state.view
        assert view.plan is not None and view.store is not None and view.generation is not None
        store, token = view.store, self._stores.token(number, view.store)
        stores = wire.Store(store.host, store.port, store.session_port, token)
        return wire.Go(number, view.plan.content, view.generation.world_size, stores, kept=self._directory)

    def _host_store(self, generation: int) -> None:
        try:
            record = self._stores.open(generation)
        except PortTaken as error:
            self._publish_stop(ResultRecord("stopped", str(error)))
            self._stop(str(error))
            return
        except (OSError, RuntimeError) as error:  # torch's own raises the latter
            self._on_no_store(generation, error)
            return
        self._no_store = None
        self._write(transactions.hosted_store(self._keys, self._state.view, self._presence.me, generation, record))

    def _on_no_store(self, generation: int, error: Exception) -> None:
        """All wait for it: it is tried again for a while, then another node has to host it."""
        now_s = time.monotonic()
        if self._no_store is None or self._no_store[0] != generation:
            log.warning("the stores of generation %d cannot be started (%s); trying on", generation, error)
            self._no_store = (generation, now_s)
        elif now_s - self._no_store[1] > STORE_TIMEOUT_S:
            self._no_store = None
            self._rejoin(f"the stores of generation {generation} cannot be started: {error}")

    def _rejoin(self, why: str) -> None:
        """Come back under a new incarnation, as a spare, as soon as the store lets us. Nothing else happens meanwhile:
        without a place in the job there is nothing to look after."""
        log.warning("%s; its workers are ended and it comes back as a spare", why)
        for process in self._workers.processes.values():
            if process.exit_code is None:
                self._selector.unregister(process.pidfd)
        self._channels.drop_all()
        self._workers.end_all(0.0)
        self._patience.clear()
        self._late_starts.clear()
        left = self._presence
        left.abandon()
        self._rejoin_delay_s = rejoin_delay_s(self._rejoin_delay_s, time.monotonic() - self._entered_s)
        self._wait_for_signal(self._rejoin_delay_s)
        while self._signals.first is None:
            try:
                self._enter(left.job)
                left.forget()
                self._on_view(self._presence.first_view)
                return
            except JobOver as error:
                self._end = left.result(RESULT_TIMEOUT_S) or ResultRecord("stopped", str(error))
                return
            except (RendezvousError, OSError) as error:
                # Another node of this name; the store is away, or takes no writes; no descriptor is left.
                log.warning("cannot come back yet: %s", error)
                self._wait_for_signal(1.0)
        self._end = ResultRecord("stopped", "stopped while it was away from the job")

    def _wait_for_signal(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self._signals.first is None and time.monotonic() < deadline_s:
            time.sleep(0.1)

    # ---- standbys ----

    def _prepare_standbys(self, view: View) -> None:
        """A spare warms up at once; an active node when its workers train, so that it does not slow their start.

        What is imported ahead comes from the command line, from this node's own workers, and from the node of rank 0 if
        that signs it with the job's secret. Other names in etcd are not imported: that would run them.
        """
        generation = view.generation
        if generation is None or not self._workers.can_fork:
            return
        spare = generation.slot_of(self._state.incarnation) is None
        if not spare and self._modules is None:
            return
        told = self._config.key.modules_of(view.preload)
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

    def _on_modules(self, local_rank: int, names: tuple[str, ...]) -> None:
        """What the script has imported is imported ahead by this node's standbys, and by spares. One rank's list is
        enough."""
        generation, key = self._state.view.generation, self._config.key
        if local_rank != 0:
            return
        self._modules = names
        self._prepare_standbys(self._state.view)
        if key.protected and generation is not None and generation.slot_of(self._state.incarnation) == 0:
            signed = key.signed_modules(self._modules)
            self._write(transactions.preload(self._keys, self._state.view, self._presence.me, signed))

    # ---- people ----

    def _tell_recovery(self, view: View, phases: Mapping[str, float]) -> None:
        generation = view.generation
        assert generation is not None and view.plan is not None
        log.info(
            "recovered: generation %d goes on at iteration %d: %s",
            generation.number,
            transactions.resumed_iteration(view),
            timeline.describe(dict(phases)),
        )
        self._write(transactions.recovered(self._keys, view, self._presence.me, phases, time.time()))

    def _tell_limit(self, view: View) -> None:
        """Once a script is known to be recovered in place."""
        if view.tracked and view.generation is not None and not self._limit_told:
            self._limit_told = True
            if view.generation.number == 1 and self._presence.coordinator.acting:
                log.info("%s", limit_of(self._config))

    # ---- signals ----

    def _on_signal(self, received: signal.Signals) -> None:
        why = f"node {self._config.node_id} got {received.name}"
        # Not `_post`: the main thread may hold its lock.
        self._inbox.put(lambda: self._stop(why))
        os.eventfd_write(self._wake_fd, 1)

    def _stop(self, why: str) -> None:
        if self._end is None:
            log.info("%s: the job ends here", why)
            self._end = ResultRecord("stopped", why)

    def _publish_stop(self, result: ResultRecord) -> bool:
        """Tell the other nodes that the job ends, unless this one is a spare that nobody needs, or was given up.
        Returns whether etcd has that."""
        generation = self._state.view.generation
        if generation is not None and generation.slot_of(self._state.incarnation) is None:
            return False
        last = transactions.stop(self._keys, self._presence.me, result)
        held: list[bool] = []
        self._writer.submit(Write(last.what, last.guards, last.ops, wanted=lambda: True, answered=held.append))
        self._writer.flush(LEAVE_TIMEOUT_S)
        if held != [False]:
            return held == [True]
        try:
            return self._store.get(self._keys.result) is not None  # another node was first, or this one was given up
        except RendezvousError:
            return False
