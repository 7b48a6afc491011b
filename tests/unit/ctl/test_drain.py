"""What `swiftctl drain` says of a node that it waits for."""

from __future__ import annotations

from dataclasses import replace

from swift_agent.ctl.drain import Outcome, _judge
from swift_rendezvous.roster.records import DrainRecord, TakenRecord
from swift_rendezvous.roster.view import View
from tests.support.records import generation, node, owner, view


def handing_over(**changes: object) -> View:
    """Generation 2: n2 has the slot of n0, which still holds its state."""
    new = generation(2, "replace", ("n2", "n1"), lost={0: (0, 1)}, handover={0: owner("n0")})
    drains = {"n0": DrainRecord("n0", "n0.1", "maintenance", 1.0)}
    return replace(view(names=("n0", "n1", "n2"), generation=new, plan=None, drains=drains), **changes)


def judge(v: View) -> Outcome:
    return _judge(v, "n0", "n0.1", 0)


def test_a_node_whose_lease_is_gone_while_it_hands_over_has_not_left() -> None:
    assert judge(handing_over()).text == "node n0: slot 0 is being handed over to n2"
    others = {name: node(name) for name in ("n1", "n2")}
    away = judge(handing_over(nodes=others))
    assert away.state == "waiting" and "may still hold the state of slot 0" in away.text
    for over in (handing_over(nodes=others, taken={0: TakenRecord(0, "n2.1")}),
                 handing_over(nodes=others, generation=generation(3, "replace", ("n2", "n1")))):  # fmt: skip
        gone = judge(over)
        assert (gone.state, gone.new_owner) == ("drained", "n2") and gone.text == "node n0 has left, n2 has slot 0"
