"""What tests and soaks must not leave behind: processes, networks and files of their own.

A process whose parent was killed is nobody's child any more; it is recognised by a token that it inherits in its
environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import threading
import uuid
from pathlib import Path

import psutil

from swift_rendezvous.store.owned_directory import LOCK_NAME

# Of the directory in which a run of the tests has its temporary files.
TESTS_PREFIX = "swift-tests-"
TOKEN_NAME = "SWIFT_TEST_SESSION"
_token = f"{TOKEN_NAME}={uuid.uuid4()}"


def mark_children() -> None:
    """What this process starts from here on is found by `our_processes`."""
    os.environ[TOKEN_NAME] = _token.partition("=")[2]


def our_processes() -> dict[int, psutil.Process]:
    """Living processes that this one has started, by pid, orphans included."""
    pids = {child.pid for child in psutil.Process().children(recursive=True)}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if _token.encode() in (entry / "environ").read_bytes():
                    pids.add(int(entry.name))
            except OSError:
                continue  # it ended, or it is another user's
    found = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            # multiprocessing keeps one helper per interpreter until the end, by design.
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline()):
                found[pid] = process
        except psutil.Error:
            continue
    return found


# What the product, and servers that the tests start, call their files where all programs have theirs.
_FILES = ("swift-", "torchelastic_", "seaweedfs-", "jetty-", "hadoop-", "hsperfdata_", "libhdfs")


def files_in(directory: str) -> set[str]:
    """What may be ours of this user's there, by name, and is used by nobody. Other jobs, and other runs of the tests,
    may be under way."""
    found = set()
    for entry in os.scandir(directory):
        with contextlib.suppress(FileNotFoundError):
            is_ours = entry.name.startswith(_FILES) and not entry.name.startswith(TESTS_PREFIX)
            if is_ours and entry.stat(follow_symlinks=False).st_uid == os.getuid() and not _is_in_use(entry.path):
                found.add(entry.name)
    return found


def _is_in_use(path: str) -> bool:
    """A directory whose owner lives, or a socket that is bound."""
    if f" {path}\n" in Path("/proc/net/unix").read_text():
        return True
    try:
        with open(os.path.join(path, LOCK_NAME)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def names_of_networks() -> set[str]:
    """Network namespaces and links of this machine, by name."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True).stdout.splitlines()
    return {line.split()[0].partition("@")[0] for line in (*spaces, *links) if line.strip()}


# Of a worker: they end with its process, and in no other way. A test that makes the parts of one has them to its end.
_OF_A_PROCESS = ("swift-checkpoints", "swift-comparison", "swift-log-writer", "swift-reductions")


def our_threads() -> set[threading.Thread]:
    """Those of the product in this process that something should have ended. It names them so."""
    return {
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("swift-") and thread.name not in _OF_A_PROCESS
    }
