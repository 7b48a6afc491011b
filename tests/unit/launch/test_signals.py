"""What a signal means, by itself and after others; and that each is caught from the first moment on."""

from __future__ import annotations

import os
import signal
from signal import SIGINT, SIGTERM, SIGUSR1

import pytest

from swift_agent.launch.signals import REPEAT_S, CaughtSignals, Meaning, Received, Signalled, meaning_of, numbers_of

NOTICES = (SIGTERM, SIGUSR1)


@pytest.mark.parametrize(
    ("number", "last", "meaning"),
    [
        (SIGTERM, None, "notice"),
        (SIGINT, None, "end"),
        (SIGTERM, Received(SIGTERM, 10.0 - REPEAT_S / 2, "notice"), None),  # the same one again
        (SIGTERM, Received(SIGTERM, 10.0 - REPEAT_S, "notice"), "end"),
        (SIGTERM, Received(SIGUSR1, 10.0, "notice"), "end"),
        (SIGINT, Received(SIGTERM, 10.0, "notice"), "end"),
        (SIGINT, Received(SIGINT, 10.0, "end"), "hurry"),  # Ctrl-C twice
        (SIGTERM, Received(SIGINT, 1.0, "end"), "hurry"),
        (SIGINT, Received(SIGINT, 1.0, "hurry"), "hurry"),
    ],
)
def test_meaning(number: int, last: Received | None, meaning: Meaning | None) -> None:
    assert meaning_of(number, 10.0, last, NOTICES) == meaning


def test_without_notices_each_ends_the_job() -> None:
    assert meaning_of(SIGTERM, 10.0, None, ()) == "end"


def test_names_that_the_system_lacks_are_left_out() -> None:
    assert numbers_of("SIGTERM, SIGLATE,SIGUSR1,") == [SIGTERM, SIGUSR1] and numbers_of("") == []


def test_what_came_before_somebody_listens_is_told_then() -> None:
    heard: list[tuple[signal.Signals, Meaning]] = []
    former = signal.getsignal(signal.SIGUSR2), signal.getsignal(SIGUSR1)
    with CaughtSignals("SIGUSR2", "SIGUSR1") as signals:
        signals.raise_caught()
        os.kill(os.getpid(), SIGUSR1)
        with pytest.raises(Signalled, match="got signal: 10") as caught:
            signals.raise_caught()
        assert caught.value.cause == "preempted" and not signals.is_ending
        with signals.listening(lambda number, meaning: heard.append((number, meaning))):
            for number in (SIGUSR1, signal.SIGUSR2, signal.SIGUSR2):
                os.kill(os.getpid(), number)
        assert signals.is_ending and signals.is_in_hurry
        assert signals.exception is not None and signals.exception.cause == "operator"
    assert heard == [(SIGUSR1, "notice"), (signal.SIGUSR2, "end"), (signal.SIGUSR2, "hurry")]
    assert (signal.getsignal(signal.SIGUSR2), signal.getsignal(SIGUSR1)) == former
