"""The plan: named situations, and every situation of small jobs against what the words of the design ask for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast, get_args

import pytest

from swift_agent.agent.lifecycle.planning import plan_generation
from swift_recovery.planning.plan import Plan
from swift_recovery.planning.planner import make_plan
from swift_recovery.planning.reports import RankReport, Status, ranges_of, ranks_of
from swift_rendezvous.roster.records import ProgressRecord
from swift_rendezvous.roster.view import View
from tests.support.records import generation

ALL = (0, 1, 2)


def holding(rank: int, iteration: int, replicas: Sequence[int] = ALL, *, sections: int = 0) -> RankReport:
    return RankReport(rank, "holding", iteration, sections, tuple(replicas))


def test_a_new_rank_gets_the_state_of_a_survivor() -> None:
    plan = make_plan([holding(0, 5), RankReport(1, "fresh"), holding(2, 5)], 3)
    assert (plan.kind, plan.iteration, plan.sources) == ("copy", 5, {1: 0})
    assert "[1] are new" in plan.why and plan.targets_of(0) == [1] and plan.targets_of(2) == []


def test_one_that_finished_the_update_rolls_the_others_forward() -> None:
    plan = make_plan([holding(0, 4), holding(1, 5)], 3)
    assert (plan.iteration, plan.sources) == (5, {0: 1, 2: 1})
    assert "[2] are new" in plan.why and "[0] take over" in plan.why


def test_transfers_are_spread_over_the_sources() -> None:
    replicas = tuple(range(6))
    plan = make_plan([holding(r, 7, replicas) for r in (1, 4)], 6)
    assert plan.sources == {0: 1, 2: 4, 3: 1, 5: 4}


def test_nobody_lost_is_a_plan_too() -> None:
    plan = make_plan([holding(r, 3, sections=r) for r in ALL], 3)
    assert (plan.kind, plan.sources, plan.iteration, plan.sections) == ("copy", {}, 3, 2)
    assert plan.why == "all ranks hold iteration 3"


def test_sections_count_only_where_the_plan_goes_on() -> None:
    assert make_plan([holding(0, 4, sections=9), holding(1, 5, sections=2)], 3).sections == 2


def test_one_rank_of_each_set_leads_its_bucket_layout() -> None:
    plan = make_plan([holding(0, 1), holding(1, 2)], 3)
    assert plan.layouts == {0: 1, 2: 1}
    plan = make_plan([holding(0, 3, (0, 2)), holding(1, 3, (1, 3)), holding(3, 3, (1, 3))], 4)
    assert plan.layouts == {2: 0, 3: 1}


def test_before_the_first_iteration() -> None:
    assert make_plan([], 3).kind == "fresh"
    assert make_plan([RankReport(r, "fresh") for r in ALL], 3).kind == "fresh"
    plan = make_plan([RankReport(0, "setup"), RankReport(1, "fresh"), RankReport(2, "empty")], 3)
    assert plan.kind == "restart"
    assert "[0] were cut before their training loop began; ranks [2] had no state yet" in plan.why


def test_each_rank_that_holds_nothing_is_told_with_its_reason() -> None:
    """Whatever the iteration: also in the first one an update may be half done, and a replacement may stand before a
    later one."""
    half = "had begun update 0, which may not be whole, and cannot take it back"
    cut = [RankReport(0, "empty", 0, lacks=half), RankReport(1, "empty", 30), RankReport(2, "fresh"),
           RankReport(3, "setup"), RankReport(4, "empty", 0, lacks=half, checkpoint=20)]  # fmt: skip
    assert make_plan(cut, 5).why == (
        f"ranks [0, 4] {half}; ranks [1] had no state yet; ranks [3] were cut before their training loop began: "
        "no rank holds a complete state; the newest checkpoint known is that of iteration 20"
    )


def test_a_survivor_without_a_state_is_not_called_lost() -> None:
    half = "had begun update 30, which may not be whole, and cannot take it back"
    plan = make_plan([holding(0, 30, (0,)), RankReport(1, "empty", 30, lacks=half), RankReport(2, "fresh")], 4)
    assert plan.kind == "restart"
    assert plan.why == f"ranks [2, 3] are lost; ranks [1] {half} and no survivor holds a replica of their state"


def test_a_lost_replica_set_asks_for_a_restart_and_says_which() -> None:
    plan = make_plan([holding(0, 5, (0, 1)), holding(1, 5, (0, 1)), RankReport(2, "fresh"), RankReport(3, "fresh")], 4)
    assert plan.kind == "restart" and "[2, 3]" in plan.why


def test_sets_that_are_apart_meet_where_both_have_somebody() -> None:
    plan = make_plan([holding(0, 5, (0, 1)), holding(1, 4, (0, 1)), holding(2, 4, (2, 3)), holding(3, 4, (2, 3))], 4)
    assert (plan.kind, plan.iteration, plan.sources) == ("copy", 4, {0: 1})
    plan = make_plan([holding(0, 5, (0, 1)), holding(1, 5, (0, 1)), holding(2, 4, (2, 3)), holding(3, 4, (2, 3))], 4)
    assert plan.kind == "restart" and "[0, 1] are ahead of iteration 4" in plan.why


def test_a_rank_that_names_no_replicas_stands_alone() -> None:
    assert make_plan([holding(0, 5, ()), holding(1, 5, ())], 2).sources == {}
    assert make_plan([holding(0, 5, ()), RankReport(1, "fresh")], 2).kind == "restart"


def test_a_replica_set_beyond_the_world_is_not_trusted() -> None:
    assert make_plan([holding(0, 5, (0, 7))], 2).kind == "restart"


# ---- all situations ----

# None: no report. A number: holding that iteration.
STATES: tuple[Any, ...] = (None, "fresh", "setup", "empty", 3, 4, 5)


def _reports(states: Iterable[Any], sets: Sequence[tuple[int, ...]]) -> list[RankReport]:
    set_of = {rank: members for members in sets for rank in members}
    return [
        RankReport(rank, cast(Status, state)) if isinstance(state, str) else holding(rank, state, set_of[rank])
        for rank, state in enumerate(states) if state is not None
    ]


def _check(states: tuple[Any, ...], sets: Sequence[tuple[int, ...]], plan: Plan) -> str:
    where = f"{states} {sets}: {plan}"
    world = range(len(states))
    held = {rank: state for rank, state in enumerate(states) if isinstance(state, int)}
    exact = [i for i in (3, 4, 5) if all(any(held.get(rank) == i for rank in members) for members in sets)]
    if plan.kind == "fresh":
        assert all(state in (None, "fresh") for state in states), where
        assert not plan.sources and not plan.layouts, where
        return "fresh"
    if plan.kind == "restart":
        assert not exact, f"an exact way exists to {exact}: {where}"
        assert not all(state in (None, "fresh") for state in states), where
        assert plan.why and not plan.sources, where
        return "restart"
    assert plan.iteration == max(exact), where
    set_of = {rank: members for members in sets for rank in members}
    for rank in world:
        if held.get(rank) == plan.iteration:
            assert rank not in plan.sources, where
            continue
        source = plan.sources[rank]  # nobody without the state is left without a source
        assert held.get(source) == plan.iteration, where
        assert source in set_of[rank] and source not in plan.sources, where
    assert all(rank in world for rank in plan.sources), where
    # After the plan all ranks of a set have the layout of one that holds the state.
    for members in sets:
        leaders = {plan.layouts.get(rank, rank) for rank in members}
        assert len(leaders) == 1 and leaders <= set(members), where
        assert held.get(leaders.pop()) == plan.iteration, where
    assert sorted(t for r in world for t in plan.targets_of(r)) == sorted(plan.sources), where
    return "copy"


def _check_all(num_ranks: int, sets: Sequence[tuple[int, ...]]) -> set[str]:
    seen = set()
    for states in itertools.product(STATES, repeat=num_ranks):
        reports = _reports(states, sets)
        plan = make_plan(reports, num_ranks)
        assert make_plan(reversed(reports), num_ranks) == plan  # reports come in any order
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
        seen.add(_check(states, sets, plan))
    return seen


def test_every_situation_of_three_replicas() -> None:
    assert _check_all(3, [(0, 1, 2)]) == {"fresh", "copy", "restart"}


def test_every_situation_of_two_replica_sets_of_two() -> None:
    assert _check_all(4, [(0, 2), (1, 3)]) == {"fresh", "copy", "restart"}


def test_every_situation_of_a_pair_and_a_single() -> None:
    assert _check_all(3, [(0, 2), (1,)]) == {"fresh", "copy", "restart"}


@pytest.mark.parametrize("spoil", [
    lambda plan: Plan(**{**vars(plan), "iteration": 4}),
    lambda plan: Plan(**{**vars(plan), "sources": {}}),
    lambda plan: Plan(**{**vars(plan), "sources": {1: 0, 3: 0}}),
    lambda plan: Plan("restart", "lazy"),
    lambda plan: Plan(**{**vars(plan), "layouts": {}}),
])  # fmt: skip
def test_the_check_of_all_situations_notices_wrong_plans(spoil: Any) -> None:
    states, sets = (5, 4, 4, 5), [(0, 1), (2, 3)]
    plan = make_plan(_reports(states, sets), 4)
    assert _check(states, sets, plan) == "copy"
    with pytest.raises((AssertionError, KeyError)):
        _check(states, sets, spoil(plan))


# ---- predecessors on a node that leaves ----


def test_a_successor_gets_its_own_state_even_if_replicas_have_it() -> None:
    plan = make_plan([holding(0, 5), RankReport(1, "fresh"), holding(2, 5)], 3, [holding(1, 5)])
    assert (plan.kind, plan.iteration, plan.handovers, plan.sources) == ("copy", 5, (1,), {})
    assert plan.layouts == {1: 0, 2: 0}


def test_the_only_copy_is_handed_over_with_its_layout() -> None:
    plan = make_plan([holding(0, 5, (0,)), RankReport(1, "fresh")], 2, [holding(1, 5, (1,))])
    assert (plan.kind, plan.handovers, plan.sources, plan.layouts) == ("copy", (1,), {}, {1: 1})
    assert make_plan([holding(0, 5, (0,)), RankReport(1, "fresh")], 2).kind == "restart"


def test_who_holds_already_needs_no_predecessor() -> None:
    plan = make_plan([holding(0, 5, (0,)), holding(1, 5, (1,))], 2, [holding(1, 5, (1,))])
    assert (plan.handovers, plan.sources, plan.layouts) == ((), {}, {})


def test_a_new_replica_gets_the_state_from_a_successor_if_nobody_else_has_it() -> None:
    plan = make_plan([RankReport(0, "fresh"), RankReport(1, "fresh")], 2, [holding(0, 5, (0, 1))])
    assert (plan.handovers, plan.sources, plan.layouts) == ((0,), {1: 0}, {0: 0, 1: 0})


@pytest.mark.parametrize("sets", [[(0, 1, 2)], [(0, 2), (1,)]])
def test_every_situation_with_predecessors(sets: Sequence[tuple[int, ...]]) -> None:
    """A predecessor is as good as a survivor of the same rank, and nobody is left without a source."""
    seen = set()
    for states in itertools.product((None, "fresh", "empty", 4, 5), repeat=3):
        for before in itertools.product((None, 4, 5), repeat=3):
            plan = make_plan(_reports(states, sets), 3, _reports(before, sets))
            assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
            seen.add(plan.kind)
            merged = tuple(own if isinstance(own, int) else old or own for own, old in zip(states, before, strict=True))
            alike = make_plan(_reports(merged, sets), 3)
            assert (plan.kind, plan.iteration) == (alike.kind, alike.iteration)
            for rank in plan.handovers:
                assert before[rank] == plan.iteration and not isinstance(states[rank], int)
            if plan.kind == "copy":
                for rank, state in enumerate(states):
                    assert (state == plan.iteration) + (rank in plan.handovers) + (rank in plan.sources) == 1
                for source in plan.sources.values():
                    assert states[source] == plan.iteration or source in plan.handovers
    assert seen == {"fresh", "copy", "restart"}


# ---- logs ----


def logging(rank: int, iteration: int, **more: Any) -> RankReport:
    return RankReport(rank, "holding", iteration, replicas=(rank,), logs=True, **more)


def test_a_rank_without_a_replica_repeats_its_iterations_from_logs() -> None:
    plan = make_plan([logging(0, 5), RankReport(1, "empty"), logging(2, 5)], 4)
    assert (plan.kind, plan.iteration, plan.replays) == ("copy", 5, (1, 3))
    assert plan.sources == plan.layouts == {}
    assert plan.why == (
        "ranks [1, 3] have no replica and repeat iterations 0 to 4 from the logs of the others; survivors stay where "
        "they are in iteration 5"
    )


def test_it_repeats_the_update_too_that_survivors_can_still_make() -> None:
    plan = make_plan([logging(0, 5, reduced=True), logging(2, 6)], 3)
    assert (plan.iteration, plan.replays) == (6, (1,))


def test_in_the_first_iteration_there_is_nothing_to_repeat() -> None:
    plan = make_plan([logging(0, 0), logging(2, 0)], 3)
    assert (plan.kind, plan.replays) == ("copy", (1,)) and "start over" in plan.why


def test_who_repeats_alone_counts_as_being_there() -> None:
    """Its report says where it will be: it needs nobody for that."""
    plan = make_plan([logging(0, 5), logging(1, 5)], 3)
    assert plan.replays == (2,) and plan.iteration == 5


def stage(rank: int, iteration: int, **more: Any) -> RankReport:
    """Of a pipeline in which ranks 0 and 1, 2 and 3 and so on are replicas, on one node each."""
    return replace(logging(rank, iteration, **more), replicas=(rank - rank % 2, rank - rank % 2 + 1))


def test_a_set_that_is_lost_repeats_its_iterations_and_one_of_which_a_rank_is_left_does_not() -> None:
    plan = make_plan([stage(0, 5), stage(1, 5), stage(4, 5), stage(5, 5)], 6)
    assert (plan.kind, plan.iteration, plan.replays, plan.stays) == ("copy", 5, (2, 3), True)
    assert plan.sources == {} and plan.layouts == {1: 0, 5: 4}
    plan = make_plan([stage(0, 5), stage(1, 5), stage(2, 5, unwinds="w"), stage(4, 6), stage(5, 6)], 6)
    assert (plan.kind, plan.sources, plan.replays, plan.stays) == ("restart", {}, (), False), "4 and 5 are ahead"
    plan = make_plan([stage(0, 5), stage(1, 5), stage(2, 5), stage(4, 5), stage(5, 5)], 6)
    assert (plan.kind, plan.iteration, plan.sources, plan.replays) == ("copy", 5, {3: 2}, ())
    assert not plan.stays and "ranks [3] have nothing of what was sent in it" in plan.why


def test_what_a_lost_rank_had_sent_cannot_be_repeated_with() -> None:
    plan = make_plan([stage(0, 5, checkpoint=4), stage(4, 5), stage(5, 5)], 6)
    assert plan.kind == "restart" and plan.why == (
        "ranks [2, 3] would have to repeat iterations without what ranks [1], lost too, had sent to them; the newest "
        "checkpoint known is that of iteration 4"
    )


def test_what_logs_nothing_for_another_goes_back_with_it() -> None:
    apart = [logging(0, 5, unlogged=(1,)), logging(2, 5, unlogged=(3,)), logging(3, 5, unlogged=(2,))]
    plan = make_plan(apart, 4)
    assert plan.kind == "restart" and "ranks [1] would have to repeat iterations without ranks [0]" in plan.why
    plan = make_plan(apart[1:], 4)
    assert (plan.kind, plan.iteration, plan.replays, plan.stays) == ("copy", 5, (0, 1), True)
    assert RankReport.from_json(json.loads(json.dumps(apart[0].to_json()))) == apart[0]
    assert "unlogged" not in logging(0, 5).to_json()


COLLECTIVE = "have taken part in a collective of it"


def test_survivors_stay_in_their_iteration() -> None:
    plan = make_plan([logging(0, 5), logging(2, 5)], 3)
    assert plan.stays and Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    # Also where nobody is lost, or is lost any more.
    assert make_plan([logging(0, 5), logging(1, 5)], 2).stays


def test_all_begin_it_again_if_one_of_them_cannot_stay() -> None:
    plan = make_plan([logging(0, 5, unwinds=COLLECTIVE), logging(2, 5), logging(3, 5, unwinds=COLLECTIVE)], 4)
    assert not plan.stays and "stays" not in plan.to_json()
    assert plan.why.endswith("; all begin iteration 5 again: ranks [0, 3] have taken part in a collective of it")
    report = logging(0, 5, unwinds=COLLECTIVE)
    assert RankReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_what_an_iteration_that_is_complete_has_had_does_not_count() -> None:
    """Rank 0 makes the update before that iteration, and is then at its start."""
    plan = make_plan([logging(0, 5, reduced=True, unwinds=COLLECTIVE), logging(2, 6)], 3)
    assert plan.iteration == 6 and plan.stays


def test_an_update_that_the_lost_rank_could_not_repeat_is_not_made() -> None:
    """All survivors could make it, but its iteration had a collective, which is in no log."""
    reports = [logging(rank, 5, reduced=True, unwinds=COLLECTIVE) for rank in (0, 2)]
    plan = make_plan(reports, 3)
    assert (plan.iteration, plan.stays) == (5, False)
    assert make_plan(reports, 2, [])  # nobody is lost, and it is made
    assert make_plan([logging(0, 5, reduced=True, unwinds=COLLECTIVE), logging(1, 5, reduced=True)], 2).iteration == 6


def test_where_nothing_is_logged_nothing_is_said_of_it() -> None:
    plan = make_plan([holding(0, 5), holding(2, 5)], 3)
    assert not plan.stays and "stay" not in plan.why and "again" not in plan.why


def test_nobody_stays_where_a_node_leaves() -> None:
    """Its successor has the state, but no log of what was sent."""
    plan = make_plan([logging(0, 5)], 2, [logging(1, 5)])
    assert plan.handovers == (1,) and not plan.stays


@pytest.mark.parametrize(
    "reports",
    [
        [logging(0, 5), RankReport(2, "holding", 5, replicas=(2,))],
        [logging(0, 5), logging(2, 6)],
    ],
    ids=["a log lacks something", "somebody is ahead"],
)
def test_without_all_logs_all_begin_again(reports: list[RankReport]) -> None:
    assert make_plan(reports, 3).kind == "restart"


def test_a_state_that_is_handed_over_leaves_its_log_behind() -> None:
    assert make_plan([logging(0, 5), RankReport(2, "empty")], 3, [logging(2, 5)]).kind == "restart"


# ---- reports, and the joint with the records ----


def test_a_report_is_read_back_and_a_strange_one_refused() -> None:
    for status in get_args(Status):
        for flags in ({}, {"logs": True}, {"reduced": True}):
            report = RankReport(3, status, 7, 1, (1, 3), **flags)
            assert RankReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert RankReport.from_json({"rank": 2, "status": "fresh"}) == RankReport(2, "fresh")
    strange: list[dict[str, Any]] = [
        {}, {"rank": 1}, {"rank": "x", "status": "fresh"}, {"rank": 1, "status": "gone"},
        {"rank": 1, "status": "holding", "replicas": 3},
    ]  # fmt: skip
    for data in strange:
        with pytest.raises((KeyError, TypeError, ValueError)):
            RankReport.from_json(data)


def test_ranks_as_text() -> None:
    for ranks, text in (((), ""), ((7,), "7"), ((0, 1, 2, 5, 7, 8), "0-2,5,7-8"), (tuple(range(8192)), "0-8191")):
        assert ranges_of(ranks) == text and ranks_of(text) == ranks
        assert ranks_of(str(text)) is ranks_of(text), "the planner looks at each text once"
    assert ranges_of([3, 1, 2, 1]) == "1-3"
    for strange in ("x", "1-y", "1,,2", "-1", 3):
        with pytest.raises((ValueError, TypeError)):
            ranks_of(strange)  # type: ignore[arg-type]


def test_the_plan_of_a_generation_comes_from_its_records() -> None:
    begun = plan_generation(generation(1, "start"), View())
    assert not begun.restart and Plan.from_json(begun.content).kind == "fresh"
    records = {
        0: ProgressRecord(0, "n0.1", tuple(holding(r, 5, (0, 1, 2, 3)).to_json() for r in (0, 1))),
        1: ProgressRecord(1, "n1.1", (RankReport(2, "fresh").to_json(), holding(3, 5, (0, 1, 2, 3)).to_json())),
    }
    record = plan_generation(generation(2, "replace"), View(progress=records))
    assert (record.generation, record.restart) == (2, False)
    assert Plan.from_json(record.content).sources == {2: 0}
    cut = ProgressRecord(0, "n0.1", (RankReport(0, "setup").to_json(),))
    lost = plan_generation(generation(2, "replace"), View(progress={0: cut}))
    assert lost.restart and lost.why


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "gone"}, {"replicas": "0-30000000"}, {"replicas": "0-9"}, {"rank": 9}, {"rank": -1},
        {"iteration": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_report_that_cannot_be_read_restarts_all_and_says_so(changes: dict[str, Any]) -> None:
    """Its author would not write it again, and a coordinator that tried for ever would hold up the job for ever."""
    whole = [holding(rank, 5, ALL).to_json() for rank in range(3)]
    records = {slot: ProgressRecord(slot, f"n{slot}.1", (report,)) for slot, report in enumerate(whole)}
    decided = generation(2, "replace", ("n0", "n1", "n2"), workers=1)
    assert not plan_generation(decided, View(progress=records)).restart
    damaged = ProgressRecord(1, "n1.1", ({**whole[1], **changes},))
    for plan in (
        plan_generation(decided, View(progress={**records, 1: damaged})),
        plan_generation(decided, View(progress={0: records[0], 2: records[2]}, handovers={1: damaged})),
    ):
        assert plan.restart and "the report of slot 1 cannot be read (" in plan.why
    unreadable = View(progress={1: ProgressRecord(1, "n1.1", ({"local_rank": 0},))})
    resized = plan_generation(generation(2, "resize", workers=1), unreadable)
    assert resized.restart and "the report of slot 1 cannot be read (KeyError" in resized.why


# ---- survivors cut in the middle of an update ----

SUBSETS = [frozenset(c) for n in range(4) for c in itertools.combinations(range(3), n)]


def mixed(rank: int, updated: Iterable[int], replicas: Sequence[int] = ALL) -> RankReport:
    return RankReport(rank, "holding", 5, 0, tuple(replicas), tuple(sorted(updated)), 3)


def carried_out(plan: Plan, reports: Sequence[RankReport], world_size: int) -> dict[int, list[int]]:
    """How many updates are in each parameter of each rank after *plan*; checks that nothing comes from nowhere."""
    held = {r.rank: [r.iteration + (number in r.updated) for number in range(3)] for r in reports}
    before = {r.rank: r.iteration for r in reports}
    for rank, numbers in plan.undone.items():
        for number in numbers:
            assert held[rank][number] == before[rank] + 1, "only an update that was made can be undone"
            held[rank][number] -= 1
    for patch in plan.patches:
        for target, number in itertools.product(patch.targets, patch.parameters):
            held[target][number] = held[patch.source][number]
    for target, source in plan.sources.items():
        assert held[source] == [plan.iteration] * 3, "a whole state is sent by who holds it"
        held[target] = list(held[source])
    return held


def test_every_mixture_of_three_replicas_ends_in_one_state() -> None:
    """Any rank lost or not; each survivor before update 5, in it with any parameters updated, or after it."""
    choices: list[Any] = [None, "after", *SUBSETS]
    for situation in itertools.product(choices, repeat=3):
        reports = [
            holding(rank, 6) if at == "after" else mixed(rank, at)
            for rank, at in enumerate(situation)
            if at is not None
        ]
        if not reports:
            continue
        plan = make_plan(reports, 3)
        assert plan.kind == "copy"
        held = carried_out(plan, reports, 3)
        assert held == {rank: [plan.iteration] * 3 for rank in range(3)}, (situation, plan)
        together = frozenset[int]().union(*(frozenset(range(3)) if at == "after" else at for at in situation if at))
        assert plan.iteration == (6 if together == {0, 1, 2} else 5), (situation, plan)
        # Only what no survivor has untouched.
        by_all = frozenset.intersection(*(frozenset(range(3)) if at == "after" else at for at in situation
                                          if at is not None))
        assert set().union(*plan.undone.values()) == (set() if plan.iteration == 6 else by_all)


def test_two_replica_sets_go_back_together() -> None:
    """One could finish its update, the other cannot."""
    reports = [mixed(0, {0, 1}, (0, 2)), mixed(2, {2}, (0, 2)), mixed(1, {0}, (1, 3))]
    plan = make_plan(reports, 4)
    assert (plan.kind, plan.iteration, plan.undone) == ("copy", 5, {1: (0,)})
    assert carried_out(plan, reports, 4) == {rank: [5, 5, 5] for rank in range(4)}


SETS = [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_every_mixture_of_two_replica_sets_ends_in_one_iteration() -> None:
    """Ranks 0 and 2, 1 and 3. Nobody is after update 5 before all have made it: they say so to each other."""
    everything = frozenset(range(3))
    choices: list[Any] = [None, "after", *SUBSETS[:2], SUBSETS[-2], everything]
    for situation in itertools.product(choices, repeat=4):
        alive = [at for at in situation if at is not None]
        if "after" in alive and not all(at in ("after", everything) for at in alive):
            continue
        if situation[0] == situation[2] is None or situation[1] == situation[3] is None:
            continue
        reports = [
            holding(rank, 6, replicas=SETS[rank]) if at == "after" else mixed(rank, at, SETS[rank])
            for rank, at in enumerate(situation)
            if at is not None
        ]
        plan = make_plan(reports, 4)
        held = carried_out(plan, reports, 4)
        assert held == {rank: [plan.iteration] * 3 for rank in range(4)}, (situation, plan)
        # Forward only if all have it: else one set could be without what was before when another loses what it has.
        forward = all(at in ("after", everything) for at in alive)
        assert plan.iteration == (6 if forward else 5), (situation, plan)
        if forward:  # and nothing moves to who has it all
            assert set(plan.sources) == {rank for rank in range(4) if situation[rank] is None}, (situation, plan)
            assert not plan.undone and not plan.patches


@pytest.mark.parametrize("reduced", [True, False])
def test_of_two_replica_sets_none_goes_forward_before_all_can(reduced: bool) -> None:
    """Ranks 0 and 3 can make update 5 by themselves, rank 1 cannot: if rank 3 is lost next, so can nobody of its set.
    """
    reports = [holding(rank, 5, SETS[rank]) for rank in (0, 1, 3)]
    able = [replace(report, reduced=report.rank != 1 or reduced) for report in reports]
    plan = make_plan(able, 4)
    assert plan.iteration == (6 if reduced else 5) and plan.kind == "copy"


def test_the_plan_names_what_is_undone() -> None:
    plan = make_plan([mixed(0, {0, 1}), mixed(1, {0})], 3)
    assert plan.why.startswith("ranks [0, 1] undo update 5 of parameters 0, which all have made; "
                               "ranks [0] get parameters 1 of iteration 5 from rank 1; ")
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_report_in_the_middle_of_an_update_travels_as_it_is() -> None:
    report = mixed(1, {0, 2})
    assert RankReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert "updated" not in holding(0, 5).to_json()


# ---- several replica sets, cut around the update ----


def reduced(rank: int, replicas: Sequence[int]) -> RankReport:
    return RankReport(rank, "holding", 5, 0, tuple(replicas), reduced=True)


def test_who_has_all_gradients_finishes_the_update_that_another_set_has_made() -> None:
    plan = make_plan([holding(0, 6, (0, 2)), reduced(1, (1, 3))], 4)
    assert (plan.kind, plan.iteration, plan.sources) == ("copy", 6, {2: 0, 3: 1})
    plan = make_plan([reduced(0, (0, 2)), reduced(1, (1, 3))], 4)
    assert (plan.iteration, plan.sources) == (6, {2: 0, 3: 1}), "nothing need be computed again"


def test_gradients_that_are_complete_in_one_set_only_are_of_no_use() -> None:
    plan = make_plan([reduced(0, (0, 2)), holding(1, 5, (1, 3))], 4)
    assert (plan.kind, plan.iteration, plan.sources) == ("copy", 5, {2: 0, 3: 1})


def test_whatever_ranks_agree_on_before_an_update_two_sets_reach_one_iteration() -> None:
    """If any rank has made it, all have their gradients: then every combination of survivors can go on."""
    choices: list[Any] = [None, "before", "reduced", "after"]
    for situation in itertools.product(choices, repeat=4):
        if "after" in situation and "before" in situation:
            continue  # cannot be: who has not called `agree` holds back all others
        sets = {0: (0, 2), 2: (0, 2), 1: (1, 3), 3: (1, 3)}
        reports = [
            reduced(rank, sets[rank]) if at == "reduced" else holding(rank, 6 if at == "after" else 5, sets[rank])
            for rank, at in enumerate(situation)
            if at is not None
        ]
        if not all(any(situation[rank] for rank in members) for members in ((0, 2), (1, 3))):
            continue  # a set without a survivor
        plan = make_plan(reports, 4)
        assert plan.kind == "copy" and (plan.iteration == 6 or "after" not in situation), (situation, plan)
        held = {r.rank: r.iteration + (r.reduced and plan.iteration == 6) for r in reports}
        for target, source in plan.sources.items():
            assert held[source] == plan.iteration and sets[source] == sets[target]
            held[target] = plan.iteration
        assert held == dict.fromkeys(range(4), plan.iteration), (situation, plan)


def test_a_short_text_cannot_name_more_ranks_than_there_is_memory_for() -> None:
    for text in ("0-30000000", "0-999999999999", "0-600000,700000-1300000", "-5"):
        with pytest.raises(ValueError):
            ranks_of(text)
    assert len(ranks_of("0-99999")) == 100_000
