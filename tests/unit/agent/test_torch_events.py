"""Events of a job with a restart, as torch's agent records them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.events.api import Event

from swift_agent.agent.torch_events import AgentEvents, Ended
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.options import parse_args
from swift_agent.wire.environment import Placement

PLACE = Placement(1, 2, 2, "trainer", "job", "127.0.0.1", 1, 0, 3, 1, "", first_rank=1, world_size=3)


def test_a_restart_and_a_failure() -> None:
    put: list[Event] = []
    config = AgentConfig.from_args(parse_args(["--standalone", "--role", "trainer", __file__]))
    events = AgentEvents(config, lambda event, _: put.append(event))
    for restart in (0, 1):
        events.meets(replace(PLACE, restart_count=restart))
        events.started(0, 100 + restart)
        events.waits()
    events.ended(False, [Ended(0, 101, 1, {"message": "lost"}), Ended(1, 102, -15, None)])
    events.agent_ended()
    found: list[tuple[Any, ...]] = []
    for event in put:
        data = event.metadata
        details = json.loads(str(data["metadata"]))
        assert data["role"] == "trainer" and event.name.endswith(str(data["state"]))
        ranks = data["global_rank"], data["group_rank"], data["agent_restarts"]
        found.append((data["state"], event.source.value, *ranks, details["group_world_size"], details.get("exit_code")))
    # As torch's: the place is still the one before while ranks are handed out, the restart is counted already.
    assert found == [
        ("RENDEZVOUS", "AGENT", None, None, 0, None, None), ("ASSIGN_WORKER_RANKS", "AGENT", None, None, 0, None, None),
        ("START", "WORKER", 1, 1, 0, 2, [None]),
        ("RENDEZVOUS", "AGENT", None, 1, 1, 2, None), ("ASSIGN_WORKER_RANKS", "AGENT", None, 1, 1, 2, None),
        ("START", "WORKER", 1, 1, 1, 2, [None]),
        ("FAILED", "WORKER", 1, 1, 1, 2, [1]), ("TERMINATED", "WORKER", 2, 1, 1, 2, [None]),
        ("SUCCEEDED", "AGENT", None, 1, 1, 2, None),
    ]  # fmt: skip


def test_a_handler_that_fails_is_told_once(caplog: Any) -> None:
    def fail(*_: object) -> None:
        raise ValueError("full")

    events = AgentEvents(AgentConfig.from_args(parse_args(["--standalone", __file__])), fail)
    events.meets(PLACE)
    events.agent_ended()
    assert caplog.text.count("an event could not be recorded") == 1
