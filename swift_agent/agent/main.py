"""Runs one node of a job: its etcd, shared or private, and its agent. Must never hold policy."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from swift_agent.agent.loop import Agent
from swift_agent.agent.metrics.meters import Requests
from swift_agent.agent.processes.linux import many_descriptors
from swift_agent.launch import host, secret, slurm, torch_range
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.console import show_decisions
from swift_agent.launch.directories import Directories
from swift_agent.launch.signals import CaughtSignals
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig
from swift_rendezvous.store.kv import PermissionDenied
from swift_rendezvous.store.private_etcd import PrivateEtcd

log = logging.getLogger(__name__)

T = TypeVar("T")

# How long an agent that begins waits for a way to etcd, and how often it looks.
NETWORK_S = 30.0
RETRY_S = 0.2


def launch_agent(config: AgentConfig, signals: CaughtSignals, all_children_are_ours: bool = False) -> str:
    """Run one node of the job to its end. *signals* have been entered by the caller. *all_children_are_ours*: this
    process has no other purpose, so that all its children are waited for; else only those that the agent has made.

    Returns `succeeded` when all workers of the job have, `drained` when this node has left by order. Raises
    `ChildFailedError` with the root cause if a worker ended it, `JobStopped` if it was stopped or no node took a vacant
    slot, torch's `SignalException` if this agent was signalled. In every case no process, socket or key of this agent
    is left, and no directory but the error files of the workers that failed: `ChildFailedError` names them.
    """
    closing = _closed_at_last(contextlib.closing(Directories(config)), "the directories of this agent")
    with many_descriptors() as raised, closing as directories:
        signals.raise_caught()
        show_decisions(config.node_id)
        if raised:
            log.info("%s", raised)
        of_slurm = slurm.describe(os.environ, config.max_nodes + config.spares)
        if of_slurm:
            log.info("%s", of_slurm)
        for warning in (secret.warning(config.key), torch_range.warning(importlib.metadata.version("torch"))):
            if warning:
                log.warning("%s", warning)
        try:
            with contextlib.ExitStack() as stack:
                etcd, private = config.etcd, PrivateEtcd(loopback=False)
                if etcd is None:
                    etcd = stack.enter_context(_closed_at_last(private, "the private etcd")).config
                    log.info("a private etcd runs for this job: swiftctl status --rdzv-endpoint %s", *etcd.endpoints)
                requests = Requests()
                asked = None if config.metrics_port is None else requests.asked
                store = stack.enter_context(_closed_at_last(EtcdStore(etcd, asked), "the connection to etcd"))
                signals.raise_caught()
                address = _address(config, signals)
                why_gone = lambda: private.why_gone  # noqa: E731
                agent = Agent(config, address, store, directories, signals, requests, why_gone, all_children_are_ours)
                return agent.run()
        except ChildFailedError as error:
            directories.keep(failure.error_file for failure in error.failures.values())
            raise
        except PermissionDenied as error:
            if config.etcd is None:
                raise
            raise PermissionDenied(_describe_denied(error, config.etcd, Keys(config.job_id).prefix)) from None


def _address(config: AgentConfig, signals: CaughtSignals) -> str:
    """See `host.local_host`. A network that comes up later, or is away for a moment, is waited for, which is told."""
    deadline_s, is_told = time.monotonic() + NETWORK_S, False
    while True:
        try:
            return host.local_host(config.local_addr, config.etcd)
        except host.NoWay as error:
            if time.monotonic() >= deadline_s:
                raise
            if not is_told:
                log.warning("%s; trying for %g s", error, NETWORK_S)
            is_told = True
        signals.raise_caught()
        time.sleep(RETRY_S)


@contextlib.contextmanager
def _closed_at_last(resource: AbstractContextManager[T], what: str) -> Iterator[T]:
    """Within *resource*. How the job ended is not hidden by what goes wrong when that is closed."""
    opened = resource.__enter__()
    try:
        yield opened
    finally:
        try:
            resource.__exit__(None, None, None)
        except Exception as error:
            log.warning("%s could not be closed: %s: %s", what, type(error).__name__, error)


def _describe_denied(error: PermissionDenied, etcd: EtcdConfig, prefix: str) -> str:
    who = f"user {etcd.user!r}" if etcd.user else "the user of this client certificate"
    return (
        f"{error}: {who} needs a role that may read and write {prefix}; "
        f"type `etcdctl role grant-permission ROLE --prefix=true readwrite {prefix}` (docs/etcd-login.md)"
    )
