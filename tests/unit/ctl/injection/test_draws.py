"""A seed means the same faults, whatever the job does."""

from __future__ import annotations

from swift_agent.ctl.injection.draws import DEFAULT_KINDS, draws, fault_of
from swift_agent.wire.injected import KINDS, PHASES, checked
from tests.support.records import node, view


def test_a_seed_means_the_same_faults() -> None:
    assert draws(7, 20, KINDS) == draws(7, 20, KINDS) != draws(8, 20, KINDS)
    assert draws(7, 5, KINDS) == draws(7, 20, KINDS)[:5]
    many = draws(1, 500, KINDS)
    assert {one.kind for one in many} == set(KINDS) and {one.phase for one in many} == set(PHASES)


def test_every_draw_is_a_fault_of_the_job() -> None:
    here = view(nodes={name: node(name) for name in ("n0", "n1", "n2")})
    for draw in draws(3, 200, KINDS):
        fault = fault_of(draw, here, "a1", 2.0)
        assert fault is not None and checked(fault).kind == draw.kind and 0 <= fault.rank < 4


def test_a_node_is_killed_only_where_a_spare_waits() -> None:
    for draw in draws(3, 50, ("kill-node",)):
        fault = fault_of(draw, view(), "a1", 2.0)
        assert fault is not None and fault.kind == "kill-worker"


def test_a_job_without_iterations_has_no_moments() -> None:
    (draw,) = draws(1, 1, DEFAULT_KINDS)
    assert fault_of(draw, view(tracked=False), "a1", 2.0) is None
    assert fault_of(draw, view(generation=None), "a1", 2.0) is None
