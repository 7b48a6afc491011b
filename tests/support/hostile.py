"""Neighbours of a job who mean no good, or do not care: while it trains and recovers they connect to its ports, write
into its keys, and use up an agent's descriptors. None of this may be taken for a failure.

    scanners   one process per host, `hostile_scanner`: silent, noisy and short connections to whatever listens
    garbage    records that nobody can read, put and removed again
    shortage   an agent may open no more files, for about a second

All is drawn from a seed. `stop` undoes it. It must never touch what is not the job's.
"""

from __future__ import annotations

import contextlib
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import psutil

from swift_rendezvous.errors import RendezvousError
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig

SCANNER = Path(__file__).with_name("hostile_scanner.py")
GARBAGE: Mapping[str, bytes] = {
    "drain/x": b"garbage",
    "nodes/x": b"\xff\xfe",
    "nodes/y": b'{"v": 99}',
    "preload": b"\xff",
    "store/\u00b2": b"{}",
    "plan/" + 5000 * "9": b"{}",
    "exited/0/x": b"[" * 100_000,
    "no such kind of key": b"",
}
"""Keys below the job's prefix that no node has written, and what is put there."""
KEPT_S = (0.2, 3.0)
SHORT_S = (0.5, 1.5)
PAUSE_S = (0.5, 4.0)


ESTABLISHED = "01"


def _connections(pid: int) -> dict[str, tuple[str, str]]:
    """The ends of TCP connections in the network of process *pid*, here and there, by what its descriptor is called."""
    found = {}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == ESTABLISHED:
            found[f"socket:[{words[9]}]"] = words[1], words[2]
    return found


def _descriptors(pid: int) -> list[str]:
    names = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            names.append(str(entry.readlink()))
    return names


def num_held_by(strangers: list[int], pid: int) -> int:
    """How many connections of process *pid* these processes hold open now, on the same host. One that they have closed
    does not count: it is for *pid* to close."""
    with contextlib.suppress(OSError):  # a process has ended
        known = _connections(pid)
        theirs = {known[name][0] for stranger in strangers for name in _descriptors(stranger) if name in known}
        return sum(known[name][1] in theirs for name in _descriptors(pid) if name in known)
    return 0


class Neighbours:
    """*prefixes*: what a command on each host begins with; *agents*: pids of the agents that live now."""

    def __init__(
        self, seed: int, endpoints: str, job_id: str, prefixes: list[tuple[str, ...]], agents: Callable[[], list[int]]
    ) -> None:
        self._rng, self._agents = random.Random(f"{seed}/neighbours"), agents
        config = EtcdConfig.from_environment({}, endpoints=endpoints)
        assert config is not None
        self._store, self._prefix = EtcdStore(config), Keys(job_id).prefix
        self._prefixes = prefixes
        self._scanners: list[subprocess.Popen[str]] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=work.__name__, daemon=True) for work in (self._litter, self._starve)
        ]
        self.num_records = self.num_shortages = self.num_connections = 0

    def __enter__(self) -> Neighbours:
        for index, prefix in enumerate(self._prefixes):
            command = [*prefix, sys.executable, str(SCANNER), str(psutil.Process().pid), str(index)]
            self._scanners.append(subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._store.close()

    def stop(self) -> None:
        """All is as if nobody had been there; may be called twice."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        for scanner in self._scanners:
            # A scanner ends with its standard input, and says how often it has connected.
            output, _ = scanner.communicate(timeout=10.0)
            self.num_connections += int(output.strip() or 0)
        self._scanners.clear()

    def num_held(self, pid: int) -> int:
        """See `num_held_by`."""
        return num_held_by([scanner.pid for scanner in self._scanners], pid)

    def summary(self) -> str:
        return (
            f"strangers: {self.num_connections} connections, {self.num_records} unreadable records, "
            f"{self.num_shortages} times no descriptor was left to an agent"
        )

    def _litter(self) -> None:
        while not self._over.wait(self._rng.uniform(*PAUSE_S)):
            key = self._prefix + self._rng.choice(list(GARBAGE))
            # etcd may be away: that is another failure.
            with contextlib.suppress(RendezvousError):
                self._store.put(key, GARBAGE[key.removeprefix(self._prefix)])
                self.num_records += 1
                self._over.wait(self._rng.uniform(*KEPT_S))
            self._sweep(key)

    def _sweep(self, key: str) -> None:
        deadline_s = time.monotonic() + 60.0
        while True:
            try:
                self._store.delete(key)
                return
            except RendezvousError:
                assert time.monotonic() < deadline_s, "etcd is away for good"
                time.sleep(0.2)

    def _starve(self) -> None:
        rng = random.Random(self._rng.random())
        while not self._over.wait(rng.uniform(*PAUSE_S)):
            living = self._agents()
            if not living:
                continue
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process = psutil.Process(rng.choice(living))
                before = process.rlimit(resource.RLIMIT_NOFILE)
                process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds(), before[1]))
                self.num_shortages += 1
                self._over.wait(rng.uniform(*SHORT_S))
                process.rlimit(resource.RLIMIT_NOFILE, before)
