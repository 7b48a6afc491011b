"""Drives real agents for the fault tests: starts them, waits for their end, and says what became of every rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from swift_agent.wire.injected import Fault
from tests.support.agent_forks import Fork, ForkServer
from tests.support.injected import Injected
from tests.support.network import Host

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "fault_train.py"
SOURCE_ROOTS = [str(ROOT / part) for part in (".", "rendezvous", "recovery", "logging_store")]


@dataclass
class Outcome:
    """*results*: rank -> what it left; *pids*: rank -> process ids, oldest first; *output*: node -> text of its
    agent.
    """

    exit_codes: dict[str, int]
    results: dict[int, dict[str, Any]]
    pids: dict[int, list[int]]
    output: dict[str, str]
    fired: set[int]
    seconds: float
    directory: Path = field(default_factory=Path)

    @property
    def hashes(self) -> set[str]:
        return {result["hash"] for result in self.results.values()}

    def text(self) -> str:
        return "\n".join(f"--- {node}\n{text}" for node, text in self.output.items())


@dataclass
class Agents:
    """Agents of one job, each a process of its own on this machine."""

    directory: Path
    endpoint: str | None
    num_nodes: int = 2
    num_workers: int = 2
    max_restarts: int | None = 3
    """None: the option is not given."""
    job_id: str = "faults"
    options: tuple[str, ...] = ()
    orders: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    script: Path = SCRIPT
    script_args: tuple[str, ...] = ()
    hosts: dict[str, Host] = field(default_factory=dict)
    """node -> the network namespace in which it runs, if it is one of its own."""
    start_method: str = "forkserver"
    """It costs one import of torch per node instead of one per worker; the default of the product is `spawn`. With
    `spawn` agents are processes of their own from the start, too, not forks."""
    forks: ForkServer | None = None
    program: tuple[str, ...] = ("-m", "swift_agent.run")
    node_options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """node -> what it has in place of the *options* of all."""
    running: dict[str, subprocess.Popen[bytes] | Fork] = field(default_factory=dict)

    def start(self, node_id: str) -> subprocess.Popen[bytes] | Fork:
        where = ["--rdzv-endpoint", self.endpoint, "--rdzv-id", self.job_id] if self.endpoint else ["--standalone"]
        restarts = () if self.max_restarts is None else ("--max-restarts", str(self.max_restarts))
        program = [
            *self.program, "--nnodes", str(self.num_nodes), "--nproc-per-node", str(self.num_workers), *restarts,
            "--node-id", node_id, *where, *self.options,
            *self.node_options.get(node_id, ()), str(self.script), *self.script_args,
        ]  # fmt: skip
        orders = {"dir": str(self.directory), **self.orders}
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS), "OMP_NUM_THREADS": "1",
            "FAULT_ORDERS": json.dumps(orders), "PYTHONWARNINGS": "ignore", "PET_START_METHOD": self.start_method,
            **self.environment,
        }  # fmt: skip
        path = self.directory / f"agent.{node_id}.log"
        if path.exists():  # of an earlier life of this node
            path.rename(path.with_suffix(f".{len(list(self.directory.glob(f'agent.{node_id}.*.log')))}.log"))
        host = self.hosts.get(node_id)
        with open(path, "wb") as log:
            if self.forks is not None and self.start_method != "spawn":
                namespace = host.name if host else ""
                self.running[node_id] = self.forks.start(
                    program, environment, self.directory, log.fileno(), namespace=namespace
                )
            else:
                prefix = host.prefix if host else ()
                self.running[node_id] = subprocess.Popen(
                    [*prefix, sys.executable, *program], env=environment, stdout=log, stderr=log, cwd=self.directory
                )
        return self.running[node_id]

    def run(self, nodes: Iterable[str] = ("a", "b"), injected: Sequence[Fault] = ()) -> Outcome:
        """From the start to the end; asserts that all faults of the orders have fired, and that those which are
        *injected* have struck.
        """
        if injected:
            self.orders = {**self.orders, "held": True}
            self.options += ("--allow-injection",)
        for node in nodes:
            self.start(node)
        ordered = Injected(self, injected) if injected else None
        outcome = self.wait()
        if ordered is not None:
            ordered.assert_struck(outcome)
        assert outcome.fired == set(range(len(self.orders.get("faults", ())))), outcome.text()
        return outcome

    def hurry(self) -> None:
        """The script makes its other iterations without pauses."""
        (self.directory / "hurry").touch()

    def kill_node(self, node_id: str) -> None:
        """The agent first: it must not see its workers die."""
        agent = psutil.Process(self.running[node_id].pid)
        family = agent.children(recursive=True)
        agent.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def wait(self, timeout_s: float = 90.0) -> Outcome:
        """Wait for all agents; what is still there at the deadline is killed, with all its children, and fails the
        test.
        """
        began_s = time.monotonic()
        hung = []
        for node_id, process in self.running.items():
            try:
                process.wait(max(0.1, timeout_s - (time.monotonic() - began_s)))
            except subprocess.TimeoutExpired:
                hung.append(node_id)
        outcome = self.outcome(time.monotonic() - began_s)
        self.kill_all()
        assert not hung, f"agents {hung} did not end within {timeout_s} s\n{outcome.text()}"
        return outcome

    def outcome(self, seconds: float) -> Outcome:
        directory = self.directory
        return Outcome(
            exit_codes={node: process.poll() for node, process in self.running.items()},  # type: ignore[misc]
            results={int(p.name.split(".")[1]): json.loads(p.read_text()) for p in directory.glob("result.*.json")},
            pids={int(p.suffix[1:]): [int(line) for line in p.read_text().split()] for p in directory.glob("pids.*")},
            output={node: (directory / f"agent.{node}.log").read_text(errors="replace") for node in self.running},
            fired={int(p.suffix[1:]) for p in directory.glob("fired.*")},
            seconds=seconds,
            directory=directory,
        )

    def kill_all(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                try:
                    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                except psutil.NoSuchProcess:
                    continue
                for member in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.send_signal(signal.SIGKILL)
                process.wait()
