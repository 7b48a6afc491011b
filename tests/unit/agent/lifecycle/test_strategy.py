"""How a job recovers, decided once all its workers are measured; what a recovery should take."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from swift_agent.agent.lifecycle.strategy import (
    after,
    decide,
    errors_of,
    predicted,
    profile_of,
    refine,
    told_again,
    weigh,
)
from swift_recovery.planning.plan import Plan
from swift_recovery.strategy.measured import RankMeasured
from swift_recovery.strategy.predict import learned
from swift_recovery.strategy.profile import parse
from swift_rendezvous.roster.records import (
    Helper,
    JobRecord,
    MeasuredRecord,
    PlanRecord,
    ProfileRecord,
    RateRecord,
)
from swift_rendezvous.roster.view import View
from tests.support.records import generation, view

NAMES = ("n0", "n1", "n2", "n3")


def measured(num: int = 4, **changes: Any) -> dict[int, MeasuredRecord]:
    """Stages of a pipeline, one on each node."""
    records = {}
    for at in range(num):
        sent = {to: 500 for to in (at - 1, at + 1) if 0 <= to < num}
        one = RankMeasured(at, 0.1, 0.07, 1000, (at,), sent, 4, 10, True, micro_batches=4)
        records[at] = MeasuredRecord(at, f"n{at}.1", (replace(one, **changes).to_json(),))
    return records


def job(**changes: Any) -> View:
    names = [name for name in ("log_budget", "log_groups", "strategy", "helpers") if name in changes]
    record = JobRecord(4, 1, "command", 3, **{name: changes.pop(name) for name in names})
    first = replace(generation(slots=NAMES), num_workers=1)
    return view(**{"names": NAMES, "job": record, "generation": first, "measured": measured(), **changes})


def test_nothing_is_decided_before_all_are_measured_nor_twice() -> None:
    one = measured()
    del one[2]
    assert decide(job(measured=one), "J") is None
    found = decide(job(), "J")
    assert found is not None and decide(job(profile=found), "J") is None
    assert decide(replace(job(), generation=None), "J") is None


def test_what_cannot_be_read_decides_nothing() -> None:
    for damaged in ({}, {"rank": "x"}, {**measured()[0].ranks[0], "sent_bytes": [1]}):
        assert decide(job(measured={**measured(), 0: MeasuredRecord(0, "n0.1", (damaged,))}), "J") is None


@pytest.mark.parametrize(
    ("changes", "wanted", "way"),
    [
        ({}, "", "log"),
        ({}, "checkpoint", "checkpoint"),
        ({"replicas": (0, 1, 2, 3)}, "", "replica"),
        ({"logs": False}, "", "checkpoint"),
        ({"logs": False, "checkpoint_every": 0}, "", ""),
        ({"replicas": (0, 1, 2, 3)}, "checkpoint", "replica"),
        ({"logs": False}, "log", "checkpoint"),
        ({}, "log+parallel", "log+parallel"),
        ({"logs": False}, "log+parallel", "checkpoint"),
    ],
)
def test_the_way_is_the_planners(changes: dict[str, Any], wanted: str, way: str) -> None:
    found = decide(job(measured=measured(**changes), strategy=wanted), "J")
    assert found is not None and found.way == way
    assert [line.split(":")[0].strip() for line in found.lines if line.endswith(": taken")] == ([way] if way else [])
    assert ("here that is" in found.lines[-1]) == (bool(way) and wanted not in ("", way))
    assert ("all workers would start over. Take checkpoints" in found.lines[-1]) == (not way)
    assert any("as --strategy checkpoint has it" in line for line in found.lines) == (wanted == "checkpoint")


def on_one_node(strategy: str = "", logs: bool = True) -> View:
    """All stages of the pipeline, as with --standalone --nproc-per-node 4."""
    ranks = tuple(rank for record in measured(logs=logs).values() for rank in record.ranks)
    first = replace(generation(slots=NAMES[:1]), num_workers=4)
    return job(generation=first, measured={0: MeasuredRecord(0, "n0.1", ranks)}, strategy=strategy)


def test_a_pipeline_on_one_node_takes_its_logs() -> None:
    found = decide(on_one_node(), "J")
    assert found is not None and found.way == "log" and found.helpers == ()
    (line,) = (line for line in found.lines if ": taken" in line)
    assert line.startswith("  log: ") and "taken; not possible for a node: messages pass inside nodes only" in line
    told = [line.replace("--strategy log+parallel", "--helpers N") for line in decide(on_one_node("log"), "J").lines]  # type: ignore[union-attr]
    assert tuple(told) == found.lines
    parallel = decide(on_one_node("log+parallel"), "J")
    assert parallel is not None and parallel.way == "log+parallel" and parallel.helpers == ((1, 3),)
    assert parallel.content["micro_batches"] == 4 and not any("here that is" in line for line in parallel.lines)
    without = decide(on_one_node(logs=False), "J")
    assert without is not None and without.way == "checkpoint"


def test_auto_takes_helpers_where_they_are_allowed_and_pay() -> None:
    found = decide(job(helpers=2), "J")
    assert found is not None and found.way == "log+parallel" and found.helpers[1] == (1, 3)
    assert not any("--helpers" in line or "--strategy" in line for line in found.lines)
    (line,) = (line for line in found.lines if line.endswith(": taken"))
    assert line.startswith("  log+parallel: ") and not any("by what is wasted" in line for line in found.lines)
    # With so many as are allowed: of four micro-batches two helpers save no more than one.
    said = [decide(job(helpers=num), "J").lines[3] for num in (1, 2, 3)]  # type: ignore[union-attr]
    assert said[0] == said[1] != said[2] and "425 ms for a lost worker" in said[0] and "338 ms" in said[2]
    grouped = decide(job(helpers=2, log_budget="40%"), "J")
    assert grouped is not None and (grouped.way, grouped.log_groups) == ("log", ((0, 1), (2, 3)))
    grouped = decide(job(helpers=3, log_budget="40%"), "J")
    assert grouped is not None and (grouped.way, grouped.log_groups) == ("log", ((0, 1), (2, 3)))  # too little
    grouped = decide(job(helpers=3, log_budget="40%", measured=measured(checkpoint_every=1000)), "J")
    assert grouped is not None and grouped.log_groups == ((1, 2, 3),) and grouped.helpers == ((1, 3), (), (), ())
    # More bytes of gradients than a network adds up meanwhile.
    large = decide(job(helpers=2, measured=measured(gradient_bytes=1 << 34)), "J")
    assert large is not None and large.way == "log" and large.helpers == ()
    assert not any("--helpers" in line or "by what is wasted" in line for line in large.lines)
    # Less than it takes them to meet.
    small = decide(job(helpers=2, measured=measured(iteration_s=0.002, computation_s=0.001)), "J")
    assert small is not None and small.way == "log" and not any("by what is wasted" in line for line in small.lines)
    by_hand = decide(job(helpers=2, measured=measured(micro_batches=0)), "J")
    assert by_hand is not None and by_hand.way == "log" and by_hand.helpers == ()
    assert any("helpers share steps of a schedule" in line for line in by_hand.lines)
    for changes, way in (({"replicas": (0, 1, 2, 3)}, "replica"), ({"logs": False}, "checkpoint")):
        assert decide(job(helpers=2, measured=measured(**changes)), "J").way == way  # type: ignore[union-attr]
    for strategy in ("log", "checkpoint"):
        assert decide(job(strategy=strategy), "J").way == strategy  # type: ignore[union-attr]
    with_several = decide(replace(on_one_node(), job=JobRecord(1, 4, "command", 3, helpers=1)), "J")
    assert with_several is not None and with_several.way == "log+parallel" and with_several.helpers == ((1, 3),)


def test_helpers_of_a_node_whose_state_another_one_has_do_not_pay() -> None:
    seen = measured()
    for at in (2, 3):
        one = replace(RankMeasured.from_json(seen[at].ranks[0]), replicas=(2, 3))
        seen[at] = replace(seen[at], ranks=(one.to_json(),))
    found = decide(job(helpers=2, measured=seen), "J")
    assert found is not None and found.helpers == ((1, 3), (1, 3), (), ())


def test_how_many_helpers_pay_is_asked_again_with_the_checkpoint() -> None:
    """On a GPU computation follows from the time of an iteration, of which later ones show more."""
    on_gpu: dict[str, Any] = {"sees_waits": False, "gradient_bytes": 60_000_000}
    first = decide(job(helpers=3, measured=measured(iteration_s=1.0, **on_gpu)), "J")
    assert first is not None and first.helpers == ((1, 3),) * 4
    again = refine(job(helpers=3, profile=first, measured=measured(iteration_s=0.12, is_all=True, **on_gpu)), "J")
    assert again is not None and (again.way, again.helpers) == ("log+parallel", ((),) * 4)


def test_helpers_that_make_recoveries_longer_are_taken_no_more() -> None:
    """The network is not measured, and adds their gradients slower than assumed."""
    known = decide(job(helpers=3), "J")
    assert known is not None
    helped = replace(generation(1, "replace", NAMES, workers=1), helpers=(Helper(1, 1, "n0", "n0.1"),))
    plan = PlanRecord(1, Plan("copy", "w", 15, replays=(1,), checkpoint=10).to_json(), "w")
    slow, fast = (dict.fromkeys(("log+parallel", "log+parallel, an iteration"), factor) for factor in (4.0, 1.1))

    def twice(first: dict[str, float], second: dict[str, float], strategy: str = "") -> ProfileRecord:
        found = known
        for errors in (first, second):
            seen = job(helpers=3, strategy=strategy, profile=found, generation=helped, plan=plan)
            found = after(seen, errors)
            assert found is not None
        return found

    no_more = twice(slow, slow)
    assert (no_more.way, no_more.helpers) == ("log", ()) and no_more.lines[-1].startswith("helpers made the last two")
    assert told_again(no_more, known)[1:] == no_more.lines[-1:]
    with_checkpoint = refine(job(helpers=3, profile=no_more, measured=measured(is_all=True)), "J")
    assert with_checkpoint is not None and with_checkpoint.way == "log" and with_checkpoint.helpers == ()
    assert with_checkpoint.lines[-1] == no_more.lines[-1], "why nobody helps is not forgotten"
    assert told_again(with_checkpoint, no_more)[1:] == (), "nor said again"
    for kept in (twice(slow, fast), twice(fast, slow), twice(slow, slow, "log+parallel")):
        assert (kept.way, kept.helpers, kept.lines) == (known.way, known.helpers, known.lines)
    assert after(job(profile=known), {}) is None and after(job(), slow) is None


def test_groups_are_chosen_for_a_budget_and_hold_from_then_on() -> None:
    found = decide(job(log_budget="40%"), "J")
    assert found is not None and found.log_groups == ((0, 1), (2, 3))
    assert job(profile=found).log_groups == ((0, 1), (2, 3)) and job(profile=found).log_group_of(1) == (0, 1)
    assert decide(job(log_budget="100%"), "J").log_groups == ()  # type: ignore[union-attr]
    assert decide(job(log_budget="40%", measured=measured(replicas=(0, 1, 2, 3))), "J").log_groups == ()  # type: ignore[union-attr]


def test_a_checkpoint_changes_the_figures_once_and_nothing_that_was_decided() -> None:
    before = job(log_budget="40%")
    first = decide(before, "J")
    assert first is not None and refine(before, "J") is None and not first.is_final
    assert refine(replace(before, profile=first), "J") is None, "no checkpoint yet"
    part = {**measured(is_all=True, checkpoint_still_s=0.03), 2: measured()[2]}
    assert refine(replace(before, profile=first, measured=part), "J") is None, "not on all nodes"
    # By itself it would decide for something else now.
    seen = replace(before, profile=first, measured=measured(is_all=True, checkpoint_still_s=0.03, logs=False))
    again = refine(seen, "J")
    assert again is not None and again.is_final and (again.way, again.log_groups) == (first.way, first.log_groups)
    assert first.content["checkpoint_s"] != again.content["checkpoint_s"] == 0.03
    assert refine(replace(seen, profile=again), "J") is None


def log_line(found: ProfileRecord | None) -> str:
    assert found is not None
    (line,) = (line for line in found.lines if line.startswith("  log:"))
    return line


def test_what_logs_cost_is_said_of_the_groups() -> None:
    """Not of messages that are all logged."""
    alone, all_of_them = log_line(decide(job(), "J")), decide(job(log_budget="100%"), "J")
    assert log_line(all_of_them) == alone and not any("between groups" in line for line in all_of_them.lines)  # type: ignore[union-attr]
    chosen, named = decide(job(log_budget="40%"), "J"), decide(job(log_groups=((0, 1), (2, 3))), "J")
    assert log_line(chosen) == log_line(named) != alone and "4.88 KiB" in log_line(chosen) and "9.77 KiB" in alone
    assert any("between groups" in line for line in chosen.lines)  # type: ignore[union-attr]
    assert not any("between groups" in line for line in named.lines)  # type: ignore[union-attr]
    assert " for a lost worker, " in log_line(decide(job(log_groups=((1, 2),)), "J"))


def test_a_budget_that_allows_no_two_groups() -> None:
    found = decide(job(log_budget="0%"), "J")
    assert found is not None and found.way == "checkpoint" and found.log_groups == ((0, 1, 2, 3),)
    assert log_line(found) == "  log: not possible: the budget for logs allows no two groups: nothing would be logged"
    assert not any("between groups" in line for line in found.lines)


def test_a_size_is_nothing_to_a_script_without_checkpoints() -> None:
    """All between two checkpoints, which never come, is more than any size: nothing would be logged."""
    found = decide(job(log_budget="2TiB", measured=measured(checkpoint_every=0)), "J")
    assert found is not None and found.way == "log" and found.log_groups == ()
    assert found.lines[-1].startswith("--log-budget 2TiB: a size is for what is logged between two checkpoints")
    part = decide(job(log_budget="40%", measured=measured(checkpoint_every=0)), "J")
    assert part is not None and part.log_groups == ((0, 1), (2, 3))


def test_what_a_recovery_should_take() -> None:
    known = decide(job(), "J")

    def of(plan: Plan) -> float | None:
        found = predicted(job(profile=known, plan=PlanRecord(1, plan.to_json(), "w")))
        return None if found is None else found.seconds

    one = of(Plan("copy", "w", 15, replays=(1,), checkpoint=10))
    two = of(Plan("copy", "w", 15, replays=(1, 2), checkpoint=10))
    load_s = parse(json.dumps(known.content)).load_s  # type: ignore[union-attr]
    assert one == pytest.approx(0.25 + load_s + 5 * 0.07 + 0.1)
    assert two == pytest.approx(0.25 + load_s + 5 * (0.07 + 0.07 / 4) + 0.1)
    assert of(Plan("copy", "w", 15, sources={1: 0})) == pytest.approx(0.35, abs=0.01)
    helped = replace(generation(1, "replace", NAMES, workers=1), helpers=(Helper(1, 1, "n0", "n0.1"),))
    plan = PlanRecord(1, Plan("copy", "w", 15, replays=(1,), checkpoint=10).to_json(), "w")
    parallel = predicted(job(profile=known, generation=helped, plan=plan))
    assert parallel is not None and parallel.way == "log+parallel"
    added_s = 1000 / 3 / 1.25e9  # gradients, of which nothing is known
    assert parallel.seconds == pytest.approx(0.25 + load_s + 5 * (0.07 / 2 + added_s) + 0.1)
    assert of(Plan("restart", "w")) is None and predicted(job()) is None
    again = predicted(job(profile=known, generation=replace(generation(2, "restart", NAMES), num_workers=1)))
    assert again is not None and (again.way, again.seconds) == ("checkpoint", pytest.approx(6.0 + load_s + 0.1))
    assert predicted(job(generation=replace(generation(2, "restart", NAMES), num_workers=1))) is None


def test_how_many_helpers_pay_is_written_where_there_may_be_any() -> None:
    found = decide(job(strategy="log+parallel"), "J")
    assert found is not None and found.helpers == ((1, 3),) * 4  # of four micro-batches
    assert decide(job(), "J").helpers == decide(job(strategy="log"), "J").helpers == ()  # type: ignore[union-attr]
    assert decide(job(strategy="log+parallel", measured=measured(logs=False)), "J").helpers == ()  # type: ignore[union-attr]


def test_the_next_prediction_is_corrected_by_the_last_error() -> None:
    plan = Plan("copy", "w", 15, sources={1: 0})
    here = job(profile=decide(job(), "J"), plan=PlanRecord(1, plan.to_json(), "w"))
    first = predicted(here)
    assert first is not None and first.way == "replica"
    errors = errors_of(here, {"agree": 60.0, "total": 60.0 + 3 * first.seconds})
    assert errors == {"replica": pytest.approx(3.0)}
    again = predicted(with_errors(here, errors))
    assert again is not None and again.seconds == pytest.approx(3 * first.seconds)
    assert errors_of(here, {"total": 1e6}) == {"replica": 20.0} and errors_of(job(), {"total": 1.0}) == {}
    assert predicted(with_errors(here, {"log": 5.0})) == first
    # A way that is not taken any more because it was slow once is tried again some time.
    faded = learned({"log": 16.0, "replica": 3.0}, errors)
    assert faded == pytest.approx({"log": 4.0, "replica": 3.0, "replica, the last": 3.0})


def test_what_is_repeated_has_an_error_of_its_own() -> None:
    """After a recovery that had little to repeat comes one with much."""
    known = decide(job(), "J")

    def of(iteration: int, errors: dict[str, float]) -> View:
        plan = Plan("copy", "w", iteration, replays=(1,), checkpoint=10)
        return with_errors(job(profile=known, plan=PlanRecord(1, plan.to_json(), "w")), errors)

    short = predicted(of(12, {}))
    assert short is not None and short.repeated_s == pytest.approx(2 * 0.07)
    phases = {"logs": 0.02, "replay": 0.19, "total": 4 * short.fixed_s + 0.21}
    errors = errors_of(of(12, {}), phases)
    assert errors == {"log": pytest.approx(4.0), "log, an iteration": pytest.approx(1.5)}
    long = predicted(of(110, errors))
    assert long is not None and long.seconds == pytest.approx(4 * short.fixed_s + 1.5 * 100 * 0.07)
    # Of one that has repeated nothing nothing is learned of that.
    assert errors_of(of(10, {}), {"total": 1.0}).keys() == {"log"}


def test_a_replica_is_taken_for_the_nodes_that_have_one() -> None:
    """Two nodes hold the same, the others what nobody else does."""
    mixed = measured(logs=False)
    for slot in (0, 1):
        ranks = tuple({**rank, "replicas": "0-1"} for rank in mixed[slot].ranks)
        mixed[slot] = replace(mixed[slot], ranks=ranks)
    found = decide(job(measured=mixed), "J")
    assert found is not None and found.way == "checkpoint"
    assert found.lines[1] == (
        "  replica: 300 ms for a lost worker, 300 ms for a node, 300 ms for two if they leave a replica: taken "
        "for nodes 0-1; not possible for nodes 2-3: no other node holds what node 2 does"
    )
    assert found.lines[-2].startswith("  checkpoint: 6") and found.lines[-2].endswith("for nodes 2-3")
    del mixed[3]
    three = replace(generation(slots=NAMES[:3]), num_workers=1)
    found = decide(job(measured=mixed, generation=three), "J")
    assert found is not None and found.lines[-2].endswith(": taken for node 2")


def test_logs_that_delay_training_more_than_restarts_would_are_said_to() -> None:
    """64 ms of copies for each iteration of 100 ms, of which 30 fit into its waits; a node is lost every 15 days."""
    slow = measured(log_written=(1 << 20, 1.0), sent_bytes={0: 1 << 16, 3: 1 << 16})
    found = decide(job(measured=slow), "J")
    assert found is not None and found.way == "log"
    assert re.fullmatch(
        r"logs delay training by [0-9.]+%, more than restarts would if a node is lost every 360.0 h: "
        "--log-budget logs less, --strategy checkpoint nothing", found.lines[-1],
    )  # fmt: skip
    assert not any("logs delay" in line for line in decide(job(measured=slow, strategy="log"), "J").lines)  # type: ignore[union-attr]
    assert not any("logs delay" in line for line in decide(job(), "J").lines)  # type: ignore[union-attr]


def test_what_there_is_to_remark_is_asked_again_with_the_first_checkpoint() -> None:
    slow = {"log_written": (1 << 20, 1.0), "sent_bytes": {0: 1 << 16, 3: 1 << 16}}
    seen: dict[str, Any] = {"is_all": True, "checkpoint_still_s": 0.001}

    def dear(found: ProfileRecord | None) -> list[str]:
        assert found is not None
        return [line for line in found.lines if line.startswith("logs delay training by ")]

    before = decide(job(measured=measured(**slow)), "J")
    after = refine(job(profile=before, measured=measured(**slow, **seen)), "J")
    assert before is not None and after is not None and dear(before) and dear(after)
    # The disk turns out to be slow with the first checkpoint only.
    first = decide(job(measured=measured(sent_bytes=slow["sent_bytes"])), "J")
    again = refine(job(profile=first, measured=measured(**slow, **seen)), "J")
    assert first is not None and again is not None and not dear(first)
    news = told_again(again, first)
    assert news[0] == again.lines[0] and news[1].startswith("by what is wasted: checkpoint")
    assert len(dear(again)) == 1 and news[2:] == tuple(dear(again))
    assert told_again(replace(again, lines=first.lines), first) == first.lines[:1]


def test_what_would_waste_less_is_said_beside_what_is_taken() -> None:
    found = decide(job(), "J")
    assert found is not None and found.lines[-1] == (
        "by what is wasted: log+parallel; taken: log, because helpers run the script once more, which --helpers N "
        "allows"
    )
    slow = measured(log_written=(1 << 20, 1.0), sent_bytes={0: 1 << 16, 3: 1 << 16})
    dear = decide(job(measured=slow), "J")
    assert dear is not None and dear.lines[-2] == (
        "by what is wasted: checkpoint; taken: log, because logs bring a lost stage back in place, and the others keep "
        "what they have"
    )
    with_helpers = decide(job(measured=slow, helpers=2), "J")
    assert with_helpers is not None and with_helpers.lines[-1] == dear.lines[-1], "dear logs are told with helpers, too"
    told = decide(job(strategy="log"), "J")
    assert told is not None and told.lines[-1].endswith("because --strategy log says so")
    for agrees in (job(strategy="log+parallel"), job(strategy="checkpoint"), job(measured=measured(logs=False))):
        assert not any("by what is wasted" in line for line in decide(agrees, "J").lines)  # type: ignore[union-attr]


def test_how_often_a_checkpoint_pays_is_said() -> None:
    lines = decide(job(measured=measured(checkpoint_still_s=0.5, is_all=True)), "J").lines  # type: ignore[union-attr]
    # sqrt(2 x 0.5 s x 15 days), in iterations of 0.1 s
    assert (
        "  checkpoints: one every 10 iterations; where all restart one every 11384 (c*) costs least, if a node is lost "
        "every 360.0 h"
    ) in lines
    none = decide(job(measured=measured(checkpoint_every=0)), "J")
    assert none is not None and not any("(c*)" in line for line in none.lines)


def test_messages_past_the_neighbours_count_for_a_budget() -> None:
    """Interleaved stages: the last node sends to the first. Two groups log at least half of all messages."""
    wrapped = measured()
    for slot, sent in enumerate(({1: 500, 3: 500}, {0: 500, 2: 500}, {1: 500, 3: 500}, {2: 500, 0: 500})):
        data = {**wrapped[slot].ranks[0], "sent_bytes": {str(to): num for to, num in sent.items()}}
        wrapped[slot] = replace(wrapped[slot], ranks=(data,))

    def groups(budget: str) -> tuple[tuple[int, ...], ...]:
        found = decide(job(log_budget=budget, measured=wrapped), "J")
        assert found is not None
        return found.log_groups

    assert groups("40%") == ((0, 1, 2, 3),)
    assert groups("50%") == ((0, 1), (2, 3)) and groups("100%") == ()
    # 10 iterations: the first and the last node log 5000 bytes beside, whatever the groups are.
    assert groups("4KiB") == ((0, 1, 2, 3),)
    assert groups("9KiB") == ((0, 1), (2, 3))
    assert groups("10KiB") == ()


def with_errors(view: View, errors: dict[str, float]) -> View:
    assert view.profile is not None
    return replace(view, profile=replace(view.profile, errors=errors))


def weighed(plan: Plan, **changes: Any) -> Plan:
    view = job(**changes)
    return weigh(replace(view, profile=decide(view, "J")), plan)


def test_to_restart_all_is_chosen_where_it_should_be_much_sooner() -> None:
    """Of 5 iterations since a checkpoint logs are sooner; not where they have twice taken forty times as long."""
    plan = Plan("copy", "w", 15, replays=(1,), checkpoint=10)
    said = "w; that should take 700 ms, a restart of all 6.6 s"
    kept = weighed(plan)
    assert kept.kind == "copy" and kept.why == said and replace(kept, why="w") == plan
    twice = learned(learned({}, {"log, an iteration": 40.0}), {"log, an iteration": 40.0})
    slow = replace(decide(job(), "J"), errors=twice)  # type: ignore[type-var]
    back = weigh(replace(job(), profile=slow), plan)
    assert back.kind == "restart" and back.why == (
        "to repeat from logs what ranks [1] have lost should take 14 s, "
        "to begin again with the checkpoint of iteration 10 6.6 s"
    )
    # Nobody starts training over by choice.
    assert weigh(replace(job(), profile=slow), replace(plan, iteration=5, checkpoint=0)).kind == "copy"
    # What has failed once is not believed to be worse for ever, and a little sooner is no reason.
    nearly = replace(slow, errors=learned(learned({}, {"log, an iteration": 20.0}), {"log, an iteration": 20.0}))
    assert weigh(replace(job(), profile=nearly), plan).kind == "copy"


def test_one_recovery_that_something_else_has_held_up_restarts_nobody() -> None:
    """100 iterations of 70 ms; the last repetition was held up for a minute."""
    plan = Plan("copy", "w", 110, replays=(1,), checkpoint=10)
    held_up = {"log, an iteration": 9.6}

    def after(*found: dict[str, float]) -> Plan:
        errors: dict[str, float] = {}
        for one in found:
            errors = learned(errors, one)
        return weigh(replace(job(), profile=replace(decide(job(), "J"), errors=errors)), plan)  # type: ignore[type-var]

    once = after(held_up)
    assert once.kind == "copy" and once.why == (
        "w; that should take 68 s, a restart of all 16 s: so much less that it would be taken if more than the last "
        "recovery had shown it"
    )
    assert after(held_up, held_up).kind == "restart"
    as_usual = {"log, an iteration": 1.0}
    for seen in ([as_usual, held_up], [held_up, as_usual], [held_up, as_usual, held_up], [held_up, held_up, as_usual]):
        assert after(*seen).kind == "copy"
    # Nor does one restart that was much faster than predicted.
    assert after({"checkpoint": 0.05, "checkpoint, an iteration": 0.05}).kind == "copy"
    # The next prediction is between the last one and what was known.
    assert learned(learned({}, held_up), as_usual)["log, an iteration"] == pytest.approx(9.6**0.5)


def test_a_job_that_has_become_slower_is_weighed_as_it_is_now() -> None:
    """Four times as slow as when it was measured, all of it: no way looks better than it did, and nothing restarts."""
    plan = Plan("copy", "w", 110, replays=(1,), checkpoint=10)
    as_measured = weighed(plan)
    profile = profile_of(replace(job(), profile=decide(job(), "J")))
    assert profile is not None and as_measured.slowdown == 1.0 and "slowdown" not in as_measured.to_json()
    slow = RateRecord(110, 1 / (4 * profile.iteration_s), 1, 5.0)
    view = replace(job(), profile=decide(job(), "J"), rate=slow)
    kept = weigh(view, plan)
    assert kept.kind == "copy" and kept.slowdown == pytest.approx(4)
    assert Plan.from_json(kept.to_json()) == kept
    # Both predictions count on it; so does what the recovery is compared with afterwards, and no error is learned.
    assert kept.why == "w; that should take 29 s, a restart of all 46 s", as_measured.why
    after_it = replace(view, plan=PlanRecord(1, kept.to_json(), kept.why), rate=None)
    expected = predicted(after_it)
    assert expected is not None and expected.repeated_s == pytest.approx(4 * 7.0)
    found = errors_of(after_it, {"total": expected.seconds, "replay": expected.repeated_s})
    assert found == {"log": pytest.approx(1.0), "log, an iteration": pytest.approx(1.0)}
    # What is a little slower, or faster, is taken as measured: few iterations are counted.
    for factor in (0.5, 1.0, 1.4):
        nearly = replace(view, rate=replace(slow, per_s=1 / (factor * profile.iteration_s)))
        assert weigh(nearly, plan) == as_measured
    # Of workers before a restart of all, or of nobody, nothing is known.
    assert weigh(replace(view, rate=replace(slow, generation=0)), plan) == as_measured
    assert weigh(replace(view, rate=replace(slow, per_s=None)), plan) == as_measured


def test_nothing_is_weighed_where_nothing_may_be_chosen() -> None:
    plan = Plan("copy", "w", 15, replays=(1,), checkpoint=10)
    twice = learned(learned({}, {"log, an iteration": 40.0}), {"log, an iteration": 40.0})
    slow = replace(decide(job(), "J"), errors=twice)  # type: ignore[type-var]
    assert weigh(replace(job(strategy="log"), profile=slow), plan).kind == "copy"
    assert weigh(job(), plan) == plan  # not measured yet
    copies = Plan("copy", "w", 15, sources={1: 0})
    assert weighed(copies) == copies and weighed(Plan("restart", "w")) == Plan("restart", "w")
