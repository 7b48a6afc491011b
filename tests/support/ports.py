"""Ports for servers that have to be told theirs, and may be ended and started again with it.

They lie below those that the kernel gives to whoever asks for any, or connects: one of these could be gone before the
server is there, or while it is down. Each process of pytest has a block of its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import socket
from collections.abc import Iterator
from pathlib import Path

_FIRST = 10_000
_BLOCK = 2_000
_claims: list[socket.socket] = []


def free_ports(number: int) -> list[int]:
    """TCP ports at which nobody listens, none of which this process has had lately."""
    return list(itertools.islice((port for port in _block() if _is_free(port)), number))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


@functools.cache
def _block() -> Iterator[int]:
    """The ports of the block, over and over."""
    firsts = list(range(_FIRST, _kernels_first() - _BLOCK + 1, _BLOCK))
    for first in random.sample(firsts, len(firsts)):
        claim = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):  # another process has it
            claim.bind(f"\0swift-agent-tests-{first}")  # gone with this process
            _claims.append(claim)
            return itertools.cycle(range(first, first + _BLOCK))
        claim.close()
    raise AssertionError("no block of ports is left: how many processes run tests here?")


def _kernels_first() -> int:
    found = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return found if found >= _FIRST + _BLOCK else 32_768  # its default; somebody has set it lower
