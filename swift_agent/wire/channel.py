"""Messages between an agent and its workers over a Unix socket.

One JSON object per message behind a 4-byte length; never pickle. The socket lies in a directory that only the user can
enter, and the kernel vouches for the peer's user and process (SO_PEERCRED). A worker reads in a thread: a message
reaches it in 0.1 ms even while its main thread is blocked in a collective, and end-of-file means that its agent has
died.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from typing import Any

ENV_SOCKET = "SWIFT_AGENT_SOCKET"
MAX_MESSAGE_BYTES = 64 << 20
# Of messages that the other side does not take.
MAX_UNSENT_BYTES = 2 * MAX_MESSAGE_BYTES
_PIECE_BYTES = 1 << 16
_LENGTH = struct.Struct("!I")

Message = dict[str, Any]


class ChannelClosed(Exception):
    """The other side is gone."""


class WorkerChannel:
    """One connected socket. `send` may be called from any thread; `receive` from one. A side that must not wait for the
    other, an agent for a worker that is stopped, uses `post` and `flush` instead of `send`, in one thread.

    *stuck_since_s*: on the monotonic clock, since when the other side has taken nothing of what is kept for it; None:
    nothing is.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._send_lock = threading.Lock()
        self._buffer = bytearray()
        self._unsent = bytearray()
        self.stuck_since_s: float | None = None

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        """Raises `ChannelClosed`."""
        try:
            with self._send_lock:
                self.sock.sendall(_frame(message))
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def post(self, message: Message) -> None:
        """Returns at once; what the other side does not take now is kept for `flush`. Raises `ChannelClosed`, also if
        too much is."""
        self._unsent += _frame(message)
        self.flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise ChannelClosed(f"the other side has not taken {len(self._unsent)} bytes")

    def flush(self) -> None:
        """Send what can be sent now. Raises `ChannelClosed`."""
        num_before = len(self._unsent)
        while self._unsent:
            try:
                num_sent = self.sock.send(self._unsent[:_PIECE_BYTES], socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            del self._unsent[:num_sent]
        if not self._unsent:
            self.stuck_since_s = None
        elif self.stuck_since_s is None or len(self._unsent) < num_before:
            self.stuck_since_s = time.monotonic()

    def stop_sending(self) -> None:
        """Nothing more comes from this side, and what was kept is dropped; what the other side says is still heard."""
        self._unsent.clear()
        self.stuck_since_s = None
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def receive(self) -> Message:
        """Block for one message. Raises `ChannelClosed` at end-of-file or on a malformed message."""
        while True:
            messages = self._take(1)
            if messages:
                return messages[0]
            self._fill()

    def receive_ready(self) -> list[Message]:
        """All complete messages after one read of what is there; for an event loop. Raises `ChannelClosed`."""
        self._fill(socket.MSG_DONTWAIT)
        return self._take(None)

    def receive_rest(self) -> list[Message]:
        """All complete messages that are there, of a side that is at its end."""
        messages: list[Message] = []
        with contextlib.suppress(ChannelClosed):
            while self._fill(socket.MSG_DONTWAIT):
                pass
        with contextlib.suppress(ChannelClosed):
            while said := self._take(1):
                messages += said
        return messages

    def is_open(self) -> bool:
        """False once the other side has closed it and all it said was received."""
        try:
            return bool(self.sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _fill(self, flags: int = 0) -> bool:
        """Whether something was there."""
        try:
            chunk = self.sock.recv(1 << 16, flags)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if not chunk:
            raise ChannelClosed("end of file")
        self._buffer += chunk
        return True

    def _take(self, limit: int | None) -> list[Message]:
        messages: list[Message] = []
        while len(self._buffer) >= _LENGTH.size and (limit is None or len(messages) < limit):
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise ChannelClosed(f"a message of {length} bytes is longer than any of ours")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                message = json.loads(self._buffer[_LENGTH.size : end])
            except ValueError as error:
                raise ChannelClosed(f"malformed message: {error}") from None
            if not isinstance(message, dict):
                raise ChannelClosed("malformed message: not an object")
            del self._buffer[:end]
            messages.append(message)
        return messages


def _frame(message: Message) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(data)) + data


class WorkerListener:
    """The agent's end: accepts workers of the same user. *directory* must exist with mode 0700."""

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, "agent.sock")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(self.path)
        self._sock.listen(256)

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> tuple[WorkerChannel, int] | None:
        """The channel and the process id of a worker, or None if the peer belongs to another user."""
        sock, _ = self._sock.accept()
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if uid != os.getuid():
            sock.close()
            return None
        return WorkerChannel(sock), pid

    def close(self) -> None:
        self._sock.close()


def connect(path: str) -> WorkerChannel:
    """Connect a worker to its agent. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return WorkerChannel(sock)
