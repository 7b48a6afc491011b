"""What an agent has written: each record only while it is true."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_agent.agent.executor import Executor
from swift_agent.agent.lifecycle import commands, strategy
from swift_agent.agent.lifecycle.state import AgentState, Suspicion
from swift_agent.agent.record_writer import Write
from swift_agent.wire import messages as wire
from swift_agent.wire.environment import helper_number
from swift_recovery.planning.plan import Plan
from swift_rendezvous.roster.records import (
    FailureRecord,
    Helper,
    JobRecord,
    KernelsRecord,
    NodeRecord,
    PlanRecord,
    ProfileRecord,
    StoreRecord,
)
from swift_rendezvous.roster.view import View
from tests.support.records import generation, view


def executor(writes: list[Write], state: Callable[[], AgentState], crew: Any = None, **config: Any) -> Executor:
    parts: dict[str, Any] = {
        "config": SimpleNamespace(job_id="job", **config), "store": None, "crew": crew, "channels": None,
        "stores": None, "directories": SimpleNamespace(socket="", messages=""),
        "writer": SimpleNamespace(submit=writes.append),
        "presence": lambda: SimpleNamespace(me=NodeRecord("n0", "n0.1", "127.0.0.1", 1, 1, "command")),
    }  # fmt: skip
    return Executor(**parts, state=state, doubt=lambda peer: None, timers="")


def test_evidence_that_has_aged_while_workers_were_started_is_not_written() -> None:
    """The command to write it was given before that; it counts from when it was seen, not from then."""
    writes: list[Write] = []
    state = AgentState("n0", "n0.1", view=View(job=JobRecord(2, 2, "c")))
    agent = executor(writes, lambda: state)
    command = commands.WriteFailure(0, FailureRecord("node", 1, "n1.1", (), "silent", "n0", 0))
    agent.execute(command, 5.0)
    assert writes == []
    state = replace(state, lost_peers={"n1.1": Suspicion("silent", False, 5.0)})
    agent.execute(command, 5.0)
    assert [write.what for write in writes] == ["failure"] and writes[0].wanted()


@pytest.mark.parametrize("node", ["n0", "n2"])
def test_of_paused_workers_is_told_where_there_are_any(node: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    state = AgentState(node, f"{node}.1", view=view(names=("n0", "n1", "n2")))
    agent = executor([], lambda: state, crew=SimpleNamespace(signal=lambda signum: None))
    agent.execute(commands.PauseWorkers("etcd is silent"), 5.0)
    agent.execute(commands.ResumeWorkers(), 6.0)
    paused, resumed = caplog.messages
    assert paused.startswith("etcd is silent. ")
    assert [said.count("workers of this node are paused") for said in (paused, resumed)] == [node == "n0", 0]
    assert ("its workers are not paused" in resumed) == (node == "n0")
    assert ("spare" in paused and "spare" in resumed) == (node == "n2")


def test_what_a_job_costs_is_written_again_if_a_failure_came_first_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    writes: list[Write] = []
    known = ProfileRecord({"name": "J"}, ("measured: so", "  log: taken"), "log")
    monkeypatch.setattr(strategy, "decide", lambda view, job_id: known)
    agent = executor(writes, lambda: AgentState("n0", "n0.1"), profile=str(tmp_path / "measured.json"))
    for number, acting in ((1, False), (1, True), (1, True), (2, True), (2, True)):
        agent.saw(view(tracked=False, generation=generation(number)), acting)
    assert [write.what for write in writes] == ["profile"] * 2 and not caplog.messages
    assert not (tmp_path / "measured.json").exists()
    for number, acting in ((2, True), (2, False), (3, True)):
        agent.saw(view(tracked=False, generation=generation(number), profile=known), acting)
    assert len(writes) == 2 and caplog.messages == list(known.lines)
    assert json.loads((tmp_path / "measured.json").read_text()) == {"name": "J"}
    final = ProfileRecord({"name": "J", "checkpoint_s": 1}, ("measured: more", "  log: taken"), "log", is_final=True)
    monkeypatch.setattr(strategy, "refine", lambda view, job_id: final)
    for profile in (known, known, final, final):
        agent.saw(view(tracked=False, generation=generation(3), profile=profile), True)
    assert len(writes) == 3 and caplog.messages == [*known.lines, "measured: more"]
    assert json.loads((tmp_path / "measured.json").read_text()) == final.content


def test_who_has_not_decided_does_not_tell_but_writes_its_file_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    known = ProfileRecord({"name": "J"}, ("measured: so",), "log")
    agent = executor([], lambda: AgentState("n0", "n0.1"), profile=str(tmp_path / "gone" / "measured.json"))
    for _ in range(2):
        agent.saw(view(tracked=False, profile=known), True)
    (said,) = caplog.messages
    assert said.endswith("cannot be written: No such file or directory")


def test_what_ranks_compute_with_is_written_once_in_a_run() -> None:
    writes: list[Write] = []
    state = AgentState("n0", "n0.1", view=view(generation=generation(1)))
    agent = executor(writes, lambda: state)
    agent.kernels(wire.Kernels(("AVX2", "AVX512"), (0, 1)))
    assert [write.what for write in writes] == ["kernels"]
    state = replace(state, view=replace(state.view, kernels=KernelsRecord(("AVX2", "AVX512"), (0, 1))))
    agent.kernels(wire.Kernels(("AVX512",), (0, 0)))
    assert len(writes) == 1
    agent.kernels(wire.Kernels(("AVX512",), (0, 0, 0)))
    assert len(writes) == 2, "the job has changed its size"


def test_a_process_is_told_what_the_last_one_on_this_node_computed_with() -> None:
    """And where there was none, what the first one of its rank did: what differs is told once on a node."""
    known = KernelsRecord(("AVX2",), (0,) * 4)
    state = AgentState("n0", "n0.1", view=view(generation=generation(1), kernels=known))
    config: dict[str, Any] = {
        "strategy": "", "etcd": "e", "role": "", "max_restarts": 0, "nnodes": 2, "max_nodes": 2, "launch": None,
        "allow_injection": False, "message_log_bytes": None, "log_store": None, "helpers": 0,
    }  # fmt: skip
    agent = executor([], lambda: state, **config)
    parts: Any = agent
    parts._channels = SimpleNamespace(path="")
    parts._presence = lambda: SimpleNamespace(me=NodeRecord("n0", "n0.1", "127.0.0.1", 1, 1, "command"), job=5)
    assert agent._placement(1).computed == ("AVX2", "AVX2")
    agent.kernels(wire.Kernels(("AVX2", "AVX512"), (0, 0, 0, 1)))
    assert agent._placement(1).computed == ("AVX2", "AVX512")
    agent.kernels(wire.Kernels(("AVX512",), (0, 0)))
    assert agent._placement(1).computed == ("AVX2", "AVX2"), "of another size"


def test_all_are_told_how_many_help_and_a_helper_which_share_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    named = replace(
        generation(2, "replace", lost={1: (1,)}), helpers=tuple(Helper(3, share, "n0", "n0.1") for share in (1, 2))
    )
    plan = PlanRecord(2, Plan("copy", "w", 7, replays=(3,), checkpoint=4).to_json(), "w")
    now = AgentState("n0", "n0.1", view=view(generation=named, plan=plan, store=StoreRecord("h", 1, 2, "n")))
    sent: list[tuple[tuple[int, ...], Any]] = []
    killed: list[int] = []
    started: list[tuple[Any, int]] = []
    agent = executor([], lambda: now)
    parts: Any = agent
    parts._channels = SimpleNamespace(send=lambda ranks, message: sent.append((ranks, message)))
    parts._stores = SimpleNamespace(token=lambda number, store: "t")
    parts._crew = SimpleNamespace(
        kill_helper=killed.append, start_helper=lambda place, number: started.append((place, number))
    )
    parts._placement = lambda slot: f"the place of slot {slot}"
    number = helper_number(2, 1)
    for command in (
        commands.SendGo((0, 1), 2), commands.SendHelp(number, 2), commands.StartHelper(number, 3, 2),
        commands.KillHelper(number, 3, "its rank trains"),
    ):  # fmt: skip
        agent.execute(command, 0.0)
    assert [(ranks, go.helpers, go.share) for ranks, go in sent] == [((0, 1), 2, 0), ((number,), 2, 2)]
    assert started == [("the place of slot 1", number)] and killed == [number]
    assert caplog.messages == ["helper 2 of rank 3 is ended: its rank trains"]
    now = replace(now, view=replace(now.view, plan=replace(plan, content=Plan("copy", "w", 7).to_json())))
    agent.execute(commands.SendGo((0, 1), 2), 0.0)
    assert sent[-1][1].helpers == 0
