"""The shell around `membership`: elects itself, decides, writes, and can be replaced in the middle of any of it.

Every agent runs one. All but one only watch: the coordinator is the agent whose record is in the `coordinator` key, and
everything it writes is one transaction that compares the revision of that key. A coordinator that was frozen or cut off
and comes back therefore writes nothing. It keeps no state of its own besides the start of a wait.

This module must never contain policy; that is in `membership` (which nodes) and the planner it is given (what state).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from swift_rendezvous.codec import encode
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.roster import kinds
from swift_rendezvous.roster.decision import (
    Command,
    Decision,
    ForgetDrain,
    ForgetNode,
    PublishGeneration,
    PublishLoss,
    PublishPause,
    PublishPlan,
    PublishRelease,
    PublishResult,
    Rules,
)
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.losses import absent_handovers, absentees, believed_failures, changes_of, losses, missing
from swift_rendezvous.roster.membership import decide, stage_of
from swift_rendezvous.roster.mending import RemoveDamaged, RestoreGeneration, RestoreJob
from swift_rendezvous.roster.records import (
    CoordinatorRecord,
    EventRecord,
    GenerationRecord,
    NodeRecord,
    PlanRecord,
)
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.kv import Compare, Delete, DeletePrefix, KeyValueStore, Op, Put
from swift_rendezvous.threads import OnFailure, only_logged, start, thread

log = logging.getLogger(__name__)

# From the generation, and what is known: what its owners' workers hold, and those of drained former owners.
Planner = Callable[[GenerationRecord, View], PlanRecord]


class Witness(Protocol):
    """Hears every decision of the acting coordinator with what was asked, before anything of it is written."""

    def decision(self, view: View, now_s: float, waiting_since_s: float | None, decision: Decision) -> None:
        """Of `membership.decide`."""

    def missing(
        self, view: View, now_s: float, absent_since_s: Mapping[str, float], unbroken_s: float, decision: Decision
    ) -> None:
        """Of `membership.missing`, where nodes are absent."""


# Lost nodes whose records are removed with a generation, and in one transaction before it; etcd takes 128 operations.
FORGOTTEN_WITH = 64
FORGOTTEN_AT_ONCE = 100
# Ends that are compared with before nodes are said to be lost after training.
EXITS_COMPARED = 64
# So many generations stay in the history.
NUM_EVENTS_KEPT = 1000


class Coordinator:
    """Runs in its own thread, so that a slow store never delays the agent's own loop.

    `update` hands it a new view; *announce* is called with one line per decision of the acting coordinator.
    """

    def __init__(
        self,
        store: KeyValueStore,
        keys: Keys,
        me: NodeRecord,
        lease_id: int,
        planner: Planner,
        rules: Rules,
        announce: Callable[[str], None],
        witness: Witness | None = None,
        unbroken_s: Callable[[], float] = lambda: math.inf,
        on_failure: OnFailure = only_logged,
    ) -> None:
        """*unbroken_s*: see `kv.KeepAlive`."""
        self._store, self._keys, self._me = store, keys, me
        self.lease_id = lease_id  # of the next election: the node may have got a new one
        self._planner, self._rules, self._announce, self._witness = planner, rules, announce, witness
        self._unbroken_s = unbroken_s
        self._absent_since_s: dict[str, float] = {}
        self._view: View | None = None
        self._changed = threading.Condition()
        self._stopped = False
        self._waiting_since_s: float | None = None
        self._said = ""
        self._stage = ""
        self._thread = thread("swift-coordinator", self._run, on_failure)

    def start(self) -> None:
        start(self._thread)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def update(self, view: View) -> None:
        with self._changed:
            if self._view is None or view.revision >= self._view.revision:
                self._view = view
            self._changed.notify()

    @property
    def acting(self) -> bool:
        """Whether the stored coordinator is this agent, as far as this agent has seen."""
        view = self._view
        return bool(view and view.coordinator and view.coordinator.incarnation == self._me.incarnation)

    def _run(self) -> None:
        seen: View | None = None
        deadline_s: float | None = None
        while True:
            with self._changed:
                while not self._stopped and self._view is seen:
                    timeout_s = None if deadline_s is None else deadline_s - time.monotonic()
                    if timeout_s is not None and timeout_s <= 0:
                        break
                    self._changed.wait(timeout_s)
                if self._stopped:
                    return
                seen = self._view
            try:
                deadline_s = self._step(seen) if seen is not None else None
            except RendezvousError as error:
                # The store is away. Training goes on without it; what has to be decided is decided when it is back.
                log.warning("coordinator: %s", error)
                deadline_s = time.monotonic() + 0.5
            except Exception:
                # A thread that ends here would leave the job without decisions while this agent's lease lives on.
                log.exception("coordinator: cannot decide; trying again")
                deadline_s = time.monotonic() + 2.0

    def _step(self, view: View) -> float | None:
        if view.result is not None or (view.job is None and "job" not in view.damaged):
            return None
        if view.coordinator is None:
            self._elect(view)
            return None
        if view.coordinator.incarnation != self._me.incarnation:
            self._waiting_since_s = None  # the coordinator of now has a clock of its own
            if self._holder_is_lost(view):
                self._elect(view)
            return None
        now_s = time.monotonic()
        gone = {owner.incarnation for owner in absentees(view)}
        self._absent_since_s = {name: self._absent_since_s.get(name, now_s) for name in gone}
        since_s, unbroken_s = dict(self._absent_since_s), self._unbroken_s()
        decision = missing(view, self._rules, now_s=now_s, absent_since_s=since_s, unbroken_s=unbroken_s)
        if decision is not None:
            if self._witness is not None:
                self._witness.missing(view, now_s, since_s, unbroken_s, decision)
            # Nothing else is decided meanwhile: a slot that is given away cannot be taken back.
            if decision.waiting != self._said and not decision.commands:
                self._announce(decision.waiting)
            self._said = decision.waiting
            for command in decision.commands:
                if not self._execute(view, command):
                    break
            return decision.deadline_s
        self._said = ""
        stage = stage_of(view)
        if stage != self._stage:
            self._stage, self._waiting_since_s = stage, None  # each wait has its own time
        decision = decide(view, self._rules, now_s=now_s, waiting_since_s=self._waiting_since_s)
        if self._witness is not None:
            self._witness.decision(view, now_s, self._waiting_since_s, decision)
        if decision.deadline_s is None:
            self._waiting_since_s = None
        elif self._waiting_since_s is None:
            self._waiting_since_s = now_s
            self._announce(decision.waiting)
        commands, forget = decision.commands, tuple[ForgetNode, ...]()
        if any(isinstance(command, PublishGeneration) for command in commands):
            # In one transaction: between the two a takeover would find a lost node that looks like a spare.
            forget = tuple(command for command in commands if isinstance(command, ForgetNode))
            commands = tuple(command for command in commands if command not in forget)
            # More than fits are forgotten before: they are known to be lost, so no takeover takes them for spares.
            early, forget = forget[:-FORGOTTEN_WITH], forget[-FORGOTTEN_WITH:]
            for first in range(0, len(early), FORGOTTEN_AT_ONCE):
                if not self._forget(view, early[first : first + FORGOTTEN_AT_ONCE]):
                    return decision.deadline_s
        for command in commands:
            if not self._execute(view, command, forget):
                break  # another agent was faster; the next view shows which
            if isinstance(command, (PublishGeneration, PublishRelease, PublishResult, PublishPause)):
                self._announce(decision.why)
        return decision.deadline_s

    def _holder_is_lost(self, view: View) -> bool:
        """The stored coordinator is on a node that the records prove lost: no need to wait for its lease."""
        holder = view.coordinator
        assert holder is not None
        node = view.nodes.get(holder.node_id)
        if node is None or node.incarnation != holder.incarnation:
            return True
        slot = view.generation.slot_of(holder.incarnation) if view.generation is not None else None
        # The report itself and not `losses`: where all workers have exited nothing is lost with the node but this. An
        # accuser that is not believed must not elect itself: it and the holder would take the place in turn.
        failure = believed_failures(view).get(slot) if slot is not None else None
        return failure is not None and failure.kind == "node" and failure.incarnation == holder.incarnation

    def _elect(self, view: View) -> None:
        mine = Put(
            self._keys.coordinator,
            encode(CoordinatorRecord(self._me.node_id, self._me.incarnation)),
            lease_id=self.lease_id,
        )
        guard = Compare.mod_revision(self._keys.coordinator, "==", view.coordinator_revision)
        if self._store.transaction([guard], [mine]).succeeded:
            log.info("%s is the coordinator now", self._me.node_id)

    def _execute(self, view: View, command: Command, forget: tuple[ForgetNode, ...] = ()) -> bool:
        keys = self._keys
        guards = [Compare.mod_revision(keys.coordinator, "==", view.coordinator_revision)]
        ops: list[Op]
        match command:
            case PublishGeneration(generation):
                guards.append(Compare.mod_revision(keys.generation, "==", view.generation_revision))
                # Workers that were released may have exited: from there on nothing is recovered.
                guards.append(Compare.absent(keys.release(view.number)))
                ops = [Put(keys.generation, encode(generation)), *self._sweep(generation.number - 1)]
                ops.append(self._event(generation, view))
                for slot, owner in generation.handover.items():
                    if view.generation is None or slot not in view.generation.handover:
                        # Not if the order was taken back, or the spare has gone, meanwhile.
                        guards.append(Compare.exists(keys.drain(owner.node_id)))
                        guards.append(self._as_seen(view, generation.slots[slot].node_id))
                for owner in absent_handovers(view).values():  # not if it has come back meanwhile
                    guards.append(self._unwritten(view, keys.node(owner.node_id)))
                for lost in forget:
                    guards.append(self._as_seen(view, lost.node_id))
                    ops.append(Delete(keys.node(lost.node_id)))
                if generation.mode == "restart" and not view.tracked:
                    # Else iterations that were made since then would be lost.
                    guards.append(Compare.absent(keys.tracked))
                if not generation.asks:
                    # Nothing to wait for: the plan goes with it.
                    ops.append(Put(keys.plan(generation.number), encode(self._planner(generation, view))))
            case PublishPlan():
                if view.generation is None or view.plan is not None:
                    return True  # it went with its generation
                number = view.generation.number
                if not view.generation.asks and f"plan/{number}" not in view.damaged:
                    return True
                plan = self._planner(view.generation, view)
                guards.append(Compare.mod_revision(keys.generation, "==", view.generation_revision))
                guards.append(self._unwritten(view, keys.plan(number)))
                ops = [Put(keys.plan(number), encode(plan))]
                self._announce(f"plan of generation {number}: {plan.why}")
            case PublishPause(pause):
                guards.append(Compare.mod_revision(keys.generation, "==", view.generation_revision))
                # Each step once, though this may have been decided on a view from before the last.
                key, before = keys.pause(view.number), view.pause
                as_seen = Compare.value(key, "==", encode(before)) if before is not None else self._unwritten(view, key)
                guards.append(as_seen)
                ops = [Put(key, encode(pause))]
            case PublishRelease():
                ops = [Put(keys.release(view.number), b"1")]
                guards.append(Compare.mod_revision(keys.generation, "==", view.generation_revision))
            case PublishResult(result):
                guards.append(self._unwritten(view, keys.result))
                if view.generation is not None:
                    guards.append(Compare.mod_revision(keys.generation, "==", view.generation_revision))
                    # What was taken for lost may have told its end meanwhile.
                    open_ends = set(losses(view).nodes) - set(view.exited) if view.released else set()
                    for slot in sorted(open_ends)[:EXITS_COMPARED]:
                        guards.append(self._unwritten(view, keys.exited(view.number, slot)))
                ops = [Put(keys.result, encode(result))]
            case PublishLoss(failure):
                guards.append(Compare.mod_revision(keys.generation, "==", view.generation_revision))
                assert view.generation is not None
                guards.append(self._unwritten(view, keys.node(view.generation.slots[failure.slot].node_id)))
                ops = [Put(keys.failure(view.number, failure.slot), encode(failure))]
            case ForgetNode(node_id, _):
                guards.append(self._as_seen(view, node_id))
                ops = [Delete(keys.node(node_id))]
            case ForgetDrain(node_id):
                guards.append(Compare.value(keys.drain(node_id), "==", encode(view.drains[node_id])))
                ops = [Delete(keys.drain(node_id))]
            case RestoreGeneration(generation):
                guards.append(self._unwritten(view, keys.generation))
                ops = [Put(keys.generation, encode(generation))]
                self._announce(f"the record generation {view.damaged['generation'].why}: it is written again")
            case RestoreJob(job):
                guards.append(self._unwritten(view, keys.job))
                ops = [Put(keys.job, encode(job))]
                self._announce(f"the record job {view.damaged['job'].why}: it is written again")
            case RemoveDamaged(name):
                guards.append(self._unwritten(view, keys.prefix + name))
                ops = [Delete(keys.prefix + name)]
                self._announce(f"the record {name} {view.damaged[name].why}: it is removed")
        return self._store.transaction(guards, ops).succeeded

    def _forget(self, view: View, lost: tuple[ForgetNode, ...]) -> bool:
        guards = [Compare.mod_revision(self._keys.coordinator, "==", view.coordinator_revision)]
        guards += [self._as_seen(view, command.node_id) for command in lost]
        return self._store.transaction(guards, [Delete(self._keys.node(command.node_id)) for command in lost]).succeeded

    def _unwritten(self, view: View, key: str) -> Compare:
        """There is no such record, but for what cannot be read and was seen."""
        damaged = view.damaged.get(key[len(self._keys.prefix) :])
        return Compare.mod_revision(key, "==", 0 if damaged is None else damaged.revision)

    def _as_seen(self, view: View, node_id: str) -> Compare:
        """The node has not come back meanwhile."""
        return Compare.create_revision(self._keys.node(node_id), "==", view.joined.get(node_id, 0))

    def _sweep(self, number: int) -> list[Op]:
        """Remove what belonged to an older generation; views ignore it already."""
        if number < 1:
            return []
        per_slot = [DeletePrefix(self._keys.of_slots(kind.name, number)) for kind in kinds.PER_SLOT]
        single = [Delete(self._keys.of_generation(kind.name, number)) for kind in kinds.PER_GENERATION]
        old = number - NUM_EVENTS_KEPT
        # As a prefix: both entries of that generation.
        history: list[Op] = [DeletePrefix(self._keys.event(old)), Delete(self._keys.pace(old))] if old > 0 else []
        return [*per_slot, *single, *history]

    def _event(self, generation: GenerationRecord, view: View) -> Op:
        number, what = generation.number, f"generation ({generation.mode})"
        event = EventRecord(number, what, generation.why, time.time(), changes_of(view, generation))
        return Put(self._keys.event(number), encode(event))
