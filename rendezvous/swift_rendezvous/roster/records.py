"""Records of everything a job keeps in etcd; their names are in `keys`, their JSON in `codec`.

Every record is a frozen dataclass, stored as JSON with a version; nothing is pickled. Must never talk to a store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# In the place of --max-restarts: see `setbacks`; a script that tracks nothing has 0, torchrun's default.
AS_LONG_AS_IT_ADVANCES = -1
AS_MANY_AS_PAY = -1  # in the place of --helpers


@dataclass(frozen=True)
class NodeRecord:
    """One agent that is alive; under its lease. *fingerprint*: of its command. *role*: what its workers are, empty for
    torchrun's default. *node_rank*: where it shall stand among the first ones. *takes_faults*: of `swiftctl inject`."""

    node_id: str
    incarnation: str
    host: str
    watch_port: int
    num_workers: int
    fingerprint: str = ""
    role: str = ""
    node_rank: int = 0
    takes_faults: bool = False


@dataclass(frozen=True)
class JobRecord:
    """What all nodes of a job agree on; written once by the first node."""

    num_nodes: int  # the least, if there are *max_nodes*
    num_workers: int  # of the first node; of another one if its record says so
    fingerprint: str
    max_restarts: int = 0  # `AS_LONG_AS_IT_ADVANCES` where none was given
    secret_proof: str = ""  # see `JobKey.proof`
    max_nodes: int = 0  # where `--nnodes` is a range; 0: a job of one size
    recovery: str = ""  # of half-done updates; a word of the room that plans
    # Slots between which no messages are logged; what is lost in one of them takes all of it back (SWIFT, section 5.3).
    # A slot that is in none is alone.
    log_groups: tuple[tuple[int, ...], ...] = ()
    log_budget: str = ""  # for which groups are chosen once the job is measured
    strategy: str = ""  # the way to recover, '' for that which is best
    helpers: int = 0  # of a lost rank, at most, or `AS_MANY_AS_PAY`; without a strategy: if that is found to pay


@dataclass(frozen=True)
class Owner:
    """The node incarnation that holds a slot. *num_workers*: of this slot, 0: as many as most have. *role*: of its
    workers, empty for torchrun's default."""

    node_id: str
    incarnation: str
    host: str
    num_workers: int = 0
    role: str = ""


