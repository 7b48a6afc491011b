"""A drain, step by step, and what comes between; then all orders in which its parts and failures can come."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from swift_rendezvous.roster import draining
from swift_rendezvous.roster.decision import (
    Decision,
    ForgetDrain,
    PublishGeneration,
    PublishLoss,
    PublishPause,
    PublishPlan,
    PublishRelease,
    PublishResult,
    Rules,
)
from swift_rendezvous.roster.losses import (
    LEASE_IS_GONE,
    absent_handovers,
    absentees,
    losses,
    missing,
    spares,
    told_losses,
)
from swift_rendezvous.roster.membership import decide
from swift_rendezvous.roster.records import (
    DrainRecord,
    ExitedRecord,
    FailureRecord,
    FinishedRecord,
    ParkedRecord,
    PauseRecord,
    PlanRecord,
    PositionRecord,
    ProgressRecord,
    ResumedRecord,
    TakenRecord,
)
from swift_rendezvous.roster.view import View
from tests.support.records import failure, generation, node, owner, view

ALL = ("n0", "n1", "n2")


def order(name: str, life: int = 1) -> dict[str, DrainRecord]:
    return {name: DrainRecord(name, f"{name}.{life}", "maintenance", 1.0)}


def ask(v: View) -> Decision:
    return decide(v, Rules(30.0), now_s=100.0, waiting_since_s=None)


def published(v: View) -> Any:
    found = [c.generation for c in ask(v).commands if isinstance(c, PublishGeneration)]
    return found[0] if found else None


def parked(v: View, *slots: int) -> View:
    return replace(v, pause=PauseRecord(7), parked={slot: ParkedRecord(slot, f"n{slot}.1") for slot in slots})


def without(v: View, *names: str) -> View:
    return replace(v, nodes={k: n for k, n in v.nodes.items() if k not in names})


def handing_over(**changes: Any) -> View:
    """Generation 2: n2 has slot 0, n0 still holds its state."""
    new = generation(2, "replace", ("n2", "n1"), lost={0: (0, 1)}, handover={0: owner("n0")})
    return view(names=ALL, generation=new, plan=None, drains=order("n0"), **changes)


def told(*names: str) -> dict[str, DrainRecord]:
    return {name: DrainRecord(name, f"{name}.1", "it got SIGTERM", 1.0, "SIGTERM", 10.0) for name in names}


# ---- all are told to go ----


def test_the_job_ends_when_no_node_is_left_to_train() -> None:
    end = ask(view(drains=told("n0", "n1"), tracked=False)).commands[-1]
    assert isinstance(end, PublishResult)
    assert (end.result.state, end.result.cause) == ("stopped", "preempted")
    assert end.result.why == "no node is left to train: n0 got SIGTERM, n1 got SIGTERM"


@pytest.mark.parametrize(
    "changes",
    [
        {"drains": told("n0")},
        {"drains": {**told("n0"), **order("n1")}},  # an operator's order waits for a spare
        {"drains": {"n0": told("n0")["n0"], "n1": replace(told("n1")["n1"], incarnation="n1.0")}},
        {"drains": told("n0", "n1"), "released": True},
        {"drains": told("n0", "n1"), "names": ALL},  # a spare is there
    ],
)
def test_and_not_before(changes: dict[str, Any]) -> None:
    assert not any(isinstance(command, PublishResult) for command in ask(view(**changes)).commands)


def test_a_spare_that_is_told_to_go_is_none_and_lost_nodes_do_not_count() -> None:
    assert isinstance(ask(view(names=ALL, drains=told(*ALL), tracked=False)).commands[-1], PublishResult)
    v = view(drains=told("n1"), failures={0: failure("node", 0)})
    end = ask(v).commands[-1]
    assert isinstance(end, PublishResult) and end.result.cause == "preempted"
    assert not isinstance(ask(view(failures={0: failure("node", 0)})).commands[-1:], PublishResult)


def last_step(waiting_since_s: float | None = 95.0, **changes: Any) -> Decision:
    v = view(drains=told("n0", "n1"), **changes)
    return decide(v, Rules(30.0), now_s=100.0, waiting_since_s=waiting_since_s)


def at(*iterations: int, saves: bool = True) -> dict[int, PositionRecord]:
    return {slot: PositionRecord(slot, f"n{slot}.1", number, saves) for slot, number in enumerate(iterations)}


def test_a_last_checkpoint_is_taken_after_one_more_iteration() -> None:
    asked = last_step()
    assert asked.commands == (PublishPause(PauseRecord(None, saves=True)),) and asked.deadline_s == 105.0
    pause = PauseRecord(None, saves=True)
    assert last_step(pause=pause, positions=at(7)).commands == ()
    told_where = last_step(pause=pause, positions=at(7, 9))
    assert told_where.commands == (PublishPause(PauseRecord(10, saves=True)),)
    pause = PauseRecord(10, saves=True)
    parked = {0: ParkedRecord(0, "n0.1")}
    waits = last_step(pause=pause, positions=at(7, 9), parked=parked)
    assert waits.commands == () and waits.waiting and waits.deadline_s == 105.0
    end = last_step(pause=pause, positions=at(7, 9), parked={**parked, 1: ParkedRecord(1, "n1.1")}).commands[-1]
    assert isinstance(end, PublishResult) and end.result.cause == "preempted"
    assert end.result.why.endswith("n1 got SIGTERM; all workers have stopped")


@pytest.mark.parametrize(
    "changes",
    [
        {"waiting_since_s": 90.0},  # its time is over
        {"pause": PauseRecord(None, saves=True), "positions": at(7, 9, saves=False)},  # there are no checkpoints
        {"tracked": False},
        {"failures": {0: failure("workers", 0, (1,))}},
    ],
)
def test_the_job_ends_without_it(changes: dict[str, Any]) -> None:
    end = last_step(**changes).commands[-1]
    assert isinstance(end, PublishResult)
    assert ("no time for a last checkpoint" in end.result.why) == (
        "tracked" not in changes and "positions" not in changes
    )


def test_what_is_under_way_comes_to_its_end_before_it() -> None:
    recovering = last_step(generation=generation(2, "replace"), plan=None)
    assert recovering.commands == () and recovering.deadline_s == 105.0
    pause = PauseRecord(None)
    assert last_step(pause=pause, positions=at(7, 9)).commands == (PublishPause(PauseRecord(9)),)  # that of a drain
    ends = {slot: ExitedRecord(slot, f"n{slot}.1") for slot in (0, 1)}
    assert last_step(exited=ends).commands[-1].result.state == "succeeded"  # type: ignore[union-attr]


def test_a_run_that_is_complete_has_succeeded() -> None:
    """Its workers do not park: there is no iteration before which they could."""
    pause = PauseRecord(10, saves=True)
    ends = {slot: FinishedRecord(slot, f"n{slot}.1") for slot in (0, 1)}
    one = last_step(pause=pause, positions=at(7, 9), finished={0: ends[0]})
    assert one.commands == () and one.deadline_s == 105.0
    for since_s in (95.0, 0.0):
        assert last_step(since_s, pause=pause, positions=at(7, 9), finished=ends).commands == (PublishRelease(),)


# ---- the steps ----


def test_workers_are_asked_once_there_is_a_spare() -> None:
    asked = ask(view(names=ALL, drains=order("n0")))
    assert asked.commands == (PublishPause(PauseRecord()),) and "n0 is drained" in asked.why
    assert ask(view(drains=order("n0"))).commands == ()
    assert ask(view(names=ALL)).commands == ()


def test_the_boundary_is_the_largest_position_once_all_have_spoken() -> None:
    v = view(names=ALL, drains=order("n0"), pause=PauseRecord())
    one = replace(v, positions={1: PositionRecord(1, "n1.1", 9)})
    assert ask(one).commands == () and "have said where" in ask(one).waiting
    both = replace(one, positions={**one.positions, 0: PositionRecord(0, "n0.1", 7)})
    assert ask(both).commands == (PublishPause(PauseRecord(9)),)


def test_the_slot_moves_once_all_wait_at_the_boundary() -> None:
    v = parked(view(names=ALL, drains=order("n0")), 0)
    assert ask(v).commands == () and "not all workers have come" in ask(v).waiting
    new = published(parked(v, 0, 1))
    assert (new.number, new.mode, new.epoch) == (2, "replace", 1)
    assert new.slots == (owner("n2"), owner("n1")) and new.handover == {0: owner("n0")}
    assert new.lost == {0: (0, 1)} and new.store_slot == 1
    assert "n2 takes slot 0 of n0" in new.why


def test_the_plan_waits_for_what_the_drained_node_holds() -> None:
    said = {slot: ProgressRecord(slot, f"n{slot}.1", ()) for slot in (0, 1)}
    assert "n0" in ask(handing_over(progress=said)).waiting
    heard = handing_over(progress=said, handovers={0: ProgressRecord(0, "n0.1", ())})
    assert ask(heard).commands == (PublishPlan(),)


def test_the_order_is_forgotten_when_the_node_has_gone() -> None:
    done = without(handing_over(taken={0: TakenRecord(0, "n2.1")}), "n0")
    done = replace(done, plan=PlanRecord(2, {}, "why"))
    assert ask(done).commands == (ForgetDrain("n0"),) and not losses(done)
    # A new incarnation of that node has no order.
    back = replace(done, nodes={**done.nodes, "n0": node("n0", 2)})
    assert ask(back).commands == (ForgetDrain("n0"),)
    assert [spare.incarnation for spare in spares(back)] == ["n0.2"]


# ---- when not ----


def test_nothing_begins_while_anything_else_is_under_way() -> None:
    v = view(names=ALL, drains=order("n0"))
    assert draining.is_settled(v)
    recovering = generation(2, "replace", ("n0", "n1"))
    assert ask(replace(v, tracked=False)).commands == ()
    assert not [c for c in ask(replace(v, plan=None)).commands if isinstance(c, PublishPause)]
    assert ask(replace(v, released=True)).commands == ()
    assert ask(replace(v, finished={0: FinishedRecord(0, "n0.1")})).commands == ()
    half = replace(v, generation=recovering, resumed={0: ResumedRecord(0, 7, {})})
    assert ask(half).commands == ()
    assert ask(replace(half, resumed={slot: ResumedRecord(slot, 7, {}) for slot in (0, 1)})).commands
    assert "wait" in draining.progress_of(half, "n0", has_spare=True)


def test_a_drained_spare_is_none() -> None:
    v = view(names=ALL, drains=order("n2"))
    assert spares(v) == [] and ask(v).commands == ()
    assert draining.progress_of(v, "n2", has_spare=False) == "leaving"
    early = view(names=ALL, generation=None, plan=None, drains=order("n0"))
    assert published(early).slots == (owner("n1"), owner("n2"))


def test_a_leaving_node_is_no_spare() -> None:
    assert spares(handing_over()) == []


def test_two_nodes_move_at_once_if_there_are_spares_for_both() -> None:
    names = ("n0", "n1", "n2", "n3")
    v = view(names=names, drains={**order("n0"), **order("n1")})
    both = published(parked(v, 0, 1))
    assert both.slots == (owner("n2"), owner("n3")) and sorted(both.handover) == [0, 1] and both.store_slot == 0
    one = published(parked(without(v, "n3"), 0, 1))
    assert one.slots == (owner("n2"), owner("n1")) and sorted(one.handover) == [0]


# ---- taken back, and failures ----


def test_a_pause_is_brought_to_its_end_though_the_order_was_taken_back_or_the_spare_is_gone() -> None:
    for v in (view(names=ALL), view(drains=order("n0"))):
        assert ask(replace(v, pause=PauseRecord())).commands == ()  # positions are still to come
        new = published(parked(v, 0, 1))
        assert (new.number, new.slots, new.lost, new.handover) == (2, generation().slots, {}, {})


def test_a_failure_on_the_way_is_an_ordinary_recovery_and_the_order_stays() -> None:
    v = parked(view(names=ALL, drains=order("n0"), failures={1: failure("workers", 1, (0,))}), 0)
    new = published(v)
    assert new.slots == generation().slots and new.lost == {1: (0,)} and new.handover == {}
    assert ForgetDrain("n0") not in ask(v).commands


def test_the_drained_node_is_lost_on_the_way() -> None:
    v = without(parked(view(names=ALL, drains=order("n0")), 0, 1), "n0")
    new = published(v)
    assert new.slots[0] == owner("n2") and new.handover == {} and ForgetDrain("n0") in ask(v).commands


def test_the_drained_node_is_lost_while_it_hands_over() -> None:
    v = without(handing_over(), "n0")
    assert "n0, which was drained and handed slot 0 over, is lost" in losses(v).handovers[0]
    new = published(v)
    assert new.slots == (owner("n2"), owner("n1")) and new.lost == {} and new.handover == {}
    # Once the new node trains nobody needs it any more.
    assert not losses(replace(v, taken={0: TakenRecord(0, "n2.1")}))


def test_a_drained_node_that_keeps_its_state_has_a_moment_to_come_back() -> None:
    rules = Rules(30.0, return_s=1.0, outage_s=3.0)

    def wait(v: View, unbroken_s: float = math.inf, **since_s: float) -> Decision | None:
        since = {f"{name}.1": at_s for name, at_s in since_s.items()}
        return missing(v, rules, now_s=100.0, absent_since_s=since, unbroken_s=unbroken_s)

    v = without(handing_over(), "n0")
    assert absent_handovers(handing_over()) == {} and absent_handovers(v) == {0: owner("n0")} == dict(
        enumerate(absentees(v)))  # fmt: skip
    fresh = wait(v)
    assert fresh is not None and fresh.commands == () and fresh.deadline_s == 101.0 and "n0" in fresh.waiting
    after_outage = wait(v, unbroken_s=2.0, n0=98.0)
    assert after_outage is not None and after_outage.commands == () and after_outage.deadline_s == 101.0
    assert wait(v, n0=99.0) is None  # too late: the next generation is made without it
    # With it the lease of the new owner is gone: of that one it is written down.
    both = without(v, "n2")
    late = wait(both, n0=99.5, n2=98.0)
    assert late is not None and late.deadline_s == 100.5
    assert late.commands == (PublishLoss(FailureRecord("node", 0, "n2.1", (), LEASE_IS_GONE, "n0")),)
    told = replace(both, failures={0: failure("node", 0, name="n2")})
    for since_s, deadline_s in ((99.5, 100.5), (99.0, None)):
        once_more = wait(told, n0=since_s)
        assert (None if once_more is None else once_more.deadline_s) == deadline_s
    # Nobody waits for one that is not needed any more.
    assert wait(replace(v, taken={0: TakenRecord(0, "n2.1")})) is None and wait(replace(v, released=True)) is None
    assert not told_losses(v) and losses(v).handovers


def test_the_new_node_is_lost_and_the_slot_goes_back() -> None:
    new = published(without(handing_over(), "n2"))
    assert new.slots == (owner("n0"), owner("n1")) and new.handover == {} and new.lost == {}
    assert "n0 has slot 0 back" in new.why


def test_the_new_node_is_lost_and_another_spare_takes_over() -> None:
    v = without(handing_over(), "n2")
    v = replace(v, nodes={**v.nodes, "n3": node("n3")})
    new = published(v)
    assert new.slots == (owner("n3"), owner("n1")) and new.handover == {0: owner("n0")} and new.lost == {0: (0, 1)}


def test_a_spare_goes_first_to_the_slot_that_cannot_go_back() -> None:
    v = without(handing_over(), "n2", "n1")
    waiting = ask(v)
    assert published(v) is None and "wait for a node" in waiting.waiting
    new = published(replace(v, nodes={**v.nodes, "n3": node("n3")}))
    assert new.slots == (owner("n0"), owner("n3")) and new.handover == {} and new.lost == {1: (0, 1)}


def test_another_failure_leaves_the_handover_as_it_is() -> None:
    new = published(handing_over(failures={1: failure("workers", 1, (1,))}))
    assert new.slots == (owner("n2"), owner("n1")) and new.handover == {0: owner("n0")} and new.lost == {1: (1,)}


def test_both_ends_of_a_handover_are_lost() -> None:
    v = without(handing_over(), "n0", "n2")
    assert published(v) is None and "wait for a node" in ask(v).waiting
    new = published(replace(v, nodes={**v.nodes, "n3": node("n3")}))
    assert new.slots == (owner("n3"), owner("n1")) and new.handover == {} and new.lost == {0: (0, 1)}


def test_a_restart_of_all_workers_needs_no_handover() -> None:
    new = published(handing_over(failures={1: failure("restart", 1)}))
    assert new.mode == "restart" and new.handover == {} and new.slots == (owner("n2"), owner("n1"))
    cannot = handing_over(handovers={0: ProgressRecord(0, "n0.1", ())})
    new = published(replace(cannot, plan=PlanRecord(2, {}, "no copy", restart=True)))
    assert new.mode == "restart" and new.handover == {}


def test_a_job_that_ends_is_not_kept() -> None:
    ended = {slot: FinishedRecord(slot, f"n{slot}.1") for slot in (0, 1)}
    v = view(names=ALL, drains=order("n0"), pause=PauseRecord(7), finished=ended)
    assert ask(v).commands == (PublishRelease(),)
    assert not [c for c in ask(v).commands if isinstance(c, PublishResult)]


# ---- for people ----


def test_how_far_an_order_is() -> None:
    def told(v: View, name: str = "n0") -> str:
        return draining.progress_of(v, name, has_spare=bool(spares(v)))

    assert told(view(drains=order("n0"))) == "slot 0 waits for a spare node"
    assert told(view(drains=order("n0", life=2))) == "" and told(view()) == ""
    assert "swift_agent.init" in told(view(names=ALL, drains=order("n0"), tracked=False))
    assert "is looked for" in told(view(names=ALL, drains=order("n0"), pause=PauseRecord()))
    assert "is iteration 7" in told(view(names=ALL, drains=order("n0"), pause=PauseRecord(7)))
    assert "handed over to n2" in told(handing_over())
    assert told(handing_over(taken={0: TakenRecord(0, "n2.1")})) == "leaving"


def test_a_drained_node_that_goes_after_the_release_is_no_loss() -> None:
    """The run was so short that its successor was never heard to train."""
    exited = {slot: ExitedRecord(slot, f"n{slot}.1") for slot in (0, 1)}
    gone = replace(without(handing_over(), "n0"), plan=PlanRecord(2, {}, "why"), released=True)
    assert losses(gone).handovers and ask(gone).commands == (ForgetDrain("n0"),)
    (end, _) = ask(replace(gone, exited=exited)).commands
    assert isinstance(end, PublishResult) and end.result.state == "succeeded"
