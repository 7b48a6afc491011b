"""One frozen configuration of an agent, read once from the command line and the environment.

`AgentConfig.from_args` looks at everything before it gives up, so that a user corrects all mistakes at once. This
module must never open a connection or start a process, and must not let a password into a `repr` or a message.
"""

from __future__ import annotations

import argparse
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Any, Literal, get_args

from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args

from swift_agent.launch import log_names
from swift_agent.launch import secret as job_secret
from swift_agent.launch.checks import (
    SUMS,
    ConfigError,
    EntryKind,
    _check_entry,
    _check_name,
    _check_numbers,
    _check_strategy,
    _check_streams,
    _directory,
    _entry_kind,
    _etcd,
    _join_timeouts_s,
    _log_groups,
    _node_of_slurm,
    _num_nodes,
    _num_workers,
    _preload,
    _store,
)
from swift_recovery.planning.plan import Way
from swift_rendezvous.node.job_key import JobKey
from swift_rendezvous.roster.records import AS_LONG_AS_IT_ADVANCES, AS_MANY_AS_PAY
from swift_rendezvous.store.etcd_config import EtcdConfig

# torchrun's.
DEFAULT_ROLE = "default"
DEFAULT_MASTER_ADDR = "127.0.0.1"
METRICS_ADDR = "127.0.0.1"

OnEtcdLoss = Literal["pause", "train"]


