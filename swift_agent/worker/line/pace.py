"""When the iterations of this process began, a few times a second at most: kept until its agent asks where it is.

The training thread marks, the listening thread takes. It costs one reading of the clock for an iteration. Must never
wait for anybody, nor hold more than `MOST` marks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

MARK_S = 0.25
# Of an agent that does not ask, as all but that of rank 0.
MOST = 64


class Pace:
    """*clock*: monotonic, as that of the agent on the same machine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._marked_s = clock, float("-inf")
        self._marks: deque[tuple[int, float]] = deque(maxlen=MOST)

    def begins(self, iteration: int) -> None:
        """That iteration begins, for the first time or again."""
        now_s = self._clock()
        if now_s - self._marked_s >= MARK_S:
            self._marked_s = now_s
            self._marks.append((iteration, round(now_s, 3)))

    def take(self) -> dict[int, float]:
        """By iteration, when it began: all that was marked since the last call. Of one that began again, the last."""
        taken: dict[int, float] = {}
        while self._marks:
            iteration, at_s = self._marks.popleft()
            taken[iteration] = at_s
        return taken
