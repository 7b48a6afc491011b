"""The journal: every event, command and decision survives the file, what is no journal is refused, a changed core is
shown.
"""

from __future__ import annotations

import json
import math
import os
import random
import stat
import threading
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner, Result

from swift_agent.agent.journal import format, replay
from swift_agent.agent.journal.writer import Journal, open_journal
from swift_agent.agent.lifecycle import commands as cmd
from swift_agent.agent.lifecycle import events as msg
from swift_agent.agent.lifecycle import machine as lc
from swift_agent.agent.lifecycle import state as state_module
from swift_agent.agent.lifecycle.planning import plan_generation
from swift_agent.ctl import main
from swift_rendezvous.codec import RecordError
from swift_rendezvous.roster import decision as decisions
from swift_rendezvous.roster import losses
from swift_rendezvous.roster.decision import Decision, Rules
from swift_rendezvous.roster.membership import decide
from swift_rendezvous.roster.records import (
    CoordinatorRecord,
    FailureRecord,
    GenerationRecord,
    ProgressRecord,
    StoreRecord,
    WorkerExit,
)
from swift_rendezvous.roster.view import View
from tests.support import records

RULES = Rules(12.0, 34.0)


def sample(kind: Any, name: str = "", salt: int = 1) -> Any:
    """Some value of type *kind* in which every field is set. A type that is not known here fails the test."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{f.name: sample(hints[f.name], f.name, salt + n) for n, f in enumerate(fields(kind))})
    if origin is tuple:
        return tuple(sample(args[0], name, salt + n) for n in range(2))
    if origin in (dict, Mapping):
        return {sample(args[0], name, salt + n): sample(args[1], name, salt + n) for n in range(2)}
    if origin is Literal:
        return args[salt % len(args)]
    if type(None) in args:
        return sample(args[0], name, salt)
    if kind is Any:
        return {"nested": [salt, "text", 0.1, None, True]}
    known = {bool: True, int: salt, float: salt / 3, str: f"{name}-{salt}"}
    return known[kind]


@pytest.mark.parametrize("kind", format.EVENTS.values(), ids=lambda kind: kind.__name__)
def test_every_event_survives_the_journal(kind: type[Any]) -> None:
    event = sample(kind)
    views = {7: sample(View)}
    if kind is msg.ViewChanged:
        event = msg.ViewChanged(views[7])
    line = json.loads(format.line_of(format.event_line(event, 1.5, (), 7)))
    assert line["now_s"] == 1.5
    assert format.event_of(line["event"], views.__getitem__) == event


@pytest.mark.parametrize("union", [msg.Event, cmd.Command, decisions.Command], ids=["event", "command", "decision"])
def test_every_type_of_a_union_survives(union: Any) -> None:
    types = format.types_of(union)
    assert len(types) == len(typing.get_args(union)) > 4
    for kind in types.values():
        value = sample(kind)
        if kind is not msg.ViewChanged:  # its view is written by its number
            assert format.untagged(types, json.loads(json.dumps(format.tagged(value)))) == value
    with pytest.raises(RecordError, match="knows no event or command 'Nonsense'"):
        format.untagged(types, {"type": "Nonsense"})


def test_every_field_of_a_view_survives() -> None:
    view = sample(View)
    changes = format.view_changes(View(), view)
    assert set(changes) == {f.name for f in fields(View)}
    text = format.line_of(changes)
    assert format.changed_view(View(), json.loads(text)) == view


def test_a_walk_over_views_is_told_by_what_changes() -> None:
    random_ = random.Random(7)
    told = written = records.view()
    for step in range(300):
        slot = random_.randrange(4)
        name = f"n{slot}"
        options: list[dict[str, Any]] = [
            {"failures": {**written.failures, slot: records.failure("node", slot)}},
            {"failures": {key: item for key, item in written.failures.items() if key != slot}},
            {"nodes": {**written.nodes, name: records.node(name, step)}},
            {"nodes": {key: item for key, item in written.nodes.items() if key != name}},
            {"generation": records.generation(step), "failures": {}, "progress": {}, "plan": None},
            {"store": StoreRecord("host", step, nonce="9")},
            {"tracked": not written.tracked, "preload": ("a", "b")[: step % 3]},
            {"progress": {**written.progress, slot: ProgressRecord(slot, name, ({"rank": slot},))}},
        ]
        following = replace(written, revision=step, **random_.choice(options))
        changes = json.loads(json.dumps(format.view_changes(written, following)))
        assert set(changes) <= {"revision", "failures", "nodes", "generation", "progress", "plan", "store", "tracked",
                                "preload"}
        told = format.changed_view(told, changes)
        written = following
        assert replace(told, nodes={}) == replace(written, nodes={})
        assert {key: item.incarnation for key, item in told.nodes.items()} == {
            key: item.incarnation for key, item in written.nodes.items()
        }


def test_a_state_begins_with_little() -> None:
    state = state_module.AgentState("n0", "n0.1", 3, 5.0, restarts_used=2)
    plain = format.state_plain(state)
    assert set(plain) == {"node_id", "incarnation", "max_restarts", "stop_deadline_s", "restarts_used"}
    assert format.state_of(json.loads(json.dumps(plain))) == state
    worker = state_module.Worker(0, 1, 7, exit=WorkerExit(0, 0, 7, -9, "h"), report={"rank": 0})
    state = replace(state, workers={0: worker}, view=records.view(nodes={}))
    assert format.state_of(json.loads(json.dumps(format.state_plain(state)))) == state


# ---- a file ----


class Job:
    """A lifecycle and a coordinator's decisions under a journal, as an agent drives them."""

    def __init__(self, directory: Path) -> None:
        self.me = records.node("n0")
        opened = open_journal(str(directory), "gpt", self.me, RULES)
        assert opened is not None
        self.journal, self.path = opened, Path(opened.path)
        self.state = state_module.AgentState("n0", "n0.1", 3, 5.0)
        self.now_s, self.revision = 100.0, 0
        self.planner = self.journal.planner(plan_generation)
        self.journal.begin(self.state)

    def tell(self, *events: msg.Event) -> None:
        for event in events:
            self.now_s += 0.1
            step = lc.on_event(self.state, event, now_s=self.now_s)
            self.state = step.state
            self.journal.event(event, self.now_s, step.commands)

    def see(self, view: View) -> Decision:
        self.revision += 1
        view = replace(view, revision=self.revision)
        decision = decide(view, RULES, now_s=self.now_s, waiting_since_s=None)
        self.journal.decision(view, self.now_s, None, decision)
        self.tell(msg.ViewChanged(view))
        return decision

    def run(self) -> Path:
        """Two nodes; a worker of this one dies, and then the other node."""
        nodes = {name: records.node(name) for name in ("n0", "n1", "n2")}
        seen = records.view(nodes=nodes, store=StoreRecord("h", 1, 2, "9"))
        start = self.see(replace(seen, generation=None, plan=None, store=None))
        assert isinstance(start.commands[0], decisions.PublishGeneration)
        self.planner(start.commands[0].generation, seen)
        self.see(seen)
        self.tell(*(msg.WorkerStarted(rank, 1, 100 + rank) for rank in (0, 1)))
        self.tell(*(msg.HelloReceived(rank, 100 + rank) for rank in (0, 1)), msg.Tick())
        exit_ = WorkerExit(1, 1, 101, -9, "n0")
        self.tell(msg.WorkerExited(exit_), msg.Tick())
        failure = FailureRecord("workers", 0, "n0.1", (1,), "rank 1 died", "n0", 3, (exit_,))
        decision = self.see(replace(seen, failures={0: failure}))
        assert isinstance(decision.commands[0], decisions.PublishGeneration)
        second: GenerationRecord = decision.commands[0].generation
        report = {"rank": 0, "status": "holding", "iteration": 7, "replicas": "0-3", "sections": 0}
        self.tell(msg.ReportReceived(0, 100, 1, report))
        progress = {0: ProgressRecord(0, "n0.1", (report, {"rank": 1, "status": "fresh"}))}
        others = ({**report, "rank": 2}, {**report, "rank": 3})
        seen = replace(seen, generation=second, plan=None, store=None, failures={}, progress=progress)
        self.see(seen)
        seen = replace(seen, progress={**progress, 1: ProgressRecord(1, "n1.1", others)})
        self.see(seen)
        self.planner(second, seen)
        self.tell(msg.PeerLost("n1.1", "silent"), msg.Tick())
        self.journal.close()
        return self.path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Job(tmp_path / "journals").run()


