"""Times, numbers and ranks in words."""

from __future__ import annotations

import pytest

from swift_agent.agent.lifecycle.timeline import PHASES
from swift_agent.ctl.timeline import words


@pytest.mark.parametrize(("seconds", "text"), [
    (0.0, "0 ms"), (0.3204, "320 ms"), (0.9996, "1.0 s"), (5.12, "5.1 s"), (99.96, "1 min 40 s"), (120, "2 min"),
    (125.4, "2 min 5 s"), (3600, "1 h"), (12000, "3 h 20 min"), (187200, "2 d 4 h"),
])  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


def test_the_rest() -> None:
    assert words.time_of_day(1_700_000_000.25, 2) == "2023-11-14 22:13:20.25 UTC"
    assert [words.per_s(rate) for rate in (None, 18.3, 0.5, 0.01, 0.0001)] == [
        "not known", "18.3 per second", "30 per minute", "36 per hour", "0.36 per hour"
    ]  # fmt: skip
    assert [words.percent(part) for part in (None, 1.0, 0.973, 0.99996, 0.9999999)] == [
        "not known", "100.0 %", "97.3 %", "99.996 %", "more than 99.999 %"
    ]  # fmt: skip
    assert [words.ranks(one) for one in ((), (3,), (0, 1, 2, 8))] == ["no ranks", "rank 3", "ranks 0\u20132, 8"]
    assert [words.rank_time(one) for one in (2.125, 1500.0, 7200.0, 1e8)] == [
        "2.12 rank seconds", "1500 rank seconds", "2 rank hours", "27,778 rank hours"
    ]  # fmt: skip
    assert [words.money(one, 2.0) for one in (3.6, 7.2e6)] == ["0.002", "4,000.00"] and words.money(9.0, None) == ""


def test_every_phase_is_explained() -> None:
    assert list(words.PHASES) == [*PHASES, "total"]
