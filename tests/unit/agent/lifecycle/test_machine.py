"""One agent's lifecycle, scripted: what it does next in every situation that the design names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from swift_agent.agent.lifecycle import commands as cmd
from swift_agent.agent.lifecycle import events as evt
from swift_agent.agent.lifecycle import machine as lc
from swift_agent.agent.lifecycle import state
from swift_rendezvous.roster.records import (
    CoordinatorRecord,
    ExitedRecord,
    FailureRecord,
    FinishedRecord,
    JobRecord,
    PlanRecord,
    ProgressRecord,
    ResultRecord,
    StoreRecord,
    WorkerExit,
)
from swift_rendezvous.roster.view import Damaged, View
from tests.support.records import failure, generation, node, view

C = TypeVar("C")


class Agent:
    """Node n0 of a job of two nodes with two workers each; keeps the commands it was given since the last look."""

    def __init__(self, me: str = "n0", max_restarts: int = 3) -> None:
        self.state = state.AgentState(me, f"{me}.1", max_restarts, stop_deadline_s=5.0)
        self.given: list[cmd.Command] = []
        self.now_s = 100.0
        self.revision = 0

    def tell(self, *events: evt.Event) -> list[cmd.Command]:
        commands: list[cmd.Command] = []
        for event in events:
            step = lc.on_event(self.state, event, now_s=self.now_s)
            # Level-triggered: looking again asks for nothing more.
            assert lc.reconcile(step.state, now_s=self.now_s).commands == ()
            self.state = step.state
            commands += step.commands
        self.given += commands
        return commands

    def see(self, v: View) -> list[cmd.Command]:
        self.revision += 1
        self.seen = replace(v, revision=self.revision)
        return self.tell(evt.ViewChanged(self.seen))

    def change(self, **changes: Any) -> list[cmd.Command]:
        return self.see(replace(self.seen, **changes))

    def pid(self, local_rank: int) -> int:
        return self.state.workers[local_rank].pid

    def start(self, ranks: Sequence[int] = (0, 1), first_pid: int = 100) -> None:
        number = self.state.view.number
        self.tell(*(evt.WorkerStarted(r, number, first_pid + r) for r in ranks),
                  *(evt.HelloReceived(r, first_pid + r) for r in ranks))

    def report(self, local_rank: int, number: int, iteration: int = 5) -> list[cmd.Command]:
        held = {"rank": local_rank, "status": "holding", "iteration": iteration}
        return self.tell(evt.ReportReceived(local_rank, self.pid(local_rank), number, held))

    def exit(self, local_rank: int, code: int, pid: int | None = None) -> list[cmd.Command]:
        return self.tell(evt.WorkerExited(WorkerExit(local_rank, local_rank, pid or self.pid(local_rank), code, "h")))

    def finish(self, local_rank: int, number: int) -> list[cmd.Command]:
        return self.tell(evt.WorkerFinished(local_rank, self.pid(local_rank), number, {"iteration": 9}))


def only(commands: list[cmd.Command], kind: type[C]) -> C:
    found = [c for c in commands if isinstance(c, kind)]
    assert len(found) == 1, f"{kind.__name__} in {commands}"
    return found[0]


def none_of(commands: list[cmd.Command], *kinds: type[Any]) -> None:
    assert not any(isinstance(c, kinds) for c in commands), commands


STORE = StoreRecord("127.0.0.1", 5)
COPY = {"kind": "copy", "why": "w", "iteration": 5, "sections": 0, "sources": {}, "layouts": {}}


def training(me: str = "n0", max_restarts: int = 3) -> Agent:
    """Both workers of the agent train in generation 1."""
    agent = Agent(me, max_restarts)
    agent.see(view(tracked=True, store=STORE))
    agent.start()
    assert {w.current for w in agent.state.workers.values()} == {1}
    agent.given.clear()
    return agent


def next_generation(agent: Agent, number: int = 2, **changes: Any) -> list[cmd.Command]:
    """A replaced generation, not planned yet."""
    new = generation(number, **{"mode": "replace", "store_slot": 1, **changes})
    return agent.change(generation=new, generation_revision=10 * number, plan=None, store=None, failures={},
                        progress={}, resumed={}, finished={}, exited={})


def planned(agent: Agent) -> list[cmd.Command]:
    number = agent.state.view.number
    return agent.change(plan=PlanRecord(number, COPY, "w"), store=STORE,
                        progress={s: ProgressRecord(s, f"n{s}.1", ()) for s in range(2)})


# ---- begin ----


def test_the_first_generation() -> None:
    agent = Agent()
    commands = agent.see(view(tracked=False))
    assert only(commands, cmd.HostStore).generation == 1
    none_of(commands, cmd.StartWorkers)  # a cold process needs the store's address
    started = only(agent.change(store=STORE), cmd.StartWorkers)
    assert (started.local_ranks, started.generation, started.warm) == ((0, 1), 1, False)
    commands = agent.tell(evt.WorkerStarted(0, 1, 100), evt.WorkerStarted(1, 1, 101), evt.HelloReceived(1, 101))
    assert only(commands, cmd.WriteTracked) and only(commands, cmd.SendGo) == cmd.SendGo((1,), 1)
    assert agent.tell(evt.HelloReceived(0, 100)) == [cmd.SendGo((0,), 1)]


def test_only_the_store_slot_hosts_and_a_spare_does_nothing() -> None:
    agent = Agent("n1")
    none_of(agent.see(view(store=STORE)), cmd.HostStore)
    spare = Agent("n2")
    assert spare.see(view(names=("n0", "n1", "n2"), store=STORE)) == [] and spare.state.workers == {}


def test_an_untracked_worker_is_told_nothing() -> None:
    agent = Agent()
    agent.see(view(tracked=False, store=STORE))
    commands = agent.tell(evt.WorkerStarted(0, 1, 100), evt.WorkerStarted(1, 1, 101))
    commands += agent.change(failures={1: failure("workers", 1, (0,))})
    none_of(commands, cmd.SendGo, cmd.SendStop, cmd.WriteTracked)
    assert only(agent.exit(0, 0) + agent.exit(1, 0) + agent.change(failures={}), cmd.WriteExited).slot == 0


# ---- a worker dies ----


def test_a_worker_death_is_reported_and_the_others_are_stopped() -> None:
    agent = training()
    commands = agent.exit(1, -9)
    record = only(commands, cmd.WriteFailure).failure
    assert (record.kind, record.slot, record.local_ranks, record.restarts_left) == ("workers", 0, (1,), 3)
    assert "rank 1 on h (pid 101) killed by signal 9" in record.evidence
    none_of(commands, cmd.StartWorkers)  # replaced only once that is agreed
    stop = only(agent.change(failures={0: record}), cmd.SendStop)
    assert (stop.local_ranks, stop.generation) == ((0,), 1)
    assert agent.report(0, 1) == []
    commands = next_generation(agent, lost={0: (1,)})
    started = only(commands, cmd.StartWorkers)
    assert (started.local_ranks, started.generation, started.warm) == ((1,), 2, True)
    progress = only(commands, cmd.WriteProgress)
    assert progress.reports == ({"rank": 0, "status": "holding", "iteration": 5}, {"rank": 1, "status": "fresh"})
    assert agent.tell(evt.WorkerStarted(1, 2, 201)) == []
    assert planned(agent) == [cmd.SendGo((0,), 2)]
    assert agent.tell(evt.HelloReceived(1, 201)) == [cmd.SendGo((1,), 2)]
    assert agent.state.restarts_used == 1


def test_a_restart_counts_for_its_window() -> None:
    agent = training(max_restarts=1)
    agent.state = replace(agent.state, restarts_window_s=60.0)

    def fails(number: int) -> FailureRecord:
        return only(agent.exit(1, -9), cmd.WriteFailure).failure

    def comes_back(number: int) -> None:
        next_generation(agent, number, lost={0: (1,)})
        agent.report(0, number - 1)
        agent.tell(evt.WorkerStarted(1, number, 200 + number))
        planned(agent)
        agent.tell(evt.HelloReceived(1, 200 + number))

    assert fails(1).restarts_left == 1
    comes_back(2)
    assert agent.state.restarts_used == 1
    agent.now_s += 59.0
    assert fails(2).restarts_left == 0
    comes_back(3)
    assert agent.state.restarts_used == 2  # another node would have ended the job
    agent.now_s += 2.0
    agent.tell(evt.Tick())
    assert agent.state.restarts_used == 1
    agent.now_s += 60.0
    assert fails(3).restarts_left == 1 and agent.state.restarted_s == ()


def test_the_survivor_of_another_node_stops_reports_and_goes_on() -> None:
    agent = training()
    assert only(agent.change(failures={1: failure("workers", 1, (0,))}), cmd.SendStop) == cmd.SendStop(
        (0, 1), 1, "a failure was reported")
    none_of(next_generation(agent, lost={1: (0,)}), cmd.WriteProgress, cmd.SendStop)
    assert agent.report(0, 1) == []
    progress = only(agent.report(1, 1, iteration=6), cmd.WriteProgress)
    assert [r["iteration"] for r in progress.reports] == [5, 6]
    assert planned(agent) == [cmd.SendGo((0, 1), 2)]
    assert agent.state.restarts_used == 0


def test_a_generation_that_comes_without_warning_stops_first() -> None:
    agent = training()
    stop = only(next_generation(agent, lost={1: (0,)}), cmd.SendStop)
    assert (stop.generation, stop.why) == (1, "generation 2")
    none_of(planned(agent), cmd.SendGo)  # nobody goes without a report
    assert agent.report(1, 1) == [cmd.SendGo((1,), 2)]


def test_what_a_worker_held_that_has_died_since_is_not_told() -> None:
    agent = training()
    next_generation(agent, lost={1: (0,)})
    agent.report(0, 1)
    only(agent.exit(0, -9), cmd.WriteFailure)
    none_of(agent.report(1, 1), cmd.WriteProgress)


def test_a_report_of_another_generation_is_ignored() -> None:
    agent = training()
    agent.change(failures={1: failure("node", 1)})
    assert agent.report(0, 7) == [] and agent.state.workers[0].stopped == 0


def test_news_of_a_process_that_was_replaced_is_ignored() -> None:
    agent = training()
    agent.exit(1, -9)
    next_generation(agent, lost={0: (1,)})
    agent.tell(evt.WorkerStarted(1, 2, 201))
    before = agent.state.workers[1]
    agent.tell(evt.HelloReceived(1, 101), evt.ReportReceived(1, 101, 0, {}), evt.WorkerUnfit(1, 101, "x"))
    agent.exit(1, 1, pid=101)
    assert agent.state.workers[1] == before and before.alive


def test_a_death_that_the_next_generation_does_not_know_is_reported_again() -> None:
    agent = training()
    agent.exit(1, -9)
    assert len(agent.given) == 1
    commands = next_generation(agent, lost={1: (0,)})  # made before it was known here
    assert only(commands, cmd.WriteFailure).failure.local_ranks == (1,)
    none_of(commands, cmd.StartWorkers)


def test_a_generation_that_was_missed_has_replaced_a_worker() -> None:
    """Its death was told, and generation 2 was to replace it; this node sees only the third."""
    agent = training()
    agent.exit(1, -9)
    agent.change(failures={0: failure("workers", 0, (1,))})
    agent.report(0, 1)
    third = replace(generation(3, "replace", lost={1: (0, 1)}, store_slot=1), replaced={0: {1: 2}})
    commands = agent.change(generation=third, generation_revision=30, plan=None, store=None, failures={})
    none_of(commands, cmd.WriteFailure)
    assert only(commands, cmd.StartWorkers) == cmd.StartWorkers((1,), 3, True)
    assert [r["status"] for r in only(commands, cmd.WriteProgress).reports] == ["holding", "fresh"]
    assert agent.state.restarts_used == 1
    agent.tell(evt.WorkerStarted(1, 3, 201))
    # What generation 2 has replaced is not this one.
    assert only(agent.exit(1, -9), cmd.WriteFailure).failure.local_ranks == (1,)
    fourth = replace(third, number=4, replaced={0: {1: 2}})
    commands = agent.change(generation=fourth, generation_revision=40, failures={})
    assert only(commands, cmd.WriteFailure).failure.exits[0].pid == 201
    none_of(commands, cmd.StartWorkers)


def test_deaths_add_up() -> None:
    agent = training()
    assert only(agent.exit(1, -9), cmd.WriteFailure).failure.local_ranks == (1,)
    assert only(agent.exit(0, 1), cmd.WriteFailure).failure.local_ranks == (0, 1)
    assert agent.tell(evt.Tick()) == []


# ---- a second failure, at every step ----


@pytest.mark.parametrize("step", range(8))
def test_a_second_failure_at_any_step_of_a_recovery(step: int) -> None:
    """The replacement dies, too, after *step* steps; in generation 3 everything is as if it had died in 1."""
    agent = training()
    script: list[Callable[[], object]] = [
        lambda: agent.change(failures={1: failure("workers", 1, (0,))}),
        lambda: agent.report(0, 1),
        lambda: agent.report(1, 1),
        lambda: next_generation(agent, lost={1: (0,)}),
        lambda: planned(agent),
        lambda: agent.tell(evt.WorkerResumed(0, 100, 2, 5, {"regroup": 0.5})),
        lambda: agent.tell(evt.WorkerResumed(1, 101, 2, 5, {"regroup": 0.2})),
    ]
    for action in script[:step]:
        action()
    agent.given.clear()
    entered = {w.current for w in agent.state.workers.values()}
    assert entered == ({1} if step < 5 else {2})
    next_generation(agent, 3, lost={1: (0,)})
    for local_rank in (0, 1):
        worker = agent.state.workers[local_rank]
        if worker.stopped != worker.current:
            assert worker.stop_sent == worker.current
            agent.report(local_rank, worker.current)
    assert only(agent.given, cmd.WriteProgress).generation == 3
    assert planned(agent) == [cmd.SendGo((0, 1), 3)]
    stops = [c for c in agent.given if isinstance(c, cmd.SendStop)]
    assert [s.generation for s in stops] == ([1] if step == 0 else [2] if step >= 5 else [])


def test_a_replacement_that_dies_before_it_speaks_is_replaced() -> None:
    agent = training()
    agent.exit(1, -9)
    agent.change(failures={0: failure("workers", 0, (1,))})
    agent.report(0, 1)
    next_generation(agent, lost={0: (1,)})
    agent.tell(evt.WorkerStarted(1, 2, 201))
    record = only(agent.exit(1, -11), cmd.WriteFailure)
    assert (record.generation, record.failure.local_ranks, record.failure.restarts_left) == (2, (1,), 2)
    commands = next_generation(agent, 3, lost={0: (1,)})
    assert only(commands, cmd.StartWorkers).local_ranks == (1,)
    assert only(commands, cmd.WriteProgress).reports[1]["status"] == "fresh"
    assert agent.state.restarts_used == 2


def test_a_worker_that_could_not_be_started_is_a_failure_with_that_reason() -> None:
    agent = Agent()
    agent.see(view(tracked=True, store=STORE))
    agent.tell(evt.WorkerStarted(0, 1, 100), evt.HelloReceived(0, 100))
    no_room = WorkerExit(1, 1, 0, 127, "h", "it cannot be started: [Errno 24] Too many open files")
    told = only(agent.tell(evt.WorkerExited(no_room)), cmd.WriteFailure).failure
    assert (told.kind, told.local_ranks) == ("workers", (1,))
    assert told.evidence == "rank 1 on h: it cannot be started: [Errno 24] Too many open files"
    assert only(next_generation(agent, lost={0: (1,)}), cmd.StartWorkers).local_ranks == (1,)


# ---- nodes ----


def test_a_lost_peer_is_reported_once_per_generation() -> None:
    agent = training()
    record = only(agent.tell(evt.PeerLost("n1.1", "gone")), cmd.WriteFailure).failure
    assert (record.kind, record.slot, record.incarnation, record.evidence) == ("node", 1, "n1.1", "gone")
    assert agent.tell(evt.PeerLost("n1.1", "gone"), evt.Tick()) == []
    known = training()
    known.change(failures={1: failure("node", 1)})
    none_of(known.tell(evt.PeerLost("n1.1", "gone")), cmd.WriteFailure)
    worse = training()  # what was reported of its workers does not cover the node
    worse.change(failures={1: failure("workers", 1, (0,))})
    assert only(worse.tell(evt.PeerLost("n1.1", "gone")), cmd.WriteFailure).failure.kind == "node"


def test_a_loss_that_could_not_be_told_in_time_is_told_again_when_it_is_seen_again() -> None:
    agent = training()
    lost = evt.PeerLost("n1.1", "silent")
    assert only(agent.tell(lost), cmd.WriteFailure)
    assert agent.tell(evt.PeerDoubted("n1.1")) == []
    assert agent.tell(evt.Tick()) == []  # it is not taken for lost any more
    assert only(agent.tell(lost), cmd.WriteFailure).failure.slot == 1
    agent.change(nodes=view(names=("n0", "n1", "n2")).nodes)
    spare = evt.PeerLost("n2.1", "silent")
    assert only(agent.tell(spare), cmd.ForgetSpare)
    assert agent.tell(evt.PeerDoubted("n2.1")) == [] and only(agent.tell(spare), cmd.ForgetSpare)


def test_what_a_spare_once_saw_is_not_told_when_it_gets_a_slot() -> None:
    agent = Agent("n2")
    agent.see(view(names=("n0", "n1", "n2"), tracked=True, store=STORE))
    assert agent.tell(evt.PeerLost("n0.1", "silent for 0.41 s")) == []
    agent.now_s += 1.0
    assert agent.tell(evt.Tick()) == [cmd.LookAgain("n0.1")]
    assert agent.tell(evt.Tick()) == []
    agent.now_s += 7900.0
    taken = next_generation(agent, slots=("n0", "n2"), lost={1: (0, 1)})
    none_of(taken, cmd.WriteFailure)
    assert only(agent.tell(evt.PeerLost("n0.1", "silent")), cmd.WriteFailure).failure.slot == 0


def test_evidence_is_as_old_as_what_was_seen() -> None:
    """It waited for this node's own loop, or for another generation."""
    late = training()
    assert late.tell(evt.PeerLost("n1.1", "gone", age_s=1.0)) == [cmd.LookAgain("n1.1")]
    agent = training()
    only(agent.tell(evt.PeerLost("n1.1", "gone", age_s=0.1)), cmd.WriteFailure)
    agent.now_s += 0.3
    again = next_generation(agent, slots=("n0", "n1"))  # of another failure; the first was fenced off
    assert only(again, cmd.WriteFailure).failure.incarnation == "n1.1"
    agent.now_s += 0.3
    again = next_generation(agent, 3, slots=("n0", "n1"))
    none_of(again, cmd.WriteFailure)
    assert only(again, cmd.LookAgain).incarnation == "n1.1"


