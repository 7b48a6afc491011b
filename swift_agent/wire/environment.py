"""The environment of a worker: the variables that torchrun sets, with the same meaning, and ours. Pure.

Follows `LocalElasticAgent._start_workers` and `_set_local_rank_env` of torch; a test compares the result with what a
real torchrun gives its workers. It must never read or change the environment of its own process: what is given comes in
as an argument.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from swift_agent.wire.channel import ENV_SOCKET

ENV_GENERATION = "SWIFT_GENERATION"
"""The generation in which the process was started; a message of an older process of the same rank is not mistaken
for it.
"""

ENV_STARTED = "SWIFT_STARTED"
"""When a replacement was ordered, seconds since the epoch: the begin of its part of the recovery's timeline."""


ENV_TIMERS = "TORCHELASTIC_TIMER_FILE"
"""torch's: the pipe of the server of `torch.distributed.elastic.timer`; see `watchdog`."""

ENV_LOCAL_RANK = "SWIFT_LOCAL_RANK"
"""The local rank also where `--virtual-local-rank` has all of them see 0."""

ENV_RUN = "SWIFT_RUN"
"""Which run of this job it is: a letter and a number, larger for a later run with the same letter; see `run_name`."""

ENV_SIZES = "SWIFT_SIZES"
"""`--nnodes`, if it is a range: workers are started again when the size of the job changes, all of them."""

ENV_NODES = "SWIFT_NODES"
"""How many workers each node has, in the order of their ranks: "2,1,2". Not set where all have the same number."""

ENV_MESSAGE_LOG = "SWIFT_MESSAGE_LOG_DIR"
"""The directory for logs of messages, local to the node and gone with its agent."""

ENV_MESSAGE_LOG_BYTES = "SWIFT_MESSAGE_LOG_BYTES"
"""What the logs of one rank may take there; not set: half of what is free, over the ranks of the node."""

ENV_LOG_STORE = "SWIFT_LOG_STORE_URL"
"""Where these logs are copied to, for `swift_logging_store.stores.open`; not set: nowhere."""

ENV_PARALLEL_SUM = "SWIFT_PARALLEL_SUM"
"""How the shares of helpers are put together: "ordered" or "unordered". Set where there may be helpers."""

ENV_HELPER = "SWIFT_HELPER"
"""Of a helper only: its share, from 1. It repeats the iterations of its rank together with the replacement, and is in
no process group (SWIFT, section 5.2)."""

ENV_INJECTION = "SWIFT_INJECTION"
"""With `--allow-injection` only: the directory of the agent, where faults are ordered."""

ENV_COMPUTED = "SWIFT_COMPUTED"
"""What the first process of this rank computed with (`swift_recovery.replay.kernels`); not set where it was none."""

# More than a node has workers.
_HELPER = 1000


@dataclass(frozen=True)
class Placement:
    """Where a set of workers stands in the job.

    A local rank may be the number of a helper (see `helper_number`)."""

    slot: int
    num_slots: int
    num_workers: int
    role: str
    run_id: str
    master_addr: str
    master_port: int
    restart_count: int
    max_restarts: int
    generation: int
    socket_path: str
    virtual_local_rank: bool = False
    sizes: str = ""
    """See `ENV_SIZES`; empty for a job of one size."""
    message_log: str = ""
    """See `ENV_MESSAGE_LOG`."""
    message_log_bytes: int | None = None
    """For all workers together; None: there is no limit."""
    log_store: str = ""
    """See `ENV_LOG_STORE`; empty for none."""
    run: str = ""
    """See `ENV_RUN`."""
    timers: str = ""
    """See `ENV_TIMERS`; empty if no server runs."""
    first_rank: int | None = None
    """None where all slots have *num_workers*."""
    world_size: int | None = None
    """None where all slots have *num_workers*."""
    first_role_rank: int | None = None
    """Among the workers of this role; None where all are of it."""
    num_of_role: int | None = None
    """How many workers have this role; None where all are of it."""
    nodes: tuple[int, ...] = ()
    """See `ENV_NODES`; empty where all slots have *num_workers*."""
    parallel_sum: str = ""
    """See `ENV_PARALLEL_SUM`; empty where there are none."""
    injects: bool = False
    computed: tuple[str, ...] = ()
    """By local rank, see `ENV_COMPUTED`; empty if that is not known."""

    def rank(self, local_rank: int) -> int:
        first = self.slot * self.num_workers if self.first_rank is None else self.first_rank
        return first + helped_by(local_rank)

    def role_rank(self, local_rank: int) -> int:
        if self.first_role_rank is None:
            return self.rank(local_rank)
        return self.first_role_rank + helped_by(local_rank)

    @property
    def num_ranks(self) -> int:
        return self.num_slots * self.num_workers if self.world_size is None else self.world_size

    @property
    def role_world_size(self) -> int:
        return self.num_ranks if self.num_of_role is None else self.num_of_role


