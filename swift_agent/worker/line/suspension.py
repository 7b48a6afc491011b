"""Whether this process stands still, or stood still a moment ago: paused by its agent, by a person, or by itself.

A worker stops itself when it was not told in time that its place is still its own. Normally its agent stops it, but
the agent may stand still, too. This module must never end a process, nor touch training state.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable

from swift_agent.wire.standing import MyStanding

# So often is looked whether this process may still go on.
LOOK_S = 1.0
# Not looked for so long: this process stood still meanwhile.
STOOD_S = 2.0
# An error so soon after that may come from it: a collective has run over its timeout, of which the pause was a part.
STOOD_COUNTS_S = 60.0


class Suspension:
    """*generation*: the one that this worker is in."""

    def __init__(self, standing: MyStanding, generation: Callable[[], int]) -> None:
        self._standing, self._generation = standing, generation
        self._looked_s = math.inf
        self._stood_in, self._stood_until_s = 0, -math.inf

    def was_a_moment_ago(self) -> bool:
        """In the generation that this worker is in: what was cut by that is not cut any more in the next. From any
        thread."""
        now_s, generation = time.monotonic(), self._generation()
        if now_s - self._looked_s > STOOD_S:
            self._stood_in, self._stood_until_s = generation, now_s
        return self._stood_in == generation and now_s - self._stood_until_s < STOOD_COUNTS_S

    def watch_the_time(self, is_over: Callable[[], bool]) -> None:
        """In a thread of its own, until *is_over*: stop this process when it was not told that its place is still its
        own. When the agent goes on it continues its workers, pauses or ends them."""
        while not is_over():
            self.was_a_moment_ago()
            left_s = self._standing.left_s()
            if left_s > 0:
                self._looked_s = time.monotonic()
                time.sleep(min(left_s, LOOK_S))
                continue
            # The agent wakes this process again and again until that is taken back.
            self._standing.stand(True)
            # To this thread, which does not take another step then; the whole process stops with it.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            self._standing.stand(False)
