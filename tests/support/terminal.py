"""A program on a terminal of its own (a pty): what it writes, the screen size, keys that send signals."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

ENDS_CLEAN = ("\x1b[?25h", "\x1b[?1049l")
"""The cursor is shown, and the usual screen is back."""
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


class Terminal:
    """Runs *command* with a terminal of that size as its input, output and controlling terminal."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], columns: int, rows: int, encoding: str = "utf-8"
    ) -> None:
        self._lead, follow = pty.openpty()
        self.resize(columns, rows)
        self.process = subprocess.Popen(
            command, env={**environment, "TERM": "xterm-256color", "PYTHONIOENCODING": encoding}, stdin=follow,
            stdout=follow, stderr=follow, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(follow)
        self.written = ""
        self._rest = b""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._lead)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._lead, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        """`b"\\x03"` is Ctrl-C."""
        os.write(self._lead, keys)

    def read(self, timeout_s: float) -> bool:
        """More of what it writes; False if nothing came, or it has ended."""
        ready, _, _ = select.select([self._lead], [], [], timeout_s)
        if not ready:
            return False
        try:
            more = os.read(self._lead, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.written += more.decode(errors="replace")
        return bool(more)

    def wait_for(self, condition: Callable[[str], object], what: str, timeout_s: float = 30.0) -> None:
        """*condition* of the frame that is on the screen."""
        deadline_s = time.monotonic() + timeout_s
        while not condition(self.frame()):
            self.read(0.1)
            assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:g} s\n{self.frame()}"

    def finish(self, timeout_s: float = 10.0) -> int:
        """Its exit code, after it has ended."""
        deadline_s = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.read(0.05)
            assert time.monotonic() < deadline_s, f"it does not end\n{self.frame()}"
        while self.read(0.05):
            pass
        return self.process.returncode

    def frame(self) -> str:
        """The last whole picture, without colours: what was written since the cursor last went to the top."""
        frames = self.written.split("\x1b[H")
        return plain(frames[-2] if len(frames) > 2 else frames[-1])


def plain(text: str) -> str:
    return _SEQUENCE.sub("", text).replace("\r", "")
