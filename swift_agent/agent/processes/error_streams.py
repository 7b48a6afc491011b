"""Standard error of workers on its way to that of the agent, which remembers the last of it: a worker that dies without
a word of its own has often said why there.

    worker --> pipe, or a terminal if the agent has one --> the agent's standard error
                                                        --> the last 16 KB, for its error

A worker opens it by a path, as it would a file. What cannot be made is left out: then the worker writes to the agent's
own standard error, as without this. Must never make the agent's loop wait for a reader of that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import termios
import threading
import time
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

# Of each worker, in bytes.
KEPT = 16 * 1024
# So much may be on its way in a pipe before the worker waits; the kernel's own default is a sixteenth of it.
PIPE_BYTES = 1 << 20
CHUNK = 1 << 16
# So long the end of a worker is told later so that what it has said comes first.
FLUSH_S = 0.05
STDERR = 2
# What has no end of a line yet waits for it so long, unless it is longer.
LINE_S = 0.1
LINE_BYTES = 8192
# In one call, as many lines as fit: so much goes into a pipe as a whole, beside what others write there.
PIECE = 4096
# At the end of the job, for a reader that is slow.
CLOSE_S = 30.0


@dataclass
class _Stream:
    """*ours* is read, *kept_open* keeps it from an end between two workers. *waiting*: read, and not written yet."""

    path: str
    ours: int
    kept_open: int
    last: bytearray = field(default_factory=bytearray)
    waiting: bytearray = field(default_factory=bytearray)
    read_s: float = 0.0

    def due(self, now_s: float, at_once: bool) -> int:
        """How many of the bytes that wait are to be written now: whole lines, and the rest if nothing follows."""
        end = max(self.waiting.rfind(b"\n"), self.waiting.rfind(b"\r")) + 1
        if at_once or now_s - self.read_s >= LINE_S or len(self.waiting) - end >= LINE_BYTES:
            return len(self.waiting)
        return end

    def drain(self) -> None:
        """All that was there when this was called, at most."""
        for _ in range(PIPE_BYTES // CHUNK + 1):
            if not self.read():
                return

    def read(self) -> bool:
        """What is there; False for nothing."""
        try:
            chunk = os.read(self.ours, CHUNK)
        except OSError:  # nothing is there, or the terminal is gone
            return False
        self.last += chunk
        del self.last[:-KEPT]
        self.waiting += chunk
        self.read_s = time.monotonic()
        return bool(chunk)


class ErrorStreams:
    """*directory*: for pipes. *target*: the descriptor that all of it goes to."""

    def __init__(self, directory: str, target: int = STDERR) -> None:
        self._directory, self._target = directory, target
        self._streams: dict[int, _Stream] = {}
        self._changed = threading.Condition()
        self._wake: tuple[int, int] | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def path(self, local_rank: int) -> str:
        """What the next worker of that rank is to write to; what the one before has said is forgotten. '': none."""
        with self._changed:
            stream = self._streams.get(local_rank)
            if stream is None:
                if not self._begin():
                    return ""
                try:
                    stream = self._terminal() if os.isatty(self._target) else self._pipe(local_rank)
                except OSError as error:
                    log.debug("standard error of local rank %d is not looked at: %s", local_rank, error)
                    return ""
                self._streams[local_rank] = stream
                self._woken()
            stream.drain()  # of the worker before
            stream.last.clear()
            return stream.path

    def last(self, local_rank: int) -> str:
        """The last that the worker of that rank has said; all that it has written by now is among it."""
        with self._changed:
            stream = self._streams.get(local_rank)
            if stream is None:
                return ""
            stream.drain()
            stream.read_s = 0.0  # nothing follows
            self._woken()
            self._changed.wait_for(lambda: not stream.waiting, FLUSH_S)
            return stream.last.decode(errors="replace")

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """What is still on its way is written, if the reader of the agent's standard error takes it in that time."""
        with self._changed:
            if self._thread is None:
                return
            for stream in self._streams.values():
                stream.drain()
            self._is_closing = True
            self._woken()
        self._thread.join(timeout_s)
        with self._changed:
            for stream in self._streams.values():
                os.close(stream.ours)
                os.close(stream.kept_open)
                if stream.path.startswith(self._directory):
                    with contextlib.suppress(OSError):
                        os.unlink(stream.path)
            self._streams.clear()
            if not self._thread.is_alive() and self._wake is not None:
                for fd in self._wake:
                    os.close(fd)
            self._thread = self._wake = None

    # ---- made ----

    def _begin(self) -> bool:
        if self._thread is not None:
            return True
        try:
            self._wake = os.pipe()
        except OSError:
            return False
        os.set_blocking(self._wake[0], False)
        os.set_blocking(self._wake[1], False)
        self._is_closing = False
        thread = threading.Thread(target=self._copy, args=(self._wake[0],), name="swift-stderr", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there is none left: workers write to the agent's own
            for fd in self._wake:
                os.close(fd)
            self._wake = None
            return False
        self._thread = thread
        return True

    def _pipe(self, local_rank: int) -> _Stream:
        path = os.path.join(self._directory, f"stderr-{local_rank}")
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        ours = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            kept_open = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            os.close(ours)
            raise
        with contextlib.suppress(OSError):  # the user's pipes may have no room for that
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return _Stream(path, ours, kept_open)

    def _terminal(self) -> _Stream:
        """As wide as the agent's, and nothing is changed on its way: that is left to the agent's."""
        ours, theirs = os.openpty()
        try:
            attributes = termios.tcgetattr(theirs)
            attributes[1] &= ~termios.OPOST
            attributes[3] &= ~(termios.ECHO | termios.ISIG)
            termios.tcsetattr(theirs, termios.TCSANOW, attributes)
            with contextlib.suppress(OSError):
                fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(self._target, termios.TIOCGWINSZ, bytes(8)))
            os.set_blocking(ours, False)
            return _Stream(os.ttyname(theirs), ours, theirs)
        except (OSError, termios.error) as error:
            os.close(ours)
            os.close(theirs)
            raise OSError(str(error)) from error

    def _woken(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(OSError):  # it is full: the thread has not looked yet
                os.write(self._wake[1], b"\0")

    # ---- in the thread ----

    def _copy(self, wake: int) -> None:
        while True:
            with self._changed:
                streams = list(self._streams.values())
                is_closing, now_s = self._is_closing, time.monotonic()
                due = [(stream, stream.due(now_s, is_closing)) for stream in streams if stream.waiting]
                chunks = [(stream, bytes(stream.waiting[:number])) for stream, number in due if number]
            for stream, chunk in chunks:
                for piece in _pieces(chunk):
                    self._write(piece, is_closing)
                with self._changed:
                    del stream.waiting[: len(chunk)]
                    self._changed.notify_all()
            if chunks:
                continue
            if is_closing:
                return
            poller = select.poll()
            for fd in (wake, *(stream.ours for stream in streams)):
                poller.register(fd, select.POLLIN)
            poller.poll(LINE_S * 1000 if due else None)
            with contextlib.suppress(OSError):
                os.read(wake, CHUNK)
            with self._changed:
                for stream in self._streams.values():
                    stream.read()

    def _write(self, data: bytes, is_closing: bool) -> None:
        """Waits while nobody takes it, as a worker that writes there by itself would."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._target, view) :]
            except BlockingIOError:
                if is_closing:
                    return
                select.select([], [self._target], [], 1.0)
            except OSError as error:
                if error.errno != errno.EINTR:
                    return  # nobody will ever read it


def _pieces(data: bytes) -> list[bytes]:
    """Whole lines together, as many as fit into `PIECE`."""
    pieces: list[bytes] = []
    for line in data.splitlines(keepends=True):
        if pieces and len(pieces[-1]) + len(line) <= PIECE:
            pieces[-1] += line
        else:
            pieces.append(line)
    return pieces
