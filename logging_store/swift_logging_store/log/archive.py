"""Copies of closed segments in a store that all nodes see: made while training goes on, so that the node's own disk
need not have room for the whole log, and brought back when they are needed.

    closed segment --name--> queue --thread--> helper process --> store

Only names are queued: a segment stays on the disk until its deleter has asked `stored`. Nothing waits for the store,
which may be away for any time: what could not be copied is tried again, and people are told once, and once when it is
over. A request that gets no answer in time costs the helper process.

A process may have been stopped for any time, and asks for what it was about to when it goes on: perhaps it has a
successor by then. So it removes only the directories whose names say that their processes came before it.

Must never delete a file of the node that it has not made, nor decide which segments are needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from swift_logging_store.errors import LogError
from swift_logging_store.log.rate import Rate
from swift_logging_store.stores.helper import ANSWER_TIMEOUT_S, Helper

# A segment has the time of some answers, and that of its bytes on a slow line; twice as much in each further try.
NUM_ANSWERS = 3
LEAST_BYTES_PER_S = 4 << 20
_MAX_DOUBLINGS = 6
PAUSES_S = (0.5, 30.0)
"""After a failure: the first, and the longest; each is twice the one before."""
# Of bringing a segment, and of removing something.
_NUM_TRIES = 3
# At the end, for the thread.
_END_S = 5.0
# The kind of runs that are numbered by a clock.
CLOCK = "t"
_NAME = re.compile(r"(.*)\.swiftlog-([a-z])(\d+)-(\d+)-[0-9a-f]{8}")


def directory_name(job_id: str, rank: int, run: str, generation: int, suffix: str) -> str:
    """Of a process of *rank*, in the store, that was started in *generation*. *run*: which one of this job: a letter,
    for a kind, and a number that is larger for a later run of that kind. *suffix*: 8 hexadecimal digits, of this
    process alone."""
    job = re.sub(r"[^A-Za-z0-9_.-]", "-", job_id)
    if job != job_id:  # or jobs of two names would delete each other's
        job += f"-{hashlib.sha256(job_id.encode()).hexdigest()[:8]}"
    name = f"{job}.rank{rank}.swiftlog-{run}-{generation}-{suffix}"
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name} is no name for the log of a process")
    return name


def predecessors(directory: str, names: Iterable[str]) -> list[str]:
    """Those among *names* whose process had the same rank of the same job before that of *directory*: in an earlier
    generation of the same run, or in an earlier run. Runs of two kinds have no order: neither removes the other's."""
    mine = _NAME.fullmatch(directory)
    assert mine is not None
    earlier = []
    for name in names:
        found = _NAME.fullmatch(name)
        if found is None or (found[1], found[2]) != (mine[1], mine[2]):
            continue
        if (int(found[3]), int(found[4])) < (int(mine[3]), int(mine[4])):
            earlier.append(name)
    return earlier


def ahead(directory: str, names: Iterable[str]) -> list[str]:
    """Those among *names* whose process had the same rank of the same job in a run of one node that began later, by the
    clock of that node; so if that of *directory* is the newest, the clock was set back since."""
    mine = _NAME.fullmatch(directory)
    assert mine is not None
    found = [_NAME.fullmatch(name) for name in names] if mine[2] == CLOCK else []
    same = [one for one in found if one is not None and (one[1], one[2]) == (mine[1], mine[2])]
    return [one[0] for one in same if int(one[3]) > int(mine[3])]


@dataclass(frozen=True)
class _Task:
    """*path*: a segment, or the name of one in the store."""

    kind: Literal["put", "remove", "remove predecessors"]
    path: str = ""
    num_tries: int = 0

    @property
    def name(self) -> str:
        return Path(self.path).name


