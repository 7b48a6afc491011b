"""`--nnodes MIN:MAX` with real agents: a script that knows nothing of it trains in groups that grow and shrink.

The same steps are gone through by swift-run and by a stock torchrun with c10d, and must give the same groups.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.etcd_cluster import wait_for
from tests.support.job import SOURCE_ROOTS

LAST_CALL_S = 2

SCRIPT = """
import json, os, pathlib, time
import torch
import torch.distributed as dist

out = pathlib.Path(os.environ["OUT"])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
rounds = 0
while True:
    flag = torch.tensor([1.0, float((out / "stop").exists())])
    dist.all_reduce(flag)
    assert flag[0] == world
    rounds += 1
    if rounds == 3:  # the group works
        seen = {"node": os.environ["NODE"], "rank": rank, "world": world, "pid": os.getpid(),
                "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"]}
        path = out / f"{os.getpid()}.part"
        path.write_text(json.dumps(seen))
        path.rename(path.with_suffix(".json"))  # nobody reads half of it
    if rounds >= 3 and flag[1] > 0:
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""

TRACKED = """
import swift_agent as swift
swift.init()
"""


@dataclass
class Nodes:
    """Agents of one job of a range, each a node of its own on loopback, with one worker."""

    directory: Path
    command: list[str]
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, node: str) -> None:
        drop = ("PET_", "TORCH", "RANK", "WORLD_SIZE", "MASTER_", "SWIFT_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
        environment = {
            **kept, "PYTHONPATH": os.pathsep.join(SOURCE_ROOTS), "OUT": str(self.directory), "NODE": node,
            "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        with open(self.directory / f"{node}.log", "wb") as log:
            self.agents[node] = subprocess.Popen(
                [sys.executable, *self.command], env=environment, stdout=log, stderr=log, cwd=self.directory
            )

    def kill(self, node: str) -> None:
        """As a machine that is gone: the agent first, then all that it has started."""
        agent = self.agents.pop(node)
        try:
            family = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            if process.is_running():
                process.kill()
        agent.wait()

    def group(self) -> dict[str, int]:
        """Node -> rank of the latest group whose members all work, {} when there is none."""
        seen: list[dict[str, Any]] = [json.loads(path.read_text()) for path in self.directory.glob("*.json")]
        alive = [one for one in seen if _is_alive(one["pid"])]
        nodes = {one["node"]: one["rank"] for one in alive}
        return nodes if alive and {one["world"] for one in alive} == {len(alive)} else {}

    def wait_for_group(self, *nodes: str) -> None:
        def formed() -> bool:
            assert all(agent.poll() is None for agent in self.agents.values()), self.text()
            group = self.group()
            return group.keys() == set(nodes) and sorted(group.values()) == [*range(len(nodes))]

        try:
            wait_for(formed, 90, f"a group of {nodes}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None

    def worlds(self) -> set[int]:
        return {json.loads(path.read_text())["world"] for path in self.directory.glob("*.json")}

    def finish(self) -> None:
        (self.directory / "stop").touch()
        for agent in self.agents.values():
            assert agent.wait(60) == 0, self.text()

    def text(self) -> str:
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}" for log in logs)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def nodes(tmp_path: Path, etcd: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(launcher: str, script: str = SCRIPT, sizes: str = "2:3") -> Nodes:
        (tmp_path / "train.py").write_text(script)
        conf = f"join_timeout=120,last_call_timeout={LAST_CALL_S}"
        if launcher == "swift-run":
            where = ["-m", "swift_agent.run", "--rdzv-endpoint", etcd]
        else:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
            where = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
            conf += ",keep_alive_interval=1,keep_alive_max_attempt=3"
        command = [
            *where, "--rdzv-id", request.node.name, "--rdzv-conf", conf, "--nnodes", sizes, "--nproc-per-node", "1",
            "--local-addr", "127.0.0.1", "--max-restarts", "5", "--monitor-interval", "0.2", str(tmp_path / "train.py"),
        ]  # fmt: skip
        made.append(Nodes(tmp_path, command))
        return made[-1]

    yield make
    for job in made:
        for node in list(job.agents):
            job.kill(node)


@pytest.mark.parametrize("launcher", ["swift-run", "torchrun"])
def test_the_group_grows_and_shrinks_but_never_under_the_least(nodes: Callable[..., Nodes], launcher: str) -> None:
    """Node a stays: with c10d it has the store. What is asserted of one launcher is asserted of the other."""
    job = nodes(launcher)
    job.start("a")
    time.sleep(LAST_CALL_S + 1)
    assert not job.group(), "one node is too few"
    job.start("b")
    job.wait_for_group("a", "b")
    job.start("c")
    job.wait_for_group("a", "b", "c")
    job.kill("c")
    job.wait_for_group("a", "b")
    job.kill("b")
    wait_for(lambda: not job.group(), 60, "nobody trains alone")
    time.sleep(LAST_CALL_S + 1)
    assert not job.group() and job.agents["a"].poll() is None, job.text()
    job.start("d")
    job.wait_for_group("a", "d")
    job.finish()
    assert job.worlds() == {2, 3}, job.text()


def test_it_begins_at_once_when_all_are_here_and_outlives_the_coordinator(nodes: Callable[..., Nodes]) -> None:
    """Node a has rank 0, both stores and is the coordinator; the spare beyond MAX takes its place without a wait."""
    job = nodes("swift-run")
    for node in "abcd":
        job.start(node)
        wait_for(lambda node=node: "joined job" in (job.directory / f"{node}.log").read_text(), 60, node)  # type: ignore[misc]
    job.wait_for_group("a", "b", "c")
    job.kill("a")
    job.wait_for_group("b", "c", "d")
    job.finish()
    assert job.worlds() == {3}, job.text()


def test_a_script_that_is_recovered_in_place_is_told_what_to_type(nodes: Callable[..., Nodes]) -> None:
    job = nodes("swift-run", TRACKED)
    job.command[job.command.index("--max-restarts") + 1] = "0"
    for node in "ab":
        job.start(node)
    assert [job.agents[node].wait(90) for node in "ab"] == [1, 1], job.text()
    assert "--nnodes 2:3: a job that is recovered in place keeps its size. Type --nnodes 2 --spares 1" in job.text()
