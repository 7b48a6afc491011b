"""Tries imports in a fork of the standby server, which is thrown away: what a module does there has no effect.

A module that starts threads would spoil the server, since a thread does not live in a fork and what it holds would be
held for ever; one that initialises CUDA likewise; one may also exit, crash, fork or hang. The server takes orders
meanwhile.

A `Trial` must never import anything in the process that makes it; `import_one` is for what has passed one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swift_agent.agent.processes.linux import die_with_parent

STARTS_THREADS = "it starts threads, which a fork does not have"
# Without a word: an import hangs.
TIMEOUT_S = 60.0
# The kernel lists a thread for a moment after it was joined.
_THREAD_LOOKS, _THREAD_LOOK_S = 50, 0.002
_MAX_REASON = 1000


@dataclass
class Findings:
    """*good*: can be imported before a fork. *failed*, *unfit*: cannot, with the reason; the first is the worker's to
    report, too. A package that is unfit stands for all below it."""

    good: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)


def is_below(name: str, packages: Sequence[str]) -> bool:
    """Whether *name* is one of *packages* or in one: its import is theirs as well."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def num_threads() -> int:
    """Of this process, those too that Python does not know."""
    return len(os.listdir("/proc/self/task"))


def has_more_threads(before: int) -> bool:
    """Than *before*, and for good."""
    for _ in range(_THREAD_LOOKS):
        if num_threads() <= before and threading.active_count() == 1:
            return False
        time.sleep(_THREAD_LOOK_S)
    return True


class Trial:
    """Of *modules*, in their order, up to the first that is unfit. `fileno` can be read when `hear` has something to
    do. *let_go*: for the fork, to close what belongs to the server only."""

    def __init__(self, modules: Sequence[str], let_go: Callable[[], None]) -> None:
        self.modules = tuple(modules)
        self._said: list[tuple[str, str, str]] = []
        self._heard = b""
        self._deadline_s = time.monotonic() + TIMEOUT_S
        server_pid = os.getpid()
        self._fd, write_fd = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.setpgid(0, 0)
                os.close(self._fd)
                let_go()
                die_with_parent(server_pid)
                _try(self.modules, write_fd)
            finally:
                os._exit(0)
        with contextlib.suppress(OSError):
            os.setpgid(self._pid, self._pid)  # before the group can be killed
        os.close(write_fd)

    def fileno(self) -> int:
        return self._fd

    @property
    def left_s(self) -> float:
        """Until it has been silent for too long."""
        return max(0.0, self._deadline_s - time.monotonic())

    def hear(self) -> bool:
        """Take in what it says. Whether it has ended; its process is no more then."""
        data = os.read(self._fd, 65536)
        self._deadline_s = time.monotonic() + TIMEOUT_S
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            self._said.append(_word(line, self.modules[len(self._said)]))
            if len(self._said) == len(self.modules) or self._said[-1][1] == "unfit":
                break
        else:
            if data:
                return False
        self.end()
        return True

    def end(self) -> None:
        """With all that its modules have started. May be repeated."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        for kill in (os.killpg, os.kill):  # it may have left its group
            with contextlib.suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def findings(self, why_ended: str = "its import ends the process") -> tuple[Findings, tuple[str, ...]]:
        """Of one that has ended: what is known now, and the modules that are still to be tried. *why_ended*: what is
        to be said of a module that it did not get past."""
        found = Findings()
        for name, kind, why in self._said:
            if kind == "good":
                found.good.append(name)
            elif kind == "failed":
                found.failed[name] = why
            else:
                found.unfit[name] = why
        rest = self.modules[len(self._said) :]
        if rest and not found.unfit:
            found.unfit[rest[0]] = why_ended
            rest = rest[1:]
        return found, tuple(name for name in rest if not is_below(name, tuple(found.unfit)))


def import_one(name: str) -> str:
    """Import it; why that failed, or ''."""
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A user's module may fail in any way, also by exiting; the worker imports it again, and reports it.
        return f"{type(error).__name__}: {error}"[:_MAX_REASON]
    return ""


def _word(line: bytes, module: str) -> tuple[str, str, str]:
    """What a line says of *module*: its name, "good", "failed" or "unfit", and why."""
    try:
        name, kind, why = json.loads(line)
    except (ValueError, TypeError):
        name, kind, why = "", "", ""
    if name != module or kind not in ("good", "failed", "unfit"):
        return module, "unfit", "it writes into files of others"
    return name, kind, str(why)


def _try(modules: Sequence[str], report_fd: int) -> None:
    # What they print, the worker prints as well, where it belongs.
    with open(os.devnull, "w") as nowhere:
        for fd in (1, 2):
            os.dup2(nowhere.fileno(), fd)
    pid = os.getpid()
    with open(report_fd, "w", encoding="utf-8") as report:
        for name in modules:
            before = num_threads()
            why = import_one(name)
            if os.getpid() != pid:
                os._exit(0)  # a module has forked, and this process was not asked
            unfit = _why_unfit(before)
            kind = "unfit" if unfit else "failed" if why else "good"
            print(json.dumps([name, kind, unfit or why]), file=report, flush=True)
            if unfit:
                return  # what follows is not to blame


def _why_unfit(before: int) -> str:
    """*before*: how many threads there were before the import."""
    if has_more_threads(before):
        return STARTS_THREADS
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        return "it has the ends of processes ignored, for which the server waits"
    torch = sys.modules.get("torch")
    with contextlib.suppress(AttributeError):  # no torch, or half of one
        if torch is not None and torch.cuda.is_initialized():
            return "it initialises CUDA, which a fork cannot use"
    return ""
