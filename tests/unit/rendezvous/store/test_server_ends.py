"""A server that has ended is started again, later and later, and not for ever."""

from __future__ import annotations

import pytest

from swift_rendezvous.store.server_ends import PAUSES_S, WINDOW_S, how_it_ended, num_recent, pause_s


def test_it_is_given_up_when_it_ends_again_and_again() -> None:
    ends_s = [100.0, 101.0, 103.0, 108.0]
    assert [pause_s(ends_s[:number]) for number in (1, 2, 3, 4)] == [*PAUSES_S, None]
    assert PAUSES_S[0] == 0.0 and sorted(PAUSES_S) == list(PAUSES_S)


def test_ends_of_long_ago_do_not_count() -> None:
    assert pause_s([100.0 + WINDOW_S * number for number in range(20)]) == PAUSES_S[0]
    ends_s = [0.0, 1.0, 2.0, WINDOW_S + 0.5]
    assert num_recent(ends_s) == 3 and pause_s(ends_s) == PAUSES_S[2]


@pytest.mark.parametrize(
    ("code", "in_shell", "how"),
    [
        (3, False, "ended with exit code 3"), (0, True, "ended with exit code 0"), (None, False, "has ended"),
        (-9, False, "was killed by signal 9 (SIGKILL)"), (137, True, "was killed by signal 9 (SIGKILL)"),
        (137, False, "ended with exit code 137"), (-40, False, "was killed by signal 40 (Real-time signal 6)"),
    ],
)  # fmt: skip
def test_how_it_ended(code: int | None, in_shell: bool, how: str) -> None:
    assert how_it_ended(code, in_shell) == how
