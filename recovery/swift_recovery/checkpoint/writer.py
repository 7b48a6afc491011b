"""Checkpoints of a job, taken by its workers while they train.

    point of iteration n * every --copy--> thread: write a part --> tell the generation's store --> wait for its answer
                                                                    rank 0: when all have told, commit, and answer

Training waits for the copy of the state only. One rank of each replica set writes it. A checkpoint counts when rank 0
has committed it (`swift_recovery.checkpoint.directory`), which it does once all ranks of one generation have told that
store of the parts: a generation without all ranks, so one that has stopped, commits nothing. One whose ranks are all
cut off together could: so rank 0 claims the directory for each generation that begins, and before it commits or
removes anything it asks its agent whether their place is still theirs, and the directory whether a later one has begun.
What counts is there and not in etcd, so that a job of another day that reads the directory finds it.

This module must never decide who begins with a checkpoint.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from swift_recovery.checkpoint.directory import Checkpoint, CheckpointDirectory, Part
from swift_recovery.checkpoint.timelines import NOBODY, Timeline
from swift_recovery.errors import RecoveryError, StateError
from swift_recovery.state.training_state import TrainingState
from swift_recovery.transfer import state_file
from swift_recovery.transfer.state_file import StateCopy
from swift_rendezvous.threads import has_started, thread

log = logging.getLogger(__name__)

# A slow filesystem is no error; what ends the wait is the end of the generation.
_PATIENCE = timedelta(days=7)
_RETRY_S = 1.0

_T = TypeVar("_T")


class Meeting(Protocol):
    """The c10d store of a generation, at which its ranks agree on a checkpoint (`torch.distributed.Store`)."""

    def set(self, key: str, value: Any, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def delete_key(self, key: str, /) -> bool: ...

    def cut(self) -> None:
        """Lets go the threads that wait at it, with an error; from any thread."""

    def close(self) -> None: ...


class NotNow(RecoveryError, RuntimeError):
    """A checkpoint cannot be taken at this point; it is left out."""


class CheckpointError(RecoveryError, RuntimeError):
    """What there is of checkpoints is of no use; nothing was changed."""


@dataclass(frozen=True)
class Settings:
    """What the script asks for: one *every* so many iterations, the newest *keep* are kept."""

    directory: CheckpointDirectory
    every: int
    keep: int = 2


@dataclass(frozen=True)
class Cost:
    """Of one that counts, on this rank: of its part (0: another rank's), and for which training stood still."""

    num_bytes: int
    written_s: float
    still_s: float


@dataclass
class _Task:
    """*connect*: to the store of the generation. *none*: why this rank has no part; it tells that then."""

    iteration: int
    connect: Callable[[], Meeting]
    timeline: Timeline = NOBODY
    copy: StateCopy | None = None
    counts_told: Any = None
    none: str = ""
    began_s: float = field(default_factory=time.monotonic)
    store: Meeting | None = None
    counts: bool | None = None  # what rank 0 has decided
    is_cut: bool = False  # its generation has ended
    num_bytes: int = 0
    written_s: float = 0.0
    still_s: float = 0.0


class Checkpoints:
    """Of the rank *rank* of *world_size*, which holds the same as *replicas*. *note* tells people. *run*: of the job,
    '' for none. *why_not*: asks the agent; why nothing of that generation may count any more, '' if it may.

    Threads: one, while there is any to take, writes and speaks to the store; everything else belongs to the thread that
    trains, which waits for neither.
    """

    def __init__(
        self, settings: Settings, rank: int, world_size: int, replicas: list[int], note: Callable[[str], None], *,
        run: str = "", why_not: Callable[[int], str] = lambda generation: "",
    ) -> None:  # fmt: skip
        self.directory, self.every, self._keep = settings.directory, settings.every, settings.keep
        self._rank, self._world_size, self._replicas = rank, world_size, replicas
        self._note, self._run, self._why_not = note, run, why_not
        self.newest = 0
        """The iteration of the newest one that this process knows to count, 0 if there is none."""
        self.costs: list[Cost] = []
        """Of the first two."""
        self.due = self.every
        """One is to be taken at the first point from this iteration on."""
        self.why_not: Callable[[int], str] = lambda iteration: ""
        """Why the state before that iteration must not count, '' if it may. Called in the thread, and may wait."""
        self.counts: Any = None
        """Of this rank's messages, in the one that was loaded last, if another rank has written its part."""
        self.loaded_from = NOBODY
        """The timeline that has taken the one that was loaded last."""
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()  # the first is under way
        self._begun: tuple[Timeline, int] | None = None  # to be claimed
        self._begins: dict[Timeline, int] = {}
        self._thread: threading.Thread | None = None

    # ---- taking ----

    def take(
        self, iteration: int, state: TrainingState, extra: Callable[[], Any], connect: Callable[[], Meeting],
        generation: int = 0, *, counts: Any = None,
    ) -> None:  # fmt: skip
        """Take that of the state before *iteration*; what *extra* gives goes with it. *connect*: to the store of that
        *generation*, for the thread. *counts*: of this rank's messages, as JSON, if another one writes its part. Where
        that is impossible it is left out, by all ranks, and said."""
        self._is_next_after(iteration)
        task = _Task(iteration, connect, self._timeline(generation), counts_told=counts)
        with self._changed:
            before = self._tasks[0] if self._tasks else None
        if before is not None:
            since_s = task.began_s - before.began_s
            task.none = f"that of iteration {before.iteration} is still being written, since {since_s:.0f} s"
        elif self._rank == self._replicas[0]:
            try:
                task.copy = StateCopy(state, extra())
            except (StateError, NotNow, MemoryError, RuntimeError) as error:
                task.none = _text(error)
            task.still_s = time.monotonic() - task.began_s
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()
        self._start()

    def begins(self, iteration: int, generation: int) -> None:
        """All go on with that iteration, in that generation: rank 0 claims the directory for it, in the thread."""
        timeline = self._timeline(generation)
        if self._rank == 0 and timeline.run:
            with self._changed:
                self._begun = (timeline, iteration)
                self._begins = {timeline: iteration}
                self._changed.notify_all()
            self._start()

    def _timeline(self, generation: int) -> Timeline:
        return Timeline(self._run, generation) if self._run else NOBODY

    def _start(self) -> None:
        """If there is no thread left, with the next checkpoint, or at the end."""
        with self._changed:  # one that has nothing to do ends
            if self._thread is None:
                new = thread("swift-checkpoints", self._work, self._note)
                self._thread = new if has_started(new) else None

    def recovered(self, iteration: int, generation: int = 0) -> None:
        """*generation* begins with that iteration. What a former one had under way does not count if it does not yet;
        none is taken here, where some ranks may have taken theirs."""
        with self._changed:
            for task in self._tasks:
                task.is_cut = True
                if task.store is not None:
                    task.store.cut()
            self._changed.notify_all()
        if iteration >= self.due:
            self._is_next_after(iteration)
        self.begins(iteration, generation)

    def wait(self, timeout_s: float) -> bool:
        """Whether nothing is under way any more."""
        if self._tasks:
            self._start()
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks, timeout_s)

    def _is_next_after(self, iteration: int) -> None:
        self.due = (iteration // self.every + 1) * self.every

    # ---- beginning with one ----

    def is_there(self, iteration: int) -> bool:
        """Whether that one counts still. Raises `CheckpointError`."""
        return iteration > 0 and self._looked_up(lambda: self.directory.counts(iteration))

    def find(self, before: int | None = None) -> int:
        """The iteration of the newest one that counts (below *before*), 0 if there is none.

        Raises `CheckpointError`."""
        return self._looked_up(lambda: self.directory.newest(before))

    def _looked_up(self, look: Callable[[], _T]) -> _T:
        try:
            return look()
        except OSError as error:
            raise CheckpointError(
                f"checkpoints in {self.directory} cannot be read ({error.strerror or error}): give job.checkpoint() a "
                "directory or bucket that all nodes can read and write"
            ) from error

    def load(self, iteration: int, state: TrainingState) -> Any:
        """Install the state of that one, which counts; its *extra*. Raises OSError or `StateError`; *state* is then
        mixed."""
        found = self.directory.load(iteration)
        if not found.fits(self._world_size):
            raise StateError(
                f"the checkpoint of iteration {iteration} in {self.directory} is of {found.world_size} ranks, and this "
                f"job has {self._world_size}"
            )
        part = found.part_of(self._rank)
        path = self.directory.path_of(found, part)
        with self.directory.store.reading(path) as stream:
            extra = state_file.read(stream, f"{self.directory}/{path}", state, part.written)
        self.newest, self.counts = iteration, found.counts.get(self._rank)
        self._is_next_after(iteration)
        self.loaded_from = found.timeline
        return extra

    # ---- the thread ----

    def _work(self) -> None:
        while True:
            with self._changed:
                begun, self._begun = self._begun, None
                task = self._tasks[0] if self._tasks else None
                if begun is None and task is None:
                    self._thread = None  # the next one begins another
                    return
            if begun is not None:
                self._try_to_claim(*begun)
            if task is None:
                continue
            try:
                self._settle(task)
            except Exception as error:  # whatever it is: the next one may succeed
                self._tell_why_not(task, _text(error))
            finally:
                with self._changed:
                    self._tasks.popleft()
                    self._changed.notify_all()

    def _try_to_claim(self, timeline: Timeline, iteration: int) -> None:
        try:
            self._claim(timeline, iteration)
        except Exception as error:  # whatever it is: without it nothing is committed, and that is said then
            log.debug("generation %d has not claimed %s yet: %s", timeline.generation, self.directory, error)

    def _claim(self, timeline: Timeline, iteration: int) -> None:
        """Raises OSError, `NotNow`, or `Superseded`."""
        self.directory.claim(timeline, iteration, lambda: self._must_be_ours(timeline))
        with self._changed:
            self._begins.pop(timeline, None)

    def _must_be_ours(self, timeline: Timeline) -> None:
        why = self._why_not(timeline.generation)
        if why:
            raise NotNow(why)

    def _settle(self, task: _Task) -> None:
        part: dict[str, Any] = {"none": task.none}
        if not task.none and not task.is_cut:
            try:
                part = self._write(task)
            except Exception as error:  # whatever it is: the others wait for a word
                part = {"none": _text(error)}
        task.copy = None
        # The others wait for this rank, then for rank 0: a broken connection is made again until the generation ends.
        while not task.is_cut:
            try:
                if self._agree(task, part):
                    self.newest = max(self.newest, task.iteration)
                    if len(self.costs) < 2:
                        self.costs.append(Cost(task.num_bytes, task.written_s, task.still_s))
                return
            except dist.DistStoreError:
                with self._changed:
                    self._changed.wait_for(lambda: task.is_cut, _RETRY_S)
            finally:
                if task.store is not None:
                    task.store.close()

    def _agree(self, task: _Task, part: dict[str, Any]) -> bool:
        """Whether it counts. May be repeated; what has been decided is only told again, as others may have heard it."""
        store, name = self._connect(task), f"checkpoint/{task.iteration}"
        store.set(f"{name}/{self._rank}", json.dumps(part))
        if self._rank == 0:
            keys = [f"{name}/{rank}" for rank in range(self._world_size)]
            if task.counts is None:
                store.wait(keys, _PATIENCE)
                task.counts = self._decide(task, [json.loads(data) for data in store.multi_get(keys)])
            store.set(f"{name}/counts", "yes" if task.counts else "no")
            for key in keys:
                store.delete_key(key)  # a generation may see many checkpoints
            if task.counts:
                self._remove_old(task)
        store.wait([f"{name}/counts"], _PATIENCE)
        return store.get(f"{name}/counts") == b"yes"

    def _connect(self, task: _Task) -> Meeting:
        store = task.connect()
        with self._changed:
            task.store = store
            if task.is_cut:
                store.cut()
        return store

    def _decide(self, task: _Task, told: list[dict[str, Any]]) -> bool:
        try:
            return self._commit(task, told)
        except Exception as error:  # whatever it is: the others wait for a word
            self._tell_why_not(task, _text(error))
            return False

    def _tell_why_not(self, task: _Task, why: str) -> None:
        self._note(f"no checkpoint of iteration {task.iteration}: {why}. Training goes on.")

    def _write(self, task: _Task) -> dict[str, Any]:
        if task.copy is None:
            return {} if task.counts_told is None else {"counts": task.counts_told}
        if why := self.why_not(task.iteration):
            return {"none": why}
        path, copy = self.directory.new_part(task.iteration, self._rank, task.timeline), task.copy
        began_s = time.monotonic()
        written = self.directory.store.write(path, lambda stream: state_file.write(stream, copy))
        task.num_bytes, task.written_s = written.num_bytes, time.monotonic() - began_s
        return Part(path.rpartition("/")[2], tuple(self._replicas), written).to_json()

    def _commit(self, task: _Task, told: list[dict[str, Any]]) -> bool:
        without = {rank: data["none"] for rank, data in enumerate(told) if "none" in data}
        if without:
            (rank, why), *others = without.items()
            more = f" (and {len(others)} more rank{'s' if len(others) > 1 else ''})" if others else ""
            self._tell_why_not(task, f"rank {rank}: {why}{more}")
            return False
        parts = tuple(Part.from_json(data) for data in told if "name" in data)
        counts = {rank: data["counts"] for rank, data in enumerate(told) if "counts" in data}
        # As it will be read: one that is of no use must not count.
        made = Checkpoint(task.iteration, self._world_size, parts, task.timeline, counts)
        checkpoint = Checkpoint.from_json(made.to_json())
        self.directory.check_parts(checkpoint)
        with self._changed:
            begins = self._begins.get(task.timeline)
        if begins is not None:
            self._claim(task.timeline, begins)  # it could not be claimed when it began
        self._must_be_ours(task.timeline)
        self.directory.commit(checkpoint)
        size, took_s = sum(part.written.num_bytes for part in parts), time.monotonic() - task.began_s
        self._note(
            f"checkpoint of iteration {task.iteration} in {self.directory}: {size / 1e6:.1f} MB in "
            f"{len(parts)} part{'s' if len(parts) > 1 else ''}, {took_s:.1f} s"
        )
        return True

    def _remove_old(self, task: _Task) -> None:
        try:
            self._must_be_ours(task.timeline)
            removed = self.directory.remove(self._keep, task.iteration, task.timeline)
        except Exception as error:  # whatever it is: the new one counts
            self._note(f"old checkpoints cannot be removed: {error}")
            return
        if removed:
            self._note(f"checkpoints of iterations {', '.join(map(str, removed))} are removed")


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
