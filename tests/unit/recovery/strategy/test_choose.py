"""What each way costs, worked out by hand; which are possible; and which one is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swift_recovery.strategy.choose import Way, choose, paying_helpers, repeat_s, shared_s, ways, with_helpers_s
from swift_recovery.strategy.profile import Machine, Profile

# Four machines, 8 micro-batches of 1 s each: 11 s for an iteration, of which each machine waits 3.
PIPELINE = Profile(
    name="four stages", machines=(Machine(8.0, 4e9),) * 4, boundary_bytes=(1e9,) * 3, micro_batches=8, iteration_s=11.0,
    network_bytes_per_s=1e9, log_bytes_per_s=1e9, gpus_per_machine=8, checkpoint_every=100, checkpoint_s=2.0,
    load_s=4.0, restart_s=20.0, replace_s=3.0, machine_mtbf_hours=400.0,
)  # fmt: skip


def found(profile: Profile, budget_bytes: float | None = None) -> dict[str, Way]:
    return {way.name: way for way in ways(profile, budget_bytes)}


def test_a_pipeline_without_replicas() -> None:
    by_name = found(PIPELINE)
    assert by_name["replica"].impossible == "no other machine holds what machine 0 does"
    assert by_name["checkpoint"].recovery_s == 20 + 4 + 50 * 11
    # Alone it does not wait for others: 8 s for an iteration.
    assert by_name["log"].recovery_s == 3 + 4 + 50 * 8
    # With one helper 4 s, and a third of the state is added over the network; with more that takes longer.
    (helped,) = (way for way in ways(PIPELINE, helpers="one machine") if way.name == "log+parallel")
    assert helped.recovery_s == pytest.approx(3 + 4 + 50 * (4 + 4 / 3))
    # Of a machine with several workers swift-run has helpers for one worker only, an eighth of what is added.
    assert by_name["log+parallel"].recovery_s == by_name["log"].recovery_s
    assert by_name["log+parallel"].worker_s == pytest.approx(3 + 4 + 50 * (2 + 3 / 6))
    single = found(replace(PIPELINE, gpus_per_machine=1))["log+parallel"]
    assert single.recovery_s == helped.recovery_s
    (as_in_paper,) = (way for way in ways(PIPELINE, helpers="groups") if way.name == "log+parallel")
    assert as_in_paper.recovery_s == 3 + 4 + 50 * 2
    # Two boundaries, half of what passes each of them, 100 times.
    assert by_name["log"].storage_bytes == 1e9 * 100
    # 1 s for copies, while it waits 3.
    assert by_name["log"].cost == by_name["checkpoint"].cost == 2 / 1100
    assert choose(ways(PIPELINE), PIPELINE.mtbf_s).name == "log"
    assert choose(ways(replace(PIPELINE, gpus_per_machine=1)), PIPELINE.mtbf_s).name == "log+parallel"


def test_two_lost_machines() -> None:
    """Neighbours repeat together, with 7 micro-batches behind the first: three of six pairs are."""
    by_name = found(PIPELINE)
    assert by_name["log"].two_s == pytest.approx(3 + 4 + 50 * (3 * 9 + 3 * 8) / 6) == by_name["log+parallel"].two_s
    assert by_name["checkpoint"].two_s == by_name["checkpoint"].worker_s == by_name["checkpoint"].recovery_s
    # In groups of two they may be of the same one, of neighbours, or not.
    machines, boundaries = (Machine(8.0, 4e9),) * 6, (1e9,) * 5
    six = replace(PIPELINE, machines=machines, boundary_bytes=boundaries)
    (way,) = (way for way in ways(six, groups=(range(2), range(2, 4), range(4, 6))) if way.name == "log")
    assert way.two_s == pytest.approx(3 + 4 + 50 * (3 * 9 + 8 * 11 + 4 * 9) / 15)
    # Of two machines nobody is left.
    pair = found(replace(PIPELINE, machines=machines[:2], boundary_bytes=boundaries[:1]))
    assert all(way.two_s == 0.0 for way in pair.values())


def test_copies_that_do_not_fit_into_the_bubble_take_time() -> None:
    slow = replace(PIPELINE, log_bytes_per_s=1e9 / 5)
    assert found(slow)["log"].cost == pytest.approx(2 / 1100 + (5 - 3) / 11)


def test_a_log_that_is_fetched_more_slowly_than_it_is_used_is_waited_for() -> None:
    slow = replace(PIPELINE, network_bytes_per_s=1e9 / 20)
    # The stages at the ends have one boundary, the others two.
    assert found(slow)["log"].recovery_s == 3 + 4 + 50 * (10 + 20 + 20 + 10) / 4


def test_groups_are_chosen_by_how_fast_their_logs_come_too() -> None:
    """A machine with little to compute waits for two boundaries' messages; in a group it waits for none inside."""
    machines = (*PIPELINE.machines[:2], Machine(0.5, 4e9), Machine(0.5, 4e9))
    job = replace(PIPELINE, machines=machines, network_bytes_per_s=1e9 / 10)
    assert found(job)["log"].recovery_s == 3 + 4 + 50 * (8 + 10 + 10 + 5) / 4
    limited = found(job, 3 * 1e9 * 100)["log"]
    # Two by two: 9 s to repeat, and 5 s for what comes over one boundary.
    assert limited.groups == (range(2), range(2, 4)) and limited.recovery_s == 3 + 4 + 50 * (9 + 5) / 2
    # To log nothing would repeat faster still, but then nothing can be repeated.
    slow = replace(job, network_bytes_per_s=1e9 / 1000)
    assert len(found(slow, 3 * 1e9 * 100)["log"].groups) == 2


