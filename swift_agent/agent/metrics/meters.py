"""What an agent measures of itself and of its job while it runs, for those who ask: figures, the stage of its loop, and
requests to etcd.

    loop: saw, turned, stage --> figures <-- server, in its own threads
    store: asked ------------->

Kept also where nobody asks: it costs microseconds for each change of the job's records, and nothing in between. What
the loop replaces as a whole (the agent's state, the figures) may be read in any thread. Must never make the loop wait;
who asks waits for etcd once after a recovery, and not while it is known to be away.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from swift_agent.agent.lifecycle.state import AgentState
from swift_agent.agent.metrics import health
from swift_agent.agent.metrics.figures import REQUEST_BOUNDS_S, Figures, Spread, observe, told
from swift_agent.errors import JobStopped
from swift_agent.launch.config import AgentConfig
from swift_agent.launch.directories import Directories
from swift_rendezvous.codec import RecordError, decode
from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import EventRecord
from swift_rendezvous.roster.view import View
from swift_rendezvous.store.kv import KeyValueStore

if TYPE_CHECKING:
    from swift_agent.agent.metrics.exposition import Snapshot


log = logging.getLogger(__name__)


class Requests:
    """To etcd. *asked* is called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.took: dict[str, Spread] = {}
        self.failed: dict[str, int] = {}

    def asked(self, name: str, seconds: float, is_answered: bool) -> None:
        with self._lock:
            self.took = {**self.took, name: self.took.get(name, Spread(REQUEST_BOUNDS_S)).plus(seconds)}
            if not is_answered:
                self.failed = {**self.failed, name: self.failed.get(name, 0) + 1}


class Meters:
    """*state*: the agent's, as of now; *is_away*, *lease_until_s*: of its presence; *num_standbys*: how many are ready,
    None where there can be none. Logs of messages are in *directories*, and what their workers count of them."""

    def __init__(
        self, config: AgentConfig, store: KeyValueStore, requests: Requests, directories: Directories,
        state: Callable[[], AgentState], *, is_away: Callable[[], bool], lease_until_s: Callable[[], float],
        num_standbys: Callable[[], int | None],
    ) -> None:  # fmt: skip
        self._config, self._store, self._requests, self._directories = config, store, requests, directories
        self._state, self._is_away, self._lease_until_s = state, is_away, lease_until_s
        self._num_standbys = num_standbys
        self._lock, self._figures, self._turned_s = threading.Lock(), Figures(), math.inf
        self._stage: health.Stage = "joins"

    # ---- the loop ----

    def enters(self, stage: health.Stage) -> None:
        """The loop is at something else now."""
        self._turned_s = time.monotonic()
        self._stage = stage

    def turned(self, now_s: float) -> None:
        self._turned_s = now_s

    def saw(self, view: View, now_s: float) -> None:
        """The job has changed."""
        with self._lock:
            self._figures = observe(self._figures, view, now_s)

    # ---- those who ask ----

    @contextlib.contextmanager
    def served(self) -> Iterator[int | None]:
        """Over HTTP, if that is asked for: the port. Raises `JobStopped` if nothing can listen there."""
        config = self._config
        if config.metrics_port is None:
            yield None
            return
        from swift_agent.agent.metrics.server import MetricsServer  # only who asks for it pays for the import

        try:
            server = MetricsServer(
                config.metrics_addr, config.metrics_port, config.job_id, self.snapshot, self.why_not_alive,
                self.why_not_ready,
            )  # fmt: skip
        except OSError as error:
            remedy = "give each agent of a machine a port of its own, or 0 for any"
            if error.errno != errno.EADDRINUSE:
                remedy = "type an address of this machine for --metrics-addr, and a port that may be used"
            raise JobStopped(
                f"--metrics-port {config.metrics_port}: nothing can listen at {config.metrics_addr}: {error.strerror}; "
                f"{remedy}"
            ) from error
        host = f"[{config.metrics_addr}]" if ":" in config.metrics_addr else config.metrics_addr
        log.info("metrics and probes are served at http://%s:%d", host, server.port)
        try:
            yield server.port
        finally:
            server.close()

    def why_not_alive(self) -> str:
        return health.why_not_alive(self._stage, self._turned_s, time.monotonic())

    def why_not_ready(self) -> str:
        stage = self._stage
        if stage == "joins":
            return health.why_not_ready(stage, self._state(), False, False)
        return health.why_not_ready(stage, self._state(), self._num_standbys() != 0, self._is_away())

    def snapshot(self) -> Snapshot | None:
        from swift_agent.agent.metrics.exposition import Requests, Snapshot

        if self._stage == "joins":
            return None
        if not self._is_away():
            self._read_history()
        now_s = time.monotonic()
        requests = Requests(self._requests.took, self._requests.failed)
        return Snapshot(
            now_s=now_s, figures=self._figures, state=self._state(), strategy=self._config.strategy,
            is_ready=not self.why_not_ready(), is_away=self._is_away(), lease_s=self._lease_until_s() - now_s,
            num_standbys=self._num_standbys() or 0, num_spares_wanted=self._config.spares,
            log_bytes=_size_of(self._directories.messages), logs=self._directories.log_counters.total(),
            requests=requests,
        )  # fmt: skip

    def _read_history(self) -> None:
        """What the coordinator has written of recoveries that are over; when somebody asks, and not before."""
        keys = Keys(self._config.job_id)
        for generation in tuple(self._figures.due):
            try:
                found = self._store.get(keys.recovery(generation))
                event = None if found is None else decode(EventRecord, found.value)
            except RecordError:
                event = None
            except RendezvousError:
                return  # the next one who asks gets it
            with self._lock:
                self._figures = told(self._figures, generation, event)


def _size_of(directory: str) -> int:
    """Of all segments of logs below it, in bytes on the disk."""
    from swift_logging_store.log.writer import SUFFIX

    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            if name.endswith(SUFFIX):
                with contextlib.suppress(OSError):  # removed meanwhile
                    total += os.stat(os.path.join(place, name)).st_blocks * 512
    return total
