"""Every mixture of updates that three survivors with three parameters can be cut in, carried out on symbols."""

from __future__ import annotations

import itertools

from swift_recovery.planning.half_done_updates import Back, Patch, back, can_finish, forward

NUM_PARAMETERS = 3
SUBSETS = [frozenset(c) for n in range(NUM_PARAMETERS + 1) for c in itertools.combinations(range(NUM_PARAMETERS), n)]
MIXTURES = [dict(enumerate(members)) for size in (1, 2, 3) for members in itertools.product(SUBSETS, repeat=size)]


def states(updated: dict[int, frozenset[int]]) -> dict[int, list[str]]:
    return {rank: ["new" if n in have else "old" for n in range(NUM_PARAMETERS)] for rank, have in updated.items()}


def carry_out(held: dict[int, list[str]], patches: tuple[Patch, ...]) -> None:
    for patch in patches:
        assert patch.source not in patch.targets
        for target in patch.targets:
            for number in patch.parameters:
                held[target][number] = held[patch.source][number]


def test_every_mixture_ends_in_one_state() -> None:
    for updated in MIXTURES:
        leave(updated)


def leave(updated: dict[int, frozenset[int]]) -> None:
    held = states(updated)
    if can_finish(updated.values(), NUM_PARAMETERS):
        lead, patches = forward(updated, NUM_PARAMETERS)
        carry_out(held, patches)
        assert held[lead] == ["new"] * NUM_PARAMETERS
        return
    plan = back(updated)
    for rank in held:
        for number in plan.undone:
            assert held[rank][number] == "new", "only an update that was made can be undone"
            held[rank][number] = "old"
    carry_out(held, plan.patches)
    assert all(parameters == ["old"] * NUM_PARAMETERS for parameters in held.values())


def test_undo_is_the_last_resort() -> None:
    """Exactly what every survivor has updated, and only where the set cannot go forward."""
    for updated in MIXTURES:
        assert back(updated).undone == tuple(sorted(frozenset.intersection(*updated.values())))
        union = frozenset[int]().union(*updated.values())
        assert can_finish(updated.values(), NUM_PARAMETERS) == (union == set(range(NUM_PARAMETERS)))


def test_a_complete_survivor_needs_nothing() -> None:
    assert forward({4: frozenset({0, 1, 2}), 5: frozenset({0})}, 3) == (4, ())


def test_who_has_most_leads_and_gets_the_rest() -> None:
    lead, patches = forward({0: frozenset({2}), 1: frozenset({0, 1})}, 3)
    assert (lead, patches) == (1, (Patch((2,), 0, (1,)),))


def test_sources_of_untouched_parameters_are_spread() -> None:
    plan = back({0: frozenset({0, 1}), 1: frozenset(), 2: frozenset()})
    assert plan == Back((Patch((0,), 1, (0,)), Patch((1,), 2, (0,))), ())
