"""When a node takes itself for cut off, and how long it stays away."""

from __future__ import annotations

import pytest

from swift_agent import lifecycle as lc
from swift_agent.isolation import MAX_DELAY_S, is_cut_off, rejoin_delay_s


@pytest.mark.parametrize(
    ("overdue_s", "silence_s", "expected"),
    [(0.0, 0.0, False), (3.0, 0.0, False), (0.0, 60.0, False), (0.1, 5.0, False), (0.1, 5.1, True), (60.0, 60.0, True)],
)
def test_cut_off_is_who_hears_from_nobody(overdue_s: float, silence_s: float, expected: bool) -> None:
    assert is_cut_off(overdue_s, silence_s, 5.0) is expected
    state = lc.AgentState("n0", "n0.1", lease_ttl_s=5.0)
    first = lc.on_event(state, lc.Tick(overdue_s, silence_s), now_s=1.0)
    assert first.commands == ()
    commands = lc.on_event(first.state, lc.Tick(overdue_s, silence_s), now_s=1.5).commands
    assert [type(command).__name__ for command in commands] == (["Rejoin"] if expected else [])
    if expected:
        assert isinstance(commands[0], lc.Rejoin)
        assert "neither etcd nor another node has answered for 5 s" in commands[0].why


def test_who_was_frozen_and_is_answered_when_it_wakes_up_is_not_cut_off() -> None:
    state = lc.AgentState("n0", "n0.1", lease_ttl_s=5.0)
    for tick in (lc.Tick(60.0, 60.0), lc.Tick(0.0, 0.1), lc.Tick(60.0, 60.0)):
        step = lc.on_event(state, tick, now_s=1.0)
        assert step.commands == ()
        state = step.state


def test_who_is_given_up_again_and_again_stays_away_longer_and_longer() -> None:
    delays = [0.0]
    for _ in range(8):
        delays.append(rejoin_delay_s(delays[-1], stayed_s=2.0))
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_DELAY_S, MAX_DELAY_S, MAX_DELAY_S]
    assert rejoin_delay_s(MAX_DELAY_S, stayed_s=31.0) == 0.0
