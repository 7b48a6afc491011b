"""The sentences about a generation, and the history, from records that the real planner and membership have made."""

from __future__ import annotations

import pytest

from swift_agent.agent.lifecycle.planning import plan_generation
from swift_agent.ctl.reports.explain import Episode, explain, history, plan_sentences, read_plan
from swift_agent.ctl.reports.jobs import events_of, follow, view_of
from swift_recovery.planning.plan import Plan
from swift_rendezvous.roster.decision import PublishGeneration, Rules
from swift_rendezvous.roster.membership import decide
from swift_rendezvous.roster.records import (
    EventRecord,
    FailureRecord,
    PlanRecord,
    ProgressRecord,
    ResultRecord,
    ResumedRecord,
)
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.kv import Event, KeyValue, WatchResponse
from tests.support import records
from tests.support.control_plane import Sim

PHASES = {"agree": 0.003, "plan": 0.002, "regroup": 0.02, "total": 0.095}


def after_a_loss() -> View:
    """Slot 1 was on n1, which is lost; n2 was a spare. Ranks 0 and 1 hold iteration 7."""
    before = records.view(names=("n0", "n1", "n2"), failures={1: records.failure("node", 1)})
    command = decide(before, Rules(), now_s=0.0, waiting_since_s=None).commands[0]
    assert isinstance(command, PublishGeneration)
    reports = tuple({"rank": rank, "status": "holding", "iteration": 7, "replicas": "0-3"} for rank in (0, 1))
    progress = {0: ProgressRecord(0, "n0.1", reports)}
    plan = plan_generation(command.generation, View(progress=progress))
    return records.view(names=("n0", "n2"), generation=command.generation, plan=plan, progress=progress)


def recovered(view: View) -> Episode:
    assert view.generation is not None and view.plan is not None
    details = {"phases_s": {**dict(reversed(PHASES.items())), "odd": "x"}, "iteration": 7, "plan": view.plan.content}
    return history([EventRecord(2, "recovered", f"{view.generation.why}; {view.plan.why}", 12.5, details)])[0]


def test_the_current_generation() -> None:
    view = after_a_loss()
    found = explain(view, [recovered(view)], 2)
    assert found is not None and found.plan is not None and found.plan.sources == {2: 0, 3: 1}
    assert found.sentences == (
        "Generation 2 (replace) was made because: lost node n1 (slot 1): evidence node 1; n2 takes slot 1.",
        "Slot 0 with ranks 0 and 1 belongs to n0 on 127.0.0.1: its workers keep their processes.",
        "Slot 1 with ranks 2 and 3 belongs to n2 on 127.0.0.1: ranks 2 and 3 had been lost and are started there.",
        "The plan: training goes on with the state of iteration 7 "
        "(ranks [2, 3] are new and get the state of iteration 7 from ranks [0, 1]).",
        "Rank 0 sends its state to rank 2.",
        "Rank 1 sends its state to rank 3.",
        "Ranks 0 and 1 hold it already.",
        "Training went on at iteration 7; the recovery took: agree 3 ms, plan 2 ms, regroup 20 ms, total 95 ms.",
    )


def test_a_generation_that_is_over() -> None:
    view = after_a_loss()
    found = explain(records.view(generation=records.generation(3)), [recovered(view)], 2)
    assert found is not None
    text = " ".join(found.sentences)
    assert "Generation 2 (recovered) was made because: lost node n1 (slot 1): evidence node 1; n2 takes slot 1." in text
    assert "Rank 0 sends its state to rank 2." in text and "total 95 ms" in text
    assert "roster is not kept" in text and "already" not in text


def test_what_is_not_known_is_not_told() -> None:
    assert explain(records.view(), [], 7) is None
    assert explain(View(), [], 1) is None
    unreadable = records.view(plan=PlanRecord(1, {"kind": "copy", "sources": 3}, "of the future"))
    found = explain(unreadable, [], 1)
    assert found is not None and found.plan is None
    assert "Its plan cannot be read by this version: of the future." in found.sentences


