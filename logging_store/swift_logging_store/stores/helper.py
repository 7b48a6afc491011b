"""A process for calls that may not come back: it does one thing after the other, each answer has a deadline, and it can
be killed.

A request on its standard input and the answer on its standard output are frames: 4 bytes, the length of a JSON object;
8 bytes, the length of what follows it; both; numbers big-endian. One request at a time; it ends with its standard
input, also in the middle of one. Nothing is unpickled. Must never import torch, nor the other rooms.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

Answer = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]

# For one answer, if nothing else is said.
ANSWER_TIMEOUT_S = 20.0
# A process in a call to a filesystem that hangs does not even end when it is killed. It is not waited for longer.
_END_S = 1.0
_CHECK_S = 0.1
# Where this package lies. Not all of sys.path: the directory of the user's script may have a `queue.py` in it.
_HERE = str(Path(__file__).resolve().parents[2])
_SIZES = struct.Struct(">IQ")
_KINDS: dict[str, type[OSError]] = {
    "absent": FileNotFoundError, "connection": ConnectionError, "cut": ConnectionAbortedError, "": OSError,
}  # fmt: skip


class Helper:
    """Runs *module* with *arguments*, in which `serve` answers. *who*: with whom it talks, for errors."""

    def __init__(self, who: str, module: str, *arguments: str) -> None:
        self._who = who
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [_HERE, os.environ.get("PYTHONPATH")]))},
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)  # it may not read any more
        self._deadline_s = 0.0
        self._check: Callable[[], object] = lambda: None

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(
        self, op: str, data: bytes | memoryview = b"", *, timeout_s: float | None = None,
        check: Callable[[], object] = lambda: None, **arguments: Any,
    ) -> Any:  # fmt: skip
        """Raises OSError: FileNotFoundError, ConnectionError; TimeoutError if there is no answer; and what *check*
        does, which is called while the answer is waited for. After the last two it is of no use any more."""
        return self.exchange({"op": op, **arguments}, data, timeout_s=timeout_s, check=check)[0].get("value")

    def exchange(
        self, request: dict[str, Any], data: bytes | memoryview = b"", *, timeout_s: float | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> tuple[dict[str, Any], bytearray]:  # fmt: skip
        if self._to < 0:
            raise OSError(f"the process that talked to {self._who} was ended")
        timeout_s = ANSWER_TIMEOUT_S if timeout_s is None else timeout_s
        self._deadline_s, self._check = time.monotonic() + timeout_s, check
        try:
            self._send(frame(request, len(data)))
            self._send(data)
            num_json, num_data = _SIZES.unpack(self._receive(_SIZES.size))
            message, answer = json.loads(self._receive(num_json)), self._receive(num_data)
            if "error" in message:
                raise _KINDS[message["kind"]](message["error"])
        except TimeoutError:
            raise TimeoutError(f"no answer from {self._who} within {timeout_s:g} s") from None
        except (ValueError, TypeError, KeyError, MemoryError) as error:
            raise OSError(f"the process that talks to {self._who} gave no proper answer: {error!r}") from None
        return message, answer

    def interrupt(self) -> None:
        """From another thread: a thread that waits for an answer gets an OSError, and has to `kill` the helper."""
        self._process.send_signal(signal.SIGKILL)

    def kill(self) -> None:
        """A stream that is left over with data in it, of a try that failed, must not come to another one's pipe: pipes
        that are opened later have the same numbers."""
        self._to = self._from = -1
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if self._ended() is None:
            with contextlib.suppress(RuntimeError):  # no thread is left: it is waited for with the next process
                threading.Thread(target=self._process.wait, name="swift-helper-end", daemon=True).start()

    def _ended(self) -> int | None:
        """Its exit code, if it has ended or does so now."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S)
        return None

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
                raise OSError(f"the process that talks to {self._who} has ended, exit code {self._ended()}")
            data += piece
        return data

    def _wait(self, fd: int, event: int) -> None:
        poll = select.poll()
        poll.register(fd, event)
        # What is there is taken also where this process was stopped beyond the deadline.
        while not poll.poll(max(0.0, min(_CHECK_S, self._deadline_s - time.monotonic())) * 1000):
            self._check()
            if time.monotonic() >= self._deadline_s:
                raise TimeoutError


def frame(message: dict[str, Any], num_data: int) -> bytes:
    """What goes before *num_data* bytes."""
    text = json.dumps(message).encode()
    return _SIZES.pack(len(text), num_data) + text


# ---- in the process ----


def serve(make: Callable[[], Answer], kind_of: Callable[[Exception], str]) -> None:
    """Answer requests with what *make* gives, made for the first one, until the end of standard input; does not return.
    An exception of it is the answer, of that kind: see `_KINDS`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are for the training, which may use this for its end
    # Whatever a library prints goes where errors go.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue(1)

    def listen() -> None:
        try:
            while (request := _read_frame(sys.stdin.buffer)) is not None:
                requests.put(request)
        finally:
            os._exit(0)  # whatever the main thread is in, for minutes perhaps

    threading.Thread(target=listen, daemon=True).start()
    answer: Answer | None = None
    while True:
        request, data = requests.get()
        try:
            answer = answer or make()
            message, data = answer(request, data)
        except Exception as error:  # whatever it is: it is the answer
            message, data = {"error": _text_of(error), "kind": kind_of(error)}, b""
        answers.write(frame(message, len(data)))
        answers.write(data)
        answers.flush()


def _read_frame(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """None at the end."""
    head = stream.read(_SIZES.size)
    if len(head) < _SIZES.size:
        return None
    num_json, num_data = _SIZES.unpack(head)
    text, data = stream.read(num_json), stream.read(num_data)
    whole = len(text) == num_json and len(data) == num_data
    return (json.loads(text), data) if whole else None


def _text_of(error: Exception) -> str:
    """Without the trace of a Java server."""
    return str(error).replace("\\n", "\n").partition("\n")[0] or type(error).__name__
