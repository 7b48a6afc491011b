"""The server of the c10d store of one generation, in an agent; `store_client` says why it is not torch's.

What it holds ends with it. It must never serve a client that has not proved to know the token, never let such strangers
use up the agent's descriptors, never resolve the name of a client, and never leave a connection open when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import resource
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import Any

from swift_agent.wire.store_frames import (
    _HELLO_TIMEOUT_S,
    _MAX_HELLO_BYTES,
    _NONCE_BYTES,
    _OK,
    _REFUSED,
    _TIMEOUT,
    _pack,
    _proof,
    _read,
    _set_options,
)
from swift_rendezvous.threads import OnFailure, only_logged, thread

log = logging.getLogger(__name__)

# How often it is looked whether a client that waits is still there.
_LOOK_S = 5.0

# At least, between two times that the same is told.
_TELL_S = 10.0


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
        # Tasks of clients that have not proved themselves, the oldest first.
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

        # A plain function, which is called as soon as the connection is made. A task that is cancelled before its
        # first line would leave it open.
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._stop.is_set():
                return writer.transport.abort()
            task = self._loop.create_task(self._serve_one(reader, writer))
            task.add_done_callback(lambda task: left(task, writer))
            connections.add(task)
            self._strangers[task] = None
            if len(self._strangers) > self._max_strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()  # strangers must not use up this agent's descriptors

        def left(task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
            connections.discard(task)
            self._strangers.pop(task, None)
            writer.transport.abort()  # close() would wait until the client has taken all that was sent to it

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
        # Not yet close(): asyncio would forget, open, what it has accepted and not made a connection of.
        self._loop.remove_reader(listener)
        for task in connections:
            task.cancel()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        server.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # It is gone, or it is none of ours.
        with contextlib.suppress(OSError, ValueError, struct.error, asyncio.IncompleteReadError):
            await self._converse(reader, writer)

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