def test_what_was_told_is_kept_for_as_long_as_it_stands() -> None:
    agent = training()
    agent.tell(evt.PeerLost("n1.1", "gone"))
    agent.change(failures={1: failure("node", 1)})
    agent.now_s += 3.0
    none_of(agent.tell(evt.Tick()), cmd.LookAgain, cmd.WriteFailure)
    none_of(next_generation(agent, slots=("n0", "n1")), cmd.WriteFailure)


def test_a_lost_spare_is_forgotten() -> None:
    agent = Agent()
    agent.see(view(names=("n0", "n1", "n2"), store=STORE))
    assert agent.tell(evt.PeerLost("n2.1", "gone")) == [cmd.ForgetSpare("n2", "n2.1")]


def test_before_the_first_generation_a_lost_coordinator_is_forgotten() -> None:
    """Of the others the lease tells: alive after all, they would not see that they were forgotten."""
    agent = Agent()
    agent.see(view(names=("n0", "n1", "n2"), generation=None, plan=None, coordinator=CoordinatorRecord("n1", "n1.1")))
    assert agent.tell(evt.PeerLost("n2.1", "gone")) == []
    assert agent.tell(evt.PeerLost("n1.1", "gone")) == [cmd.ForgetSpare("n1", "n1.1")]


def test_a_spare_takes_a_slot() -> None:
    spare = Agent("n2")
    spare.see(view(names=("n0", "n1", "n2"), store=STORE))
    commands = next_generation(spare, slots=("n0", "n2"), lost={1: (0, 1)})
    assert only(commands, cmd.StartWorkers) == cmd.StartWorkers((0, 1), 2, True)
    assert [r["rank"] for r in only(commands, cmd.WriteProgress).reports] == [2, 3]
    assert only(commands, cmd.HostStore).generation == 2


