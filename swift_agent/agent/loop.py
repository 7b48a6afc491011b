"""The agent: one process per node, a single-threaded loop around the pure `machine`.

Everything that happens (a record changed, a worker spoke, a process died, a peer was lost, a signal came) becomes an
event, one at a time; the commands that follow are carried out by the `executor`, and those that end or move this agent
here. The loop never waits for the store: writer, watcher and coordinator have threads of their own.

    signals, crew, worker channels, presence --> lifecycle.on_event --> commands --> executor

This module must never contain policy.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from typing import Literal

from swift_agent.agent import watchdog
from swift_agent.agent.executor import Executor
from swift_agent.agent.incarnations import Incarnations
from swift_agent.agent.injection.injector import injecting
from swift_agent.agent.lifecycle import commands, state
from swift_agent.agent.lifecycle import events as msg
from swift_agent.agent.lifecycle import machine as lc
from swift_agent.agent.lifecycle.drain import end_of_signal
from swift_agent.agent.lifecycle.isolation import ending_grace_s, why_not_ours
from swift_agent.agent.metrics.meters import Meters, Requests
from swift_agent.agent.patience import Patience
from swift_agent.agent.presence import Listeners, Presence
from swift_agent.agent.processes.crew import Crew
from swift_agent.agent.processes.linux import expecting_children
from swift_agent.agent.processes.workers import Workers
from swift_agent.agent.reactor import Reactor
from swift_agent.agent.record_writer import Writer
from swift_agent.agent.slurm.watch import watching
from swift_agent.agent.store_hosting import CannotHost, GenerationStores, PortTaken
from swift_agent.agent.torch_events import AgentEvents
from swift_agent.agent.worker_channels import WorkerChannels
from swift_agent.errors import JobStopped
from swift_agent.launch import host
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.directories import Directories
from swift_agent.launch.outcome import raise_outcome
from swift_agent.launch.signals import CaughtSignals, Meaning
from swift_agent.wire import messages as wire
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import ResultRecord
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.kv import KeyValueStore

log = logging.getLogger(__name__)

TICK_S = 0.5
ENDING_S = 1e6  # longer than any grace period
# The loop has heard nobody for so much longer than it waits: this process was frozen, or busy.
STOOD_S = 1.0
SUCCESS_GRACE_S = 5.0


class Agent:
    _event_s = 0.0  # when the last event was handled, monotonic
    _executor: Executor
    _presence: Presence

    def __init__(
        self, config: AgentConfig, address: str, store: KeyValueStore, directories: Directories,
        signals: CaughtSignals, requests: Requests, why_gone: Callable[[], str], all_children_are_ours: bool = False,
    ) -> None:  # fmt: skip
        """*address*: at which other nodes reach this one. *requests*: that *store* has made. *why_gone*: '' until its
        server, if that is this agent's own, has ended for good."""
        self._config, self._store, self._directories, self._signals = config, store, directories, signals
        self._why_gone, self._reactor = why_gone, Reactor()
        self._event_log = AgentEvents(config)
        self._patience = Patience(
            lambda: self._executor.probe(self._on_probed),
            lambda local_ranks: self._channels.send(local_ranks, wire.Wait(), may_skip=True),
        )
        self._crew = Crew(
            config,
            Workers(config, address, directories.standings, directories.log_counters, all_children_are_ours),
            self._reactor.selector, self._event_log, lambda: self._state, self._event, self._on_end_of,
        )  # fmt: skip
        self._channels = WorkerChannels(
            directories.socket, self._reactor.selector, self._crew.processes, self._patience, self._event,
            self._on_modules, lambda said: self._executor.kernels(said),
            lambda generation: why_not_ours(self._state, generation, self._tick(time.monotonic())),
        )  # fmt: skip
        self._stores = GenerationStores(
            address, config.key, lambda why: self._reactor.post(lambda: self._fail(why)), config.master_addr,
            config.master_port,
        )  # fmt: skip
        self._incarnations = Incarnations(
            config, store, Keys(config.job_id), address, self._listeners(), signals, why_gone
        )
        self._meters = Meters(
            config, store, requests, directories, lambda: self._state, is_away=lambda: self._presence.is_away(),
            lease_until_s=lambda: self._presence.acts_until_s(), num_standbys=lambda: self._crew.num_standbys,
        )  # fmt: skip
        self._state = state.AgentState(config.node_id, "")
        self._end: ResultRecord | None = None
        self._listened_s, self._last_tick_s = math.inf, 0.0

    # ---- life ----

    def run(self) -> Literal["succeeded", "drained"]:
        with self._event_log.until_the_agent_ends():
            try:
                self._run()
            except Exception:
                if self._end is None:
                    raise
                log.warning("the job has ended; this agent could not close all that it had opened", exc_info=True)
            assert self._end is not None
            if self._end.state == "stopped" and self._end.cause in ("operator", "preempted"):
                self._signals.raise_caught(self._end.why, self._end.cause)
            return raise_outcome(self._end, self._config)

    def _run(self) -> None:
        """Until the end of the job is known; then all of this agent is closed, as far as it can be."""
        config, post = self._config, self._reactor.post
        with contextlib.ExitStack() as stack:
            stack.enter_context(expecting_children())
            stack.callback(self._close)
            stack.enter_context(self._signals.listening(self._on_signal))
            stack.enter_context(self._meters.served())
            stack.enter_context(injecting(config, self._store, self._directories, lambda: self._state))
            stack.enter_context(watching(config, self._store, lambda: self._state))
            fail = lambda why: post(lambda: self._fail(why))  # noqa: E731
            writer = Writer(self._store, lambda why: post(lambda: self._stop(why)), fail)
            stack.callback(writer.stop)
            self._crew.warm_up()
            timers = watchdog.start(os.environ, self._directories.socket, config.job_id, self._event_log.timer)
            if timers is not None:
                stack.callback(timers.stop)
            self._executor = Executor(
                config, self._store, self._directories, writer, self._crew, self._channels, self._stores,
                state=lambda: self._state, presence=lambda: self._presence,
                doubt=lambda peer: post(lambda: self._doubt(peer)), timers="" if timers is None else timers.path,
            )  # fmt: skip
            self._begin(self._incarnations.enter())
            try:
                self._on_view(self._presence.first_view)
                while self._end is None:
                    self._turn()
            except BaseException:
                # A defect of this agent: its node must not look alive while nobody looks after its workers.
                self._crew.kill()
                self._presence.abandon()
                raise
            self._meters.enters("leaves")
            self._leave(self._end)

    def _begin(self, presence: Presence) -> None:
        """A new incarnation: it knows nothing but how often its workers were restarted."""
        config, self._presence = self._config, presence
        self._state = state.AgentState(
            config.node_id, presence.me.incarnation, config.max_restarts, config.stop_deadline_s,
            restarts_used=self._state.restarts_used, notice=self._state.notice,
            restarts_window_s=config.restarts_window_s, restarted_s=self._state.restarted_s,
        )  # fmt: skip
        self._meters.enters("runs")
        if presence.journal is not None:
            presence.journal.begin(self._state)

    def _leave(self, end: ResultRecord) -> None:
        """Stop everything local, then tell the others and remove what is ours from the store."""
        grace_s = float(SUCCESS_GRACE_S if end.state == "succeeded" else self._crew.grace_s)
        is_told = self._state.view.result is not None
        if self._signals.is_ending:
            is_told = self._executor.stop(end) or is_told
        elif not is_told and (self._state.notice is not None or not state.holds_slot(self._state)):
            grace_s = 0.0  # another node has its place, or may have it once this is written
            self._executor.flush()
        if self._config.on_etcd_loss == "pause":
            left_s = self._presence.acts_until_s() - time.monotonic()
            grace_s = ending_grace_s(grace_s, paused=self._state.paused, is_told=is_told, left_s=left_s)
        if grace_s > 0:
            # They have their time to end, in which nobody looks at the clock here.
            self._crew.vouch(time.monotonic() + ENDING_S)
            self._crew.signal(signal.SIGCONT)  # SIGTERM alone does not wake who is paused
        elif self._state.paused:
            log.warning("the paused workers of this node are killed: another node may have their places by now")
        self._crew.dismiss(end, grace_s, in_hurry=lambda: self._signals.is_in_hurry)
        self._executor.flush()
        self._presence.leave()

    def _close(self) -> None:
        """Whatever happens in one of these, the others are done."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._reactor.close)
            stack.callback(self._stores.close)
            stack.callback(self._crew.close)
            stack.callback(self._channels.close)

    def _turn(self) -> None:
        """Wait for something to happen and handle it."""
        ready = self._reactor.wait(TICK_S)
        before_s, self._listened_s = self._listened_s, time.monotonic()
        if self._listened_s - before_s > TICK_S + STOOD_S:
            self._on_standstill(self._listened_s - before_s - TICK_S)
        self._reactor.handle(ready)
        now_s = time.monotonic()
        self._meters.turned(now_s)
        if now_s - self._last_tick_s >= TICK_S:
            self._last_tick_s = now_s
            if why := self._why_gone():
                self._stop(why)
            self._patience.tick(now_s)
            self._channels.tick(now_s, self._state.stop_deadline_s, self._state.paused)
            if self._stores.is_due(self._state.view.number):
                self._host_stores(self._state.view.number)
            self._crew.tick(now_s)
            self._presence.tick()
            self._event(self._tick(now_s))
            self._vouch()
            self._event(msg.RateTick())

    def _on_standstill(self, for_s: float) -> None:
        """Before anything that has come meanwhile is handled: nobody is late for what was not heard."""
        self._channels.put_off(for_s)
        self._crew.put_off(for_s)
        self._event(msg.StoodStill(for_s))

    # ---- whether the place of this node is its own ----

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
            self._crew.vouch(until_s)
        if not self._state.paused:
            self._crew.wake_standing()

    # ---- what happens ----

    def _listeners(self) -> Listeners:
        """What the threads of a presence tell, handed to this one."""

        def post(incarnation: str, action: Callable[[], None]) -> None:
            self._reactor.post(lambda: action() if incarnation == self._state.incarnation else None)

        return Listeners(
            view=lambda view: self._reactor.post(lambda: self._on_view(view)),
            peer_lost=self._on_peer_lost,
            lease_lost=lambda incarnation, why: post(incarnation, lambda: self._on_lease_lost(why)),
            reclaimed=lambda incarnation: post(incarnation, self._on_reclaimed),
            place_lost=lambda incarnation, why: post(incarnation, lambda: self._on_place_lost(why)),
            failed=lambda incarnation, why: post(incarnation, lambda: self._fail(why)),
            place_read=lambda incarnation, at: post(incarnation, lambda: self._event(msg.PlaceRead(at))),
        )

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
        self._crew.prepare_standbys()
        self._stores.close_before(view.recovered)
        self._executor.saw(view, self._presence.coordinator.acting)
        self._meters.saw(view, time.monotonic())

    def _on_peer_lost(self, incarnation: str, evidence: str, is_dead: bool) -> None:
        """In the thread that has seen it."""
        seen_s = time.monotonic()
        self._reactor.post(
            lambda: self._event(msg.PeerLost(incarnation, evidence, is_dead, time.monotonic() - seen_s))
        )

    def _doubt(self, incarnation: str) -> None:
        self._event(msg.PeerDoubted(incarnation))
        self._presence.liveness.reconsider(incarnation)

    def _on_lease_lost(self, why: str) -> None:
        if self._end is None:
            log.warning("the lease of %s was lost (%s): asking for another one", self._config.node_id, why)
            self._presence.reclaim()

    def _on_reclaimed(self) -> None:
        log.info("node %s is back in its place; its workers were not disturbed", self._config.node_id)
        for peer in tuple(self._state.lost_peers):
            self._doubt(peer)  # seen while nothing could be written: look again whether it is true
        self._event(msg.PlaceReclaimed())

    def _on_place_lost(self, why: str) -> None:
        if self._end is None:
            self._rejoin(f"the lease of {self._config.node_id} was lost: {why}")

    def _on_probed(self, held: bool) -> None:
        """In the writer's thread."""
        self._reactor.post(self._patience.proved if held else self._patience.failed)

    def _on_end_of(self, local_rank: int) -> None:
        self._channels.hear_out(local_rank)
        self._patience.settled(local_rank)

    def _on_modules(self, local_rank: int, names: tuple[str, ...]) -> None:
        """What the script has imported is imported ahead by this node's standbys, and by spares. One rank's list is
        enough."""
        generation, key = self._state.view.generation, self._config.key
        if local_rank != 0:
            return
        self._crew.has_imported(names)
        if key.protected and generation is not None and generation.slot_of(self._state.incarnation) == 0:
            self._executor.imported(key.signed_modules(names))

    def _on_signal(self, received: signal.Signals, meaning: Meaning) -> None:
        why, grace_s = f"node {self._config.node_id} got {received.name}", self._config.preempt_grace_s
        if meaning == "notice":
            noticed = msg.Noticed(received.name, grace_s, time.monotonic() + grace_s)
            self._reactor.post_in_signal_handler(lambda: self._event(noticed))
        else:
            self._reactor.post_in_signal_handler(lambda: self._on_end_wanted(why, meaning == "hurry"))

    def _on_end_wanted(self, why: str, in_hurry: bool) -> None:
        if self._end is None:
            line, self._end = end_of_signal(self._state.view, self._state.incarnation, why, in_hurry)
            log.info("%s", line)

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
        match command:
            case commands.HostStore(generation):
                self._host_stores(generation)
            case commands.Rejoin(why):
                self._rejoin(why)
            case commands.LeaveJob(result):
                log.log(logging.INFO if result.state == "succeeded" else logging.WARNING, "%s", result.why)
                self._end = result
            case commands.EndJob():
                self._end = self._state.view.result
            case _:
                self._executor.execute(command, self._event_s)

    def _host_stores(self, generation: int) -> None:
        try:
            record = self._stores.host(generation, time.monotonic())
        except PortTaken as error:
            self._executor.stop(ResultRecord("stopped", str(error)))
            self._stop(str(error))
        except CannotHost as error:
            self._rejoin(str(error))
        else:
            if record is not None:
                self._executor.stores_listen(generation, record)

    def _rejoin(self, why: str) -> None:
        """Come back under a new incarnation, as a spare, as soon as the store lets us."""
        log.warning("%s; its workers are ended and it comes back as a spare", why)
        self._meters.enters("comes back")
        self._channels.drop_all()
        self._crew.abandon()
        self._patience.clear()
        back = self._incarnations.come_back(self._presence)
        if isinstance(back, ResultRecord):
            self._end = back
            return
        self._begin(back)
        self._on_view(back.first_view)

    def _stop(self, why: str) -> None:
        if self._end is None:
            log.info("%s: the job ends here", why)
            self._end = ResultRecord("stopped", why)

    def _fail(self, why: str) -> None:
        """A thread without which this agent is of no use has ended. The other nodes act at once."""
        if self._end is None:
            raise JobStopped(f"the agent of node {self._config.node_id} ends: {why}")
