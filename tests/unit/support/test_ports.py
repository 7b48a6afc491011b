"""Ports of the servers that tests start."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests.support import ports
from tests.support.ports import free_ports


def test_nobody_else_gets_them() -> None:
    """Neither another process of tests, nor who lets the kernel choose."""
    code = "from tests.support.ports import free_ports; print(*free_ports(1000))"
    root = Path(__file__).parents[3]
    theirs = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    others, own = set(map(int, theirs.stdout.split())), set(free_ports(1000))
    assert len(others) == len(own) == 1000 and not others & own, theirs.stderr
    assert max(others | own) < ports._kernels_first()


def test_they_are_free() -> None:
    (first,) = free_ports(1)
    with socket.create_server(("127.0.0.1", first)):
        assert first not in free_ports(2500)  # more than there are: they come again
    assert first in free_ports(2500)
