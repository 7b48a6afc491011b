"""Jobs whose `--nnodes` is a range: when they begin, grow and shrink, and when they wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swift_rendezvous.codec import decode, encode
from swift_rendezvous.roster.decision import (
    Decision,
    ForgetNode,
    PublishGeneration,
    PublishPause,
    PublishPlan,
    PublishResult,
    Rules,
)
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.membership import decide, stage_of
from swift_rendezvous.roster.records import (
    DrainRecord,
    ExitedRecord,
    JobRecord,
    ParkedRecord,
    PauseRecord,
    PlanRecord,
    PositionRecord,
    ResultRecord,
    ResumedRecord,
    Setback,
    Trouble,
)
from swift_rendezvous.roster.resizing import is_elastic, sizes
from swift_rendezvous.roster.view import View
from tests.support.records import failure, generation, view

RULES = Rules(replacement_timeout_s=300.0, join_timeout_s=600.0, last_call_s=30.0)
JOB = JobRecord(2, 2, "command", 1, max_nodes=4)


def of_range(*names: str, slots: tuple[str, ...] = ("n0", "n1"), **changes: Any) -> View:
    """An untracked job of 2 to 4 nodes that trains on *slots*."""
    return view(names=names, **{"job": JOB, "tracked": False, "generation": generation(slots=slots), **changes})


def beginning(*names: str) -> View:
    return of_range(*names, generation=None, plan=None)


def ask(v: View, waited_s: float | None = None) -> Decision:
    return decide(v, RULES, now_s=1000.0, waiting_since_s=None if waited_s is None else 1000.0 - waited_s)


def published(decision: Decision) -> Any:
    found = [c.generation for c in decision.commands if isinstance(c, PublishGeneration)]
    return found[0] if found else None


def names(decision: Decision) -> list[str]:
    return [owner.node_id for owner in published(decision).slots]


def test_a_job_of_one_size_has_no_stages() -> None:
    assert not is_elastic(None) and not is_elastic(JobRecord(2, 2, "c")) and is_elastic(JOB)
    assert (sizes(JOB), sizes(JobRecord(3, 2, "c")), sizes(JobRecord(3, 2, "c", max_nodes=3))) == ("2:4", "3", "3")
    assert {stage_of(view()), stage_of(view(names=("n0",))), stage_of(View())} == {""}


def test_it_begins_with_the_most_at_once_and_with_the_least_after_the_last_call() -> None:
    few = beginning("n0")
    assert stage_of(few) == "join" and "1 of 2" in ask(few).waiting
    assert ask(few, 0.0).deadline_s == 1600.0
    enough = beginning("n0", "n1", "n2")
    assert stage_of(enough) == "last call" and published(ask(enough)) is None
    assert ask(enough).deadline_s == 1030.0 and "last_call_timeout" in ask(enough).waiting
    assert names(ask(enough, 30.0)) == ["n0", "n1", "n2"]
    assert names(ask(beginning("n0", "n1", "n2", "n3", "n4"))) == ["n0", "n1", "n2", "n3"]


def test_late_nodes_are_taken_in_at_once_if_that_fills_it_else_after_the_last_call() -> None:
    one = of_range("n0", "n1", "n2")
    assert stage_of(one) == "last call" and not ask(one, 29.0).commands and ask(one, 29.0).deadline_s == 1001.0
    grown = ask(one, 30.0)
    new = published(grown)
    assert names(grown) == ["n0", "n1", "n2"] and PublishPlan() in grown.commands
    assert (new.number, new.mode, new.epoch, new.num_restarts, new.lost, new.store_slot) == (2, "restart", 2, 0, {}, 0)
    assert "n2 came late" in new.why
    assert names(ask(of_range("n0", "n1", "n2", "n3"))) == ["n0", "n1", "n2", "n3"]
    assert names(ask(of_range("n0", "n1", "n2", "n3", "n4"))) == ["n0", "n1", "n2", "n3"]


def test_there_is_no_growth_beyond_the_most_nor_at_the_end_nor_before_the_plan() -> None:
    full = of_range("n0", "n1", "n2", "n3", "n4", slots=("n0", "n1", "n2", "n3"))
    assert stage_of(full) == "" and ask(full) == Decision()
    late = of_range("n0", "n1", "n2", "n3", exited={0: ExitedRecord(0, "n0.1")})
    assert stage_of(late) == "" and ask(late) == Decision()
    assert published(ask(of_range("n0", "n1", "n2", "n3", plan=None))) is None
    assert ask(of_range("n0", "n1", "n2", "n3", result=ResultRecord("stopped", "w"))) == Decision()


def test_a_lost_node_is_replaced_at_once_or_left_out_after_the_last_call() -> None:
    slots = ("n0", "n1", "n2")
    lost = {"failures": {1: failure("node", 1)}}
    replaced = ask(of_range(*slots, "n3", slots=slots, **lost))
    assert names(replaced) == ["n0", "n2", "n3"] and ForgetNode("n1", "n1.1") in replaced.commands
    short = of_range(*slots, slots=slots, **lost)
    assert stage_of(short) == "last call" and not published(ask(short)) and ask(short).deadline_s == 1030.0
    smaller = ask(short, 30.0)
    new = published(smaller)
    assert names(smaller) == ["n0", "n2"] and (new.mode, new.epoch, new.num_restarts, new.lost) == ("restart", 2, 0, {})
    assert "lost node n1" in new.why and "2 nodes" in new.why


def test_it_grows_while_it_restarts_anyway() -> None:
    slots = ("n0", "n1", "n2")
    lost = of_range(*slots, "n3", "n4", "n5", slots=slots, failures={1: failure("node", 1)})
    assert names(ask(lost)) == ["n0", "n2", "n3", "n4"]
    failed = ask(of_range("n0", "n1", "n2", failures={1: failure("workers", 1, (0,))}))
    new = published(failed)
    assert names(failed) == ["n0", "n1", "n2"] and (new.num_restarts, new.lost) == (1, {1: (0,)})


def test_it_never_goes_under_the_least() -> None:
    short = of_range("n0", "n1", failures={1: failure("node", 1)})
    assert stage_of(short) == "replacement"
    for waited_s in (0.0, 30.0, 299.0):
        decision = ask(short, waited_s)
        assert published(decision) is None and "slots [1] wait for a node" in decision.waiting
    over = [c.result for c in ask(short, 300.0).commands if isinstance(c, PublishResult)]
    assert over[0].state == "stopped" and "--replacement-timeout" in over[0].why


def test_workers_that_fail_of_a_lost_peer_use_up_no_restart() -> None:
    slots = ("n0", "n1", "n2")
    failures = {0: failure("workers", 0, (0, 1), left=0), 1: failure("node", 1), 2: failure("workers", 2, (0,), left=0)}
    decision = ask(of_range(*slots, slots=slots, failures=failures), 30.0)
    assert names(decision) == ["n0", "n2"] and published(decision).lost == {}
    alone = {0: failure("workers", 0, (0,), left=0)}
    over = [c.result for c in ask(of_range(*slots, slots=slots, failures=alone)).commands
            if isinstance(c, PublishResult)]  # fmt: skip
    assert over[0].state == "failed" and "no restart is left" in over[0].why


@pytest.mark.parametrize("present", range(1, 6))
@pytest.mark.parametrize("num_slots", range(2, 5))
@pytest.mark.parametrize("waited_s", [None, 0.0, 30.0, 300.0])
def test_whatever_is_there_the_size_is_allowed_and_no_wait_is_for_ever(
    present: int, num_slots: int, waited_s: float | None
) -> None:
    slots = tuple(f"n{i}" for i in range(num_slots))
    for last in range(num_slots):  # so many of the first were lost
        there = [name for name in (*slots[last:], *(f"m{i}" for i in range(present)))]
        decision = ask(of_range(*there, slots=slots), waited_s)
        new = published(decision)
        if new is not None:
            assert 2 <= len(new.slots) <= 4 and {o.node_id for o in new.slots} <= set(there)
            assert [o.node_id for o in new.slots][: num_slots - last] == list(slots[last:])
            # The next question about what was decided finds nothing to do, but for the nodes beyond.
            after = of_range(*there, generation=new, plan=PlanRecord(2, {}, "w"))
            assert published(ask(after)) is None
        elif waited_s == 300.0 and not decision.commands:
            assert len(there) == num_slots or num_slots == 4


def test_the_record_of_a_job_that_an_older_version_wrote_has_one_size() -> None:
    old = encode(JOB).replace(b',"max_nodes":4', b"")
    assert not is_elastic(decode(JobRecord, old)) and Keys("j").job
    assert is_elastic(decode(JobRecord, encode(JOB))) and not is_elastic(replace(JOB, max_nodes=2))


# ---- jobs that are recovered in place ----


def tracked(*names: str, **changes: Any) -> View:
    return of_range(*names, tracked=True, **changes)


def resumed(*slots: int) -> dict[int, ResumedRecord]:
    return {slot: ResumedRecord(slot, 5, {}) for slot in slots}


def test_a_tracked_job_grows_from_a_common_boundary() -> None:
    late = tracked("n0", "n1", "n2", "n3")
    assert ask(late).commands == (PublishPause(PauseRecord()),)
    assert not ask(tracked("n0", "n1", "n2"), 29.0).commands
    assert ask(tracked("n0", "n1", "n2"), 30.0).commands == (PublishPause(PauseRecord()),)
    asked = replace(late, pause=PauseRecord())
    assert not ask(asked).commands
    placed = replace(asked, positions={0: PositionRecord(0, "n0.1", 6), 1: PositionRecord(1, "n1.1", 7)})
    assert ask(placed).commands == (PublishPause(PauseRecord(7)),)
    parked = replace(placed, pause=PauseRecord(7), parked={0: ParkedRecord(0, "n0.1"), 1: ParkedRecord(1, "n1.1")})
    new = published(ask(parked))
    assert names(ask(parked)) == ["n0", "n1", "n2", "n3"] and (new.mode, new.epoch, new.number) == ("resize", 2, 2)
    assert not any(isinstance(c, PublishPlan) for c in ask(parked).commands) and new.asks
    gone = replace(parked, nodes={name: parked.nodes[name] for name in ("n0", "n1")})
    back = published(ask(gone))  # the new nodes left: who was asked to stop goes on
    assert (back.mode, back.slots) == ("replace", late.generation.slots)  # type: ignore[union-attr]


def test_a_drain_comes_before_growth() -> None:
    late = tracked("n0", "n1", "n2", drains={"n0": DrainRecord("n0", "n0.1", "w", 1.0)})
    assert ask(late).commands == (PublishPause(PauseRecord()),)
    parked = replace(late, pause=PauseRecord(7), positions={s: PositionRecord(s, f"n{s}.1", 7) for s in (0, 1)},
                     parked={s: ParkedRecord(s, f"n{s}.1") for s in (0, 1)})  # fmt: skip
    assert published(ask(parked)).mode == "replace" and names(ask(parked)) == ["n2", "n1"]


def test_a_tracked_job_shrinks_after_the_last_call_but_takes_a_replacement_at_once() -> None:
    slots = ("n0", "n1", "n2")
    lost = {"failures": {0: failure("node", 0)}}
    short = tracked(*slots, slots=slots, **lost)
    assert stage_of(short) == "last call" and published(ask(short, 29.0)) is None
    new = published(ask(short, 30.0))
    assert (new.mode, new.lost, new.epoch) == ("resize", {}, 2) and names(ask(short, 30.0)) == ["n1", "n2"]
    replaced = published(ask(tracked(*slots, "n3", slots=slots, **lost)))
    assert (replaced.mode, replaced.epoch) == ("replace", 1)
    assert [owner.node_id for owner in replaced.slots] == ["n3", "n1", "n2"]
    least = tracked("n0", "n1", **lost)
    assert published(ask(least, 299.0)) is None and "wait for a node" in ask(least, 299.0).waiting


def test_until_all_train_a_failure_leads_to_another_change_of_size() -> None:
    slots = ("n0", "n1", "n2")
    between = {"generation": generation(2, "resize", slots, epoch=2), "plan": None}
    assert "have not said" in ask(tracked(*slots, **between)).waiting
    lost = tracked(*slots, **between, failures={2: failure("node", 2)}, resumed=resumed(0, 1))
    new = published(ask(lost))  # no last call: nobody trains
    assert (new.mode, new.number, new.epoch) == ("resize", 3, 3) and names(ask(lost)) == ["n0", "n1"]
    failed = tracked(*slots, **between, failures={1: failure("workers", 1, (0,))})
    new = published(ask(failed))
    assert (new.mode, new.lost) == ("resize", {1: (0,)}) and names(ask(failed)) == list(slots)
    worn = tracked(*slots, "n3", **between, failures={1: failure("workers", 1, (0,), left=0)})
    assert [c.result.state for c in ask(worn).commands if isinstance(c, PublishResult)] == ["failed"]
    settled = tracked(*slots, **between, failures={1: failure("workers", 1, (0,))}, resumed=resumed(0, 1, 2))
    assert published(ask(settled)).mode == "replace"
    assert published(ask(replace(settled, failures={1: failure("restart", 1)}))).mode == "restart"


def test_failures_of_a_rank_follow_its_node_to_the_rank_that_it_has_next() -> None:
    slots = ("n0", "n1", "n2")
    old = replace(
        generation(slots=slots),
        troubles=tuple(Trouble(rank, (Setback(1, f"of {rank}"),), "", 1000, 1) for rank in (1, 3, 4)),
    )
    v = of_range(*slots, slots=slots, tracked=True, generation=old, failures={0: failure("node", 0)})
    new = published(ask(v, 30.0))
    assert [slot.node_id for slot in new.slots] == ["n1", "n2"]
    assert [(one.rank, one.setbacks[0].what) for one in new.troubles] == [(1, "of 3"), (2, "of 4")]
