"""What a restart of all workers would begin with: the checkpoints that the script asks for, a snapshot of its own, or
iteration 0; said in words at the start of a run.

This module must never look for checkpoints or load one: it says what the script's calls and its optimizers show.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from swift_agent.errors import UsageError
from swift_agent.worker.tracked.tracked import Tracked
from swift_logging_store.stores.contract import StoreUnknown
from swift_logging_store.stores.open import open_store
from swift_recovery.checkpoint.directory import CheckpointDirectory
from swift_recovery.checkpoint.writer import Settings

_STARTS_OVER = (
    "no job.checkpoint: should all workers have to start again (nobody is left who holds the state of a lost rank, or "
    "a collective outside an iteration was cut), training begins at iteration 0, or with what the script loads itself. "
    "With job.checkpoint(DIRECTORY, every=N) it begins with the newest checkpoint; job.epochs(n, start=...) or "
    "iterations(n, start=...) says that the script has snapshots of its own"
)

_BEGINS_WITH_A_SNAPSHOT = (
    "no job.checkpoint: should all workers have to start again, training begins with the snapshot that the script "
    "loads then, or at iteration 0 if it loads none (a script that does so only when it is told to resume). With "
    "job.checkpoint(DIRECTORY, every=N) it begins with the newest checkpoint"
)

_DRAWS_AGAIN = (
    "the script has loaded a snapshot of its own, and its loop begins with iteration 0: dropout, augmentation and "
    "orders that generators make draw the numbers of the first iterations once more, so what comes is not bit for bit "
    "what the run before would have trained. A checkpoint of job.checkpoint(DIRECTORY, every=N) has the number of the "
    "iteration, job.iterations(n, start=...) is given it"
)


def checkpoints(directory: str | os.PathLike[str], every: int, keep: int, mistakes: list[str]) -> Settings:
    """What `Job.checkpoint` is asked for. Raises `UsageError` for *mistakes*, and for what cannot be."""
    for name, number in (("every", every), ("keep", keep)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            mistakes.append(f"{name}={number!r} is no number of at least 1")
    try:
        store = open_store(os.fspath(directory))
    except StoreUnknown as error:
        mistakes.append(str(error))
    if mistakes:
        raise UsageError("job.checkpoint(): " + "; ".join(mistakes))
    return Settings(CheckpointDirectory(store), every, keep)


def what_a_restart_begins_with(tracked: Tracked, start: int | None) -> str:
    """To be said at the begin, if it may be the begin. *start*: that of the loop, None if the script gives none."""
    if start or not starts_over(tracked):
        return ""
    return _STARTS_OVER if start is None else _BEGINS_WITH_A_SNAPSHOT


def what_is_drawn_again(tracked: Tracked, start: int | None, iteration: int, *, seeded: bool) -> str:
    """To be said if the loop, which begins with *iteration*, goes on from a snapshot of the script's own and does not
    know how many iterations that has behind it. *seeded*: the job seeds the generators."""
    if not seeded or iteration or tracked.checkpoints is not None:
        return ""
    return _DRAWS_AGAIN if start or _has_optimizer_state(tracked) else ""


def told(tracked: Tracked, start: int | None, iteration: int, *, seeded: bool) -> list[str]:
    """Both, where they are to be said, once, as the loop begins."""
    lines = [what_a_restart_begins_with(tracked, start), what_is_drawn_again(tracked, start, iteration, seeded=seeded)]
    return [line for line in lines if line]


def starts_over(tracked: Tracked) -> bool:
    """Whether nothing says that the script would go on from somewhere if all workers started again."""
    if tracked.checkpoints is not None or tracked.has_shards_alone:  # that is told in words of its own
        return False
    return not _has_optimizer_state(tracked)


def _has_optimizer_state(tracked: Tracked) -> bool:
    """Before the first update: a snapshot of the script's own was loaded."""
    states = [state for optimizer in tracked.state.optimizers.values() for state in optimizer.state.values()]
    # Adagrad makes its own, of step 0.
    return any(state.get("step", True) for state in states if isinstance(state, Mapping) and state)
