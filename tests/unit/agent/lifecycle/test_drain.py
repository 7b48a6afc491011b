"""The agent in a drain, the worker that waits for the boundary, and the speed of the job."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from swift_agent.agent.lifecycle import commands as cmd
from swift_agent.agent.lifecycle import drain, rate, state
from swift_agent.agent.lifecycle import events as msg
from swift_agent.wire import messages as wire
from swift_agent.wire.channel import WorkerChannel
from swift_agent.worker.line.agent_line import Supervisor
from swift_recovery.planning.plan import Plan
from swift_rendezvous.roster.records import DrainRecord, PauseRecord, PlanRecord, ResultRecord, TakenRecord
from tests.support.records import failure, generation, node, owner, view
from tests.unit.agent.lifecycle.test_machine import STORE, Agent, next_generation, none_of, only, training

ORDER = {"n0": DrainRecord("n0", "n0.1", "maintenance", 1.0)}
HANDS_OVER = Plan("copy", "w", 7, handovers=(0, 1)).to_json()


def paused() -> Agent:
    """The workers of n0 are asked where they are."""
    agent = training()
    names = ("n0", "n1", "n2")
    asked = agent.change(nodes={name: node(name) for name in names}, drains=ORDER, pause=PauseRecord())
    assert asked == [cmd.SendPause((0, 1), 1)]
    return agent


def parked() -> Agent:
    agent = paused()
    for rank in (0, 1):
        agent.tell(msg.WorkerPromised(rank, agent.pid(rank), 1, 6 + rank))
    agent.change(pause=PauseRecord(7))
    for rank in (0, 1):
        agent.tell(msg.WorkerParked(rank, agent.pid(rank), 1))
    agent.given.clear()
    return agent


def handing_over() -> Agent:
    """Generation 2: n2 has the slot; the workers of n0 have said what they hold."""
    agent = parked()
    commands = next_generation(agent, slots=("n2", "n1"), handover={0: owner("n0")}, lost={0: (0, 1)})
    assert commands == [cmd.SendStop((0, 1), 1, "generation 2")]
    agent.report(0, 1, 7)
    said = only(agent.report(1, 1, 7), cmd.WriteHandover)
    assert (said.generation, said.slot) == (2, 0)
    assert [(report["rank"], report["iteration"]) for report in said.reports] == [(0, 7), (1, 7)]
    return agent


# ---- the agent ----


def test_a_slot_speaks_once_all_its_workers_have() -> None:
    agent = paused()
    assert agent.tell(msg.WorkerPromised(1, agent.pid(1), 1, 9)) == []
    assert agent.tell(msg.WorkerPromised(0, agent.pid(0), 1, 8)) == [cmd.WritePosition(1, 0, 9)]
    assert agent.change(pause=PauseRecord(11)) == [cmd.SendBoundary((0, 1), 1, 11)]
    assert agent.tell(msg.WorkerParked(0, agent.pid(0), 1)) == []
    assert agent.tell(msg.WorkerParked(1, agent.pid(1), 1)) == [cmd.WriteParked(1, 0)]


def test_a_failure_on_the_way_ends_the_pause() -> None:
    agent = paused()
    commands = agent.change(failures={1: failure("workers", 1, (0,))}, pause=PauseRecord(7))
    assert commands == [cmd.SendStop((0, 1), 1, "a failure was reported")]


def test_a_drained_node_hands_over_and_leaves_when_its_slot_trains() -> None:
    agent = handing_over()
    assert agent.change(plan=PlanRecord(2, HANDS_OVER, "w"), store=STORE) == [cmd.SendLeave((0, 1), 2)]
    gone = only(agent.change(taken={0: TakenRecord(0, "n2.1")}), cmd.LeaveJob).result
    assert gone.state == "succeeded" and "n0 was drained: n2 has slot 0" in gone.why


def test_a_drained_node_that_is_not_needed_waits_with_its_state() -> None:
    agent = handing_over()
    copied = Plan("copy", "w", 7, sources={0: 2, 1: 3}).to_json()
    assert agent.change(plan=PlanRecord(2, copied, "w"), store=STORE) == []


@pytest.mark.parametrize("has_sent", [False, True])
def test_the_slot_comes_back(has_sent: bool) -> None:
    agent = handing_over()
    if has_sent:
        agent.change(plan=PlanRecord(2, HANDS_OVER, "w"), store=STORE)
    commands = next_generation(agent, 3)
    if has_sent:
        assert commands == [cmd.SendStop((0, 1), 2, "generation 3")]
        agent.report(0, 2, 7)
        commands = agent.report(1, 2, 7)
    none_of(agent.given, cmd.StartWorkers, cmd.Rejoin, cmd.KillWorkers)
    assert len(only(commands, cmd.WriteProgress).reports) == 2
    assert only(agent.change(plan=PlanRecord(3, Plan("copy", "w", 7).to_json(), "w"), store=STORE), cmd.SendGo)


def noticed(agent: Agent) -> list[cmd.Command]:
    return agent.tell(msg.Noticed("SIGTERM", 20.0, agent.now_s + 20.0))


TOLD = {"n0": replace(ORDER["n0"], why="it got SIGTERM", signal="SIGTERM")}


def test_a_signal_is_told_to_the_others_and_makes_a_drain() -> None:
    agent = training()
    agent.change(nodes={name: node(name) for name in ("n0", "n1", "n2")}, tracked=True)
    assert noticed(agent) == [cmd.TellNotice("SIGTERM", 20.0)]
    assert agent.tell(msg.Tick()) == []  # once
    assert agent.change(drains=TOLD, pause=PauseRecord()) == [cmd.SendPause((0, 1), 1)]
    agent.now_s += 30.0
    assert agent.tell(msg.Tick()) == []  # on its way, it is not left
    said, left = agent.change(pause=PauseRecord(saves=True))  # which somebody should have ended by now
    assert isinstance(said, cmd.WriteFailure) and isinstance(left, cmd.LeaveJob)


def test_an_order_that_an_operator_has_given_becomes_a_notice() -> None:
    agent = training()
    agent.change(drains=ORDER, tracked=True)
    assert noticed(agent) == [cmd.TellNotice("SIGTERM", 20.0)]


def test_who_was_drained_because_of_a_signal_was_preempted() -> None:
    agent = handing_over()
    agent.change(drains=TOLD)
    assert noticed(agent) == []
    agent.change(plan=PlanRecord(2, HANDS_OVER, "w"), store=STORE)
    gone = only(agent.change(taken={0: TakenRecord(0, "n2.1")}), cmd.LeaveJob).result
    assert (gone.state, gone.cause) == ("stopped", "preempted") and "n0 was drained: n2 has slot 0" in gone.why


@pytest.mark.parametrize("in_hurry", [False, True])
def test_ctrl_c_ends_the_job_where_there_is_a_place(in_hurry: bool) -> None:
    for seen in (training().state.view, view(generation=None)):
        line, end = drain.end_of_signal(seen, "n0.1", "node n0 got SIGINT", in_hurry)
        assert line == "node n0 got SIGINT: the job ends here"
        assert end == ResultRecord("stopped", "node n0 got SIGINT", cause="operator")


def test_ctrl_c_on_a_spare_is_for_that_spare() -> None:
    line, end = drain.end_of_signal(training().state.view, "n2.1", "node n2 got SIGINT", False)
    assert line == "node n2 got SIGINT: this spare leaves, and the job goes on"
    assert end == ResultRecord("stopped", line, cause="operator")


def test_ctrl_c_on_a_node_that_hands_over_waits_for_that_once() -> None:
    seen = handing_over().state.view
    line, end = drain.end_of_signal(seen, "n0.1", "node n0 got SIGINT", False)
    assert end is None and "as soon as its successor has its state" in line and "Another signal" in line
    line, end = drain.end_of_signal(seen, "n0.1", "node n0 got SIGINT", True)
    assert end == ResultRecord("stopped", line, cause="operator") and "before its successor has its state" in line


def test_without_a_spare_it_says_in_the_end_that_it_is_lost() -> None:
    agent = training()
    agent.change(tracked=True)
    noticed(agent)
    agent.change(drains=TOLD)
    agent.now_s += 19.9
    assert agent.tell(msg.Tick()) == []
    agent.now_s += 0.1
    said, left = agent.tell(msg.Tick())
    assert isinstance(said, cmd.WriteFailure) and isinstance(left, cmd.LeaveJob)
    assert (said.failure.kind, said.failure.slot, said.failure.incarnation) == ("node", 0, "n0.1")
    assert said.failure.is_dead and said.failure.reporter == "n0"
    assert "no node took its slot within 20 s (--preempt-grace)" in said.failure.evidence
    assert (left.result.state, left.result.cause) == ("stopped", "preempted")


def test_a_script_that_tracks_nothing_has_nothing_to_hand_over() -> None:
    agent = training()
    assert none_of(noticed(agent), cmd.LeaveJob) is None
    agent.change(drains=TOLD, tracked=False)
    agent.now_s += 1.0
    none_of(agent.change(nodes={name: node(name) for name in ("n0", "n1", "n2")}), cmd.LeaveJob)  # all may be told
    agent.now_s += 2.0
    said, left = agent.change(nodes={name: node(name) for name in ("n0", "n1", "n2")})
    assert isinstance(said, cmd.WriteFailure) and "n0 got SIGTERM" in said.failure.evidence
    assert isinstance(left, cmd.LeaveJob)


def test_a_spare_leaves_at_once() -> None:
    agent = Agent("n2")
    agent.see(view(names=("n0", "n1", "n2")))
    left = only(noticed(agent), cmd.LeaveJob).result
    assert left.cause == "preempted" and "n2 got SIGTERM: it leaves the job" in left.why


def test_nothing_is_lost_any_more_once_the_workers_are_released() -> None:
    agent = training()
    agent.change(tracked=True, released=True)
    noticed(agent)
    agent.change(drains=TOLD)
    agent.now_s += 60.0
    none_of(agent.tell(msg.Tick()), cmd.LeaveJob, cmd.WriteFailure)


def test_a_drained_node_whose_worker_dies_leaves_at_once() -> None:
    agent = handing_over()
    gone = only(agent.exit(1, -9), cmd.LeaveJob).result
    assert gone.state == "succeeded" and "[1] were lost in the handover" in gone.why


def test_a_drained_node_whose_lease_is_gone_comes_back_with_what_it_hands_over() -> None:
    agent = handing_over()
    all_nodes, others = agent.seen.nodes, {name: node(name) for name in ("n1", "n2")}
    assert agent.change(nodes=others) == [cmd.Reclaim()]
    assert agent.tell(msg.Tick()) == []
    # The lease of the new owner is gone as well.
    assert agent.change(nodes={"n1": node("n1")}) == []
    agent.change(nodes=all_nodes)
    # What it wrote while it had none may have been refused.
    assert only(agent.tell(msg.PlaceReclaimed()), cmd.WriteHandover).slot == 0
    assert agent.change(plan=PlanRecord(2, HANDS_OVER, "w"), store=STORE) == [cmd.SendLeave((0, 1), 2)]
    gone = only(agent.change(taken={0: TakenRecord(0, "n2.1")}), cmd.LeaveJob).result
    assert "n2 has slot 0 and its state" in gone.why
    # A signal changes nothing of that, nor that one of its workers has ended: it comes back, and says so.
    agent = handing_over()
    agent.change(drains=TOLD)
    noticed(agent)
    assert agent.exit(1, -9) != []
    agent = handing_over()
    agent.change(drains=TOLD)
    noticed(agent)
    assert agent.change(nodes=others) == [cmd.Reclaim()] and agent.exit(1, -9) == []
    assert "were lost in the handover" in only(agent.change(nodes=all_nodes), cmd.LeaveJob).result.why


def test_a_drained_node_that_hands_over_is_not_forgotten_because_one_cannot_reach_it() -> None:
    def watching(**changes: Any) -> Agent:
        agent = training("n1")
        nodes = {name: node(name) for name in ("n0", "n1", "n2")}
        new = generation(2, "replace", ("n2", "n1"), handover={0: owner("n0")}, lost={0: (0, 1)})
        agent.change(nodes=nodes, generation=new, generation_revision=20, plan=None, **changes)
        return agent

    none_of(watching().tell(msg.PeerLost("n0.1", "silent")), cmd.ForgetSpare)
    dead = watching().tell(msg.PeerLost("n0.1", "refused", is_dead=True))
    assert only(dead, cmd.ForgetSpare) == cmd.ForgetSpare("n0", "n0.1")
    # Once it is not needed any more it is a node without a slot as any other.
    only(watching(taken={0: TakenRecord(0, "n2.1")}).tell(msg.PeerLost("n0.1", "silent")), cmd.ForgetSpare)


def test_whoever_is_drained_does_not_come_back_as_a_spare() -> None:
    # The generation in which it handed over has passed before it looked.
    agent = handing_over()
    none_of(next_generation(agent, 3, slots=("n2", "n1")), cmd.Rejoin)
    assert only(agent.given, cmd.LeaveJob).result.state == "succeeded"
    # Its record is gone, and nobody needs it any more.
    for over in ({"taken": {0: TakenRecord(0, "n2.1")}}, {"released": True}):
        agent = handing_over()
        only(agent.change(nodes={name: node(name) for name in ("n1", "n2")}, **over), cmd.LeaveJob)
    # It had no slot, or the job had none to give.
    names = {name: node(name) for name in ("n0", "n1", "n2")}
    for number in (generation(slots=("n1", "n2")), None):
        spare = Agent()
        only(spare.see(view(nodes=names, generation=number, drains=ORDER)), cmd.LeaveJob)
    # That order was for another incarnation.
    again = Agent()
    old = {"n0": replace(ORDER["n0"], incarnation="n0.0")}
    assert again.see(view(nodes=names, generation=generation(slots=("n1", "n2")), drains=old)) == []


# ---- the worker ----


class Line:
    """A supervisor in generation 1 whose agent is this test; *at*: the iteration that is next to begin."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.agent = WorkerChannel(theirs)
        self.agent.sock.settimeout(5.0)
        self.supervisor = Supervisor(WorkerChannel(ours), 0)
        self.at = 5
        self.supervisor.start(wire.Hello(0, 1), dict, lambda why, generation: None, lambda: self.at)
        assert self.agent.receive()["op"] == "hello"
        self.go(1)

    def go(self, generation: int) -> None:
        self.agent.send({"op": "go", "generation": generation, "plan": Plan("fresh", "w").to_json(), "world_size": 1,
                         "store": {"host": "h", "port": 1, "session_port": 2, "token": ""}})  # fmt: skip

    def ask(self, generation: int = 1) -> dict[str, Any]:
        self.agent.send({"op": "pause", "generation": generation})
        return self.agent.receive()

    def tell(self, boundary: int, *, saves: bool = False) -> None:
        self.agent.send({"op": "boundary", "generation": 1, "iteration": boundary, "saves": saves})

    def holding(self, iteration: int) -> threading.Thread:
        """The main thread, before *iteration*."""
        thread = threading.Thread(target=self.supervisor.hold, args=(iteration,), daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        self.agent.send({"op": "stop", "generation": 1, "why": "w"})
        assert self.agent.receive()["op"] == "report"


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.supervisor.close()
    made.agent.close()


def test_a_worker_goes_no_further_than_it_has_promised_and_parks_at_the_boundary(line: Line) -> None:
    line.supervisor.wait_go()
    assert line.ask() == {"op": "promised", "generation": 1, "iteration": 5, "saves": False}
    line.holding(4).join(5.0)  # begun before it was asked: free to go
    waits = line.holding(5)
    line.tell(6)
    waits.join(5.0)
    assert not waits.is_alive()
    waits = line.holding(6)
    assert line.agent.receive() == {"op": "parked", "generation": 1}
    assert waits.is_alive()
    line.stop()
    waits.join(5.0)
    assert not waits.is_alive() and line.supervisor.interrupted


def test_a_stop_frees_who_waits_for_a_boundary(line: Line) -> None:
    line.supervisor.wait_go()
    line.ask()
    waits = line.holding(5)
    line.stop()
    waits.join(5.0)
    assert not waits.is_alive()


def test_a_last_checkpoint_is_to_be_taken_at_the_boundary(line: Line) -> None:
    line.supervisor.wait_go()
    line.supervisor.takes_checkpoints = True
    assert line.ask()["saves"] is True
    waits = line.holding(5)
    line.tell(6, saves=True)
    waits.join(5.0)
    assert not waits.is_alive() and line.supervisor.saves_at == 6
    line.holding(6).join(5.0)  # until it is taken, which may be later, or never at the end of a run
    line.supervisor.saves_at = None
    waits = line.holding(7)
    assert line.agent.receive() == {"op": "parked", "generation": 1}
    line.stop()
    waits.join(5.0)


def test_a_failure_ends_the_wait_for_a_last_checkpoint(line: Line) -> None:
    """Its replacement knows nothing of it, and no rank may take one alone."""
    line.supervisor.wait_go()
    line.ask()
    line.tell(6, saves=True)
    line.holding(5).join(5.0)
    line.stop()
    line.go(2)
    line.supervisor.wait_go()
    assert line.supervisor.saves_at is None and not line.supervisor.pausing


def test_who_waits_at_its_end_is_parked_there(line: Line) -> None:
    line.supervisor.wait_go()
    line.ask()
    ends = threading.Thread(target=line.supervisor.wait_release, args=(5,), daemon=True)
    ends.start()
    line.tell(5)
    assert line.agent.receive() == {"op": "parked", "generation": 1}
    line.stop()
    ends.join(5.0)
    assert not ends.is_alive()


def test_who_is_asked_before_it_has_entered_holds_afterwards(line: Line) -> None:
    line.at = 0
    assert line.ask()["iteration"] == 0 and not line.supervisor.pausing
    line.supervisor.wait_go()
    assert line.supervisor.pausing
    line.tell(0)
    waits = line.holding(0)
    assert line.agent.receive()["op"] == "parked"
    line.stop()
    waits.join(5.0)


def test_a_pause_ends_with_its_generation(line: Line) -> None:
    line.supervisor.wait_go()
    line.ask()
    line.stop()
    line.agent.send({"op": "go", "generation": 2, "plan": Plan("copy", "w").to_json(), "world_size": 1,
                     "store": {"host": "h", "port": 1, "session_port": 2, "token": ""}})  # fmt: skip
    line.supervisor.wait_go()
    assert not line.supervisor.pausing


def test_the_listening_thread_says_where_the_worker_is(line: Line) -> None:
    line.agent.send({"op": "where"})
    assert line.agent.receive() == {"op": "at", "iteration": 5, "began_s": {}}
    line.supervisor.pace.begins(4)
    line.agent.send({"op": "where"})
    assert list(line.agent.receive()["began_s"]) == ["4"]


# ---- speed ----


def test_rank_0_is_asked_now_and_then_and_its_speed_told() -> None:
    agent = training()
    assert agent.tell(msg.RateTick()) == [cmd.AskIteration((0,))]
    assert agent.tell(msg.RateTick(), msg.WorkerAt(0, agent.pid(0), 10)) == []
    told: list[Any] = []
    for step in range(1, 5):
        agent.now_s += rate.ASK_S
        assert only(agent.tell(msg.RateTick()), cmd.AskIteration)
        agent.tell(msg.WorkerAt(1, agent.pid(1), 999), msg.WorkerAt(0, agent.pid(0) + 7, 999))  # not rank 0
        told += agent.tell(msg.WorkerAt(0, agent.pid(0), 10 + 5 * step, {10 + 5 * step: float(step)}))
    # Each mark once.
    assert told == [cmd.TellRate(1, 15, 2.0, {15: 1.0}), cmd.TellRate(1, 25, 2.0, {20: 2.0, 25: 3.0})]


def test_of_many_marks_the_begin_and_the_end_are_kept_whole() -> None:
    marks = {iteration: 0.25 * iteration for iteration in range(1000)}
    kept = list(rate.thinned(marks, 100))
    assert len(kept) <= 100 and kept == sorted(kept)
    assert kept[:20] == list(range(20)) and kept[-20:] == list(range(980, 1000))
    assert rate.thinned(kept_of := {5: 1.0, 6: 2.0}) == kept_of


def test_a_worker_that_does_not_answer_or_is_paused_is_not_asked_again() -> None:
    agent = training()
    assert agent.tell(msg.RateTick()) == [cmd.AskIteration((0,))]
    agent.now_s += 100 * rate.ASK_S
    assert agent.tell(msg.RateTick()) == []
    agent.tell(msg.WorkerAt(0, agent.pid(0), 10), msg.Tick(holds=False))
    agent.now_s += rate.ASK_S
    assert agent.state.paused and agent.tell(msg.RateTick()) == []
    assert agent.tell(msg.Tick()) == [cmd.ReadPlace()]
    assert only(agent.tell(msg.PlaceRead(agent.state.view.generation_revision)), cmd.ResumeWorkers)
    assert agent.tell(msg.RateTick()) == [cmd.AskIteration((0,))]
    # Another process in its place has not been asked yet.
    changed = rate.watch(agent.state.rate, msg.RateTick(), 999, 1, True, agent.now_s + rate.ASK_S)
    assert changed[1] == (cmd.AskIteration((0,)),)


def test_a_job_that_stands_tells_nothing_new_and_a_restart_starts_over() -> None:
    meter = rate.see(rate.see(rate.Meter(), 10, 0.0), 20, 5.0)
    assert meter.per_s == 2.0 and rate.tell_due(meter, 5.0)
    meter = replace(meter, told_s=5.0, told_iteration=20)
    assert not rate.tell_due(rate.see(meter, 20, 99.0), 99.0)
    again = rate.see(meter, 3, 6.0)
    assert again.per_s is None and not rate.tell_due(again, 99.0)
    assert rate.see(meter, 21, 5.0 + rate.WINDOW_S).seen[0] == rate.Sighting(5.0, 20)


def test_only_the_owner_of_slot_0_asks() -> None:
    assert training("n1").tell(msg.RateTick()) == []
    assert state.AgentState("n0", "n0.1").rate == rate.Meter()