def test_a_node_that_was_replaced_comes_back_as_a_spare() -> None:
    agent = training()
    agent.seen = replace(agent.seen, nodes={n: node(n) for n in ("n0", "n1", "n2")})
    assert "slot" in only(next_generation(agent, slots=("n2", "n1")), cmd.Rejoin).why
    assert agent.tell(evt.Tick()) == []


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_node_whose_workers_fail_too_often_leaves_when_another_takes_its_slot(restarts: int) -> None:
    """As a spare it would be chosen again, and the job would go round for ever."""
    agent = training(max_restarts=restarts)
    lost = only(agent.exit(0, 3), cmd.WriteFailure).failure
    assert lost.restarts_left == restarts
    if restarts:
        next_generation(agent, lost={0: (0,)})
        agent.start([0], first_pid=200)
        lost = only(agent.exit(0, 3), cmd.WriteFailure).failure
        assert lost.restarts_left == 0
    number = agent.state.view.number + 1
    taken = view(names=("n0", "n1", "n2")).nodes
    new = generation(number, "replace", slots=("n2", "n1"), lost={0: (0, 1)})
    commands = agent.change(generation=new, generation_revision=10 * number, nodes=taken, plan=None, failures={})
    left = only(commands, cmd.LeaveJob).result
    assert left.state == "failed" and [e.exit_code for e in left.exits] == [3] and "--max-restarts" in left.why
    none_of(commands, cmd.Rejoin)


