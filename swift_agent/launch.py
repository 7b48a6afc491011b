"""Runs one node of a job: its etcd, shared or private, and its agent. Must hold no policy."""

from __future__ import annotations

import contextlib
import logging

from swift_agent import job_secret
from swift_agent.agent import Agent
from swift_agent.config import AgentConfig
from swift_agent.console import show_decisions
from swift_agent.directories import Directories
from swift_agent.signals import CaughtSignals
from swift_rendezvous.etcd import EtcdStore
from swift_rendezvous.etcd_config import EtcdConfig
from swift_rendezvous.keys import Keys
from swift_rendezvous.kv import PermissionDenied
from swift_rendezvous.private_etcd import PrivateEtcd

log = logging.getLogger(__name__)


def launch_agent(config: AgentConfig, signals: CaughtSignals) -> None:
    """Run one node of the job to its end. *signals* have been entered by the caller.

    Returns when all workers of the job have succeeded. Raises `ChildFailedError` with the root cause if a worker ended
    it, `JobStopped` if it was stopped or no node took a vacant slot, torch's `SignalException` if this agent was
    signalled. In every case no process, socket, directory or key of this agent is left.
    """
    with contextlib.closing(Directories(config)) as directories:
        signals.raise_first()
        show_decisions(config.node_id)
        open_to_all = job_secret.warning(config.key)
        if open_to_all:
            log.warning("%s", open_to_all)
        if config.etcd is None:
            with PrivateEtcd() as server, EtcdStore(server.config) as store:
                signals.raise_first()
                Agent(config, store, directories, signals).run()
            return
        try:
            with EtcdStore(config.etcd) as store:
                Agent(config, store, directories, signals).run()
        except PermissionDenied as error:
            raise PermissionDenied(_describe_denied(error, config.etcd, Keys(config.job_id).prefix)) from None


def _describe_denied(error: PermissionDenied, etcd: EtcdConfig, prefix: str) -> str:
    who = f"user {etcd.user!r}" if etcd.user else "the user of this client certificate"
    return (
        f"{error}: {who} needs a role that may read and write {prefix}; "
        f"type `etcdctl role grant-permission ROLE --prefix=true readwrite {prefix}` (docs/security.md)"
    )
