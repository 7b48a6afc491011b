"""When workers stand still because their places may be another node's, and when they go on."""

from __future__ import annotations

import pytest

from swift_agent import lifecycle as lc
from swift_agent import lifecycle_messages as msg
from swift_agent.isolation import MAX_DELAY_S, pausing, rejoin_delay_s
from swift_rendezvous.view import View


@pytest.mark.parametrize(
    ("paused", "holds", "is_away", "expected"),
    [
        (False, True, False, ""), (False, True, True, ""), (False, False, False, "pause"), (True, False, False, ""),
        (True, True, False, "ask"), (True, True, True, "resume"),
    ],
)  # fmt: skip
def test_what_follows_from_what_holds(paused: bool, holds: bool, is_away: bool, expected: str) -> None:
    assert pausing(paused, holds, is_away) == expected


def test_paused_once_and_on_only_when_etcd_says_that_nothing_has_changed() -> None:
    state = lc.AgentState("n0", "n0.1", view=View(revision=7, generation_revision=7))
    given = []
    for event in (
        msg.Tick(), msg.PlaceRead(7), msg.Tick(False, why="etcd is silent"), msg.Tick(False, why="etcd is silent"),
        msg.Tick(), msg.PlaceRead(8), msg.Tick(), msg.PlaceRead(7), msg.PlaceRead(7), msg.Tick(),
    ):  # fmt: skip
        step = lc.on_event(state, event, now_s=1.0)
        state = step.state
        given.append([c for c in step.commands if isinstance(c, (lc.PauseWorkers, lc.ResumeWorkers, lc.ReadPlace))])
    pause, ask, resume = [lc.PauseWorkers("etcd is silent")], [lc.ReadPlace()], [lc.ResumeWorkers()]
    assert given == [[], [], pause, [], ask, [], ask, resume, [], []]


def test_a_node_that_is_given_up_at_once_stays_away_longer_and_longer() -> None:
    delay_s, waited = 0.0, []
    for _ in range(8):
        delay_s = rejoin_delay_s(delay_s, stayed_s=0.5)
        waited.append(delay_s)
    assert waited[:4] == [1.0, 2.0, 4.0, 8.0] and waited[-1] == MAX_DELAY_S
    assert rejoin_delay_s(delay_s, stayed_s=60.0) == 0.0