def test_a_node_without_a_record_comes_back_even_if_nobody_took_its_slot() -> None:
    agent = training()
    commands = agent.change(nodes={"n1": node("n1")}, failures={0: failure("node", 0)})
    assert "took it for lost" in only(commands, cmd.Rejoin).why
    spare = Agent("n2")
    spare.see(view(names=("n0", "n1", "n2"), store=STORE))
    assert only(spare.change(nodes={n: node(n) for n in ("n0", "n1")}), cmd.Rejoin)


def test_a_node_whose_lease_is_gone_keeps_its_workers_and_asks_for_another() -> None:
    agent = training()
    both = agent.seen.nodes
    assert agent.change(nodes={"n1": both["n1"]}) == [cmd.Reclaim()]
    assert agent.tell(evt.Tick()) == []
    assert agent.exit(1, -9) == []  # nobody can be told now; it is not forgotten
    assert agent.change(nodes=both) != []
    lost = only(agent.tell(evt.PlaceReclaimed()), cmd.WriteFailure).failure
    assert lost.kind == "workers" and lost.local_ranks == (1,)
    # Once it is back the next loss is another one.
    assert agent.change(nodes={"n1": both["n1"]}) == [cmd.Reclaim()]
    # Accused meanwhile: it may only come back as a spare.
    assert "took it for lost" in only(agent.change(failures={0: failure("node", 0)}), cmd.Rejoin).why


