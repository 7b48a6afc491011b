"""What each rank has measured of itself in a few iterations, put together as the profile of its job. Pure.

A worker counts and times what happens anyway. What it has not seen (the network, a restart, a checkpoint before the
first one) is taken from `ASSUMED`, and said to be. This module must never take what was assumed for measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from swift_recovery.planning.reports import ranges_of, ranks_of
from swift_recovery.strategy.profile import FIELDS, Machine, Profile, pipelined_s

# Bytes per second, and seconds with warm standbys and with new processes, on the machines of benchmarks/.
ASSUMED: Mapping[str, float] = {
    "network_bytes_per_s": 1.25e9,
    "log_bytes_per_s": 2e9,
    "state_bytes_per_s": 1e9,
    "restart_s": 6.0,
    "replace_s": 0.25,
}
_MOVED = ("log_written", "log_copied", "checkpoint_written")
# Of less a time says nothing.
LEAST_BYTES = 1 << 18
_NEVER = 1_000_000  # iterations between two checkpoints of a script that takes none


@dataclass(frozen=True)
class RankMeasured:
    """Of one rank; times are medians of the iterations that were measured.

    - *iteration_s*: from the begin of an iteration to that of the next.
    - *computation_s*: of an iteration, without waits for messages and for the agreement to its update.
    - *sent_bytes*: by rank, in messages of an iteration. *num_messages*: of them, to the rank that gets most.
      *micro_batches*: of a step of its pipeline schedule, 0: it has none.
    - *state_bytes*: parameters, buffers and optimizer state. *replicas*: the ranks that hold the same.
    - *checkpoint_every*: iterations, 0: none are taken. *logs*: its messages are logged.
    - *sees_waits*: else a wait for a message ends before it has come, as on a GPU, and *computation_s* means nothing.
    - *log_written*: bytes, and the seconds that they took, of messages to the log on the node; *log_copied*: of copies
      of the log to a store; *checkpoint_written*: of its part of the checkpoint. (0, 0): none so far.
    - *gradient_bytes*: of the parameters that are trained.
    - *checkpoint_still_s*: for which training stood still for that. *is_all*: that checkpoint counts; nothing is left
      to be measured.
    """

    rank: int
    iteration_s: float
    computation_s: float
    state_bytes: int
    replicas: tuple[int, ...]
    sent_bytes: Mapping[int, int]
    num_messages: int = 0
    checkpoint_every: int = 0
    logs: bool = False
    sees_waits: bool = True
    log_written: tuple[int, float] = (0, 0.0)
    log_copied: tuple[int, float] = (0, 0.0)
    checkpoint_written: tuple[int, float] = (0, 0.0)
    checkpoint_still_s: float = 0.0
    is_all: bool = False
    gradient_bytes: int = 0
    micro_batches: int = 0

    def to_json(self) -> dict[str, Any]:
        sent = {str(rank): num_bytes for rank, num_bytes in self.sent_bytes.items()}
        moved = {name: list(getattr(self, name)) for name in _MOVED}
        return {**asdict(self), "replicas": ranges_of(self.replicas), "sent_bytes": sent, **moved}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankMeasured:
        """Raises KeyError, TypeError or ValueError on what `to_json` did not write."""
        return cls(
            rank=int(data["rank"]),
            iteration_s=float(data["iteration_s"]),
            computation_s=float(data["computation_s"]),
            state_bytes=int(data["state_bytes"]),
            replicas=ranks_of(data["replicas"]),
            sent_bytes={int(rank): int(num_bytes) for rank, num_bytes in data["sent_bytes"].items()},
            num_messages=int(data["num_messages"]),
            checkpoint_every=int(data["checkpoint_every"]),
            logs=bool(data["logs"]),
            sees_waits=bool(data["sees_waits"]),
            # Agents and workers of an earlier version do not have these.
            **{name: _moved(data.get(name, (0, 0.0))) for name in _MOVED},
            checkpoint_still_s=float(data.get("checkpoint_still_s", 0.0)),
            is_all=bool(data.get("is_all", False)),
            gradient_bytes=int(data.get("gradient_bytes", 0)),
            micro_batches=int(data.get("micro_batches", 0)),
        )


def _moved(data: Any) -> tuple[int, float]:
    num_bytes, seconds = data
    return int(num_bytes), float(seconds)


@dataclass(frozen=True)
class JobMeasured:
    """*elsewhere_of*: by node, what it sends in messages of an iteration to nodes that are no neighbours.
    *takes_checkpoints*: else what is lost begins at iteration 0. *assumed*: the fields of the profile that nobody has
    measured. *state_bytes_per_s*: at which checkpoints are written, 0: not measured. *has_schedule*: of torch's, whose
    steps helpers can share."""

    profile: Profile
    elsewhere_of: tuple[float, ...]
    takes_checkpoints: bool
    assumed: tuple[str, ...]
    state_bytes_per_s: float = 0.0
    has_schedule: bool = False

    @property
    def elsewhere_bytes(self) -> float:
        return sum(self.elsewhere_of)


def put_together(name: str, nodes: Sequence[Sequence[RankMeasured]]) -> JobMeasured:
    """*nodes*: what the ranks of each have measured, in the order of their slots. The chain of the profile is that
    order: pipelines are laid out so. Raises ValueError where there is nothing."""
    if not nodes or not all(nodes):
        raise ValueError("a job has nodes, and each of them ranks")
    node_of = {one.rank: node for node, ranks in enumerate(nodes) for one in ranks}
    ranks = [one for of_node in nodes for one in of_node]
    between = [[0.0] * len(nodes) for _ in nodes]
    for one in ranks:
        for rank, num_bytes in one.sent_bytes.items():
            if rank in node_of:
                between[node_of[one.rank]][node_of[rank]] += num_bytes
    boundaries = [between[at][at + 1] + between[at + 1][at] for at in range(len(nodes) - 1)]
    across = sum(sent for at, row in enumerate(between) for to, sent in enumerate(row) if at != to)
    machines = tuple(
        Machine(
            computation_s=max(max(one.computation_s for one in of_node), 1e-9),
            state_bytes=float(sum(one.state_bytes for one in of_node)),
            gradient_bytes=float(sum(one.gradient_bytes for one in of_node)),
            stages=_longest(of_node),
            inside_bytes=between[node][node],
            has_replica=all(any(node_of.get(rank) not in (node, None) for rank in one.replicas) for one in of_node),
            has_replica_inside=all(
                any(node_of.get(rank) == node for rank in one.replicas if rank != one.rank) for one in of_node
            ),
        )
        for node, of_node in enumerate(nodes)
    )
    num_stages = sum(one.stages for one in machines) if across else max(one.stages for one in machines)
    # Of stages by hand a message is taken for one; those of a schedule that interleaves them send more.
    counted = max(one.micro_batches for one in ranks) or max(one.num_messages for one in ranks)
    micro_batches = max(1, counted) if num_stages > 1 else 1
    every = max(one.checkpoint_every for one in ranks)
    largest = max(machine.state_bytes for machine in machines)
    log_rate = _slowest([[one.log_written for one in of_node] for of_node in nodes])
    state_rate = _slowest([[one.checkpoint_written for one in of_node] for of_node in nodes])
    # What a checkpoint costs is the time for which training stands still; without one the whole state is taken for it.
    still_s = max(one.checkpoint_still_s for one in ranks)
    load_s = largest / (state_rate or ASSUMED["state_bytes_per_s"])
    has_checkpoint = all(one.is_all for one in ranks)
    profile = Profile(
        name=name,
        machines=machines,
        boundary_bytes=tuple(boundaries) if across else (),
        micro_batches=micro_batches,
        # A median of other iterations may be less than that of the computation.
        iteration_s=max(1e-9, *(max(one.iteration_s, one.computation_s) for one in ranks)),
        network_bytes_per_s=ASSUMED["network_bytes_per_s"],
        log_bytes_per_s=log_rate or ASSUMED["log_bytes_per_s"],
        gpus_per_machine=max(map(len, nodes)),
        checkpoint_every=every or _NEVER,
        checkpoint_s=max(still_s if has_checkpoint else largest / ASSUMED["state_bytes_per_s"], 1e-6),
        load_s=load_s,
        restart_s=ASSUMED["restart_s"],
        replace_s=ASSUMED["replace_s"],
        machine_mtbf_hours=float(FIELDS["machine_mtbf_hours"][2] or 0),
        store_bytes_per_s=_slowest([[one.log_copied for one in of_node] for of_node in nodes]),
        takes_checkpoints=every > 0,
    )
    if num_stages > 1 and not all(one.sees_waits for one in ranks):
        # All of it is taken for computation.
        each_s = profile.iteration_s * micro_batches / (micro_batches + num_stages - 1)
        machines = tuple(replace(machine, computation_s=each_s) for machine in machines)
        profile = replace(profile, machines=machines, iteration_s=pipelined_s([each_s] * num_stages, micro_batches))
    measured = {"log_bytes_per_s": log_rate > 0, "checkpoint_s": has_checkpoint, "load_s": state_rate > 0}
    fields = ("network_bytes_per_s", "log_bytes_per_s", "checkpoint_s", "load_s", "restart_s", "replace_s",
              "machine_mtbf_hours")  # fmt: skip
    assumed = tuple(field for field in fields if not measured.get(field, False))
    elsewhere = tuple(
        sum(sent for to, sent in enumerate(row) if abs(to - at) > 1) for at, row in enumerate(between)
    )  # fmt: skip
    has_schedule = any(one.micro_batches for one in ranks)
    return JobMeasured(profile, elsewhere, every > 0, assumed, state_rate, has_schedule)


def _longest(of_node: Sequence[RankMeasured]) -> int:
    """How many ranks of a node are stages one behind the other: most of those that messages link. Ranks that hold parts
    of one stage, or the same one, send each other none."""
    linked = {one.rank: {one.rank} for one in of_node}
    for one in of_node:
        for to in one.sent_bytes:
            if to in linked and linked[to] is not linked[one.rank]:
                linked[one.rank] |= linked[to]
                for rank in linked[to]:
                    linked[rank] = linked[one.rank]
    return max(map(len, linked.values()))


def _slowest(nodes: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Bytes per second of the slowest node, 0 if none has moved enough. Its ranks write at the same time, and what each
    of them got has the others in it: the node has written all when the last of them has."""
    moved = [(sum(num for num, _ in of_node), max(seconds for _, seconds in of_node)) for of_node in nodes]
    return min((num / max(seconds, 1e-9) for num, seconds in moved if num >= LEAST_BYTES), default=0.0)


def to_file(measured: JobMeasured) -> dict[str, Any]:
    """As `profile.parse` reads it."""
    job = measured.profile
    data: dict[str, Any] = {
        "name": job.name,
        "machines": [asdict(machine) for machine in job.machines],
        **{name: getattr(job, name) for name in FIELDS},
        "takes_checkpoints": job.takes_checkpoints,
    }
    if job.boundary_bytes:
        data["boundary_bytes"] = list(job.boundary_bytes)
    return data