def helper_number(share: int, local_rank: int) -> int:
    """In the place of a local rank, that of a helper with *share* for the rank that is *local_rank* on its own node: no
    worker has it."""
    return _HELPER * share + local_rank


def share_of(number: int) -> int:
    """The share of the helper of that number; 0: it is a worker's local rank."""
    return number // _HELPER


def helped_by(number: int) -> int:
    """The local rank of the worker that the helper of that number helps; a worker's own."""
    return number % _HELPER


def run_name(job: int, started_s: float | None) -> str:
    """For `ENV_RUN`. *job*: the revision in etcd with which the job began, the same on all nodes. *started_s*: of a job
    of one node with an etcd of its own, in which all jobs begin alike: when its agent began, on that node's clock."""
    return f"e{job}" if started_s is None else f"t{int(started_s * 1000)}"


def worker_env(place: Placement, local_rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """All variables of one worker, or of a helper, on top of those that the agent has *inherited*. A helper has those
    of the worker that it helps, but for `ENV_LOCAL_RANK` and `ENV_HELPER`."""
    number, local_rank = local_rank, helped_by(local_rank)
    env = {
        **inherited,
        "RANK": str(place.rank(local_rank)),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(place.slot),
        "ROLE_RANK": str(place.role_rank(local_rank)),
        "ROLE_NAME": place.role,
        "LOCAL_WORLD_SIZE": str(place.num_workers),
        "WORLD_SIZE": str(place.num_ranks),
        "GROUP_WORLD_SIZE": str(place.num_slots),
        "ROLE_WORLD_SIZE": str(place.role_world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ENV_SOCKET: place.socket_path,
        ENV_GENERATION: str(place.generation),
        ENV_LOCAL_RANK: str(number),
        ENV_RUN: place.run,
        ENV_MESSAGE_LOG: place.message_log,
    }
    for name in (
        ENV_MESSAGE_LOG_BYTES, ENV_LOG_STORE, ENV_NODES, ENV_PARALLEL_SUM, ENV_HELPER, ENV_INJECTION, ENV_COMPUTED,
        ENV_SIZES, ENV_STARTED,
    ):  # fmt: skip
        env.pop(name, None)  # of a job that this one is part of
    if place.message_log_bytes is not None:
        env[ENV_MESSAGE_LOG_BYTES] = str(place.message_log_bytes // place.num_workers)
    if place.log_store:
        env[ENV_LOG_STORE] = place.log_store
    if place.timers:
        env[ENV_TIMERS] = place.timers
    if place.injects:
        env[ENV_INJECTION] = place.socket_path.rpartition("/")[0]
    if place.sizes:
        env[ENV_SIZES] = place.sizes
    if place.parallel_sum:
        env[ENV_PARALLEL_SUM] = place.parallel_sum
    if share_of(number):
        env[ENV_HELPER] = str(share_of(number))
    if place.computed and not share_of(number):  # a helper is compared with whom it helps
        env[ENV_COMPUTED] = place.computed[local_rank]
    if place.nodes:
        env[ENV_NODES] = ",".join(map(str, place.nodes))
    if place.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        env["CUDA_VISIBLE_DEVICES"] = _visible_device(inherited.get("CUDA_VISIBLE_DEVICES"), local_rank)
    return env


@dataclass(frozen=True)
class WorkerEnvironment:
    """What `worker_env` has told a process, as that reads it: once, in `swift_agent.init()`. The defaults are those of
    a process that no agent has started."""

    rank: int = 0
    world_size: int = 1
    number: int = 0
    """See `ENV_LOCAL_RANK`; of a helper, see `helper_number`."""
    node: int = 0
    """Its slot."""
    nodes: tuple[int, ...] = (1,)
    """How many workers each node has."""
    num_local: int = 1
    """How many workers its own node has."""
    run_id: str = ""
    run: str = ""
    """See `ENV_RUN`."""
    restart_count: int = 0
    generation: int = 0
    """See `ENV_GENERATION`."""
    started_s: float | None = None
    """See `ENV_STARTED`; None of the first workers."""
    socket_path: str = ""
    sizes: str = ""
    """See `ENV_SIZES`; empty for a job of one size."""
    message_log: str = ""
    """See `ENV_MESSAGE_LOG`; empty: the user wants no logs."""
    message_log_bytes: int | None = None
    """See `ENV_MESSAGE_LOG_BYTES`."""
    log_store: str = ""
    """See `ENV_LOG_STORE`; empty for none."""
    parallel_sum: str = ""
    """See `ENV_PARALLEL_SUM`; empty where there are no helpers."""
    share: int = 0
    """See `ENV_HELPER`; 0 of a worker."""
    injection: str = ""
    """See `ENV_INJECTION`; empty where nothing may be injected."""
    computed: str = ""
    """See `ENV_COMPUTED`; empty where it was none."""

    @property
    def directory(self) -> str:
        """The agent's, which all workers of its node share; '' without an agent."""
        return os.path.dirname(self.socket_path)

    @property
    def speaks_for_node(self) -> bool:
        """One worker of each node does."""
        return self.number == 0


NO_AGENT = WorkerEnvironment()


def read_worker_env(env: Mapping[str, str]) -> WorkerEnvironment:
    """Of a process that an agent has started. The inverse of `worker_env`."""
    num_local, room = int(env["LOCAL_WORLD_SIZE"]), env.get(ENV_MESSAGE_LOG_BYTES)
    nodes = tuple(map(int, env[ENV_NODES].split(","))) if env.get(ENV_NODES) else ()
    return WorkerEnvironment(
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        number=int(env[ENV_LOCAL_RANK]),
        node=int(env["GROUP_RANK"]),
        nodes=nodes or (num_local,) * int(env["GROUP_WORLD_SIZE"]),
        num_local=num_local,
        run_id=env["TORCHELASTIC_RUN_ID"],
        run=env[ENV_RUN],
        restart_count=int(env["TORCHELASTIC_RESTART_COUNT"]),
        generation=int(env[ENV_GENERATION]),
        started_s=float(env[ENV_STARTED]) if ENV_STARTED in env else None,
        socket_path=env[ENV_SOCKET],
        sizes=env.get(ENV_SIZES, ""),
        message_log=env[ENV_MESSAGE_LOG],
        message_log_bytes=int(room) if room else None,
        log_store=env.get(ENV_LOG_STORE, ""),
        parallel_sum=env.get(ENV_PARALLEL_SUM, ""),
        share=int(env.get(ENV_HELPER, "0")),
        injection=env.get(ENV_INJECTION, ""),
        computed=env.get(ENV_COMPUTED, ""),
    )


def _visible_device(visible: str | None, local_rank: int) -> str:
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise ValueError(f"local rank {local_rank} has no device: CUDA_VISIBLE_DEVICES={visible}")
    return devices[local_rank].strip()
