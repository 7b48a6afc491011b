"""What an agent writes into the store: commands of the `machine` as guarded transactions. Pure.

Everything is fenced: a record of generation g is stored only while g is the job's generation and this node has a record
of its own. So a node that was given up, or looks at an old view, writes nothing, whenever it does it.

This module must never make a transaction without a guard, nor touch the store: `record_writer` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swift_agent.agent.lifecycle import commands
from swift_rendezvous.codec import encode
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import (
    DrainRecord,
    EventRecord,
    ExitedRecord,
    KernelsRecord,
    MeasuredRecord,
    NodeRecord,
    ParkedRecord,
    PositionRecord,
    ProfileRecord,
    ProgressRecord,
    RateRecord,
    ResultRecord,
    ResumedRecord,
    StoreRecord,
    TakenRecord,
)
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.kv import Compare, Delete, Op, Put


@dataclass(frozen=True)
class Transaction:
    """*what*, for people. *lost_peer*: it says that this incarnation is lost, which may be untrue when it is late."""

    what: str
    guards: Sequence[Compare]
    ops: Sequence[Op]
    lost_peer: str | None = None


def fence(keys: Keys, view: View, me: NodeRecord) -> list[Compare]:
    """Holds while the generation is the one of *view* and this node is known, under this very incarnation."""
    return [
        Compare.mod_revision(keys.generation, "==", view.generation_revision),
        Compare.value(keys.node(me.node_id), "==", encode(me)),
    ]


def transaction_of(command: commands.Command, keys: Keys, view: View, me: NodeRecord) -> Transaction | None:
    """The write that *command* asks for, None if it asks for something else."""
    lost_peer: str | None = None
    match command:
        case commands.WriteTracked():
            # Every node says it; that all are told of it once is enough.
            guards = [*fence(keys, view, me), Compare.absent(keys.tracked)]
            return Transaction("tracked", guards, [Put(keys.tracked, b"1")])
        case commands.WriteFailure(generation, failure):
            what, key, value = "failure", keys.failure(generation, failure.slot), encode(failure)
            if failure.kind == "node" and failure.incarnation != me.incarnation:
                lost_peer = failure.incarnation
        case commands.WriteProgress(generation, slot, reports):
            progress = ProgressRecord(slot, me.incarnation, tuple(dict(report) for report in reports))
            what, key, value = "progress", keys.progress(generation, slot), encode(progress)
        case commands.WriteResumed(generation, slot, iteration, phases_s):
            resumed = ResumedRecord(slot, iteration, dict(phases_s))
            what, key, value = "resumed", keys.resumed(generation, slot), encode(resumed)
        case commands.WriteMeasured(generation, slot, ranks):
            measured = MeasuredRecord(slot, me.incarnation, tuple(map(dict, ranks)))
            what, key, value = "measured", keys.measured(generation, slot), encode(measured)
        case commands.WriteFinished(generation, finished):
            what, key, value = "finished", keys.finished(generation, finished.slot), encode(finished)
        case commands.WriteExited(generation, slot):
            what, key, value = "exited", keys.exited(generation, slot), encode(ExitedRecord(slot, me.incarnation))
        case commands.WritePosition(generation, slot, iteration, saves):
            position = PositionRecord(slot, me.incarnation, iteration, saves)
            what, key, value = "position", keys.position(generation, slot), encode(position)
        case commands.WriteParked(generation, slot):
            what, key, value = "parked", keys.parked(generation, slot), encode(ParkedRecord(slot, me.incarnation))
        case commands.WriteHandover(generation, slot, reports):
            handover = ProgressRecord(slot, me.incarnation, tuple(dict(report) for report in reports))
            what, key, value = "handover", keys.handover(generation, slot), encode(handover)
        case commands.WriteTaken(generation, slot):
            what, key, value = "taken", keys.taken(generation, slot), encode(TakenRecord(slot, me.incarnation))
        case commands.ForgetSpare(node_id, incarnation):
            # Not fenced by generation, but by the node itself: it may have come back.
            guards = [Compare.create_revision(keys.node(node_id), "==", view.joined.get(node_id, 0))]
            ops: list[Op] = [Delete(keys.node(node_id))]
            forming, coordinator = view.generation is None, view.coordinator
            if forming and coordinator is not None and coordinator.incarnation == incarnation:
                # Nodes that wait for the first generation follow the coordinator's record, not those of the nodes.
                guards.append(Compare.mod_revision(keys.coordinator, "==", view.coordinator_revision))
                ops.append(Delete(keys.coordinator))
            return Transaction("forget", guards, ops, incarnation)
        case _:
            return None
    return Transaction(what, fence(keys, view, me), [Put(key, value)], lost_peer)


def notice(keys: Keys, view: View, me: NodeRecord, signal: str, grace_s: float, at_s: float) -> Transaction:
    """This node shall be drained in *grace_s*, since it got *signal*. *at_s*: Unix time."""
    order = DrainRecord(me.node_id, me.incarnation, f"it got {signal}", at_s, signal, grace_s)
    return Transaction("notice", fence(keys, view, me), [Put(keys.drain(me.node_id), encode(order))])


def hosted_store(keys: Keys, view: View, me: NodeRecord, generation: int, store: StoreRecord) -> Transaction:
    """Where the stores of *generation* listen."""
    return Transaction("store", fence(keys, view, me), [Put(keys.store(generation), encode(store))])


def rate(
    keys: Keys, view: View, me: NodeRecord, record: RateRecord, began_s: Mapping[int, float], lease_id: int
) -> Transaction:
    """How fast the job trains, gone with this node; and when its iterations began, for the history."""
    pace = Put(keys.pace(record.generation), encode(replace(record, began_s=dict(began_s))))
    return Transaction("rate", fence(keys, view, me), [Put(keys.rate, encode(record), lease_id=lease_id), pace])


def profiled(keys: Keys, view: View, me: NodeRecord, record: ProfileRecord) -> Transaction:
    """What the job costs, once in a run: whichever coordinator is the first to say it; or in the place of what it has
    seen of that."""
    known = view.profile
    first = Compare.absent(keys.profile) if known is None else Compare.value(keys.profile, "==", encode(known))
    return Transaction("profile", [*fence(keys, view, me), first], [Put(keys.profile, encode(record))])


def preload(keys: Keys, view: View, me: NodeRecord, modules: Sequence[str]) -> Transaction:
    """What standbys import ahead; *modules* are signed (`JobKey.signed_modules`)."""
    return Transaction("preload", fence(keys, view, me), [Put(keys.preload, ",".join(modules).encode())])


def kernels(keys: Keys, view: View, me: NodeRecord, record: KernelsRecord) -> Transaction:
    """What the first workers of all ranks compute with. Every node says it, and the first one counts; in the place of
    what was known of another size of the job."""
    known = view.kernels
    first = Compare.absent(keys.kernels) if known is None else Compare.value(keys.kernels, "==", encode(known))
    return Transaction("kernels", [*fence(keys, view, me), first], [Put(keys.kernels, encode(record))])


def recovered(
    keys: Keys, view: View, me: NodeRecord, phases_s: Mapping[str, float], at_s: float, predicted_s: float | None = None
) -> Transaction:
    """The job runs again in the generation of *view*: an entry of its history. *at_s*: Unix time. *predicted_s*: what
    it should have taken, None where nothing was known."""
    generation, plan = view.generation, view.plan
    assert generation is not None and plan is not None
    details = {"phases_s": dict(phases_s), "iteration": resumed_iteration(view), "plan": plan.content}
    if predicted_s is not None:
        details["predicted_s"] = predicted_s
    event = EventRecord(generation.number, "recovered", f"{generation.why}; {plan.why}", at_s, details)
    key = keys.recovery(generation.number)
    # Told once: another coordinator, which takes over later, sees the same records and would measure until then.
    return Transaction("event", [*fence(keys, view, me), Compare.absent(key)], [Put(key, encode(event))])


def resumed_iteration(view: View) -> int:
    """The number of the first iteration after the one that the job went on with."""
    return max(record.iteration for record in view.resumed.values())


def stop(keys: Keys, me: NodeRecord, result: ResultRecord) -> Transaction:
    """The job ends with *result*, if it has none yet and this node was not given up."""
    guards = [Compare.absent(keys.result), Compare.value(keys.node(me.node_id), "==", encode(me))]
    return Transaction("result", guards, [Put(keys.result, encode(result))])