def test_what_was_refused_while_the_lease_was_gone_is_written_again() -> None:
    agent = training()
    commands = next_generation(agent, store_slot=0)
    assert only(commands, cmd.HostStore).generation == 2
    both = agent.seen.nodes
    agent.report(0, 1)
    assert only(agent.report(1, 1), cmd.WriteProgress).slot == 0
    agent.change(nodes={"n1": both["n1"]})
    agent.change(nodes=both)
    again = agent.tell(evt.PlaceReclaimed())
    assert only(again, cmd.HostStore).generation == 2 and only(again, cmd.WriteProgress).generation == 2
    agent.change(store=STORE, progress={0: ProgressRecord(0, "n0.1", ())})
    none_of(agent.tell(evt.PlaceReclaimed()), cmd.HostStore, cmd.WriteProgress)


def test_a_peer_without_a_record_stops_nobody_until_it_is_called_lost() -> None:
    agent = training()
    assert agent.change(nodes={"n0": node("n0")}) == []
    assert only(agent.change(failures={1: failure("node", 1)}), cmd.SendStop).local_ranks == (0, 1)


def test_a_late_view_changes_nothing() -> None:
    agent = training()
    assert agent.tell(evt.ViewChanged(View(revision=0))) == [] and agent.state.view == agent.seen


# ---- stop deadline ----


def test_a_worker_that_does_not_stop_in_time_is_killed_and_then_lost() -> None:
    agent = training()
    agent.change(failures={1: failure("node", 1)})
    agent.report(0, 1)
    agent.now_s += 4.9
    assert agent.tell(evt.Tick()) == []
    agent.now_s += 0.1
    kill = only(agent.tell(evt.Tick()), cmd.KillWorkers)
    assert kill.local_ranks == (1,) and not kill.graceful and "--stop-deadline" in kill.why
    agent.now_s += 100
    assert agent.tell(evt.Tick()) == []
    none_of(next_generation(agent, lost={1: (0, 1)}), cmd.WriteProgress)
    assert only(agent.exit(1, -9), cmd.WriteFailure).failure.local_ranks == (1,)


def test_an_agent_that_was_frozen_hears_first_what_its_workers_have_said() -> None:
    agent = training()
    agent.change(failures={1: failure("node", 1)})
    agent.report(0, 1)
    agent.now_s += 100.0
    assert agent.tell(evt.StoodStill(99.0)) == []
    agent.now_s += 3.9
    assert agent.tell(evt.Tick()) == []
    agent.now_s += 0.1
    assert only(agent.tell(evt.Tick()), cmd.KillWorkers).local_ranks == (1,)


# ---- restart of all ----


def restart(agent: Agent, number: int = 2) -> list[cmd.Command]:
    new = generation(number, "restart", epoch=number, num_restarts=1, store_slot=1)
    return agent.change(generation=new, generation_revision=20, plan=PlanRecord(number, {"kind": "fresh"}, "w"),
                        store=None, failures={}, finished={}, exited={})


