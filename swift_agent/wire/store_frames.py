"""Frames of the c10d store of a generation, and the proof that both ends know its token.

    server  nonce                                                         -->  client
            <--  nonce, HMAC(token, client|both nonces)
            ok, HMAC(token, server|both nonces)  -->                           then questions and answers

Frames: length (uint32), then parts, each with its own length (uint32); big-endian. The first part is the operation or
the status. It must never evaluate what it reads (parts are bytes), never take a frame that is longer than its reader
allows, and never send the token itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import struct
from collections.abc import Sequence
from typing import Any

_MAX_FRAME_BYTES = 1 << 28

# Before the other side has proved that it knows the token.
_MAX_HELLO_BYTES = 4096

_HELLO_TIMEOUT_S = 10.0

# An answer may hold many values; its length has 32 bits.
_MAX_ANSWER_BYTES = (1 << 32) - 1

_OK, _TIMEOUT, _REFUSED = b"ok", b"timeout", b"refused"

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


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
