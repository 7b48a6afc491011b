"""The end of a worker's run: it returns once no other rank can need this one.

It must never end a process of which a recovery still needs the state.
"""

from __future__ import annotations

import json
import time
import zlib
from typing import Any

from swift_agent.wire import messages as msg
from swift_agent.worker.checks.lookout import Lookout
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.loop.checkpointing import Checkpointing
from swift_agent.worker.loop.recovery import Recovery
from swift_agent.worker.replicas.comparison import Comparison
from swift_agent.worker.replicas.fingerprints import Fingerprints
from swift_agent.worker.replicas.kernels import checksum
from swift_agent.worker.tracked.epoch_loops import told_missing
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.tracked import Tracked
from swift_recovery.planning.reports import ranges_of
from swift_recovery.state.deviation import summarised

# At its end a rank waits so long for the last comparison of replicas.
COMPARED_S = 10.0
# And so long, if replicas differ, to be ended.
ENDED_S = 60.0
# Of what a rank tells at its end: it goes into etcd, for each rank.
MAX_PARTS = 32


def end_without_loop(place: Place, supervisor: Supervisor, lookout: Lookout | None) -> None:
    """Of a script that has not come to a training loop: nothing can be recovered."""
    while True:
        if supervisor.interrupted:
            supervisor.wait_for_end()  # the agent starts all workers again
        if supervisor.pausing:
            supervisor.hold(place.here.iteration)
            if supervisor.interrupted:
                continue
        if _is_released(place, supervisor, lookout, {}):
            return


def _is_released(place: Place, supervisor: Supervisor, lookout: Lookout | None, end: dict[str, Any]) -> bool:
    """False: a failure has come first."""
    supervisor.send(msg.Finished(supervisor.generation, end))
    if lookout is not None:
        lookout.at_end = True
    return supervisor.wait_release(place.here.iteration)


class Ending:
    """Of a worker whose script has come to its training loop."""

    def __init__(
        self, place: Place, supervisor: Supervisor, tracked: Tracked, recovery: Recovery,
        checkpointing: Checkpointing | None, comparison: Comparison | None, lookout: Lookout | None,
    ) -> None:  # fmt: skip
        self._place, self._supervisor, self._tracked, self._recovery = place, supervisor, tracked, recovery
        self._checkpointing, self._comparison, self._lookout = checkpointing, comparison, lookout

    def wait(self) -> None:
        supervisor, place = self._supervisor, self._place
        if why := told_missing(place):
            supervisor.give_up(why)
        place.target = None
        place.keep_start()
        while True:
            if supervisor.interrupted:
                self._recovery.run()
            if self._recovery.is_untold:
                self._recovery.tell_resumed()
            if supervisor.pausing:
                supervisor.hold(place.here.iteration)
                if supervisor.interrupted:
                    continue
            if not self._last_checkpoint_is_over() or not self.last_comparison_is_over():
                continue
            if _is_released(place, supervisor, self._lookout, self._end()):
                break
        if self._tracked.messages is not None:
            self._tracked.messages.close()

    def _last_checkpoint_is_over(self) -> bool:
        """False if a failure comes first."""
        while self._checkpointing is not None and not self._checkpointing.is_over(timeout_s=0.05):
            if self._supervisor.interrupted:
                return False
        return True

    def last_comparison_is_over(self) -> bool:
        """False if a failure comes first. All have come here, or are about to. Where replicas differ this process does
        not go on: its agent ends it."""
        comparison, deadline_s = self._comparison, time.monotonic() + COMPARED_S
        while comparison is not None and not comparison.is_over(timeout_s=0.05) and time.monotonic() < deadline_s:
            if self._supervisor.interrupted:
                return False
        deadline_s = time.monotonic() + ENDED_S
        while comparison is not None and comparison.has_failed and time.monotonic() < deadline_s:
            if self._supervisor.interrupted:
                return False
            time.sleep(0.05)  # the agent ends this process; if nobody has told it, what all tell at the end differs
        return True

    def _end(self) -> dict[str, Any]:
        prints = Fingerprints(self._tracked.state).take(whole=True)
        hyper = json.dumps(sorted(prints.parts["hyper"].items()))
        return {
            "iteration": self._place.here.iteration,
            "replicas": ranges_of(self._tracked.replicas),
            "checksum": f"{self._tracked.checksum():016x}",
            # If these differ, checksums may: rounding explains that, but for other hyper-parameters.
            "computes": f"{checksum(self._tracked.computes):08x}",
            "rounded": self._tracked.rounded,
            "hyper": f"{zlib.crc32(hyper.encode()):08x}",
            # Of these it says which differ, should the checksums do.
            "parts": summarised(prints, MAX_PARTS),
        }
