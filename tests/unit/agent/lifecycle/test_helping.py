"""A node that helps a rank which others have lost: a process is started once, told to go, and ended with its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swift_agent.agent.lifecycle import commands as cmd
from swift_agent.agent.lifecycle import events as evt
from swift_agent.agent.lifecycle.helping import helpers_of
from swift_agent.wire.environment import helper_number
from swift_recovery.planning.plan import Plan
from swift_rendezvous.roster.records import GenerationRecord, Helper, PlanRecord, ResultRecord
from tests.support.records import failure, generation, node, view
from tests.unit.agent.lifecycle.test_machine import STORE, Agent, next_generation, none_of, only, training

NAMES = ("n0", "n1", "n2")
REPEATS = PlanRecord(2, Plan("copy", "w", 7, replays=(3,), checkpoint=4).to_json(), "w")
COPIES = PlanRecord(2, Plan("copy", "w", 7, sources={3: 1}).to_json(), "w")
# Rank 3 is local rank 1 of its node.
FIRST, SECOND = helper_number(1, 1), helper_number(2, 1)


def helped(number: int = 2, *nodes: str) -> GenerationRecord:
    """n1 has lost rank 3; *nodes* help, each with one process."""
    named = tuple(Helper(3, share, name, f"{name}.1") for share, name in enumerate(nodes or ("n2",), 1))
    return replace(generation(number, "replace", lost={1: (1,)}), bare={1: (1,)}, helpers=named)


def spare(*nodes: str) -> Agent:
    """n2 has no slot; it was told of generation 2, without a plan."""
    agent = Agent("n2")
    agent.see(view(names=NAMES, generation=helped(2, *nodes), plan=None, nodes={name: node(name) for name in NAMES}))
    return agent


def waiting(*nodes: str) -> Agent:
    agent = spare(*nodes)
    agent.tell(evt.HelperStarted(FIRST, 2, 77), evt.HelperWaits(FIRST, 77))
    agent.given.clear()
    return agent


def test_a_spare_starts_what_it_is_named_for_and_nothing_else() -> None:
    assert spare().given == [cmd.StartHelper(FIRST, 3, 2)]
    assert spare("n2", "n2").given == [cmd.StartHelper(FIRST, 3, 2), cmd.StartHelper(SECOND, 3, 2)]
    assert spare("n0").given == []
    assert spare().state.workers == {}


def test_it_goes_once_the_plan_and_the_store_are_known_and_it_has_said_hello() -> None:
    agent = waiting()
    assert agent.change(plan=REPEATS) == [] and len(helpers_of(agent.state.view)) == 1
    assert agent.change(store=STORE) == [cmd.SendHelp(FIRST, 2)]
    late = spare()
    late.change(plan=REPEATS, store=STORE)
    assert late.given == [cmd.StartHelper(FIRST, 3, 2)]
    assert late.tell(evt.HelperStarted(FIRST, 2, 77)) == []
    assert late.tell(evt.HelperWaits(FIRST, 77)) == [cmd.SendHelp(FIRST, 2)]
    lost = waiting()
    lost.change(failures={0: failure("workers", 0, (0,))})
    assert lost.change(plan=REPEATS, store=STORE) == []


def test_where_the_state_comes_back_in_another_way_nobody_helps() -> None:
    agent = waiting()
    why = "its rank gets its state in another way"
    assert agent.change(plan=COPIES, store=STORE) == [cmd.KillHelper(FIRST, 3, why)]
    assert helpers_of(agent.state.view) == ()
    assert agent.tell(evt.HelperExited(FIRST, 77)) == []
    two = replace(REPEATS, content=Plan("copy", "w", 7, replays=(2, 3), checkpoint=4).to_json())
    for plan in (two, replace(REPEATS, restart=True), replace(REPEATS, content={"kind": "copy"})):
        assert only(waiting().change(plan=plan), cmd.KillHelper)
    assert Agent("n2").see(view(names=NAMES, generation=helped(), plan=COPIES)) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"result": ResultRecord("succeeded", "done")}, "the job has ended"),
        ({"generation": generation(3, "replace"), "plan": None}, "another generation has begun"),
        ({"generation": helped(3, "n0"), "plan": None}, "another generation has begun"),
        ({"recovered": 2}, "its rank trains"),
    ],
)
def test_it_is_ended_when_nobody_needs_it_any_more(change: dict[str, Any], why: str) -> None:
    agent = waiting()
    agent.change(plan=REPEATS, store=STORE)
    commands = agent.change(**change)
    assert commands[0] == cmd.KillHelper(FIRST, 3, why)
    none_of(commands, cmd.StartHelper)


def test_a_node_that_may_have_lost_its_place_ends_its_helpers() -> None:
    agent = waiting()
    commands = agent.tell(evt.Tick(holds=False, why="etcd is silent"))
    assert only(commands, cmd.KillHelper).why == "the place of this node may be another's"
    none_of(agent.tell(evt.HelperExited(FIRST, 77), evt.Tick()), cmd.StartHelper)


def test_one_that_has_ended_is_forgotten_and_not_started_again() -> None:
    agent = waiting()
    assert agent.change(plan=REPEATS, store=STORE) == [cmd.SendHelp(FIRST, 2)]
    assert agent.tell(evt.HelperExited(FIRST, 77)) == []
    assert agent.change(generation_revision=99) == []  # the record was written again
    assert agent.state.restarts_used == 0
    agent.change(generation=generation(3, "replace"), plan=None)
    assert agent.state.helpers == {}


def test_that_of_the_next_generation_waits_for_the_end_of_the_old_one() -> None:
    agent = waiting()
    assert agent.change(generation=helped(3), plan=None) == [cmd.KillHelper(FIRST, 3, "another generation has begun")]
    # Late words of the old process are not those of the new one.
    assert agent.tell(evt.HelperExited(FIRST, 77)) == [cmd.StartHelper(FIRST, 3, 3)]
    agent.tell(evt.HelperWaits(FIRST, 77), evt.HelperStarted(FIRST, 2, 77))
    assert agent.state.helpers[FIRST].pid in (0, 77) and agent.tell(evt.HelperStarted(FIRST, 3, 78)) == []
    assert agent.state.helpers[FIRST].pid == 78


def test_one_that_cannot_help_is_ended() -> None:
    agent = waiting()
    assert agent.tell(evt.HelperUnfit(FIRST, 77, "no log")) == [cmd.KillHelper(FIRST, 3, "it cannot help: no log")]
    assert agent.tell(evt.HelperUnfit(SECOND, 77, "no log")) == []


def test_a_survivor_helps_beside_its_own_workers_and_nothing_it_does_touches_them() -> None:
    agent = training()
    next_generation(agent, lost={1: (1,)})
    workers = agent.state.workers
    commands = agent.change(generation=replace(helped(2, "n0"), store_slot=1))
    assert commands == [cmd.StartHelper(FIRST, 3, 2)]
    agent.tell(evt.HelperStarted(FIRST, 2, 77), evt.HelperWaits(FIRST, 77), evt.HelperUnfit(FIRST, 77, "no log"))
    agent.tell(evt.HelperExited(FIRST, 77))
    assert agent.state.workers == workers and agent.state.restarts_used == 0
