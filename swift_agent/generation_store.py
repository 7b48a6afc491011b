"""The c10d store of one generation: a small server for an agent, a `dist.Store` client for its workers.

Instead of torch's TCPStore, which resolves the name of the other end of every connection, on the client and in the
only thread of the server: where DNS is slow or loses a packet, one connection stops all ranks for seconds (5 s with
glibc's defaults). Besides, both sides prove that they know a token, and `cut()` frees whoever waits on it. It must
never evaluate what it is sent: keys and values are bytes.

    server  nonce                                                         -->  client
            <--  nonce, HMAC(token, client|both nonces)
            ok, HMAC(token, server|both nonces)  -->                           then questions and answers

Frames: length (uint32), then parts, each with its own length (uint32); big-endian. The first part is the operation or
the status.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from swift_rendezvous.threads import OnFailure, only_logged, thread

log = logging.getLogger(__name__)

_MAX_FRAME_BYTES = 1 << 28
# Before the other side has proved who it is.
_MAX_HELLO_BYTES = 4096
_HELLO_TIMEOUT_S = 10.0
# How often it is looked whether a client that waits is still there.
_LOOK_S = 5.0
# An answer may hold many values; its length has 32 bits.
_MAX_ANSWER_BYTES = (1 << 32) - 1
# How much longer than the server the client waits for the answer that its time is up.
_MARGIN_S = 5.0
# At least, between two times that the same is told.
_TELL_S = 10.0
_OK, _TIMEOUT, _REFUSED = b"ok", b"timeout", b"refused"
_DEFAULT_TIMEOUT = timedelta(seconds=300)
_NONCE_BYTES = 16


def _proof(token: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    # Both nonces have a fixed length, so that no two inputs have the same text.
    return hmac.new(token, role + b"|" + server_nonce + client_nonce, hashlib.sha256).digest()


def _pack(parts: Sequence[bytes]) -> bytes:
    body = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    return struct.pack(">I", len(body)) + body


def _unpack(body: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(body):
        (size,) = struct.unpack_from(">I", body, at)
        at += 4
        if at + size > len(body):
            raise ValueError("part longer than its frame")
        parts.append(body[at : at + size])
        at += size
    return parts


class StoreServer:
    """Serves one generation from a thread of its own until `close()`; keys live in memory only."""

    def __init__(
        self, host: str = "0.0.0.0", port: int = 0, token: bytes = b"", on_failure: OnFailure = only_logged
    ) -> None:
        """Raises OSError when the port is taken, RuntimeError when no thread is left. `port` 0: any free one, see
        `self.port`. *on_failure*: see `swift_rendezvous.threads`."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=4096)
        self.port: int = listener.getsockname()[1]
        self._token = token
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, set[asyncio.Event]] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        # Tasks of those who have not proved themselves, the oldest first.
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._max_strangers = max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._thread = thread("swift-store", self._run, on_failure, listener)
        try:
            self._thread.start()
        except RuntimeError:  # no thread is left; it is tried again
            listener.close()
            self._loop.close()
            raise

    def close(self) -> None:
        """Close all connections: clients that wait get an error. May be repeated."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        connections: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            self._strangers[task] = None
            if len(self._strangers) > self._max_strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()  # strangers must not use up this agent's descriptors
            try:
                await self._converse(reader, writer)
            except (OSError, ValueError, struct.error, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass  # a client that is gone, or that is none
            finally:
                connections.discard(task)
                self._strangers.pop(task, None)
                writer.close()

        # asyncio goes on one second after an accept() that has failed, once for each place in the queue.
        told: tuple[str, float] = ("", 0.0)

        def tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            nonlocal told
            text, now_s = _told(context), loop.time()
            if text != told[0] or now_s - told[1] >= _TELL_S:
                told = (text, now_s)
                log.warning("%s", text)

        self._loop.set_exception_handler(tell)
        server = await asyncio.start_server(connected, sock=listener)
        await self._stop.wait()
        server.close()
        for task in connections:
            task.cancel()
        if connections:
            await asyncio.wait(list(connections))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _set_options(writer.get_extra_info("socket"))
        nonce = secrets.token_bytes(_NONCE_BYTES)
        writer.write(_pack([nonce]))
        # Not wait_for: before Python 3.12 it can swallow the cancellation that comes together with the result, and then
        # `close` would wait for ever.
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            hello = await _read(reader, _MAX_HELLO_BYTES)
        known = len(hello) == 2 and len(hello[0]) == _NONCE_BYTES
        if not known or not hmac.compare_digest(hello[1], _proof(self._token, b"client", nonce, hello[0])):
            writer.write(_pack([_REFUSED]))
            await writer.drain()
            return
        task = asyncio.current_task()
        assert task is not None
        self._strangers.pop(task, None)
        writer.write(_pack([_OK, _proof(self._token, b"server", nonce, hello[0])]))
        while True:
            operation, *parts = await _read(reader)
            writer.write(_pack(await self._answer(operation, parts, reader)))
            await writer.drain()

    async def _answer(self, operation: bytes, parts: list[bytes], client: asyncio.StreamReader) -> list[bytes]:
        values = self._values
        if operation == b"set":
            for key, value in zip(parts[::2], parts[1::2], strict=True):
                self._put(key, value)
            return [_OK]
        if operation == b"get":  # timeout, keys: when all are there
            if not await self._all_there(parts[1:], int(parts[0]) / 1e3, client):
                return [_TIMEOUT, *(key for key in parts[1:] if key not in values)]
            return [_OK, *(values[key] for key in parts[1:])]
        if operation == b"check":
            return [_OK, b"1" if all(key in values for key in parts) else b""]
        if operation == b"add":
            self._put(parts[0], str(int(values.get(parts[0], b"0")) + int(parts[1])).encode())
            return [_OK, values[parts[0]]]
        if operation == b"compare_set":
            key, expected, desired = parts
            if values.get(key, b"") != expected:
                return [_OK, values.get(key, expected)]
            self._put(key, desired)
            return [_OK, desired]
        if operation == b"append":
            self._put(parts[0], values.get(parts[0], b"") + parts[1])
            return [_OK]
        if operation == b"delete":
            return [_OK, b"" if values.pop(parts[0], None) is None else b"1"]
        if operation == b"count":
            return [_OK, str(len(values)).encode()]
        raise ValueError(f"unknown operation {operation!r}")

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for event in self._waiting.pop(key, ()):
            event.set()

    async def _all_there(self, keys: Sequence[bytes], timeout_s: float, client: asyncio.StreamReader) -> bool:
        """Raises ConnectionError once the client that waits is gone."""
        deadline_s = self._loop.time() + timeout_s
        for key in keys:
            while key not in self._values:
                event = asyncio.Event()
                self._waiting.setdefault(key, set()).add(event)
                try:
                    async with asyncio.timeout_at(min(deadline_s, self._loop.time() + _LOOK_S)):
                        await event.wait()
                except TimeoutError:
                    if client.at_eof() or client.exception() is not None:
                        raise ConnectionResetError("it waits for no answer any more") from None
                    if self._loop.time() >= deadline_s:
                        return False
                finally:
                    waiting = self._waiting.get(key, set())
                    waiting.discard(event)
                    if not waiting:
                        self._waiting.pop(key, None)
        return True


def _told(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"the store of a generation: {context.get('message')}" + (f" ({error})" if error else "")


def _set_options(sock: socket.socket) -> None:
    """Answers go out at once; and a client whose machine is gone is noticed within some minutes."""
    for name, value in (
        (socket.TCP_NODELAY, 1), (socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 5)
    ):  # fmt: skip
        sock.setsockopt(socket.IPPROTO_TCP, name, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def _read(reader: asyncio.StreamReader, limit: int = _MAX_FRAME_BYTES) -> list[bytes]:
    (size,) = struct.unpack(">I", await reader.readexactly(4))
    if not 0 < size <= limit:
        raise ValueError(f"frame of {size} bytes")
    return _unpack(await reader.readexactly(size))


class StoreClient(Store):
    """A connection to a `StoreServer`. One operation at a time: a thread of its own that waits needs a `clone()`.

    The Python object must outlive all that torch makes of it (PrefixStore, backends): C++ does not keep it alive.

    Operations raise dist.DistStoreError: the time is up, the connection is lost, or `cut()` was called.
    """

    def __init__(self, host: str, port: int, token: bytes = b"", timeout: timedelta = _DEFAULT_TIMEOUT) -> None:
        """Raises dist.DistStoreError when the server cannot be reached within `timeout`, refuses the token or
        does not know it."""
        super().__init__()
        self._host, self._port, self._token = host, port, token
        self._time = timeout
        self._lock = threading.Lock()
        try:
            self._socket = socket.create_connection((host, port), timeout.total_seconds())
        except OSError as error:
            raise dist.DistStoreError(f"store at {host}:{port} cannot be reached: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._introduce(timeout.total_seconds())

    @property
    def local_address(self) -> str:
        """The address of this machine on the way to the server."""
        return str(self._socket.getsockname()[0])

    def cut(self) -> None:
        """End the connection from any thread: whoever waits on it gets an error at once. May be repeated."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and give up its descriptor; not while another thread uses it (`cut` first)."""
        self.cut()
        with self._lock:
            self._socket.close()

    def clone(self, timeout: timedelta | None = None) -> StoreClient:
        return StoreClient(self._host, self._port, self._token, timeout or self._time)

    @property
    def timeout(self) -> timedelta:
        return self._time

    def set_timeout(self, timeout: timedelta) -> None:
        self._time = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._ask([b"set", key.encode(), _bytes(value)])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._ask([b"set", *(part for key, value in pairs for part in (key.encode(), _bytes(value)))])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait_for(keys, self._time)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_for(keys, self._time if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask([b"check", *(key.encode() for key in keys)]) == [b"1"]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask([b"add", key.encode(), str(amount).encode()])[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask([b"compare_set", key.encode(), _bytes(expected), _bytes(desired)])[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._ask([b"append", key.encode(), _bytes(value)])

    def delete_key(self, key: str) -> bool:
        return self._ask([b"delete", key.encode()]) == [b"1"]

    def num_keys(self) -> int:
        return int(self._ask([b"count"])[0])

    def has_extended_api(self) -> bool:
        return True

    def _wait_for(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        time_s = timeout.total_seconds()
        return self._ask([b"get", str(int(time_s * 1e3)).encode(), *(key.encode() for key in keys)], time_s)

    def _ask(self, parts: list[bytes], waiting_s: float = 0.0) -> list[bytes]:
        with self._lock:
            return self._exchange(parts, waiting_s)

    def _introduce(self, waiting_s: float) -> None:
        where = f"store at {self._host}:{self._port}"
        try:
            self._socket.settimeout(waiting_s + _MARGIN_S)
            (server_nonce,) = self._receive_frame(_MAX_HELLO_BYTES)
            if len(server_nonce) != _NONCE_BYTES:
                raise ValueError("not a store of ours")
        except (OSError, ValueError, struct.error) as error:
            self.cut()
            raise dist.DistStoreError(f"{where}: {error}") from error
        nonce = secrets.token_bytes(_NONCE_BYTES)
        hello = [nonce, _proof(self._token, b"client", server_nonce, nonce)]
        answer = self._exchange(hello, waiting_s, _MAX_HELLO_BYTES)
        expected = _proof(self._token, b"server", server_nonce, nonce)
        if len(answer) != 1 or not hmac.compare_digest(answer[0], expected):
            self.cut()
            raise dist.DistStoreError(f"{where} does not know this client's token: it is not a store of this job")

    def _exchange(self, parts: list[bytes], waiting_s: float, limit: int = _MAX_ANSWER_BYTES) -> list[bytes]:
        where = f"store at {self._host}:{self._port}"
        try:
            self._socket.settimeout(waiting_s + _MARGIN_S)
            self._socket.sendall(_pack(parts))
            status, *answer = self._receive_frame(limit)
        except (OSError, ValueError, struct.error) as error:
            # A late answer would be taken for that of the next question.
            self.cut()
            raise dist.DistStoreError(f"{where}: {error}") from error
        if status == _TIMEOUT:
            missing = ", ".join(key.decode(errors="replace") for key in answer[:5])
            raise dist.DistStoreError(f"{where}: nobody has set {missing} within {waiting_s:g} s")
        if status != _OK:
            raise dist.DistStoreError(f"{where} refuses this client's token")
        return answer

    def _receive_frame(self, limit: int) -> list[bytes]:
        (size,) = struct.unpack(">I", self._receive(4))
        if size > limit:
            raise ConnectionError(f"frame of {size} bytes")
        return _unpack(self._receive(size))

    def _receive(self, size: int) -> bytes:
        buffer = bytearray()
        while len(buffer) < size:
            piece = self._socket.recv(size - len(buffer))
            if not piece:
                raise ConnectionResetError("connection closed")
            buffer += piece
        return bytes(buffer)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self._socket.close()


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
