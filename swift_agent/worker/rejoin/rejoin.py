"""Carries out a plan in one worker: connect, get the state or hand it on, compare, go on.

    wait for a generation --> rebuild groups --> layouts --> state, logs --> checksums --> messages --> live
              ^                    |  a peer fails meanwhile  |                  |             |
              '--------------------'--------------------------'------------------'-------------'

Where messages are logged, a rank that is in the middle of an iteration stays there, if the plan says so.

Every step may be cut by the next failure; then it begins again with the next generation. Until a receiver has all of a
state it keeps what it had (a survivor) or holds nothing (a replacement), so a cut transfer never spoils a source.

This module must never decide who gets what from whom; that is the plan's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from swift_agent.errors import CannotConnect, PeerFailure, ReplicaMismatch, SwiftError
from swift_agent.torch_private.ddp import Layout
from swift_agent.torch_private.errors import is_of_connection
from swift_agent.wire import messages as msg
from swift_agent.wire.store_client import StoreClient
from swift_agent.worker.groups.errors import GroupsAborted, RebuildFailed, WornOut
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.line.go import Go
from swift_agent.worker.rejoin import handover
from swift_agent.worker.rejoin.replays import Replays
from swift_agent.worker.rejoin.waits import Waits
from swift_agent.worker.rejoin.witness import Witnesses
from swift_agent.worker.replicas.fingerprints import Fingerprints
from swift_agent.worker.replicas.kernels import Kernels
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.tracked import Tracked
from swift_agent.worker.updates.overlapped import OverlappedUpdates
from swift_agent.worker.updates.parts import Resumption
from swift_logging_store.errors import LinkLost
from swift_recovery.checkpoint.writer import CheckpointError
from swift_recovery.errors import CannotReplay, TransferError
from swift_recovery.planning.plan import Plan
from swift_recovery.state.deviation import Fingerprint, all_differences, because_of_machines, describe
from swift_recovery.transfer import node_file
from swift_recovery.transfer.replica import GroupLink, receive, receive_state, send_state

# The longest that connections take once all ranks have come.
CONNECT_TIMEOUT = timedelta(minutes=10)


class Rejoin:
    """One object per worker. *phases_s*: seconds per phase of the last successful run; *iteration*: its plan's.

    *wait_quiet* returns when nothing of stopped groups touches a tensor any more.
    """

    def __init__(
        self, place: Place, supervisor: Supervisor, groups: ProcessGroups, tracked: Tracked, device: torch.device,
        wait_quiet: Callable[[], None], witnesses: Witnesses | None = None, kernels: Kernels | None = None,
    ) -> None:  # fmt: skip
        self._place, self._supervisor, self._groups, self._tracked = place, supervisor, groups, tracked
        self._device, self._wait_quiet, self._witnesses, self._kernels = device, wait_quiet, witnesses, kernels
        self.phases_s: dict[str, float] = {}
        self.iteration = 0
        self._waits = Waits(place, supervisor, groups)
        self._replays = Replays(place, supervisor, groups, tracked, device, self._waits)

    def run(self, *, staying: bool = False) -> bool:
        """Return True when this worker is live in the newest generation, with the state that its plan says. *staying*:
        in the middle of an iteration; False, with nothing entered, if that has to be started over. A replacement that
        repeats iterations by itself may return when it is cut, and joins the others after them."""
        while True:
            go = self._supervisor.peek_go()
            if staying and not self.accepts(go):
                return False
            if not self._supervisor.enter_go(go):
                continue
            if go.share:
                self._help(go)
                return True
            try:
                if go.leaves or go.keeps:
                    (self._hand_over if go.leaves else self._keep)(go)
                    continue  # there may be no more to come, or it is asked again
                self._enter(go)
                if not self._supervisor.interrupted or (self._place.replays and self._place.replays_alone):
                    return True
            except (GroupsAborted, RebuildFailed, PeerFailure, dist.DistError, TransferError, RuntimeError) as error:
                ours = isinstance(error, (SwiftError, CannotReplay, CheckpointError))
                if ours and not isinstance(error, PeerFailure):
                    raise
                if not self._hears_of_another(error):
                    raise
                del error  # its traceback holds tensors of the cut transfer
                self._wait_quiet()
                if self._place.replays and self._place.replays_alone:
                    self.iteration = self._place.replays_before
                    return True

    def end_replay(self) -> None:
        """This replacement has repeated all iterations before that of the others, and tells them. Raises `LostLog`,
        `CannotReplay`."""
        self._replays.end()

    def _hears_of_another(self, error: Exception) -> bool:
        """Whether there is, or will be, another generation to enter; False: the error is this process's own."""
        if not isinstance(error, (RebuildFailed, TransferError)):
            if not (self._supervisor.interrupted or _may_be_of_a_peer(error)):
                return False  # all others wait for this rank meanwhile
            return self._supervisor.confirm(error)
        if isinstance(error, WornOut) or not self._supervisor.reconnect(error):
            raise CannotConnect(str(error)) from error
        return True

    def accepts(self, go: Go) -> bool:
        """Whether this worker stays where it is: in the middle of the plan's iteration, or after the update of the one
        before."""
        place, plan = self._place, go.plan
        here = place.here.iteration + self._tracked.updates.updated
        is_here = plan.kind == "copy" and plan.stays and plan.iteration == here
        return is_here and not place.replays and place.rank not in plan.sources and not go.leaves and not go.keeps

    def _enter(self, go: Go) -> None:
        place, plan = self._place, go.plan
        if plan.kind != "copy":
            raise SwiftError(f"generation {go.generation} asks a running worker to start over ({plan.why})")
        clock = _Clock()
        leads = place.rank not in plan.layouts
        layouts = self._tracked.layouts_for(plan.iteration) if leads else None
        # Who repeats iterations by itself does so to their end first, and set-up may take long.
        note = self._supervisor.note
        self._groups.rebuild(go.session_store, go.generation, CONNECT_TIMEOUT, go.token, meets=note)
        if self._witnesses is not None:
            self._witnesses.enter(self._groups.store, asks=place.status == "empty")
        clock.mark("regroup")
        self._tracked.restore_layouts(self._agree_on_layouts(plan, layouts))
        self._exchange_state(go)
        clock.mark("transfer")
        self._compare(plan)
        if place.owed is not None:
            self._tracked.rewind()  # it will be run after all, and sends what it had sent
        self._supervisor.send(msg.Holds())
        clock.mark("verify")
        self._replays.go_on(go)
        self._replays.wait(plan)
        if plan.replays:
            clock.mark("others repeat")
        self._replays.close()
        self._pay_debt(plan.iteration)
        place.dry_sections = max(place.dry_sections, plan.sections)
        self.phases_s, self.iteration = clock.phases_s, plan.iteration

    def _agree_on_layouts(self, plan: Plan, mine: list[Layout | None] | None) -> list[Layout | None]:
        """All ranks must reduce the same buckets in the same order, else sums differ, or gloo ends the process."""
        if not self._tracked.keepers:
            return []
        store = PrefixStore("layouts", self._groups.store)
        if mine is not None:
            store.set(str(self._place.rank), json.dumps(mine))
            return mine
        content: list[Layout | None] = json.loads(store.get(str(plan.layouts[self._place.rank])))
        return content

    def _hand_over(self, go: Go) -> None:
        """On a drained node: give the state to the successor of this rank. It is kept until this process ends."""
        if self._place.rank not in go.plan.handovers:
            return
        store = StoreClient(*go.session_store, go.token, CONNECT_TIMEOUT)
        try:
            layouts = self._tracked.layouts_for(go.plan.iteration)
            with handover.offered(store, self._place.rank, layouts, self._supervisor.check) as link:
                send_state(self._tracked.state, self._place.offer(), [link])
        finally:
            store.close()

    def _help(self, go: Go) -> None:
        """This process only helps another one of its rank to repeat iterations, and is in no group."""
        store = StoreClient(*go.session_store, go.token, CONNECT_TIMEOUT)
        self._replays.help(go, store)
        self.iteration = go.plan.iteration

    def _keep(self, go: Go) -> None:
        updates = self._tracked.updates
        if isinstance(updates, OverlappedUpdates) and (said := updates.take_back(updates.done)):
            self._supervisor.note(f"update {go.plan.iteration}: {said}")
        try:
            node_file.keep(go.kept, go.plan.iteration, self._tracked.state, self._place.offer())
        except OSError as error:
            # Nothing has failed but the disk: another node may have room.
            why = f"its state cannot be kept in {go.kept} ({error.strerror or error}): TMPDIR needs room for one copy"
            self._supervisor.send(msg.Unfit(why))
            return
        self._supervisor.send(msg.Kept(go.plan.iteration, go.plan.sections))

    def _exchange_state(self, go: Go) -> None:
        place, state, plan = self._place, self._tracked.state, go.plan
        place.put_back_arrived()
        if place.rank in plan.handovers:
            # First: it may be a source for others then.
            with handover.from_predecessor(self._groups.store, place.rank, self._supervisor.check) as predecessor:
                place.take_over(receive_state(state, predecessor, staged=False), plan.iteration)
        if place.rank in plan.loads:
            place.take_over(node_file.load(go.kept, plan.iteration, self._tracked.state), plan.iteration)
        self._replays.exchange(go)
        self._expect(plan)
        self._mend(plan)
        targets = plan.targets_of(place.rank)
        if targets:
            if place.rank in plan.brought:
                self._waits.tell("brought")
            send_state(state, place.offer(), [self._link(target) for target in targets])
        if place.rank not in plan.sources:
            return
        source = plan.sources[place.rank]
        if source in plan.brought:
            # Until it has the state itself; longer than an operation of the groups has time.
            self._waits.wait_for("brought", [source], "have not got their state yet")
        link = self._link(source)
        skips = place.owed is not None and place.owed.iteration < plan.iteration
        mixed = self._tracked.updates.mixed
        here = max(place.here.iteration, place.dry_iterations)
        if place.status == "holding" and not skips and not mixed and here == plan.iteration:
            place.adopt(receive(state, link, staged=True).commit)
        elif place.status == "holding" and (skips or not mixed):
            place.roll_forward(plan.iteration, receive(state, link, staged=True).commit)
        else:
            place.take_over(receive_state(state, link, staged=False), plan.iteration)

    def _expect(self, plan: Plan) -> None:
        """Of the state that is about to come, from any rank: what the iteration that is repeated must leave out."""
        rank, deviation, updates = self._place.rank, plan.deviation, self._tracked.updates
        if isinstance(updates, OverlappedUpdates):
            silent = set(deviation.silent).intersection(self._tracked.replicas)
            numbers = frozenset(deviation.resumed.get(rank, ()))
            updates.expect(Resumption(numbers, rank in silent, len(silent)))

    def _mend(self, plan: Plan) -> None:
        """Leave a half-done update, forward or back; what is whole here already stays as it is."""
        place, updates = self._place, self._tracked.updates
        if isinstance(updates, OverlappedUpdates):
            if place.rank in plan.undone and (said := updates.take_back(plan.undone[place.rank])):
                self._supervisor.note(f"update {plan.iteration}: {said}")
            is_forward = plan.iteration > place.here.iteration or place.rank in plan.deviation.resumed
            for patch in plan.patches:
                if place.rank == patch.source:
                    links = [self._link(target) for target in patch.targets]
                    send_state(updates.patch_of(patch.parameters), None, links)
                elif place.rank in patch.targets:
                    incoming = receive(updates.patch_of(patch.parameters), self._link(patch.source), staged=True)
                    updates.install(patch.parameters, incoming, updated=is_forward)
            with place.lock:
                if place.rank in plan.deviation.keeps:
                    updates.settle()
                elif place.rank not in plan.sources:
                    updates.resume()
            owes = place.owed is not None and place.owed.iteration < plan.iteration
            if owes and place.rank not in plan.sources:
                place.roll_forward(plan.iteration, lambda: None)

    def _compare(self, plan: Plan) -> None:
        """Parameters and optimizer state must be equal on all replicas before training goes on."""
        mine, carried = self._tracked.checksum(), self._place.carried
        if plan.receivers:
            # A copy takes longer than an operation of the groups has time, and others have nothing to do meanwhile.
            if self._place.rank in plan.receivers:
                self._waits.tell("received")
            self._waits.wait_for("received", plan.receivers, "have not got their state yet")
        everyone = self._groups.all_gather_ints([mine, carried, self._kernels.checksum if self._kernels else 0])
        if self._kernels is not None:
            self._kernels.compare(self._groups.store, [told[2] for told in everyone])
        replicas = self._tracked.replicas
        if any(everyone[rank][0] != mine for rank in replicas):
            # A copy has nothing to do with rounding.
            copied = {rank: source for rank, source in plan.sources.items() if rank in replicas}
            has_copies = all(everyone[rank][0] == everyone[source][0] for rank, source in copied.items())
            self._judge_differences(may_round=has_copies)
        others = [rank for rank in self._tracked.replicas if everyone[rank][1] != carried]
        self._place.gradients_differ = bool(others)
        if others:
            self._tracked.watch_gradients()

    def _judge_differences(self, *, may_round: bool) -> None:
        """All replicas tell each other what they hold. Raises `ReplicaMismatch`, unless they only round otherwise, if
        they *may*: of that the comparison tells that follows."""
        store = PrefixStore("prints", self._groups.store)
        mine = replace(
            Fingerprints(self._tracked.state).take(whole=True), differed=self._tracked.differed_after,
            computes=self._tracked.computes, rounded=self._tracked.rounded,
        )  # fmt: skip
        store.set(str(self._place.rank), json.dumps(mine.to_json()))
        told = {rank: json.loads(store.get(str(rank))) for rank in self._tracked.replicas}
        prints = {rank: Fingerprint.from_json(data) for rank, data in told.items()}
        strict = [one for one in all_differences(prints) if one.kind != "buffer"]
        if may_round and because_of_machines(prints, [one for one in strict if one.kind in ("parameter", "state")]):
            return  # what else differs is in no checksum
        since = max(one.differed for one in prints.values())
        when = f", as they did after iteration {since}, before anything had failed" if since else " after the recovery"
        raise ReplicaMismatch(f"replicas differ{when}: {describe(strict) or 'their checksums'}")

    def _pay_debt(self, iteration: int) -> None:
        """An update that was promised by a replica which is lost as well is made after all."""
        owed = self._place.owed
        if owed is None:
            return
        if owed.iteration != iteration:
            raise SwiftError(
                f"rank {self._place.rank} waits for iteration {owed.iteration + 1}, the plan has {iteration}"
            )
        owed.run()

    def _link(self, peer: int) -> GroupLink:
        group = dist.group.WORLD
        assert group is not None
        # NCCL makes a communicator for these two. To make that of all ranks first, and send over it, takes longer.
        device = torch.device("cpu") if dist.get_backend() != "nccl" else self._device
        return GroupLink(group, peer, device)


def _may_be_of_a_peer(error: Exception) -> bool:
    return isinstance(error, (PeerFailure, GroupsAborted, LinkLost)) or is_of_connection(error)


class _Clock:
    """Seconds per phase."""

    def __init__(self) -> None:
        self.phases_s: dict[str, float] = {}
        self._last_s = time.monotonic()

    def mark(self, phase: str) -> None:
        now_s = time.monotonic()
        self.phases_s[phase] = now_s - self._last_s
        self._last_s = now_s
