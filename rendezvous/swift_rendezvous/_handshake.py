"""How two agents prove to each other that they belong to the same job: HMAC with the token of the one that is dialled,
which only who can read the job's records knows.

    dialler  {"from", "to", "nonce", "mac": HMAC(token, hello|from|to|nonce)}  -->  dialled
             <--  HMAC(token, welcome|nonce)

Must never execute, unpickle or trust anything that comes in.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import socket
import time

from swift_rendezvous.keys import NodeRecord

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
_MAX_LINE_BYTES = 4096


def dial(node: NodeRecord, me: NodeRecord) -> tuple[socket.socket, bytes]:
    """A connection to the agent of *node*, and what has come behind its proof already. Raises OSError or ValueError."""
    sock = socket.create_connection((node.host, node.watch_port), timeout=TIMEOUT_S)
    try:
        nonce = secrets.token_hex(16)
        hello = {
            "from": me.incarnation,
            "to": node.incarnation,
            "nonce": nonce,
            "mac": _mac(node.token, "hello", me.incarnation, node.incarnation, nonce),
        }
        sock.sendall(json.dumps(hello).encode() + b"\n")
        answer, rest = _read_line(sock)
        if not _same(answer, _mac(node.token, "welcome", nonce)):
            raise OSError("it did not prove who it is")
        return sock, rest
    except (OSError, ValueError):
        sock.close()
        raise


def welcome(sock: socket.socket, me: NodeRecord) -> str | None:
    """The incarnation of who has dialled, after both proofs; None for anybody else, a mere probe included."""
    try:
        sock.settimeout(TIMEOUT_S)
        line, _ = _read_line(sock)
        if not line:  # a probe: somebody asks whether this process lives
            return None
        hello = json.loads(line)
        sender, nonce = str(hello["from"]), str(hello["nonce"])
        if not _same(str(hello["mac"]), _mac(me.token, "hello", sender, me.incarnation, nonce)):
            raise ValueError("wrong proof")
        sock.sendall(_mac(me.token, "welcome", nonce).encode() + b"\n")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.debug("refused a connection: %s", error)
        return None
    return sender


def _mac(token: str, *parts: str) -> str:
    return hmac.new(token.encode(), "|".join(parts).encode(), hashlib.sha256).hexdigest()


def _same(proof: str, expected: str) -> bool:
    # As bytes: compare_digest refuses text that is not ASCII, and *proof* may be anything.
    return hmac.compare_digest(proof.encode(), expected.encode())


def _read_line(sock: socket.socket) -> tuple[str, bytes]:
    """One line, within the handshake's time however slowly it comes, and what came with its end. Raises OSError."""
    data = b""
    deadline_s = time.monotonic() + TIMEOUT_S
    while b"\n" not in data and len(data) < _MAX_LINE_BYTES:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left_s)
        chunk = sock.recv(_MAX_LINE_BYTES)
        if not chunk:
            break
        data += chunk
    line, _, rest = data.partition(b"\n")
    return line.decode(errors="replace").strip(), rest