@dataclass(frozen=True)
class WorkerExit:
    """How one worker process ended. *exit_code* is negative for a signal, as in `subprocess`.

    *error_file*: where, on its host, it has written how it failed. *place*: the exception and the line of the script
    that raised it, where that is known. *generation*: in which it was started. *iteration*: the last that it had begun,
    or with which it was to join the others; -1 if that is not known. *begun*: it had begun one of its own;
    *num_iterations*: so many of these it had finished. *excused*: it asked to be replaced as another one failed."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    host: str
    message: str = ""
    timestamp_s: int = 0
    error_file: str = ""
    place: str = ""
    generation: int = 0
    iteration: int = -1
    begun: bool = False
    num_iterations: int = 0
    excused: bool = False


@dataclass(frozen=True)
class Setback:
    """One failure of a rank: what `setbacks` compares, and *what* it was, for people. *is_replacement*: of a process
    that replaced another one and had not begun an iteration; *is_own*: not killed from outside; *process*: which."""

    generation: int
    what: str
    place: str = ""
    iteration: int = -1
    num_iterations: int = 0
    is_replacement: bool = False
    is_own: bool = False
    process: str = ""


@dataclass(frozen=True)
class Trouble:
    """Failures of one rank since it last made progress, whatever node it was on. *tried*: what was done about it
    beside replacing it. *since_s*, *num_since*: begin of the hour (Unix time), and its failures in that."""

    rank: int
    setbacks: tuple[Setback, ...] = ()
    tried: str = ""
    since_s: int = 0
    num_since: int = 0


@dataclass(frozen=True)
class Helper:
    """A process on that node repeats the iterations of *rank*, which was lost, together with its replacement, and then
    ends: *share* says which micro-batches are its own, from 1 (SWIFT, section 5.2)."""

    rank: int
    share: int
    node_id: str
    incarnation: str


GenerationMode = Literal["start", "replace", "restart", "resize"]


@dataclass(frozen=True)
class GenerationRecord:
    """The roster of one generation: `slots[i]` owns the ranks `ranks_of(i)`, which follow those of the slot before. A
    slot has *num_workers* of them, unless its owner says otherwise.

    *lost* maps a slot to the local ranks whose processes were lost before this generation and have to be started;
    a slot with a new owner starts all of its ranks. *epoch* is the generation in which all workers were last started:
    a process that is older must not live on. *handover* maps a slot to the drained node that had it and still keeps
    its workers: they hold the state until the new owner has it. With mode `resize` all workers are started again, but
    the newest state that any of them held goes on (see `resizing`). *bare*: by slot, the local ranks whose processes
    are to be started, in this generation or an earlier one, since the slot last trained: they hold no state yet.
    *recovery*: the job's. *troubles*: ranks that have failed, see `setbacks`. *epochs*: by slot, as *epoch*, where not
    all workers were started again, but those of a log group. *helpers*: of this generation only. *replaced*: by slot
    and local rank, the earlier generation, which its node may have missed, that was to start this one of the *bare*."""

    number: int
    mode: GenerationMode
    slots: tuple[Owner, ...]
    num_workers: int
    store_slot: int
    why: str
    epoch: int = 1
    lost: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_restarts: int = 0
    handover: dict[int, Owner] = field(default_factory=dict)
    bare: dict[int, tuple[int, ...]] = field(default_factory=dict)
    recovery: str = ""
    troubles: tuple[Trouble, ...] = ()
    epochs: dict[int, int] = field(default_factory=dict)
    helpers: tuple[Helper, ...] = ()
    replaced: dict[int, dict[int, int]] = field(default_factory=dict)

    def epoch_of(self, slot: int) -> int:
        """A process of that slot that is older must not live on."""
        return max(self.epoch, self.epochs.get(slot, 0))

    @property
    def world_size(self) -> int:
        return self.first_rank(len(self.slots))

    def workers_of(self, slot: int) -> int:
        return self.slots[slot].num_workers or self.num_workers

    @property
    def uneven_nodes(self) -> tuple[int, ...]:
        """How many workers each slot has; empty if all have the same number."""
        nodes = tuple(owner.num_workers or self.num_workers for owner in self.slots)
        return nodes if len(set(nodes)) > 1 else ()

    def first_rank(self, slot: int) -> int:
        return sum(owner.num_workers or self.num_workers for owner in self.slots[:slot])

    def ranks_of(self, slot: int) -> range:
        first = self.first_rank(slot)
        return range(first, first + self.workers_of(slot))

    def slot_with(self, rank: int) -> int:
        return next(slot for slot in range(len(self.slots)) if rank < self.first_rank(slot + 1))

    def role_of(self, slot: int) -> tuple[int, int]:
        """Among the workers of the same role: the number of this slot's first, and how many there are."""
        same = [other for other, owner in enumerate(self.slots) if owner.role == self.slots[slot].role]
        before = sum(self.workers_of(other) for other in same if other < slot)
        return before, sum(self.workers_of(other) for other in same)

    @property
    def asks(self) -> bool:
        """Its plan follows from what the workers of its nodes hold."""
        return self.mode in ("replace", "resize")

    def slot_of(self, incarnation: str) -> int | None:
        return next((slot for slot, owner in enumerate(self.slots) if owner.incarnation == incarnation), None)


FailureKind = Literal["node", "workers", "restart", "again"]


@dataclass(frozen=True)
class FailureRecord:
    """What was lost in one slot during one generation.

    `node`: the whole node; *is_dead*: its kernel refuses connections, or it says so itself; *is_empty*: the
    reporter's workers hold no state. `workers`: processes of a healthy node. `restart`: the processes live, but the job
    cannot go on in place (a collective outside an iteration was cut, for example); *is_final*: the workers would come
    to the same, so that the job ends. `again`: nothing is lost, but processes could not be connected with others."""

    kind: FailureKind
    slot: int
    incarnation: str
    local_ranks: tuple[int, ...]
    evidence: str
    reporter: str
    restarts_left: int = 0
    exits: tuple[WorkerExit, ...] = ()
    is_dead: bool = False
    is_empty: bool = False
    is_final: bool = False


@dataclass(frozen=True)
class OfSlot:
    """What the node of a slot says, in a generation. The classes that follow from this one are stored."""

    slot: int
    incarnation: str


@dataclass(frozen=True)
class ProgressRecord(OfSlot):
    """What the living workers of a slot hold on their way into a generation; the reports are opaque to this room."""

    reports: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class StoreRecord:
    """Where the c10d stores of a generation listen: *port*, torch's own, for `init_process_group`; *session_port*, for
    `swift_agent.init()` and its token, which follows from the job's key and the public *nonce*."""

    host: str
    port: int
    session_port: int = 0
    nonce: str = ""


