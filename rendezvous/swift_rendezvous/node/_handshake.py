"""How two agents prove to each other that they belong to the same job: HMAC with the job's heartbeat key (`JobKey`)
over what both say, fresh nonces of both included, so that nothing that was recorded is of use a second time.

    dialled  {"nonce"}                                                            -->  dialler
             <--  {"from", "to", "nonce", "mac": HMAC(key, hello|from|to|both nonces)}
             {"mac": HMAC(key, welcome|from|to|both nonces)}                      -->

The dialler proves itself first: a stranger that finds the port gets no proof from it to test guesses of a secret with.
Must never execute, unpickle or trust anything that comes in.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from typing import Any

from swift_rendezvous.roster.records import NodeRecord

TIMEOUT_S = 2.0
_MAX_LINE_BYTES = 4096


def dial(node: NodeRecord, me: NodeRecord, key: bytes) -> tuple[socket.socket, bytes]:
    """A connection to the agent of *node*, and what has come behind its proof already. Raises OSError or ValueError."""
    sock = socket.create_connection((node.host, node.watch_port), timeout=TIMEOUT_S)
    try:
        lines = _Lines(sock)
        nonce = secrets.token_hex(16)
        said = (me.incarnation, node.incarnation, nonce, _text(lines.read(), "nonce"))
        hello = {"from": me.incarnation, "to": node.incarnation, "nonce": nonce, "mac": _mac(key, "hello", *said)}
        _send(sock, hello)
        if not _same(_text(lines.read(), "mac"), _mac(key, "welcome", *said)):
            raise OSError("it did not prove who it is")
        return sock, lines.rest
    except (OSError, ValueError):
        sock.close()
        raise


class Visitor:
    """A caller of which nothing is known yet. Never blocks. *deadline_s*: monotonic; it has proved itself by then, or
    is sent away."""

    def __init__(self, sock: socket.socket, me: NodeRecord, key: bytes) -> None:
        """Greets it. Raises OSError if it has gone."""
        self.sock = sock
        self.deadline_s = time.monotonic() + TIMEOUT_S
        self._me, self._key = me, key
        self._nonce = secrets.token_hex(16)
        self._heard = b""
        sock.setblocking(False)
        _send(sock, {"nonce": self._nonce})  # fits into the buffer of a new connection

    def hear(self) -> str | None:
        """Its incarnation, after both proofs; None: there is more to come. Raises OSError or ValueError for any
        other caller, a mere probe included."""
        chunk = self.sock.recv(_MAX_LINE_BYTES)
        if not chunk:  # a probe: a peer asks whether this process lives
            raise ConnectionResetError("it has said nothing")
        self._heard += chunk
        if b"\n" not in self._heard and len(self._heard) < _MAX_LINE_BYTES:
            return None
        line = self._heard.partition(b"\n")[0].decode(errors="replace").strip()
        sender = _text(line, "from")
        said = (sender, self._me.incarnation, _text(line, "nonce"), self._nonce)
        if not _same(_text(line, "mac"), _mac(self._key, "hello", *said)):
            raise ValueError("wrong proof")
        _send(self.sock, {"mac": _mac(self._key, "welcome", *said)})
        return sender


def _send(sock: socket.socket, message: dict[str, str]) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")


def _text(line: str, name: str) -> str:
    """One field of a message. Raises OSError if the other side has said nothing, ValueError if it is no message."""
    if not line:
        raise OSError("it did not prove who it is")
    try:
        message: Any = json.loads(line)
    except RecursionError:
        raise ValueError("not a message of an agent") from None
    value = message.get(name) if isinstance(message, dict) else None
    if not isinstance(value, str):
        raise ValueError("not a message of an agent")
    return value


def _mac(key: bytes, *parts: str) -> str:
    # As a list: no two different lists have the same text, whatever stands in the parts.
    return hmac.new(key, json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def _same(proof: str, expected: str) -> bool:
    # As bytes: compare_digest refuses text that is not ASCII, and *proof* may be anything.
    return hmac.compare_digest(proof.encode(errors="replace"), expected.encode())


class _Lines:
    """Reads lines, all of them within the handshake's time however slowly they come. *rest*: what came behind them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._deadline_s = time.monotonic() + TIMEOUT_S
        self.rest = b""
        sock.settimeout(TIMEOUT_S)

    def read(self) -> str:
        """The next line; what there is of it at the end of the stream. Raises OSError."""
        while b"\n" not in self.rest and len(self.rest) < _MAX_LINE_BYTES:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the handshake took too long")
            self._sock.settimeout(left_s)
            chunk = self._sock.recv(_MAX_LINE_BYTES)
            if not chunk:
                break
            self.rest += chunk
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode(errors="replace").strip()
