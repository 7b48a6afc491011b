"""Long walks through worlds that are too large to be searched: any failures at any time, then on to the end.

The breadth-first search sees every order of few steps; a walk goes through whole recoveries, and through failures in
the recoveries of failures. Hypothesis shrinks what it finds to the shortest walk, and replays it first the next time.
SWIFT_MODEL_WALKS sets their number (default 150).
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from swift_agent.agent import transactions
from swift_rendezvous.node import coordinator
from swift_rendezvous.roster.records import AS_LONG_AS_IT_ADVANCES
from tests.model.test_exploration import patched
from tests.model.world import World

NUM_WALKS = int(os.environ.get("SWIFT_MODEL_WALKS", "150"))
# Far more than any way to an end takes.
MAX_STEPS = 3000
SETTINGS = settings(
    max_examples=NUM_WALKS, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
choices = st.integers(0, 10_000)


def to_the_end(world: World, choose: random.Random) -> None:
    """No more failures: whoever is away comes back, and it must come to an end, in whatever order."""
    world.faults = 0
    for _ in range(MAX_STEPS):
        actions = world.actions()
        if not actions:
            world.settled()
            return
        world.do(choose.choice(actions))
    raise AssertionError(f"no end after {MAX_STEPS} steps without a failure: {world.describe()}")


class Walk(RuleBasedStateMachine):
    @initialize(nodes=st.integers(2, 5), slots=st.integers(1, 3), work=st.integers(1, 3), seed=st.integers(0, 2**32),
                max_restarts=st.sampled_from((1000, AS_LONG_AS_IT_ADVANCES)))  # fmt: skip
    def begin(self, nodes: int, slots: int, work: int, seed: int, max_restarts: int) -> None:
        self.world = World(max(nodes, slots), slots, faults=4, target=work, max_restarts=max_restarts)
        self.order = random.Random(seed)

    @rule(number=choices)
    def go_on(self, number: int) -> None:
        # None: it has come to an end, and only a failure can set it going again.
        if actions := self.world.actions():
            self.world.do(actions[number % len(actions)])

    @precondition(lambda self: self.world.failures())
    @rule(number=choices)
    def fail(self, number: int) -> None:
        failures = self.world.failures()
        self.world.do(failures[number % len(failures)])

    def teardown(self) -> None:
        if hasattr(self, "world"):
            to_the_end(self.world, self.order)


def test_every_walk_comes_to_a_sound_end() -> None:
    run_state_machine_as_test(Walk, settings=SETTINGS)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("seed", range(40))
def test_what_is_lost_is_brought_back_while_one_replica_lives(seed: int) -> None:
    """Three workers or nodes at any moments, also in the recovery of each other, but never the last replica."""
    choose = random.Random(seed)
    world = World(6, 3, target=9, kinds=("crash", "kill"))
    while sum(node.proc is not None and node.proc.status == "holding" for node in world.nodes) < 3:
        world.do(choose.choice(world.actions()))
    rank = choose.randrange(3)
    keeper = next(node for node in world.nodes if node.proc is not None and node.proc.rank == rank)
    kept = keeper.num_procs
    for _ in range(3):
        for _ in range(choose.randrange(12)):
            world.do(choose.choice(world.actions()))
        world.faults = 1
        others = [action for action in world.failures() if world.nodes[action[1]] is not keeper]
        world.do(choose.choice([action for action in others if world.nodes[action[1]].proc is not None] or others))
    num_resumed = reached = 0
    for _ in range(MAX_STEPS):
        if not (actions := world.actions()):
            break
        world.do(choose.choice(actions))
        num_resumed += world.resumed and world.view.number > 1
        reached = max([reached, *(node.proc.iteration for node in world.nodes if node.proc)])
    world.settled()
    assert num_resumed and reached == world.target
    assert keeper.num_procs == kept, "a survivor was started again"


@pytest.mark.parametrize("seed", range(30))
def test_a_rank_that_does_not_advance_ends_the_job_wherever_it_is(seed: int) -> None:
    """Workers of any rank are killed, and now and then a node, until some rank has failed three times."""
    choose = random.Random(seed)
    world = World(5, 2, target=100, kinds=("crash", "kill"), max_restarts=AS_LONG_AS_IT_ADVANCES)
    while (living := sum(node.here for node in world.nodes)) and world.view.result is None:
        for _ in range(choose.randrange(20)):
            if actions := world.actions():
                world.do(choose.choice(actions))
        world.faults = 1
        kills = [action for action in world.failures() if action[0] == "kill" or (living > 3 and choose.random() < 0.1)]
        if kills and world.view.result is None:
            world.do(choose.choice(kills))
        world.faults = 0
        assert len(world.ends) < 20, world.describe()
    to_the_end(world, choose)
    assert world.state == "failed" and max(world.ends.count(rank) for rank in world.ranks) >= 3


MUTANTS: dict[str, tuple[Any, str, str, str]] = {
    "a node that was given up still writes": (
        transactions, "fence", 'Compare.value(keys.node(me.node_id), "==", encode(me)),', ""),
    "a generation is written over another": (
        coordinator.Coordinator, "_execute",
        'guards.append(Compare.mod_revision(keys.generation, "==", view.generation_revision))\n'
        "            # Workers that were released", "# Workers that were released"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_walks_find_a_mistake(mutant: tuple[Any, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, old, new = mutant
    module = owner if owner is transactions else coordinator
    monkeypatch.setattr(owner, name, patched(getattr(owner, name), old, new, vars(module)))
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(3000):
            choose = random.Random(seed)
            world = World(4, 2, faults=4, target=2)
            for _ in range(60):
                steps = [*world.actions(), *(world.failures() if choose.random() < 0.2 else [])]
                if steps:
                    world.do(choose.choice(steps))
            to_the_end(world, choose)
