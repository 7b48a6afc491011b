"""The agent when the job changes its size: what its old workers hold is kept before they end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swift_agent.agent.lifecycle import commands as cmd
from swift_agent.agent.lifecycle import events
from swift_agent.agent.lifecycle import events as msg
from swift_recovery.planning.resize import FILE, Held, make_resize_plan
from swift_rendezvous.roster.records import JobRecord, PlanRecord
from tests.support.records import generation, node, view
from tests.unit.agent.lifecycle.test_machine import STORE, Agent, next_generation, none_of, only, training

SLOTS = ("n0", "n1", "n2")


def growing() -> Agent:
    """Generation 2 has a third node; the workers of n0 were told to stop."""
    agent = training()
    agent.seen = replace(agent.seen, nodes={name: node(name) for name in SLOTS})
    commands = next_generation(agent, 2, mode="resize", slots=SLOTS, epoch=2, store_slot=0)
    none_of(commands, cmd.KillWorkers, cmd.StartWorkers, cmd.WriteProgress)
    return agent


def planned(agent: Agent, **held: Any) -> list[cmd.Command]:
    number = agent.state.view.number
    plan = make_resize_plan({int(slot[1:]): ones for slot, ones in held.items()}, [2, 2, 2])
    return agent.change(plan=PlanRecord(number, plan.to_json(), "w", plan.kind == "restart"), store=STORE)


def test_one_worker_keeps_the_state_and_then_all_are_exchanged() -> None:
    agent = growing()
    assert only(agent.given, cmd.SendStop).local_ranks == (0, 1)
    assert agent.report(0, 1, 5) == []
    told = only(agent.report(1, 1, 6), cmd.WriteProgress)
    assert told.reports == (Held(0, 5).to_json(), Held(1, 6).to_json())
    commands = planned(agent, s0=[Held(0, 5), Held(1, 6)], s1=[Held(0, 6)])
    assert only(commands, cmd.SendKeep).local_ranks == (1,)
    none_of(commands, cmd.KillWorkers, cmd.StartWorkers, cmd.SendGo)
    commands = agent.tell(msg.WorkerKept(1, agent.pid(1), 6, 0))
    assert only(commands, cmd.KillWorkers).local_ranks == (0, 1) and agent.state.kept == Held(FILE, 6)
    assert agent.exit(0, -15) == []
    started = only(agent.exit(1, -15), cmd.StartWorkers)
    assert (started.local_ranks, started.generation, started.warm) == ((0, 1), 2, True)
    none_of(agent.given, cmd.WriteFailure)
    agent.start(first_pid=200)
    assert sorted(c.local_ranks for c in agent.given if isinstance(c, cmd.SendGo)) == [(0,), (1,)]
    agent.tell(msg.WorkerResumed(0, 200, 2, 7, {}))
    commands = agent.tell(msg.WorkerResumed(1, 201, 2, 7, {}))
    assert only(commands, cmd.WriteResumed).generation == 2 and only(commands, cmd.DropKept)
    assert agent.state.kept is None


def test_a_node_that_has_nothing_new_enough_does_not_wait_for_others() -> None:
    agent = growing()
    agent.report(0, 1, 5)
    agent.report(1, 1, 5)
    commands = planned(agent, s0=[Held(0, 5)], s1=[Held(0, 6)])
    none_of(commands, cmd.SendKeep)
    assert only(commands, cmd.KillWorkers).local_ranks == (0, 1)


def test_a_replacement_says_at_once_that_it_has_nothing() -> None:
    agent = Agent("n2")
    agent.see(view(tracked=True, names=SLOTS, store=STORE))
    new = generation(2, "resize", SLOTS, epoch=2)
    commands = agent.change(generation=new, generation_revision=20, plan=None, store=None)
    assert only(commands, cmd.WriteProgress).reports == ()
    none_of(commands, cmd.StartWorkers)
    assert only(planned(agent, s0=[Held(0, 5)]), cmd.StartWorkers).local_ranks == (0, 1)


def test_what_dies_or_is_unfit_before_it_has_kept_is_a_failure() -> None:
    for fails in (
        lambda agent: agent.exit(1, -9),
        lambda agent: agent.tell(events.WorkerUnfit(1, agent.pid(1), "cut")),
    ):
        agent = growing()
        agent.report(0, 1, 5)
        agent.report(1, 1, 6)
        planned(agent, s0=[Held(0, 5), Held(1, 6)])
        lost = only(fails(agent), cmd.WriteFailure)
        assert (lost.generation, lost.failure.kind, lost.failure.local_ranks) == (2, "workers", (1,))
        agent.change(failures={0: lost.failure})
        commands = next_generation(agent, 3, mode="resize", slots=SLOTS, epoch=3, store_slot=0)
        is_full = agent.state.workers[1].alive
        assert only(commands, cmd.WriteProgress).reports == (Held(0, 5, is_full=is_full).to_json(),)


def test_a_worker_that_finds_no_room_is_unfit_and_its_node_says_so() -> None:
    agent = growing()
    agent.report(0, 1, 6)
    agent.report(1, 1, 6)
    planned(agent, s0=[Held(0, 6), Held(1, 6)], s1=[Held(0, 6)])
    why = "its state cannot be kept in /tmp/x (No space left on device): TMPDIR needs room for one copy"
    lost = only(agent.tell(events.WorkerUnfit(0, agent.pid(0), why)), cmd.WriteFailure)
    assert lost.failure.evidence == why
    agent.change(failures={0: lost.failure})
    commands = next_generation(agent, 3, mode="resize", slots=SLOTS, epoch=3, store_slot=0)
    assert only(commands, cmd.WriteProgress).reports == (Held(1, 6, is_full=True).to_json(),)
    # Another node keeps it; the workers of this one are not needed any more.
    commands = planned(agent, s0=[Held(1, 6, is_full=True)], s1=[Held(0, 6)])
    none_of(commands, cmd.SendKeep)
    assert only(commands, cmd.KillWorkers).local_ranks == (0, 1)


def test_what_was_kept_serves_the_next_attempt_whoever_died() -> None:
    agent = growing()
    agent.report(0, 1, 6)
    agent.report(1, 1, 6)
    planned(agent, s0=[Held(0, 6)])
    agent.tell(msg.WorkerKept(0, agent.pid(0), 6, 0))
    for rank in (0, 1):
        agent.exit(rank, -15)
    agent.start(first_pid=200)
    agent.given.clear()
    commands = next_generation(agent, 3, mode="resize", slots=("n0", "n1"), epoch=3, store_slot=0)
    # They had begun to enter: what they hold is to be said. It is nothing yet.
    assert only(commands, cmd.SendStop).generation == 2
    for rank in (0, 1):
        agent.tell(events.ReportReceived(rank, 200 + rank, 2, {"rank": rank, "status": "empty", "iteration": 0}))
    assert only(agent.given, cmd.WriteProgress).reports == (Held(FILE, 6).to_json(),)
    plan = make_resize_plan({0: [Held(FILE, 6)]}, [2, 2]).to_json()
    commands = agent.change(plan=PlanRecord(3, plan, "w"), store=STORE)
    none_of(commands, cmd.SendKeep)
    assert only(commands, cmd.KillWorkers).local_ranks == (0, 1)


def test_what_was_kept_of_a_run_that_is_started_over_counts_no_more() -> None:
    agent = growing()
    agent.report(0, 1, 6)
    agent.report(1, 1, 6)
    planned(agent, s0=[Held(0, 6)])
    agent.tell(msg.WorkerKept(0, agent.pid(0), 6, 0))
    assert only(next_generation(agent, 3, mode="restart", slots=SLOTS, epoch=3), cmd.DropKept)
    assert agent.state.kept is None


def test_in_a_job_of_a_range_nobody_trains_before_it_is_known_to_be_tracked() -> None:
    agent = Agent()
    commands = agent.see(view(tracked=False, store=STORE, job=JobRecord(2, 2, "command", 1, max_nodes=3)))
    agent.start()
    assert only(agent.given, cmd.WriteTracked) and only(commands, cmd.StartWorkers)
    none_of(agent.given, cmd.SendGo)
    assert only(agent.change(tracked=True), cmd.SendGo).local_ranks == (0, 1)
