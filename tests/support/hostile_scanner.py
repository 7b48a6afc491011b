"""`hostile_scanner.py ROOT SEED`: connects to whatever the descendants of process ROOT listen at on this host.

Each new port gets a silent connection at once, as a port scanner makes it; later some are closed at once, some get
noise, some stay open and silent. Bounded: 20 a second, 60 open at a time, ports of etcd are left alone. Ends with its
standard input, and prints how often it has connected.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import select
import socket
import sys
import time
from pathlib import Path

import psutil

LISTENS = "0A"
LOOK_S = 0.05
MOST_OPEN = 60
NOISE = bytes(range(256)) * 16


def listening() -> dict[tuple[str, int], int]:
    """(address, port) -> inode, in this network namespace."""
    found = {}
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == LISTENS:
            address, port = words[1].split(":")
            packed = int(address, 16).to_bytes(4, sys.byteorder)
            found[str(ipaddress.IPv4Address(packed)), int(port, 16)] = int(words[9])
    return found


class Ports:
    """Of the descendants of process *root*, but for this process and etcd: who else listens on this host, as another
    test that runs beside, is left alone."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._pids: list[int] = []
        self._is_ours: dict[int, bool] = {}  # by inode

    def now(self) -> dict[tuple[str, int], int]:
        """(address, port) -> inode."""
        ports = listening()
        fresh = set(ports.values()) - set(self._is_ours)
        # To list all processes takes longer than a new port stays one.
        ours = self._inodes() if fresh else set()
        if fresh - ours:
            self._pids = self._descendants()
            ours = self._inodes()
        self._is_ours.update({inode: inode in ours for inode in fresh})
        return {where: inode for where, inode in ports.items() if self._is_ours[inode]}

    def _inodes(self) -> set[int]:
        found: set[int] = set()
        for pid in self._pids:
            with contextlib.suppress(OSError):
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        target = str(file.readlink())
                        if target.startswith("socket:["):
                            found.add(int(target[8:-1]))
        return found

    def _descendants(self) -> list[int]:
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._root).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.pid != psutil.Process().pid and "etcd" not in process.name():
                        found.append(process.pid)
        return found


def main() -> None:
    root, rng = int(sys.argv[1]), random.Random(sys.argv[2])
    ports = Ports(root)
    seen: set[int] = set()
    held: list[socket.socket] = []
    num = 0
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        targets = list(ports.now().items())
        if not targets:
            continue
        new = [target for target in targets if target[1] not in seen]
        where, inode = new[0] if new else rng.choice(targets)
        seen.add(inode)
        with contextlib.suppress(OSError):
            stranger = socket.create_connection(where if where[0] != "0.0.0.0" else ("127.0.0.1", where[1]), 0.2)
            num += 1
            what = "silent" if new else rng.choice(("silent", "silent", "noisy", "short"))
            if what == "noisy":
                stranger.sendall(NOISE[: rng.randrange(1, len(NOISE))])
            if what == "short":
                stranger.close()
            else:
                held.append(stranger)
        while len(held) > MOST_OPEN or (held and rng.random() < 0.1):
            held.pop(rng.randrange(len(held))).close()
        time.sleep(0)
    print(num)


if __name__ == "__main__":
    main()