class Archive:
    """Of one process. *url*: of the store; *directory*: this process's own in it, see `directory_name`. *note* tells
    people; it is called in a thread. *is_ours*: whether the rank is still this process's own; else nothing of others is
    removed: they may be its successors under another etcd."""

    def __init__(
        self, url: str, directory: str, note: Callable[[str], None], is_ours: Callable[[], bool] = lambda: True
    ) -> None:
        self._url, self._directory, self._note, self._is_ours = url, directory, note, is_ours
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._tasks: deque[_Task] = deque()
        self._current: _Task | None = None
        self._stored: dict[str, int] = {}  # name: bytes
        self._fails = False
        self._closing = False
        self.copied = Rate()
        """To the store, in tries that have succeeded."""
        self.fetched = Rate()
        """From there, likewise."""
        self.num_failures = 0
        """Requests to the store that have failed."""
        self._helper: Helper | None = None  # made and ended by the thread
        self._has_told_of_rest = self._has_told_of_later = False  # of the thread
        self._thread = threading.Thread(target=self._run, name="swift-log-archive", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return f"{self._url}/{self._directory}"

    @property
    def stored(self) -> frozenset[str]:
        """The names of the segments that are whole in the store."""
        with self._changed:
            return frozenset(self._stored)

    def add(self, path: Path) -> None:
        """A closed segment, whose name is unique in this process. Any thread; returns at once."""
        self._do_later(_Task("put", str(path)))

    def remove(self, names: Collection[str]) -> None:
        """These segments are not needed any more, whether they are in the store already or not."""
        with self._changed:
            known = self._stored.keys() | ({self._current.name} if self._current else set())
            self._tasks = deque(task for task in self._tasks if task.kind != "put" or task.name not in names)
            self._tasks.extend(_Task("remove", name) for name in names if name in known)
            for name in names:
                self._stored.pop(name, None)
            if not any(task.kind == "put" for task in self._tasks):
                self._fails = False  # of what is to be copied nothing is missing
            self._changed.notify_all()

    def remove_all(self) -> None:
        """So far."""
        with self._changed:
            tasks = [*self._tasks, *([self._current] if self._current else [])]
            names = {task.name for task in tasks if task.kind == "put"} | self._stored.keys()
        self.remove(names)

    def remove_predecessors(self) -> None:
        """The directories of the processes that had this rank in this job before."""
        self._do_later(_Task("remove predecessors"))

    def wait(self, timeout_s: float) -> bool:
        """Whether nothing is left to do, after so long at most."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks and self._current is None, timeout_s)

    @contextlib.contextmanager
    def fetching(self, check: Callable[[], object]) -> Iterator[Callable[[str, Path], None]]:
        """A function that makes a local file of a segment in the store. It raises `LogError`, and what *check* does,
        which is called all the time."""
        helpers: list[Helper] = []  # the thread's may be in a request that takes long

        def fetch(name: str, path: Path) -> None:
            with self._changed:
                if name not in self._stored:
                    raise LogError(f"segment {name} of the log is neither on this node nor in {self}")
                num_bytes = self._stored[name]
            for number in range(_NUM_TRIES):
                check()
                began_s = time.monotonic()
                try:
                    if not helpers:
                        helpers.append(self._new_helper())
                    helpers[0].ask(
                        "get", name=f"{self._directory}/{name}", path=str(path), check=check,
                        timeout_s=_time_s(num_bytes, number),
                    )  # fmt: skip
                    with self._changed:  # there may be several readers
                        self.fetched = self.fetched.more(num_bytes, time.monotonic() - began_s)
                    return
                except OSError as error:
                    with self._changed:
                        self.num_failures += 1
                    if helpers:
                        helpers.pop().kill()
                    why = error
            raise LogError(f"segment {name} of the log cannot be brought from {self}: {why}") from why

        try:
            yield fetch
        finally:
            for helper in helpers:
                helper.kill()

    def close(self) -> None:
        """Nothing of this rank is needed any more: what is in the store is removed, unless that is away. May be
        repeated."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            if self._helper is not None:
                self._helper.interrupt()  # it may be in a request that takes long
            self._changed.notify_all()
        self._thread.join(_END_S)
        if self._fails:
            self._note(f"logs of messages may be left in {self}: it could not be reached")
            return
        try:
            with self._new_helper() as helper:
                self._remove_predecessors(helper)
                helper.ask("remove_directory", path=self._directory)
                left = helper.ask("names", path=self._directory)
            if left:
                self._note(f"logs of messages are left in {self}: they cannot be removed")
        except OSError as error:
            self._note(f"logs of messages may be left in {self}: {error}")

    def _do_later(self, task: _Task) -> None:
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    def _new_helper(self) -> Helper:
        return Helper(self._url, "swift_logging_store.log.archive_helper", self._url)

    # ---- the thread ----

    def _run(self) -> None:
        pause_s = PAUSES_S[0]
        while (task := self._next()) is not None:
            try:
                self._do(task)
                pause_s = PAUSES_S[0]
            except Exception as error:  # whatever it is: nothing else would tell
                self._failed(task, error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, pause_s)
                pause_s = min(2 * pause_s, PAUSES_S[1])
        if self._helper is not None:
            self._helper.kill()

    def _next(self) -> _Task | None:
        with self._changed:
            self._current = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._tasks or self._closing)
            if self._closing:
                return None
            self._current = self._tasks.popleft()
            return self._current

    def _do(self, task: _Task) -> None:
        helper = self._helper
        if helper is None:
            helper = self._new_helper()
            with self._changed:
                self._helper = helper
                if self._closing:
                    return
        match task.kind:
            case "put":
                self._put(helper, task)
            case "remove":
                helper.ask("remove", path=f"{self._directory}/{task.path}")
            case "remove predecessors":
                self._remove_predecessors(helper)

    def _put(self, helper: Helper, task: _Task) -> None:
        path = Path(task.path)
        try:
            num_bytes = path.stat().st_size
            if task.num_tries:
                helper.ask("clean", directory=self._directory, name=path.name)
            timeout_s = _time_s(num_bytes, task.num_tries)
            began_s = time.monotonic()
            helper.ask("put", timeout_s=timeout_s, path=task.path, name=f"{self._directory}/{path.name}")
            self.copied = self.copied.more(num_bytes, time.monotonic() - began_s)
        except FileNotFoundError:
            if path.exists():
                raise  # of the store
            return  # not needed any more
        with self._changed:
            if _Task("remove", path.name) not in self._tasks:
                self._stored[path.name] = num_bytes
            was_away, self._fails = self._fails, False
        if was_away:
            self._note(f"logs of messages are copied to {self._url} again")

    def _remove_predecessors(self, helper: Helper) -> None:
        known = helper.ask("names", path="")
        names, later = predecessors(self._directory, known), ahead(self._directory, known)
        if later and not self._has_told_of_later:
            self._has_told_of_later = True
            self._note(
                f"{self._url} has logs of a run that began later, or before the clock of this node was set back "
                f"({later[0]}): they stay there; remove them if no such run is alive"
            )
        if not names or not self._is_ours():
            return
        for name in names:
            helper.ask("remove_directory", path=name)

    def _failed(self, task: _Task, error: Exception) -> None:
        with self._changed:
            if self._closing:
                return
            self.num_failures += 1
            helper, self._helper = self._helper, None
            is_put = task.kind == "put"
            is_wanted = not is_put or _Task("remove", task.name) not in self._tasks
            if is_wanted and (is_put or task.num_tries + 1 < _NUM_TRIES):
                self._tasks.append(replace(task, num_tries=task.num_tries + 1))
            is_missing = is_put and is_wanted
            is_new, self._fails = is_missing and not self._fails, self._fails or is_missing
            self._changed.notify_all()
        if is_new:
            self._note(f"logs of messages cannot be copied to {self._url} for now, and stay on this node: {error}")
        elif not is_put and not self._has_told_of_rest and task.num_tries + 1 == _NUM_TRIES:
            self._has_told_of_rest = True
            self._note(f"logs of messages that nobody needs any more may stay in {self._url} for longer: {error}")
        if helper is not None:
            helper.kill()


def _time_s(num_bytes: int, num_tries: int) -> float:
    """For a segment, when so many tries have failed."""
    return float((NUM_ANSWERS * ANSWER_TIMEOUT_S + num_bytes / LEAST_BYTES_PER_S) * 2 ** min(num_tries, _MAX_DOUBLINGS))
