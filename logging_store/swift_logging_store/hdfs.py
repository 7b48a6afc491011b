"""Files in HDFS, by hdfs-native, which needs no Java here: a `store.Store`.

The library runs in a process of its own (`hdfs_helper`), for each operation that is under way one: it may sit in a call
for ten minutes when data nodes die, deaf to everything. So each answer has a deadline, after which the process is
killed and the operation fails with an OSError. Training does not wait for it, except where it begins with a checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import select
import struct
import subprocess
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from swift_logging_store.errors import LogError

# One answer: of the name node, or for a piece of a file that goes to its data nodes.
ANSWER_TIMEOUT_S = 20.0
PIECE_BYTES = 4 << 20
# The head of a frame between this process and the one that talks to HDFS: see `hdfs_helper`.
SIZES = struct.Struct(">IQ")


# The name node hands out a data node that has died until it has missed it, for ten minutes by default, and hdfs-native
# neither asks for another one nor goes on without it. Where there are many nodes, the next try gets others.
MAX_ATTEMPTS = 3
_PAUSE_S = 0.2
_KINDS: dict[str, type[OSError]] = {"absent": FileNotFoundError, "connection": ConnectionError, "": OSError}

T = TypeVar("T")


class NotInstalled(LogError):
    """hdfs-native is not there; the message says what to do."""


class HdfsStore:
    """Below *path* in the filesystem of *authority*: `host:port` of a name node, or the name of a service from
    `HADOOP_CONF_DIR`. Kerberos and what else a client needs come from there, too.

    A file is written under another name, `*.part`, and renamed when it is complete.
    """

    def __init__(self, authority: str, path: str) -> None:
        if importlib.util.find_spec("hdfs_native") is None:
            raise NotInstalled(f"hdfs://{authority} needs hdfs-native: pip install 'swift-agent[hdfs]'")
        self._url = f"hdfs://{authority}"
        self._base = f"/{path.strip('/')}".rstrip("/")
        self._idle: list[_Helper] = []
        # When nobody has the store any more, and at the end of this process.
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
        target = self._at(path)
        part = f"{target}.{uuid.uuid4().hex[:8]}.part"
        try:
            with self._lent() as helper:
                helper.ask("create", path=part)
                stream = io.BufferedWriter(_Writing(helper), PIECE_BYTES)
                yield stream
                stream.flush()
                helper.ask("finish", path=part, target=target)
        except TimeoutError:
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
        for _ in range(MAX_ATTEMPTS - 1):
            with contextlib.suppress(ConnectionError), self.writing(path) as stream:
                return content(stream)
            time.sleep(_PAUSE_S)
        with self.writing(path) as stream:
            return content(stream)

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
        with self._lent() as helper:
            return helper.ask(op, **arguments)

    @contextlib.contextmanager
    def _lent(self) -> Iterator[_Helper]:
        """A helper for the time of one operation; one that did not end as it should is not used again."""
        helper = self._take_idle() or _Helper(self._url)
        try:
            yield helper
        except BaseException:
            helper.kill()
            raise
        self._idle.append(helper)


    def _take_idle(self) -> _Helper | None:
        while True:
            try:
                helper = self._idle.pop()  # another thread may take the last one
            except IndexError:
                return None
            if helper.is_alive():
                return helper
            helper.kill()


class _Helper:
    """A process that does one thing after the other."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "swift_logging_store.hdfs_helper", url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)  # it may not read any more
        self._deadline_s = 0.0

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, op: str, data: bytes | memoryview = b"", **arguments: Any) -> Any:
        """Raises OSError: one of `_KINDS`, TimeoutError if there is no answer."""
        return self.exchange({"op": op, **arguments}, data)[0].get("value")

    def exchange(self, request: dict[str, Any], data: bytes | memoryview = b"") -> tuple[dict[str, Any], bytearray]:
        if self._to < 0:
            raise OSError("the process that talked to HDFS was ended")
        self._deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        self._send(frame(request, len(data)))
        self._send(data)
        num_json, num_data = SIZES.unpack(self._receive(SIZES.size))
        message, answer = json.loads(self._receive(num_json)), self._receive(num_data)
        if "error" in message:
            raise _KINDS[message["kind"]](message["error"])
        return message, answer

    def kill(self) -> None:
        """A stream that is left over with data in it, of a try that failed, must not come to another one's pipe: pipes
        that are opened later have the same numbers."""
        self._to = self._from = -1
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            self._wait(self._to, select.POLLOUT)
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(self._to, left[: 1 << 16]) :]

    def _receive(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._wait(self._from, select.POLLIN)
            piece = os.read(self._from, min(size - len(data), 1 << 20))
            if not piece:
                raise OSError(f"the process that talks to HDFS has ended, exit code {self._process.wait()}")
            data += piece
        return data

    def _wait(self, fd: int, event: int) -> None:
        poll = select.poll()
        poll.register(fd, event)
        # What is there is taken also where this process was stopped beyond the deadline.
        if not poll.poll(max(0.0, self._deadline_s - time.monotonic()) * 1000):
            raise TimeoutError(f"no answer from HDFS within {ANSWER_TIMEOUT_S:g} s")


class _Writing(io.RawIOBase):
    def __init__(self, helper: _Helper) -> None:
        self._helper = helper

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")[:PIECE_BYTES]
        self._helper.ask("write", piece)
        return len(piece)


class _Reading(io.RawIOBase):
    def __init__(self, helper: _Helper) -> None:
        self._helper = helper

    def readable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        into = memoryview(memory).cast("B")
        _, piece = self._helper.exchange({"op": "read", "size": min(len(into), PIECE_BYTES)})
        into[: len(piece)] = piece
        return len(piece)


def frame(message: dict[str, Any], num_data: int) -> bytes:
    """What goes before *num_data* bytes."""
    text = json.dumps(message).encode()
    return SIZES.pack(len(text), num_data) + text


def _end(helpers: list[_Helper], pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork of the process that has them
    for helper in helpers:
        helper.kill()
    helpers.clear()