@dataclass(frozen=True)
class AgentConfig:
    """What one agent is to run, and how. Times in seconds."""

    launch: LaunchConfig
    """What torchrun would work with."""
    entrypoint: Callable[..., Any] | str
    """The program of a `command`, torch's `run_script_path` for a `function` (`--run-path`), else the interpreter."""
    entry_args: tuple[str, ...]
    """Its arguments, as torch builds them."""
    entry_kind: EntryKind
    training_script: str
    training_script_args: tuple[str, ...]
    job_id: str
    nnodes: int
    """The least of a range; that of *max_nodes* for a job of one size."""
    max_nodes: int
    """The most of a range."""
    nproc: int
    spares: int
    max_restarts: int
    """`AS_LONG_AS_IT_ADVANCES` where none was given."""
    restarts_window_s: float
    """For how long a restart counts; 0: for ever."""
    etcd: EtcdConfig | None
    """None when the agent has to start a private server."""
    node_id: str
    local_addr: str | None
    role: str
    standalone: bool
    num_standbys: int
    preload: tuple[str, ...]
    replacement_timeout_s: float
    join_timeout_s: float
    last_call_s: float
    """See `swift_rendezvous.roster.resizing`."""
    lease_ttl_s: int
    on_etcd_loss: OnEtcdLoss
    heartbeat_s: float
    stop_deadline_s: float
    preempt_grace_s: float
    """How long a node that got a signal to go waits for a spare."""
    drained_exit_code: int
    """Of a node that was drained by order."""
    metrics_addr: str
    """Where metrics and probes are served."""
    metrics_port: int | None
    """None: they are not served."""
    recovery: str
    log_groups: tuple[tuple[int, ...], ...]
    """See `JobRecord`."""
    log_budget: str
    """See `JobRecord`."""
    strategy: str
    """How lost state comes back."""
    helpers: int
    """See `JobRecord`."""
    parallel_sum: str
    """How what helpers have computed is put together."""
    key: JobKey = field(repr=False)
    keep_logs: bool = True
    """False when torch made a temporary log directory."""
    log_names: str = ""
    """See `swift_agent.launch.log_names`."""
    allow_injection: bool = False
    journal: str | None = None
    """The directory for journals; None: there are none."""
    profile: str | None = None
    """The file for what the job was measured to cost."""
    message_log: str | None = None
    """The directory for logs of messages; None: the agent's own."""
    message_log_bytes: int | None = None
    """What these logs may take on this node; None: half of what is free."""
    log_store: str | None = None
    """The URL that these logs are copied to; None: nowhere."""
    master_addr: str | None = None
    """Where workers shall meet, with *master_port*; None: anywhere."""
    master_port: int | None = None
    node_rank: int = 0
    """Which of the first nodes this one shall be."""

    @classmethod
    def from_args(cls, ns: argparse.Namespace, environ: Mapping[str, str] | None = None) -> AgentConfig:
        """Check *ns*, a namespace of `swift_agent.launch.options.parse_args`, and *environ* (default: `os.environ`).

        Raises `ConfigError` with every mistake that was found. On success `OMP_NUM_THREADS` may have been set in
        `os.environ` and the log directory made, both by torch and as under torchrun. *ns* is left as it is.
        """
        environ = os.environ if environ is None else environ
        mistakes: list[str] = []
        nnodes, max_nodes = _num_nodes(ns, mistakes)
        nproc = _num_workers(ns, mistakes)
        _check_numbers(ns, mistakes)
        _check_streams(ns, mistakes)
        if ns.log_names and (mistake := log_names.mistake_in(ns.log_names, ns.log_dir)):
            mistakes.append(mistake)
        kind = _entry_kind(ns, mistakes)
        _check_entry(kind, ns.training_script, environ, mistakes)
        preload = _preload(ns.preload, mistakes)
        if ns.recovery not in get_args(Way):
            mistakes.append(f"--recovery {ns.recovery}: there is no such way; type one of {', '.join(get_args(Way))}")
        groups = _log_groups(ns.log_groups, nnodes, max_nodes, mistakes)
        _check_strategy(ns, max_nodes > nnodes, mistakes)
        if ns.on_etcd_loss not in get_args(OnEtcdLoss):
            ways = " or ".join(get_args(OnEtcdLoss))
            mistakes.append(f"--on-etcd-loss {ns.on_etcd_loss}: there is no such way; type {ways}")
        if not 0 <= ns.drained_exit_code <= 255:
            mistakes.append(
                f"--drained-exit-code {ns.drained_exit_code}: must be from 0 to 255; type --drained-exit-code 75 or 0"
            )
        etcd = _etcd(ns, max_nodes, environ, mistakes)
        host = socket.gethostname()
        of_slurm = _node_of_slurm(ns, environ, mistakes)
        node_id = ns.node_id or environ.get("SWIFT_NODE_ID") or of_slurm or f"{host}-{os.getpid()}"
        _check_name("--node-id", node_id, mistakes)
        # As torchrun: a job that no other node can join gets an id of its own, so that two of them never meet.
        own_id = ns.standalone or (etcd is None and ns.rdzv_id == "none")
        job_id = str(uuid.uuid4()) if own_id else ns.rdzv_id
        _check_name("--rdzv-id", job_id, mistakes)
        join_timeout_s, last_call_s = _join_timeouts_s(ns, mistakes)
        secret = job_secret.read(environ, ns.job_secret_file, mistakes)
        journal = _directory("--journal", ns.journal or environ.get("SWIFT_JOURNAL") or None, mistakes)
        logs = _directory("--message-log", ns.message_log or environ.get("SWIFT_MESSAGE_LOG") or None, mistakes)
        log_store = _store("--log-store", ns.log_store or environ.get("SWIFT_LOG_STORE") or None, mistakes)
        if mistakes:
            raise ConfigError(mistakes)

        # torch warns about --master-addr when it sees no endpoint; a private etcd has none yet.
        endpoint = ",".join(etcd.endpoints) if etcd else "localhost:0"
        log_dir = ns.log_dir and Template(ns.log_dir).safe_substitute(host=host, node_id=node_id)
        changes = {
            "rdzv_endpoint": endpoint, "rdzv_id": job_id, "max_restarts": ns.max_restarts or 0, "log_dir": log_dir,
        }  # fmt: skip
        resolved = argparse.Namespace(**{**vars(ns), **changes})
        try:
            launch, entrypoint, entry_args = config_from_args(resolved)
        except OSError as error:
            where = f"--log-dir {log_dir}" if log_dir else "TMPDIR"
            raise ConfigError([
                f"{where}: no directory can be made there: {error.strerror}; name another one"
            ]) from error  # fmt: skip
        except (AssertionError, RuntimeError, ValueError) as error:
            raise ConfigError([str(error)]) from error
        return cls(
            launch=launch,
            entrypoint=entrypoint,
            entry_args=tuple(entry_args),
            entry_kind=kind,
            training_script=ns.training_script,
            training_script_args=tuple(ns.training_script_args),
            job_id=job_id,
            nnodes=nnodes,
            max_nodes=max_nodes,
            nproc=nproc,
            spares=ns.spares,
            max_restarts=AS_LONG_AS_IT_ADVANCES if ns.max_restarts is None else ns.max_restarts,
            restarts_window_s=ns.max_restarts_window or 0.0,
            etcd=etcd,
            node_id=node_id,
            local_addr=ns.local_addr,
            role=ns.role,
            standalone=ns.standalone,
            num_standbys=ns.standbys,
            preload=preload,
            replacement_timeout_s=ns.replacement_timeout,
            join_timeout_s=join_timeout_s,
            last_call_s=last_call_s,
            lease_ttl_s=ns.lease_ttl,
            on_etcd_loss=ns.on_etcd_loss,
            heartbeat_s=ns.heartbeat,
            stop_deadline_s=ns.stop_deadline,
            preempt_grace_s=ns.preempt_grace,
            drained_exit_code=ns.drained_exit_code,
            metrics_addr=ns.metrics_addr or METRICS_ADDR,
            metrics_port=ns.metrics_port,
            recovery=ns.recovery,
            log_groups=groups,
            log_budget=ns.log_budget,
            strategy=ns.strategy,
            helpers=_num_helpers(ns),
            parallel_sum=ns.parallel_sum or SUMS[0],
            profile=ns.profile or None,
            key=job_secret.key(secret, job_id, alone=etcd is None),
            keep_logs=ns.log_dir is not None,
            log_names=ns.log_names or "",
            allow_injection=bool(ns.allow_injection),
            journal=journal,
            message_log=logs,
            message_log_bytes=None if ns.message_log_limit is None else int(ns.message_log_limit * 1e9),
            log_store=log_store,
            # As under torchrun: a standalone job may share this machine with others.
            master_addr=None if ns.standalone or ns.master_addr == DEFAULT_MASTER_ADDR else ns.master_addr,
            master_port=None if ns.standalone else ns.master_port or None,
            node_rank=ns.node_rank,
        )


def _num_helpers(ns: argparse.Namespace) -> int:
    """As a `JobRecord` has it. With `--strategy auto` they have to be allowed: they run the script once more."""
    if ns.helpers is not None:
        return int(ns.helpers)
    return AS_MANY_AS_PAY if ns.strategy == "log+parallel" else 0