def test_replicas_are_taken_where_there_are_some() -> None:
    replicated = replace(PIPELINE, machines=(Machine(8.0, 4e9, has_replica=True),) * 4)
    recovery_s = 3 + 4 + 11 / 2
    assert found(replicated)["replica"] == Way("replica", "", recovery_s, worker_s=3 + 4 / 8 + 11 / 2, two_s=recovery_s)
    assert choose(ways(replicated), replicated.mtbf_s).name == "replica"
    one = replace(replicated, machines=(*replicated.machines[:2], Machine(8.0, 4e9), replicated.machines[3]))
    assert found(one)["replica"].impossible == "no other machine holds what machine 2 does"


def test_without_a_pipeline_only_checkpoints_are_left() -> None:
    alone = replace(PIPELINE, boundary_bytes=())
    by_name = found(alone)
    assert by_name["log"].impossible.startswith("no pipeline:") and by_name["log+parallel"].impossible
    assert choose(ways(alone), alone.mtbf_s).name == "checkpoint"


ONE_MACHINE = replace(PIPELINE, machines=(Machine(8.0, 4e9, gradient_bytes=4e6, stages=4, inside_bytes=3e9),),
                      boundary_bytes=(), gpus_per_machine=4)  # fmt: skip


def test_a_pipeline_inside_a_machine_brings_back_its_workers_from_logs() -> None:
    by_name = {way.name: way for way in ways(ONE_MACHINE, helpers="one worker")}
    log, parallel = by_name["log"], by_name["log+parallel"]
    assert log.impossible == parallel.impossible == (
        "messages pass inside machines only: their logs are lost with them"
    )
    assert log.worker_s == 3 + 4 + 50 * 8 and log.storage_bytes == 3e9 * 100
    # All of its messages are logged, 3 s for copies in 3 s of waiting; one helper, with a millisecond of gradients.
    assert log.cost == 2 / 1100 and parallel.worker_s == pytest.approx(3 + 4 + 50 * (4 + 0.001))
    assert choose(tuple(by_name.values()), ONE_MACHINE.mtbf_s).name == "checkpoint"
    replicated = replace(ONE_MACHINE.machines[0], has_replica_inside=True)
    assert not ways(replace(ONE_MACHINE, machines=(replicated,)))[1].worker_s


