"""Ranks that have recovered meet before a collective between iterations: all make the same one there, or it is told.

    come: number 3, all_reduce after 20 iterations --compared with the first one's--> all have come: go on
    passed: another rank looks, is in iteration 20 or later, and has come to less than 3 --> it will never come

Each numbers what it has come to since its generation began. Before the first ones, and then before those whose number
is a power of two, they meet: no rank enters one of these that another does not make. Before many more they only say
which one it is, and do not wait: unlike ones may be mixed up there, and the rank that comes second tells it. Before a
collective that ranks may leave early (a broadcast, and what is asynchronous) they always do only that.

This module must never make or stop a collective.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from swift_agent.wire import messages as msg
from swift_agent.wire.store_client import StoreClient
from swift_agent.worker.checks.section_calls import is_compared
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.tracked.loop_state import Place

_REMEDY = (
    "a counter of the script's own that decides on a collective starts over in a replacement. Decide by "
    "job.iteration_number, or count by enumerate(job.batches(loader), start=job.position.batch)"
)
# A counter that started over is another one at the first of them already. The rest of the run pays for few.
_FIRST_MET = 8
# 0.1 ms each, and as many keys in the store of the generation.
_FIRST_SAID = 1024
# As long as torch would wait in the collective itself, if it was not told otherwise.
_LIMIT = timedelta(minutes=30)
_FIRST, _NUM, _GO = "first", "num", "go"
_WAITED_FOR = "meeting/waited_for"


class Meetings:
    """One per worker."""

    def __init__(self, place: Place, supervisor: Supervisor, groups: ProcessGroups) -> None:
        self._place, self._supervisor, self._groups = place, supervisor, groups
        self._generation, self._count = 0, 0

    def meet(self, what: Callable[[], str], where: Callable[[], str], *, waits: bool) -> None:
        """Before a collective of all ranks outside of iterations; *what*: the operation. It *waits*: no rank leaves it
        before all have come. Does not return if all workers have to start again."""
        if self._place.is_before_epoch:
            return
        generation = self._supervisor.generation
        if not self._comes(generation):
            return
        said = self.come(self._groups.store, generation, what(), where(), waits=waits)
        if said:
            self._tell(said)
            self._supervisor.wait_for_end()

    def look(self, store: StoreClient, where: str) -> bool:
        """In another thread: whether others wait for this rank, which is at *where*, in vain, which is told then."""
        generation = self._supervisor.generation
        said = self.passed(store, generation, where)
        if not said or self._supervisor.interrupted or self._supervisor.generation != generation:
            return False
        self._tell(said)
        return True

    def _tell(self, said: str) -> None:
        tracked = self._place.tracked
        begin = "the newest checkpoint" if tracked is not None and tracked.checkpoints else "what the script loads"
        why = f"{said}. All workers have to start again, with {begin}"
        self._supervisor.send(msg.Unfit(why))

    def _comes(self, generation: int) -> bool:
        """To the next one. False: it is one that costs nothing."""
        if generation != self._generation:
            self._count, self._generation = 0, generation
        if is_compared(self._count + 1, _FIRST_SAID):
            return True
        self._count += 1
        return False

    def come(self, store: StoreClient, generation: int, what: str, where: str, *, waits: bool = True) -> str:
        """Return when all ranks have come, or at once where they do not meet; why no rank can go on, if the first to
        come was at another one. Raises dist.DistStoreError when the generation ends, or no rank comes."""
        if not self._comes(generation):
            return ""
        key = f"meeting/{self._count}"
        mine = json.dumps([what, self._place.here.iteration, where, self._place.rank])
        first = store.compare_set(f"{key}/{_FIRST}", "", mine).decode()
        theirs = json.loads(first)
        if theirs[:2] != [what, self._place.here.iteration]:
            return _told(theirs, f"rank {self._place.rank} in {what} ({where}) after {self._place.here.iteration}")
        if waits and is_compared(self._count + 1, _FIRST_MET):
            if first == mine:  # before it is counted: the last one to come takes it back
                store.set(_WAITED_FOR, json.dumps([self._count, *theirs]))
            if store.add(f"{key}/{_NUM}", 1) == dist.get_world_size():
                store.multi_set([f"{key}/{_GO}", _WAITED_FOR], ["", ""])
            else:
                store.wait([f"{key}/{_GO}"], _LIMIT)
        self._count += 1
        return ""

    def passed(self, store: StoreClient, generation: int, where: str) -> str:
        """In another thread: why no rank can go on, if others wait for this rank, which is in an iteration, and has
        left out what they are in."""
        if not store.check([_WAITED_FOR]) or not (said := store.get(_WAITED_FOR)):
            return ""
        number, *theirs = json.loads(said)
        is_inside, here = self._place.inside == "iteration", self._place.here.iteration
        # Last: a rank that has met the others meanwhile, and gone on into an iteration, has left nothing out.
        count = self._count if generation == self._generation else 0
        if not is_inside or number < count or here < theirs[1]:
            return ""
        return _told(theirs, f"rank {self._place.rank} has left that out, and is in iteration {here} ({where})")


def _told(theirs: list[object], mine: str) -> str:
    what, iteration, where, rank = theirs
    return (
        f"ranks make different collectives: rank {rank} is in {what} ({where}) after {iteration} iterations, {mine}: "
        f"{_REMEDY}"
    )
