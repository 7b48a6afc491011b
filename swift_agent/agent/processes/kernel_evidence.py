"""What the kernel knows of the end of a process: kills for want of memory, the usual reason of a SIGKILL that nobody
has sent, and errors of GPUs (Xid), which end a process with whatever its libraries make of them.

The kernel counts such kills for each cgroup (`memory.events` of version 2, `memory.oom_control` of version 1) and for
the machine (`/proc/vmstat`). It does not say there which process it was, so a kill is evidence for a while only. An
Xid is a line of its log, `/dev/kmsg`, which a container may not see. And what memory there is, before it comes to that.

Must never raise: a counter that cannot be read is none.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from pathlib import Path

# A worker whose end is seen so long after a kill was counted, or sooner, may have died of it.
RECENT_S = 5.0
# A library may wait for a GPU that is gone before it gives up.
XID_RECENT_S = 60.0
# `4,1234,5678901,-;NVRM: Xid (PCI:0000:3b:00): 79, ...`: priority, number, microseconds since the machine started.
_XID = re.compile(r"^\d+,\d+,(?P<us>\d+),[^;]*;(?P<line>NVRM: Xid [^\n]*)")


class MemoryKills:
    """Of the cgroup of this process, in which its children are, too. *root*: of the file system."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._counters = _counters(root)
        self._counts = {what: _count(path) for what, path in self._counters.items()}
        self._seen_s, self._what = -math.inf, ""

    def look(self, now_s: float) -> None:
        """Now and then, so that a kill of some other process is not taken for that of a worker much later."""
        for what, path in self._counters.items():
            before, now = self._counts[what], _count(path)
            if now > before and (now_s > self._seen_s or not self._what):
                self._seen_s, self._what = now_s, f"oom_kill of {what} has gone from {before} to {now}"
            self._counts[what] = now

    def evidence(self, now_s: float) -> str:
        """One clause, if a process was killed just now; else ''."""
        self.look(now_s)
        if now_s - self._seen_s > RECENT_S:
            return ""
        return f"the kernel has killed a process for want of memory ({self._what})"


class KernelLog:
    """What it says of GPUs from now on."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._fd = -1
        self._last_s, self._line = -math.inf, ""
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def evidence(self, now_s: float) -> str:
        """One clause, if a GPU of this machine had an error just now; else ''. *now_s*: monotonic."""
        while self._fd >= 0:
            try:
                record = os.read(self._fd, 8192).decode(errors="replace")
            except BrokenPipeError:  # records were dropped before they were read
                continue
            except OSError:  # nothing is there
                break
            if not record:
                break
            found = _XID.match(record)
            if found:
                self._last_s, self._line = int(found["us"]) / 1e6, found["line"].strip()
        return f"the kernel's log says: {self._line}" if now_s - self._last_s <= XID_RECENT_S else ""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that a new child of this process could have: of the machine, and of each cgroup above it that has a limit.
    None: not known. What files take in memory counts as free: it is given back first."""
    available = re.findall(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.M)
    found = [int(number) * 1024 for number in available]
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            top, most, now, prefix = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, most, now, prefix = (
                root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_",
            )  # fmt: skip
        else:
            continue
        parts = Path(name.strip("/")).parts
        for depth in range(len(parts) + 1):
            here = top.joinpath(*parts[:depth])
            limit, used = _text(here / most).strip(), _text(here / now).strip()
            if limit.isdecimal() and used.isdecimal():
                files = re.findall(rf"^{prefix}(?:in)?active_file (\d+)", _text(here / "memory.stat"), re.M)
                found.append(max(0, int(limit) - int(used) + sum(map(int, files))))
    return min(found, default=None)


def resident_bytes(pid: int, root: Path = Path("/")) -> int:
    """Of a process, in memory; 0 if there is none."""
    fields = _text(root / f"proc/{pid}/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 and pid else 0


def _counters(root: Path) -> dict[str, Path]:
    """By what they count for, the nearest first."""
    found = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        # In a container the name may be one that only the host has: then the root is the container's own.
        for path in (name.strip("/"), ""):
            if number == "0" and not controllers:
                files = [root / "sys/fs/cgroup" / path / "memory.events"]
            elif "memory" in controllers.split(","):
                files = [root / "sys/fs/cgroup/memory" / path / "memory.oom_control"]
            else:
                break
            there = [file for file in files if file.is_file()]
            if there:
                found[f"the cgroup /{path}"] = there[0]
                break
    found["this machine"] = root / "proc/vmstat"
    return found


def _count(path: Path) -> int:
    for line in _text(path).splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdecimal():
            return int(number)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