def test_an_unfit_worker_asks_for_a_restart_of_all() -> None:
    agent = training()
    record = only(agent.tell(evt.WorkerUnfit(0, 100, "cut outside")), cmd.WriteFailure).failure
    assert (record.kind, record.local_ranks) == ("restart", ()) and "rank 0: cut outside" in record.evidence
    commands = agent.change(failures={0: record}) + restart(agent)
    kill = only(commands, cmd.KillWorkers)
    assert kill.local_ranks == (0, 1) and kill.graceful
    none_of(agent.change(store=STORE), cmd.StartWorkers)  # not beside the old ones
    assert agent.exit(0, -15) == []
    started = only(agent.exit(1, -15), cmd.StartWorkers)
    assert (started.local_ranks, started.generation, started.warm) == ((0, 1), 2, False)
    none_of(agent.given, cmd.WriteProgress)
    assert agent.state.restarts_used == 1


def test_a_worker_that_cannot_be_connected_asks_for_another_generation_of_the_same_processes() -> None:
    agent = training()
    assert agent.tell(evt.WorkerApart(0, 100, 0, "late")) == []  # of a generation that is over
    record = only(agent.tell(evt.WorkerApart(0, 100, 1, "store at h:1: reset")), cmd.WriteFailure).failure
    assert (record.kind, record.local_ranks) == ("again", ())
    assert record.evidence == "rank 0 asks for another try: store at h:1: reset"
    stop = only(agent.change(failures={0: record}), cmd.SendStop)
    assert stop.local_ranks == (0, 1)
    next_generation(agent)
    agent.report(0, 1)
    assert only(agent.report(1, 1), cmd.WriteProgress).generation == 2
    assert only(planned(agent), cmd.SendGo).local_ranks == (0, 1)
    none_of(agent.given, cmd.StartWorkers, cmd.KillWorkers)
    assert agent.state.restarts_used == 0


def test_a_worker_that_another_start_would_not_help_says_so() -> None:
    agent = training()
    record = only(agent.tell(evt.WorkerUnfit(0, 100, "replicas differ", True)), cmd.WriteFailure).failure
    assert (record.kind, record.is_final) == ("restart", True)


def test_a_worker_that_takes_no_message_is_ended_as_one_that_hangs() -> None:
    agent = training()
    kill = only(agent.tell(evt.WorkerDeaf(1, agent.pid(1), 10.0)), cmd.KillWorkers)
    assert kill == cmd.KillWorkers((1,), "it hangs: it has taken no message for 10 s", graceful=False)
    assert only(agent.exit(1, -9), cmd.WriteFailure).failure.local_ranks == (1,)


def test_a_restart_waits_for_the_new_store() -> None:
    agent = Agent()
    agent.see(view(tracked=False, store=STORE))
    agent.tell(evt.WorkerStarted(0, 1, 100), evt.WorkerStarted(1, 1, 101))
    agent.exit(0, 1)
    assert only(restart(agent), cmd.KillWorkers).local_ranks == (1,)
    none_of(agent.exit(1, -15), cmd.StartWorkers)
    assert only(agent.change(store=STORE), cmd.StartWorkers).local_ranks == (0, 1)


def test_workers_that_were_done_are_restarted_and_their_old_end_does_not_count() -> None:
    agent = Agent()
    agent.see(view(tracked=False, store=STORE))
    agent.tell(evt.WorkerStarted(0, 1, 100), evt.WorkerStarted(1, 1, 101))
    assert only(agent.exit(0, 0) + agent.exit(1, 0), cmd.WriteExited).generation == 1
    none_of(restart(agent), cmd.WriteExited, cmd.WriteFinished)
    assert only(agent.change(store=STORE), cmd.StartWorkers).local_ranks == (0, 1)
    agent.tell(evt.WorkerStarted(0, 2, 200), evt.WorkerStarted(1, 2, 201))
    assert only(agent.exit(0, 0) + agent.exit(1, 0), cmd.WriteExited).generation == 2


def test_a_restart_of_the_job_finds_no_process_that_is_older() -> None:
    """A worker that is ordered but not there yet is outdated, too."""
    agent = training()
    agent.exit(1, -9)
    agent.change(failures={0: failure("workers", 0, (1,))})
    agent.report(0, 1)
    next_generation(agent, lost={0: (1,)})  # rank 1 is on its way
    assert only(restart(agent, 3), cmd.KillWorkers).local_ranks == (0, 1)
    agent.tell(evt.WorkerStarted(1, 2, 201))
    assert agent.state.workers[1].killed  # the shell kills it as it appears
    agent.change(store=STORE)
    none_of(agent.exit(0, -15), cmd.StartWorkers)
    assert only(agent.exit(1, -9), cmd.StartWorkers).local_ranks == (0, 1)


# ---- the end ----


def test_release_and_end() -> None:
    agent = training()
    assert agent.finish(0, 1) == []
    assert only(agent.finish(1, 1), cmd.WriteFinished).record == FinishedRecord(
        0, "n0.1", {0: {"iteration": 9}, 1: {"iteration": 9}})
    assert only(agent.change(released=True), cmd.SendRelease).local_ranks == (0, 1)
    assert agent.exit(0, 0) == []
    assert only(agent.exit(1, 0), cmd.WriteExited).slot == 0
    assert agent.change(result=ResultRecord("succeeded", "w")) == [cmd.EndJob()]
    assert agent.tell(evt.Tick()) == []


