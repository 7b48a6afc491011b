"""What both benchmarks need: jobs of two nodes on loopback, what their workers log, the machine.

A node is an agent process with its workers. Must never measure with a clock of its own: times come from the workers'
logs and from the kill, all CLOCK_MONOTONIC of this machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch

from swift_rendezvous.codec import RecordError, decode
from swift_rendezvous.roster.keys import Keys
from swift_rendezvous.roster.records import EventRecord, ProfileRecord
from swift_rendezvous.store.etcd import EtcdStore
from swift_rendezvous.store.etcd_config import EtcdConfig

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "train_ddp.py"
NUM_NODES, NUM_WORKERS = 2, 2  # workers per node, unless a job is told otherwise

T = TypeVar("T")


class Failed(Exception):
    """A job did not do what was to be measured; the message ends with what its agents printed last."""


class Ended(NamedTuple):
    """The end of one iteration on one rank."""

    time_s: float
    pid: int
    iteration: int


class Job(ABC):
    """A job under one launcher. Nodes are started with `add_node`; `stop` (or the end of `with`) leaves nothing."""

    name: str

    def __init__(
        self, directory: Path, script_args: Iterable[str], num_spares: int = 0, num_workers: int = NUM_WORKERS,
        script: Path = SCRIPT, num_nodes: int = NUM_NODES,
    ) -> None:  # fmt: skip
        self.num_spares, self.num_workers = num_spares, num_workers
        self.num_nodes, self.world_size = num_nodes, num_nodes * num_workers
        self.directory = directory / f"{self.name}-{uuid.uuid4().hex[:8]}"
        self.directory.mkdir()
        self.weights = self.directory / "weights.pt"
        self.id = self.directory.name
        self.script_args = [str(script), "--log-to", str(self.directory), "--out", str(self.weights), *script_args]
        self.agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:
        for _ in range(self.num_nodes + self.num_spares):
            self.add_node()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @abstractmethod
    def command(self) -> list[str]:
        """What a user would type on each node."""

    def environment(self) -> dict[str, str]:
        paths = [str(ROOT / room) for room in ("", "rendezvous", "recovery", "logging_store")]
        return {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "SWIFT_NATIVE_DIR": os.environ.get("SWIFT_NATIVE_DIR", str(ROOT / ".cache" / "native")),
            "PYTHONPATH": os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH", "")])),
            "TMPDIR": str(self.directory),  # what a killed agent leaves there goes with ours
        }  # fmt: skip

    def add_node(self) -> subprocess.Popen[bytes]:
        with open(self.directory / f"agent{len(self.agents)}.log", "wb") as log:
            agent = subprocess.Popen([*self.command(), *self.script_args], env=self.environment(), stdout=log,
                                     stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        self.agents.append(agent)
        return agent

    # ---- what the workers say ----

    def log(self, rank: int) -> list[Ended]:
        """All iterations that *rank* has finished, in all its lives."""
        path = self.directory / f"rank{rank}"
        if not path.exists():
            return []
        whole = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [Ended(float(time_s), int(pid), int(iteration)) for time_s, pid, iteration in whole]

    def last(self, rank: int) -> Ended:
        return self.log(rank)[-1]

    def wait_for(self, condition: Callable[[], T | None], what: str, timeout_s: float) -> T:
        """The first true value of *condition*; raises Failed when time is over or an agent fails."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            value = condition()
            if value:
                return value
            codes = [agent.poll() for agent in self.agents]
            if any(code not in (None, 0, -9) for code in codes):
                raise Failed(f"{self.name}: an agent failed before: {what}; exit codes {codes}\n{self.tail()}")
            if time.monotonic() > deadline_s:
                raise Failed(f"{self.name}: no {what} within {timeout_s:g} s\n{self.tail()}")
            time.sleep(0.01)

    def wait_iteration(self, iteration: int, timeout_s: float = 90.0) -> None:
        """Until every rank has finished *iteration*."""
        def reached() -> bool:
            return all(self.log(rank) and self.last(rank).iteration >= iteration for rank in range(self.world_size))

        self.wait_for(reached, f"iteration {iteration}", timeout_s)

    def go(self) -> None:
        """Let the workers pass the hold at the beginning; see `train_ddp.hold`."""
        (self.directory / "go").touch()

    def wait_end(self, timeout_s: float = 90.0) -> None:
        self.wait_for(lambda: all(agent.poll() is not None for agent in self.agents), "end", timeout_s)
        if not self.weights.exists():
            raise Failed(f"{self.name}: the job ended without weights\n{self.tail()}")

    def tail(self) -> str:
        texts = [path.read_text(errors="replace")[-1500:] for path in sorted(self.directory.glob("agent*.log"))]
        return "\n---\n".join(texts)

    # ---- processes ----

    def node_of(self, rank: int) -> subprocess.Popen[bytes]:
        """The agent above the worker that is *rank* now."""
        try:
            above = {parent.pid for parent in psutil.Process(self.last(rank).pid).parents()}
            return next(agent for agent in self.agents if agent.pid in above)
        except (psutil.NoSuchProcess, StopIteration):
            raise Failed(f"{self.name}: rank {rank} is no more\n{self.tail()}") from None

    def may_be_killed(self, rank: int) -> bool:
        """Whether the job can survive the loss of that rank's node."""
        return True

    def family(self, agent: subprocess.Popen[bytes]) -> list[psutil.Process]:
        try:
            process = psutil.Process(agent.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait_ready(self) -> None:
        """Until the job is as it would be after minutes of training; nothing to do for most launchers."""
        return

    def phases(self) -> list[dict[str, float]]:
        """Seconds per phase of each recovery so far, where the launcher tells."""
        return []

    def stop(self) -> None:
        left = [process for agent in self.agents if agent.poll() is None for process in self.family(agent)]
        for agent in self.agents:
            if agent.poll() is None:
                agent.terminate()
        _, alive = psutil.wait_procs(left, timeout=10.0)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for agent in self.agents:
            agent.wait()


class Torchrun(Job):
    """Two torchrun agents with the c10d rendezvous, which the first hosts, and agents that wait in it as spares."""

    name = "torchrun"

    def __init__(
        self, directory: Path, script_args: Iterable[str], num_spares: int = 0, num_workers: int = NUM_WORKERS,
        script: Path = SCRIPT,
    ) -> None:  # fmt: skip
        super().__init__(directory, [*script_args, "--plain"], num_spares, num_workers, script)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]

    def command(self) -> list[str]:
        return [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NUM_NODES), "--nproc-per-node",
                str(self.num_workers), "--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                f"127.0.0.1:{self._port}", "--rdzv-id", self.id, "--local-addr", "127.0.0.1",
                "--rdzv-conf", f"is_host={int(not self.agents)}"]  # fmt: skip

    def may_be_killed(self, rank: int) -> bool:
        return self.node_of(rank) is not self.agents[0]  # it hosts the rendezvous: torchrun ends with it

    def environment(self) -> dict[str, str]:
        # Without it the restarted workers mostly never train again; see README.md.
        return {**super().environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class SwiftRun(Job):
    """Two nodes of swift-run, and *num_spares* spares."""

    name = "swift-run"

    def __init__(
        self, directory: Path, script_args: Iterable[str], etcd: EtcdConfig, num_spares: int = 0,
        num_workers: int = NUM_WORKERS, script: Path = SCRIPT, *, num_nodes: int = NUM_NODES,
        options: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """*options*: more of swift-run's."""
        super().__init__(directory, script_args, num_spares, num_workers, script, num_nodes)
        self._etcd, self._options = etcd, options

    def command(self) -> list[str]:
        return [sys.executable, "-m", "swift_agent.run", "--nnodes", str(self.num_nodes), "--nproc-per-node",
                str(self.num_workers), "--spares", str(self.num_spares), "--max-restarts", "100", "--rdzv-endpoint",
                self._etcd.endpoints[0], "--rdzv-id", self.id, "--node-id", f"node{len(self.agents)}",
                *self._options]  # fmt: skip

    def wait_ready(self) -> None:
        """Until every node has its standby server and warm processes: one where workers train, all on a spare."""

        def ready() -> bool:
            active = {self.node_of(rank).pid for rank in range(self.world_size)}
            living = [agent for agent in self.agents if agent.poll() is None]
            return all(
                len(self.family(agent)) >= 2 + self.num_workers + (1 if agent.pid in active else 0) for agent in living
            )

        self.wait_for(ready, "warm processes on every node", 60.0)

    def phases(self) -> list[dict[str, float]]:
        return [event.details["phases_s"] for event in self.events() if event.what == "recovered"]

    def events(self) -> list[EventRecord]:
        # A connection for each look; a store that is kept open would need a watch to stay quiet.
        with EtcdStore(self._etcd) as store:
            entries, _ = store.get_prefix(f"{Keys(self.id).prefix}events/")
        found = []
        for entry in entries:
            with contextlib.suppress(RecordError):
                found.append(decode(EventRecord, entry.value))
        return found

    def predictions(self) -> list[float]:
        """Seconds that each recovery so far should have taken."""
        return [event.details["predicted_s"] for event in self.events() if "predicted_s" in event.details]

    def measured(self) -> ProfileRecord | None:
        """What the job has measured of itself, None if it has not yet."""
        with EtcdStore(self._etcd) as store:
            value = store.get(Keys(self.id).profile)
        return None if value is None else decode(ProfileRecord, value.value)


def same_weights(first: Path, second: Path) -> bool:
    """Whether two files hold the same tensors, bit for bit."""
    one, two = (torch.load(path, weights_only=True) for path in (first, second))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(), "num_cores": os.cpu_count(), "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": platform.release(), "python": platform.python_version(), "torch": torch.__version__,
        "load_1min": round(os.getloadavg()[0], 2),
    }  # fmt: skip


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
