"""Linux process primitives that Python has no function for: parent-death signal, subreaper, one process's end.

This module must never decide who lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent dies; exits at once if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def become_subreaper() -> None:
    """Orphans below this process become its children, so that it can wait for them and none is left behind."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def expect_children() -> None:
    """An inherited SIGCHLD that is ignored would have the kernel throw away how children end."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def reap(pid: int) -> int | None:
    """The exit code of a child that has ended (negative: signal), None while it runs. Must be called once at most
    after that.
    """
    try:
        waited, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -signal.SIGKILL  # reaped by somebody else: how it ended is lost
    return None if waited == 0 else os.waitstatus_to_exitcode(status)


def reap_strangers(known: set[int]) -> list[int]:
    """Reap ended children that are not *known*: orphans of workers that this process inherited. Returns their ids."""
    reaped: list[int] = []
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return reaped
        if info is None or info.si_pid in known:
            return reaped
        os.waitpid(info.si_pid, 0)
        reaped.append(info.si_pid)


def signal_group(pid: int, signum: int) -> None:
    """Signal the process group that *pid* leads: a worker and what it started. A group that is gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)


def signal_living(pid: int, signum: int) -> None:
    """Like `signal_group`, for a child that has not been reaped: its id cannot belong to anybody else."""
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        # A standby that was forked a moment ago leads no group yet; it must not escape.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


# For systems whose setpriv cannot set a parent-death signal. Costs the start of an interpreter.
_GUARD = """
import ctypes, os, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != parent:
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Guard:
    """Makes commands die with this process, also when it is killed."""

    def __init__(self) -> None:
        self._prefix: list[str] | None = None

    def wrap(self, command: Sequence[str]) -> list[str]:
        if self._prefix is None:
            self._prefix = self._find()
        return [*self._prefix, *command]

    def _find(self) -> list[str]:
        setpriv = shutil.which("setpriv")
        if setpriv is not None:
            usage = subprocess.run([setpriv, "--help"], capture_output=True, text=True, timeout=10)
            if "--pdeathsig" in usage.stdout:
                return [setpriv, "--pdeathsig", "KILL", "--"]
        return [sys.executable, "-S", "-E", "-c", _GUARD, str(os.getpid())]