def test_on_the_way() -> None:
    generation = records.generation(2, "replace", ("n0", "n2"), lost={1: (0, 1)})
    found = explain(records.view(generation=generation, plan=None, progress={}), [], 2)
    assert found is not None
    assert found.sentences[-2] == "There is no plan yet: it waits for slots 0 and 1 to say which state is held there."
    assert found.sentences[-1] == "Since then slot 1 has lost its node n2: its lease in etcd is gone."
    view = records.view(
        names=("n0", "n2"), generation=generation, resumed={0: ResumedRecord(0, 7, {})},
        failures={0: records.failure("workers", 0, (1,)), 1: FailureRecord("restart", 1, "n2.1", (), "cut", "n2")},
    )  # fmt: skip
    found = explain(view, [], 2)
    assert found is not None
    assert found.sentences[-3:] == (
        "Training again: slot 0; not yet: slot 1.",
        "Since then slot 0 has lost rank 1: evidence workers 0.",
        "Since then slot 1 has asked for a restart: cut.",
    )


def test_a_restart_and_the_end() -> None:
    generation = records.generation(2, "restart", num_restarts=1, lost={0: (1,)})
    plan = plan_generation(generation, View())
    view = records.view(generation=generation, plan=plan, result=ResultRecord("stopped", "enough"), nodes={})
    found = explain(view, [], 2)
    assert found is not None
    text = " ".join(found.sentences)
    assert "all its workers are started again" in text and "It is restart 1 of the job." in text
    assert "No state is sent" in text
    assert found.sentences[-1] == "The job has ended (stopped): enough."


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan("fresh", "x"), ["No state is sent: all workers set themselves up together."]),
        (Plan("restart", "nobody"), ["All workers restart: nobody."]),
        (
            Plan("copy", "w", 4, 2, {3: 0, 4: 0, 5: 0}),
            [
                "The plan: training goes on with the state of iteration 4 (w).",
                "Rank 0 sends its state to ranks 3 to 5.",
                "Ranks 0 to 2 hold it already.",
                "2 `@job.resilient` sections count as finished.",
            ],
        ),
        (
            Plan("copy", "w", 4),
            ["The plan: training goes on with the state of iteration 4 (w).", "No rank needs state from another."],
        ),
    ],
)
def test_plans(plan: Plan, expected: list[str]) -> None:
    assert plan_sentences(plan, 6) == expected


def test_history_survives_details_of_another_version() -> None:
    events = [
        EventRecord(2, "recovered", "b", 2.0, {"phases_s": 3, "iteration": "x", "plan": []}),
        EventRecord(1, "generation (start)", "a", 1.0),
        EventRecord(3, "recovered", "c", 3.0, {"phases_s": {"new": 0.5, "total": 1, "agree": 0.1, "bad": True}}),
    ]
    found = history(events)
    assert [(one.generation, dict(one.phases_s), one.iteration, one.plan) for one in found[:2]] == [
        (1, {}, None, None), (2, {}, None, None),
    ]
    assert list(found[2].phases_s) == ["agree", "new", "total"]
    assert found[2].to_json()["phases_ms"] == {"agree": 100.0, "new": 500.0, "total": 1000.0}
    assert read_plan({"kind": "copy"}) is None


@pytest.mark.parametrize("seed", range(6))
def test_all_that_a_job_writes_can_be_explained(seed: int) -> None:
    """At every moment of a simulated job with failures."""
    sim = Sim(seed, num_failures=3)
    sim.run()
    kept: dict[str, KeyValue] = {}
    num_told = 0
    for changes in sim.history:
        events = tuple(
            Event(
                "delete" if change.value is None else "put",
                KeyValue(change.key, change.value or b"", change.create_revision, change.mod_revision),
            )
            for change in changes
        )
        kept = follow(kept, WatchResponse(1, events))
        view = view_of("job", kept.values())
        episodes = history(events_of("job", kept.values()))
        for number in {view.number, *(episode.generation for episode in episodes)} - {0}:
            found = explain(view, episodes, number)
            assert found is not None and all(sentence.endswith(".") for sentence in found.sentences)
            num_told += 1
    assert num_told


def test_the_history_has_what_the_first_worker_that_failed_has_left() -> None:
    said = [{"rank": 3, "host": "h", "message": "Traceback\n  line\nValueError: it"}]
    (episode,) = history([EventRecord(2, "generation (replace)", "w", 1.0, {"said": said})])
    assert episode.said == ("rank 3 on h:", "Traceback", "  line", "ValueError: it")
    for broken in ({"said": 3}, {"said": []}, {"said": ["x"]}, {}):
        (episode,) = history([EventRecord(2, "generation (replace)", "w", 1.0, broken)])
        assert episode.said == () and episode.to_json()["said"] == []
