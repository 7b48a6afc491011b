"""Carries out what the core has decided, one command at a time: processes, messages to workers, records in etcd.

    command --> crew: start, end, signal
            --> channels: what a worker is told
            --> writer: a record, fenced by generation and incarnation, dropped once it is not true any more

Commands that end or move the agent itself are the loop's. This module must never decide anything.
"""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from swift_agent.agent import transactions
from swift_agent.agent.lifecycle import commands, helping, rate, strategy, timeline
from swift_agent.agent.lifecycle.machine import EVIDENCE_S
from swift_agent.agent.lifecycle.state import AgentState, is_spare
from swift_agent.agent.patience import probe
from swift_agent.agent.presence import Presence
from swift_agent.agent.processes.crew import Crew, placement
from swift_agent.agent.record_writer import Write, Writer
from swift_agent.agent.store_hosting import GenerationStores
from swift_agent.agent.worker_channels import WorkerChannels
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.directories import Directories
from swift_agent.launch.outcome import limit_of
from swift_agent.wire import messages as wire
from swift_agent.wire.environment import Placement, run_name, share_of
from swift_recovery.transfer import node_paths
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import KernelsRecord, ProfileRecord, RateRecord, ResultRecord, StoreRecord
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.kv import KeyValueStore

log = logging.getLogger(__name__)

# For the last records of this agent to be written.
LEAVE_TIMEOUT_S = 3.0


