"""What a process was told about its log of messages: the room it may take on the node, where it is copied to, and where
what it does is counted.

Must never read the environment itself.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from swift_agent.wire.environment import WorkerEnvironment
from swift_agent.wire.log_counters import MyLogCounters
from swift_logging_store.log.archive import directory_name


def bytes_for_logs(told: WorkerEnvironment, directory: Path) -> tuple[int, str]:
    """What one rank's log may take, and what that is, in words: what the user has said, or half of what is free, over
    the ranks of this node."""
    if told.message_log_bytes is not None:
        return told.message_log_bytes, "what --message-log-limit leaves this rank"
    free = shutil.disk_usage(directory).free
    return free // 2 // told.num_local, "half of what was free on the disk"


def compares(told: WorkerEnvironment) -> bool:
    """Whether what is sent again has to be what was sent before: not where repeated gradients are added in another
    order."""
    return told.parallel_sum != "unordered"


def counters(told: WorkerEnvironment) -> MyLogCounters:
    """Where this process counts what its log does, for the metrics of its agent."""
    return MyLogCounters(told.directory or None, told.number)


def copied_to(told: WorkerEnvironment, rank: int) -> tuple[str, str] | None:
    """The store to which the log of *rank* is copied, and its directory there, whose name no other process has; None
    if the user has named no store."""
    if not told.log_store or told.share:
        return None
    return told.log_store, directory_name(told.run_id, rank, told.run, told.generation, uuid.uuid4().hex[:8])
