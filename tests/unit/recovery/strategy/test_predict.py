"""What a recovery should take that a plan describes, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swift_recovery.planning.plan import Plan
from swift_recovery.strategy.predict import in_place
from swift_recovery.strategy.profile import Machine, Profile


def job(machines: tuple[Machine, ...], gpus: int) -> Profile:
    """16 micro-batches; messages take no time."""
    return Profile(
        name="J", machines=machines, boundary_bytes=(1.0,) * (len(machines) - 1), micro_batches=16, iteration_s=1.0,
        network_bytes_per_s=1.25e9, log_bytes_per_s=1e9, gpus_per_machine=gpus, checkpoint_every=100, checkpoint_s=1.0,
        load_s=4.0, restart_s=20.0, replace_s=0.25, machine_mtbf_hours=400.0,
    )  # fmt: skip


def on(gpus: int) -> Callable[[int], int]:
    return lambda rank: rank // gpus


@pytest.mark.parametrize(("lost", "seconds"), [((3,), 8.0), ((0, 3), 16.0), (range(8), 64.0), ((3, 9), 8.0)])
def test_a_replica_gives_what_the_lost_ranks_of_a_machine_had(lost: tuple[int, ...], seconds: float) -> None:
    """80 GB of eight ranks: 64 s for all of them. Two machines get theirs at the same time."""
    plan = Plan("copy", "w", 15, sources={rank: 16 + rank for rank in lost})
    found = in_place(job((Machine(0.5, 80e9, has_replica=True),) * 4, 8), plan, on(8))
    assert found is not None and found.seconds == pytest.approx(0.25 + seconds + 1.0)


def repeated_s(machines: tuple[Machine, ...], gpus: int, lost: tuple[int, ...]) -> float:
    plan = Plan("copy", "w", 60, replays=lost, checkpoint=10)
    found = in_place(job(machines, gpus), plan, on(gpus))
    assert found is not None and found.way == "log"
    return found.repeated_s / 50


@pytest.mark.parametrize(
    ("lost", "stages"), [((0,), 1), ((0, 15), 1), ((0, 1, 15), 2), ((0, 2, 4), 1), (tuple(range(16)), 16)]
)
def test_stages_that_are_no_neighbours_do_not_wait_for_each_other(lost: tuple[int, ...], stages: int) -> None:
    assert repeated_s((Machine(16.0),) * 16, 1, lost) == pytest.approx(16 + stages - 1)
    # The same where four of them are on one machine.
    assert repeated_s((Machine(16.0, stages=4),) * 4, 4, lost) == pytest.approx(16 + stages - 1)


def test_ranks_that_are_parts_of_a_stage_are_one() -> None:
    """Two stages of two ranks each on a machine."""
    machines = (Machine(16.0, stages=2),) * 2
    assert repeated_s(machines, 4, (0, 1, 2, 3)) == 17.0 and repeated_s(machines, 4, tuple(range(8))) == 19.0
    assert repeated_s((Machine(16.0),) * 2, 4, (0, 1, 2, 3)) == 16.0


def test_one_lost_worker_adds_up_its_own_gradients() -> None:
    """Eight stages of 20 MB each: a helper pays wherever they are."""
    plan = Plan("copy", "w", 60, replays=(1,), checkpoint=10)
    for gpus in (1, 4):
        machines = (Machine(0.05, stages=gpus, gradient_bytes=20e6 * gpus),) * (8 // gpus)
        found = in_place(job(machines, gpus), plan, on(gpus), num_shares=2)
        assert found is not None and found.repeated_s == pytest.approx(50 * (0.025 + 0.016))
