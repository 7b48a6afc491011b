"""When a rank that fails again and again ends the job, and when all workers restart because of it. Pure.

Without `--max-restarts` a lost worker is replaced as often as it takes, as long as its rank advances. A rank that fails
without advancing gets nowhere, on whatever node it is; its failures since it last advanced are carried from generation
to generation (`GenerationRecord.troubles`), so that any coordinator counts alike, and the end of each process once,
also if a node tells it again because it has not seen the generation that followed:

    failure --advanced since the last one?--> yes: the count starts over
                '-- no --> something else was tried before -----------------------------> the job ends
                           two replacements failed by themselves, before an iteration --> all workers restart, once
                           the same exception at the same line -------------------------> the job ends
                           three within ten iterations ---------------------------------> the job ends
    more than a hundred failures of one rank in an hour, advanced or not ---------------> the job ends

Before three failures within ten iterations end the job its slot is given to a spare node, if there is one.

This module must never read a clock or look at anything but what it is given.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swift_rendezvous.roster.records import Setback, Trouble, WorkerExit

# A rank advances if it finishes so many iterations of its own between two failures.
WINDOW = 10
MOST = 3
PER_HOUR = 100
HOUR_S = 3600
# Of all ranks, the last to fail: they are part of a record that etcd must take.
NUM_KEPT = 256
# Of the words of a worker that could not be started.
MESSAGE_CHARS = 200
RESTARTED = "a restart of all workers"
MOVED = "a move of its slot to a spare node"
# Signals that a process gets for what it has done itself.
_OWN_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}


@dataclass(frozen=True)
class Verdict:
    """*troubles*: for the next generation. *hopeless*: rank -> why it ends the job; those in *movable* may be tried on
    another node first. *restart*: rank -> why all workers restart."""

    troubles: tuple[Trouble, ...] = ()
    hopeless: dict[int, str] = field(default_factory=dict)
    movable: frozenset[int] = frozenset()
    restart: dict[int, str] = field(default_factory=dict)


def judge(
    troubles: Sequence[Trouble], exits: Iterable[WorkerExit], epoch: int, *, counted: bool = False,
    nodes: Mapping[int, str] | None = None,
) -> Verdict:  # fmt: skip
    """What follows from *exits*, the failures of one generation, whose workers were last started together in *epoch*.

    *counted*: `--max-restarts` was given, and says when the job ends. Then only those replacements are looked at that
    failed by themselves before an iteration. *nodes*: by rank, the incarnation of the node on which it ended.
    """
    by_rank = {trouble.rank: trouble for trouble in troubles}
    hopeless: dict[int, str] = {}
    movable: set[int] = set()
    restart: dict[int, str] = {}
    for exit_ in exits:
        setback = _setback(exit_, epoch, (nodes or {}).get(exit_.rank, ""))
        if counted and not (setback.is_replacement and setback.is_own):
            continue
        before = by_rank.get(exit_.rank, Trouble(exit_.rank))
        if any(one.process == setback.process for one in before.setbacks):
            continue
        by_rank.pop(exit_.rank, None)
        now = _in_hour(before, exit_.timestamp_s)
        if not exit_.excused:
            now = _with(now, setback)
        if now.num_since > PER_HOUR and not counted:
            hopeless[exit_.rank] = f"it has failed {now.num_since} times within an hour"
        elif len(now.setbacks) > 1 and not exit_.excused:
            kind, why = _kind(now)
            if kind == "restart" or (counted and kind == "tried"):
                restart[exit_.rank] = why
                # With a number that many more are made: the two that led to this one count no more.
                now = replace(now, tried=RESTARTED, setbacks=() if counted else now.setbacks)
            elif kind and not counted:
                hopeless[exit_.rank] = why
                if kind == "often":
                    movable.add(exit_.rank)
        by_rank[exit_.rank] = now  # behind the others: the last to fail
    return Verdict(tuple(by_rank.values())[-NUM_KEPT:], hopeless, frozenset(movable), restart)


def moved(troubles: Iterable[Trouble], ranks: Iterable[int]) -> tuple[Trouble, ...]:
    """*ranks* are tried on another node."""
    found = set(ranks)
    return tuple(replace(one, tried=MOVED) if one.rank in found else one for one in troubles)


def describe(trouble: Trouble, why: str) -> str:
    """The cause of the end, and the failures that led to it, for people."""
    listed = "; ".join(f"({number}) {setback.what}" for number, setback in enumerate(trouble.setbacks, 1))
    return f"rank {trouble.rank} fails again and again: {why}. Its failures since it last advanced: {listed}"


def advice(trouble: Trouble) -> str:
    """What was tried, what is safe, what to type."""
    times = len(trouble.setbacks) - 1
    tried = [f"rank {trouble.rank} was replaced in place {_times(times)}"] if times else []
    tried += [trouble.tried] if trouble.tried else []
    return "\n".join(
        [
            f"tried since it last advanced: {', '.join(tried) or 'nothing'}",
            "safe: what job.checkpoint has committed, and what the script has saved itself",
            "to do: remove the cause, then type the same command again: it begins with the newest checkpoint of "
            "job.checkpoint, without one from the start. With --max-restarts N every failure is tried again, N times "
            "in all",
        ]
    )


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _setback(exit_: WorkerExit, epoch: int, incarnation: str) -> Setback:
    if exit_.pid == 0:  # there was no process
        how = exit_.message[:MESSAGE_CHARS] or "it could not be started"
    elif exit_.place:
        how = exit_.place
    else:
        how = f"killed by signal {-exit_.exit_code}" if exit_.exit_code < 0 else f"exit code {exit_.exit_code}"
    if exit_.begun:
        where = f"in iteration {exit_.iteration}"
    elif exit_.generation > epoch:
        where = "as a replacement, before an iteration"
    else:
        where = "before its first iteration"
    process = f"pid {exit_.pid} " if exit_.pid else ""
    what = f"{how}, {where} ({process}on {exit_.host})"
    is_own = exit_.pid != 0 and (exit_.exit_code > 0 or -exit_.exit_code in _OWN_SIGNALS)
    is_replacement = exit_.generation > epoch and not exit_.begun
    which = f"{incarnation}/{exit_.local_rank}/{exit_.generation}/{exit_.pid}"
    return Setback(
        exit_.generation, what, exit_.place, exit_.iteration, exit_.num_iterations, is_replacement, is_own, which
    )  # fmt: skip


def _in_hour(trouble: Trouble, at_s: int) -> Trouble:
    if trouble.num_since and abs(at_s - trouble.since_s) < HOUR_S:
        return replace(trouble, num_since=trouble.num_since + 1)
    return replace(trouble, since_s=at_s, num_since=1)


def _with(trouble: Trouble, new: Setback) -> Trouble:
    """What came before is forgotten if the rank has advanced since."""
    if trouble.setbacks and not _is_stuck((trouble.setbacks[-1], new)):
        return replace(trouble, setbacks=(new,), tried="")
    # The first of many in a row are of no use.
    return replace(trouble, setbacks=(*trouble.setbacks, new)[-2 * MOST :])


def _is_stuck(setbacks: Sequence[Setback]) -> bool:
    """Whether the rank has not advanced between the first and the last of them.

    It has if it came ten iterations further. If it did not, because all began again with a checkpoint, it has made
    progress by ten iterations of its own, unless it fails at the same ones again.
    """
    at = [setback.iteration for setback in setbacks if setback.iteration >= 0]
    done = sum(setback.num_iterations for setback in setbacks[1:])
    if len(at) < 2:
        return done < WINDOW
    if max(at) - at[0] >= WINDOW:
        return False
    return done < WINDOW or max(at) - min(at) < WINDOW


def _kind(trouble: Trouble) -> tuple[str, str]:
    """What the last of several failures without progress means."""
    *before, last = trouble.setbacks
    if trouble.tried:
        return "tried", f"it has failed again after {trouble.tried}"
    if last.is_replacement and last.is_own and before[-1].is_replacement and before[-1].is_own:
        return "restart", f"two replacements of rank {trouble.rank} have failed before an iteration ({last.what})"
    same = [one for one in before if one.place and one.place == last.place and _is_stuck((one, last))]
    if any(not (one.is_replacement and last.is_replacement) for one in same):
        return "same", f"the same exception at the same place, {last.place}, without {WINDOW} iterations in between"
    if len(trouble.setbacks) >= MOST and _is_stuck(trouble.setbacks[-MOST:]):
        return "often", f"{MOST} failures within {WINDOW} iterations of its own"
    return "", ""
