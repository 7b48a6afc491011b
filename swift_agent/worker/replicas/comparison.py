"""Compares replicas while they train: after the first, second, fourth ... iteration that follows a recovery.

    end of an iteration --fingerprint--> thread: digest --> store of the generation --> equal
                                                                             '-- not: fingerprints --> what differs

What ranks tell each other goes through the store of their generation, which is fenced; a failure ends the comparison,
and the next generation begins its own. The first rank of a replica set judges. In an undisturbed run the same shows
what is alike by nature; in its first iterations whether these are replicas at all, later whether they still are.

This module must never communicate in a process group, nor decide what is wrong: `deviation` does.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from swift_agent.wire.store_client import StoreClient
from swift_agent.worker.groups.process_groups import ProcessGroups
from swift_agent.worker.line.agent_line import Supervisor
from swift_agent.worker.replicas.fingerprints import Fingerprints
from swift_agent.worker.tracked import others
from swift_agent.worker.tracked.loop_state import Place
from swift_agent.worker.tracked.tracked import Tracked
from swift_recovery.state import deviation
from swift_recovery.state.deviation import Fingerprint
from swift_rendezvous.threads import has_started, thread

NEVER = sys.maxsize
_CONNECT = timedelta(seconds=10)
_SLICE = timedelta(seconds=2)
# The others have made the same iteration, so they come soon. One that does not is no business of this module.
PATIENCE_S = 600.0
# Of parameters and their state, in an undisturbed run: next to no time. What is more comes in the next ones.
LATE_BYTES = 32 << 20
# A rank that has left out a step of the others is alone with its gradients. The next comparison tells that.
GRADIENTS_PATIENCE_S = 60.0
_RETRY_S = 0.1


@dataclass
class _Task:
    number: int
    first: int  # the parameter that the fingerprint begins with
    print: Fingerprint
    generation: int
    connect: Callable[[], StoreClient]
    undisturbed: bool
    patience_s: float
    is_late: bool
    settled: threading.Event = field(default_factory=threading.Event)
    is_known: bool = False
    """All replicas have told what they hold; set before *settled*."""
    differs: bool = False
    rounds: bool = False
    """They differ, and only because they do not compute alike."""


class Comparison:
    """One per worker with replicas. *give_up* is called in a thread, with what people are told, and
    whether workers that are started again would come to the same.

    *due*: the number of finished iterations at which `take` is to be called; all ranks have the same.
    """

    def __init__(
        self, place: Place, supervisor: Supervisor, groups: ProcessGroups, tracked: Tracked,
        give_up: Callable[[str, bool], None],
    ) -> None:  # fmt: skip
        self._place, self._supervisor, self._groups, self._tracked = place, supervisor, groups, tracked
        self._give_up = give_up
        self._prints = Fingerprints(tracked.state)
        self._queue: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._base, self._undisturbed, self._tasks = 0, True, list[_Task]()
        self._apart: frozenset[str] | None = None
        self._equal_after: int | None = None
        self._began_in = 0
        self._ahead: tuple[int, Fingerprint] | None = None
        self._gradients_after = 0  # so many iterations in this generation they were compared last
        self._gradients = threading.Lock()
        self._used_after: set[int] = set()
        self._unlike_after: dict[int, str] = {}
        self._has_given_up = False
        self.due = NEVER

    @property
    def _every(self) -> int:
        checkpoints = self._tracked.checkpoints
        return checkpoints.every if checkpoints is not None else 0

    def begin(self, iteration: int, *, undisturbed: bool) -> None:
        """All ranks begin a generation with that iteration. *undisturbed*: all have just begun."""
        self._base, self._undisturbed, self._tasks = iteration, undisturbed, []
        self._equal_after, self._gradients_after = None, 0
        self._began_in = self._began_in or self._supervisor.generation
        if self._ahead is None or self._ahead[0] != self._supervisor.generation:
            self._ahead = None
            self._prints.restart()
        self._find_next(iteration)

    def _find_next(self, number: int) -> None:
        alone = len(self._tracked.replicas) == 1
        due = deviation.next_due(self._base, number, undisturbed=self._undisturbed, every=self._every)
        self.due = NEVER if alone else due

    def take_ahead(self) -> None:
        """After an iteration that this rank makes in a recovery, before `begin`: the others make it as the first one
        after that. What the script has done since then, to a learning rate for one, must not be in its fingerprint."""
        self._prints.restart()
        self._ahead = self._supervisor.generation, self._prints.take()

    @property
    def is_ahead(self) -> bool:
        """In this generation the first `take` is due before another iteration."""
        return self._ahead is not None

    def is_due_for_gradients(self, number: int) -> bool:
        """Whether to `take` after so many iterations, which all ranks have ended with gradients but without an update:
        the first time, and seldom then."""
        return number - self._base >= 2 * self._gradients_after

    def gradients_are_used(self, number: int) -> None:
        """Those that were left after so many iterations: if each rank has its own, no rank can go on like this."""
        with self._gradients:
            self._used_after.add(number)
            said = self._unlike_after.pop(number, "")
            self._has_given_up = self._has_given_up or bool(said)
        if said:
            self._give_up(said, True)

    def _are_unlike(self, number: int, said: str) -> None:
        with self._gradients:
            is_used = number in self._used_after
            self._unlike_after[number] = said
            self._has_given_up = self._has_given_up or is_used
        if is_used:
            self._give_up(said, True)

    def take(self, number: int) -> None:
        """After so many iterations: keep the fingerprint, and have it compared."""
        patience_s = PATIENCE_S if number >= self.due or self._ahead is not None else GRADIENTS_PATIENCE_S
        is_late = self._undisturbed and number - self._base > deviation.NUM_FIRST
        self._find_next(number)
        store = self._groups.store
        if self._ahead is not None:
            first, taken, self._ahead = 0, self._ahead[1], None
        else:
            first, taken = self._prints.at, self._prints.take(max_bytes=LATE_BYTES if is_late else None)
        if taken.parts.get("gradient"):
            self._gradients_after = number - self._base
        taken = replace(taken, began_in=self._began_in)
        task = _Task(
            number, first, taken, self._supervisor.generation, lambda: store.clone(_CONNECT), self._undisturbed,
            patience_s, is_late,
        )  # fmt: skip
        self._tasks = [one for one in self._tasks if not one.settled.is_set() or one.number >= number - self._every]
        self._tasks.append(task)
        self._queue.put(task)
        self._start()

    def _start(self) -> None:
        """There may be no thread left for a moment: then with the next question, or at the end."""
        if self._thread is None and not self._queue.empty():
            new = thread("swift-comparison", self._run, self._supervisor.note)
            self._thread = new if has_started(new) else None

    def why_not_kept(self, number: int) -> str:
        """Why the state after so many iterations must not be kept as a checkpoint, '' if it may; waits until that is
        known. From any thread."""
        task = next((one for one in reversed(self._tasks) if one.number <= number), None)
        if task is None:
            return ""
        deadline_s = time.monotonic() + PATIENCE_S
        while not task.settled.wait(_RETRY_S):
            if not self._is_current(task):
                return "the replicas could not be compared before the next failure"
            if time.monotonic() > deadline_s:
                return f"the replicas could not be compared within {PATIENCE_S:g} s"
        if not task.is_known:
            return "the replicas could not be compared"
        return "the replicas differ" if task.differs else ""

    def is_over(self, timeout_s: float) -> bool:
        """Whether none is under way, after so long at most."""
        self._start()
        deadline_s = time.monotonic() + timeout_s
        return all(task.settled.wait(max(0.0, deadline_s - time.monotonic())) for task in self._tasks)

    @property
    def has_failed(self) -> bool:
        """In this generation replicas differ; one of them has said so."""
        return self._has_given_up or any(task.differs for task in self._tasks)

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            task = self._queue.get()
            try:
                self._settle(task)
            except dist.DistStoreError:
                pass  # the generation has ended, or its store has
            except Exception as error:  # whatever it is: the next one may succeed
                if self._is_current(task):
                    why = f"the replicas could not be compared after iteration {task.number}: {error!r}"
                    self._supervisor.note(f"{why}. Training goes on.")
            finally:
                task.settled.set()

    def _is_current(self, task: _Task) -> bool:
        supervisor = self._supervisor
        return supervisor.generation == task.generation and not supervisor.interrupted

    def _settle(self, task: _Task) -> None:
        replicas, rank = self._tracked.replicas, self._place.rank
        name = f"comparison/{task.number}/{task.first}"  # other parts are no reason for an alarm
        if not self._is_current(task):
            return
        store = task.connect()
        try:
            judge = replicas[0]
            store.set(f"{name}/{rank}", task.print.digest())
            if rank == judge:
                keys = [f"{name}/{one}" for one in replicas]
                if not self._wait(store, task, keys):
                    return
                equal = len(set(store.multi_get(keys))) == 1
                store.set(f"{name}/verdict/{judge}", json.dumps(equal))
            elif not self._wait(store, task, [f"{name}/verdict/{judge}"]):
                return
            else:
                equal = json.loads(store.get(f"{name}/verdict/{judge}"))
            if not equal:
                self._name(store, task, f"{name}/print")
            else:
                task.is_known = True
                if task.undisturbed:
                    self._apart = self._apart or frozenset()
            if task.is_known and not (task.differs or task.rounds) and self._is_current(task):
                self._equal_after = task.number
            store.delete_key(f"{name}/{rank}")
        finally:
            store.close()

    def _name(self, store: StoreClient, task: _Task, name: str) -> None:
        """All tell all that they have; each finds the same."""
        replicas, rank = self._tracked.replicas, self._place.rank
        mine = replace(task.print, apart=self._apart, computes=self._tracked.computes, rounded=self._tracked.rounded)
        store.set(f"{name}/{rank}", json.dumps(mine.to_json()))
        keys = [f"{name}/{one}" for one in replicas]
        if not self._wait(store, task, keys):
            return
        told = [json.loads(text) for text in store.multi_get(keys)]
        prints = {one: Fingerprint.from_json(data) for one, data in zip(replicas, told, strict=True)}
        wrong, by_design = deviation.compare(prints, undisturbed=task.undisturbed)
        if task.undisturbed or self._apart is not None:
            self._apart = by_design
        self._part_with(deviation.objects_apart(prints), task)
        of_each_rank = deviation.are_of_each_rank(wrong)
        task.rounds = bool(deviation.because_of_machines(prints, wrong))
        # Nothing has failed, and for long they have been alike: as it would without us, training goes on.
        forbids = deviation.forbids_going_on(wrong) and not of_each_rank and not task.rounds
        goes_on = task.is_late or not forbids
        is_told = task.is_late and bool(self._tracked.differed_after)
        is_told = is_told or (task.rounds and not self._is_news(store, prints))
        if task.is_late and forbids:
            self._tracked.differed_after = self._tracked.differed_after or task.number
        task.differs, task.is_known = not goes_on, True
        if self._apart is not None and not task.differs:
            self._apart |= {one.name for one in wrong if one.kind != "gradient"}  # told once
        if task.rounds and self._is_current(task):
            self._tracked.rounded |= deviation.forbids_going_on(wrong)
        if wrong and not is_told and self._is_current(task) and rank == replicas[0]:
            said = deviation.sentence(
                prints, wrong, iteration=task.number, equal_after=self._equal_after, undisturbed=task.undisturbed,
                generation=task.generation, late=task.is_late,
            )  # fmt: skip
            if of_each_rank:
                self._are_unlike(task.number, said)
            elif task.differs:
                self._give_up(said, task.undisturbed)
            else:
                self._supervisor.note(said)

    def _part_with(self, objects: frozenset[str], task: _Task) -> None:
        """Objects of the script's own differ: a rank then keeps what its script has made of them. Told once, before
        anything fails."""
        tracked, new = self._tracked, objects - self._tracked.apart
        tracked.apart |= objects
        is_told = tracked.apart_is_told or not task.undisturbed or not self._is_current(task)
        if new and not is_told and self._place.rank == tracked.replicas[0]:
            self._supervisor.note(others.told_apart(sorted(new)))

    def _is_news(self, store: StoreClient, prints: Mapping[int, Fingerprint]) -> bool:
        """That replicas have drifted apart by rounding: none of them was there when it was told, and no other replica
        set has told it in this generation."""
        is_judge = self._place.rank == self._tracked.replicas[0]
        known = any(one.rounded for one in prints.values())
        return is_judge and not known and store.add("comparison/rounds", 1) == 1

    def _wait(self, store: StoreClient, task: _Task, keys: list[str]) -> bool:
        """For all of *keys*; False if they do not come in this generation."""
        deadline_s = time.monotonic() + task.patience_s
        while self._is_current(task):
            try:
                store.wait(keys, _SLICE)
                return True
            except dist.DistStoreError:
                time.sleep(_RETRY_S)
            if time.monotonic() >= deadline_s:
                if task.patience_s < PATIENCE_S or self._place.rank not in self._tracked.replicas[:2]:
                    return False  # else this rank judges, or misses the one that does
                missing = ", ".join(key.rpartition("/")[2] for key in keys if not store.check([key]))
                raise TimeoutError(f"rank {missing} has said nothing for {PATIENCE_S:g} s")
        return False