def test_stages_of_a_lost_machine_repeat_one_behind_the_other() -> None:
    """Three more than its own; one of its workers by itself."""
    four = replace(PIPELINE, machines=(Machine(8.0, 4e9, stages=4, inside_bytes=1e9),) * 4)
    log = {way.name: way for way in ways(four, helpers="one worker")}["log"]
    assert (log.recovery_s, log.worker_s) == (3 + 4 + 50 * 11, 3 + 4 + 50 * 8)
    assert log.storage_bytes == (1e9 + 1e9) * 100
    grouped = {way.name: way for way in ways(four, groups=(range(2), range(2, 4)), helpers="one worker")}["log"]
    assert grouped.worker_s == grouped.recovery_s == 3 + 4 + 50 * 15 and grouped.storage_bytes == 5e8 * 100


def test_within_a_budget_machines_form_groups() -> None:
    everything = 3 * 1e9 * 100
    by_name = found(PIPELINE, everything / 3)
    assert by_name["log"].groups == (range(2), range(2, 4))
    assert by_name["log"].recovery_s == 3 + 4 + 50 * 9 and repeat_s(PIPELINE, range(2)) == 9.0
    # A group in the middle has two neighbours; each half of the machines helps the other.
    assert repeat_s(PIPELINE, range(2), "groups") == 5.0
    # swift-run has helpers for what one machine has lost only.
    light = replace(PIPELINE, machines=(Machine(8.0, 4e9, gradient_bytes=1.0),) * 4)
    light = replace(light, gpus_per_machine=1)
    (way,) = (way for way in ways(light, groups=(range(2), range(2, 3), range(3, 4))) if way.name == "log+parallel")
    assert way.recovery_s == pytest.approx(3 + 4 + 50 * (9 + 9 + 2 + 2) / 4)
    assert shared_s(PIPELINE, range(2), 2) == 5.0 and shared_s(PIPELINE, range(2), 1) == 9.0
    assert found(PIPELINE, 0.0)["log"].impossible.startswith("the budget for logs allows no two groups")


def test_the_way_that_wastes_least_is_taken() -> None:
    """Rare failures do not pay for logs that delay every iteration."""
    slow = replace(PIPELINE, log_bytes_per_s=2.5e8, machine_mtbf_hours=10_000.0)
    assert choose(ways(slow), slow.mtbf_s).name == "checkpoint"
    often = replace(slow, machine_mtbf_hours=1.0)
    assert choose(ways(often), often.mtbf_s).name != "checkpoint"


def test_so_many_helpers_pay() -> None:
    """Each number is better than all smaller ones: shares are whole micro-batches, and logs are read so fast only."""
    job = replace(PIPELINE, machines=(Machine(8.0, 4e9, gradient_bytes=1e6),) * 4)
    assert paying_helpers(job, 1) == (1, 2, 3, 7)
    assert [shared_s(job, range(1, 2), count + 1) for count in (0, 1, 2, 3, 6, 7)] == [8, 4, 3, 2, 2, 1]
    # 3 s for the messages of an iteration; an end of the pipeline has half as many.
    slow = replace(job, network_bytes_per_s=PIPELINE.network_bytes_per_s / 3)
    assert (paying_helpers(slow, 1), paying_helpers(slow, 0)) == ((1, 2), (1, 2, 3, 7))
    assert paying_helpers(replace(job, network_bytes_per_s=1.0), 1) == ()
    assert paying_helpers(replace(job, micro_batches=1), 1) == ()


def test_gradients_that_are_added_for_longer_than_is_computed_do_not_pay() -> None:
    """Each more process has them sent once more."""
    times_s = [with_helpers_s(PIPELINE, range(1, 2), count + 1) for count in range(4)]
    assert times_s == pytest.approx([8, 4 + 4 / 3, 3 + 2 * 4 / 3, 2 + 3 * 4 / 3])
    assert paying_helpers(replace(PIPELINE, gpus_per_machine=1), 1) == (1,)
    # One of eight workers has an eighth of them.
    assert paying_helpers(PIPELINE, 1) == (1, 2, 3, 7)
    large = replace(PIPELINE, machines=(Machine(8.0, 4e9, gradient_bytes=5e9),) * 4, gpus_per_machine=1)
    assert paying_helpers(large, 1) == ()
    assert found(large)["log+parallel"].recovery_s == found(large)["log"].recovery_s
