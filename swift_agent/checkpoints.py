"""Checkpoints of a job, taken by its workers while they train.

    point of iteration n * every --copy--> thread: write a part --> tell the generation's store --> wait for its answer
                                                                    rank 0: when all have told, commit, and answer

Training waits for the copy of the state only. One rank of each replica set writes it. A checkpoint counts when rank 0
has committed it (`swift_recovery.checkpoint`), which it does once all ranks of one generation have told that store of
the parts: a generation without all ranks, so one that has stopped, commits nothing. DESIGN has it in etcd; a worker
does not speak to etcd, the store of a generation is fenced as well, and whoever reads the directory later, in a job of
another day, finds in it what counts.

This module must never decide who begins with a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from swift_agent.errors import SwiftError
from swift_agent.generation_store import StoreClient
from swift_recovery import state_file
from swift_recovery.checkpoint import Checkpoint, CheckpointDirectory, Part
from swift_recovery.errors import StateError
from swift_recovery.state import TrainingState
from swift_recovery.state_file import StateCopy

# A slow filesystem is no error; what ends the wait is the end of the generation.
_PATIENCE = timedelta(days=7)


class CheckpointError(SwiftError):
    """What there is of checkpoints is of no use; nothing was changed."""


@dataclass(frozen=True)
class Settings:
    """What the script asks for: one *every* so many iterations, the newest *keep* are kept."""

    directory: CheckpointDirectory
    every: int
    keep: int = 2


@dataclass
class _Task:
    iteration: int
    store: StoreClient
    copy: StateCopy | None
    began_s: float


class Checkpoints:
    """Of the rank *rank* of *world_size*, which holds the same as *replicas*. *note* tells people.

    Threads: one writes; everything else belongs to the thread that trains.
    """

    def __init__(
        self, settings: Settings, rank: int, world_size: int, replicas: list[int], note: Callable[[str], None]
    ) -> None:
        self.directory, self._settings = settings.directory, settings
        self._rank, self._world_size, self._replicas = rank, world_size, replicas
        self._note = note
        self.newest = 0
        """The iteration of the newest one that this process knows to count, 0 if there is none."""
        self._last = 0
        self._changed = threading.Condition()
        self._task: _Task | None = None
        self._thread: threading.Thread | None = None

    # ---- taking ----

    def is_due(self, iteration: int) -> bool:
        return iteration % self._settings.every == 0 and iteration > self._last

    def take(self, iteration: int, state: TrainingState, extra: Callable[[], Any], store: StoreClient) -> None:
        """Take that of the state before *iteration*; what *extra* gives goes with it. *store*: of the generation; a
        connection of its own, which is closed when nobody needs it any more."""
        self._last = iteration
        with self._changed:
            before = self._task
        if before is not None:
            self._leave_out(iteration, before, store)
            return
        began_s = time.monotonic()
        copy = StateCopy(state, extra()) if self._rank == self._replicas[0] else None
        with self._changed:
            self._task = _Task(iteration, store, copy, began_s)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="swift-checkpoints", daemon=True)
            self._thread.start()

    def recovered(self, iteration: int) -> None:
        """A generation begins with that iteration. What a former one had under way does not count if it does not yet;
        none is taken here, where some ranks may have taken theirs."""
        with self._changed:
            if self._task is not None:
                self._task.store.cut()
        self._last = max(self._last, iteration)

    def wait(self, timeout_s: float) -> bool:
        """Whether nothing is under way any more."""
        with self._changed:
            return self._changed.wait_for(lambda: self._task is None, timeout_s)

    def _leave_out(self, iteration: int, before: _Task, store: StoreClient) -> None:
        if self._rank == 0 or before.copy is not None:
            self._note(
                f"no checkpoint of iteration {iteration}: that of iteration {before.iteration} is still being written, "
                f"since {time.monotonic() - before.began_s:.0f} s"
            )
        try:
            store.set(f"checkpoint/{iteration}/{self._rank}", json.dumps({"none": "busy"}))
        except dist.DistStoreError:
            pass  # a failure: it does not count anyway
        finally:
            store.close()

    # ---- beginning with one ----

    def find(self, before: int | None = None) -> int:
        """The iteration of the newest one that counts (below *before*), 0 if there is none.

        Raises `CheckpointError`."""
        try:
            return self.directory.newest(before)
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
        path = self.directory.path_of(iteration, part)
        with self.directory.store.reading(path) as stream:
            extra = state_file.read(stream, f"{self.directory}/{path}", state, part.written)
        self.newest = self._last = iteration
        return extra

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._task is not None)
                task = self._task
            assert task is not None
            try:
                self._settle(task)
            except dist.DistStoreError:
                pass  # its generation has ended
            finally:
                with self._changed:
                    self._task = None
                    self._changed.notify_all()
                task.store.close()

    def _settle(self, task: _Task) -> None:
        store, name = task.store, f"checkpoint/{task.iteration}"
        part: dict[str, Any] = {"none": "failed"}
        with self._telling_why_not(task):
            # What counts meanwhile is known before this rank lets the next one count, and so lets older ones go.
            self.newest = max(self.newest, self.directory.newest())
            part = self._write(task)
        store.set(f"{name}/{self._rank}", json.dumps(part))
        if self._rank == 0:
            counts = False
            with self._telling_why_not(task):
                counts = self._commit(task, store, name)
            store.set(f"{name}/counts", "yes" if counts else "no")
        store.wait([f"{name}/counts"], _PATIENCE)
        if store.get(f"{name}/counts") == b"yes":
            self.newest = max(self.newest, task.iteration)

    @contextlib.contextmanager
    def _telling_why_not(self, task: _Task) -> Iterator[None]:
        try:
            yield
        except (OSError, StateError, KeyError, TypeError, ValueError) as error:
            self._note(f"no checkpoint of iteration {task.iteration}: {error}. Training goes on.")

    def _write(self, task: _Task) -> dict[str, Any]:
        if task.copy is None:
            return {}
        path = self.directory.new_part(task.iteration, self._rank)
        with self.directory.store.writing(path) as stream:
            written = state_file.write(stream, task.copy)
        task.copy = None
        return Part(path.rpartition("/")[2], tuple(self._replicas), written).to_json()

    def _commit(self, task: _Task, store: StoreClient, name: str) -> bool:
        keys = [f"{name}/{rank}" for rank in range(self._world_size)]
        store.wait(keys, _PATIENCE)
        told = [json.loads(data) for data in store.multi_get(keys)]
        for key in keys:
            store.delete_key(key)  # a generation may see many checkpoints
        if any("none" in data for data in told):
            return False
        parts = tuple(Part.from_json(data) for data in told if data)
        # As it will be read: one that nobody could use must not count.
        checkpoint = Checkpoint.from_json(Checkpoint(task.iteration, self._world_size, parts).to_json())
        self.directory.commit(checkpoint)
        removed = self.directory.remove(self._settings.keep)
        size = sum(part.written.num_bytes for part in parts)
        gone = f"; those of iterations {removed} are removed" if removed else ""
        self._note(
            f"checkpoint of iteration {task.iteration} in {self.directory}: {size / 1e6:.1f} MB in {len(parts)} parts, "
            f"{time.monotonic() - task.began_s:.1f} s{gone}"
        )
        return True
