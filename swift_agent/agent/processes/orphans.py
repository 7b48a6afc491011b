"""Waits for what the processes of this agent leave behind: children of theirs, which become ours when they die (a
subreaper gets them), and standbys.

They are known by their process group, which one of ours leads. A caller of `swift_agent.run.main` has children in
the same process: their ends are its own, and must never be taken here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

from swift_agent.agent.processes.linux import signal_group

PAUSE_S = 0.01


class Orphans:
    """*all_are_ours*: this process belongs to the agent alone, so that every unknown child is an orphan, also one that
    has left its group."""

    def __init__(self, all_are_ours: bool = False) -> None:
        self._all_are_ours = all_are_ours
        self._groups: set[int] = set()

    def expect(self, leader: int) -> None:
        """Process *leader* is one of ours, and leads a group."""
        self._groups.add(leader)

    def reap(self, known: Collection[int]) -> list[int]:
        """Reap those that have ended, but for *known*, which others wait for. Returns their ids."""
        reaped = _reap(os.P_ALL, 0, known) if self._all_are_ours else []
        for group in tuple(self._groups):
            reaped += _reap(os.P_PGID, group, known)
            if group not in known and not _is_there(group):
                self._groups.discard(group)
        return reaped

    def end(self, timeout_s: float) -> None:
        """Kill and reap all of them; nothing of ours is alive any more."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for group in self._groups:
                signal_group(group, signal.SIGKILL)
            self.reap(())
            if not self._groups or time.monotonic() >= deadline_s:
                self._groups.clear()
                return
            time.sleep(PAUSE_S)


def _reap(kind: int, number: int, known: Collection[int]) -> list[int]:
    reaped: list[int] = []
    while True:
        try:
            info = os.waitid(kind, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return reaped
        if info is None or info.si_pid in known:
            return reaped
        with contextlib.suppress(ChildProcessError):  # another thread waits for that one, and was first
            os.waitpid(info.si_pid, 0)
        reaped.append(info.si_pid)


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # gone, or another user's, which we cannot end
        return False
    return True
