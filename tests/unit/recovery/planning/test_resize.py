"""How a job goes on with another number of ranks."""

from __future__ import annotations

import itertools
import json

from swift_agent.agent.lifecycle.planning import plan_generation
from swift_recovery.planning.plan import Plan
from swift_recovery.planning.resize import FILE, Held, make_resize_plan
from swift_rendezvous.roster.records import ProgressRecord
from swift_rendezvous.roster.view import View
from tests.support.records import generation


def test_the_newest_state_is_kept_on_every_node_that_has_it() -> None:
    held = {0: [Held(0, 5), Held(1, 6, 2)], 1: [Held(0, 6, 1), Held(1, 6, 1)], 2: []}
    plan = make_resize_plan(held, [2, 2, 2])
    assert (plan.kind, plan.iteration, plan.sections) == ("copy", 6, 2)
    assert plan.keepers == {0: 1, 1: 0} and plan.loads == (0, 1, 2, 3) and plan.sources == {4: 0, 5: 1}
    assert plan.layouts == {rank: 0 for rank in range(1, 6)}
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_file_that_has_it_need_not_be_written_again_and_an_older_one_counts_for_nothing() -> None:
    assert make_resize_plan({0: [Held(FILE, 6), Held(1, 6)]}, [2]).keepers == {0: FILE}
    assert make_resize_plan({0: [Held(FILE, 6), Held(1, 7)]}, [2]).keepers == {0: 1}
    assert make_resize_plan({0: [Held(FILE, 6)], 1: [Held(0, 7)]}, [1, 1]).loads == (1,)


def test_half_an_update_is_taken_back_on_one_node_if_nobody_has_the_state_untouched() -> None:
    half = {slot: [Held(0, 6, is_mixed=True), Held(1, 6, 2, is_mixed=True)] for slot in range(2)}
    plan = make_resize_plan(half, [1, 1, 1])
    assert (plan.keepers, plan.loads, plan.sections) == ({0: 0}, (0,), 2) and "is taken back there" in plan.why
    plan = make_resize_plan({**half, 1: [Held(0, 6, is_mixed=True), Held(1, 6)]}, [1, 1, 1])
    assert plan.keepers == {1: 1} and "taken back" not in plan.why
    # One has kept it, and then another failure comes.
    assert make_resize_plan({**half, 1: [Held(FILE, 6), *half[1]]}, [1, 1, 1]).keepers == {1: FILE}
    assert make_resize_plan({**half, 1: [Held(0, 7)]}, [1, 1, 1]).keepers == {1: 0}
    for one in (Held(0, 6, 1, is_mixed=True), Held(1, 2)):
        assert Held.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_a_node_without_room_keeps_nothing_as_long_as_another_has_the_state() -> None:
    full = [Held(0, 6, 1, is_full=True), Held(1, 6, 2, is_full=True)]
    plan = make_resize_plan({0: full, 1: [Held(0, 6)]}, [2, 2])
    assert (plan.keepers, plan.loads, plan.sources, plan.sections) == ({1: 0}, (2, 3), {0: 2, 1: 3}, 2)
    assert make_resize_plan({0: [Held(FILE, 6), *full], 1: [Held(0, 5)]}, [1, 1]).keepers == {0: FILE}
    # Half an update is rather taken back than nothing kept.
    plan = make_resize_plan({0: full, 1: [Held(0, 6, is_mixed=True)]}, [1, 1])
    assert plan.keepers == {1: 0} and "is taken back there" in plan.why
    # The last try: there may be room by now.
    assert make_resize_plan({0: full, 1: [Held(0, 5)]}, [1, 1]).keepers == {0: 0}
    assert Held.from_json(json.loads(json.dumps(full[0].to_json()))) == full[0]


def test_where_nobody_has_anything_all_start_over() -> None:
    assert make_resize_plan({0: [], 1: []}, [2, 2]).kind == "restart"


def test_of_all_small_jobs_every_new_rank_gets_the_newest_state_once() -> None:
    choices = [[], [Held(0, 3)], [Held(FILE, 4)], [Held(0, 4), Held(1, 3)], [Held(FILE, 3), Held(1, 4)],
               [Held(0, 4, is_mixed=True)], [Held(0, 4, is_full=True)]]  # fmt: skip
    for found in itertools.product(choices, repeat=3):
        newest = max((one.iteration for ones in found for one in ones), default=None)
        plan = make_resize_plan(dict(enumerate(found)), [2, 2, 2])
        if newest is None:
            assert plan.kind == "restart"
            continue
        assert plan.iteration == newest and sorted([*plan.loads, *plan.sources]) == list(range(6))
        for slot, local_rank in plan.keepers.items():
            assert any((one.local_rank, one.iteration) == (local_rank, newest) for one in found[slot])
        assert set(plan.sources.values()) <= set(plan.loads) == {r for s in plan.keepers for r in (2 * s, 2 * s + 1)}


def test_the_plan_of_a_generation_follows_from_what_its_slots_say() -> None:
    progress = {0: ProgressRecord(0, "n0.1", (Held(0, 8).to_json(),)), 1: ProgressRecord(1, "n2.1", ())}
    record = plan_generation(generation(2, "resize", ("n0", "n2"), epoch=2), View(progress=progress))
    assert not record.restart and Plan.from_json(record.content).sources == {2: 0, 3: 1}
    assert plan_generation(generation(2, "resize"), View(progress={0: ProgressRecord(0, "n0.1", ())})).restart
