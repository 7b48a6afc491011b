"""What an agent has written: each record only while it is true."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from swift_agent.agent.executor import Executor
from swift_agent.agent.lifecycle import commands
from swift_agent.agent.lifecycle.state import AgentState, Suspicion
from swift_agent.agent.record_writer import Write
from swift_rendezvous.roster.records import FailureRecord, JobRecord, NodeRecord
from swift_rendezvous.roster.view import View


def test_evidence_that_has_aged_while_workers_were_started_is_not_written() -> None:
    """The command to write it was given before that; it counts from when it was seen, not from then."""
    writes: list[Write] = []
    parts: dict[str, Any] = {
        "config": SimpleNamespace(job_id="job"), "store": None, "crew": None, "channels": None, "stores": None,
        "directories": SimpleNamespace(socket="", messages=""), "writer": SimpleNamespace(submit=writes.append),
        "presence": lambda: SimpleNamespace(me=NodeRecord("n0", "n0.1", "127.0.0.1", 1, 1, "command")),
    }  # fmt: skip
    state = AgentState("n0", "n0.1", view=View(job=JobRecord(2, 2, "c")))
    executor = Executor(**parts, state=lambda: state, doubt=lambda peer: None, timers="")
    command = commands.WriteFailure(0, FailureRecord("node", 1, "n1.1", (), "silent", "n0", 0))
    executor.execute(command, 5.0)
    assert writes == []
    state = replace(state, lost_peers={"n1.1": Suspicion("silent", False, 5.0)})
    executor.execute(command, 5.0)
    assert [write.what for write in writes] == ["failure"] and writes[0].wanted()