def test_one_that_waits_at_its_end_is_called_back_by_a_new_generation_only() -> None:
    agent = training()
    agent.finish(0, 1)
    agent.finish(1, 1)
    # A release may cross a failure: a stopped worker could not be released any more.
    none_of(agent.change(failures={1: failure("workers", 1, (0,))}), cmd.SendStop)
    failures = agent.seen.failures
    commands = next_generation(agent, lost={1: (0,)})
    assert only(commands, cmd.SendStop).local_ranks == (0, 1)
    none_of(commands, cmd.WriteFinished)  # the end of generation 1 is none of generation 2
    agent.report(0, 1, 9)
    agent.report(1, 1, 9)
    planned(agent)
    assert only(agent.finish(0, 2) + agent.finish(1, 2), cmd.WriteFinished).generation == 2
    other = training()
    other.finish(0, 1)
    other.finish(1, 1)
    other.change(failures=failures)
    assert only(other.change(released=True), cmd.SendRelease).local_ranks == (0, 1)


def test_an_end_that_crosses_a_stop_does_not_count() -> None:
    agent = training()
    agent.change(failures={1: failure("node", 1)})
    assert agent.finish(0, 1) == [] and agent.state.workers[0].finished is None


def test_ends_are_told_although_a_node_was_lost_after_the_release() -> None:
    agent = training()
    agent.finish(0, 1)
    agent.finish(1, 1)
    agent.change(released=True)
    agent.change(nodes={"n0": node("n0")})
    assert only(agent.exit(0, 0) + agent.exit(1, 0), cmd.WriteExited)


def test_a_crash_after_the_release_is_told() -> None:
    agent = training()
    agent.finish(0, 1)
    agent.finish(1, 1)
    agent.change(released=True)
    assert only(agent.exit(0, 1), cmd.WriteFailure).failure.kind == "workers"


def test_one_that_left_before_the_end_makes_a_recovery_in_place_impossible() -> None:
    agent = training()
    agent.exit(1, 0)
    agent.change(failures={1: failure("node", 1)})
    agent.report(0, 1)
    record = only(next_generation(agent, lost={1: (0, 1)}), cmd.WriteFailure).failure
    assert record.kind == "restart" and "had exited" in record.evidence


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_replacement_that_ends_well_without_a_word_is_no_replacement(is_planned: bool) -> None:
    """A script that finds nothing to do, for one: the others would wait for it."""
    agent = training()
    agent.exit(0, -9)
    next_generation(agent, lost={0: (0,)})
    agent.tell(evt.WorkerStarted(0, 2, 200))
    agent.report(1, 1)
    if is_planned:
        planned(agent)
    assert only(agent.exit(0, 0, pid=200), cmd.WriteFailure).failure.kind == "restart"


def test_resumed_is_written_once_with_the_slowest_times() -> None:
    agent = training()
    next_generation(agent, lost={1: (0,)})
    agent.report(0, 1)
    agent.report(1, 1)
    planned(agent)
    assert agent.tell(evt.WorkerResumed(0, 100, 2, 5, {"transfer": 0.5, "verify": 0.1})) == []
    resumed = only(agent.tell(evt.WorkerResumed(1, 101, 2, 6, {"transfer": 0.2, "verify": 0.3})), cmd.WriteResumed)
    assert (resumed.iteration, dict(resumed.phases_s)) == (6, {"transfer": 0.5, "verify": 0.3})


def test_nothing_is_started_after_the_result() -> None:
    agent = Agent()
    assert agent.see(view(result=ResultRecord("stopped", "w"))) == [cmd.EndJob()]
    assert agent.state.workers == {}


def test_phases_follow_the_picture() -> None:
    agent = Agent()
    agent.see(view(store=STORE))
    assert agent.state.workers[0].phase == "started"
    agent.start()
    assert agent.state.workers[0].phase == "running"
    agent.change(failures={1: failure("node", 1)})
    assert agent.state.workers[0].phase == "stopping"
    agent.report(0, 1)
    assert agent.state.workers[0].phase == "stopped"
    agent.exit(0, 1)
    assert agent.state.workers[0].phase == "exited"


# ---- records that others have damaged ----


def test_what_was_written_is_written_again_where_somebody_put_something_else() -> None:
    agent = training()
    told = agent.exit(0, -9)
    assert only(told, cmd.WriteFailure).failure.slot == 0
    none_of(agent.tell(evt.Tick()), cmd.WriteFailure)
    again = agent.change(damaged={"failure/1/0": Damaged(77, "cannot be read")})
    assert only(again, cmd.WriteFailure) == only(told, cmd.WriteFailure)
    none_of(agent.tell(evt.Tick()), cmd.WriteFailure)
    once_more = agent.change(damaged={"failure/1/0": Damaged(78, "cannot be read")})
    assert only(once_more, cmd.WriteFailure) == only(told, cmd.WriteFailure)


def test_the_address_of_a_store_is_told_again() -> None:
    agent = Agent()
    agent.see(view(tracked=True, store=None))
    only(agent.given, cmd.HostStore)
    assert only(agent.change(damaged={"store/1": Damaged(77, "cannot be read")}), cmd.HostStore).generation == 1


def test_a_job_whose_record_was_removed_ends_with_a_sentence() -> None:
    """Nobody would decide anything any more; it must not wait for ever for that."""
    agent = training()
    end = only(agent.change(job=None), cmd.LeaveJob).result
    assert end.state == "stopped" and "the record of the job was removed" in end.why


