"""Every combination of phases in a small world ends in a state that a run without failure passes through."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from swift_recovery.consistency import Member, Phase, Resolution, Unrecoverable, resolve

PENDING, REDUCED, UPDATED = Phase
ALL = list(itertools.product(Phase, repeat=3))


def world(*phases: Sequence[Phase], iteration: int = 7) -> list[Member]:
    return [Member(rank, iteration, tuple(each)) for rank, each in enumerate(phases)]


def carry_out(members: Sequence[Member], resolution: Resolution, iteration: int = 7) -> list[tuple[int, bool]]:
    """For each bucket: of which iteration it is in the end, and whether that is exact."""
    phases = {member.rank: member.phases for member in members}
    ends = []
    for bucket, source in enumerate(resolution.sources):
        at = phases[source.rank][bucket]
        state, exact = iteration + (at is UPDATED), True
        if source.finishes:
            assert at is REDUCED and not source.undoes
            state += 1
        if source.undoes:
            assert at is UPDATED
            state, exact = state - 1, False
        ends.append((state, exact))
    return ends


@pytest.mark.parametrize("num_survivors", [1, 2, 3])
def test_every_combination_of_three_buckets(num_survivors: int) -> None:
    for phases in itertools.product(ALL, repeat=num_survivors):
        members = world(*phases)
        resolution = resolve({0: members})[0]
        ends = carry_out(members, resolution)
        assert {state for state, _ in ends} == {resolution.iteration}, (phases, resolution)
        for bucket, (_, exact) in enumerate(ends):
            seen = {each[bucket] for each in phases}
            if not exact:  # only where nothing else works
                assert seen == {UPDATED}
                assert any({each[other] for each in phases} == {PENDING} for other in range(3))
        if all({each[bucket] for each in phases} != {PENDING} for bucket in range(3)):
            assert resolution.iteration == 8  # nothing is lost that need not be


def test_two_sets_go_on_from_one_iteration() -> None:
    for one, other in itertools.product(itertools.product(ALL, repeat=2), [(a,) for a in ALL]):
        sets = {0: world(*one), 1: world(*other)}
        found = resolve(sets)
        assert found[0].iteration == found[1].iteration
        for number, members in sets.items():
            assert {state for state, _ in carry_out(members, found[number])} == {found[number].iteration}
        alone = min(resolve({number: members})[number].iteration for number, members in sets.items())
        assert found[0].iteration == alone


def test_a_member_that_has_gone_on_has_updated_everything() -> None:
    behind, ahead = Member(0, 7, (REDUCED, PENDING)), Member(1, 8, (PENDING, PENDING))
    resolution = resolve({0: [behind, ahead]})[0]
    assert resolution.iteration == 8 and [source.rank for source in resolution.sources] == [1, 1]
    assert resolution.why == "roll forward" and resolution.undone == ()


def test_a_set_that_is_ahead_goes_back_with_the_others() -> None:
    """By one update at most: from an untouched survivor, or by an undo."""
    stuck = world([PENDING, PENDING])
    assert resolve({0: stuck, 1: world([UPDATED] * 2, [PENDING] * 2)})[1].undone == ()
    undone = resolve({0: stuck, 1: world([UPDATED] * 2)})[1]
    assert undone.undone == (0, 1) and undone.iteration == 7
    assert "buckets 0, 1, which are undone" in undone.why


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(Unrecoverable, match="nobody of replica set 3 is left"):
        resolve({3: []})
    with pytest.raises(Unrecoverable, match="rank 1 of replica set 0 is in update 9, another one in 7"):
        resolve({0: [Member(0, 7, (PENDING,)), Member(1, 9, (PENDING,))]})
    with pytest.raises(Unrecoverable, match="can be brought to iteration 8 or 9, another one only to 7"):
        resolve({0: world([PENDING]), 1: world([PENDING], iteration=8)})
