"""The fixtures of the fault tests: one etcd for all, agents that are forked."""

from __future__ import annotations

from tests.faults.conftest import etcd, make_agents

__all__ = ["etcd", "make_agents"]
