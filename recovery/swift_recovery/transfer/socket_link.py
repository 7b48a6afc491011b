"""A `replica.Link` over a TCP connection of two processes' own, and how the two meet.

The listener tells the processes that may know where it listens, with a ticket. A caller without it must never get
anything, nor hold up the one that is meant. The link must never unpickle what it receives, and never wait for ever:
while the other side is slow *check* is asked, which raises when there is no reason to go on.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator
from typing import cast

import torch
from torch import Tensor

from swift_logging_store.errors import LinkLost

# How long an operation of a socket blocks before it is looked whether there is still a reason to wait.
POLL_S = 0.1

# The longest that either waits for the other to come. One that dies before is reported by its agent.
MEET_TIMEOUT_S = 600.0

HELLO_TIMEOUT_S = 10.0

# A peer whose machine is gone is noticed after some four seconds.
KEEPALIVE_IDLE_S = 1
KEEPALIVE_INTERVAL_S = 1
KEEPALIVE_PROBES = 3

# Callers that have connected and said nothing yet.
_MOST_WAITING = 64

_SIZE = struct.Struct(">Q")

_MAX_MANIFEST_BYTES = 1 << 30

# What is copied to be sent at once.
_SMALL_BYTES = 1 << 16

Check = Callable[[], None]


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


class Done:
    """Of a transfer that was not begun before it ended."""

    def wait(self) -> None: ...


class SocketLink:
    """A `swift_recovery.transfer.replica.Link` over a connected socket. *check* raises when there is no reason to go
    on; it is asked every `POLL_S` while the other side is slow. Raises `LinkLost` when the connection breaks.

    *active_at_s*: on the monotonic clock, when something was sent or received last."""

    def __init__(self, sock: socket.socket, check: Check) -> None:
        self._socket, self.check = sock, check
        self.active_at_s = time.monotonic()
        sock.settimeout(POLL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A side that only receives learns in no other way that a link, or a machine, is gone.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, tensor: Tensor) -> Done:
        self._send(_memory(tensor))
        return Done()

    def recv(self, tensor: Tensor) -> Done:
        self._receive(_memory(tensor))
        return Done()

    def send_bytes(self, data: bytes) -> None:
        head = _SIZE.pack(len(data))
        if len(data) <= _SMALL_BYTES:
            self._send(memoryview(head + data))
            return
        self._send(memoryview(head))
        self._send(memoryview(data))

    def recv_bytes(self, limit: int = _MAX_MANIFEST_BYTES) -> bytes:
        head = bytearray(_SIZE.size)
        self._receive(memoryview(head))
        (size,) = _SIZE.unpack(head)
        if size > limit:
            raise LinkLost(f"the other side of a handover announced {size} bytes")
        data = bytearray(size)
        self._receive(memoryview(data))
        return bytes(data)

    def _send(self, data: memoryview) -> None:
        while data:
            data = data[self._patiently(lambda rest=data: self._socket.send(rest)) :]  # type: ignore[misc]

    def _receive(self, data: memoryview) -> None:
        while data:
            size = self._patiently(lambda rest=data: self._socket.recv_into(rest))  # type: ignore[misc]
            if size == 0:
                raise LinkLost("the other side of a handover is gone")
            data = data[size:]

    def _patiently(self, operation: Callable[[], int]) -> int:
        while True:
            try:
                num_bytes = operation()
                self.active_at_s = time.monotonic()
                return num_bytes
            except TimeoutError:
                self.check()
            except OSError as error:
                raise LinkLost(f"the other side of a handover is gone: {error}") from None


class Listener:
    """Waits at *address*, where this machine is reached by those that reach the store, for the one process that is told
    *where*. A context manager."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family)
        self._server.settimeout(POLL_S)
        self._ticket = secrets.token_hex(16)
        self.where = json.dumps([address, self._server.getsockname()[1], self._ticket])
        """For `connected`; a secret of the processes that may read the generation's store."""

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.close()

    @contextlib.contextmanager
    def accepted(self, check: Check) -> Iterator[SocketLink]:
        """The link to that process. Raises `LinkLost` if it does not come."""
        with self._meet(check) as sock:
            yield SocketLink(sock, check)

    def visitors(self) -> Generator[socket.socket | None, None, None]:
        """All callers that were told *where*, as sockets that do not block; None now and then while none comes."""
        with _Lobby(self._server, self._ticket) as lobby:
            while True:
                yield lobby.hear()

    def _meet(self, check: Check) -> socket.socket:
        """Hear all callers at the same time: strangers that say nothing hold up no other."""
        deadline_s = time.monotonic() + MEET_TIMEOUT_S
        with _Lobby(self._server, self._ticket) as lobby:
            while time.monotonic() < deadline_s:
                found = lobby.hear()
                if found is not None:
                    return found
                check()
        raise LinkLost(f"nobody came within {MEET_TIMEOUT_S:g} s")


