"""Temporary directories that do not outlive their owner for long: if it is killed, the next process cleans up.

A directory is owned by the process that holds the lock on the file in it. Must never touch one without that file, one
of another user, or one whose owner lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

LOCK_NAME = "owner.lock"


def own(directory: Path) -> int:
    """Mark *directory* as in use for as long as this process lives; returns the descriptor that holds the lock."""
    unfinished = directory / f".{LOCK_NAME}"
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    # Seen under its name only once it is locked: a directory that is just being made is not taken for left over.
    os.rename(unfinished, directory / LOCK_NAME)
    return descriptor


def remove_orphans(parent: Path, prefix: str) -> None:
    """Remove the owned directories in *parent* of our user whose owner was killed: their lock is free.

    They are named by *prefix* and what `mkdtemp` appends, which has no hyphen: `n1-` is not the beginning of what
    another host, `n1-b`, has made in a directory that both share.
    """
    for directory in parent.glob(f"{prefix}*"):
        if "-" in directory.name.removeprefix(prefix):
            continue
        try:
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # being made or removed by another process, or not ours
        try:
            with contextlib.suppress(BlockingIOError):  # in use
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)
