"""Files in HDFS, by hdfs-native, which needs no Java, or by a client of the site's own: a `contract.Store`.

The client runs in a process of its own (`hdfs_helper`), for each operation that is under way one: it may sit in a call
for ten minutes when data nodes die, deaf to everything. So each answer has a deadline, after which the process is
killed and the operation fails with an OSError. Training does not wait for it, except where it begins with a checkpoint.
Must never call a client in this process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from swift_logging_store.stores.helper import Helper

# Of a file, in one request to the helper, and so what the data nodes have the time of one answer for.
PIECE_BYTES = 4 << 20
# The name node hands out a data node that has died until it has missed it, for ten minutes by default, and hdfs-native
# neither asks for another one nor goes on without it. Where there are many nodes, the next try gets others.
MAX_ATTEMPTS = 3
# In a small cluster hardly any pipeline of several nodes is without the dead one. A single node mostly is another one,
# or refuses at once.
MAX_ATTEMPTS_ALONE = 12
# It may also be dead without refusing anything. Each costs the time of an answer.
MAX_LATE = 4
# Tries, when the connection to the name node is lost: it was restarted, or another one has taken its place.
MAX_CUT = 3
_PAUSE_S = 0.2

T = TypeVar("T")


ENV_CLIENT = "SWIFT_HDFS_CLIENT"
_HDFS_NATIVE = "swift_logging_store.stores.hdfs_helper"


def client() -> str:
    """The module that talks to HDFS: ours, or the plug-in that `ENV_CLIENT` names. Raises ValueError."""
    name = os.environ.get(ENV_CLIENT) or "hdfs-native"
    if name == "hdfs-native":
        return _HDFS_NATIVE
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # of what is in front of a dot, or no name of a module
        found = None
    if found is None:
        raise ValueError(f"SWIFT_HDFS_CLIENT={name}: no such module; without the variable it is hdfs-native")
    return name


def needs_hdfs_native() -> bool:
    """Raises ValueError, as `client` does."""
    return client() == _HDFS_NATIVE


class NoAnswer(TimeoutError):
    """From data nodes; the name node has answered before."""


class HdfsStore:
    """Below *path* in the filesystem of *authority*: `host:port` of a name node, or the name of a service from
    `HADOOP_CONF_DIR`. Kerberos and what else a client needs come from there, too.

    A file is written under another name, `*.part`, and renamed when it is complete.
    """

    def __init__(self, authority: str, path: str) -> None:
        self._url, self._program = f"hdfs://{authority}", client()
        self._base = f"/{path.strip('/')}".rstrip("/")
        self._idle: list[Helper] = []
        self._late_parts: list[str] = []  # to be removed
        # When the store is not referred to any more, and at the end of this process.
        weakref.finalize(self, _end, self._idle, os.getpid())

    def __str__(self) -> str:
        return f"{self._url}{self._base}"

    def names(self, path: str = "") -> list[str]:
        names: list[str] = self._ask("names", path=self._at(path))
        return names

    def exists(self, path: str) -> bool:
        return self.size(path) >= 0

    def size(self, path: str) -> int:
        return int(self._ask("size", path=self._at(path)))

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        with self._writing(path, False) as stream:
            yield stream

    @contextlib.contextmanager
    def _writing(self, path: str, alone: bool) -> Iterator[BinaryIO]:
        target = self._at(path)
        part = f"{target}.{uuid.uuid4().hex[:8]}.part"
        try:
            with self._lent() as helper:
                helper.ask("create", path=part, alone=alone)
                stream = io.BufferedWriter(_Writing(helper), PIECE_BYTES)
                yield stream
                stream.flush()
                with _late():
                    helper.ask("finish", path=part, target=target)
        except TimeoutError as error:
            if isinstance(error, NoAnswer):
                self._late_parts.append(part)
            raise  # another question would only take as long
        except BaseException:
            with contextlib.suppress(OSError):
                self._ask("remove", path=part, recursive=False)
            raise

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[BinaryIO]:
        with self._lent() as helper:
            helper.ask("open", path=self._at(path))
            yield io.BufferedReader(_Reading(helper), PIECE_BYTES)
            helper.ask("close")

    def write(self, path: str, content: Callable[[BinaryIO], T]) -> T:
        """What a dead data node spoils is written again, as another file: to as many nodes as the filesystem wants,
        then to one at a time, from which the name node has the others get it. What was cut from the name node is
        written again, too."""
        num_refused = num_late = num_cut = 0
        while True:
            try:
                with self._writing(path, num_late > 0 or num_refused >= MAX_ATTEMPTS) as stream:
                    result = content(stream)
                break
            except NoAnswer:
                num_late += 1
                if num_late == MAX_LATE:
                    raise
            except ConnectionAbortedError:
                num_cut += 1
                if num_cut == MAX_CUT:
                    raise
            except ConnectionError:
                num_refused += 1
                if num_refused == MAX_ATTEMPTS + MAX_ATTEMPTS_ALONE:
                    raise
            time.sleep(_PAUSE_S)
        with contextlib.suppress(OSError, IndexError):  # another thread may take the last one
            while True:
                self._ask("remove", path=self._late_parts.pop(), recursive=False)
        return result

    def put(self, path: str, data: bytes) -> None:
        self.write(path, lambda stream: stream.write(data))

    def remove(self, path: str) -> None:
        self._ask("remove", path=self._at(path), recursive=False)

    def remove_directory(self, path: str) -> None:
        with contextlib.suppress(OSError):
            self._ask("remove", path=self._at(path), recursive=True)

    def _at(self, path: str) -> str:
        return f"{self._base}/{path}".rstrip("/") or "/"

    def _ask(self, op: str, **arguments: Any) -> Any:
        """What may be asked twice: it is, by another process, when the connection to the name node was lost."""
        num_cut = 0
        while True:
            try:
                with self._lent() as helper:
                    return helper.ask(op, **arguments)
            except ConnectionAbortedError:
                num_cut += 1
                if num_cut == MAX_CUT:
                    raise

    @contextlib.contextmanager
    def _lent(self) -> Iterator[Helper]:
        """A helper for the time of one operation; one that did not end as it should is not used again."""
        helper = self._take_idle() or Helper("HDFS", self._program, self._url)
        try:
            yield helper
        except BaseException:
            helper.kill()
            raise
        self._idle.append(helper)

    def _take_idle(self) -> Helper | None:
        while True:
            try:
                helper = self._idle.pop()  # another thread may take the last one
            except IndexError:
                return None
            if helper.is_alive():
                return helper
            helper.kill()


class _Writing(io.RawIOBase):
    def __init__(self, helper: Helper) -> None:
        self._helper = helper

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")[:PIECE_BYTES]
        with _late():
            self._helper.ask("write", piece)
        return len(piece)


class _Reading(io.RawIOBase):
    def __init__(self, helper: Helper) -> None:
        self._helper = helper

    def readable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        into = memoryview(memory).cast("B")
        _, piece = self._helper.exchange({"op": "read", "size": min(len(into), PIECE_BYTES)})
        into[: len(piece)] = piece
        return len(piece)


@contextlib.contextmanager
def _late() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise NoAnswer(str(error)) from None


def _end(helpers: list[Helper], pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork of the process that has them
    for helper in helpers:
        helper.kill()
    helpers.clear()
