"""What this process was told about its log of messages: the room it may take on the node, where it is copied to, and
where what it does is counted.

Read from the environment when the log begins; must never change it.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from swift_agent.wire.channel import ENV_SOCKET
from swift_agent.wire.environment import (
    ENV_GENERATION,
    ENV_HELPER,
    ENV_LOCAL_RANK,
    ENV_LOG_STORE,
    ENV_MESSAGE_LOG_BYTES,
    ENV_PARALLEL_SUM,
    ENV_RUN,
)
from swift_agent.wire.log_counters import MyLogCounters
from swift_logging_store.log.archive import directory_name


def bytes_for_logs(directory: Path) -> tuple[int, str]:
    """What one rank's log may take, and what that is, in words: what the user has said, or half of what is free, over
    the ranks of this node."""
    if given := os.environ.get(ENV_MESSAGE_LOG_BYTES):
        return int(given), "what --message-log-limit leaves this rank"
    free = shutil.disk_usage(directory).free
    return free // 2 // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))), "half of what was free on the disk"


def compares() -> bool:
    """Whether what is sent again has to be what was sent before: not where repeated gradients are added in another
    order."""
    return os.environ.get(ENV_PARALLEL_SUM) != "unordered"


def counters() -> MyLogCounters:
    """Where this process counts what its log does, for the metrics of its agent."""
    env = os.environ
    if ENV_SOCKET not in env or ENV_LOCAL_RANK not in env:
        return MyLogCounters()
    return MyLogCounters(os.path.dirname(env[ENV_SOCKET]), int(env[ENV_LOCAL_RANK]))


def copied_to(rank: int) -> tuple[str, str] | None:
    """The store to which the log of *rank* is copied, and its directory there, whose name no other process has; None
    if the user has named no store."""
    env = os.environ
    if not (url := env.get(ENV_LOG_STORE)) or ENV_HELPER in env:
        return None
    name = directory_name(
        env["TORCHELASTIC_RUN_ID"], rank, env[ENV_RUN], int(env[ENV_GENERATION]), uuid.uuid4().hex[:8]
    )
    return url, name