def test_that_the_script_is_recovered_in_place_is_written_again_when_somebody_removed_it() -> None:
    agent = Agent()
    agent.see(view(tracked=False, store=STORE))
    agent.tell(evt.WorkerStarted(0, 1, 100))
    only(agent.tell(evt.HelloReceived(0, 100)), cmd.WriteTracked)
    none_of(agent.change(tracked=True), cmd.WriteTracked)
    only(agent.change(tracked=False), cmd.WriteTracked)
    none_of(agent.change(), cmd.WriteTracked)


# ---- log groups ----


def test_workers_are_told_their_log_group_before_they_begin() -> None:
    agent = Agent()
    job = JobRecord(2, 2, "command", 3, log_groups=((0, 1),))
    agent.see(view(tracked=True, store=STORE, job=job))
    agent.start()
    told = [c for c in agent.given if isinstance(c, (cmd.SendLogGroup, cmd.SendGo))]
    assert told == [cmd.SendLogGroup((0,), (0, 1, 2, 3)), cmd.SendGo((0,), 1), cmd.SendLogGroup((1,), (0, 1, 2, 3)),
                    cmd.SendGo((1,), 1)]  # fmt: skip


def test_living_workers_are_started_again_when_their_group_goes_back() -> None:
    agent = training()
    new = replace(generation(2, "replace", store_slot=1), epochs={0: 2})
    commands = agent.change(generation=new, generation_revision=20, plan=None, store=None, failures={}, progress={})
    assert only(commands, cmd.KillWorkers).local_ranks == (0, 1)
    none_of(commands, cmd.SendStop, cmd.StartWorkers, cmd.WriteProgress)
    none_of(agent.exit(0, -15), cmd.WriteFailure, cmd.StartWorkers)
    commands = agent.exit(1, -15)
    assert only(commands, cmd.StartWorkers) == cmd.StartWorkers((0, 1), 2, warm=True)
    none_of(commands, cmd.WriteFailure)
    assert only(commands, cmd.WriteProgress).reports == tuple({"rank": r, "status": "fresh"} for r in (0, 1))
    assert agent.state.restarts_used == 0


# ---- ranks that never join ----


def began(hello: Sequence[int], silent: Sequence[int]) -> Agent:
    """Generation 1: workers that have said hello, and others that have not."""
    agent = Agent()
    agent.see(view(tracked=True, store=STORE))
    agent.start(ranks=hello)
    agent.tell(*(evt.WorkerStarted(rank, 1, 100 + rank) for rank in silent))
    return agent


def test_a_rank_that_ends_before_it_has_joined_ends_the_job_and_is_named() -> None:
    """The others wait for it in `swift_agent.init()`, for ever; started again it would do the same."""
    told = only(began((0,), (1,)).exit(1, 0), cmd.WriteFailure).failure
    assert told.kind == "restart" and told.is_final
    assert told.evidence == (
        "ranks [1] exited with code 0, before swift_agent.init() or without having come to the end of the training, "
        "and other ranks wait for them: have all ranks of the job call init() and end alike, or none call it"
    )


def test_a_rank_of_another_node_that_has_never_joined_is_named_by_those_that_wait() -> None:
    agent = training()
    none_of(agent.change(finished={1: FinishedRecord(1, "n1.1", {})}), cmd.WriteFailure)
    told = only(agent.change(exited={1: ExitedRecord(1, "n1.1")}), cmd.WriteFailure).failure
    assert told.is_final and told.slot == 0
    assert told.evidence.startswith("ranks [2, 3] exited with code 0, before swift_agent.init() or without having come")
    # They have said that they have come to the end.
    agent = training()
    done = FinishedRecord(1, "n1.1", {2: {}, 3: {}})
    none_of(agent.change(finished={1: done}, exited={1: ExitedRecord(1, "n1.1")}), cmd.WriteFailure)


def test_a_rank_that_has_never_joined_holds_up_no_recovery() -> None:
    """What waited for it was lost: it says nothing that a plan could be made of."""
    agent = began((), (0, 1))
    none_of(agent.exit(1, 0), cmd.WriteFailure)
    told = only(next_generation(agent, slots=("n0", "n1")), cmd.WriteFailure).failure
    assert told.kind == "restart" and not told.is_final
    assert told.evidence == "ranks [1] had exited before the job was finished"


def test_ranks_that_all_end_before_they_join_have_finished() -> None:
    """A script that tracks nothing, or finds that all is done already."""
    agent = began((), (0, 1))
    commands = agent.exit(0, 0) + agent.exit(1, 0)
    none_of(commands, cmd.WriteFailure)
    assert only(commands, cmd.WriteFinished).record.checksums == {}


def test_a_spare_tells_of_an_agent_that_is_dead_and_of_nobody_that_is_silent() -> None:
    agent = Agent("n2")
    agent.see(view(names=("n0", "n1", "n2"), tracked=True, store=STORE))
    none_of(agent.tell(evt.PeerLost("n0.1", "it is silent")), cmd.WriteFailure)
    order = only(agent.tell(evt.PeerLost("n1.1", "its kernel refuses connections", is_dead=True)), cmd.WriteFailure)
    told = order.failure
    assert (order.generation, told.kind, told.slot, told.incarnation) == (1, "node", 1, "n1.1")
    assert told.is_dead and told.is_empty and told.reporter == "n2"
    none_of(agent.change(failures={1: told}), cmd.WriteFailure)  # once


def test_who_has_no_slot_any_more_holds_none() -> None:
    agent = training()
    assert state.holds_slot(agent.state) and state.holds_slot(Agent().state)
    next_generation(agent, slots=("n2", "n1"))
    assert not state.holds_slot(agent.state)
