"""Linux process primitives that Python has no function for: parent-death signal, subreaper, one process's end.

This module must never decide which process lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
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


@contextlib.contextmanager
def expecting_children() -> Iterator[None]:
    """While entered this process is a subreaper, and is told how its children end; then as it was before.

    An inherited SIGCHLD that is ignored would have the kernel throw away how children end. Outside of the main thread
    that stays so: Python allows no change there.
    """
    was_subreaper = ctypes.c_int()
    if _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was_subreaper), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    in_main_thread = threading.current_thread() is threading.main_thread()
    was_ignored = in_main_thread and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if was_ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    become_subreaper()
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, was_subreaper.value)
        if was_ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def reap(pid: int) -> int | None:
    """The exit code of a child that has ended (negative: signal), None while it runs. Must be called once at most
    after that.
    """
    try:
        waited, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -signal.SIGKILL  # reaped elsewhere: how it ended is lost
    return None if waited == 0 else os.waitstatus_to_exitcode(status)


def signal_group(pid: int, signum: int) -> None:
    """Signal the process group that *pid* leads: a worker and what it started. A group that is gone is no error, nor is
    one of which only processes of another user are left (setuid)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


_of_others: set[int] = set()  # children that have become another user's, and have been told of


def signal_living(pid: int, signum: int) -> None:
    """Like `signal_group`, for a child that has not been reaped: its id cannot belong to another. One that has
    become another user's (setuid) is told once, and left."""
    try:
        try:
            os.killpg(pid, signum)
        except ProcessLookupError:
            # A standby that has got its assignment a moment ago leads no group yet; it must not escape.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
    except PermissionError:
        if pid not in _of_others:
            _of_others.add(pid)
            log.warning(
                "worker %d has become a process of another user, whom this agent may not signal: it can be neither "
                "stopped nor ended from here. Start the agent as that user, and leave setuid out of the script", pid
            )  # fmt: skip


MAX_DESCRIPTORS = 1 << 16
# Of an agent that has just been started and has one worker; less, and gRPC ends the process in the middle of its start.
LEAST_FREE = 64
# Servers raise a lower limit, with a line.
LOW_LIMIT = 4096


def _limits_of_descriptors() -> tuple[int, int, int]:
    """The soft limit, what `many_descriptors` makes of it, and the hard limit. -1: there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    return soft, soft if soft == resource.RLIM_INFINITY else max(soft, most), hard


def want_of_descriptors() -> str:
    """Why this process has too few descriptors for an agent, whatever `many_descriptors` does; '' if it has enough."""
    _, most, hard = _limits_of_descriptors()
    if most == resource.RLIM_INFINITY:
        return ""
    try:
        # Not that of the listing itself.
        taken = sum(int(name) < most for name in os.listdir("/proc/self/fd")) - 1
    except OSError:
        taken = most  # there is not even one for this
    if most - taken >= LEAST_FREE:
        return ""
    return (
        f"the hard limit of open files is {hard}, and {taken} are open: an agent needs at least {LEAST_FREE} more, and "
        "some ten for each worker; type ulimit -n 65536, or set LimitNOFILE= of the unit"
    )


@contextlib.contextmanager
def many_descriptors() -> Iterator[str]:
    """As many as the hard limit allows, up to `MAX_DESCRIPTORS`: each watched node, and each worker of the job in a
    store, takes one, and so does each stranger for a moment. What is started meanwhile inherits the limit. Yields a
    line for people where it was low."""
    soft, most, hard = _limits_of_descriptors()
    if soft == most:
        yield ""
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield f"this agent and its workers may open {most} files (the limit was {soft})" if soft < LOW_LIMIT else ""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


def descends_from(pid: int, ancestor: int) -> bool:
    """Whether process *pid* is *ancestor*, or was started by it, directly or not. An orphan counts while it is in the
    session that *ancestor* leads: its parent may have been a shell that is gone."""
    one = pid
    while one > 1:
        if one == ancestor:
            return True
        try:
            if os.getsid(one) == ancestor:  # without a descriptor: there may be none left
                return True
            with open(f"/proc/{one}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]
        except (OSError, ValueError):
            return False
        one = int(parent)
    return False