def swiftctl_replay(path: Path, *options: str) -> Result:
    result = CliRunner().invoke(main.cli, ["replay", str(path), *options])
    assert "Traceback" not in result.output
    return result


def test_a_journal_replays_as_the_same(path: Path) -> None:
    assert path.name == "gpt.n0.n0.1.jsonl" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    result = swiftctl_replay(path)
    assert result.exit_code == 0, result.output
    assert "job gpt, node n0" in result.output and "15 events, 5 decisions, 2 plans: same" in result.output
    found = json.loads(swiftctl_replay(path, "--json").stdout)
    assert (found["verdict"], found["num_events"], found["difference"], found["cut_at"]) == ("same", 15, None, None)


def test_each_view_is_written_once_as_what_changed(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    views = [line for line in lines if "changes" in line]
    assert [line["view"] for line in views] == [1, 2, 3, 4, 5]
    assert set(views[4]["changes"]) == {"revision", "progress"} and set(views[4]["changes"]["progress"]["put"]) == {"1"}
    assert lines[-1]["event"]["type"] == "Tick" and set(lines[-1]) == {"event", "now_s"}


def test_a_changed_lifecycle_is_found_and_shown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: an agent that forgets to say which workers it lost."""
    monkeypatch.setattr(lc, "_report_losses", lambda state, generation, slot, commands: state)
    result = swiftctl_replay(path)
    lines = path.read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if '"WorkerExited"' in line)
    assert result.exit_code == 3
    assert f"line {number}, event WorkerExited: " in result.output and '"exit_code": -9' in result.output
    assert '-    "type": "WriteFailure"' in result.output and "+++ today" in result.output


def test_a_changed_membership_is_found_and_shown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a lost worker restarts all of them."""

    def changed(view: View, rules: Rules, **times: Any) -> Decision:
        return decide(replace(view, tracked=False), rules, **times)

    monkeypatch.setattr(replay, "decide", changed)
    result = swiftctl_replay(path)
    assert result.exit_code == 3
    assert ', decision: {"view": 3' in result.output
    assert '-        "mode": "replace"' in result.output and '+        "mode": "restart"' in result.output


def test_a_changed_planner_is_found_and_shown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: in place, the reports of slot 1 are overlooked."""

    def forgetful(generation: GenerationRecord, view: View) -> Any:
        progress = {slot: record for slot, record in view.progress.items() if slot != 1}
        return plan_generation(generation, replace(view, progress=progress))

    monkeypatch.setattr(replay, "plan_generation", forgetful)
    found = json.loads(swiftctl_replay(path, "--json").stdout)
    assert found["verdict"] == "differs" and found["difference"]["what"] == "plan of generation 2"


def test_what_is_decided_about_missing_nodes_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path / "journals")
    coordinator = CoordinatorRecord("n0", "n0.1")
    seen = records.view(nodes={"n0": records.node("n0")}, coordinator=coordinator)  # n1 has a slot and no record
    asked = ((100.0, math.inf), (100.2, 3.0), (140.0, 43.0))
    waiting, still, late = (
        losses.missing(seen, RULES, now_s=now_s, absent_since_s={"n1.1": 100.0}, unbroken_s=unbroken_s)
        for now_s, unbroken_s in asked
    )
    for decision, (now_s, unbroken_s) in zip((waiting, still, late), asked, strict=True):
        assert decision is not None
        job.journal.missing(seen, now_s, {"n1.1": 100.0}, unbroken_s, decision)
    job.journal.close()
    assert late is not None and late.commands
    lines = job.path.read_text()
    assert "Infinity" not in lines and lines.count('"absent_since_s"') == 3
    assert "0 events, 3 decisions, 0 plans: same" in swiftctl_replay(job.path).output
    monkeypatch.setattr(replay, "missing", lambda *args, **times: None)
    result = swiftctl_replay(job.path)
    assert result.exit_code == 3 and "the lease of n1 is gone" in result.output


def test_the_constants_of_the_journal_count(path: Path) -> None:
    lines = path.read_text().splitlines()
    rules = {"replacement_timeout_s": 12.0, "join_timeout_s": 34.0, "return_s": 0.0, "outage_s": 0.0,
             "last_call_s": 30.0}
    assert json.loads(lines[0])["rules"] == rules
    assert json.loads(lines[1])["state"]["max_restarts"] == 3
    path.write_text("\n".join(lines).replace('"max_restarts":3', '"max_restarts":0', 1) + "\n")
    assert '-      "restarts_left": 3' in swiftctl_replay(path).output


@pytest.mark.parametrize("at", ["in the last line", "behind its last brace", "in the middle"])
def test_a_journal_that_was_cut_is_read_up_to_there(path: Path, at: str) -> None:
    whole = path.read_bytes()
    num_lines = whole.count(b"\n")
    cut = {"in the last line": -9, "behind its last brace": -1, "in the middle": -len(whole) // 2}[at]
    os.truncate(path, len(whole) + cut)
    result = swiftctl_replay(path)
    assert result.exit_code == 0, result.output
    if at == "behind its last brace":
        assert "15 events" in result.output and "in the middle of" not in result.output
    else:
        line = whole[:cut].count(b"\n") + 1
        assert line <= num_lines and f"ends in the middle of line {line};" in result.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("# CHANGELOG\n", "its first line is not JSON"),
        ('{"v": 1}\n', "not the head of one"),
        ("[1]\n", "not the head of one"),
        ('{"journal": 99, "version": "7.1"}\n', "format 99 of swift-agent 7.1; this version reads format 1"),
        ('{"journal": 1, "rules": 3}\n', "rules: expected an object"),
        ('{"journal": 1, "rules": {}}\n{"event": {"type": "Tick"}, "now_s": 1}\n', "line 2 cannot be read"),
        ('{"journal": 1, "rules": {}}\n{"sta\n{"state": {}}\n', "line 2 is damaged"),
        ('{"journal": 1, "rules": {}}\n7\n', "line 2 cannot be read"),
        ('{"journal": 1, "rules": {}}\n{"state": {"node_id": "n", "incarnation": "i"}}\n'
         '{"event": {"type": "NewsFromTheFuture"}, "now_s": 1}\n', "knows no event or command 'NewsFromTheFuture'"),
        ('{"journal": 1, "rules": {}}\n{"decision": {"commands": []}, "view": 5, "now_s": 1}\n', "line 2 cannot"),
    ],
)  # fmt: skip
def test_what_is_no_journal_is_said(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    result = swiftctl_replay(path)
    assert result.exit_code == 1 and said in result.stderr, result.output
    path.write_bytes(b"\xff\xfe\x00\x01")
    assert swiftctl_replay(path).exit_code == 1
    assert swiftctl_replay(tmp_path / "none").exit_code == 2 and swiftctl_replay(tmp_path).exit_code == 2


def test_a_full_disk_ends_the_journal_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(os.open("/dev/full", os.O_WRONLY), "the-journal", {})
    for _ in range(100):
        journal.event(msg.Tick(), 1.0, ())
    journal.close()
    journal.event(msg.Tick(), 1.0, ())
    assert [record.getMessage() for record in caplog.records] == [
        "the journal the-journal ends here: [Errno 28] No space left on device"
    ]


def test_a_disk_that_hangs_holds_up_nobody(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_agent.agent.journal.writer.MAX_QUEUED", 1000)
    monkeypatch.setattr("swift_agent.agent.journal.writer.CLOSE_TIMEOUT_S", 0.1)
    # A pipe that nobody reads blocks its writer as a dead network disk does.
    reader, writer = os.pipe()
    journal = Journal(writer, "the-journal", {"head": "x" * 100_000})
    for _ in range(2000):
        journal.event(msg.Tick(), 1.0, ())
    journal.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the journal the-journal ends here: the disk is slower than the job: 1000 entries are waiting"
    ]
    os.close(reader)  # its writer gets an error and ends
    journal._thread.join(5)
    assert not journal._thread.is_alive()


def test_a_directory_that_cannot_be_written_costs_the_journal_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert open_journal(str(tmp_path / "file"), "gpt", records.node("n0"), RULES) is None
    assert open_journal(str(tmp_path), "j" * 300, records.node("n0"), RULES) is None
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["no journal is written"] * 2
    assert open_journal(None, "gpt", records.node("n0"), RULES) is None


def test_no_journal_is_written_without_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert open_journal(str(tmp_path), "job", records.node("a"), RULES) is None
    assert "no journal is written: the thread swift-journal cannot be started" in caplog.text
    assert list(tmp_path.iterdir()) == []
