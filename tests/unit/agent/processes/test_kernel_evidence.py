"""What the kernel's counters of kills say, in both versions of cgroups; and a process that it kills here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_agent.agent.processes.kernel_evidence import (
    RECENT_S,
    XID_RECENT_S,
    KernelLog,
    MemoryKills,
    free_memory,
    resident_bytes,
)

V1 = "4:memory:/job\n3:cpuset:/\n0::/\n"
V2 = "0::/job\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {}\noom_group_kill 0\n"


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("groups", "file", "text", "what"),
    [
        (V1, "sys/fs/cgroup/memory/job/memory.oom_control", CONTROL, "the cgroup /job"),
        (V1, "sys/fs/cgroup/memory/memory.oom_control", CONTROL, "the cgroup /"),  # as a container sees it
        (V2, "sys/fs/cgroup/job/memory.events", EVENTS, "the cgroup /job"),
        (V2, "sys/fs/cgroup/memory.events", EVENTS, "the cgroup /"),
        ("", "proc/vmstat", "nr_free_pages 7\noom_kill {}\n", "this machine"),
    ],
)
def test_a_kill_is_evidence_for_a_while(groups: str, file: str, text: str, what: str, tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", groups)
    write(tmp_path, "proc/vmstat", "oom_kill 5\n")
    write(tmp_path, file, text.format(5))
    kills = MemoryKills(tmp_path)
    assert kills.evidence(10.0) == ""
    write(tmp_path, file, text.format(7))
    assert kills.evidence(11.0) == (
        f"the kernel has killed a process for want of memory (oom_kill of {what} has gone from 5 to 7)"
    )
    assert kills.evidence(11.0 + RECENT_S) and not kills.evidence(11.1 + RECENT_S)
    kills.look(20.0)
    write(tmp_path, file, text.format(8))
    kills.look(30.0)  # of another process, which was nobody's end
    assert kills.evidence(31.0 + RECENT_S) == ""


@pytest.mark.parametrize(
    ("groups", "limits", "free"),
    [
        (V2, {}, 3000 * 1024),
        ("", {}, 3000 * 1024),
        (V2, {"job/memory.max": "1000000", "job/memory.current": "900000"}, 100_000),
        (V2, {"job/memory.max": "max", "job/memory.current": "900000"}, 3000 * 1024),
        (V2, {"memory.max": "1000000", "memory.current": "1000001"}, 0),
        (V2, {"job/memory.max": "1000000", "job/memory.current": "900000",
              "job/memory.stat": "anon 5\ninactive_file 7000\nactive_file 3000\n"}, 110_000),
        (V1, {"memory/job/memory.limit_in_bytes": "1000000", "memory/job/memory.usage_in_bytes": "900000",
              "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n"}, 100_050),
    ],
)  # fmt: skip
def test_memory_that_is_free(groups: str, limits: dict[str, str], free: int, tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", groups)
    write(tmp_path, "proc/meminfo", "MemTotal:       9000 kB\nMemAvailable:   3000 kB\n")
    for name, text in limits.items():
        write(tmp_path, f"sys/fs/cgroup/{name}", text)
    assert free_memory(tmp_path) == free


def test_memory_of_which_nothing_is_known(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None and resident_bytes(7, tmp_path) == 0 == resident_bytes(0)
    assert resident_bytes(os.getpid()) > 1 << 20 and (free_memory() or 0) > 0


def test_the_nearest_counter_is_named(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", V2)
    write(tmp_path, "proc/vmstat", "oom_kill 5\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.events", EVENTS.format(0))
    kills = MemoryKills(tmp_path)
    write(tmp_path, "proc/vmstat", "oom_kill 6\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.events", EVENTS.format(1))
    assert "the cgroup /job" in kills.evidence(1.0)


def test_without_counters_there_is_no_evidence(tmp_path: Path) -> None:
    assert MemoryKills(tmp_path).evidence(1.0) == ""


SCRIPT = """
import os, subprocess, sys, time
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from swift_agent.agent.processes.kernel_evidence import MemoryKills
kills = MemoryKills()
code = subprocess.run([sys.executable, "-S", "-c", "x = bytearray(1 << 30)"]).returncode
print(code, kills.evidence(time.monotonic()))
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """With 100 MB."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((name for _, controllers, name in groups if controllers == "memory"), None)
    base, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if own is None:
        own, base, limit = (
            next(name for number, _, name in groups if number == "0"),
            Path("/sys/fs/cgroup"),
            "memory.max",
        )
    group = base / own.strip("/") / f"swift-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(100 << 20))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield group
    group.rmdir()


def test_a_process_that_the_kernel_kills(small_cgroup: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(small_cgroup)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.startswith("-9 the kernel has killed a process for want of memory (oom_kill of the cgroup /"), (
        done.stdout + done.stderr
    )
    assert small_cgroup.name in done.stdout and "has gone from 0 to 1" in done.stdout


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK | os.W_OK), reason="needs root and the kernel's log, /dev/kmsg")
def test_an_error_of_a_gpu_is_a_line_of_the_kernels_log() -> None:
    """A real line, in the real log: as the driver writes it."""
    log = KernelLog()
    assert log.evidence(time.monotonic()) == ""
    line = f"NVRM: Xid (PCI:0000:3b:00): 79, pid={os.getpid()}, name=python, GPU has fallen off the bus."
    with open("/dev/kmsg", "w") as kernel:
        kernel.write("<4>something else\n")
    with open("/dev/kmsg", "w") as kernel:
        kernel.write(f"<4>{line}\n")
    assert log.evidence(time.monotonic()) == f"the kernel's log says: {line}"
    assert log.evidence(time.monotonic() + 2 * XID_RECENT_S) == ""
    log.close()
    # One that begins later knows nothing of it.
    later = KernelLog()
    assert later.evidence(time.monotonic()) == ""
    later.close()


def test_a_log_that_cannot_be_read_says_nothing() -> None:
    log = KernelLog("/nowhere")
    assert log.evidence(0.0) == ""
    log.close()
