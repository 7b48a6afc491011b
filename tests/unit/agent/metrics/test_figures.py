"""What is counted of a job, record by record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swift_agent.agent.metrics.figures import Figures, Spread, observe, told, way_of
from swift_rendezvous.roster.records import EventRecord, RateRecord, ResultRecord
from swift_rendezvous.roster.view import View
from tests.support.records import failure, generation, node, owner, view

COPY = {"kind": "copy", "why": "", "iteration": 5, "sections": 0, "sources": {"2": 0}, "layouts": {}}


class Job:
    """Seen by one agent; *at* is its clock."""

    def __init__(self, first: View | None = None) -> None:
        self.now_s, self.view, self.figures = 100.0, view(tracked=True), Figures()
        self.see(first or self.view)

    def see(self, seen: View) -> None:
        self.view = seen
        self.figures = observe(self.figures, seen, self.now_s)

    def change(self, after_s: float = 0.0, **changes: Any) -> None:
        self.now_s += after_s
        self.see(replace(self.view, **changes))

    def trains(self, iteration: int, per_s: float = 2.0) -> None:
        self.change(rate=RateRecord(iteration, per_s, self.view.number, 0.0))

    def next_generation(self, **changes: Any) -> None:
        number = self.view.number + 1
        owners = changes.pop("owners", (owner("n0"), owner("n1")))
        new = replace(generation(number, **{"mode": "replace", **changes}), slots=owners)
        here = {name: replace(one) for name, one in self.view.nodes.items()}
        self.change(0.01, generation=new, failures={}, nodes=here, rate=self.view.rate)

    def recovers(self, goes_on_at: int, plan: Any = COPY, total_s: float = 0.5) -> None:
        number = self.view.number
        self.change(total_s, recovered=number)
        details = {"iteration": goes_on_at + 1, "plan": plan, "phases_s": {"agree": 0.01, "total": total_s}}
        self.figures = told(self.figures, number, EventRecord(number, "recovered", "", 0.0, details))


def test_a_lost_node() -> None:
    job = Job()
    job.trains(10)
    job.now_s += 10.0
    job.change(failures={1: failure("node", 1)})
    assert job.figures.stalled_since_s == job.now_s
    job.next_generation(owners=(owner("n0"), owner("n2")))
    assert job.figures.failures == {"node": 1}
    job.recovers(9)  # which had begun
    assert job.figures.recoveries == {("replica", "node"): 1}
    assert job.figures.lost_iterations == 0 and job.figures.due == {}
    assert job.figures.stalled_since_s is not None  # n2 is not among the nodes that are here
    job.change(nodes={**job.view.nodes, "n2": node("n2")})
    assert job.figures.stalled_since_s is None
    assert job.figures.stalled_s == pytest.approx(0.51)
    assert job.figures.goodput(job.now_s) == pytest.approx(1 - 0.51 / 10.51)
    assert dict(job.figures.phases["total"].cumulated())["0.5"] == 1.0


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"lost": {1: (0,)}}, "worker"),
        ({"owners": (owner("n0"), owner("n2")), "handover": {1: owner("n1")}, "lost": {1: (0,)}}, "drain"),
        ({"owners": (owner("n0"), owner("n2")), "handover": {1: owner("n1")}, "lost": {0: (0,), 1: (0,)}}, "worker"),
        ({"mode": "resize"}, "resize"),
        ({"mode": "restart"}, "restart"),
        ({"owners": (owner("n0"), owner("n1", 2))}, "node"),
    ],
)
def test_causes_follow_from_the_roster(changes: dict[str, Any], cause: str) -> None:
    job = Job()
    job.next_generation(**changes)
    job.recovers(3)
    assert {which for _, which in job.figures.recoveries} == {cause}
    assert job.figures.failures == ({cause: 1} if cause in ("node", "worker", "restart") else {})


def test_of_several_losses_the_greatest_is_the_cause() -> None:
    """A second one comes before the first is recovered: that is one recovery."""
    job = Job()
    job.next_generation(lost={1: (0,)})
    job.next_generation(owners=(owner("n0"), owner("n2")))
    job.recovers(3)
    assert job.figures.recoveries == {("replica", "node"): 1}
    assert job.figures.failures == {"worker": 1, "node": 1}


def test_iterations_that_are_done_again() -> None:
    job = Job()
    job.trains(100, per_s=4.0)
    job.trains(140, per_s=4.0)
    assert job.figures.num_iterations == 40  # the first hundred were before this agent
    job.next_generation(mode="restart")
    job.recovers(120, plan={**COPY, "kind": "restart"}, total_s=5.0)
    assert job.figures.recoveries == {("checkpoint", "restart"): 1}
    # The last that was begun, 139, was interrupted: nobody had done it.
    assert (job.figures.lost_iterations, job.figures.lost_s) == (19, 4.75)
    job.trains(124)
    job.trains(160)
    assert job.figures.num_iterations == 40 + 36


def test_a_rate_from_before_a_failure_says_nothing_of_what_came_after_it() -> None:
    job = Job()
    job.trains(50)
    stale = job.view.rate
    job.next_generation(mode="restart")
    job.recovers(10)
    job.change(rate=stale)
    assert job.figures.num_iterations == 0


def test_who_comes_later_counts_what_comes_later() -> None:
    over = Job(view(tracked=True, generation=generation(5, mode="replace"), recovered=5))
    assert over.figures.failures == {} and over.figures.stalled_since_s is None
    over.change(1.0)
    assert over.figures.recoveries == {} and over.figures.due == {}
    # A recovery that is on its way is counted, too: whoever sees its end.
    running = Job(view(tracked=True, generation=generation(5, mode="replace"), recovered=3))
    assert running.figures.stalled_since_s is not None
    running.recovers(7)
    assert sum(running.figures.recoveries.values()) == 1


def test_a_script_of_which_nothing_is_known_does_not_stall() -> None:
    job = Job(view(tracked=False))
    job.change(failures={1: failure("workers", 1)})
    job.next_generation(mode="restart")
    assert job.figures.stalled_since_s is None and job.figures.failures == {"restart": 1}
    assert job.figures.goodput(job.now_s) is None


def test_a_job_that_has_ended_does_not_stall() -> None:
    job = Job()
    job.change(failures={1: failure("node", 1)})
    job.change(2.0, result=ResultRecord("stopped", ""))
    assert job.figures.stalled_until(job.now_s + 100.0) == 2.0


def test_stalled_time_never_falls() -> None:
    job = Job()
    seen = [job.figures.stalled_until(job.now_s)]
    job.change(1.0, failures={1: failure("node", 1)})
    seen.append(job.figures.stalled_until(job.now_s + 3.0))
    job.change(3.0, failures={})  # it was a mistake
    seen.append(job.figures.stalled_until(job.now_s))
    assert seen == sorted(seen) == [0.0, 3.0, 3.0]


def test_a_vacant_place_stalls() -> None:
    job = Job()
    job.change(nodes={name: one for name, one in job.view.nodes.items() if name != "n1"})
    assert job.figures.stalled_since_s == job.now_s


def test_an_entry_that_cannot_be_read_counts_as_none() -> None:
    job = Job()
    job.next_generation(lost={1: (0,)})
    number = job.view.number
    job.change(recovered=number)
    assert set(job.figures.due) == {number}
    job.figures = told(job.figures, number, None)
    assert job.figures.due == {} and job.figures.recoveries == {}
    for details in ({}, {"phases_s": [1], "iteration": "x", "plan": {"kind": 3}}):
        job.next_generation(lost={1: (0,)})
        job.change(recovered=job.view.number)
        job.figures = told(job.figures, job.view.number, EventRecord(1, "", "", 0.0, details))
    assert job.figures.recoveries == {("checkpoint", "worker"): 2}


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, "replica"),
        ({"sources": {}}, "in place"),
        ({"sources": {}, "handovers": [2]}, "drain"),
        ({"replays": "2"}, "log"),
        ({"kind": "restart"}, "checkpoint"),
        ({"kind": "fresh"}, "checkpoint"),
    ],
)
def test_ways(changes: dict[str, Any], way: str) -> None:
    assert way_of("worker", {**COPY, **changes}) == way
    assert way_of("resize", {**COPY, **changes}) == "resize"


def test_a_spread_is_a_histogram() -> None:
    spread = Spread((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        spread = spread.plus(seconds)
    assert spread.cumulated() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert spread.sum_s == 12.0
