"""Names of everything a job keeps in etcd, below `/swift/{job_id}/`. Pure.

What belongs to one generation has its number in its key, so a process of an older generation cannot overwrite what a
newer one reads. The order of the names is meant: see `Keys.for_coordinator` and `Keys.for_members`. This module must
never talk to a store, nor know what is stored under a name; that is `records`.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of all keys of swift-agent; the id of a job follows.
ROOT = "/swift/"


@dataclass(frozen=True)
class Keys:
    """The key names of one job."""

    job_id: str

    @property
    def prefix(self) -> str:
        return f"{ROOT}{self.job_id}/"

    @property
    def for_coordinator(self) -> str:
        """What every slot writes in every generation, and only the coordinator reads. Sorts behind all other keys, so
        that an agent that is not the coordinator follows everything *before* this."""
        return self.prefix + "~"

    @property
    def for_members(self) -> str:
        """Before its first generation a node follows only what sorts before this: coordinator, generation, end. Behind
        it are the nodes: all of them hearing of all the others was work for the square of their number."""
        return self.prefix + "job"

    @property
    def job(self) -> str:
        return self.prefix + "job"

    @property
    def generation(self) -> str:
        return self.prefix + "generation"

    @property
    def coordinator(self) -> str:
        return self.prefix + "coordinator"

    @property
    def tracked(self) -> str:
        return self.prefix + "tracked"

    @property
    def preload(self) -> str:
        return self.prefix + "preload"

    @property
    def kernels(self) -> str:
        return self.prefix + "kernels"

    @property
    def result(self) -> str:
        return self.prefix + "end"

    @property
    def nodes(self) -> str:
        return self.prefix + "nodes/"

    def node(self, node_id: str) -> str:
        return f"{self.prefix}nodes/{node_id}"

    def of_generation(self, name: str, generation: int) -> str:
        """Of a record that a generation has once."""
        return f"{self.prefix}{name}/{generation}"

    def of_slot(self, name: str, generation: int, slot: int) -> str:
        """Of a record that each slot of a generation has."""
        return f"{self.of_slots(name, generation)}{slot}"

    def of_slots(self, name: str, generation: int) -> str:
        """What the keys of all slots begin with."""
        return f"{self.prefix}{name}/{generation}/"

    def store(self, generation: int) -> str:
        return self.of_generation("store", generation)

    def plan(self, generation: int) -> str:
        return self.of_generation("plan", generation)

    def release(self, generation: int) -> str:
        return self.of_generation("release", generation)

    def pause(self, generation: int) -> str:
        return self.of_generation("pause", generation)

    def failure(self, generation: int, slot: int) -> str:
        return self.of_slot("failure", generation, slot)

    def exited(self, generation: int, slot: int) -> str:
        return self.of_slot("exited", generation, slot)

    def taken(self, generation: int, slot: int) -> str:
        """Looked at by all, unlike `resumed`: until then the loss of the drained node is a loss."""
        return self.of_slot("taken", generation, slot)

    # "~": see `for_coordinator`.

    def progress(self, generation: int, slot: int) -> str:
        return self.of_slot("~progress", generation, slot)

    def resumed(self, generation: int, slot: int) -> str:
        return self.of_slot("~resumed", generation, slot)

    def finished(self, generation: int, slot: int) -> str:
        return self.of_slot("~finished", generation, slot)

    def position(self, generation: int, slot: int) -> str:
        return self.of_slot("~position", generation, slot)

    def parked(self, generation: int, slot: int) -> str:
        return self.of_slot("~parked", generation, slot)

    def handover(self, generation: int, slot: int) -> str:
        return self.of_slot("~handover", generation, slot)

    def measured(self, generation: int, slot: int) -> str:
        return self.of_slot("~measured", generation, slot)

    @property
    def rate(self) -> str:
        return self.prefix + "rate"

    def pace(self, generation: int) -> str:
        """The history's entry for how fast it trained. Not among `events`: it is written every few seconds."""
        return f"{self.paces}{generation:08d}"

    @property
    def paces(self) -> str:
        return self.prefix + "~pace/"

    @property
    def profile(self) -> str:
        return self.prefix + "profile"

    def drain(self, node_id: str) -> str:
        return f"{self.prefix}drain/{node_id}"

    @property
    def faults(self) -> str:
        """Below it, faults that a person has ordered (`swiftctl inject`)."""
        return self.prefix + "inject/"

    def fault(self, name: str) -> str:
        return f"{self.faults}{name}"

    @property
    def fault_answers(self) -> str:
        return self.prefix + "injected/"

    def fault_answer(self, name: str) -> str:
        """What became of it."""
        return f"{self.fault_answers}{name}"

    @property
    def events(self) -> str:
        return self.prefix + "events/"

    def event(self, generation: int) -> str:
        """Its begin, in the history. In the order of the keys that of `recovery` follows it."""
        return f"{self.events}{generation:08d}"

    def recovery(self, generation: int) -> str:
        """The history's entry for the moment in which the job ran again."""
        return f"{self.event(generation)}.recovered"
