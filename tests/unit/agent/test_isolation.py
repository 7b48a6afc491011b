"""When the workers of a node stand still, and how long it stays away."""

from __future__ import annotations

import pytest

from swift_agent import lifecycle as lc
from swift_agent.isolation import MAX_DELAY_S, rejoin_delay_s, shall_pause


@pytest.mark.parametrize(
    ("overdue_s", "silence_s", "expected"),
    [(0.0, 0.0, False), (3.0, 0.0, False), (0.0, 60.0, False), (0.1, 5.0, False), (0.1, 5.1, True), (60.0, 60.0, True)],
)
def test_cut_off_is_who_hears_from_nobody(overdue_s: float, silence_s: float, expected: bool) -> None:
    assert shall_pause(False, overdue_s, silence_s, 5.0) is expected
    state = lc.AgentState("n0", "n0.1", lease_ttl_s=5.0)
    commands = lc.on_event(state, lc.Tick(overdue_s, silence_s), now_s=1.0).commands
    assert [type(command).__name__ for command in commands] == (["PauseWorkers"] if expected else [])
    if expected:
        assert isinstance(commands[0], lc.PauseWorkers)
        assert "neither etcd nor another node has answered for 5 s" in commands[0].why


def test_workers_stand_still_until_etcd_answers() -> None:
    state = lc.AgentState("n0", "n0.1", lease_ttl_s=5.0)
    given = []
    for overdue_s, silence_s in ((0.1, 5.1), (9.0, 9.0), (9.0, 0.0), (0.0, 9.0), (0.0, 9.0)):
        step = lc.on_event(state, lc.Tick(overdue_s, silence_s), now_s=1.0)
        state = step.state
        given.append([type(command).__name__ for command in step.commands])
    # A peer that is heard may be cut off as well.
    assert given == [["PauseWorkers"], [], [], ["ResumeWorkers"], []]


def test_who_is_given_up_again_and_again_stays_away_longer_and_longer() -> None:
    delays = [0.0]
    for _ in range(8):
        delays.append(rejoin_delay_s(delays[-1], stayed_s=2.0))
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_DELAY_S, MAX_DELAY_S, MAX_DELAY_S]
    assert rejoin_delay_s(MAX_DELAY_S, stayed_s=31.0) == 0.0
