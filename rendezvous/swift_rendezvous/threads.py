"""Threads that do not end without a word: an unexpected exception is told, with its traceback in the log.

An agent whose watch, writer or heartbeats are gone looks alive and does nothing any more. So the starter of a thread
says what has to hear of such an end, which is the end of the agent (`swift_agent.agent.loop`).

This module must never swallow an exception: it is told, whatever it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from swift_rendezvous.errors import RendezvousError

log = logging.getLogger(__name__)

_told: set[str] = set()  # threads whose want was said once

OnFailure = Callable[[str], None]


def only_logged(why: str) -> None:
    """For a starter that has nothing to tell it to: `log` has it."""


def thread(name: str, run: Callable[..., None], on_failure: OnFailure, *args: Any) -> threading.Thread:
    """A daemon thread, to be started. *on_failure*, called in it, gets one clause: which thread, and the exception."""

    def told() -> None:
        try:
            run(*args)
        except Exception as error:
            log.exception("the thread %s has ended by an error", name)
            on_failure(f"its thread {name} has ended by {type(error).__name__}: {error}")

    return threading.Thread(target=told, name=name, daemon=True)


class NoThread(RendezvousError):
    """The process, its cgroup or its user has no thread left."""


def start(new: threading.Thread) -> None:
    """Start *new*; raises `NoThread`, which a caller that tries again for a while takes as one more failure."""
    try:
        new.start()
    except RuntimeError as error:
        raise NoThread(f"the thread {new.name} cannot be started: {error}") from error


def is_for_want_of_threads(error: RuntimeError) -> bool:
    """Whether a library could not start one of its own; CPython has no other sign of it."""
    return "can't start new thread" in str(error)


def has_started(new: threading.Thread) -> bool:
    """Start *new*. False if the process, its cgroup or its user has no thread left: the caller tries again."""
    try:
        new.start()
    except RuntimeError as error:
        if new.name not in _told:
            _told.add(new.name)
            log.warning("the thread %s cannot be started (%s); trying on", new.name, error)
        return False
    return True
