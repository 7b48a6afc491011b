"""From journals to the past of a job: one agent's, several agents', and what each of them cannot know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from swift_agent.agent.journal.format import FORMAT, event_line, line_of, view_changes
from swift_agent.agent.journal.reading import JournalError
from swift_agent.agent.lifecycle import events as msg
from swift_agent.ctl.timeline.assemble import assemble
from swift_agent.ctl.timeline.from_journals import Journal, read, read_lines
from swift_rendezvous.roster.records import PlanRecord, RateRecord, ResultRecord, ResumedRecord
from swift_rendezvous.roster.view import View
from tests.support import records
from tests.support.timelines import T, copied

BOOTED_S = 1000.0
"""The monotonic clock of every node at T."""


class Agent:
    """Writes a journal as an agent does."""

    def __init__(self, node: str, job: str = "gpt") -> None:
        header = {"journal": FORMAT, "version": "1", "job": job, "node": node, "incarnation": f"{node}.1",
                  "rules": {}, "time_s": T, "now_s": BOOTED_S}  # fmt: skip
        self.lines = [line_of(header), line_of({"state": {}})]
        self.view, self.number = View(), 0

    def sees(self, after_s: float, view: View) -> None:
        self.number += 1
        self.lines.append(line_of({"view": self.number, "changes": view_changes(self.view, view)}))
        self.view = view
        self.lines.append(line_of(event_line(msg.ViewChanged(view), BOOTED_S + after_s, (), self.number)))

    def hears(self, after_s: float, event: msg.Event) -> None:
        self.lines.append(line_of(event_line(event, BOOTED_S + after_s, (), None)))

    def marks(self, after_s: float, began_s: Mapping[int, float]) -> None:
        marks = {iteration: BOOTED_S + at_s for iteration, at_s in began_s.items()}
        self.hears(after_s, msg.WorkerAt(0, 7, max(began_s) + 1, marks))

    def journal(self) -> Journal:
        return read_lines(self.lines)


def story(*, coordinates: bool, node: str = "n0") -> Agent:
    """n1 is lost at 100 s; n2 has its place from 101 s on, and all train at 104 s."""
    agent = Agent(node)
    first = records.view(names=("n0", "n1", "n2"), revision=1)
    agent.sees(0, first)
    agent.hears(5, msg.Tick())
    if node == "n0":
        agent.marks(12, {0: 10.0, 2: 11.0, 4: 12.0})
    failing = replace(first, failures={1: records.failure("node", 1)}, revision=2)
    agent.sees(100, failing)
    nodes = {name: one for name, one in first.nodes.items() if name != "n1"}
    made = records.generation(2, "replace", ("n0", "n2"))
    second = replace(first, nodes=nodes, generation=made, failures={}, plan=None, revision=3)
    agent.sees(101, second)
    second = replace(second, plan=PlanRecord(2, copied(180, {2: 0, 3: 1}).to_json(), "a copy"), revision=4)
    agent.sees(101.5, second)
    agent.hears(103.5, msg.WorkerResumed(0, 7, 2, 181, {"regroup": 0.5, "iteration": 0.25}))
    if coordinates:
        done = {slot: ResumedRecord(slot, 181, {"regroup": 0.5, "start": 1.0 + slot}) for slot in (0, 1)}
        agent.sees(104, replace(second, resumed=done, revision=5))
    rate = RateRecord(190, 2.0, 2, T + 107)
    agent.sees(104.5, replace(agent.view, recovered=2, rate=rate, revision=6))
    agent.hears(120, msg.Tick())
    return agent


def test_the_coordinator_knows_the_phases() -> None:
    known = read([story(coordinates=True).journal()])
    assert [chapter.nodes for chapter in known.chapters] == [("n0", "n1"), ("n0", "n2")]
    timeline = assemble(known)
    (incident,) = timeline.incidents
    assert (incident.title, incident.failed_s - T, incident.stalled_s) == ("node n1 lost", 100, 4.0)
    assert incident.phases_s == {"agree": 1.0, "plan": 0.5, "start": 2.0, "regroup": 0.5, "total": 4.0}
    assert incident.iteration == 181 and incident.takers == ((1, "n1", "n2"),)
    assert incident.plan is not None and incident.plan.sources == {2: 0, 3: 1} and incident.plan_why == "a copy"
    assert (known.state, known.end_s - T, known.job) == ("training", 120, "gpt")


def test_another_node_knows_its_own_part_and_says_so() -> None:
    known = read([story(coordinates=False).journal()])
    (incident,) = assemble(known).incidents
    assert incident.phases_s == {"agree": 1.0, "plan": 0.5, "regroup": 0.5, "iteration": 0.25, "total": 4.5}
    assert incident.iteration == 181
    assert any("no journal of n1, n2" in note for note in known.notes)


def test_the_speed_is_known_where_rank_0_is() -> None:
    marks = [(10, 0), (11, 2), (12, 4), (107, 189)]
    own = read([story(coordinates=True).journal()])
    assert [(point.at_s - T, point.iteration) for point in own.points] == marks
    other = read([story(coordinates=False, node="n1").journal()])
    assert [(point.at_s - T, point.iteration) for point in other.points] == marks[3:]
    assert any("Of a node of rank 0 there is no journal" in note for note in other.notes)
    together = read([story(coordinates=False, node="n1").journal(), story(coordinates=True).journal()])
    assert together.points == own.points and not any("rank 0" in note for note in together.notes)
    assert "total" in together.chapters[1].phases_s and together.source == "2 journals of n0, n1"
    old = Agent("n0")
    old.sees(0, records.view())
    old.hears(3, msg.WorkerAt(0, 7, 5))
    assert [(point.at_s - T, point.iteration) for point in read([old.journal()]).points] == [(3, 4)]


def test_nodes_come_and_go() -> None:
    known = read([story(coordinates=True).journal()])
    found = {one.node: (one.begin_s - T, one.end_s and one.end_s - T) for one in known.presences}
    assert found == {"n0": (0, None), "n1": (0, 101), "n2": (0, None)}
    rows = {row.node: row for row in assemble(known).rows}
    assert [(piece.begin_s - T, piece.end_s - T) for piece in rows["n2"].spare] == [(0, 101)]
    assert not rows["n1"].spare and rows["n1"].until.startswith("lost")


def test_a_journal_that_ends_in_a_recovery_or_with_the_job() -> None:
    agent = Agent("n0")
    agent.sees(0, records.view())
    agent.sees(50, replace(records.view(revision=2), failures={1: records.failure("workers", 1, (0,))}))
    agent.hears(52, msg.Tick())
    known = read([agent.journal()])
    timeline = assemble(known)
    assert timeline.state == "recovering" and timeline.incidents[0].title == "rank 2 on n1 lost"
    assert timeline.incidents[0].stalled_s == 2.0 and any("swift_agent.init()" in note for note in known.notes)
    agent.hears(59, msg.WorkerFinished(0, 7, 1, {"iteration": 40}))
    agent.sees(60, replace(records.view(revision=3), result=ResultRecord("failed", "enough")))
    known = read([agent.journal()])
    assert (known.state, known.why, known.failing_s) == ("failed", "enough", None)
    assert known.points[-1].iteration == 40


def test_a_line_that_is_cut_and_what_is_no_journal() -> None:
    agent = story(coordinates=True)
    journal = read_lines([*agent.lines, b'{"event": {"type'])
    assert journal.cut_at == len(agent.lines) + 1
    assert any(f"line {journal.cut_at}" in note for note in read([journal]).notes)
    other = [line_of({"journal": 99, "version": "9"})]
    for bad, why in (
        ([], "it is empty"), ([b"x"], "first line is not JSON"), ([b"{}"], "not the head of one"), (other, "format 99"),
        ([agent.lines[0], b"x\n", b"{}\n"], "line 2 is damaged"),
        ([agent.lines[0], line_of({"event": {}, "now_s": 1.0})], "line 2 cannot be read"),
        ([agent.lines[0], line_of({"view": 9, "changes": {}})], "line 2 cannot be read"),
        ([agent.lines[0], b"[1]\n"], "line 2 cannot be read"),
    ):  # fmt: skip
        with pytest.raises(JournalError, match=why):
            read_lines(bad)
    with pytest.raises(JournalError, match="several jobs: bert, gpt"):
        read([agent.journal(), Agent("n0", "bert").journal()])


def test_a_journal_without_events() -> None:
    known = read([Agent("n0").journal()])
    assert known.state == "starting" and not known.chapters
    assert json.dumps(known.notes) and assemble(known).elapsed_s == 0.0


def test_a_generation_that_nobody_here_has_seen() -> None:
    """A spare that came later: who had the slots before is not known."""
    agent: Any = Agent("n2")
    agent.sees(0, records.view(names=("n0", "n2"), generation=records.generation(7, "replace", ("n0", "n2"))))
    known = read([agent.journal()])
    assert known.chapters[0].moved == {} and not assemble(known).incidents
