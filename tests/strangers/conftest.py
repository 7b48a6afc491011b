"""The fixtures of the fault tests: one etcd for all, agents that are forked."""

from __future__ import annotations

from tests.faults.conftest import etcd, forks, make_agents

__all__ = ["etcd", "forks", "make_agents"]
