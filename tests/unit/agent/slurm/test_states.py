"""What Slurm says of nodes, and the orders that follow. The lines are those that sinfo of Slurm 22.05 printed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swift_agent.agent.slurm.states import MAX_REASON, Decision, NodeState, decide, nodes_of, still_had
from swift_rendezvous.roster.records import DrainRecord, ResultRecord
from swift_rendezvous.roster.view import View
from tests.support.records import generation, owner, view

ALL = ("n0", "n1", "n2")
DRAINED, IN_SERVICE, OTHER = NodeState("drained", "bad memory"), NodeState("in service"), NodeState("other")


def order(name: str, life: int = 1, **changes: Any) -> dict[str, DrainRecord]:
    record = DrainRecord(name, f"{name}.{life}", "drained in Slurm: bad memory", 7.0, ordered_by="slurm")
    return {name: replace(record, **changes)}


def ask(v: View, *had: str, **slurm: NodeState) -> Decision:
    """The nodes that are not named are in service."""
    return decide(v, {**{name: IN_SERVICE for name in ALL}, **slurm}, had, 7.0)


# ---- what sinfo prints ----


@pytest.mark.parametrize(
    ("said", "state"),
    [
        *((name, "drained") for name in ("drained", "draining", "drain", "drng", "DRAINING", "drained*", "draining@",
                                         "drng*", "drained$", "drained~", "mixed+drain", "idle+drain")),
        *((name, "in service") for name in ("idle", "allocated", "alloc", "mixed", "mix*", "mixed-", "completing",
                                            "maint", "planned", "idle~", "reserved")),
        *((name, "other") for name in ("down", "down*", "fail", "failing", "unknown", "unk*", "inval", "future",
                                       "powered_down", "reboot^", "down+not_responding")),
    ],
)  # fmt: skip
def test_names_of_states(said: str, state: str) -> None:
    assert nodes_of(f"n1|{said}|none\n")["n1"].state == state


def test_several_nodes() -> None:
    """A node of two partitions has a line for each."""
    answer = "n1|draining|bad | dimm: 5%\nn1|draining|bad | dimm: 5%\nn2|mixed|none\nn3|drained*|none\nn4|down*|lost\n"
    assert nodes_of(answer) == {
        "n1": NodeState("drained", "bad | dimm: 5%"), "n2": IN_SERVICE, "n3": NodeState("drained"), "n4": OTHER
    }  # fmt: skip


@pytest.mark.parametrize("line", ["", "CLUSTER: lab", "n1|draining", "|drained|x", "n1||x", "n1|*|x", "n1|123|x"])
def test_what_is_no_line_of_a_node_is_left_out(line: str) -> None:
    assert nodes_of(f"{line}\nn2|idle|none\n") == {"n2": IN_SERVICE}


def test_a_reason_is_a_short_text() -> None:
    found = nodes_of(f"n1|drained|a\x1b[31m{'b' * 1000}\n")["n1"].reason
    assert found.startswith("a?[31mb") and len(found) == MAX_REASON


# ---- orders ----


def test_a_drained_node_is_to_leave() -> None:
    expected = DrainRecord("n0", "n0.1", "drained in Slurm: bad memory", 7.0, ordered_by="slurm")
    assert ask(view(names=ALL), n0=DRAINED) == Decision((expected,))
    assert ask(view(), n0=DRAINED) == Decision((expected,)), "without a spare the order waits"
    assert ask(view(), n0=NodeState("drained")).orders[0].why == "drained in Slurm"
    assert ask(view(names=ALL)) == ask(view(names=ALL), n0=OTHER) == Decision()


def test_a_foreign_node_gets_no_order() -> None:
    """Of another job, or of this one under another name; and a node that Slurm does not know."""
    assert ask(view(), n7=DRAINED, n2=DRAINED) == Decision()
    assert decide(view(names=ALL), {"n7": DRAINED}, (), 7.0) == Decision()


def test_an_order_that_is_there_stands() -> None:
    for there in (order("n0"), order("n0", ordered_by=""), order("n0", ordered_by="", signal="SIGTERM"),
                  order("n0", life=0)):  # fmt: skip
        assert ask(view(names=ALL, drains=there), n0=DRAINED) == Decision()


def test_an_order_that_a_person_took_back_is_not_written_again() -> None:
    assert ask(view(names=ALL), "n0.1", n0=DRAINED) == Decision()
    assert ask(view(names=ALL), "n0.0", n0=DRAINED).orders, "that was an earlier incarnation"


def test_orders_that_were_had() -> None:
    stands = view(names=ALL, drains={**order("n0"), **order("n1", ordered_by="")})
    assert still_had(stands, {"n0": DRAINED}, ()) == {"n0.1"}, "another coordinator has written it"
    had = {"n0.1", "n1.1", "n2.1"}
    assert still_had(view(names=ALL), {"n0": DRAINED, "n1": OTHER}, had) == had
    assert still_had(view(names=ALL), {"n0": IN_SERVICE}, {"n0.1", "n1.0"}) == set()


def test_a_script_that_tracks_nothing_has_nothing_to_hand_over() -> None:
    v = view(names=ALL, tracked=False)
    found = ask(v, n0=DRAINED)
    assert not found.orders and found.left == (
        ("n0.1", "node n0 is drained in Slurm: bad memory; it stays: the script has not called swift_agent.init()"),
    )
    assert [drain.node_id for drain in ask(v, n2=DRAINED).orders] == ["n2"], "a spare just leaves"


def test_spares_leave_first() -> None:
    """None of them gets a slot of another node that goes."""
    v = view(names=("n0", "n1", "n2", "n3"))
    assert [drain.node_id for drain in ask(v, n0=DRAINED, n2=DRAINED).orders] == ["n2", "n0"]


def test_all_nodes_are_drained() -> None:
    """As before the maintenance of a whole cluster, where running jobs may end: without spares this one might not."""
    found = ask(view(names=ALL), n0=DRAINED, n1=DRAINED, n2=DRAINED)
    assert not found.orders and [incarnation for incarnation, _ in found.left] == ["n0.1", "n1.1", "n2.1"]
    assert "so are all nodes of the job" in found.left[0][1]
    assert ask(view(names=(*ALL, "elsewhere")), n0=DRAINED, n1=DRAINED, n2=DRAINED).orders


@pytest.mark.parametrize(
    "changes",
    [{"generation": None}, {"released": True}, {"result": ResultRecord("succeeded", "")}],
    ids=["not begun", "at its end", "ended"],
)
def test_a_job_in_which_nobody_trains(changes: dict[str, Any]) -> None:
    assert ask(view(names=ALL, drains=order("n1"), **changes), n0=DRAINED) == Decision()


# ---- taken back ----


def test_a_node_that_is_resumed_stays() -> None:
    assert ask(view(names=ALL, drains=order("n0"))) == Decision(taken_back=("n0",))


@pytest.mark.parametrize(
    ("there", "slurm"),
    [
        (order("n0", ordered_by=""), IN_SERVICE),
        (order("n0", ordered_by="", signal="SIGTERM"), IN_SERVICE),
        (order("n0", life=0), IN_SERVICE),
        (order("n0"), DRAINED),
        (order("n0"), OTHER),
        (order("n7"), IN_SERVICE),
    ],
    ids=["of a person", "of a signal", "of an earlier incarnation", "drained", "down", "gone"],
)
def test_an_order_stands(there: dict[str, DrainRecord], slurm: NodeState) -> None:
    assert ask(view(names=ALL, drains=there), n0=slurm).taken_back == ()


def test_slurm_does_not_name_the_node() -> None:
    assert decide(view(names=ALL, drains=order("n0")), {"n1": IN_SERVICE}, (), 7.0) == Decision()


def test_it_is_too_late() -> None:
    moved = generation(2, "replace", ("n2", "n1"), lost={0: (0, 1)}, handover={0: owner("n0")})
    assert ask(view(names=ALL, generation=moved, drains=order("n0"))) == Decision()
