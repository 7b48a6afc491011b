"""The signals that a node gets, caught from the first moment on, and what each of them means.

    the first one --notice-->   this node shall go: the job is told, and goes on without it
                  --end------>  the job ends, or a spare's part in it
    a second one  --end-->      a third one --hurry-->  nobody is waited for

Until an agent looks after the signals there are a private etcd to stop and directories to remove. Raising in the middle
of their making would leave some of them, so a signal is only noted here, and looked at where nothing is half made.
Must never act on a signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal

from torch.distributed.elastic.multiprocessing.api import SignalException

# The same signal again so soon is no other one: some launchers send theirs to a process and to its group.
REPEAT_S = 1.0

Meaning = Literal["notice", "end", "hurry"]


class Signalled(SignalException):
    """torch's, with what `swift-run` makes of it. *cause*: as in `ResultRecord`."""

    def __init__(self, why: str, number: signal.Signals, cause: Literal["operator", "preempted"]) -> None:
        super().__init__(why, sigval=number)
        self.cause = cause


@dataclass(frozen=True)
class Received:
    """*at_s*: on a monotonic clock."""

    number: int
    at_s: float
    meaning: Meaning


def meaning_of(number: int, at_s: float, last: Received | None, notices: Collection[int]) -> Meaning | None:
    """What a signal means after *last*, the one before it that meant something; None: it is that one, again.

    *notices*: those that tell a node to go."""
    if last is None:
        return "notice" if number in notices else "end"
    if last.number == number and at_s - last.at_s < REPEAT_S and last.meaning == "notice":
        return None
    return "end" if last.meaning == "notice" else "hurry"


class CaughtSignals:
    """While entered, the signals named in *ending* and *notices* (``"SIGTERM,SIGINT"``) are noted instead of taking
    their effect.

    Names that the system lacks are left out, as torch does. Outside of the main thread nothing is caught: Python allows
    no handlers there. The former handlers are back at the end.
    """

    def __init__(self, ending: str, notices: str = "") -> None:
        self._notices = numbers_of(notices)
        self._numbers = [*dict.fromkeys([*numbers_of(ending), *self._notices])]
        self._former: dict[int, Any] = {}
        self._listener: Callable[[signal.Signals, Meaning], None] | None = None
        self._last: Received | None = None
        self.exception: Signalled | None = None
        """Of the last one that means something."""

    def __enter__(self) -> CaughtSignals:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._note) for number in self._numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._former:
            signal.signal(*self._former.popitem())

    @property
    def is_ending(self) -> bool:
        """The last one ends the job."""
        return self._last is not None and self._last.meaning != "notice"

    @property
    def is_in_hurry(self) -> bool:
        """Somebody does not want to wait for that end."""
        return self._last is not None and self._last.meaning == "hurry"

    def raise_caught(self, why: str = "", cause: Literal["operator", "preempted"] | None = None) -> None:
        """Raise `Signalled`, torch's `SignalException`, if a signal came; *why*, *cause*: in the place of its own."""
        found = self.exception
        if found is not None:
            raise Signalled(why or str(found), found.sigval, cause or found.cause)

    @contextlib.contextmanager
    def listening(self, listener: Callable[[signal.Signals, Meaning], None]) -> Iterator[None]:
        """While entered, call *listener* with each signal that means something, in a signal handler; at once with the
        last one if that came before. A signal that comes at the very beginning may be told twice.
        """
        self._listener = listener
        try:
            if self._last is not None:
                listener(signal.Signals(self._last.number), self._last.meaning)
            yield
        finally:
            self._listener = None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        meaning = meaning_of(number, now_s, self._last, self._notices)
        if meaning is None:
            return
        self._last = Received(number, now_s, meaning)
        if meaning != "hurry":
            why = f"Process {os.getpid()} got signal: {number}"
            self.exception = Signalled(why, signal.Signals(number), "preempted" if meaning == "notice" else "operator")
        if self._listener is not None:
            self._listener(signal.Signals(number), meaning)


def numbers_of(names: str) -> list[signal.Signals]:
    """Of a text like ``"SIGTERM,SIGINT"``; names that the system lacks are left out."""
    found = (getattr(signal, name.strip(), None) for name in names.split(","))
    return [number for number in found if isinstance(number, signal.Signals)]
