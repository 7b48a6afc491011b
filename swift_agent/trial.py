"""Imports tried in a fork of the standby server, which is thrown away: what a module does there is done to nobody.

A module that starts threads would spoil the server, since a thread does not live in a fork and what it holds would be
held for ever; one that initialises CUDA likewise; one may also exit, crash or hang. The server takes orders meanwhile.

Must never import anything in the process that it is used by.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swift_agent.process import die_with_parent

STARTS_THREADS = "it starts threads, which a fork does not have"


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


class Trial:
    """Of *modules*, in their order, up to the first that is unfit. `fileno` can be read when `hear` has something to
    do. *let_go*: for the fork, to close what belongs to the server only."""

    def __init__(self, modules: Sequence[str], let_go: Callable[[], None]) -> None:
        self.modules = tuple(modules)
        self._heard = b""
        server_pid = os.getpid()
        self._fd, write_fd = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._fd)
                let_go()
                die_with_parent(server_pid)
                _try(self.modules, write_fd)
            finally:
                os._exit(0)
        os.close(write_fd)

    def fileno(self) -> int:
        return self._fd

    def hear(self) -> bool:
        """Take in what it says. Whether it has ended; its process is no more then."""
        data = os.read(self._fd, 65536)
        if data:
            self._heard += data
            return False
        self._end()
        return True

    def cancel(self) -> None:
        """Nobody wants to know any more."""
        os.kill(self._pid, signal.SIGKILL)
        self._end()

    def findings(self, why_ended: str = "its import ends the process") -> tuple[Findings, tuple[str, ...]]:
        """Of one that has ended: what is known now, and the modules that are still to be tried. *why_ended*: what is
        to be said of a module that it did not get past."""
        found, said = Findings(), [json.loads(line) for line in self._heard.split(b"\n")[:-1]]
        for name, kind, why in said:
            if kind == "good":
                found.good.append(name)
            elif kind == "failed":
                found.failed[name] = why
            else:
                found.unfit[name] = why
        rest = self.modules[len(said) :]
        if rest and not found.unfit:
            found.unfit[rest[0]] = why_ended
            rest = rest[1:]
        return found, tuple(name for name in rest if not is_below(name, tuple(found.unfit)))

    def _end(self) -> None:
        os.close(self._fd)
        os.waitpid(self._pid, 0)


def import_one(name: str) -> str:
    """Import it; why that failed, or ''."""
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A user's module may fail in any way, also by exiting; the worker imports it again, and reports it.
        return f"{type(error).__name__}: {error}"
    return ""


def _try(modules: Sequence[str], report_fd: int) -> None:
    # What they print, the worker prints as well, where it belongs.
    with open(os.devnull, "w") as nowhere:
        for fd in (1, 2):
            os.dup2(nowhere.fileno(), fd)
    with open(report_fd, "w", encoding="utf-8") as report:
        for name in modules:
            before = num_threads()
            why = import_one(name)
            unfit = _why_unfit(before)
            kind = "unfit" if unfit else "failed" if why else "good"
            print(json.dumps([name, kind, unfit or why]), file=report, flush=True)
            if unfit:
                return  # what follows is not to blame


def _why_unfit(before: int) -> str:
    """*before*: how many threads there were before the import."""
    if threading.active_count() > 1 or num_threads() > before:
        return STARTS_THREADS
    torch = sys.modules.get("torch")
    with contextlib.suppress(AttributeError):  # no torch, or half of one
        if torch is not None and torch.cuda.is_initialized():
            return "it initialises CUDA, which a fork cannot use"
    return ""
