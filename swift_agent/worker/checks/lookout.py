"""Looks whether this rank stands still, and tells the others where; rank 0 finds out whether any rank can still move.

A thread looks every few seconds where the loop is, and at nothing else while it moves. A rank that stands still
says in the store of the generation where it stands, and what its script does there: whether it is in an operation of
torch.distributed and uses no processor time, so that it waits, or not, so that it works. `standstill` says what
follows from that; if no rank will ever move again the job is told and ended, instead of waiting for the timeout of an
operation (30 minutes, or none).

This module must never stop or cut anything, nor touch training state.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from swift_agent.wire.store_client import StoreClient
from swift_agent.worker.checks.standstill import Doing, Inside, Standing, describe, waits_for_ever
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.line import in_script
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.tracked.loop_state import Place
from swift_rendezvous.threads import has_started, thread

PERIOD_S = 5.0
# Still for so long: told to the others. From then on two looks decide.
STILL_S = 15.0
# Told to people, then after twice as long, and so on.
FIRST_NOTE_S = 60.0
# More than that of a period, and a thread works.
_BUSY_SHARE = 0.05
_CONNECT = timedelta(seconds=5)
_WAITING = tuple(
    [in_script.TORCH + path for path in ("distributed/", "nn/parallel/distributed.py")]
    + [
        in_script.OURS + f"worker/{path}.py"
        for path in (
            "loop/outside",
            "checks/meetings",
            "messages/operations",
            "messages/messages",
            "messages/collective_results",
            "groups/transfer",
        )
    ]
)
# There a rank may be alone, with a disk, and use no processor time.
_ALONE = tuple(
    in_script.TORCH + f"distributed/{path}"
    for path in ("checkpoint/", "_serialization.py", "_state_dict_utils.py", "elastic/", "rpc/")
)
# The caller of the store there decides what is waited for.
_STORE = in_script.OURS + "wire/"
# DDP's and FSDP's reductions are waited for in the backward of an iteration; others compute, on a GPU for example.
_BACKWARD = in_script.TORCH + "autograd/"


def is_wait(path: str, *, inside: bool) -> bool:
    """Whether ranks wait for each other in what the file *path* has; *inside* an iteration or a section."""
    return (path.startswith(_WAITING) and not path.startswith(_ALONE)) or (inside and path.startswith(_BACKWARD))


class Lookout:
    """One per worker, from the first point of its loop on. *give_up* is called in the thread if no rank can move.
    *has_passed*: asked while an iteration does not move, whether others wait in what this rank has left out, which is
    told then."""

    def __init__(
        self, place: Place, supervisor: Supervisor, groups: ProcessGroups, give_up: Callable[[str], None],
        has_passed: Callable[[StoreClient, str], bool] | None = None,
    ) -> None:  # fmt: skip
        self._place, self._supervisor, self._groups, self._give_up = place, supervisor, groups, give_up
        self._has_passed = has_passed
        self._script = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._script)
        self._world_size = dist.get_world_size()
        self.at_end = False
        """The script has come to its end, and waits for the others."""
        self.at_begin = False
        """It is at its first point, where all wait for the end of each other's set-up."""
        self.is_aside = False
        """It is in a recovery: what is waited for there is no business of the script's."""
        self.is_told = False
        """That this rank has left out what others wait in: all end."""
        self._mark: tuple[Any, ...] = ()
        self._since_s = self._cpu_s = 0.0
        self._beat = 0
        self._told: dict[int, Standing] = {}
        self._next_note_s = FIRST_NOTE_S
        self._store: StoreClient | None = None
        self._is_over = threading.Event()

    def start(self) -> None:
        if self._world_size == 1:
            return
        if not has_started(thread("swift-lookout", self._run, self._blind)):
            self._blind("there is no thread for it")

    def _blind(self, why: str) -> None:
        """Training does not end because nothing looks at it."""
        self._supervisor.note(
            f"nobody looks any more whether this rank stands still: {why}. If ranks wait for each other for ever, that "
            "ends with the timeout of their operation"
        )

    def stop(self) -> None:
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(PERIOD_S):
            try:
                self._look(time.monotonic())
            except (dist.DistStoreError, ValueError, KeyError, OSError):
                self._forget()  # the generation has ended, or its store has

    def _look(self, now_s: float) -> None:
        place, here = self._place, self._place.here
        cpu_s = time.clock_gettime(self._clock)
        is_busy, self._cpu_s = cpu_s - self._cpu_s > _BUSY_SHARE * PERIOD_S, cpu_s
        is_elsewhere = self.is_aside or place.replays or place.target is not None or self._groups.store is None
        if is_elsewhere or self._supervisor.interrupted or self._supervisor.pausing:
            self._forget()
            return
        mark = (self._supervisor.generation, here.iteration, here.sections, here.passes, here.batch, place.inside)
        if mark != self._mark:
            self._forget()
            self._mark, self._since_s = mark, now_s
            return
        still_s = now_s - self._since_s
        if self._has_passed is not None and place.has_recovered and place.inside == "iteration" and not self.is_told:
            if self._store is None:
                self._store = self._groups.store.clone(_CONNECT)
            self.is_told = self._has_passed(self._store, self._doing()[1])
        if still_s < STILL_S or self.is_told:
            return
        waits, where = self._doing()
        inside: Inside = "end" if self.at_end else "begin" if self.at_begin else place.inside
        doing: Doing = "waits" if self.at_end or (waits and not is_busy) else "works"
        self._beat += 1
        self._tell(Standing(here.iteration, here.sections, inside, doing, where, still_s, self._beat))
        if place.rank == 0:
            self._judge(still_s)

    def _doing(self) -> tuple[bool, str]:
        """Whether the script's thread is in an operation in which ranks wait for each other; where the script is."""
        frame = waiter = sys._current_frames().get(self._script)
        while waiter is not None and waiter.f_code.co_filename.startswith(_STORE):
            waiter = waiter.f_back
        waits = waiter is not None and is_wait(waiter.f_code.co_filename, inside=bool(self._place.inside))
        return waits, in_script.place_of(frame)

    def _tell(self, standing: Standing) -> None:
        if self._store is None:
            self._store = self._groups.store.clone(_CONNECT)
        self._store.set(f"standing/{self._place.rank}", json.dumps(standing.to_json()))

    def _judge(self, still_s: float) -> None:
        now: dict[int, Standing] = {}
        assert self._store is not None
        for rank in range(self._world_size):
            key = f"standing/{rank}"
            if self._store.check([key]) and (text := self._store.get(key)):
                now[rank] = Standing.from_json(json.loads(text))
        if waits_for_ever(self._told, now, self._world_size) and not self._supervisor.interrupted:
            self._give_up(f"nobody can go on: {describe(now, self._world_size)}")
            self.stop()
        elif still_s >= self._next_note_s:
            self._next_note_s *= 2
            if any(one.doing == "waits" and one.inside != "end" for one in now.values()):
                said = describe(now, self._world_size)
                self._supervisor.note(f"nothing has moved here for {still_s:.0f} s: {said}")
        self._told = {**now, **{rank: old for rank, old in self._told.items()
                                if rank in now and old.place == now[rank].place}}  # fmt: skip

    def _forget(self) -> None:
        """It moves, or is in a recovery."""
        store, self._store = self._store, None
        self._mark, self._told, self._next_note_s = (), {}, FIRST_NOTE_S
        if store is not None:
            with contextlib.suppress(dist.DistStoreError):
                store.set(f"standing/{self._place.rank}", "")
            store.close()