class _Lobby:
    """Callers of *server* that have not said *ticket* yet; a context manager, which closes them."""

    def __init__(self, server: socket.socket, ticket: str) -> None:
        self._server = server
        self._hello = _SIZE.pack(len(ticket)) + ticket.encode()
        # In the order in which they came: since when, and what they have said.
        self._waiting: dict[socket.socket, tuple[float, bytearray]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> _Lobby:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for sock in list(self._waiting):
            self._dismiss(sock)
        self._selector.close()

    def hear(self) -> socket.socket | None:
        """Wait for up to `POLL_S`; the one that knows the ticket, if it is there."""
        for key, _ in self._selector.select(POLL_S):
            if key.fileobj is self._server:
                self._admit()
            elif (sock := cast(socket.socket, key.fileobj)) not in self._waiting:
                continue  # it had to go a moment ago
            elif self._knows(sock):
                del self._waiting[sock]
                self._selector.unregister(sock)
                return sock
        for sock, (since_s, _) in list(self._waiting.items()):
            if time.monotonic() - since_s >= HELLO_TIMEOUT_S:
                self._dismiss(sock)
        return None

    def _admit(self) -> None:
        if len(self._waiting) == _MOST_WAITING:
            self._dismiss(next(iter(self._waiting)))  # one that is meant speaks at once
        try:
            sock = self._server.accept()[0]
        except OSError:  # it is gone; or no descriptor is left, and another has to go
            if self._waiting:
                self._dismiss(next(iter(self._waiting)))
            else:
                time.sleep(POLL_S)  # a new caller waits in the kernel's queue
            return
        sock.setblocking(False)
        self._waiting[sock] = time.monotonic(), bytearray()
        self._selector.register(sock, selectors.EVENT_READ)

    def _knows(self, sock: socket.socket) -> bool:
        """Takes no more of what it says than the hello. One that says something else is dismissed."""
        said = self._waiting[sock][1]
        try:
            data = sock.recv(len(self._hello) - len(said))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        said += data
        if len(said) == len(self._hello) and hmac.compare_digest(said, self._hello):
            return True
        size = _SIZE.size
        if not data or len(said) == len(self._hello) or (len(said) >= size and said[:size] != self._hello[:size]):
            self._dismiss(sock)
        return False

    def _dismiss(self, sock: socket.socket) -> None:
        del self._waiting[sock]
        self._selector.unregister(sock)
        sock.close()


@contextlib.contextmanager
def connected(where: str | bytes, who: str, check: Check) -> Iterator[SocketLink]:
    """The link to *who*, the listener there (`Listener.where`). Raises `LinkLost`."""
    address, port, ticket = json.loads(where)
    try:
        sock = socket.create_connection((address, port), timeout=10.0)
    except OSError as error:
        raise LinkLost(f"{who} cannot be reached: {error}") from None
    with sock:
        link = SocketLink(sock, check)
        link.send_bytes(ticket.encode())
        yield link
