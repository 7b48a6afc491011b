"""Events as torch's agent records them (`torch.distributed.elastic.events`), for the handler of `--event-log-handler`.

What an event holds is worked out here, from what the agent knows; torch's functions record it. Must never decide
anything, and never let a handler that fails touch the job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from swift_agent.launch.config import AgentConfig
from swift_agent.launch.options import SWIFT_BACKEND
from swift_agent.wire.environment import Placement

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ended:
    """One local worker at the end of the job. *failure*: what it has recorded of how it failed, None if it has not
    failed."""

    local_rank: int
    pid: int
    exit_code: int | None
    failure: Mapping[str, Any] | None


class AgentEvents:
    """Of one agent; from any thread."""

    def __init__(self, config: AgentConfig, put: Callable[[Event, str], None] = record) -> None:
        self._config, self._put = config, put
        self._host = socket.getfqdn(socket.gethostname())
        self._began_s = time.monotonic()
        self._waits_since_s: float | None = self._began_s
        self._place: Placement | None = None
        self._run_time_s = self._num_restarts = 0
        self._is_broken = False

    # ---- what happens ----

    def waits(self) -> None:
        """Workers are lost: this node is about to meet the others again."""
        if self._waits_since_s is None:
            self._waits_since_s = time.monotonic()

    def meets(self, place: Placement) -> None:
        """It has met them, and starts workers at *place*."""
        since_s, self._waits_since_s = self._waits_since_s, None
        now_s = time.monotonic()
        waited_ms = (now_s - (now_s if since_s is None else since_s)) * 1000
        self._num_restarts = place.restart_count
        # torch meets first, and hands out ranks then; here both are known at once.
        self._record("RENDEZVOUS", EventSource.AGENT, duration_ms=waited_ms)
        self._record("ASSIGN_WORKER_RANKS", EventSource.AGENT, duration_ms=0.0)
        self._place = place

    def started(self, local_rank: int, pid: int) -> None:
        self._record("START", EventSource.WORKER, local_rank=local_rank, worker_id=pid)

    def ended(self, succeeded: bool, workers: list[Ended]) -> None:
        """The job has ended, and with it the *workers* of this node."""
        self._run_time_s = int(time.monotonic() - self._began_s)
        for worker in workers:
            if worker.failure is not None:
                state = "FAILED"
            else:
                state = "SUCCEEDED" if succeeded and worker.exit_code in (0, None) else "TERMINATED"
            failed = worker.failure is not None
            self._record(
                state, EventSource.WORKER, local_rank=worker.local_rank, worker_id=worker.pid,
                raw_error=json.dumps(worker.failure) if failed else None,
                exit_code=worker.exit_code if failed else None, worker_pid=worker.pid if failed else None,
            )  # fmt: skip

    @contextlib.contextmanager
    def until_the_agent_ends(self) -> Iterator[None]:
        """The life of this agent. A job that has failed is not its own failure."""
        try:
            yield
        except ChildFailedError:
            self.agent_ended()
            raise
        except Exception:
            self.agent_ended(traceback.format_exc())
            raise
        self.agent_ended()

    def agent_ended(self, raw_error: str | None = None) -> None:
        """It has done its work, even if the job has failed; *raw_error*: or it has not, and why."""
        self._run_time_s = int(time.monotonic() - self._began_s)
        self._record("SUCCEEDED" if raw_error is None else "FAILED", EventSource.AGENT, raw_error=raw_error)

    def timer(self, name: str, request: Any) -> None:
        """Of `watchdog`: it was started, or a timer has run out."""
        details = {"watchdog_event": name}
        if request is not None:
            details |= {
                "worker_pid": str(request.worker_pid), "scope_id": request.scope_id,
                "expiration_time": str(request.expiration_time), "signal": str(request.signal),
            }  # fmt: skip
        metadata = self._metadata("RUNNING", None, None, None, details)
        self._send(Event(name, EventSource.AGENT, metadata=metadata))

    # ---- what torch makes of it ----

    def _record(
        self, state: str, source: EventSource, *, local_rank: int | None = None, worker_id: int | None = None,
        raw_error: str | None = None, duration_ms: float | None = None, exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> None:  # fmt: skip
        place = self._place
        details: dict[str, Any] = {
            "group_world_size": None if place is None else place.num_slots,
            "entry_point": _entry_point(self._config.entrypoint),
        }
        rank = None
        if local_rank is not None and place is not None:
            rank = place.rank(local_rank)
            details |= {
                "local_rank": [local_rank], "role_rank": [place.role_rank(local_rank)],
                "role_world_size": [place.role_world_size], "exit_code": [exit_code], "worker_pid": [worker_pid],
            }  # fmt: skip
        metadata = self._metadata(state, rank, worker_id, raw_error, details)
        metadata["duration_ms"] = duration_ms
        self._send(Event(f"torchelastic.worker.status.{state}", source, metadata=metadata))

    def _metadata(
        self, state: str, rank: int | None, worker_id: int | None, raw_error: str | None, details: Mapping[str, Any]
    ) -> dict[str, Any]:
        place = self._place
        return {
            "run_id": self._config.job_id,
            "global_rank": rank,
            "group_rank": None if place is None else place.slot,
            "worker_id": None if worker_id is None else str(worker_id),
            "role": self._config.role,
            "hostname": self._host,
            "state": state,
            "total_run_time": self._run_time_s,
            "rdzv_backend": SWIFT_BACKEND,
            "raw_error": raw_error,
            "metadata": json.dumps(details),
            "agent_restarts": self._num_restarts,
        }

    def _send(self, event: Event) -> None:
        try:
            self._put(event, self._config.launch.event_log_handler)
        except Exception as error:
            if not self._is_broken:
                log.warning("an event could not be recorded: %s: %s", type(error).__name__, error)
            self._is_broken = True


def _entry_point(entrypoint: Callable[..., Any] | str) -> str:
    return entrypoint.__qualname__ if callable(entrypoint) else os.path.basename(entrypoint)