@dataclass(frozen=True)
class PlanRecord:
    """How a generation gets its state: *content*, for the recovery room. *restart*: all workers have to start again."""

    generation: int
    content: dict[str, Any]
    why: str
    restart: bool = False


@dataclass(frozen=True)
class ResumedRecord:
    """All workers of a slot train again. *phases_s*: the slowest worker's seconds per phase."""

    slot: int
    iteration: int
    phases_s: dict[str, float]


@dataclass(frozen=True)
class FinishedRecord(OfSlot):
    """All workers of a slot are at their end. *checksums*: rank -> iteration, checksum, and its replica set as text."""

    checksums: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ExitedRecord(OfSlot):
    """All workers of a slot have exited with code 0."""


@dataclass(frozen=True)
class ResultRecord:
    """How the job ended. *exits*: the root cause first, if a worker caused it. *advice*: what was tried, what is safe,
    what to type; a line each. *cause*: what stopped it: want of a node or of etcd, a person, a signal to all nodes; or
    `drained`, of one node whose job goes on."""

    state: Literal["succeeded", "failed", "stopped"]
    why: str
    exits: tuple[WorkerExit, ...] = ()
    advice: str = ""
    cause: Literal["infrastructure", "operator", "preempted", "drained"] = "infrastructure"


@dataclass(frozen=True)
class DrainRecord:
    """That incarnation of a node shall leave the job without loss of work: by order, or in *grace_s* after *signal*.
    *ordered_by*: the scheduler that takes it back when it has the node in service again; '' of a person or the node."""

    node_id: str
    incarnation: str
    why: str
    time_s: float
    signal: str = ""
    grace_s: float = 0.0
    ordered_by: str = ""


@dataclass(frozen=True)
class PauseRecord:
    """All workers of a generation stop before iteration *boundary*, after a last checkpoint if it *saves*; while it is
    None they are asked where they are."""

    boundary: int | None = None
    saves: bool = False


@dataclass(frozen=True)
class PositionRecord(OfSlot):
    """No worker of a slot begins iteration *iteration* before the boundary is known. *saves*: they take checkpoints."""

    iteration: int
    saves: bool = False


@dataclass(frozen=True)
class ParkedRecord(OfSlot):
    """All workers of a slot wait at the boundary."""


@dataclass(frozen=True)
class TakenRecord(OfSlot):
    """The new owner of a drained node's slot trains with its state: the old one is not needed any more."""


@dataclass(frozen=True)
class RateRecord:
    """How fast the job trains, by rank 0's node; under its lease. *iteration*: the first that was not begun; *per_s*:
    iterations per second, None where it was seen only once. *began_s*: when some of those of this generation began, by
    number (Unix time); only in the copy that stays, `Keys.pace`."""

    iteration: int
    per_s: float | None
    generation: int
    time_s: float
    began_s: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasuredRecord(OfSlot):
    """What the workers of a slot have measured of themselves: by local rank, in the words of the room that plans."""

    ranks: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class ProfileRecord:
    """What the job costs, as measured, and what follows from it; written once, and once more (*is_final*).

    *content*: a profile as people write them. *lines*: the ways to recover, compared, for people; *way*: that which is
    taken. *log_groups*: of slots, see `JobRecord`, where the job has a budget for logs; they hold from now on.
    *helpers*: by slot, how many pay for a rank of it, each better than all smaller ones. *errors*: by way, how many
    times as long as predicted the last one took."""
    content: dict[str, Any]
    lines: tuple[str, ...]
    way: str
    log_groups: tuple[tuple[int, ...], ...] = ()
    helpers: tuple[tuple[int, ...], ...] = ()
    is_final: bool = False
    errors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelsRecord:
    """What the first process of each rank computes with; *of*: by rank, the number of its kind among *texts*."""

    texts: tuple[str, ...]
    of: tuple[int, ...]


@dataclass(frozen=True)
class CoordinatorRecord:
    """The agent that turns events into generations. Stored under its lease."""

    node_id: str
    incarnation: str


@dataclass(frozen=True)
class EventRecord:
    """One line of the job's history, for people and `swiftctl`."""

    generation: int
    what: str
    why: str
    time_s: float
    details: dict[str, Any] = field(default_factory=dict)
