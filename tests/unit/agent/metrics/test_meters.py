"""Who asks for the figures of an agent waits for etcd only where it is there to answer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from swift_agent.agent.lifecycle.state import AgentState
from swift_agent.agent.metrics.meters import Meters, Requests
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.directories import Directories
from swift_agent.launch.options import parse_args
from swift_rendezvous.store.kv import KeyValue
from tests.support.memory_store import MemoryStore
from tests.support.records import generation, view


class Asked(MemoryStore):
    """Counts the questions."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def get(self, key: str) -> KeyValue | None:
        self.num += 1
        return super().get(key)


def meters(config: AgentConfig, store: MemoryStore, is_away: Callable[[], bool], directories: Directories) -> Meters:
    """Of an agent whose job has recovered, and whose history nobody has asked for."""
    found = Meters(
        config, store, Requests(), directories,
        lambda: AgentState("n0", "n0.1"), is_away=is_away, lease_until_s=lambda: 0.0, num_standbys=lambda: None,
    )  # fmt: skip
    found.enters("runs")
    found.saw(first := view(tracked=True), 1.0)
    found.saw(second := replace(first, generation=generation(2, "replace", lost={1: (1,)})), 2.0)
    found.saw(replace(second, recovered=2), 3.0)
    return found


def test_the_history_is_asked_for_once_and_not_while_etcd_is_away() -> None:
    config = AgentConfig.from_args(parse_args(["--standalone", __file__]))
    store, away = Asked(), [True]
    with contextlib.closing(Directories(config)) as directories:
        asked = meters(config, store, lambda: away[0], directories)
        assert asked.snapshot() is not None and store.num == 0
        away[0] = False
        assert asked.snapshot() is not None and store.num == 1
        assert asked.snapshot() is not None and store.num == 1
