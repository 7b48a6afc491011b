"""What a process has open, but for what strangers hold open: a leak is told from a port scanner."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.support.hostile import num_held_by

STRANGER = """
import socket, sys
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(3)]
print("there", flush=True)
sys.stdin.readline()
held.pop().close()
print("one less", flush=True)
sys.stdin.readline()
"""


def test_connections_that_strangers_hold_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-c", STRANGER, str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
            assert stranger.stdout is not None and stranger.stdin is not None
            assert stranger.stdout.readline() == "there\n"
            friend = socket.create_connection(("127.0.0.1", port))
            accepted = [server.accept()[0] for _ in range(4)]
            assert num_held_by([stranger.pid], os.getpid()) == 3
            stranger.stdin.write("\n")
            stranger.stdin.flush()
            assert stranger.stdout.readline() == "one less\n"
            assert num_held_by([stranger.pid], os.getpid()) == 2  # the third is left open by this process
            assert num_held_by([], os.getpid()) == 0
            stranger.stdin.close()
        for one in (friend, *accepted):
            one.close()
