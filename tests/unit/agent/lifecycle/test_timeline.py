"""The story of a recovery: phases add up, a second failure belongs to the same story."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from swift_agent.agent.lifecycle.timeline import PHASES, Timeline, describe, merge_phases
from swift_rendezvous.roster.records import PlanRecord, ResumedRecord
from tests.support.records import failure, generation, view

FAILED = {1: failure("node", 1)}
PLAN = PlanRecord(2, {}, "w")


def entering(number: int = 2, **changes: Any) -> Any:
    return view(**{"generation": generation(number, "replace"), "plan": None, **changes})


def resumed(**phases_s: float) -> dict[int, ResumedRecord]:
    return {0: ResumedRecord(0, 5, {"regroup": 0.3, "transfer": 0.1}), 1: ResumedRecord(1, 5, phases_s)}


def test_the_phases_of_one_recovery() -> None:
    story = Timeline()
    assert story.observe(view(), 1.0) is None
    assert story.observe(view(failures=FAILED), 10.0) is None
    assert story.observe(entering(), 10.5) is None
    assert story.observe(entering(plan=PLAN), 11.25) is None
    assert story.observe(entering(plan=PLAN, resumed={0: resumed()[0]}), 12.0) is None
    phases = story.observe(entering(plan=PLAN, resumed=resumed(start=0.2, regroup=0.1, transfer=0.4)), 13.0)
    assert phases == {"agree": 0.5, "plan": 0.75, "start": 0.2, "regroup": 0.1, "transfer": 0.4, "total": 3.0}
    assert list(phases) == ["agree", "plan", "start", "regroup", "transfer", "total"]  # in the order of time
    assert story.why == "generation 2"
    # It is told once.
    assert story.observe(entering(plan=PLAN, resumed=resumed()), 14.0) is None


def test_what_a_coordinator_before_has_told_is_not_told_again() -> None:
    """This one followed the recovery from afar, without the records that only a coordinator reads."""
    story = Timeline()
    story.observe(view(failures=FAILED), 10.0)
    story.observe(entering(plan=PLAN), 11.0)
    assert story.observe(entering(plan=PLAN, recovered=2, resumed=resumed()), 90.0) is None
    assert story.observe(entering(plan=PLAN, recovered=2, failures=FAILED, resumed=resumed()), 95.0) is None
    phases = story.observe(entering(3, plan=PLAN, recovered=2, resumed=resumed()), 96.0)
    assert phases is not None and phases["total"] == 1.0


def test_two_recoveries_are_two_stories() -> None:
    story = Timeline()
    story.observe(view(failures=FAILED), 10.0)
    story.observe(entering(plan=PLAN, resumed=resumed()), 11.0)
    assert story.observe(entering(plan=PLAN, failures=FAILED, resumed=resumed()), 50.0) is None
    assert story.observe(entering(3), 50.5) is None
    phases = story.observe(entering(3, plan=PLAN, resumed=resumed()), 51.0)
    assert phases is not None and phases["total"] == 1.0 and phases["agree"] == 0.5


def test_a_second_failure_during_a_recovery_belongs_to_its_story() -> None:
    story = Timeline()
    story.observe(view(failures=FAILED), 10.0)
    story.observe(entering(), 11.0)
    story.observe(entering(failures=FAILED), 12.0)
    story.observe(entering(3), 13.0)
    phases = story.observe(entering(3, plan=PLAN, resumed=resumed()), 14.0)
    assert phases is not None and phases["total"] == 4.0 and phases["agree"] == 3.0


def test_a_failure_that_only_a_lease_told_begins_with_the_generation() -> None:
    story = Timeline()
    story.observe(view(), 1.0)
    story.observe(entering(), 20.0)
    phases = story.observe(entering(plan=PLAN, resumed=resumed()), 21.0)
    assert phases is not None and phases["agree"] == 0.0 and phases["total"] == 1.0


def test_a_restart_of_all_is_told_when_all_train_again() -> None:
    story = Timeline()
    story.observe(view(failures=FAILED), 10.0)
    restarted = {"generation": generation(2, "restart", epoch=2), "plan": PLAN}
    assert story.observe(view(**restarted), 11.0) is None
    phases = story.observe(view(**restarted, resumed=resumed(start=2.0, iteration=0.5)), 16.0)
    assert phases == {"agree": 1.0, "start": 2.0, "regroup": 0.3, "transfer": 0.1, "iteration": 0.5, "total": 6.0}
    # A failure after that is another story.
    story.observe(view(**restarted, failures=FAILED, resumed=resumed()), 500.0)
    phases = story.observe(entering(3, plan=PLAN, resumed=resumed()), 501.0)
    assert phases is not None and phases["total"] == 1.0


def test_a_restart_that_fails_as_well_belongs_to_the_story_of_the_next() -> None:
    story = Timeline()
    story.observe(view(failures=FAILED), 10.0)
    story.observe(view(generation=generation(2, "restart", epoch=2)), 11.0)
    story.observe(view(generation=generation(2, "restart", epoch=2), failures=FAILED), 15.0)
    phases = story.observe(view(generation=generation(3, "restart", epoch=3), resumed=resumed()), 21.0)
    assert phases is not None and phases["total"] == 11.0


def test_nothing_is_told_after_the_release() -> None:
    story = Timeline()
    story.observe(view(failures=FAILED, released=True), 10.0)
    assert story.failed_s is None
    assert story.observe(view(generation=None), 11.0) is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_who_waits_for_a_replay_is_not_slow(order: tuple[int, ...]) -> None:
    told = [{"regroup": 0.2, "iteration": 4.1}, {"regroup": 0.1, "replay": 3.9, "iteration": 0.1}, {"iteration": 4.0}]
    phases: dict[str, float] = {}
    for number in order:
        merge_phases(phases, told[number])
    assert phases == {"regroup": 0.1, "replay": 3.9, "iteration": 0.1}
    assert {"logs", "replay"} <= set(PHASES)


@pytest.mark.parametrize(
    ("phases_s", "text"), [({}, ""), ({"agree": 0.003, "total": 1.2345}, "agree 3 ms, total 1234 ms")])
def test_describe(phases_s: dict[str, float], text: str) -> None:
    assert describe(phases_s) == text
