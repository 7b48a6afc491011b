"""Waits for other ranks in the store of a generation, where an operation of the groups would come to its timeout.

    who is waited for: takes long --> tell        all others: wait_for --> an operation of the groups

What is told is of one generation, as its store is. A wait has no limit: a rank that is lost is reported by its agent,
and that ends the wait. This module must never decide who waits for whom; that is the plan's.
"""

from __future__ import annotations

import time
from collections.abc import Collection

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.tracked.loop_state import Place

_POLL_S = 0.005
# A long wait ends this part of it later, at most `_MOST_POLL_S`: a thousand ranks that ask would keep the store busy.
_LATER = 0.02
_MOST_POLL_S = 0.25
# Between two words about who is waited for.
TELL_S = 60.0


class Waits:
    """Of one worker, for ranks that *tell* something."""

    def __init__(self, place: Place, supervisor: Supervisor, groups: ProcessGroups) -> None:
        self._place, self._supervisor, self._groups = place, supervisor, groups

    def tell(self, what: str) -> None:
        PrefixStore(what, self._groups.store).set(str(self._place.rank), "")

    def wait_for(self, what: str, ranks: Collection[int], doing: str) -> None:
        """Until each of *ranks* has told it. Raises `PeerFailure` if the generation is stopped. One rank says for whom
        all others wait."""
        store = PrefixStore(what, self._groups.store)
        tells = self._place.rank == min(set(range(dist.get_world_size())).difference(ranks), default=-1)
        began_s = told_s = time.monotonic()
        keys = [str(rank) for rank in sorted(ranks)]
        while not store.check(keys):
            self._supervisor.check()
            now_s = time.monotonic()
            if tells and now_s - told_s >= TELL_S:
                told_s = now_s
                missing = [key for key in keys if not store.check([key])]
                self._supervisor.note(f"others wait for ranks that {doing}: {', '.join(missing)}")
            time.sleep(min(max(_POLL_S, _LATER * (now_s - began_s)), _MOST_POLL_S))