class Executor:
    """*state*, *presence*: the agent's, as of now; also asked in the writer's thread. *doubt* is called there with an
    incarnation whose loss has come too late to be written. *timers*: the pipe of `watchdog`, '' for none."""

    def __init__(
        self, config: AgentConfig, store: KeyValueStore, directories: Directories, writer: Writer, crew: Crew,
        channels: WorkerChannels, stores: GenerationStores, *, state: Callable[[], AgentState],
        presence: Callable[[], Presence], doubt: Callable[[str], None], timers: str,
    ) -> None:  # fmt: skip
        self._config, self._store, self._keys = config, store, Keys(config.job_id)
        self._directory, self._message_log, self._timers = directories.socket, directories.messages, timers
        self._writer, self._crew, self._channels, self._stores = writer, crew, channels, stores
        self._state, self._presence, self._doubt = state, presence, doubt
        self._started_s, self._limit_told, self._timeline = time.time(), False, timeline.Timeline()
        self._profiled_in = 0  # the generation in which this agent has written the profile
        self._refined: tuple[int, ProfileRecord] | None = None  # the same, of what was measured since, and that
        self._known_profile: ProfileRecord | None = None
        self._heard: wire.Kernels | None = None  # of the ranks of the newest generation that has trained here
        self._began_in, self._began_s = 0, dict[int, float]()  # a generation; when iterations began in it, Unix time

    def execute(self, command: commands.Command, at_s: float) -> None:
        """*at_s*: when the event came that *command* follows from, monotonic."""
        state, presence = self._state(), self._presence()
        transaction = transactions.transaction_of(command, self._keys, state.view, presence.me)
        match command:
            case commands.StartWorkers(local_ranks, _, warm):
                self._start(local_ranks, warm)
            case commands.KillWorkers(local_ranks, why, graceful):
                log.info("ending local ranks %s: %s", list(local_ranks), why)
                for local_rank in local_ranks:
                    self._crew.end(local_rank, graceful)
            case commands.StartHelper(number, rank, _):
                self._start_helper(number, rank)
            case commands.KillHelper(number, rank, why):
                log.info("helper %d of rank %d is ended: %s", share_of(number), rank, why)
                self._crew.kill_helper(number)
            case commands.SendHelp(number, generation):
                self._channels.send((number,), replace(self._go_message(generation), share=share_of(number)))
            case commands.SendStop(local_ranks, generation, why):
                self._channels.send(local_ranks, wire.Stop(generation, why))
            case commands.SendGo(local_ranks, generation):
                self._channels.send(local_ranks, self._go_message(generation))
            case commands.SendLeave(local_ranks, generation):
                self._channels.send(local_ranks, replace(self._go_message(generation), leaves=True))
            case commands.SendKeep(local_ranks, generation):
                node_paths.remove(self._directory, but=state.kept.iteration if state.kept else -1)
                self._channels.send(local_ranks, replace(self._go_message(generation), keeps=True))
            case commands.DropKept():
                node_paths.remove(self._directory)
            case commands.SendPause(local_ranks, generation):
                self._channels.send(local_ranks, wire.Pause(generation))
            case commands.SendBoundary(local_ranks, generation, iteration, saves):
                self._channels.send(local_ranks, wire.Boundary(generation, iteration, saves))
            case commands.SendLogGroup(local_ranks, ranks):
                self._channels.send(local_ranks, wire.LogGroup(ranks))
            case commands.AskIteration(local_ranks):
                self._channels.send(local_ranks, wire.Where())
            case commands.TellRate(generation, iteration, per_s, began_s):
                self._mark(generation, began_s)
                self._write_rate(RateRecord(iteration, per_s, generation, time.time()))
            case commands.SendRelease(local_ranks):
                self._channels.send(local_ranks, wire.Release())
            case commands.WriteFailure(generation, failure):
                lost = "" if failure.kind == "again" else f"lost {failure.kind}: "
                log.info("generation %d: %s%s", generation, lost, failure.evidence)
            case commands.TellNotice(received, grace_s):
                log.warning(
                    "node %s got %s: a spare takes its place as soon as there is one; without one it leaves after "
                    "%g s (--preempt-grace). Another signal ends the job", presence.me.node_id, received, grace_s,
                )  # fmt: skip
                notice = transactions.notice(self._keys, state.view, presence.me, received, grace_s, time.time())
                self._write(notice)
            case commands.ForgetSpare(node_id, incarnation):
                if incarnation in state.lost_peers:
                    log.info("spare node %s is lost: %s", node_id, state.lost_peers[incarnation].evidence)
            case commands.LookAgain(incarnation):
                presence.liveness.reconsider(incarnation)
            case commands.Reclaim():
                presence.reclaim()
            case commands.PauseWorkers(why):
                if is_spare(state):
                    log.warning(
                        "%s. This node is a spare, and has nothing to lose; should it get a place before etcd answers, "
                        "its workers wait for that. Bring etcd, or the way to it, back", why,
                    )  # fmt: skip
                else:
                    log.warning(
                        "%s. The workers of this node are paused before another node can get their places. Nothing is "
                        "lost: they go on when etcd answers and the places are still theirs, else they are ended. "
                        "Bring etcd, or the way to it, back (or start with --on-etcd-loss train to go on regardless)",
                        why,
                    )
                self._crew.signal(signal.SIGSTOP)
            case commands.ReadPlace():
                presence.read_place()
            case commands.ResumeWorkers():
                if is_spare(state):
                    log.info("etcd answers: this spare takes a place at once again")
                else:
                    log.info("nobody else has the places of this node: its workers are not paused any more")
                self._crew.signal(signal.SIGCONT)
        if transaction is not None:
            self._write(transaction, at_s)

    # ---- workers ----

    def _start(self, local_ranks: tuple[int, ...], warm: bool) -> None:
        generation = self._state().view.generation
        assert generation is not None
        slot = generation.slot_of(self._state().incarnation)
        assert slot is not None
        self._crew.start(self._placement(slot), local_ranks, warm)

    def _start_helper(self, number: int, rank: int) -> None:
        generation = self._state().view.generation
        assert generation is not None
        self._crew.start_helper(self._placement(generation.slot_with(rank)), number)

    def _placement(self, slot: int) -> Placement:
        place = placement(
            self._config,
            self._state().view,
            slot,
            socket_path=self._channels.path,
            message_log="" if self._config.strategy in ("replica", "checkpoint") else self._message_log,
            timers=self._timers,
            run=run_name(self._presence().job, self._started_s if self._config.etcd is None else None),
        )
        # What the last ones here computed with is known better than what the first ones did, and told.
        heard, ranks = self._heard, range(place.rank(0), place.rank(0) + place.num_workers)
        if heard is None or len(heard.of) != place.num_ranks:
            return place
        return replace(place, computed=tuple(heard.texts[heard.of[rank]] for rank in ranks))

    def _go_message(self, number: int) -> wire.Go:
        view = self._state().view
        assert view.plan is not None and view.store is not None and view.generation is not None
        store, token = view.store, self._stores.token(number, view.store)
        stores = wire.Store(store.host, store.port, store.session_port, token)
        return wire.Go(
            number, view.plan.content, view.generation.world_size, stores, kept=self._directory,
            helpers=len(helping.helpers_of(view)),
        )  # fmt: skip

    # ---- records ----

    def stores_listen(self, generation: int, record: StoreRecord) -> None:
        """Have it written where this node hosts the stores of *generation*."""
        view, me = self._state().view, self._presence().me
        self._write(transactions.hosted_store(self._keys, view, me, generation, record))

    def imported(self, modules: Sequence[str]) -> None:
        """Have it written what standbys of all nodes import ahead; *modules* are signed."""
        self._write(transactions.preload(self._keys, self._state().view, self._presence().me, modules))

    def kernels(self, said: wire.Kernels) -> None:
        """Have it written what all ranks compute with, unless it was known before of a job of this size."""
        self._heard, known = said, self._state().view.kernels
        if known is None or len(known.of) != len(said.of):
            record = KernelsRecord(said.texts, said.of)
            self._write(transactions.kernels(self._keys, self._state().view, self._presence().me, record))

    def saw(self, view: View, acting: bool) -> None:
        """The job has changed: tell people what is new, which the coordinator, *acting* here, does for all."""
        if view.tracked and view.generation is not None and not self._limit_told:
            self._limit_told = True
            if view.generation.number == 1 and acting:
                log.info("%s", limit_of(self._config))
        self._measured(view, acting)
        phases = self._timeline.observe(view, time.monotonic())
        if phases is not None and acting:
            self._recovered(view, phases)

    def _recovered(self, view: View, phases: Mapping[str, float]) -> None:
        """Have the recovery that is over told, and written into the history."""
        assert view.generation is not None and view.plan is not None
        predicted = strategy.predicted(view)
        log.info(
            "recovered: generation %d goes on at iteration %d: %s%s",
            view.generation.number,
            transactions.resumed_iteration(view),
            timeline.describe(dict(phases)),
            "" if predicted is None else f" (by {predicted.way}: {predicted.seconds * 1000:.0f} ms were predicted)",
        )
        seconds = None if predicted is None else predicted.seconds
        self._write(transactions.recovered(self._keys, view, self._presence().me, phases, time.time(), seconds))
        if (record := strategy.after(view, strategy.errors_of(view, phases))) is not None:
            self._write(transactions.profiled(self._keys, view, self._presence().me, record))

    def _measured(self, view: View, acting: bool) -> None:
        """Have it told how the job recovers, once all its workers have been measured, and what that costs again when
        nothing is left to be measured: *acting*, by this coordinator."""
        known = view.profile
        if acting and known is None and self._profiled_in < view.number:
            self._profile(view, strategy.decide(view, self._config.job_id))
        elif acting and (refined := strategy.refine(view, self._config.job_id)) is not None:
            self._refine(view, refined)
        told = self._known_profile
        if known is None or (told is not None and (told.lines, told.content) == (known.lines, known.content)):
            return
        if self._profiled_in:
            # Of what is told again only what is new.
            for line in known.lines if told is None else strategy.told_again(known, told):
                log.info("%s", line)
        self._known_profile = known
        if self._config.profile is not None:
            try:
                Path(self._config.profile).write_text(json.dumps(known.content, indent=2) + "\n")
            except OSError as error:
                log.warning("--profile %s: cannot be written: %s", self._config.profile, error.strerror or error)

    def _profile(self, view: View, record: ProfileRecord | None) -> None:
        if record is not None:
            # A failure may come first: then it is not written, but in the next generation.
            self._profiled_in = view.number
            self._write(transactions.profiled(self._keys, view, self._presence().me, record))

    def _refine(self, view: View, record: ProfileRecord) -> None:
        """Once, but if something else has been written into the same record meanwhile."""
        if self._refined != (view.number, record):
            self._refined = view.number, record
            self._profile(view, record)

    def probe(self, answered: Callable[[bool], None]) -> None:
        """Write something that changes nothing, to see whether the store takes it: see `patience`. *answered* is
        called in the writer's thread."""
        state, presence = self._state(), self._presence()
        incarnation, job = state.incarnation, state.view.job
        assert job is not None
        guards, ops = probe(self._keys, job, presence.job, presence.me)
        is_current = lambda: self._state().incarnation == incarnation  # noqa: E731
        self._writer.submit(Write("probe", guards, ops, is_current, lambda: answered(False), answered))

    def stop(self, result: ResultRecord) -> bool:
        """Tell the other nodes that the job ends, unless this one is an unneeded spare, or was given up.
        Returns whether etcd has that."""
        state = self._state()
        generation = state.view.generation
        if generation is not None and generation.slot_of(state.incarnation) is None:
            return False
        last = transactions.stop(self._keys, self._presence().me, result)
        held: list[bool] = []
        self._writer.submit(Write(last.what, last.guards, last.ops, wanted=lambda: True, answered=held.append))
        self._writer.flush(LEAVE_TIMEOUT_S)
        if held != [False]:
            return held == [True]
        try:
            return self._store.get(self._keys.result) is not None  # another node was first, or this one was given up
        except RendezvousError:
            return False

    def flush(self) -> None:
        self._writer.flush(LEAVE_TIMEOUT_S)

    def _mark(self, generation: int, began_s: Mapping[int, float]) -> None:
        known = self._began_s if generation == self._began_in else {}
        to_unix_s = time.time() - time.monotonic()
        more = {iteration: round(at_s + to_unix_s, 3) for iteration, at_s in began_s.items()}
        self._began_in, self._began_s = generation, rate.thinned({**known, **more})

    def _write_rate(self, record: RateRecord) -> None:
        presence = self._presence()
        late_s = time.monotonic() + rate.TELL_S
        told = transactions.rate(
            self._keys, self._state().view, presence.me, record, self._began_s, presence.lease_id
        )
        self._writer.submit(Write(told.what, told.guards, told.ops, lambda: time.monotonic() < late_s))

    def _write(self, transaction: transactions.Transaction, at_s: float = 0.0) -> None:
        """Have it written; it is dropped once the generation is over.

        A node that was cut off has seen all others vanish. When it can write again that is not true any more, so what
        was seen too long ago is not written but looked at again.
        """
        state = self._state()
        number, incarnation = state.view.number, state.incarnation
        what, guards, ops, peer = transaction.what, transaction.guards, transaction.ops, transaction.lost_peer
        seen = None if peer is None else state.lost_peers.get(peer)
        if peer is not None and seen is None:
            return  # a command before this one took so long that it has aged, and is looked at again
        # On the clock of the writer's thread.
        seen_s = time.monotonic() - (0.0 if seen is None else at_s - seen.seen_s)

        def is_current() -> bool:
            now = self._state()
            return now.view.number == number and now.incarnation == incarnation

        def is_fresh() -> bool:
            return is_current() and time.monotonic() - seen_s < EVIDENCE_S

        if peer is None:
            write = Write(what, guards, ops, is_current)
        else:
            doubt = lambda: self._doubt(peer)  # noqa: E731
            write = Write(what, guards, ops, is_fresh, dropped=doubt, read_first=self._keys.generation)
        self._writer.submit(write)
