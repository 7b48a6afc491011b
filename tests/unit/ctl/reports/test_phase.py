"""How far a recovery is, what each node does, and a line of bars."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swift_agent.ctl.reports.phase import ASCII_BARS, BARS, node_states, phase_of, sparkline, speeds
from swift_rendezvous.roster.records import DrainRecord, PlanRecord, ProgressRecord, ResultRecord, ResumedRecord
from swift_rendezvous.roster.view import View
from tests.support import records

TRAINING = records.view(names=("n0", "n1", "n2"))
REPLACING = records.view(
    names=("n0", "n2"), generation=records.generation(2, "replace", ("n0", "n2"), lost={1: (0, 1)}), plan=None
)
PLANNED = replace(REPLACING, plan=PlanRecord(2, {}, "w"))


def test_the_phases_in_their_order() -> None:
    assert phase_of(TRAINING) is None and phase_of(View()) is None
    agree = phase_of(replace(TRAINING, failures={1: records.failure("node", 1)}))
    assert agree is not None and (agree.name, agree.total) == ("agree", 0) and "slot 1:" in agree.what
    plan = phase_of(replace(REPLACING, progress={0: ProgressRecord(0, "n0.1", ())}))
    assert plan is not None and (plan.name, plan.done, plan.total) == ("plan", 1, 2)
    transfer = phase_of(replace(PLANNED, resumed={0: ResumedRecord(0, 7, {})}))
    assert transfer is not None and (transfer.name, transfer.done, transfer.total) == ("transfer", 1, 2)
    assert phase_of(replace(PLANNED, resumed={slot: ResumedRecord(slot, 7, {}) for slot in (0, 1)})) is None
    assert phase_of(replace(PLANNED, result=ResultRecord("failed", "w"))) is None


def test_what_each_node_does() -> None:
    assert node_states(TRAINING) == {"n0": "trains", "n1": "trains", "n2": "spare"}
    failing = node_states(replace(TRAINING, failures={1: records.failure("node", 1)}))
    assert failing == {"n0": "waits, holds the state", "n1": "lost", "n2": "spare"}
    assert node_states(replace(TRAINING, failures={1: records.failure("workers", 1, (0,))}))["n1"] == "lost workers"
    assert node_states(PLANNED) == {"n0": "waits, holds the state", "n2": "starts workers"}
    assert node_states(replace(PLANNED, resumed={0: ResumedRecord(0, 7, {})}))["n0"] == "trains again"
    assert node_states(replace(TRAINING, nodes={"n0": records.node("n0")}))["n1"] == "lost"
    assert node_states(replace(TRAINING, generation=None))["n0"] == "waits for others"
    drained = replace(TRAINING, drains={"n0": DrainRecord("n0", "n0.1", "w", 1.0)})
    assert node_states(drained)["n0"] == "is drained"


def test_bars() -> None:
    assert sparkline([0.0, 5.0, None, 10.0]) == f"{BARS[0]}{BARS[4]} {BARS[7]}"
    assert sparkline([None, 0.0], ASCII_BARS) == f" {ASCII_BARS[0]}" and sparkline([]) == ""


def test_speeds_between_marks() -> None:
    points = [(10.0, 0), (20.0, 20), (30.0, 20), (40.0, 50)]
    assert speeds(points, 40.0, 40.0, 4) == [None, 2.0, 0.0, 3.0]
    assert speeds(points, 45.0, 10.0, 2) == [pytest.approx(3.0), None]
    assert speeds([], 10.0, 10.0, 2) == [None, None]
    # All workers were started again.
    assert speeds([(0.0, 50), (10.0, 10)], 10.0, 10.0, 1) == [0.0]
