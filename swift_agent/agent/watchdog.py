"""The server of `torch.distributed.elastic.timer` for the workers of one node: it kills those that let a timer run out.

It runs where the launcher has `TORCHELASTIC_ENABLE_FILE_TIMER=1`; workers find it by `TORCHELASTIC_TIMER_FILE`. What
becomes of a worker that it has killed is the agent's business, as with any other death. It must never kill the agent,
as torch's does: the node would be gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from swift_agent.torch_private.launcher import FileTimers
from swift_agent.wire.environment import ENV_TIMERS

ENV_ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
# As torch's agent has it.
INTERVAL_S = 0.1


class Watchdog:
    """Runs from here on. *path*: of its pipe, which is made here and removed by `stop`."""

    def __init__(self, path: str, job_id: str, tell: Callable[[str, Any], None]) -> None:
        self.path = path
        self._server = FileTimers(path, job_id, INTERVAL_S, daemon=True, log_event=tell)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()


def start(environ: Mapping[str, str], directory: str, job_id: str, tell: Callable[[str, Any], None]) -> Watchdog | None:
    """The server; None if it is not asked for. Its pipe is where *environ* says, else in *directory*."""
    if environ.get(ENV_ENABLE) != "1":
        return None
    return Watchdog(environ.get(ENV_TIMERS) or os.path.join(directory, "timers"), job_id, tell)
