"""Who trains together: named situations first, then all situations of a small job at once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from swift_rendezvous.codec import encode
from swift_rendezvous.roster import setbacks
from swift_rendezvous.roster.decision import (
    Decision,
    ForgetNode,
    PublishGeneration,
    PublishLoss,
    PublishPlan,
    PublishRelease,
    PublishResult,
    Rules,
)
from swift_rendezvous.roster.losses import LEASE_IS_GONE, LEFT_OUT, absent, losses, missing, spares, told_losses
from swift_rendezvous.roster.membership import decide
from swift_rendezvous.roster.mending import RemoveDamaged, RestoreGeneration, RestoreJob
from swift_rendezvous.roster.records import (
    AS_LONG_AS_IT_ADVANCES,
    AS_MANY_AS_PAY,
    ExitedRecord,
    FailureRecord,
    FinishedRecord,
    JobRecord,
    PlanRecord,
    ProfileRecord,
    ProgressRecord,
    ResultRecord,
    ResumedRecord,
    WorkerExit,
)
from swift_rendezvous.roster.view import Damaged, View
from tests.support.records import failure, generation, node, owner, view

RULES = Rules(replacement_timeout_s=30.0)


def ask(v: View, *, now_s: float = 100.0, since_s: float | None = None) -> Decision:
    return decide(v, RULES, now_s=now_s, waiting_since_s=since_s)


def published(decision: Decision) -> Any:
    found = [c.generation for c in decision.commands if isinstance(c, PublishGeneration)]
    return found[0] if found else None


def result(decision: Decision) -> Any:
    found = [c.result for c in decision.commands if isinstance(c, PublishResult)]
    return found[0] if found else None


def without(v: View, name: str) -> View:
    return replace(v, nodes={k: n for k, n in v.nodes.items() if k != name})


# ---- begin and end ----


def test_a_job_begins_when_enough_nodes_are_here_in_the_order_in_which_they_came() -> None:
    few = view(names=("n0",), generation=None, plan=None, coordinator=None)
    assert ask(few).commands == () and "1 of 2" in ask(few).waiting
    many = view(names=("n2", "n0", "n1"), generation=None, plan=None)
    new = published(ask(many))
    assert [o.node_id for o in new.slots] == ["n2", "n0"]
    assert (new.number, new.mode, new.epoch, new.num_restarts) == (1, "start", 1, 0)


def test_the_first_nodes_do_not_wait_for_ever() -> None:
    few = view(names=("n0",), generation=None, plan=None, coordinator=None)
    assert ask(few).deadline_s == 100.0 + RULES.join_timeout_s
    assert ask(few, now_s=100.0, since_s=60.0).deadline_s == 60.0 + RULES.join_timeout_s
    over = result(ask(few, now_s=100.0, since_s=100.0 - RULES.join_timeout_s))
    assert over.state == "stopped" and "1 of 2" in over.why and "join_timeout" in over.why


def test_nothing_is_decided_before_the_job_is_known_or_after_its_result() -> None:
    assert ask(View()) == Decision()
    ended = view(result=failure("node", 0), failures={0: failure("node", 0)})
    assert ask(ended) == Decision()


def test_a_replaced_generation_is_planned_once_all_slots_have_said_what_they_hold() -> None:
    entering = view(generation=generation(2, "replace"), plan=None)
    assert "[0, 1]" in ask(entering).waiting
    half = replace(entering, progress={1: ProgressRecord(1, "n1.1", ())})
    assert ask(half).commands == () and "[0]" in ask(half).waiting
    both = replace(half, progress={0: ProgressRecord(0, "n0.1", ()), **half.progress})
    assert ask(both).commands == (PublishPlan(),)


def test_a_plan_that_cannot_recover_in_place_restarts_all() -> None:
    v = view(generation=generation(4, "replace", lost={1: (0,)}, num_restarts=1),
             plan=PlanRecord(4, {}, "no way", True))
    new = published(ask(v))
    assert (new.number, new.mode, new.epoch, new.num_restarts, new.lost) == (5, "restart", 5, 2, {})
    assert "no way" in new.why


def _finished(slot: int, **ends: Any) -> FinishedRecord:
    checksums = {slot * 2 + r: {"iteration": 5, "checksum": "aa", "replicas": [0, 1, 2, 3], **ends} for r in range(2)}
    return FinishedRecord(slot, f"n{slot}.1", checksums)


def test_workers_are_released_when_all_have_finished_with_equal_replicas() -> None:
    v = view(finished={0: _finished(0)})
    assert ask(v) == Decision()
    v = view(finished={0: _finished(0), 1: _finished(1)})
    assert ask(v).commands == (PublishRelease(),) and "4 replicas" in ask(v).why
    assert ask(replace(v, released=True)) == Decision()


def test_replicas_that_differ_at_the_end_fail_the_job() -> None:
    for difference in ({"checksum": "ab"}, {"iteration": 6}):
        decision = ask(view(finished={0: _finished(0), 1: _finished(1, **difference)}))
        assert result(decision).state == "failed" and "differ" in result(decision).why
    parts = {"lr of optimizer": "0.1", "parameter model.weight": "ab12"}
    ends = {0: _finished(0, parts=parts), 1: _finished(1, checksum="ab", parts={**parts, "lr of optimizer": "0.2"})}
    said = result(ask(view(finished=ends))).why
    assert "lr of optimizer (0.1 on ranks [0, 1], 0.2 on ranks [2, 3])" in said and "weight" not in said
    elsewhere = view(finished={0: _finished(0), 1: _finished(1, checksum="ab", computes="of another machine")})
    assert ask(elsewhere).commands == (PublishRelease(),)
    told = "replicas [0, 1, 2, 3] have 2 checksums: machines of several kinds round otherwise"
    assert ask(elsewhere).why == f"all workers reached their end; {told}"
    gone = view(finished={0: _finished(0, rounded=True), 1: _finished(1, checksum="ab")})
    assert ask(gone).commands == (PublishRelease(),), "they had drifted apart before"
    rounded = {"checksum": "ab", "computes": "AVX2", "hyper": "one"}
    for difference in ({"iteration": 6}, {"hyper": "another"}):
        ends = {0: _finished(0, hyper="one"), 1: _finished(1, **{**rounded, **difference})}
        assert result(ask(view(finished=ends))).state == "failed", "no rounding makes that"
    shards = view(finished={0: _finished(0, replicas=[0, 1]), 1: _finished(1, checksum="ab", replicas=[2, 3])})
    assert ask(shards).commands == (PublishRelease(),)


def test_ranks_that_hold_what_nobody_else_holds_are_not_said_to_be_equal() -> None:
    def end(slot: int) -> FinishedRecord:
        own = {rank: {"iteration": 5, "checksum": f"a{rank}", "replicas": [rank]} for rank in (2 * slot, 2 * slot + 1)}
        return FinishedRecord(slot, f"n{slot}.1", own)

    decision = ask(view(finished={0: end(0), 1: end(1)}))
    assert decision.commands == (PublishRelease(),) and decision.why == "all workers reached their end"
    # Two that are replicas, and two that are alone.
    assert "; 2 replicas" in ask(view(finished={0: _finished(0, replicas=[0, 1]), 1: end(1)})).why


def test_what_a_restart_would_not_mend_ends_the_job() -> None:
    for is_final in (False, True):
        failure = FailureRecord("restart", 0, "n0.1", (), "rank 0: replicas differ", "n0", 3, is_final=is_final)
        decision = ask(view(failures={0: failure}))
        if is_final:
            assert result(decision).state == "failed" and result(decision).why == "rank 0: replicas differ"
        else:
            assert published(decision).mode == "restart"


def test_of_several_slots_that_ask_for_a_restart_the_strictest_counts() -> None:
    """Whatever their order, and in whatever order they have told it."""

    def asked(slot: int, *, left: int = 3, is_final: bool = False) -> FailureRecord:
        return replace(failure("restart", slot, left=left), is_final=is_final)

    for slot, told in itertools.product((0, 1), ({0: 5, 1: 6}, {0: 6, 1: 5})):
        final = ask(view(told=told, failures={slot: asked(slot, is_final=True), 1 - slot: asked(1 - slot)}))
        assert result(final).state == "failed" and result(final).why == f"evidence restart {slot}"
        worn = ask(view(told=told, failures={slot: asked(slot, left=0), 1 - slot: asked(1 - slot, left=1)}))
        assert f"evidence restart {slot}; the workers would have to be restarted" in result(worn).why
        both = {one: asked(one, is_final=True, left=one) for one in (slot, 1 - slot)}
        assert result(ask(view(told=told, failures=both))).why == f"evidence restart {min(told, key=told.__getitem__)}"
        new = published(ask(view(told=told, failures={slot: asked(slot), 1 - slot: asked(1 - slot)})))
        assert new.mode == "restart" and new.num_restarts == 1
        assert new.why.startswith(f"evidence restart {min(told, key=told.__getitem__)}; ")


def test_the_job_succeeds_when_all_have_exited() -> None:
    exited = {slot: ExitedRecord(slot, f"n{slot}.1") for slot in range(2)}
    assert result(ask(view(exited=exited, released=True))).state == "succeeded"
    # An agent whose workers are done may leave.
    assert result(ask(without(view(exited=exited, released=True), "n1"))).state == "succeeded"
    assert ask(without(view(exited={1: exited[1]}, finished={0: _finished(0)}), "n1")).commands == (PublishRelease(),)


def test_after_the_release_nothing_is_recovered_but_the_truth_is_told() -> None:
    exited = {0: ExitedRecord(0, "n0.1")}
    crashed = view(released=True, exited=exited, failures={1: failure("workers", 1, (0,))})
    assert result(ask(crashed)).state == "failed" and result(ask(crashed)).exits[0].rank == 2
    lost = without(view(released=True, exited=exited), "n1")
    assert result(ask(lost)).state == "failed"  # its script may have been saving something
    assert "node n1 (slot 1) was lost before its workers had exited" in result(ask(lost)).why
    waits = without(view(released=True), "n1")
    assert ask(waits).commands == () and "[0]" in ask(waits).waiting


# ---- losses ----


def test_dead_workers_are_replaced_on_their_node() -> None:
    v = view(failures={1: failure("workers", 1, (1,))}, names=("n0", "n1", "n2"))
    new = published(ask(v))
    assert (new.number, new.mode, new.epoch) == (2, "replace", 1)
    assert [o.node_id for o in new.slots] == ["n0", "n1"] and new.lost == {1: (1,)}
    assert new.num_restarts == 0  # TORCHELASTIC_RESTART_COUNT counts restarts of all


def test_a_lost_node_is_replaced_by_the_spare_that_came_first() -> None:
    v = view(names=("n0", "n1", "n3", "n2"), failures={0: failure("node", 0)})
    decision = ask(v)
    new = published(decision)
    assert [o.node_id for o in new.slots] == ["n3", "n1"]
    assert new.lost == {0: (0, 1)} and new.store_slot == 1
    assert decision.commands == (PublishGeneration(new), ForgetNode("n0", "n0.1"))


def test_a_node_that_comes_back_takes_its_own_slot() -> None:
    v = view(nodes={"n0": node("n0", 2), "n1": node("n1")})
    assert losses(v).nodes == {0: "it came back as a new incarnation"}
    new = published(ask(v))
    assert [o.incarnation for o in new.slots] == ["n0.2", "n1.1"]
    assert not any(isinstance(c, ForgetNode) for c in ask(v).commands)


def test_two_losses_at_once_make_one_generation() -> None:
    v = view(names=("n0", "n1", "n2"), failures={0: failure("node", 0), 1: failure("workers", 1, (0,))})
    new = published(ask(v))
    assert new.number == 2 and new.lost == {0: (0, 1), 1: (0,)}


def test_without_a_spare_the_job_waits_and_then_stops() -> None:
    v = view(failures={1: failure("node", 1)})
    first = ask(v, now_s=100.0)
    assert first.deadline_s == 130.0 and first.commands == (ForgetNode("n1", "n1.1"),)
    v = without(v, "n1")
    assert ask(v, now_s=129.9, since_s=100.0).commands == ()
    late = result(ask(v, now_s=130.0, since_s=100.0))
    assert late.state == "stopped" and "--replacement-timeout" in late.why
    in_time = replace(v, nodes={**v.nodes, "n5": node("n5")})
    assert published(ask(in_time, now_s=129.9, since_s=100.0)).slots[1].node_id == "n5"


def test_a_worker_without_restarts_left_ends_the_job_unless_a_spare_takes_over() -> None:
    worn = {1: failure("workers", 1, (0,), left=0)}
    ended = result(ask(view(failures=worn)))
    assert ended.state == "failed" and ended.exits == worn[1].exits and "--max-restarts" in ended.why
    new = published(ask(view(failures=worn, names=("n0", "n1", "n2"))))
    assert [o.node_id for o in new.slots] == ["n0", "n2"] and new.lost == {1: (0, 1)}
    # One spare cannot do both.
    both = view(failures={**worn, 0: failure("node", 0)}, names=("n0", "n1", "n2"))
    assert result(ask(both)).state == "failed"


def test_an_untracked_job_restarts_as_a_whole() -> None:
    v = view(tracked=False, failures={1: failure("workers", 1, (0,))})
    decision = ask(v)
    new = published(decision)
    assert (new.mode, new.epoch, new.num_restarts) == ("restart", 2, 1)
    assert decision.commands == (PublishGeneration(new), PublishPlan())
    node_lost = view(tracked=False, names=("n0", "n1", "n2"), failures={1: failure("node", 1)})
    assert published(ask(node_lost)).num_restarts == 0  # a lost node uses up no restart
    worn = view(tracked=False, names=("n0", "n1", "n2"), failures={1: failure("workers", 1, (0,), left=0)})
    assert result(ask(worn)).state == "failed"  # as torchrun


def test_an_unfit_worker_restarts_all_while_restarts_are_left() -> None:
    assert published(ask(view(failures={0: failure("restart", 0)}))).mode == "restart"
    assert result(ask(view(failures={0: failure("restart", 0, left=0)}))).state == "failed"


def test_who_cannot_be_connected_costs_nobody_a_process_or_a_restart() -> None:
    found = ask(view(failures={1: failure("again", 1, left=0)}, plan=None))
    new = published(found)
    assert (new.number, new.mode, new.lost, new.bare, new.num_restarts) == (2, "replace", {}, {}, 0)
    assert new.slots == generation().slots and "evidence again 1" in found.why
    # What is lost as well counts.
    both = published(ask(view(failures={0: failure("workers", 0, (1,)), 1: failure("again", 1)})))
    assert (both.number, both.lost) == (2, {0: (1,)})


def failing(number: int, *names: str, rank: int = 2, code: int = -9, begun: bool = True, **changes: Any) -> View:
    """No --max-restarts: rank 2, the first on n1, fails in iteration 20 of that generation."""
    name = f"n{rank // 2}"
    exit_ = WorkerExit(rank, rank % 2, 70 + number, code, name, generation=number, iteration=20, begun=begun)
    lost = replace(failure("workers", rank // 2, (rank % 2,), left=0), exits=(exit_,))
    base = view(names=names or ("n0", "n1"), job=JobRecord(2, 2, "command", AS_LONG_AS_IT_ADVANCES))
    base = replace(base, generation=generation(number), failures={rank // 2: lost})
    return replace(base, **changes)


def fail_on(v: View, times: int, **how: Any) -> Any:
    """So many generations more, each made of the last one; the last of them."""
    new = published(ask(v))
    for _ in range(times):
        again = failing(new.number, *v.nodes, **how)
        v = replace(again, generation=new)
        slot = next(iter(v.failures))
        moved = {slot: replace(v.failures[slot], incarnation=new.slots[slot].incarnation)}
        v = replace(v, failures=moved)
        new = published(ask(v))
    return v if new is None else new


def test_without_a_number_a_rank_that_does_not_advance_ends_the_job() -> None:
    new = published(ask(failing(1)))
    assert (new.mode, new.lost) == ("replace", {1: (0,)}) and [one.rank for one in new.troubles] == [2]
    assert fail_on(failing(1), 1).mode == "replace"
    ended = result(ask(fail_on(failing(1), 2)))
    assert ended.state == "failed" and "rank 2 fails again and again" in ended.why and "(3)" in ended.why
    assert [exit_.rank for exit_ in ended.exits] == [2] and ended.advice.startswith("tried")
    # Other ranks fail beside it.
    new = fail_on(failing(1), 1)
    other = replace(failing(new.number, rank=0), generation=new)
    assert published(ask(other)).mode == "replace"


def test_what_a_rank_has_failed_of_goes_with_the_generations() -> None:
    new = fail_on(failing(1), 1)
    lost = replace(failing(new.number, "n0", "n1", "n2"), generation=new, failures={0: failure("node", 0)})
    moved = published(ask(lost))
    assert moved.troubles == new.troubles and moved.slots[0].node_id == "n2"
    restart = PlanRecord(moved.number, {}, "why", restart=True)
    again = published(ask(replace(lost, generation=moved, failures={}, plan=restart)))
    assert (again.mode, again.troubles) == ("restart", new.troubles)


def test_a_failure_that_is_told_again_in_a_later_generation_counts_once() -> None:
    """n1 tells how its worker ended, is away while n0 is lost, and comes back to the third generation."""
    raised = replace(failure("workers", 1, (0,)).exits[0], exit_code=1, place="ValueError at train.py:31", generation=1)
    told = {1: replace(failure("workers", 1, (0,)), exits=(raised,))}
    job = JobRecord(2, 2, "command", AS_LONG_AS_IT_ADVANCES)
    first = view(job=job, names=("n0", "n1", "n2"), failures=told)
    second = published(ask(first))
    assert second.lost == {1: (0,)} and second.replaced == {}
    lost = replace(first, generation=second, failures={0: failure("node", 0)})
    third = published(ask(lost))
    assert third.lost == {0: (0, 1)} and third.replaced == {1: {0: 2}}
    without_n0 = {name: one for name, one in first.nodes.items() if name != "n0"}
    again = replace(first, nodes=without_n0, generation=third, failures=told)
    fourth = published(ask(again))
    assert fourth.troubles == second.troubles and fourth.lost == {1: (0,)} and fourth.replaced == {0: {0: 3, 1: 3}}
    # A slot that trains again has seen it.
    assert published(ask(replace(lost, resumed={1: ResumedRecord(1, 5, {})}))).replaced == {}
    restart = replace(lost, plan=PlanRecord(2, {}, "why", restart=True), failures={})
    assert published(ask(restart)).replaced == {}


def test_without_a_number_a_spare_is_tried_before_the_end() -> None:
    moved = fail_on(failing(1, "n0", "n1", "n2"), 2)
    assert [o.node_id for o in moved.slots] == ["n0", "n2"] and moved.lost == {1: (0, 1)}
    v = fail_on(failing(1, "n0", "n1", "n2"), 3)
    ended = result(ask(v))
    assert ended.state == "failed" and setbacks.MOVED in ended.why


def test_without_a_number_a_script_that_tracks_nothing_has_torchruns_default() -> None:
    ended = result(ask(failing(1, tracked=False)))
    assert ended.state == "failed" and "--max-restarts" in ended.why and not ended.advice


def test_without_a_number_an_unfit_worker_restarts_all() -> None:
    assert published(ask(failing(1, failures={0: failure("restart", 0, left=0)}))).mode == "restart"


def test_two_replacements_that_fail_by_themselves_restart_all() -> None:
    for most in (AS_LONG_AS_IT_ADVANCES, 9):
        v = failing(1)
        new = published(ask(v))
        for mode in ("replace", "restart"):
            again = failing(new.number, code=1, begun=False, job=JobRecord(2, 2, "command", most))
            lost = {1: replace(again.failures[1], restarts_left=most)}
            new = published(ask(replace(again, generation=new, failures=lost)))
            assert new.mode == mode
        assert "two replacements of rank 2 have failed before an iteration" in new.why and new.num_restarts == 1
        assert new.epoch == new.number


def test_the_earliest_failure_is_the_root_cause() -> None:
    v = view(tracked=False, failures={
        0: failure("workers", 0, (0,), left=0, when_s=50), 1: failure("workers", 1, (1,), left=0, when_s=40)},
        told={0: 12, 1: 11})
    assert result(ask(replace(v, released=True))).exits[0].rank == 3


def test_a_failure_of_a_former_owner_is_no_loss() -> None:
    stale = FailureRecord("node", 0, "n0.0", (), "old", "n1")
    assert not losses(view(failures={0: stale}))


def test_spares_are_all_nodes_without_a_slot() -> None:
    assert [n.node_id for n in spares(view(names=("n4", "n0", "n3", "n1")))] == ["n4", "n3"]
    assert [n.incarnation for n in spares(view(nodes={"n0": node("n0", 2), "n1": node("n1")}))] == ["n0.2"]


# ---- nodes whose lease is gone ----


def wait_for_missing(v: View, *, since_s: float | None = None, unbroken_s: float = 1e9) -> Decision | None:
    """What is decided at 100 s; n1 is absent since *since_s*."""
    since = {} if since_s is None else {"n1.1": since_s}
    rules = Rules(30.0, return_s=1.0, outage_s=3.0)
    return missing(v, rules, now_s=100.0, absent_since_s=since, unbroken_s=unbroken_s)


def test_a_node_without_a_record_is_absent_until_somebody_says_that_it_is_lost() -> None:
    gone = without(view(), "n1")
    assert absent(view()) == {} and [owner.node_id for owner in absent(gone).values()] == ["n1"]
    assert losses(gone).nodes == {1: LEASE_IS_GONE} and not told_losses(gone)
    accused = replace(gone, failures={1: failure("node", 1)})
    assert absent(accused) == {} and told_losses(accused).nodes == {1: "evidence node 1"}
    # Of an incarnation that had the slot before, or of its workers: no accusation of this node.
    assert absent(replace(gone, failures={1: failure("node", 1, name="n7")}))
    workers = replace(gone, failures={1: failure("workers", 1, (0,))})
    assert absent(workers) and told_losses(workers).workers
    assert absent(replace(gone, exited={1: ExitedRecord(1, "n1.1")})) == {}
    assert absent(replace(gone, nodes={**gone.nodes, "n1": node("n1", 2)})) == {}  # it is back as another
    assert absent(View()) == {}


def test_an_absent_node_has_a_moment_to_come_back() -> None:
    gone = without(view(), "n1")
    assert wait_for_missing(view()) is None
    fresh = wait_for_missing(gone)
    assert fresh is not None and fresh.commands == () and fresh.deadline_s == 101.0 and "n1" in fresh.waiting
    late = wait_for_missing(gone, since_s=99.0)
    assert late is not None and late.deadline_s is None
    lost = late.commands[0]
    assert isinstance(lost, PublishLoss) and (lost.failure.kind, lost.failure.slot) == ("node", 1)
    assert lost.failure.incarnation == "n1.1" and lost.failure.evidence == LEASE_IS_GONE


def test_after_an_outage_of_the_store_all_have_longer() -> None:
    gone = without(view(), "n1")
    soon = wait_for_missing(gone, since_s=98.0, unbroken_s=2.0)
    assert soon is not None and soon.commands == () and soon.deadline_s == 101.0
    over = wait_for_missing(gone, since_s=98.0, unbroken_s=3.0)
    assert over is not None and len(over.commands) == 1


def test_nobody_is_missed_in_a_job_that_has_ended() -> None:
    assert wait_for_missing(without(view(result=ResultRecord("failed", "w")), "n1"), since_s=0.0) is None


# ---- all situations of a small job ----

# What may have happened to a slot: its record of failure, whether its node is there, and in which incarnation.
CONDITIONS = {
    "well": (None, 1), "accused": ("node", 1), "gone": (None, 0), "gone and accused": ("node", 0),
    "returned": (None, 2), "worker died": ("workers", 1), "worker died, worn": ("worn", 1), "unfit": ("restart", 1),
    "exited": ("exited", 1), "exited and left": ("exited", 0),
}


def _situation(conditions: tuple[str, ...], num_spares: int, tracked: bool, released: bool) -> View:
    nodes = {f"s{i}": node(f"s{i}") for i in range(num_spares)}
    failures, exited = {}, {}
    for slot, condition in enumerate(conditions):
        kind, life = CONDITIONS[condition]
        if life:
            nodes[f"n{slot}"] = node(f"n{slot}", life)
        if kind == "exited":
            exited[slot] = ExitedRecord(slot, f"n{slot}.1")
        elif kind == "worn":
            failures[slot] = failure("workers", slot, (0,), left=0)
        elif kind:
            failures[slot] = failure(kind, slot, (0,) if kind == "workers" else ())  # type: ignore[arg-type]
    names = [f"n{slot}" for slot in range(len(conditions))]
    return view(nodes=nodes, joined={name: i for i, name in enumerate(sorted(nodes))}, tracked=tracked,
                released=released, job=JobRecord(len(conditions), 2, "command", 1),
                generation=generation(7, "replace", names, epoch=3),
                plan=PlanRecord(7, {}, "w"), failures=failures, exited=exited)


def test_every_situation_of_three_slots() -> None:
    seen = set()
    for conditions in itertools.product(CONDITIONS, repeat=3):
        for num_spares, tracked, released in itertools.product((0, 1, 3), (True, False), (True, False)):
            v = _situation(conditions, num_spares, tracked, released)
            decision = ask(v)
            assert decision == ask(v)  # whoever takes over decides the same
            seen.add(_check(v, conditions, decision))
    assert seen == {"nothing", "generation", "waits", "failed", "succeeded"}


def _check(v: View, conditions: tuple[str, ...], decision: Decision) -> str:
    where = (conditions, len(v.nodes), v.tracked, v.released, decision)
    old = v.generation
    assert old is not None
    bad = [c for c in conditions if c not in ("well", "exited", "exited and left")]
    vacated = {slot for slot, c in enumerate(conditions) if c in ("accused", "gone", "gone and accused", "returned")}
    for command in decision.commands:
        if isinstance(command, ForgetNode):
            # Only what is accused, and is there in the very incarnation that is accused.
            assert command.incarnation in {f"n{s}.1" for s, c in enumerate(conditions) if c == "accused"}, where
    ended, new = result(decision), published(decision)
    assert not (ended and new), where
    if ended:
        if ended.state == "succeeded":
            assert v.released or all("exited" in c for c in conditions), where
            assert "well" not in conditions, where
        elif ended.state == "failed":
            died = any(c in ("worker died", "worker died, worn") for c in conditions)
            assert died or (v.released and vacated), where
        return str(ended.state)
    if new:
        assert bad and not v.released, where
        assert new.number == old.number + 1 and new.num_workers == old.num_workers, where
        assert len(new.slots) == len(old.slots) and len({o.incarnation for o in new.slots}) == len(new.slots), where
        for slot, owner in enumerate(new.slots):
            if owner == old.slots[slot]:
                # A survivor keeps its slot and a lost owner loses it; a slot that is done waits for nobody.
                assert slot not in vacated, where
            else:
                assert slot in vacated or conditions[slot] == "worker died, worn", where
                assert v.nodes[owner.node_id].incarnation == owner.incarnation, where
                assert new.lost[slot] == (0, 1), where
        restarts = not v.tracked or "unfit" in conditions
        assert new.mode == ("restart" if restarts else "replace"), where
        assert new.epoch == (new.number if restarts else old.epoch), where
        assert new.store_slot not in vacated or len(vacated) == 3 or "worker died, worn" in conditions, where
        died = {slot for slot, c in enumerate(conditions) if c.startswith("worker died")}
        assert set(new.lost) == vacated | died, where
        return "generation"
    if bad:
        assert decision.waiting, where
        assert v.released or (vacated and decision.deadline_s == 130.0), where
        return "waits"
    assert decision == Decision() or isinstance(decision.commands[0], PublishRelease), where
    return "nothing"


# ---- two that call each other lost ----


def test_of_two_nodes_that_accuse_each_other_one_is_kept() -> None:
    """Only the link between them is broken: to believe both would give away all there is of the state."""
    mutual = {
        0: replace(failure("node", 0), reporter="n1"),
        1: replace(failure("node", 1), reporter="n0"),
    }
    v = view(names=("n0", "n1", "n2"), failures=mutual)
    assert losses(v).nodes.keys() == told_losses(v).nodes.keys() == {1}
    new = published(ask(v))
    assert [o.node_id for o in new.slots] == ["n0", "n2"] and new.lost == {1: (0, 1)} and new.store_slot == 0
    assert [c for c in ask(v).commands if isinstance(c, ForgetNode)] == [ForgetNode("n1", "n1.1")]
    # Nobody else is there: it waits for one node, not for two.
    assert "slots [1] wait" in ask(view(failures=mutual)).waiting


def test_a_node_that_is_accused_by_others_is_not_kept() -> None:
    both = {0: failure("node", 0), 1: replace(failure("node", 1), reporter="n0")}  # by n9, and then by the first
    assert losses(view(names=("n0", "n1", "n2", "n3", "n9"), failures=both)).nodes.keys() == {0, 1}
    # An accusation of a node's former life is no accusation.
    mutual = {0: replace(failure("node", 0), reporter="n1"), 1: replace(failure("node", 1), reporter="n0")}
    old = {**mutual, 0: replace(mutual[0], incarnation="n0.0")}
    assert losses(view(names=("n0", "n1", "n2"), failures=old)).nodes.keys() == {1}
    # The one with the lower slot is kept, but not if its lease is over, or the other's machine says that it is dead.
    assert losses(without(view(names=("n0", "n1", "n2", "n3"), failures=mutual), "n0")).nodes.keys() == {0}
    dead = {**mutual, 0: replace(mutual[0], is_dead=True)}
    assert losses(view(names=("n0", "n1", "n2", "n3"), failures=dead)).nodes.keys() == {0, 1}


def three(bare: dict[int, tuple[int, ...]], *accusations: tuple[int, int], **changes: Any) -> View:
    """Slots 0 to 2 of two workers each, a spare, and who accuses whom, with its own workers as *bare* says."""
    failures = {
        of: replace(failure("node", of), reporter=f"n{by}", is_empty=len(bare.get(by, ())) == 2)
        for by, of in accusations
    }
    v = view(names=("n0", "n1", "n2", "n3"), failures=failures, generation=generation(2, "replace", ["n0", "n1", "n2"]))
    assert v.generation is not None
    return replace(v, generation=replace(v.generation, bare=bare), **changes)


def test_of_two_nodes_that_accuse_each_other_the_one_with_state_is_kept() -> None:
    assert losses(three({}, (0, 1), (1, 0))).nodes.keys() == {1}
    assert losses(three({0: (0, 1)}, (0, 1), (1, 0))).nodes.keys() == {0}
    assert losses(three({0: (0,)}, (0, 1), (1, 0))).nodes.keys() == {1}  # one of its workers has it


def test_a_node_without_state_does_not_cost_the_job_the_last_copies() -> None:
    """A new node that cannot reach those who have the state is the one to replace."""
    bare = {0: (0, 1), 2: (0, 1)}
    v = three(bare, (0, 1))
    assert losses(v).nodes.keys() == told_losses(v).nodes.keys() == {0}
    assert "cannot reach n1" in losses(v).nodes[0]
    assert [o.node_id for o in published(ask(v)).slots] == ["n3", "n1", "n2"]
    assert published(ask(v)).bare == bare  # the new owner of slot 0 has no more than the one before
    # There is another who has it; or the accuser has it itself; or it has trained since; or a spare says it.
    assert losses(three({0: (0, 1)}, (0, 1))).nodes.keys() == {1}
    assert losses(three({2: (0, 1)}, (0, 1))).nodes.keys() == {1}
    assert losses(three({2: (0, 1)}, (2, 0), (2, 1))).nodes.keys() == {2}
    told = replace(v.failures[1], is_empty=False)  # it has got the state in this very generation
    assert losses(replace(v, failures={1: told})).nodes.keys() == {1}
    # All have trained; who is not the coordinator hears only that.
    assert losses(replace(three({2: (0, 1)}, (2, 0)), recovered=2)).nodes.keys() == {0}
    assert losses(replace(three({0: (0, 1)}, (2, 1)), recovered=2)).nodes.keys() == {1}
    assert losses(three(bare, (3, 1))).nodes.keys() == {1}
    # Its workers were lost in this very generation.
    died = failure("workers", 0, (0, 1))
    assert losses(replace(three({2: (0, 1)}, (0, 1)), failures={0: died, **v.failures})).nodes.keys() == {0}
    # They were lost after it had accused, so it did not say of itself that it has nothing; one of two is not enough.
    v = three({2: (0, 1)}, (0, 1))
    later = {0: died, 1: replace(v.failures[1], is_empty=False)}
    assert losses(replace(v, failures=later)).nodes.keys() == {0}
    assert losses(replace(v, failures={**later, 0: failure("workers", 0, (0,))})).nodes.keys() == {1}
    # A script that tracks nothing has no state that could be lost.
    assert losses(replace(v, tracked=False)).nodes.keys() == {1}


def test_a_node_without_state_is_believed_where_a_death_is_certain() -> None:
    bare = {0: (0, 1), 2: (0, 1)}
    v = three(bare, (0, 1))
    dead = replace(v.failures[1], is_dead=True)
    assert losses(replace(v, failures={1: dead})).nodes.keys() == {1}
    assert losses(without(v, "n1")).nodes.keys() == {1}  # its lease says so
    exited = {1: ExitedRecord(1, "n1.1")}
    assert losses(replace(v, exited=exited)).nodes.keys() == set()


def test_who_holds_no_state_is_told_from_generation_to_generation() -> None:
    one = published(ask(three({}, (0, 1))))
    assert one.bare == {1: (0, 1)}
    worker = replace(three({1: (0, 1)}), failures={2: failure("workers", 2, (1,))})
    assert published(ask(worker)).bare == {1: (0, 1), 2: (1,)}
    assert published(ask(replace(worker, resumed=frozenset({1})))).bare == {2: (1,)}
    again = replace(three({1: (0,)}), failures={1: failure("workers", 1, (1,))})
    assert published(ask(again)).bare == {1: (0, 1)}
    assert published(ask(replace(worker, tracked=False))).bare == {}  # all start over


def test_a_generation_that_nobody_knows_is_not_begun_again() -> None:
    """Its owners train: another first one would give their ranks to others as well."""
    for lost in (view(generation=None, begun=3), view(generation=None, damaged={"generation": Damaged(9, "w")})):
        (command,) = decide(lost, RULES, now_s=0.0, waiting_since_s=None).commands
        assert isinstance(command, PublishResult) and command.result.state == "stopped"
        assert "generation" in command.result.why and "no node knows" in command.result.why


def test_what_is_known_of_a_damaged_record_is_written_again() -> None:
    damaged = {name: Damaged(9, "cannot be read") for name in ("job", "generation", "end", "drain/x", "rate")}
    hurt = view(damaged=damaged)
    assert hurt.job is not None and hurt.generation is not None
    commands = decide(hurt, RULES, now_s=0.0, waiting_since_s=None).commands
    assert commands == (RestoreJob(hurt.job), RestoreGeneration(hurt.generation), RemoveDamaged("end"))
    rest = view(damaged={"drain/x": Damaged(9, "w"), "nodes/z": Damaged(9, "w")})
    assert decide(rest, RULES, now_s=0.0, waiting_since_s=None) == decide(
        replace(rest, damaged={}), RULES, now_s=0.0, waiting_since_s=None)


def test_what_a_coordinator_waits_for_and_cannot_read_is_asked_for_again() -> None:
    """Its author does not follow such records, and would not write it again."""
    asked = view(generation=generation(2, "replace"), tracked=True, plan=None,
                 progress={0: ProgressRecord(0, "n0.1", ())},
                 damaged={"~progress/2/1": Damaged(9, "cannot be read")})
    (command,) = decide(asked, RULES, now_s=0.0, waiting_since_s=None).commands
    assert isinstance(command, PublishGeneration)
    new, old = command.generation, asked.generation
    assert old is not None and (new.number, new.slots, new.lost, new.mode) == (3, old.slots, {}, "replace")
    assert "~progress/2/1" in new.why
    other = {"~resumed/2/1": Damaged(9, "w")}
    for harmless in (replace(asked, tracked=False), replace(asked, progress={}), replace(asked, damaged=other)):
        assert not any(isinstance(c, PublishGeneration)
                       for c in decide(harmless, RULES, now_s=0.0, waiting_since_s=None).commands)


def test_the_cause_is_what_was_told_first_whatever_the_clocks_say() -> None:
    failures = {0: failure("workers", 0, (0,), left=0, when_s=5), 1: failure("workers", 1, (0,), left=0, when_s=900)}
    for told, first in (({0: 30, 1: 20}, 2), ({0: 20, 1: 30}, 0)):
        ended = result(ask(view(tracked=False, failures=failures, told=told)))
        assert ended.state == "failed" and ended.exits[0].rank == first


def test_a_result_fits_into_one_record() -> None:
    """Hundreds of workers fail with long messages."""
    exits = tuple(WorkerExit(rank, rank, 100 + rank, 1, "h", "\u00fc" * 16_000) for rank in range(300))
    one = replace(failure("workers", 0, (0,), left=0), exits=exits)
    ended = result(ask(view(tracked=False, failures={0: one})))
    assert len(encode(ended)) < 1_000_000 and len(ended.exits) == 300
    assert ended.exits[0] == exits[0] and ended.exits[299].message == LEFT_OUT


def test_an_older_generation_is_not_written_over_a_newer_one() -> None:
    """All that this coordinator knows of the newer one is the history, and a record that somebody has overwritten."""
    unread = view(damaged={"generation": Damaged(40, "cannot be read (no JSON)")}, begun=1)
    assert [type(command).__name__ for command in ask(unread).commands] == ["RestoreGeneration"]
    end = result(ask(replace(unread, begun=2)))
    assert end.state == "stopped"
    assert "generation cannot be read (no JSON), though generation 2 had begun; the last that is known" in end.why


# ---- log groups ----


def grouped(**changes: Any) -> View:
    """Four nodes of two workers each, in two log groups."""
    names = ("n0", "n1", "n2", "n3")
    job = JobRecord(4, 2, "command", 3, log_groups=((0, 1), (2, 3)))
    return view(**{"names": (*names, "n4"), "job": job, "generation": generation(slots=names), **changes})


def test_a_loss_takes_its_log_group_back() -> None:
    new = published(ask(grouped(failures={1: failure("workers", 1, (1,))})))
    assert new.lost == {1: (1,)} and new.epochs == {0: 2, 1: 2}
    assert new.bare == {0: (0, 1), 1: (0, 1)}  # whoever goes back holds no state any more
    assert [new.epoch_of(slot) for slot in range(4)] == [2, 2, 1, 1]
    assert new.why.endswith("slots [0] of the same log group begin again with them")


def test_a_group_that_went_back_stays_back_in_the_generations_to_come() -> None:
    old = replace(generation(2, "replace", ("n0", "n1", "n2", "n3")), epochs={0: 2, 1: 2}, bare={0: (0, 1), 1: (0, 1)})
    new = published(ask(grouped(generation=old, failures={3: failure("node", 3)})))
    assert new.epochs == {0: 2, 1: 2, 2: 3, 3: 3} and sorted(new.bare) == [0, 1, 2, 3]
    # Where all start again there are none left.
    new = published(ask(grouped(generation=old, failures={0: failure("restart", 0)})))
    assert new.mode == "restart" and new.epochs == {}


def test_what_a_drained_node_hands_over_does_not_go_back() -> None:
    old = generation(2, "replace", ("n0", "n4", "n2", "n3"), handover={1: owner("n1")}, lost={1: (0, 1)})
    old = replace(old, bare={1: (0, 1)})
    new = published(ask(grouped(generation=old, failures={0: failure("workers", 0, (0,))})))
    assert new.handover == {1: owner("n1")} and new.epochs == {0: 3}


# ---- helpers: what one rank has lost is repeated by several ----


def pipeline(
    helpers: int = AS_MANY_AS_PAY,
    spares: tuple[str, ...] = ("n4", "n5"),
    strategy: str = "log+parallel",
    **changes: Any,
) -> View:
    """Four stages on nodes of one worker each; the spares have two."""
    names = ("n0", "n1", "n2", "n3")
    first = generation(slots=names, workers=1)
    record = JobRecord(4, 1, "command", 3, strategy=strategy, helpers=helpers)
    lost = {1: failure("workers", 1, (0,))}
    found = view(**{"names": (*names, *spares), "generation": first, "job": record, "failures": lost, **changes})
    small = {name: node(name, workers=1) for name in names if name in found.nodes}
    return replace(found, nodes={**found.nodes, **small})


def helpers_in(decision: Decision) -> list[tuple[int, int, str]]:
    return [(helper.rank, helper.share, helper.node_id) for helper in published(decision).helpers]


def test_spares_that_nobody_needs_help_first() -> None:
    new = published(ask(pipeline(3)))
    assert [(helper.rank, helper.share, helper.node_id, helper.incarnation) for helper in new.helpers] == [
        (1, 1, "n4", "n4.1"), (1, 2, "n4", "n4.1"), (1, 3, "n5", "n5.1"),
    ]  # fmt: skip
    assert new.why.endswith("ranks [1] are replaced on n1; 3 helpers repeat rank 1 with it, on n4, n5")
    assert published(ask(pipeline(1))).why.endswith("; 1 helper repeats rank 1 with it, on n4")


def test_then_one_on_each_node_and_last_the_replacements_own() -> None:
    assert [name for _, _, name in helpers_in(ask(pipeline(9, ("n4",))))] == ["n4", "n4", "n0", "n2", "n3", "n1"]
    assert [name for _, _, name in helpers_in(ask(pipeline(2, ())))] == ["n0", "n2"]


def test_a_spare_that_takes_the_place_of_the_lost_node_does_not_help() -> None:
    lost = {"failures": {1: failure("node", 1)}, "nodes": {n: node(n, workers=1) for n in ("n0", "n2", "n3", "n4")}}
    new = published(ask(pipeline(9, joined={name: at for at, name in enumerate(("n0", "n2", "n3", "n4"))}, **lost)))
    assert new.slots[1].node_id == "n4" and [helper.node_id for helper in new.helpers] == ["n0", "n2", "n3", "n4"]


def test_as_many_help_as_pay() -> None:
    assert helpers_in(ask(pipeline())) == [(1, 1, "n4")]  # nothing is known yet
    profile = ProfileRecord({}, (), "log+parallel", helpers=((1,), (1, 3, 7), (), ()))
    assert len(helpers_in(ask(pipeline(profile=profile)))) == 7
    assert len(helpers_in(ask(pipeline(profile=profile, spares=())))) == 3
    assert len(helpers_in(ask(pipeline(2, profile=profile)))) == 2
    few = replace(profile, content={"micro_batches": 4})
    assert [len(helpers_in(ask(pipeline(9, profile=one)))) for one in (profile, few)] == [8, 3]
    assert not helpers_in(ask(pipeline(profile=profile, failures={2: failure("workers", 2, (0,))})))
    for way in ("replica", "checkpoint"):
        assert not helpers_in(ask(pipeline(2, profile=replace(profile, way=way))))


def test_with_auto_no_more_help_than_were_allowed_and_pay() -> None:
    profile = ProfileRecord({}, (), "log+parallel", helpers=((1,), (1, 3, 7), (), ()))

    def helping(allowed: int, **changes: Any) -> int:
        return len(helpers_in(ask(pipeline(allowed, strategy="", **changes))))

    assert [helping(allowed) for allowed in (0, 3)] == [0, 1]  # nothing is known yet
    assert [helping(allowed, profile=profile) for allowed in (0, 1, 2, 3, 9)] == [0, 1, 1, 3, 7]
    assert helping(9, profile=profile, spares=()) == 3
    assert helping(9, profile=profile, failures={2: failure("workers", 2, (0,))}) == 0
    assert helping(9, profile=replace(profile, way="log")) == 0
    # Of another number of nodes nothing is known.
    assert helping(9, profile=replace(profile, helpers=((1, 3, 7),) * 3)) == 1


def test_a_worker_of_a_pipeline_on_one_node_is_helped_there() -> None:
    """Its node has one place, beside the spares."""
    first = generation(slots=("n0",), workers=4)
    lost = {"generation": first, "failures": {0: failure("workers", 0, (1,))}, "names": ("n0",), "spares": ()}
    profile = ProfileRecord({"micro_batches": 4}, (), "log+parallel", helpers=((1, 3),))
    for wanted in (2, AS_MANY_AS_PAY):
        alone = pipeline(wanted, profile=profile, **lost)
        alone = replace(alone, nodes={"n0": node("n0", workers=4)})
        assert helpers_in(ask(alone)) == [(1, 1, "n0")]


def test_nobody_helps_where_it_is_not_wanted_or_more_than_one_rank_is_lost() -> None:
    alone = pipeline(0)
    assert not helpers_in(ask(alone)) and "help" not in published(ask(alone)).why
    two = {1: failure("workers", 1, (0,)), 2: failure("workers", 2, (0,))}
    assert not helpers_in(ask(pipeline(failures=two)))
    assert not helpers_in(ask(pipeline(failures={1: failure("restart", 1)})))
    groups = JobRecord(4, 1, "command", 3, strategy="log+parallel", helpers=2, log_groups=((0, 1),))
    assert not helpers_in(ask(pipeline(job=groups)))  # slot 0 goes back with slot 1
    assert len(helpers_in(ask(pipeline(job=groups, failures={2: failure("workers", 2, (0,))})))) == 2
    handed = generation(2, "replace", ("n4", "n1", "n2", "n3"), workers=1, handover={0: owner("n0")})
    assert not helpers_in(ask(pipeline(generation=handed)))


def test_each_generation_names_its_own() -> None:
    second = published(ask(pipeline(2)))
    assert len(second.helpers) == 2 and len(helpers_in(ask(pipeline(1, generation=second)))) == 1
    third = published(ask(pipeline(2, generation=second, failures={2: failure("workers", 2, (0,))})))
    assert third.helpers == ()  # rank 1 has not got its state yet: two are lost
    done = pipeline(2, generation=second, recovered=2, failures={2: failure("workers", 2, (0,))})
    assert {helper.rank for helper in published(ask(done)).helpers} == {2}
    restart = PlanRecord(2, {"kind": "fresh"}, "no log", restart=True)
    assert published(ask(pipeline(2, generation=second, failures={}, plan=restart))).helpers == ()
