"""The client of the c10d store of one generation: a `dist.Store` for its workers; `store_server` is the server.

Instead of torch's TCPStore, which resolves the name of the other end of every connection, on the client and in the
only thread of the server: where DNS is slow or loses a packet, one connection stops all ranks for seconds (5 s with
glibc's defaults). Besides, both sides prove that they know a token (see `store_frames`), and `cut()` frees a
thread that waits on it. It must never evaluate what it is sent: keys and values are bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from swift_agent.wire.store_frames import (
    _MAX_ANSWER_BYTES,
    _MAX_HELLO_BYTES,
    _NONCE_BYTES,
    _OK,
    _TIMEOUT,
    _bytes,
    _pack,
    _proof,
    _unpack,
)

# How much longer than the server the client waits for the answer that its time is up.
_MARGIN_S = 5.0
_DEFAULT_TIMEOUT = timedelta(seconds=300)


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
        """End the connection from any thread: one that waits on it gets an error at once. May be repeated."""
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


